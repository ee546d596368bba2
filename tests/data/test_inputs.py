"""Which files a folder means: every one of a known kind, in order, and nothing left out without a word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data.input_files import find_text_files, kind_of
from data.storage import DataError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(folder: Path) -> list[str]:
    return [os.path.relpath(path, folder) for path in find_text_files([folder]).files]


def test_a_folder_is_its_files_sorted_by_path(tmp_path: Path) -> None:
    touch(tmp_path, "b.txt", "B.TXT", "a/z.jsonl.gz", "a/b/c.txt.zst", "a.txt.xz", "10.ndjson", "9.txt")
    assert names(tmp_path) == ["10.ndjson", "9.txt", "B.TXT", "a/b/c.txt.zst", "a/z.jsonl.gz", "a.txt.xz", "b.txt"]


def test_what_is_left_out_is_counted_and_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", ".hidden.txt", ".git/config", "a.txt.cache/a-0.bin", "paper.pdf", "corpus.json", "c.bin",
          "README", "sub/page.html")
    os.mkfifo(tmp_path / "pipe.txt")
    found = find_text_files([tmp_path])
    assert [Path(path).name for path in found.files] == ["a.txt"]
    assert found.hidden == 2
    assert sorted(Path(path).name for path in found.unknown) == [
        "README", "c.bin", "corpus.json", "page.html", "paper.pdf"]
    assert found.left_out.startswith("left out: 2 hidden, 5 of unknown kind (") and "and 2 more" in found.left_out
    assert found.left_out.endswith(f", a pipe ({tmp_path}/pipe.txt)")
    os.mkfifo(tmp_path / "q")
    assert f", 2 pipes ({tmp_path}/pipe.txt, {tmp_path}/q)" in find_text_files([tmp_path]).left_out


def test_what_we_made_of_a_folder_is_no_part_of_it(tmp_path: Path) -> None:
    key = "89faa5c5ba8c9711"
    touch(tmp_path, "a.txt", f"texts-{key}.bin", f"texts-{key}.idx", f"texts-{key}.json", f".texts-{key}.lock",
          f"{key}-0-documents.rows", f"{key}-12-starts.rows", f"{key}-0-starts.npy",
          f".texts-{key}.json.12.0123abcd.tmp", "a.txt.cache/a-0.bin")
    assert find_text_files([tmp_path]).left_out == ""
    touch(tmp_path, "my.cache/a.txt", f"my-{key}.txt")
    assert names(tmp_path) == ["a.txt", "my-89faa5c5ba8c9711.txt", "my.cache/a.txt"], "a name like ours, text of theirs"


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.txt", "other/b.txt", "other/deep/c.txt")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "deep" / "up").symlink_to(tmp_path / "other")
    (tmp_path / "in" / "self").symlink_to(".")
    (tmp_path / "in" / "l.txt").symlink_to(tmp_path / "other" / "b.txt")
    assert names(tmp_path / "in") == ["a.txt", "l.txt", "link/b.txt", "link/deep/c.txt"]
    assert "2 links to a folder around them" in find_text_files([tmp_path / "in"]).left_out


def test_a_dangling_link_is_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("nowhere")
    assert names(tmp_path) == ["a.txt"]


def test_a_folder_without_text_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    touch(tmp_path, "corpus.bin", "corpus.idx")
    with pytest.raises(DataError, match="holds no file of text .*left out: 2 of unknown kind .*corpus.bin"):
        find_text_files([tmp_path])


def test_named_files_are_taken_in_the_order_given_whatever_their_names(tmp_path: Path) -> None:
    assert find_text_files(["b", "a.txt", "a.json"]).files == ["b", "a.txt", "a.json"]
    assert list(map(kind_of, ("b", "a.txt", "x.TXT.gz", "a.json", "a.jsonl.zst", "txt", "a.gz"))) == [
        None, "text", "text", "jsonl", "jsonl", None, None]
