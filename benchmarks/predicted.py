"""The predicted time of a step beside the measured one: `python benchmarks/predicted.py`.

24 configurations, sizes x stages x recomputation x ranks 1 and 2, unless fewer are asked for. In each of several rounds
and for each configuration the rates of the machine are measured (`megatron.plan.roofline`), and then it is trained by
pretrain_gpt2.py on random tokens. The error is that of the median round; the aim is 35 %. Other work on the machine
makes both longer, but not always alike: run it on an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)  # of the ranks that measure

from megatron.plan.cli import parse  # noqa: E402
from megatron.plan.roofline import StepTime, measured_rates, step_time  # noqa: E402

AIM = 0.35

SIZES = {
    "tiny": ["--preset", "tiny", "--batch-size", "8"],
    "small": ["--preset", "small", "--vocab-size", "8192", "--tokenizer-type", "ByteLevelTokenizer", "--batch-size",
              "4"],
    "124M": ["--preset", "124M", "--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", "50257", "--seq-length",
             "256", "--batch-size", "2"],
}
STEPS = {"tiny": 300, "small": 10, "124M": 6}
WARM_UP = 3
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
               "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Case:
    size: str
    stage: int
    recomputes: bool
    ranks: int
    precision: str

    @property
    def flags(self) -> list[str]:
        return [*SIZES[self.size], "--zero-stage", str(self.stage), "--attention-dropout", "0", "--hidden-dropout", "0",
                *["--checkpoint-activations"] * self.recomputes,
                *([] if self.precision == "fp32" else [f"--{self.precision}"])]

    def __str__(self) -> str:
        return (f"{self.size:5}  stage {self.stage}  {'recomputed' if self.recomputes else 'kept      '}  "
                f"{self.ranks} rank{'s' if self.ranks > 1 else ' '}")


def measured(case: Case) -> float:
    """Seconds."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "metrics.jsonl"
        command = [sys.executable, "-P", "-m", "megatron.launch", "--nproc-per-node", str(case.ranks),
                   str(ROOT / "pretrain_gpt2.py"), *case.flags, "--mock-data", "--train-iters", str(STEPS[case.size]),
                   "--eval-interval", "0", "--log-interval", "1000", "--metrics-file", str(file)]
        subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        records = map(json.loads, file.read_text().splitlines())
        steps = [record["step_ms"] / 1e3 for record in records if "step_ms" in record]
    return median(steps[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    cases = [Case(size, stage, recomputes, ranks, chosen.precision) for ranks, size, stage, recomputes
             in product(chosen.ranks, chosen.sizes, chosen.stages, (False, True))]
    rounds = {case: list[tuple[float, StepTime, float]]() for case in cases}  # (error, predicted, measured seconds)
    for _, case in product(range(chosen.rounds), cases):
        run = parse(["--device", "cpu", "--ranks", str(case.ranks), *case.flags])[1]
        step = step_time(run, measured_rates(run))
        seconds = measured(case)
        rounds[case].append((step.total / seconds - 1, step, seconds))
        print(f"{case}  {rounds[case][-1][0]:+7.1%}", flush=True)
    errors = []
    for case, found in rounds.items():
        error, step, seconds = sorted(found, key=lambda one: one[0])[len(found) // 2]
        errors.append(error)
        parts = ", ".join(f"{name} {1e3 * value:.4g}" for name, value in step.as_dict().items() if name != "total")
        print(f"{case}  measured {1e3 * seconds:8.4g} ms  predicted {1e3 * step.total:8.4g} ms  {error:+7.1%}  "
              f"({parts})")
    within = sum(abs(error) <= AIM for error in errors)
    print(f"{within} of {len(errors)} within {AIM:.0%}, the median error is {median(map(abs, errors)):.1%}, the "
          f"largest {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
