"""The checksums of a source are taken once, and again as soon as a file is not the one it was."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from data import input_files, sources
from data.indexed import IndexedCorpus
from data.preprocess import TextReadOptions
from data.sources import CHECKSUMS_FILE, ChecksumCache, check_sources, open_datasets
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files whose bytes were read."""
    seen: list[str] = []
    real = sources.crc32_file

    def counted(path: str) -> str:
        seen.append(Path(path).name)
        time.sleep(0.02)
        return real(path)

    monkeypatch.setattr(sources, "crc32_file", counted)
    return seen


def settled(path: Path, text: str) -> str:
    """A file that was last touched long ago, as far as the mtime goes."""
    path.write_text(text)
    os.utime(path, (1, 1))
    return str(path)


def contents(path: str, folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    return sources._content_keys([path], ChecksumCache(folder))[0]


def test_of_several_ranks_one_takes_the_checksum(tmp_path: Path, read: list[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    path = settled(tmp_path / "a.jsonl", '{"text": "x"}')
    monkeypatch.setattr(sources, "MTIME_SETTLED_NS", 0)
    time.sleep(0.02)
    found: list[list[str]] = []
    ranks = [threading.Thread(target=lambda: found.append(contents(path, tmp_path))) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert read == ["a.jsonl"] and len(found) == 8 and all(one == contents(path, tmp_path / "empty") for one in found)


def test_the_shards_of_a_folder_are_summed_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for that: for the checksums, and for whether they are what their stage wrote."""
    texts = tmp_path / "texts"
    texts.mkdir()
    shards = [settled(texts / f"part-{number:05d}.jsonl", '{"text": "x"}\n') for number in range(2)]
    (texts / "stage.json").write_text(json.dumps({"outputs": [
        {"name": Path(path).name, "sha256": input_files.sha256_file(path)} for path in shards]}))
    both = threading.Barrier(2)
    for module, name in ((sources, "crc32_file"), (input_files, "sha256_file")):
        def meets(path: str, real: Callable[[str], str] = getattr(module, name)) -> str:
            both.wait(20)
            return real(path)

        monkeypatch.setattr(module, name, meets)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    _, note = sources.cached_corpus(str(texts), ByteLevelTokenizer(), TextReadOptions(), str(tmp_path / "cache"))
    assert "2 files, 2 documents" in str(note) and both.n_waiting == 0


@pytest.mark.parametrize("module, name", [(sources, "crc32_file"), (input_files, "sha256_file")])
def test_a_shard_that_cannot_be_read_is_named(module: ModuleType, name: str, tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    path = settled(tmp_path / "part-00000.jsonl", '{"text": "x"}\n')
    (tmp_path / "stage.json").write_text(json.dumps({"outputs": [{"name": "part-00000.jsonl", "sha256": "0"}]}))

    def fails(path: str) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, name, fails)
    with pytest.raises(DataError, match=f"^{path}: cannot read: Input/output error$"):
        sources.cached_corpus(path, ByteLevelTokenizer(), TextReadOptions(), str(tmp_path / "cache"))


def test_a_file_that_changed_is_read_again_even_with_the_same_size_and_time(
        tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MTIME_SETTLED_NS", 0)
    path = settled(tmp_path / "a.jsonl", "one")
    time.sleep(0.02)
    first = contents(path, tmp_path)
    settled(tmp_path / "a.jsonl", "two")
    second = contents(path, tmp_path)
    assert first != second and read == ["a.jsonl"] * 2


def test_a_file_that_changed_just_now_is_not_written_down(tmp_path: Path, read: list[str]) -> None:
    """Its next change might be within the same tick of the clock."""
    path = settled(tmp_path / "a.jsonl", "one")
    assert contents(path, tmp_path) == contents(path, tmp_path) and len(read) == 2
    assert not (tmp_path / CHECKSUMS_FILE).exists()


@pytest.mark.parametrize("text", ["", '{"%s": {"mark": [], "crc32": "00000000"}}'])
def test_a_record_of_another_file_is_not_believed(tmp_path: Path, read: list[str], text: str) -> None:
    path = settled(tmp_path / "a.jsonl", "one")
    (tmp_path / CHECKSUMS_FILE).write_text(text.replace("%s", path))
    assert contents(path, tmp_path) == contents(path, tmp_path / "empty") and len(read) == 2


@pytest.mark.parametrize("suffix", ["", ".jsonl", ".txt", ".bin", ".pdf"])
def test_training_text_that_can_be_read_only_once_is_refused(tmp_path: Path, suffix: str) -> None:
    """Its checksum would take what the tokenizer is to read."""
    os.mkfifo(tmp_path / f"pipe{suffix}")
    with pytest.raises(DataError, match=f"--train-data: .*pipe{suffix}: is no file but a pipe or a device"):
        check_sources([str(tmp_path / f"pipe{suffix}")], "--train-data")
    with pytest.raises(DataError, match=f"pipe{suffix}: is no file but a pipe or a device"):
        IndexedCorpus(tmp_path / f"pipe{suffix}")
    with pytest.raises(DataError, match=f"pipe{suffix}: is no file but a pipe or a device"):
        open_datasets(train_data=[str(tmp_path / f"pipe{suffix}")], seq_length=8, seed=1,
                      tokenizer=ByteLevelTokenizer(), cache_path=str(tmp_path))
