"""Compare what two checkouts print and save, after changes that only rename or move code.

    git worktree add --detach ../before COMMIT
    python scripts/compare_checkouts.py ../before .

It compares the help texts of every command, the generated reference pages, the errors of wrong command lines, the
public names of the packages with their signatures, and the metrics and every byte of the checkpoints of short runs
(without times and identities). It prints the differences; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

COMMANDS = ("pretrain_gpt2.py", "-m megatron.launch", "-m megatron.plan", "-m megatron.tune", "-m megatron.generate",
            "-m megatron.evaluate", "-m megatron.serve", "-m megatron.report", "-m megatron.checkpoint",
            "-m data.preprocess", "-m data.webtext", "-m data.merge", "-m data.verify")
SUBCOMMANDS = re.compile(r"^\s{2,4}([a-z][\w-]+)\s{2,}\S", re.MULTILINE)
MISTAKES = ("pretrain_gpt2.py --no-such-flag", "pretrain_gpt2.py --lr x", "pretrain_gpt2.py --zero-stage 7 --mock-data",
            "pretrain_gpt2.py --preset tiny",
            "pretrain_gpt2.py --mock-data --preset tiny --lr 1e-3 --train-iters 1 --load nowhere",
            "-m megatron.checkpoint list nowhere", "-m megatron.generate --load nowhere", "-m data.preprocess nowhere")
PACKAGES = ("megatron.config", "megatron.zero", "megatron.zero.utils", "megatron.fsdp", "mpu", "megatron.inference",
            "megatron.profiler", "megatron.recompute", "megatron.optim.schedulers", "megatron.zero.ops.adam")
NAMES = """
import importlib, inspect, sys
for package in sys.argv[1:]:
    module = importlib.import_module(package)
    for name in sorted(getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]):
        value = getattr(module, name)
        try:
            told = str(inspect.signature(value)) if callable(value) else type(value).__name__
        except ValueError:
            told = "?"
        print(package, name, told)
        if inspect.isclass(value):
            for attribute in sorted(vars(value)):
                if not attribute.startswith("_"):
                    print(package, name, attribute)
"""
RUN = ("--preset tiny --mock-data --lr 1e-3 --seed 7 --train-iters 4 --save-interval 2 --eval-interval 2 --eval-iters "
       "1 --batch-size 2 --log-interval 1").split()
RUNS = {"stage 0": [], "stage 2 bf16": ["--zero-stage", "2", "--bf16"], "stage 3 fp16": ["--zero-stage", "3", "--fp16"],
        "stage 3 host": ["--zero-stage", "3", "--bf16", "--offload-optimizer-device", "cpu"],
        "tp2 lamb": ["--model-parallel-size", "2", "--optimizer", "lamb", "--checkpoint-activations"],
        "muon": ["--optimizer", "muon", "--zero-stage", "1"], "one bit": ["--optimizer", "onebit_adam", "--bf16"]}
VARYING = {"run_id", "save_id", "saved_at", "branch", "crc32", "nbytes", "size", "began", "seconds", "step_ms",
           "tokens_per_s", "tflops", "mfu", "max_memory_bytes"}
TIMES = re.compile(r"[\d.]+ (s|ms|GiB|MB)\b|time per iteration \(ms\): [\d.]+|tokens/s \d+|TFLOP/s [\d.]+")


class Checkout:
    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self.scratch = root.resolve(), scratch

    def run(self, *args: str, ranks: int = 1) -> str:
        """What a command prints, with its exit code; paths of this checkout and numbers of its process left out."""
        launch = ["-m", "megatron.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(self.root), COLUMNS="120")
        done = subprocess.run([sys.executable, *launch, *args], cwd=self.root, env=env, capture_output=True, text=True,
                              timeout=900)
        return f"exit code {done.returncode}\n{done.stdout}{done.stderr}".replace(str(self.root), "ROOT")

    def facts(self) -> dict[str, str]:
        """Name of what is compared -> its text."""
        found = {"public names": self.run("-c", NAMES, *PACKAGES),
                 "reference": self.run("scripts/reference.py", "--check")}
        for command in COMMANDS:
            found[f"{command} --help"] = text = self.run(*command.split(), "--help")
            for name in sorted(set(SUBCOMMANDS.findall(text))) if "{" in text.partition("\n\n")[0] else []:
                found[f"{command} {name} --help"] = self.run(*command.split(), name, "--help")
        found |= {mistake: self.run(*mistake.split()) for mistake in MISTAKES}
        for name, flags in RUNS.items():
            folder = self.scratch / name.replace(" ", "-")
            printed = self.run("pretrain_gpt2.py", *RUN, *flags, "--save", str(folder), "--metrics-file",
                               str(folder.with_suffix(".jsonl")), ranks=2)
            found[f"run {name}"] = TIMES.sub("N", printed.replace(str(self.scratch), "SCRATCH"))
            for path in sorted(folder.rglob("*")):
                if path.is_file() and not path.name.startswith("."):
                    found[f"run {name} {path.relative_to(folder)}"] = fingerprint(path, str(self.scratch))
            if (metrics := folder.with_suffix(".jsonl")).exists():
                lines = metrics.read_text().replace(str(self.scratch), "SCRATCH").splitlines()
                rows = [without_varying(json.loads(line)) for line in lines]
                found[f"run {name} metrics"] = "\n".join(map(str, rows))
        return found


def fingerprint(path: Path, scratch: str) -> str:
    if path.name == "zero_to_fp32.py":
        return ""
    if path.suffix == ".json":
        return json.dumps(without_varying(json.loads(path.read_text().replace(scratch, "SCRATCH"))), indent=1)
    content = path.read_bytes()
    if path.suffix == ".safetensors":  # its header names the save
        length = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:length])
        header.pop("__metadata__", None)
        content = json.dumps(header).encode() + content[length:]
    return hashlib.sha256(content).hexdigest()


def without_varying(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_varying(item) for key, item in value.items() if key not in VARYING}
    return [without_varying(item) for item in value] if isinstance(value, list) else value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        # names of one length: the paths are in saved files, whose sizes are compared
        sides = [Checkout(root, Path(folder) / name) for root, name in ((parsed.before, "1"), (parsed.after, "2"))]
        for side in sides:
            side.scratch.mkdir()
        before, after = pool.map(Checkout.facts, sides)
    different = [name for name in sorted(before | after) if before.get(name) != after.get(name)]
    for name in different:
        print(f"DIFFERENT {name}")
        old, new = (str(side.get(name)).splitlines() for side in (before, after))
        print(*[f"  - {line[:200]}" for line in old if line not in new][:5], sep="\n")
        print(*[f"  + {line[:200]}" for line in new if line not in old][:5], sep="\n")
    print(f"{len(before) - len(different)} of {len(before)} the same")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
