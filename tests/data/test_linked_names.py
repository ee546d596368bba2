"""One corpus under two names that links lead to one another: still one writer, and what is published is its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from data.indexed import IndexedCorpus
from data.storage import StorageFault
from data.writer import CorpusWriter
from tests.data.test_writer import is_whole, write

SUFFIXES = (".bin", ".idx", ".json")


def every_file(folder: Path) -> Path:
    for suffix in SUFFIXES:
        (folder / f"link{suffix}").symlink_to(f"real{suffix}")
    return folder / "link"


def the_folder(folder: Path) -> Path:
    (folder / "also").symlink_to(folder)
    return folder / "also" / "real"


def one_by_one(folder: Path) -> Path:
    """Through another link, from another folder."""
    (folder / "sub").mkdir()
    (folder / "between.idx").symlink_to("real.idx")
    (folder / "sub" / "link.idx").symlink_to("../between.idx")
    return folder / "sub" / "link"


LINKS: dict[str, Callable[[Path], Path]] = {
    "every file": every_file, "the folder": the_folder, "the index, twice": one_by_one}


@pytest.mark.parametrize("is_second", [False, True], ids=["the link is first", "the link is second"])
@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_a_second_writer_by_another_name_is_refused_and_harms_nothing(
        tmp_path: Path, link: Callable[[Path], Path], is_second: bool) -> None:
    names = [link(tmp_path), tmp_path / "real"][::-1 if is_second else 1]
    with CorpusWriter(names[0], vocab_size=10) as first:
        first.add_documents([1] * 500, [500])
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(StorageFault, match=f"^{names[1]}: process {os.getpid()} on .* is writing under this name"):
            write(names[1], 2)
        assert sorted(tmp_path.rglob("*")) == before
        first.add_documents([1] * 500, [100, 400])
    assert is_whole(IndexedCorpus(names[0]))
    assert not [*tmp_path.rglob("*.writing"), *tmp_path.rglob("*.tmp")]
    write(names[1], 2)
    assert is_whole(IndexedCorpus(names[1]))
