"""Measure the share of small faults that the tests detect: draw mutants of the product, run the tests that call them.

    python scripts/mutate.py record --output runs/calls.jsonl       # once per commit: which test calls which function
    python scripts/mutate.py run --calls runs/calls.jsonl --count 300 --seed 1 --output runs/mutants.jsonl

A mutant is one change of one function: another comparison or operator, a negated condition, a constant plus one, a
call, an assignment or a `raise` left out, a result replaced by None. It is killed if a test file that calls the
function fails or takes far too long; these files run from the quickest on, for at most `--seconds` in all. `record`
runs each test file by itself and leaves out those that fail. Both work on the last commit, in their own worktrees, and
go on where an earlier call stopped that wrote to the same file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

PACKAGES = ("mpu", "megatron/zero", "megatron/checkpoint", "megatron/optim", "data")
EXCHANGED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", " is not ": " is ", " is ": " is not ",
             " not in ": " in ", " in ": " not in ", " and ": " or ", " or ": " and ", "+": "-", "-": "+", "//": "*",
             "*": "//", "%": "//", "/": "*"}
RECORDER = '''
import os, sys, threading
_seen, _root = set(), os.environ.get("MUTATE_ROOT", "") + "/"
def _record(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in _seen:
        _seen.add(code)
        if code.co_filename.startswith(_root) and "/tests/" not in code.co_filename:
            line = code.co_filename[len(_root):] + ":" + code.co_qualname + "\\n"
            os.write(_file, line.encode())
if "MUTATE_CALLS" in os.environ:
    _file = os.open(os.environ["MUTATE_CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    threading.setprofile(_record)
    sys.setprofile(_record)
'''
"""A sitecustomize.py: every Python process below a test, ranks too, writes the name of each function it calls once."""


@dataclass(frozen=True)
class Mutant:
    path: str
    function: str
    line: int
    start: int
    end: int
    """A range of bytes of the file."""
    before: str
    after: str


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Every mutant of the functions in a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def mutant(function: str, node: ast.AST, first: int, last: int, after: str) -> Mutant:
        return Mutant(path, function, node.lineno, first, last, source[first:last].decode(), after)  # type: ignore

    def between(function: str, left: ast.AST, right: ast.AST) -> Iterator[Mutant]:
        """The operator between two operands."""
        text = source[end(left):begin(right)].decode()
        for operator in sorted(EXCHANGED, key=len, reverse=True):
            if operator in text and "#" not in text:
                yield mutant(function, left, end(left), begin(right), text.replace(operator, EXCHANGED[operator], 1))
                return

    def visit(node: ast.AST, scope: str, function: str) -> Iterator[Mutant]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = scope + node.name
            is_class = isinstance(node, ast.ClassDef)
            for child in node.body:
                yield from visit(child, name + ("." if is_class else ".<locals>."), "" if is_class else name)
            return
        if not function or isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Global):
            for child in ast.iter_child_nodes(node) if not function else ():
                yield from visit(child, scope, function)
            return
        if isinstance(node, ast.Raise):
            yield mutant(function, node, begin(node), end(node), "pass")
            return
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant):
                return  # a docstring
            if not isinstance(node.value, ast.Yield | ast.YieldFrom):
                yield mutant(function, node, begin(node), end(node), "pass")
        elif isinstance(node, ast.AugAssign):
            yield mutant(function, node, begin(node), end(node), "pass")
        elif isinstance(node, ast.Return) and node.value and not isinstance(node.value, ast.Constant):
            yield mutant(function, node, begin(node), end(node), "return None")
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            condition = source[begin(node.test):end(node.test)].decode()
            yield mutant(function, node.test, begin(node.test), end(node.test), f"(not ({condition}))")
        elif isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from between(function, left, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(function, left, right)
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Pow | ast.MatMult):
            yield from between(function, node.left, node.right)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
            after = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield mutant(function, node, begin(node), end(node), after)
        for field, child in ast.iter_fields(node):
            if field != "annotation":
                for item in child if isinstance(child, list) else [child]:
                    if isinstance(item, ast.AST):
                        yield from visit(item, scope, function)

    for found in visit(ast.parse(source), "", ""):
        changed = source[:found.start] + found.after.encode() + source[found.end:]
        try:
            compile(changed, path, "exec", dont_inherit=True)
        except (SyntaxError, SyntaxWarning):
            continue  # such as parentheses between the operands
        yield found


@contextmanager
def worktrees(count: int) -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder, str(number)) for number in range(count)]
        try:
            for tree in trees:
                subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, "HEAD"], check=True)
            yield trees
        finally:
            for tree in trees:
                subprocess.run(["git", "worktree", "remove", "--force", tree], check=False)


def run_test(tree: Path, test: str, timeout: float, **variables: str) -> tuple[bool, float]:
    """(passed, seconds); a test that takes longer than `timeout` has not passed."""
    started = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    with subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          start_new_session=True) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            code = -9
    return code == 0, time.monotonic() - started


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record(output: Path, workers: int) -> None:
    """Write a line for each test file: {"test", "seconds", "calls": functions, null if the test fails}."""
    done = {line["test"] for line in read_lines(output)}
    tests = [test for test in subprocess.run(
        ["git", "ls-files", "tests/**/test_*.py", "tests/test_*.py"], check=True, text=True,
        capture_output=True).stdout.split() if test not in done]
    with worktrees(workers) as trees, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool, \
            output.open("a") as lines:
        Path(folder, "sitecustomize.py").write_text(RECORDER)
        free = SimpleQueue[Path]()
        for tree in trees:
            free.put(tree)

        def one(test: str) -> None:
            tree, names = free.get(), Path(folder, test.replace("/", "-"))
            passed, took = run_test(tree, test, 1800, PYTHONPATH=f"{folder}:{tree}", MUTATE_ROOT=str(tree),
                                    MUTATE_CALLS=str(names))
            free.put(tree)
            print(f"{test}: {took:.1f} s{'' if passed else ', left out: it fails'}", flush=True)
            calls = sorted(set(names.read_text(errors="replace").splitlines())) if names.exists() else []
            lines.write(json.dumps({"test": test, "seconds": took, "calls": calls if passed else None}) + "\n")
            lines.flush()

        list(pool.map(one, tests))


def draw(root: Path, packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    files = subprocess.run(["git", "ls-files", *(f"{package}/**.py" for package in packages)], check=True, text=True,
                           capture_output=True, cwd=root).stdout.split()
    found = [mutant for path in files for mutant in mutants_of(path, (root / path).read_bytes())]
    return random.Random(seed).sample(found, min(count, len(found)))


def judge(tree: Path, mutant: Mutant, callers: Sequence[tuple[float, str]], limit: float) -> str:
    """The test file that kills the mutant, or an empty string. `callers` are (seconds, test file)."""
    path = tree / mutant.path
    source = path.read_bytes()
    try:
        path.write_bytes(source[:mutant.start] + mutant.after.encode() + source[mutant.end:])
        for expected, test in sorted(callers):
            if not run_test(tree, test, 3 * expected + 60)[0]:
                return test
            limit -= expected
            if limit < 0:
                break
    finally:
        path.write_bytes(source)
    return ""


def run(calls: Path, output: Path, packages: Sequence[str], count: int, seed: int, limit: float, workers: int) -> None:
    callers: dict[str, list[tuple[float, str]]] = {}
    for line in read_lines(calls):
        for function in line["calls"] or ():
            callers.setdefault(function, []).append((line["seconds"], line["test"]))
    before = read_lines(output)
    killed = sum(bool(line["killed_by"]) for line in before)
    with worktrees(workers) as trees, ThreadPoolExecutor(workers) as pool, output.open("a") as lines:
        free = SimpleQueue[Path]()
        for tree in trees:
            free.put(tree)

        def one(mutant: Mutant) -> tuple[Mutant, str]:
            tree = free.get()
            try:
                return mutant, judge(tree, mutant, callers.get(f"{mutant.path}:{mutant.function}", []), limit)
            finally:
                free.put(tree)

        left = draw(trees[0], packages, count, seed)[len(before):]
        for number, (mutant, killer) in enumerate(pool.map(one, left), len(before) + 1):
            killed += bool(killer)
            lines.write(json.dumps(asdict(mutant) | {"killed_by": killer}) + "\n")
            lines.flush()
            print(f"{killed} of {number} killed; {mutant.path}:{mutant.line} {mutant.before!r} -> {mutant.after!r}: "
                  f"{killer or 'SURVIVES'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "run"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--calls", type=Path, help="the file of `record`")
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=180, help="tests of one mutant, at most (default: 180)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    if given.action == "record":
        record(given.output, given.workers)
    elif given.calls is None:
        parser.error("run needs --calls, the file of `record`")
    else:
        run(given.calls, given.output, given.packages, given.count, given.seed, given.seconds, given.workers)


if __name__ == "__main__":
    main()
