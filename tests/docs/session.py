"""A page followed from top to bottom by a reader with a fresh copy of the repository and no GPU, and whether programs
printed what it shows. `python -m tests.docs.session docs/PAGE.md` follows one and prints what really comes out.

Text is compared line by line; blank lines and the width of spaces do not count. What may differ:

- `...` alone on a line stands for any number of lines, inside a line for any text, and `.../` for no
  folder or any;
- times, rates, memory and process numbers (`VARIES`) may be any number;
- other numbers with a point or an exponent may differ by 1%, sizes in bytes too: processors round differently;
- a checksum (64 hexadecimal digits, or at least 8 of them and `...`) may be another one, but the same on the page
  must be the same in what is printed.

Whole numbers are compared as they are.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.docs.reader import ROOT, Block, blocks

VARIES = re.compile(
    r"(?:\(ms\): |tokens/s |TFLOP/s |MFU |memory |pid )$"
    r"|^ (?:s|ms|seconds|documents/s|MB/s|GB/s)\b"
)
"""Before or after such words a number may be any."""

TOLERANCE = 0.01

_TOKEN = re.compile(r"""
    (?P<checksum> \b[0-9a-f]{64}\b | \b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,63}(?=\.\.\.) )
  | (?P<gap> \.\.\./? )
  | (?P<number> (?<![\w.]) -?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)? (?![\w]) )
""", re.X)
_ANY_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?|nan|inf)"


class Comparison:
    """Compares the outputs of one page; remembers which checksum stands for which."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, str]] = []

    def difference(self, shown: str, printed: str) -> str | None:
        """None where `printed` is what `shown` promises; otherwise both, for a person."""
        expected, actual = _lines(shown), _lines(printed)
        pairs, lost = _align(expected, actual)
        if pairs is None:
            return (f"{'not printed: ' + lost if lost else 'more was printed'}\nthe page shows\n{_indented(expected)}\n"
                    f"and the command printed\n{_indented(actual)}")
        for mine, theirs in pairs:
            for shown_before, printed_before in self._pairs:
                if _begin_alike(mine, shown_before) != _begin_alike(theirs, printed_before):
                    return f"the page shows {mine} and {shown_before}; printed were {theirs} and {printed_before}"
            self._pairs.append((mine, theirs))
        return None


def _begin_alike(one: str, other: str) -> bool:
    """Whether two checksums, one of them perhaps cut short, can be the same."""
    return one.startswith(other) or other.startswith(one)


def _lines(text: str) -> list[str]:
    counted = re.sub(r"\b\d+ threads?\b", "N threads", text)
    return [" ".join(line.split()) for line in counted.splitlines() if line.strip()]


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


def _align(shown: Sequence[str], printed: Sequence[str]) -> tuple[list[tuple[str, str]] | None, str]:
    """The checksums of both sides, in pairs, where every line finds its line; else None and the first that does not."""
    reached: dict[int, list[tuple[str, str]]] = {0: []}  # lines of `printed` used so far -> the pairs on the way there
    for line in shown:
        if line == "...":
            first = min(reached)
            reached = {n: reached.get(n, reached[max(m for m in reached if m <= n)])
                       for n in range(first, len(printed) + 1)}
            continue
        following = {}
        for at, pairs in reached.items():
            found = match_line(line, printed[at]) if at < len(printed) else None
            if found is not None:
                following[at + 1] = pairs + found
        reached = following
        if not reached:
            return None, line
    return reached.get(len(printed)), ""


def match_line(shown: str, printed: str) -> list[tuple[str, str]] | None:
    """The pairs of checksums of a line that matches; None for one that does not."""
    pattern, tokens, at = "", [], 0
    for token in _TOKEN.finditer(shown):
        pattern += re.escape(shown[at:token.start()])
        at = token.end()
        if token["gap"]:
            pattern += "(?:.*?/)?" if token["gap"].endswith("/") else ".*?"
        else:
            tokens.append(token)
            pattern += r"\b([0-9a-f]{8,64})" if token["checksum"] else _ANY_NUMBER
    match = re.fullmatch(pattern + re.escape(shown[at:]), printed)
    if match is None:
        return None
    pairs = []
    for token, group in zip(tokens, match.groups()):
        if token["checksum"]:
            if len(group) < len(token["checksum"]):
                return None
            pairs.append((token["checksum"], group))
        elif not _same_number(token["number"], group, shown[:token.start()], shown[token.end():]):
            return None
    return pairs


def _same_number(shown: str, printed: str, before: str, after: str) -> bool:
    if shown == printed or any(VARIES.search(side) for side in (before, after)):
        return True
    whole = not re.search(r"[.eE]", shown)
    if printed in ("nan", "inf") or (whole and not after.startswith(" bytes")):
        return False
    mine, theirs = float(shown.replace(",", "")), float(printed.replace(",", ""))
    decimals = shown.lower().partition("e")[0].partition(".")[2]
    last_digit = 10.0 ** -len(decimals) * 10.0 ** int(shown.lower().partition("e")[2] or 0)
    return abs(mine - theirs) <= max(TOLERANCE * abs(mine), 0 if whole else 1.5 * last_digit)


NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.egg-info")
TIMEOUT = 3600

INTERPRETER = """
import contextlib, io, json, sys, traceback
names, out = {"__name__": "__main__"}, sys.stdout
for line in sys.stdin:
    said, good = io.StringIO(), True
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            exec(compile(json.loads(line), "<page>", "exec"), names)
        except BaseException:
            traceback.print_exc()
            good = False
    print(json.dumps([good, said.getvalue()]), file=out, flush=True)
"""


class Session:
    """A folder with a copy of the code, an environment, and one Python interpreter for the page's blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repository"
        shutil.copytree(ROOT, self.folder, ignore=NOT_COPIED)
        self._python: subprocess.Popen[str] | None = None
        self.environment = _environment(folder)
        # Heads the group of all shells, so that its number stays theirs: what one block begins another may use.
        self._head = subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0)

    def close(self) -> None:
        if self._python is not None:
            self._python.communicate(timeout=60)
        os.killpg(self._head.pid, signal.SIGKILL)  # and what a block began and none ended
        self._head.communicate()

    def save(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def run(self, block: Block) -> tuple[bool, str]:
        """Whether the block ran to its end, and everything it printed; paths as seen from the repository's folder."""
        good, printed = self._shell(block.text) if block.language == "bash" else self._exec(block.text)
        return good, printed.replace(f"{self.folder}/", "")

    def _shell(self, script: str) -> tuple[bool, str]:
        shell = subprocess.Popen(["bash", "-e", "-c", script], cwd=self.folder, env=self.environment,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                 text=True, errors="replace", process_group=self._head.pid)
        printed, _ = shell.communicate(timeout=TIMEOUT)
        return shell.returncode == 0, printed

    def _exec(self, source: str) -> tuple[bool, str]:
        if self._python is None:
            self._python = subprocess.Popen([sys.executable, "-c", INTERPRETER], cwd=self.folder, env=self.environment,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._python.stdin is not None and self._python.stdout is not None
        print(json.dumps(source), file=self._python.stdin, flush=True)
        answer = self._python.stdout.readline()
        good, printed = json.loads(answer) if answer else (False, f"Python ended with {self._python.wait()}")
        return good, printed


def console_commands() -> dict[str, str]:
    """The commands that installing puts on the path -> `module:function`."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return {name.strip(): target.strip() for name, _, target in (line.partition("=") for line in lines)}


def _environment(folder: Path) -> dict[str, str]:
    """The caller's, less its GPUs and its job; `python` is the interpreter that runs the tests."""
    programs = folder / "bin"
    programs.mkdir()
    starts = {"python": ""}
    for name, target in console_commands().items():
        module, _, function = target.partition(":")
        starts[name] = f"-c 'import sys; from {module} import {function}; sys.exit({function}())'"
    for name, arguments in starts.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WEBTEXT_PREFIX", "PRESET", "RUNS")}
    environment |= {"PATH": f"{programs}:{environment['PATH']}", "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1",
                    "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"), "CUDA_VISIBLE_DEVICES": "",
                    "PYTHONPATH": str(folder / "repository"), "COLUMNS": "120"}
    return environment


def follow(session: Session, text: str) -> Iterator[tuple[Block, str, str]]:
    """(block, what it printed, what is wrong) of every block that is run, in order."""
    comparison = Comparison()
    for block in blocks(text):
        if block.file:
            session.save(block.file, block.text)
        elif not block.skip and all(importlib.util.find_spec(name) for name in block.needs):
            good, printed = session.run(block)
            fails = any(line.startswith("error:") for line in (block.prints or "").splitlines())
            if good == fails:
                ended = "ended well" if good else "failed"
                yield block, printed, f"line {block.line}: the block {ended}, and printed\n{printed}"
                if not good:
                    return  # what follows would build on it
            else:
                wrong = comparison.difference(block.prints, printed) if block.prints is not None else None
                yield block, printed, f"line {block.line}: {wrong}" if wrong else ""


def main(page: str) -> int:
    failures = 0
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        session = Session(Path(folder))
        for block, printed, wrong in follow(session, Path(page).read_text()):
            print(f"--- line {block.line}\n{block.text}\n--- prints\n{printed}" + (f"*** {wrong}\n" if wrong else ""))
            failures += bool(wrong)
        session.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
