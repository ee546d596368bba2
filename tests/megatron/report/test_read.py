"""What is read of a metrics file in any state that a kill, a power cut or a running trainer leaves it in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.storage import DataError
from megatron.report.history import MetricsFileReader
from tests.megatron.report.written import CONFIG, start, step, write


def read(path: Path) -> tuple[list[int | None], MetricsFileReader]:
    lines = MetricsFileReader(path)
    return [record.get("iteration") for record in lines], lines


@pytest.mark.parametrize("cut", range(1, len(json.dumps(step(3))), 7))
def test_a_last_line_that_was_cut_anywhere_is_told_and_left_out(cut: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m", CONFIG, step(1), step(2), end=json.dumps(step(3))[:cut])
    found, lines = read(path)
    assert found == [None, 1, 2] and lines.last_line_is_incomplete and not lines.num_damaged_lines


def test_a_whole_last_line_needs_no_end(tmp_path: Path) -> None:
    found, lines = read(write(tmp_path / "m", CONFIG, end=json.dumps(step(1))))
    assert found == [None, 1] and not lines.last_line_is_incomplete


@pytest.mark.parametrize("cut", [5, 60, 200])
@pytest.mark.parametrize("following", [start(2), step(3)])
def test_a_record_behind_a_cut_line_is_found(following: dict[str, object], cut: int, tmp_path: Path) -> None:
    """As a trainer that did not begin a new line has left it."""
    path = write(tmp_path / "m", step(1), step(2), end=json.dumps(step(3))[:cut] + json.dumps(following) + "\n"
                 + json.dumps(step(4)) + "\n")
    found, lines = read(path)
    assert found == [1, 2, following.get("iteration"), 4
                     ] and lines.num_damaged_lines == 1 and not lines.last_line_is_incomplete


def test_zeros_of_a_power_cut_hide_no_record(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(json.dumps(step(1)).encode() + b"\n" + bytes(4096) + json.dumps(start(1)).encode() + b"\n")
    found, lines = read(path)
    assert found == [1, None] and lines.num_damaged_lines == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", bytes(512), b'{"config": tr'])
def test_a_file_without_a_line_is_a_run_that_has_only_begun(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    assert read(tmp_path / "m")[0] == []


@pytest.mark.parametrize("content", [
    b"some text\nand more\n", b'{"text": "a corpus"}\n' * 3, b"[" * 100_000 + b"\n", b"\x80\xff\x00\n" * 3,
    b'"iteration"\n'])
def test_another_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(DataError, match=r"/m is no metrics file"):
        read(tmp_path / "m")
