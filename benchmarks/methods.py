"""What training methods cost in loss, bytes and time: small models on the text of this repository, drawn as curves.

    python benchmarks/methods.py exchange      1-bit Adam, 1-bit Lamb beside Adam and Lamb, on a slow wire
    python benchmarks/methods.py depth         progressive layer dropping beside all layers
    python benchmarks/methods.py bits          quantisation in training beside none

Each method trains the same model on the same text, once for each seed; a curve is the mean over the seeds of the mean
loss of 20 steps. Time is that of the steps, on the wire of one_bit.py. Beside the picture (--picture FILE.svg) the loss
of the last 20 steps, with the deviation over the seeds, is printed for each method, and that of the first method at the
same bytes and the same time. Blocks are left out twice: for as many steps, and for as many as the same work allows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

SMOOTH = 20
"""Steps that a point of a curve is the mean of."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")


@dataclass(frozen=True)
class Study:
    """Methods to be compared, by name: what they set."""

    methods: dict[str, dict[str, Any]]
    layers: int
    ranks: int
    megabits: float
    """A second, of each rank's link."""
    axes: tuple[str, ...]


def studies(steps: int) -> dict[str, Study]:
    freeze, ratios_settle = str(round(0.15 * steps)), str(round(0.25 * steps))
    drops = {"progressive_layer_drop": True, "pld_theta": 0.5, "pld_gamma": 10 / steps}
    bits = {"quantize_training": True, "quantize_offset": steps // 8, "quantize_period": steps // 16, "bf16": True}
    return {
        "exchange": Study({
            "Adam": {},
            "1-bit Adam": {"optimizer": "onebit_adam", "onebit_freeze_step": freeze},
            "Lamb": {"optimizer": "lamb", "lr": 1e-2},
            "1-bit Lamb": {"optimizer": "onebit_lamb", "onebit_freeze_step": ratios_settle, "lr": 1e-2},
        }, layers=4, ranks=2, megabits=100, axes=("steps", "MB sent by a rank", "seconds")),
        "depth": Study({
            "all layers": {},
            "theta 0.5": drops,
            "theta 0.5, longer": {**drops, "train_iters": as_much_work(24, steps, 0.5, 10 / steps)},
        }, layers=24, ranks=1, megabits=1e6, axes=("steps", "seconds")),
        "bits": Study({
            "bf16": {"bf16": True},
            "to 8 bits": {**bits, "quantize_start_bits": 9, "quantize_target_bits": 8},
            "to 4 bits": {**bits, "quantize_start_bits": 6, "quantize_target_bits": 4},
        }, layers=4, ranks=1, megabits=1e6, axes=("steps",)),
    }


def as_much_work(layers: int, steps: int, theta: float, gamma: float) -> int:
    """How many steps with blocks left out run as many blocks as `steps` with all."""
    from megatron.layer_drop import ThetaSchedule, expected_blocks
    count, left = 0, float(layers * steps)
    while left > 0:
        left -= expected_blocks(layers, ThetaSchedule(theta, gamma).theta_at(count))
        count += 1
    return count


def corpus() -> bytes:
    """Of this repository, in the order of its paths."""
    files = sorted(path for pattern in ("docs/**/*.md", "megatron/**/*.py", "mpu/**/*.py", "data/**/*.py")
                   for path in ROOT.glob(pattern))
    return b"\n".join(path.read_bytes() for path in files)


# ---- runs ------------------------------------------------------------------------------------------------------------


def train(rank: int, study: Study, options: argparse.Namespace, settings: dict[str, Any], seed: int, store: str,
          results: Any) -> None:
    """One rank of one run: (loss, bytes so far, seconds so far) of each step."""
    import torch
    import torch.distributed as dist
    from one_bit import Link, slow_wire

    from megatron.config.tree import build_config
    from megatron.train.build import engine as build_engine, model as build_model
    from mpu import collectives, groups

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=study.ranks)
    link, wire_for = Link(study.megabits * 1e6 / 8), collectives.backend_for
    collectives.backend_for = lambda x: slow_wire(wire_for(x), link)
    steps = settings.get("train_iters", options.steps)
    config = build_config({
        "num_layers": study.layers, "hidden_size": options.hidden, "num_attention_heads": 4, "vocab_size": 256,
        "max_position_embeddings": options.length, "seq_length": options.length, "make_vocab_size_divisible_by": 8,
        "batch_size": options.rows, "global_batch_size": options.rows * study.ranks, "lr": 2e-3, "warmup": 0.05,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "compile": False, "seed": seed,
        "train_iters": steps, "lr_decay_iters": steps, **settings})
    grid = groups.build(1)
    engine = build_engine(config, build_model(config, grid), grid, torch.device("cpu"))
    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
    starts = torch.randint(len(text) - options.length - 1, (steps, study.ranks, options.rows),
                           generator=torch.Generator().manual_seed(seed))
    found, seconds = [], 0.0
    for step in range(steps):
        rows = torch.stack([text[start : start + options.length + 1] for start in starts[step, rank]]).long()
        begin = time.perf_counter()
        loss = engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale)
        engine.backward(loss)
        engine.step()
        seconds += time.perf_counter() - begin
        found.append((float(loss.detach()), link.sent, seconds))
    results.put((rank, found))


def run(study: Study, options: argparse.Namespace, settings: dict[str, Any], seed: int) -> list[tuple[float, ...]]:
    """Of each step: mean loss over the ranks, megabytes and seconds so far."""
    context = multiprocessing.get_context("spawn")
    results, store = context.SimpleQueue(), tempfile.mktemp(prefix="bench-store-")
    ranks = [context.Process(target=train, args=(rank, study, options, settings, seed, store, results))
             for rank in range(study.ranks)]
    for process in ranks:
        process.start()
    by_rank = [found for _, found in sorted(results.get() for _ in ranks)]
    for process in ranks:
        process.join()
    return [(statistics.mean(loss for loss, _, _ in of_step), max(sent for _, sent, _ in of_step) / 1e6,
             max(seconds for _, _, seconds in of_step)) for of_step in zip(*by_rank)]


# ---- what came of them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    name: str
    points: list[tuple[float, float, float, float]]
    """(loss, steps, megabytes, seconds)"""
    last: list[float]
    """The loss at the end, of each seed."""

    @staticmethod
    def of(name: str, runs: Sequence[list[tuple[float, ...]]]) -> Curve:
        points = []
        for end in range(SMOOTH, len(runs[0]) + 1, SMOOTH):
            losses = [row[0] for one in runs for row in one[end - SMOOTH : end]]
            sent, seconds = (statistics.mean(one[end - 1][place] for one in runs) for place in (1, 2))
            points.append((statistics.mean(losses), float(end), sent, seconds))
        last = [statistics.mean(row[0] for row in one[-SMOOTH:]) for one in runs]
        return Curve(name, points, last)

    def at(self, axis: int, value: float) -> float:
        """The loss where it has got so far."""
        return next((loss for loss, *places in self.points if places[axis] >= value), self.points[-1][0])


def told(curve: Curve, first: Curve, study: Study) -> str:
    loss, steps, sent, seconds = curve.points[-1]
    spread = f" +- {statistics.stdev(curve.last):.4f}" if len(curve.last) > 1 else ""
    line = f"{curve.name:<17} loss {statistics.mean(curve.last):.4f}{spread}, {sent:9.2f} MB, {seconds:7.1f} s"
    if curve is not first:
        line += f"; {first.name} after {seconds:.1f} s: {first.at(2, seconds):.4f}"
        line += f", after {sent:.1f} MB: {first.at(1, sent):.4f}" if study.ranks > 1 else ""
    return line


def picture(study: Study, curves: Sequence[Curve]) -> str:
    """One panel for each axis, in SVG."""
    width, height, left, top = 300, 220, 46, 30
    losses = sorted(loss for curve in curves for loss, *_ in curve.points)
    low, high = losses[0] - 0.05, losses[-1] + 0.05
    panels = []
    for number, axis in enumerate(study.axes):
        place = ("steps", "MB sent by a rank", "seconds").index(axis)
        end = max(curve.points[-1][1 + place] for curve in curves)
        x0 = left + number * (width + left)
        panels.append(f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>'
                      f'<text x="{x0 + width / 2}" y="{top + height + 32}" text-anchor="middle">{axis}</text>')
        for share in (0, 0.5, 1):
            panels.append(f'<text x="{x0 + share * width}" y="{top + height + 16}" text-anchor="middle">'
                          f'{share * end:.4g}</text><text x="{x0 - 6}" y="{top + (1 - share) * height + 4}" '
                          f'text-anchor="end">{low + share * (high - low):.2f}</text>')
        for curve, colour in zip(curves, COLOURS):
            line = " ".join(f"{x0 + point[1 + place] / end * width:.1f},"
                            f"{top + (high - point[0]) / (high - low) * height:.1f}" for point in curve.points)
            panels.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    names = "".join(f'<text x="{left + 110 * number}" y="18" fill="{colour}">{curve.name}</text>'
                    for number, (curve, colour) in enumerate(zip(curves, COLOURS)))
    across = left + len(study.axes) * (width + left)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {top + height + 44}" '
            f'font-family="sans-serif" font-size="12" fill="#555"><rect width="100%" height="100%" fill="#fff"/>'
            f'{names}{"".join(panels)}</svg>\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("study", choices=studies(400))
    for name, default in (("steps", 400), ("seeds", 3), ("hidden", 64), ("length", 64), ("rows", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--picture", metavar="FILE.svg")
    options = parser.parse_args()
    study = studies(options.steps)[options.study]
    runs: dict[str, list[list[tuple[float, ...]]]] = {name: [] for name in study.methods}
    for seed in range(options.seeds):  # in turn, so that none has a quieter machine
        for name, settings in study.methods.items():
            runs[name].append(run(study, options, settings, seed))
    curves = [Curve.of(name, found) for name, found in runs.items()]
    wire = f", {study.megabits:g} Mbit/s" if study.ranks > 1 else ""
    print(f"{study.layers} layers of {options.hidden}, {study.ranks} ranks{wire}, {options.steps} steps, "
          f"{options.seeds} seeds")
    for curve in curves:
        print(told(curve, curves[0], study))
    if options.picture:
        Path(options.picture).write_text(picture(study, curves))


if __name__ == "__main__":
    main()
