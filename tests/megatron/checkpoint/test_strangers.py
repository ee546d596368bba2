"""Links that lead out of a save root are not followed, by readers or writers; files of nobody's are named and left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megatron.checkpoint import cli, tags, zero_to_fp32
from megatron.checkpoint.commit import Keep, clean_up_save_root
from megatron.checkpoint.reader import digest_lines, open_checkpoint
from megatron.checkpoint.tags import read_tag_manifest
from megatron.checkpoint.verify import verify_tag
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.made import Grid, open_quietly, printed, save_grid, save_solo

GRID = Grid(1, 2)
OUTSIDE = "is a link to .*/elsewhere/.*, outside "


def content(folder: Path) -> dict[str, bytes | str]:
    """All of it, and where its links lead."""
    return {str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_symlink() or path.is_file()}


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """A save root whose step 2 has moved elsewhere, and a link is left."""
    root, other = tmp_path / "root", tmp_path / "elsewhere"
    for step in (1, 2):
        save_grid(root, GRID, step=step, seed=step)
    other.mkdir()
    shutil.move(root / "global_step2", other / "global_step2")
    (root / "global_step2").symlink_to(other / "global_step2")
    return root, other


READERS: dict[str, Callable[[Path], object]] = {
    "load": open_checkpoint,
    "load by name": lambda root: open_checkpoint(root, "global_step2"),
    "verify": lambda root: verify_tag(root, "global_step2"),
    "manifest": lambda root: read_tag_manifest(root, "global_step2"),
    "verify all": lambda root: cli.verify_tags(root, None),
    "list": lambda root: cli.list_tags(root, "global_step2"),
    "digest": lambda root: digest_lines(open_checkpoint(root, "global_step2")),
    "zero_to_fp32.py": lambda root: zero_to_fp32.open_tag(root),
    "zero_to_fp32.py -t": lambda root: zero_to_fp32.open_tag(root, "global_step2"),
}


def check_refused(readers: Iterable[str], root: Path, link: str) -> None:
    for reader in readers:
        with pytest.raises((CheckpointError, zero_to_fp32.DamagedCheckpoint), match=OUTSIDE) as caught:
            READERS[reader](root)
        assert str(root / link) in str(caught.value), reader


def test_a_tag_that_is_a_link_out_of_the_root_is_refused(roots: tuple[Path, Path]) -> None:
    root, other = roots
    link = root / "global_step2"
    (root / "between").symlink_to(other / "global_step2")
    (other / "mine").symlink_to("global_step2")
    for target in (other / "global_step2", "../elsewhere/global_step2", "between", other / "mine",
                   "../root/../elsewhere/global_step2"):
        link.unlink()
        link.symlink_to(target)
        check_refused(READERS, root, "global_step2")


def test_links_that_stay_inside_and_roots_that_are_links_are_followed(tmp_path: Path) -> None:
    save_grid(tmp_path / "root", GRID, step=1)
    (tmp_path / "root" / ".shelf").mkdir()
    shutil.move(tmp_path / "root" / "global_step1", tmp_path / "root" / ".shelf" / "global_step1")
    (tmp_path / "root" / "global_step1").symlink_to(".shelf/global_step1")
    (tmp_path / "link").symlink_to("root")
    for root in (tmp_path / "root", tmp_path / "link"):
        assert open_quietly(root).tag == "global_step1"
        assert zero_to_fp32.output_tensors(*zero_to_fp32.open_tag(root))


def test_neither_a_save_nor_its_pruning_touches_what_a_link_leads_to(roots: tuple[Path, Path]) -> None:
    root, other = roots
    before = content(other)
    for step in (3, 4, 5):
        save_solo(root, step, run="made", keep=Keep(2))
    assert content(other) == before
    assert sorted(tags.tag_names(root)) == ["global_step2", "global_step4", "global_step5"]
    assert (root / "global_step2").is_symlink()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_save_of_the_name_replaces_the_link_alone(is_there: bool, roots: tuple[Path, Path]) -> None:
    root, other = roots
    if not is_there:
        shutil.rmtree(other / "global_step2")
    before = content(other)
    with printed() as said:
        save_grid(root, GRID, step=2, seed=9)
    assert "global_step2, a link; what it leads to stays as it is" in said[0]
    assert content(other) == before and not (root / "global_step2").is_symlink()
    assert open_checkpoint(root).tag == "global_step2"
    assert not [name for name in os.listdir(root) if name.startswith(".")]


@pytest.mark.parametrize("name", [".aside-global_step2", ".staging-global_step2-x", ".trash-x"])
def test_what_a_killed_save_left_is_swept_without_what_links_lead_to(name: str, roots: tuple[Path, Path]) -> None:
    root, other = roots
    before = content(other)
    (root / "global_step2").rename(root / name)
    clean_up_save_root(root)
    assert content(other) == before
    with pytest.raises(CheckpointError, match="outside the save root|no tag global_step2"):
        open_checkpoint(root, "global_step2")


# ---- latest ---------------------------------------------------------------------------------------------------------

def test_a_latest_that_is_a_link_out_of_the_root_is_refused(roots: tuple[Path, Path]) -> None:
    root, other = roots
    (other / "thesis").write_text("global_step1\n")
    for target in ("thesis", "nowhere"):
        (root / "latest").unlink()
        (root / "latest").symlink_to(f"../elsewhere/{target}")
        check_refused(["load", "verify all", "zero_to_fp32.py"], root, "latest")
    assert open_checkpoint(root, "global_step1").tag == "global_step1"
    for tag in ("global_step1", "global_step2"):
        (root / tag).rename(other / f"{tag} of before")
    with pytest.raises(CheckpointError, match=OUTSIDE):
        tags.has_no_checkpoint(root)  # it is no fresh start


@pytest.mark.parametrize("name", ["latest", ".latest-pending", "zero_to_fp32.py"])
def test_a_save_writes_no_file_through_a_link(name: str, roots: tuple[Path, Path]) -> None:
    root, other = roots
    (other / "thesis").write_text("global_step1\n")
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(other / "thesis")
    save_grid(root, GRID, step=3, seed=2)
    assert (other / "thesis").read_text() == "global_step1\n" and not (root / name).is_symlink()
    assert (root / "latest").read_text() == "global_step3\n"
    assert open_quietly(root).tag == "global_step3"


# ---- files of nobody's ----------------------------------------------------------------------------------------------

STRANGE = ["notes.txt", ".DS_Store", ".nfs000000001", "rank9.json", "rank2.safetensors", "rank1-1.safetensors",
           "manifest.json.bak", "line\nbreak"]


def put(folder: Path, name: str) -> Path:
    (folder / name).write_bytes(b"mine")
    return folder / name


def test_a_file_of_nobodys_is_a_warning_and_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_grid(tmp_path, GRID, step=1)
    for name in STRANGE:
        own = put(tmp_path / "global_step1", name)
        assert open_checkpoint(tmp_path).tag == "global_step1"
        verify_tag(tmp_path, "global_step1")
        cli.verify_tags(tmp_path, None)
        shown = capfd.readouterr()
        expected = f"warning: tag global_step1: not part of this checkpoint, and not read: {name!r}"
        assert shown.err == 3 * f"{expected}\n" and shown.out.startswith("global_step1: ok, ")
        assert own.read_bytes() == b"mine"
        own.unlink()
    (tmp_path / "global_step1" / ".ipynb_checkpoints").mkdir()
    for number in range(5):
        put(tmp_path / "global_step1", f"x{number}")
    open_checkpoint(tmp_path)
    assert capfd.readouterr().err.endswith("not read: '.ipynb_checkpoints', 'x0', 'x1' and 3 more\n")


def test_what_goes_with_a_tag_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        save_solo(tmp_path, step)
        put(tmp_path / f"global_step{step}", "notes.txt")
    with printed() as said:
        save_solo(tmp_path, 3, keep=Keep(2))
        save_solo(tmp_path, 2, seed=4)
    assert [line.partition(" of 20")[0] for line in said] == [
        f"warning: --keep-last deletes {tmp_path}/global_step1, and what no save wrote with it: 'notes.txt'",
        f"replacing {tmp_path}/global_step2: an earlier save"]
    assert said[1].endswith("of the same name, and what no save wrote with it: 'notes.txt'")
