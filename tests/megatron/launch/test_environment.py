"""Commands in environments that they are not used to: each does what it does elsewhere, or says in one line what is
missing.

A cell is a command in an environment. What the command makes (tags, corpora, shards, lines) is compared with what the
same command makes in the environment of the tests.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from data import cli
from data.storage import DataError
from megatron.distributed import exit_codes
from megatron.inference.prompts import prompts_from_args, prompts_from_file
from tests.covering import pairs
from tests.megatron.helpers import ROOT, TINY, lines, total_digest, train, write_corpus

TEXT = "Grüße, 你好, 😀 and a \u2028 line"
NAME = "größe"


class Place(NamedTuple):
    """An environment: what bash does before the command ("$@"), and variables, None to unset one."""

    before: str = 'exec "$@"'
    variables: dict[str, str | None] = {}
    has_streams: bool = True


def mounted(where: str, options: str) -> Place:
    """A file system of a kind of its own there, for this command alone."""
    return Place(f"""exec unshare -m bash -c 'mount -t tmpfs -o {options} none {where} && exec "$@"' bash "$@" """)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PLACES = {
    "stdout closed": Place('exec "$@" >&-', has_streams=False),
    "streams closed": Place('exec "$@" <&- >&- 2>&-', has_streams=False),
    "LC_ALL=C": Place(variables={"LC_ALL": "C"}),
    "ASCII": Place(variables={**ASCII, "PYTHONIOENCODING": None}),
    "Latin-1": Place("""localedef -i en_US -f ISO-8859-1 "$PWD/en_US.ISO-8859-1" 2>&1 && LOCPATH=$PWD """
                     """LC_ALL=en_US.ISO-8859-1 exec "$@" """, {"PYTHONUTF8": "0"}),
    "umask 000": Place('umask 000; exec "$@"'),
    "umask 077": Place('umask 077; exec "$@"'),
    "umask 777": Place('umask 777; exec "$@"'),
    "python -O": Place(variables={"PYTHONOPTIMIZE": "1"}),
    "python -OO": Place(variables={"PYTHONOPTIMIZE": "2"}),
    "HOME absent": Place(variables={"HOME": "/nonexistent"}),
    "HOME unset": Place(variables={"HOME": None}),
    "HOME read-only": Place("""export HOME=$PWD/home && mkdir "$HOME" && exec unshare -m bash -c """
                            """'mount -t tmpfs -o ro none "$HOME" && exec "$@"' bash "$@" """),
    "TMPDIR absent": Place(variables={"TMPDIR": "/nonexistent"}),
    "64 files": Place('ulimit -n 64; exec "$@"'),
    "COLUMNS=1": Place(variables={"COLUMNS": "1", "LINES": "1"}),
    "tiny /dev/shm": mounted("/dev/shm", "size=64k"),
    "read-only /dev/shm": mounted("/dev/shm", "ro"),
    "tiny TMPDIR": Place("""mkdir small && TMPDIR=$PWD/small exec unshare -m bash -c """
                         """'mount -t tmpfs -o size=5m none "$TMPDIR" && exec "$@"' bash "$@" """),
}


class Scene(NamedTuple):
    """What the commands read; nothing of it is changed."""

    folder: Path
    corpus: str
    tags: Path
    """Two steps of four."""


Ours = Callable[[Scene, Path], tuple[list[object], Callable[[str], object]]]
"""The command with its arguments, and what it made, told from its standard output and the folder."""


def training(ranks: int) -> Ours:
    def command(scene: Scene, folder: Path) -> tuple[list[object], Callable[[str], object]]:
        shutil.copytree(scene.tags, folder / "save")
        launch = ["-m", "megatron.launch", "--nproc-per-node", ranks] if ranks > 1 else []
        return ([*launch, ROOT / "pretrain_gpt2.py", *flags_of(scene), "--model-parallel-size", ranks, "--num-workers",
                 2, "--save", folder / "save", "--load", folder / "save", "--metrics-file", folder / "m"],
                lambda out: (total_digest(folder / "save"), lines(folder / "m")))
    return command


def flags_of(scene: Scene) -> list[object]:
    return [*TINY, "--train-data", scene.corpus, "--train-iters", 4, "--lr", 1e-3, "--batch-size", 1,
            "--global-batch-size", 2, "--log-interval", 1, "--sample-tokens", 4, "--sample-prompt", "é"]


def generating(scene: Scene, folder: Path) -> tuple[list[object], Callable[[str], object]]:
    return (["-m", "megatron.generate", "--load", scene.tags, "--greedy", "--jsonl", "--max-new-tokens", 3, "--output",
             folder / NAME, TEXT[:9]], lambda out: json.loads((folder / NAME).read_text("utf-8"))["text"])


def printing(scene: Scene, folder: Path) -> tuple[list[object], Callable[[str], object]]:
    return (["-m", "megatron.generate", "--load", scene.tags, "--greedy", "--jsonl", "--max-new-tokens", 3, TEXT[:9]],
            lambda out: json.loads(out)["text"])


def preprocessing(scene: Scene, folder: Path) -> tuple[list[object], Callable[[str], object]]:
    return (["-m", "data.preprocess", "--input", scene.folder / f"{NAME}.jsonl", "--output-prefix", folder / NAME,
             "--tokenizer-type", "ByteLevelTokenizer", "--workers", 2],
            lambda out: [(folder / f"{NAME}{suffix}").read_bytes() for suffix in (".bin", ".idx")])


def listing(scene: Scene, folder: Path) -> tuple[list[object], Callable[[str], object]]:
    return ["-m", "megatron.checkpoint", "list", scene.tags], lambda out: [line.split()[0] for line in out.splitlines()]


COMMANDS: dict[str, Ours] = {
    "train": training(1), "train on 2 ranks": training(2), "generate": generating, "print": printing,
    "preprocess": preprocessing, "list": listing}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    texts = [TEXT, f"<html><body><p>{TEXT}</p></body></html>", *(f"text {k}" for k in range(20))]
    (folder / f"{NAME}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    made = Scene(folder, write_corpus(folder / "corpus"), folder / "tags")
    train([*flags_of(made), "--save", made.tags, "--exit-interval", 2])
    return made


Usual = Callable[[str], object]


@pytest.fixture(scope="module")
def usual(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Usual:
    """What a command makes in the environment of the tests."""
    made: dict[str, object] = {}

    def of(name: str) -> object:
        if name not in made:
            code, _, err, made[name] = run(name, Place(), scene, tmp_path_factory.mktemp("usual"))
            assert code == 0, err
        return made[name]

    return of


def run(name: str, place: Place, scene: Scene, folder: Path) -> tuple[int, str, str, object]:
    """Exit code, both outputs, and what came of it."""
    argv, told = COMMANDS[name](scene, folder)
    environment: dict[str, str | None] = {"PYTHONPATH": str(ROOT), "PYTHONUTF8": None, "PYTHONIOENCODING": None,
                                          "LANG": "C.UTF-8", **place.variables}
    merged = {**os.environ, **environment}
    ended = subprocess.run(["bash", "-c", place.before, "bash", sys.executable, *map(str, argv)], cwd=folder,
                           env={key: value for key, value in merged.items() if value is not None},
                           stdin=subprocess.DEVNULL, capture_output=True, timeout=240)
    out, err = (text.decode(errors="replace") for text in (ended.stdout, ended.stderr))
    return ended.returncode, out, err, told(out) if ended.returncode == 0 and place.has_streams else None


@pytest.mark.parametrize(("where", "name"), [("ASCII", "print"), *(
    pytest.param(*case.values, marks=pytest.mark.slow) for case in pairs([*PLACES], [*COMMANDS], each=1))])
def test_a_command_does_the_same_in_another_environment(where: str, name: str, scene: Scene, usual: Usual,
                                                        tmp_path: Path) -> None:
    if "unshare" in PLACES[where].before and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    code, out, err, made = run(name, PLACES[where], scene, tmp_path)
    assert code == 0 and not re.search("Traceback|Exception ignored|^error:", out + err, re.MULTILINE), (code, err)
    if PLACES[where].has_streams:
        assert made == usual(name)


@pytest.mark.parametrize("raw", [b"\xff", "half a pair \ud800".encode("utf-8", "surrogatepass")])
def test_a_prompt_or_stop_that_is_no_text_is_refused_and_not_answered(raw: bytes, tmp_path: Path) -> None:
    """A tokenizer would read `?` in its place."""
    with pytest.raises(DataError, match="prompt 2 of the command line: not UTF-8 text"):
        prompts_from_args(["good", os.fsdecode(raw)])
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "half a pair \ud800"}))
    with pytest.raises(DataError, match="line 1: key 'prompt': lone surrogate"):
        list(prompts_from_file(str(tmp_path / "p.jsonl"), print))


@pytest.mark.parametrize("error", [
    OSError(errno.EMFILE, "too many"), BlockingIOError(errno.EAGAIN, "none"), RuntimeError("can't start new thread")])
def test_a_limit_of_the_system_is_one_line_of_every_command(error: Exception, capsys: pytest.CaptureFixture[str]
                                                            ) -> None:
    def fail() -> None:
        raise error

    failure = exit_codes.exit_reason_of(error, {})
    assert failure.code == 5 and not failure.is_peer_loss and "raise it (ulimit -n, ulimit -u)" in failure.text
    with pytest.raises(SystemExit) as caught, patch("data.cli._interrupt_on_stop_signals"):
        cli.run_command(fail)
    err = capsys.readouterr().err
    assert caught.value.code == 5 and err.count("\n") == 1 and "raise it (ulimit -n, ulimit -u)" in err
