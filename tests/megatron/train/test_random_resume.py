"""Runs drawn at random, interrupted at drawn moments and started again until they end, equal the uninterrupted ones.

Everything about a cell follows from its seed: `-k "cell[17]"` runs cell 17 again. What the program refuses with exit
code 2 is printed and drawn again, with the same optimizer and stage.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any, NamedTuple

import pytest

from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.errors import ConfigError
from megatron.inference.cli import main as generate
from tests.distributed import RankError, run_ranks
from tests.megatron.helpers import records, total_digest, train_all, write_corpus
from tests.megatron.launch.processes import begin, end_all, environment

STEPS, CELLS = 14, 40
QUICK = (11,)
"""Of one rank: the cheapest. It kills a run, and leaves by --exit-interval."""
OPTIMIZERS = ("adam", "muon", "lamb", "onebit_adam", "lion", "sgd", "onebit_lamb")
SCHEDULES = ("constant", "linear", "cosine", "exponential", "inverse-square-root", "one-cycle", "range-test",
             "range-test-stairs")
COMMON = ("--preset tiny --split 8,1,1 --log-interval 1 --sample-tokens 0 --lr 1e-3 --batch-size 2 --weight-decay 0.1 "
          f"--train-iters {STEPS} --eval-iters 1").split()


class Interruption(NamedTuple):
    """One start of the job that does not reach its end, if the signal comes in time."""

    number: int
    """The signal; 0: the job leaves by itself, by --exit-interval."""
    target: str
    rank: int
    where: str
    step: int
    seconds: float

    def codes(self, world: int) -> tuple[int, ...]:
        """Exit codes of the job: 0 also where it is done before the signal comes, 130 where the first step of this
        start was not done."""
        if self.number != SIGKILL:
            return 0, 130
        return (0, 5) if world > 1 and self.target == "rank" else (0, -SIGKILL)

    def __str__(self) -> str:
        if not self.number:
            return f"--exit-interval {self.step}"
        return (f"{Signals(self.number).name} to {self.target} by rank {self.rank} {self.seconds * 1000:.0f} ms into "
                f"{self.where} {self.step}")


class Cell(NamedTuple):
    tp: int
    dp: int
    flags: list[str]
    interruptions: list[Interruption]

    def __str__(self) -> str:
        return f"tp {self.tp} dp {self.dp} {' '.join(self.flags)} | " + "; ".join(map(str, self.interruptions))


def drawn(seed: int, attempt: int) -> Cell:
    """The cell of this seed; a further attempt keeps optimizer and stage, except where those do not go together."""
    draw = random.Random(f"{seed}/{attempt}")
    optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
    stage = seed // len(OPTIMIZERS) % 4 if attempt == 0 or not optimizer.startswith("onebit") else draw.choice((0, 1))
    tp, dp = draw.choice(((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (1, 4), (4, 1)))
    flags = ["--zero-stage", stage, "--optimizer", optimizer, "--model-parallel-size", tp, "--global-batch-size",
             2 * dp * draw.choice((1, 1, 2, 3)), "--lr-decay-style", draw.choice(SCHEDULES), "--warmup",
             draw.choice((0, 0.3)), "--min-lr", 1e-4, "--seed", draw.randrange(1000),
             *draw.choice(([], ["--bf16"], ["--fp16", "--initial-loss-scale", 2**18, "--loss-scale-window", 3,
                                            "--hysteresis", draw.choice((1, 2))])),
             "--hidden-dropout", draw.choice((0, 0.1)), "--attention-dropout", draw.choice((0, 0.1)),
             "--num-workers", draw.choice((0, 0, 1)), "--eval-interval", draw.choice((0, 5)),
             "--save-interval", draw.choice((1, 2, 3, 5))]
    if optimizer.startswith("onebit"):
        flags += ["--onebit-freeze-step", draw.choice((3, 6, "auto"))]
    device = draw.choice(("none", "none", "cpu", "nvme"))
    if stage > 0 and device != "none":
        flags += ["--offload-optimizer-device", device]
        if device == "nvme":
            flags += ["--offload-optimizer-nvme-path", "{swap}"]
    device = draw.choice(("none", "cpu", "nvme"))
    if stage == 3 and device != "none":
        flags += ["--offload-param-device", device]
        if device == "nvme":
            flags += ["--offload-param-nvme-path", "{swap}"]
    if draw.random() < 0.5:
        flags += ["--checkpoint-activations", *draw.choice(([], ["--checkpoint-num-layers", 2]))]
    if draw.random() < 0.3:
        flags += ["--progressive-layer-drop", "--pld-gamma", 0.1]
    if draw.random() < 0.3:
        flags += ["--quantize-training", "--quantize-offset", 2, "--quantize-period", 2, "--quantize-rounding",
                  draw.choice(("nearest", "stochastic")), *draw.choice(([], ["--quantize-mixed"]))]
    flags += draw.choice(([], ["--async-save"])) + draw.choice(([], ["--keep-last", 2]))
    steps = sorted(draw.sample(range(1, STEPS), draw.choice((2, 3))))
    return Cell(tp, dp, list(map(str, flags)), [interruption(draw, step, tp * dp) for step in steps])


def interruption(draw: random.Random, step: int, world: int) -> Interruption:
    kinds = ((0, ""), (SIGTERM, "launcher"), (SIGTERM, "rank"), (SIGKILL, "rank"), (SIGKILL, "rank"), (SIGKILL, "all"))
    number, target = draw.choice(kinds)
    where = draw.choice(("step", "step", "save"))
    return Interruption(number, target, draw.randrange(world), where, step,
                        round(draw.uniform(0, 0.03 if where == "step" else 0.5), 4))


class Job:
    """One --save folder and the command that is started until it ends."""

    def __init__(self, folder: Path, cell: Cell, corpus: str) -> None:
        self.folder, self.cell = folder, cell
        (folder / "swap").mkdir(parents=True)
        (folder / "swap").chmod(0o700)
        self.save, self.metrics = folder / "save", folder / "metrics"
        self.flags = [*COMMON, *(flag.replace("{swap}", str(folder / "swap")) for flag in cell.flags), "--train-data",
                      corpus, "--save", str(self.save), "--load", str(self.save), "--metrics-file", str(self.metrics)]

    def run(self, *more: object) -> None:
        """Without a signal."""
        run_ranks(train_all, self.cell.tp * self.cell.dp, [[*self.flags, *more]], timeout=180)

    def start(self, how: Interruption) -> tuple[int, str, str]:
        """Exit code and what was printed."""
        process = begin([sys.executable, "-m", "megatron.launch", "--nproc-per-node", str(self.cell.tp * self.cell.dp),
                         str(Path(__file__).with_name("interrupted.py")), *self.flags],
                        env=environment(INTERRUPT=json.dumps(how)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        text=True)
        try:
            out, err = process.communicate(timeout=180)
        finally:
            end_all()
        return process.returncode, out, err

    def check_start(self, how: Interruption) -> str:
        """What came of one interrupted start: nothing but what is promised, and nothing lost."""
        before = set(tag_names(self.save)) if self.save.exists() else set()
        if not how.number:
            self.run("--exit-interval", how.step)
            return "0"
        code, out, err = self.start(how)
        errors = [line for line in err.splitlines() if line.startswith("error:")]
        assert "Traceback" not in err and code in how.codes(self.cell.tp * self.cell.dp), (str(how), code, out, err)
        assert len(errors) == (code in (5, 130)), (str(how), code, err)
        assert code != 5 or f"rank {how.rank} " in errors[0] and "SIGKILL" in errors[0], errors
        assert code != 130 or "before the first step, so that nothing was lost" in errors[0], errors
        after = tag_names(self.save) if self.save.exists() else []
        for tag in after:
            verify_tag(self.save, tag)
        assert "--keep-last" in self.cell.flags or before.issubset(after), (before, after)
        return f"{code}"

    def left(self) -> dict[str, Any]:
        """What must not depend on interruptions: the last line of each step and evaluation, the digest of the last
        checkpoint, and the text that its model writes."""
        last = {(line["iteration"], line.get("eval", False)): line for line in records(self.metrics)}
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(io.StringIO()):
            generate(["--load", str(self.save), "--greedy", "--max-new-tokens", "24", "one two three"])
        assert not list((self.folder / "swap").iterdir()), "left on the drive"
        assert not [name for name in os.listdir(self.save) if name.startswith((".staging", ".aside", ".trash"))]
        return {"metrics": last, "digest": total_digest(self.save), "text": said.getvalue()}


def check(seed: int, folder: Path) -> None:
    corpus = write_corpus(folder / "corpus")
    for attempt in range(20):
        cell = drawn(seed, attempt)
        whole = Job(folder / f"whole{attempt}", cell, corpus)
        try:
            whole.run()
            break
        except RankError as error:
            if not isinstance(error.error, ConfigError):
                raise
            print(f"cell {seed}: refused: {error.error}")
    print(f"cell {seed}: {cell}")
    assert max(record["iteration"] for record in records(whole.metrics)) == STEPS
    parts = Job(folder / "parts", cell, corpus)
    print(f"cell {seed}: exit codes", *(parts.check_start(how) for how in cell.interruptions))
    parts.run()
    expected, found = whole.left(), parts.left()
    for what in expected:
        assert found[what] == expected[what], (what, str(cell))
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.slow)
                                  for seed in range(CELLS)])
def test_an_interrupted_run_equals_one_that_was_not_in_cell(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)
