"""What it costs to look out for faults: start-up, steps and saves with it and without it, side by side.

    python benchmarks/vigilance.py --folder runs/bench

    start-up   a job of two ranks with and without the comparison of what they were told, and of their code
               (megatron/distributed/preflight.py)
    steps      with and without each rank saying where it is (megatron/distributed/rank_status.py), of a tiny and of a
               14M model, on one rank and on two
    settings   what the settings of a step cost the host: their texts and digest
               (megatron/distributed/step_consistency.py), for 2 and 24 param groups, and the copy that takes it to
               the device; and what two ranks compare in a save
    saves      of a 124M state (1.5 GB) with and without what says which checkpoint a file is of (decision 022)

What is left out is left out by patches of this script, in processes of its own; the trainer has no such switch. Both
kinds take turns, the first one changing from pair to pair; reported are minima, medians, the ratio of the minima and
the median of the ratios of pairs. Both hold the noise of the machine, which is larger than these costs. So the last
column has what the work takes by itself, timed or counted apart, as a share of the minimum without it.

Takes some three minutes, 4 GB of memory and 3 GB below --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

MODELS = {"tiny": dict(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=257),
          "14M": dict(num_layers=6, hidden_size=384, num_attention_heads=6, vocab_size=8192)}
SEQ = {"tiny": 64, "14M": 128}
JOB = ("--preset tiny --mock-data --tokenizer-type ByteLevelTokenizer --train-iters 1 --eval-interval 0 "
       "--num-workers 0 --sample-tokens 0 --log-interval 0").split()


# ---- two kinds in turn ----------------------------------------------------------------------------------------------


def in_turns(with_it: Callable[[], float], without: Callable[[], float], pairs: int) -> list[tuple[float, float]]:
    """Seconds of both kinds; the first pair warms up."""
    found = []
    for number in range(pairs + 1):
        if number % 2:
            found.append((with_it(), without()))
        else:
            later = without()
            found.append((with_it(), later))
    return found[1:]


def row(what: str, pairs: list[tuple[float, float]], alone: float) -> str:
    """`alone`: seconds of the work by itself."""
    left, right = zip(*pairs, strict=True)
    between = statistics.median(a / b - 1 for a, b in pairs)
    return (f"| {what} | {1e3 * min(left):.1f} | {1e3 * min(right):.1f} | {min(left) / min(right) - 1:+.2%} | "
            f"{1e3 * statistics.median(left):.1f} | {1e3 * statistics.median(right):.1f} | {between:+.2%} | "
            f"{1e3 * alone:.3f} | {alone / min(right):.3%} |")


def launched(ranks: int, *words: object) -> str:
    """A job of this script's; what its rank 0 printed."""
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(ranks), __file__,
                           *map(str, words)], cwd=FOLDER.parent, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {done.stderr.strip()}")
    return done.stdout


# ---- start-up -------------------------------------------------------------------------------------------------------


def start_up(pairs: int) -> str:
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note"

        def job(kind: str) -> float:
            began = time.perf_counter()
            launched(2, "--child", "start-up", kind, note)
            return time.perf_counter() - began

        def with_it() -> float:
            taken = job("with")
            alone.append(float(note.read_text()))
            return taken

        found = in_turns(with_it, lambda: job("without"), pairs)
    return row("start-up, 2 ranks: ranks compare", found, min(alone))


def start_up_child(kind: str, note: str) -> int:
    """A job as ever; with what it compares, rank 0 notes what that took once all ranks were there."""
    import pretrain_gpt2
    from megatron.distributed import process_group

    code_digest, check_ranks_match = process_group.code_digest, process_group.check_ranks_match
    taken: list[float] = []

    def timed_digest() -> str:
        began = time.perf_counter()
        digest = code_digest()
        taken.append(time.perf_counter() - began)
        return digest

    def check(store: Any, rank: int, ranks: int, settings: Any, limit: Any) -> None:
        store.add("bench", 1)
        while store.add("bench", 0) < ranks:  # the others' imports are not its cost
            time.sleep(0.0005)
        began = time.perf_counter()
        check_ranks_match(store, rank, ranks, settings, limit)
        if rank == 0:
            Path(note).write_text(str(sum(taken) + time.perf_counter() - began))

    with_it = kind == "with"
    process_group.code_digest = timed_digest if with_it else lambda: ""
    process_group.check_ranks_match = check if with_it else lambda *words: None
    sys.argv[1:] = JOB
    return pretrain_gpt2.program()


# ---- steps ----------------------------------------------------------------------------------------------------------


def steps(pairs: dict[str, int]) -> Iterator[str]:
    for model in MODELS:
        for ranks in (1, 2):
            found = json.loads(launched(ranks, "--child", "steps", model, pairs[model]).splitlines()[-1])
            what = f"step, {model}, {ranks} rank{'s' if ranks > 1 else ''}: {found['writes']} places told"
            yield row(what, found["pairs"], found["writes"] * found["each"])


# Methods by which a rank says where it is, which a patch can replace.
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


def patch_writes(write: Callable[..., None]) -> list[Any]:
    """Patches that call `write` where something is written."""
    from megatron.distributed.rank_status import RankStatus
    from mpu import collective_tracker

    return [*(mock.patch.object(RankStatus, name, write) for name in ("set_phase", "set_step")),
            *(mock.patch.object(collective_tracker, name, write) for name in ("mark_waiting", "mark_idle"))]


def silent() -> list[Any]:
    """Patches that write nothing."""
    from mpu.collectives import GlooBackend

    return patch_writes(lambda *arguments: None) + [
        mock.patch.object(GlooBackend, name, getattr(GlooBackend, name).__wrapped__) for name in OPERATIONS]


def counted(step: Callable[[], None]) -> int:
    """How many times something is written in a step."""
    written: list[tuple[Any, ...]] = []
    with ExitStack() as stack:
        for patch in patch_writes(lambda *arguments: written.append(arguments)):
            stack.enter_context(patch)
        step()
    return len(written)


def steps_child(name: str, pairs: int) -> int:
    """At stage 3, which tells most places."""
    import torch

    from megatron.config.tree import build_config
    from megatron.distributed import process_group
    from megatron.distributed.rank_status import FORWARD, STATUS as PLACE
    from megatron.train import build
    from mpu import groups as mpu_groups

    env = process_group.init_process_group()
    groups = mpu_groups.build(1)
    torch.set_num_threads(1)
    config = build_config({**MODELS[name], "max_position_embeddings": SEQ[name], "batch_size": 1, "zero_stage": 3,
                           "global_batch_size": groups.dp.size, "stage3_param_persistence_threshold": 0})
    device = torch.device("cpu")
    engine = build.engine(config, build.model(config, groups), groups, device)
    rows = torch.randint(0, config.model.vocab_size, (1, SEQ[name] + 1))

    def step() -> None:
        engine.backward(engine(rows[:, :-1], rows[:, 1:]))
        engine.step()

    def timed() -> float:
        if env.world_size > 1:
            torch.distributed.barrier()  # they begin together, whatever was patched before
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    def untold() -> float:
        with ExitStack() as stack:
            for patch in silent():
                stack.enter_context(patch)
            return timed()

    for _ in range(3):
        step()
    writes, found = counted(step), in_turns(timed, untold, pairs)
    number, began = 100_000, time.perf_counter()
    for _ in range(number):
        PLACE.set_phase(FORWARD, "blocks.1")
    each = (time.perf_counter() - began) / number
    if env.rank == 0:
        print(json.dumps({"pairs": found, "writes": writes, "each": each}))
    process_group.shutdown()
    return 0


# ---- settings -------------------------------------------------------------------------------------------------------


def fastest(action: Callable[[], object], rounds: int = 200, calls: int = 10) -> float:
    """Seconds of a call."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            action()
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def settings() -> Iterator[str]:
    import torch

    from megatron.distributed.step_consistency import make_step_settings, settings_digest
    from mpu.device import scalars_on_device

    for count in (2, 24):
        groups = [dict(torch.optim.AdamW([torch.zeros(1)], lr=1e-3 * number).param_groups[0], initial_lr=1e-3)
                  for number in range(1, count + 1)]

        def compared() -> int:
            return settings_digest(make_step_settings(7, {"1/4": 4}, 4, 2, groups), 11, 2)

        yield f"| settings of {count} param groups: texts and digest | {1e6 * fastest(compared):.1f} |"
    device, square = torch.device("cpu"), torch.ones((), dtype=torch.float64)
    filled = fastest(lambda: scalars_on_device(device, (square, 11, 121, 0)))
    yield f"| the numbers of a step, to the device | {1e6 * filled:.1f} |"
    yield f"| what a save compares, 2 ranks | {float(launched(2, '--child', 'settings').splitlines()[-1]):.1f} |"


def settings_child() -> int:
    from dataclasses import asdict

    from megatron.checkpoint.commit import Keep
    from megatron.distributed import process_group
    from megatron.zero.api.checkpoint_io import check_save_call
    from mpu import groups as mpu_groups

    env, world = process_group.init_process_group(), mpu_groups.build(1).world
    arguments = {"tag": None, "save_latest": True, "in_background": False, "keep": asdict(Keep())}
    found = fastest(lambda: check_save_call(arguments, {"epoch": 1}, world))
    if env.rank == 0:
        print(1e6 * found)
    process_group.shutdown()
    return 0


# ---- saves ----------------------------------------------------------------------------------------------------------


@contextmanager
def nameless() -> Iterator[None]:
    """Files do not say what they are of; nothing reads them."""
    from megatron.checkpoint import writer
    from megatron.checkpoint.manifest import Manifest

    with mock.patch.object(Manifest, "digest", lambda self: "0" * 32), \
            mock.patch.object(writer, "provenance_of", lambda manifest, rank: {}):
        yield


def saves(folder: Path, preset: str, pairs: int) -> str:
    import torch
    from checkpoint import TAG, clear, make_engine

    from megatron.checkpoint import writer
    from megatron.checkpoint.manifest import Manifest
    from megatron.train.processor import keep_freed_memory

    keep_freed_memory()
    engine, spent = make_engine(preset, torch.device("cpu"), 1), 0.0

    def save() -> float:
        clear(folder)
        began = time.perf_counter()
        engine.save_checkpoint(folder, TAG)
        return time.perf_counter() - began

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            nonlocal spent
            began = time.perf_counter()
            found = method(*words)
            spent += time.perf_counter() - began
            return found
        return call

    def without() -> float:
        with nameless():
            return save()

    found = in_turns(save, without, pairs)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    alone = []
    with ExitStack() as stack:
        for owner, name in ((Manifest, "digest"), (writer, "provenance_of")):
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        for _ in range(3):
            spent = 0.0
            save()
            alone.append(spent)
    shutil.rmtree(folder)
    return row(f"save, {size / 1e6:.0f} MB: files say what they are of", found, min(alone))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; must not be there, or be empty")
    parser.add_argument("--only", choices=["start-up", "steps", "settings", "saves"], help="one of the four")
    parser.add_argument("--start-ups", type=int, default=4, help="pairs of jobs (4)")
    parser.add_argument("--tiny-steps", type=int, default=200, help="pairs of steps of the tiny model (200)")
    parser.add_argument("--steps", type=int, default=15, help="pairs of steps of the 14M model (15)")
    parser.add_argument("--saves", type=int, default=4, help="pairs of saves (4)")
    parser.add_argument("--preset", default="124M", help="what is saved (124M)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, *words = args.child
        if what == "settings":
            return settings_child()
        return start_up_child(*words) if what == "start-up" else steps_child(words[0], int(words[1]))
    if args.only in (None, "saves") and (args.folder is None or args.folder.exists() and any(args.folder.iterdir())):
        parser.error("--folder: name a new folder on the disk to measure")
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if args.only != "settings":
        print("\n| | min with, ms | without | | median with, ms | without | median of pairs | by itself, ms | |\n|---|"
              + "---:|" * 8)
    if args.only in (None, "start-up"):
        print(start_up(args.start_ups), flush=True)
    if args.only in (None, "steps"):
        for line in steps({"tiny": args.tiny_steps, "14M": args.steps}):
            print(line, flush=True)
    if args.only in (None, "saves"):
        print(saves(args.folder, args.preset, args.saves), flush=True)
    if args.only in (None, "settings"):
        print("\n| microseconds of the host, at best | |\n|---|---:|")
        for line in settings():
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
