"""The predicted time of a step beside the measured one: `python benchmarks/predicted.py`.

24 configurations, sizes x stages x recomputation x ranks 1 and 2, unless fewer are asked for. In each of several rounds
the rates of the machine are measured, and each configuration is trained by pretrain_gpt2.py on random tokens. The
smallest of its median steps, without the first ones, stands beside the smallest that `megatron.plan` said: what else
the machine does makes both longer only.
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

SIZES = {
    "tiny": ["--preset", "tiny", "--batch-size", "8"],
    "small": ["--preset", "small", "--vocab-size", "8192", "--tokenizer-type", "ByteLevelTokenizer", "--batch-size",
              "4"],
    "124M": ["--preset", "124M", "--tokenizer-type", "ByteLevelTokenizer", "--vocab-size", "50257", "--seq-length",
             "256", "--batch-size", "2"],
}
STEPS = {"tiny": 300, "small": 14, "124M": 7}
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


def predicted(case: Case, *options: str) -> dict[str, float]:
    command = [sys.executable, "-P", "-m", "megatron.plan", "--device", "cpu", "--ranks", str(case.ranks), "--json",
               "--time", *options, *case.flags]
    rows = json.loads(subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE).stdout)["rows"]
    return next(row["step"] for row in rows if row["chosen"])


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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keep-rates", action="store_true", help="use the rates that are kept, if there are any")
    asked = parser.parse_args()
    errors = []
    for ranks in asked.ranks:
        cases = [Case(size, stage, recomputes, ranks, asked.precision)
                 for size, stage, recomputes in product(asked.sizes, asked.stages, (False, True))]
        taken, steps = [], []
        for _ in range(asked.rounds):
            predicted(cases[0], *([] if asked.keep_rates else ["--probe"]))
            steps.append([predicted(case) for case in cases])
            taken.append([measured(case) for case in cases])
        for number, case in enumerate(cases):
            times = sorted(of_round[number] for of_round in taken)
            told = sorted((of_round[number] for of_round in steps), key=lambda one: one["total"])
            step = told[0]
            errors.append(step["total"] / times[0] - 1)
            parts = ", ".join(f"{name} {1e3 * value:.4g}" for name, value in step.items() if name != "total")
            print(f"{case}  measured {1e3 * times[0]:8.4g} ms  predicted {1e3 * step['total']:8.4g} ms  "
                  f"{errors[-1]:+7.1%}  ({parts}; the largest are {1e3 * times[-1]:.4g} and "
                  f"{1e3 * told[-1]['total']:.4g} ms)", flush=True)
    within = sum(abs(error) <= 0.2 for error in errors)
    print(f"{within} of {len(errors)} within 20 %, the median error is {median(map(abs, errors)):.1%}, the largest "
          f"{max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
