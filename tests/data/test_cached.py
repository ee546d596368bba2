"""The checksums of a source are taken once, and again as soon as a file is not the one it was."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from data import cached
from data.cached import SUMS, Sums
from data.corpora import open_datasets
from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files whose bytes were read."""
    seen: list[str] = []
    real = cached.crc32_file

    def counted(path: str) -> str:
        seen.append(Path(path).name)
        time.sleep(0.02)
        return real(path)

    monkeypatch.setattr(cached, "crc32_file", counted)
    return seen


def settled(path: Path, text: str) -> str:
    """A file that was last touched long ago, as far as the mtime goes."""
    path.write_text(text)
    os.utime(path, (1, 1))
    return str(path)


def contents(path: str, folder: Path | None) -> list[str]:
    return cached._contents([path], Sums(folder))[0]


def test_of_several_ranks_one_takes_the_checksum(tmp_path: Path, read: list[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    path = settled(tmp_path / "a.jsonl", '{"text": "x"}')
    monkeypatch.setattr(cached, "SETTLED_NS", 0)
    time.sleep(0.02)
    found: list[list[str]] = []
    ranks = [threading.Thread(target=lambda: found.append(contents(path, tmp_path))) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert read == ["a.jsonl"] and len(found) == 8 and all(one == contents(path, None) for one in found)


def test_a_file_that_changed_is_read_again_even_with_the_same_size_and_time(
        tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "SETTLED_NS", 0)
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
    assert not (tmp_path / SUMS).exists()


@pytest.mark.parametrize("text", ["", "[1]", '{"%s": 3}', '{"%s": {"mark": [], "crc32": "00000000"}}'])
def test_a_strange_record_is_not_believed(tmp_path: Path, read: list[str], text: str) -> None:
    path = settled(tmp_path / "a.jsonl", "one")
    (tmp_path / SUMS).write_text(text.replace("%s", path))
    assert contents(path, tmp_path) == contents(path, None) and len(read) == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".bin"])
def test_training_text_that_can_be_read_only_once_is_refused(tmp_path: Path, suffix: str) -> None:
    """Its checksum would take what the tokenizer is to read."""
    os.mkfifo(tmp_path / f"pipe{suffix}")
    with pytest.raises(DataError, match=f"pipe{suffix}: is no file but a pipe or a device"):
        open_datasets(train_data=[str(tmp_path / f"pipe{suffix}")], seq_length=8, seed=1,
                      tokenizer=ByteLevelTokenizer(), cache_path=str(tmp_path))
