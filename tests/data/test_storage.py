"""Staged files are whole or absent, whatever happens while they are written, and no command writes over what it reads.
The map over processes keeps the order and hangs on no dead worker; `call_within` bounds time and memory, even in C."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from data import importers, merge, preprocess, split_json
from data.parallel import MAX_PENDING_PER_WORKER, call_within, ordered_map
from data.sources import open_datasets
from data.storage import (DataError, StorageFault, UsageError, check_outputs_are_not_inputs, make_folder,
                          prefix_storage_errors, staged_file)
from data.tokenizer import ByteLevelTokenizer
from data.webtext import __main__ as webtext
from data.writer import CorpusWriter
from megatron.inference import cli as generate


def test_a_failure_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(KeyError), staged_file(target, "w") as file:
        file.write("half of the new")
        raise KeyError
    with pytest.raises(StorageFault, match=r"file: cannot write: No space left"), staged_file(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))  # at the last flush
    with pytest.raises(StorageFault), staged_file(target) as file:
        file.write(b"x")
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_what_is_no_fault_of_the_target_is_told_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageFault, match="cannot write"), staged_file(tmp_path / "missing" / "file"):
        pass
    (tmp_path / "plain").write_text("")
    with pytest.raises(StorageFault, match="plain"):
        make_folder(tmp_path / "plain" / "folder")
    with pytest.raises(FileNotFoundError), staged_file(tmp_path / "file"):
        open(tmp_path / "missing")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))))
    with pytest.raises(OSError) as caught, prefix_storage_errors("--output"), staged_file(tmp_path / "x") as file:
        file.write(b"x")
    assert not isinstance(caught.value, StorageFault) and caught.value.errno == errno.ENOMEM
    assert os.listdir(tmp_path) == ["plain"]


def test_a_link_stays_one_and_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "link").symlink_to("real")
    with staged_file(tmp_path / "link", "w") as file:
        file.write("after")
        assert (tmp_path / "real").read_text() == "before"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with staged_file(tmp_path / "pipe") as stream:
        stream.write(b"words")
    assert os.read(reader, 10) == b"words" and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "real"]


@pytest.mark.parametrize("call, number", [("fsync", errno.EIO), ("fsync", errno.EDQUOT), ("replace", errno.EROFS)])
def test_a_cache_that_cannot_be_written_is_named_with_its_flag(call, number, tmp_path, monkeypatch):
    source, cache = tmp_path / "text.jsonl", tmp_path / "cache"
    source.write_text('{"text": "some words of a text"}\n' * 9)

    monkeypatch.setattr(os, call, Mock(side_effect=OSError(number, os.strerror(number))))
    beside = f"the cache beside {source}, which a folder given with --data-cache-path replaces: "
    for given, begins in ((cache, "--data-cache-path: "), (None, beside)):
        with pytest.raises(StorageFault) as caught:
            open_datasets(train_data=[str(source)], split="1,0,0", seq_length=4, seed=1,
                          tokenizer=ByteLevelTokenizer(), cache_path=given and str(given))
        folder = given or f"{source}.cache"
        assert str(caught.value).startswith(f"{begins}{folder}/"), caught.value
        assert str(caught.value).endswith(f": cannot write: {os.strerror(number)}")


# ----------------------------------------------------------------------------------------------- outputs are not inputs

LINES = "".join(json.dumps({"text": f"document {number} of some words"}) + "\n" for number in range(60))
BYTE = ["--tokenizer-type", "ByteLevelTokenizer"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("corpus.json", "corpus.bin.jsonl", "s.train.jsonl", "s.valid.jsonl", "s.test.jsonl", "pr.txt"):
        Path(name).write_text(LINES)
    Path("train.bin").write_bytes(b"\1\0\2\0" * 50)
    Path("K").mkdir()
    for prefix in ("ma", "mb"):
        with CorpusWriter(prefix, vocab_size=300) as writer:
            writer.add_documents([1, 2, 3], [1, 2])
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


COMMANDS: dict[str, tuple[Callable[[list[str]], object], list[str], str, str]] = {
    "preprocess, of a folder": (preprocess.main, ["--input", "corpus.json", "mb.json", "--output-prefix",
                                                  "../{here}/corpus", *BYTE], "../{here}/corpus.json", "corpus.json"),
    "preprocess, a vocabulary": (preprocess.main, [
        "--input", "pr.txt", "--output-prefix", "corpus", "--tokenizer-type", "CharacterLevelTokenizer",
        "--vocab-file", "corpus.json"], "corpus.json", "corpus.json"),
    "split_json, one of a share of 0": (split_json.main, ["corpus.json", "s.test.jsonl", "--split", "1,1,0",
                                                          "--output-prefix", "s"], "s.test.jsonl", "s.test.jsonl"),
    "importers": (importers.main, ["--input", "train.bin", "--output-prefix", "train"], "train.bin", "train.bin"),
    "merge, the last": (merge.main, ["./mb", "ma", "mb"], "./mb.bin", "mb.bin"),
    "generate": (generate.main, ["--load", "K", "--file", "pr.txt", "--output", "pr.txt"], "pr.txt", "pr.txt"),
    "webtext run, its report": (webtext.main, ["run", "report.txt", "--output", "."], "report.txt", "report.txt"),
    "webtext run, evaluation text": (webtext.main, ["run", "pr.txt", "--output", ".", "--evaluation", "report.txt"],
                                     "report.txt", "report.txt"),
    "webtext run, the part for validation": (
        webtext.main, ["run", "c_valid.json", "--output", "w", "--output-prefix", "c"], "c_valid.json",
        "c_valid.json")}


@pytest.mark.parametrize("main, argv, output, source", COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_would_write_over_its_input_is_refused(here, main, argv, output, source):
    for name in ("report.txt", "c_valid.json"):
        Path(name).write_text(LINES)
    before = contents(here)
    argv, output = [word.format(here=here.name) for word in argv], output.format(here=here.name)
    with pytest.raises(UsageError) as caught:
        main(argv)
    also = "" if output == source else f", which is {source}"
    assert f"{output}{also}: is read by this command, which would write over it; " in str(caught.value)
    assert "choose another" in str(caught.value)
    assert contents(here) == before and not Path("w").exists()


def test_a_link_to_an_input_is_no_other_name(here: Path) -> None:
    os.symlink("pr.txt", "symbolic.json")
    os.link("pr.txt", "hard.json")
    os.symlink(".", "same")
    before = contents(here)
    for source, prefix in (("pr.txt", "symbolic"), ("pr.txt", "hard"), ("same/corpus.json", "corpus")):
        with pytest.raises(UsageError, match="json, which is .*: is read by this command, which would write over it"):
            preprocess.main(["--input", source, "--output-prefix", prefix, *BYTE])
    assert contents(here) == before


def test_files_beside_the_input_and_terminals_are_no_input(here: Path) -> None:
    check_outputs_are_not_inputs(["/dev/null", "pr.txt", "absent"], ["/dev/null", "corpus.json", "other"])
    with pytest.raises(UsageError, match="^sub/../absent, which is absent: "):
        check_outputs_are_not_inputs(["absent"], ["sub/../absent"])
    preprocess.main(["--input", "corpus.json", "--output-prefix", "corpus2", *BYTE])
    preprocess.main(["--input", "pr.txt", "--output-prefix", "corpus2", "--json-key", "text", *BYTE])


# ---- maps over processes -------------------------------------------------------------------------------------------

def _pid_or_die(item: int) -> int:
    if item == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def _refuse(item: int) -> int:
    raise DataError(f"item {item}")


def test_the_map_keeps_order_and_passes_errors_on() -> None:
    assert list(ordered_map(abs, range(-7, 0), workers=3)) == [7, 6, 5, 4, 3, 2, 1]
    assert list(ordered_map(abs, [], workers=2)) == [] and list(ordered_map(abs, [-1], workers=3)) == [1]
    with pytest.raises(DataError, match="item 0"):
        list(ordered_map(_refuse, range(9), workers=2))


def _number(item: tuple[int, Path]) -> int:
    """The first item is done when the last one that is given out beside it is."""
    number, reached = item
    end = time.monotonic() + 30
    while number == 0 and not reached.exists():
        assert time.monotonic() < end, "nobody goes on"
        time.sleep(0.01)
    if number == 2 * MAX_PENDING_PER_WORKER:
        reached.touch()
    return number


def test_the_map_gives_the_next_item_to_whoever_is_free_and_waits_for_the_slow_one(tmp_path: Path) -> None:
    taken: list[int] = []

    def items() -> Iterator[tuple[int, Path]]:
        for number in range(100):
            taken.append(number)
            yield number, tmp_path / "reached"

    results = ordered_map(_number, items(), workers=2)
    assert next(results) == 0
    assert len(taken) == 2 * MAX_PENDING_PER_WORKER + 1, (
        "the other worker went on while the first one waited, but not without end")
    assert list(results) == list(range(1, 100))


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    with pytest.raises(DataError, match="a worker process died"):
        list(ordered_map(_pid_or_die, range(100), workers=2))


def test_results_and_errors_are_those_of_the_function() -> None:
    assert call_within(len, "x" * 1_000_000, 10, 1 << 30) == 1_000_000
    with pytest.raises(ZeroDivisionError):
        call_within((1).__truediv__, 0, 10, 1 << 30)


def test_what_needs_more_gives_none_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    children, fork = list[int](), os.fork
    monkeypatch.setattr(os, "fork", lambda: children.append(child := fork()) or child)
    assert call_within(lambda _: re.match("(a|a)*b", "a" * 100), None, 0.1, 1 << 30) is None
    assert call_within(lambda _: os.kill(os.getpid(), signal.SIGSEGV), None, 10, 1 << 30) is None
    with pytest.raises(MemoryError):
        call_within(bytes, 1 << 30, 10, 1 << 28)
    assert len(children) == 3 and not any(Path(f"/proc/{child}").exists() for child in children)


def test_files_of_the_caller_are_closed(tmp_path: Path) -> None:
    """So that a lock goes with the process that holds it."""
    with (tmp_path / "lock").open("w"):
        found = call_within(lambda _: sum(os.path.exists(f"/proc/self/fd/{number}") for number in range(1000)), None,
                            10, 1 << 30)
        assert found == 1  # the pipe
