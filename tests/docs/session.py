"""A page followed from top to bottom by a reader with a fresh copy of the repository and no GPU.

`python -m tests.docs.session docs/PAGE.md` follows one and prints what really comes out, for whoever writes the page.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.docs.compare import Comparison
from tests.docs.reader import ROOT, Block, blocks

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
