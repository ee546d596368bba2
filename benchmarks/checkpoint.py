"""Checkpoints beside plain writing, torch.save and torch.distributed.checkpoint: `python benchmarks/checkpoint.py
--preset 124M --folder runs/bench`.

All contenders save the same tensors (fp32 weights and two moments of every parameter) of one rank into the same folder
and flush them to the disk; they take turns, so drift of the machine hits all alike. Reported are medians, and their
ratio to the median of writing the same number of bytes from memory with one fsync. Reading is from the page cache,
loading is into tensors that exist. Ours loads only after it has verified every byte, which the others cannot; `verify`
is that alone.

The second table is the step time of a run that saves every --interval steps over that of one that never does, in turns
of --interval steps. All of a save is counted: the copy, the disturbance, and the wait for what is not written in time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from data.storage import crc32_file  # noqa: E402
from megatron.checkpoint.verify import verify_tag  # noqa: E402
from megatron.config.tree import PRESETS, build_config  # noqa: E402
from megatron.train import build  # noqa: E402
from megatron.train.processor import keep_freed_memory  # noqa: E402
from megatron.zero.api.engine import Engine  # noqa: E402
from mpu.groups import Groups  # noqa: E402

CHUNK = 8 << 20
TAG = "global_step0"


def make_engine(preset: str, device: torch.device, batch: int) -> Engine:
    values = {**PRESETS[preset], "batch_size": batch, "global_batch_size": batch, "bf16": device.type == "cuda"}
    config = build_config({"vocab_size": 50257, **values})
    return build.engine(config, build.model(config, Groups()), Groups(), device)


def tensors_of(engine: Engine) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, by name: views of the engine's own state."""
    return {f"{kind}/{slot.name}": bucket.master_state.view(kind)[slot.offset:slot.end]
            for bucket in engine.core.all_buckets for kind in bucket.master_state.kinds for slot in bucket.layout.slots}


class Contenders:
    """One folder each, written from scratch every time."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder, self.state = engine, folder, tensors_of(engine)
        self.nbytes = sum(tensor.nbytes for tensor in self.state.values())
        self.noise = memoryview(os.urandom(CHUNK))

    def write(self) -> None:
        with open(self.folder / "raw", "wb", buffering=0) as file:
            for start in range(0, self.nbytes, CHUNK):
                file.write(self.noise[:min(CHUNK, self.nbytes - start)])
            os.fsync(file.fileno())

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder / "ours", TAG)

    def stall(self) -> None:
        self.engine.save_checkpoint(self.folder / "ours", TAG, in_background=True)

    def finish(self) -> None:
        self.engine.finish_save()

    def verify(self) -> None:
        verify_tag(self.folder / "ours", TAG)

    def load(self) -> None:
        self.engine.load_checkpoint(self.folder / "ours", TAG)

    def torch_save(self) -> None:
        with open(self.folder / "torch.pt", "wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        for key, value in torch.load(self.folder / "torch.pt", weights_only=True).items():
            self.state[key].copy_(value)

    def dcp_save(self) -> None:
        dcp.save(self.state, checkpoint_id=self.folder / "dcp", no_dist=True)

    def dcp_load(self) -> None:
        dcp.load(self.state, checkpoint_id=self.folder / "dcp", no_dist=True)


def clear(folder: Path) -> None:
    """No measured save pays for deleting what was there before."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


def read(folder: Path) -> None:
    """Bring the files into the page cache: not every contender leaves them there."""
    for path in folder.rglob("*"):
        if path.is_file():
            crc32_file(path)


def clock(action: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def io_table(engine: Engine, folder: Path, rounds: int) -> None:
    contenders = Contenders(engine, folder)
    # A turn of each: what it leaves is read by the next.
    turns = [("raw write", ["write"]), ("ours", ["save", "verify", "load"]), ("ours, background", ["stall", "finish"]),
             ("torch.save", ["torch_save", "torch_load"]), ("torch dcp", ["dcp_save", "dcp_load"])]
    seconds: dict[tuple[str, str], list[float]] = {}
    for round_ in range(rounds + 1):  # the first one warms up
        for name, methods in turns:
            clear(folder)
            for index, method in enumerate(methods):
                if index == 1:
                    read(folder)
                taken = clock(getattr(contenders, method), engine.device)
                if round_:
                    seconds.setdefault((name, method), []).append(taken)
    base = statistics.median(seconds["raw write", "write"])
    print(f"{contenders.nbytes / 1e6:.0f} MB, {rounds} rounds on {engine.device}")
    print(f"{'':18s}{'':12s}{'seconds':>9s}{'GB/s':>8s}{'ratio':>8s}")
    for (name, method), taken in seconds.items():
        median = statistics.median(taken)
        print(f"{name:18s}{method:12s}{median:9.3f}{contenders.nbytes / median / 1e9:8.2f}{median / base:8.2f}")


def step_table(engine: Engine, folder: Path, batch: int, seq: int, interval: int, rounds: int) -> None:
    rows = torch.randint(0, 50257, (batch, seq + 1), device=engine.device)

    def turn(save: bool | None) -> None:
        for step in range(interval):
            loss = engine(rows[:, :-1], rows[:, 1:])
            engine.backward(loss)
            engine.step()
            if step == 0 and save is not None:
                engine.save_checkpoint(folder, in_background=save)
        engine.finish_save()  # late writing is charged to the turn that began it

    modes = {"never saves": None, "in background": True, "waits for saves": False}
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    for round_ in range(rounds + 1):
        for name, save in modes.items():
            clear(folder)
            taken = clock(lambda: turn(save), engine.device)
            if round_:
                seconds[name].append(taken / interval)
    base = statistics.median(seconds["never saves"])
    print(f"\nbatch {batch} x {seq}, a save every {interval} steps\n{'':18s}{'ms/step':>9s}{'ratio':>8s}")
    for name, taken in seconds.items():
        print(f"{name:18s}{statistics.median(taken) * 1e3:9.1f}{statistics.median(taken) / base:8.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="124M")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; its content is deleted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=int, default=10, help="steps between saves")
    parser.add_argument("--step-rounds", type=int, default=3, help="0 leaves the second table out")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f"--folder {args.folder} is not empty: its content would be deleted; name a new one")
    device = torch.device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # dcp, about what no_dist asked for
    engine = make_engine(args.preset, device, args.batch)
    io_table(engine, args.folder, args.rounds)
    if args.step_rounds:
        step_table(engine, args.folder, args.batch, args.seq, args.interval, args.step_rounds)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
