"""Any damage of a tag is refused by the open that a resume begins with, which names the file; a clean tag never is.

What is opened has been verified whole, so nothing of a damaged tag reaches a model.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.verify import verify_tag
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.made import GRIDS, Grid, save_grid

TAG = "global_step2"
HERE, OTHER_LAYOUT, OTHER_RUN = Grid(2, 2), Grid(4, 1), 7


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tag, its neighbour, and tags of the same name of another layout and of another run."""
    folder = tmp_path_factory.mktemp("pristine")
    for name, grid, seed in (("s", HERE, 0), ("layout", OTHER_LAYOUT, 0), ("run", HERE, OTHER_RUN)):
        save_grid(folder / name, grid, step=2, seed=seed)
    save_grid(folder / "before", HERE, step=1, seed=1)
    return folder


def refusal(root: Path) -> str:
    with pytest.raises(CheckpointError, match=f"^tag {TAG}: ") as caught:
        open_checkpoint(root, print_line=pytest.fail)
    return str(caught.value)


def test_a_thousand_flipped_bits_are_refused_and_the_file_is_named(pristine: Path, tmp_path: Path) -> None:
    root, draw = tmp_path / "s", random.Random(1)
    shutil.copytree(pristine / "s", root)
    files = {path: path.read_bytes() for path in sorted((root / TAG).iterdir())}
    for path in draw.choices(list(files), k=1000):
        bit = draw.randrange(8 * len(files[path]))
        damaged = bytearray(files[path])
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert path.name in refusal(root), (path, bit)
        path.write_bytes(files[path])
    assert open_checkpoint(root, print_line=pytest.fail).tag == TAG


def truncate(tag: Path, pristine: Path, draw: random.Random) -> set[str]:
    path = draw.choice(sorted(tag.iterdir()))
    os.truncate(path, draw.randrange(path.stat().st_size))
    return {path.name}


def lengthen(tag: Path, pristine: Path, draw: random.Random) -> set[str]:
    path = draw.choice(sorted(tag.iterdir()))
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 100)))
    return {path.name}


def remove(tag: Path, pristine: Path, draw: random.Random) -> set[str]:
    path = draw.choice(sorted(tag.iterdir()))
    path.unlink()
    return {path.name}


def swap(tag: Path, pristine: Path, draw: random.Random) -> set[str]:
    """Two ranks' files of one kind change places."""
    suffix, ranks = draw.choice([".safetensors", ".json"]), draw.sample(range(4), 2)
    first, second = (tag / f"rank{rank}{suffix}" for rank in ranks)
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    assert first_bytes != second_bytes
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    return {first.name, second.name}


def foreign(tag: Path, pristine: Path, draw: random.Random) -> set[str]:
    """A file of that name of another tag, layout or run; a foreign manifest makes all others foreign."""
    theirs = draw.choice([*(pristine / "before").glob("global*/*"), *(pristine / "layout").glob("global*/*"),
                          *(pristine / "run").glob("global*/*")])
    ours = tag / theirs.name
    if ours.read_bytes() == theirs.read_bytes():
        return foreign(tag, pristine, draw)  # the same state is no other file
    shutil.copy(theirs, ours)
    return {path.name for path in tag.iterdir()} if ours.name == "manifest.json" else {ours.name}


@pytest.mark.parametrize("damage", [truncate, lengthen, remove, swap, foreign])
def test_truncations_swaps_and_foreign_files_are_refused_and_named(
        damage: Callable[[Path, Path, random.Random], set[str]], pristine: Path, tmp_path: Path) -> None:
    draw = random.Random(2)
    for trial in range(60):
        root = tmp_path / str(trial)
        shutil.copytree(pristine / "s", root)
        names = damage(root / TAG, pristine, draw)
        said = refusal(root)
        assert any(name in said for name in names), (trial, names, said)
        shutil.rmtree(root)


def test_fifty_clean_tags_raise_no_alarm(tmp_path: Path) -> None:
    for seed in range(50):
        root = tmp_path / str(seed)
        save_grid(root, GRIDS[seed % len(GRIDS)], step=seed, seed=seed)
        assert open_checkpoint(root, print_line=pytest.fail).iteration == seed
        assert verify_tag(root, f"global_step{seed}", pytest.fail)
        shutil.rmtree(root)
