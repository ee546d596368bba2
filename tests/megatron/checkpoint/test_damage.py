"""Any damage of a tag is refused by everything that reads it, and a load names the file; a clean tag never is. Files of
one tag belong together: what is of another save, step, run, rank or layout is refused, with checksums that fit too. So
is content that is well-formed and senseless: by every reader, in bounded memory."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import zero
from megatron.checkpoint import zero_to_fp32
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import digest_lines, open_checkpoint, write_fp32_weights
from megatron.checkpoint.verify import verify_tag
from megatron.errors import CheckpointError, ConfigError
from mpu.groups import build
from tests.distributed import run_ranks
from tests.megatron.checkpoint.made import (Grid, open_quietly, redigest, rejoin, reseal, rewrite, save_grid,
                                            set_header)
from tests.megatron.helpers import TINY, train

TAG = "global_step1"
FILES = (MANIFEST, "shared.json", *(f"rank{k}.json" for k in range(4)),
         *(f"rank{k}.safetensors" for k in range(4)))


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our tag, and others that something of it may be exchanged with."""
    base, grid = tmp_path_factory.mktemp("tags"), Grid(2, 2)
    save_grid(base / "ours", grid)
    save_grid(base / "another save", grid, seed=1)
    save_grid(base / "another step", grid, step=5, seed=1)
    save_grid(base / "another run", grid, run="other", config={"hidden": 9})
    save_grid(base / "another layout", Grid(1, 4))
    return {folder.name: next(folder.glob("global_step*")) for folder in base.iterdir()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tag of a run: its state is what the engine saves."""
    root = tmp_path_factory.mktemp("run")
    train([*TINY, "--mock-data", "--train-iters", 2, "--exit-interval", 1, "--save", root])
    return root / TAG


# ---- readers --------------------------------------------------------------------------------------------------------

def load(root: Path) -> None:
    found = open_checkpoint(root, TAG)
    assert isinstance(found.shared_state, dict)
    for rank in range(found.manifest.world_size):
        found.rank_state(rank)


def export(root: Path) -> None:
    for entry in zero_to_fp32.output_tensors(*zero_to_fp32.open_tag(root, TAG)):
        entry.load()


Readers = dict[str, Callable[[Path], Any]]
READERS: Readers = {
    "verify": lambda root: verify_tag(root, TAG), "load": load, "zero_to_fp32": export,
    "digest": lambda root: list(digest_lines(open_checkpoint(root, TAG))),
    "merge": lambda root: write_fp32_weights(open_checkpoint(root, TAG), root / "merged.safetensors")}


def outcome(read: Callable[[Path], Any], root: Path) -> str:
    """`fine`, `refused` in one line, or the exception that nobody would understand."""
    try:
        read(root)
        return "fine"
    except (CheckpointError, ConfigError, zero_to_fp32.DamagedCheckpoint, zero_to_fp32.InvalidArguments) as error:
        return "refused" if "\n" not in str(error) and str(error) else f"says {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes(root: Path, readers: Readers = READERS) -> dict[str, str]:
    return {name: outcome(read, root) for name, read in readers.items()}


def check_all_refuse(root: Path, *why: object, but: str = "") -> None:
    """But for a reader that does not look at what was changed."""
    assert {end for name, end in outcomes(root).items() if name != but} == {"refused"}, why


def test_the_tag_itself_is_accepted(tags: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(tags["ours"], tmp_path / TAG)
    reseal(tmp_path / TAG)
    assert set(outcomes(tmp_path).values()) == {"fine"}


# ---- files that do not belong together ------------------------------------------------------------------------------

def mixes() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(where from, [(file there, its name here)])."""
    for other in ("another save", "another step", "another run", "another layout"):
        for name in FILES:
            yield other, [(name, name)]
        for pair in combinations(FILES, 2):
            if any(name in pair for name in (MANIFEST, "shared.json", "rank1.json")):
                yield other, [(name, name) for name in pair]
        for rank in range(4):
            yield other, [(name, name) for name in FILES if name.startswith(f"rank{rank}.")]
            yield other, [(name, name) for name in FILES if not name.startswith(f"rank{rank}.")]
    for a, b in combinations(range(4), 2):
        for ends in ((".json",), (".safetensors",), (".json", ".safetensors")):
            yield "ours", [(f"rank{a}{end}", f"rank{b}{end}") for end in ends]


def test_no_mix_is_accepted(tags: dict[str, Path], tmp_path: Path) -> None:
    tried, folder = 0, tmp_path / TAG
    for number, (other, files) in enumerate(mixes()):
        shutil.copytree(tags["ours"], folder)
        for theirs, here in files:
            shutil.copy(tags[other] / theirs, folder / here)
        if any((folder / here).read_bytes() != (tags["ours"] / here).read_bytes() for _, here in files):
            for seals in (False, True) if len(files) == 1 else (number % 2 == 0,):
                if seals:
                    reseal(folder)
                check_all_refuse(tmp_path, other, files, seals)
            tried += 1
        shutil.rmtree(folder)
    assert tried >= 150, tried


Change = Callable[[dict[str, Any]], Any]


def manifest(change: Change) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / MANIFEST, lambda body: change(body) and None)


def tensors(change: Change) -> Callable[[Path], None]:
    return lambda folder: set_header(folder / "rank0.safetensors", lambda header: change(header) and None)


def doubled(folder: Path) -> None:
    """A second file with the same tensors: it would be open which of them counts."""
    shutil.copy(folder / "rank0.safetensors", folder / "rank0-2.safetensors")
    rewrite(folder / "rank0.json", lambda part: part["files"].update({"rank0-2.safetensors": {}}))


OTHER_MANIFEST: list[Change] = [
    lambda body: body.update(iteration=11), lambda body: body["config"].update(hidden=9),
    lambda body: body.update(save_id="x" + body["save_id"][1:]),
    lambda body: (body.update(iteration=11), redigest(body)),
    lambda body: body.update(format=3, save_id=body["save_id"].partition("-")[0])]
OTHER_HEADER: list[Change] = [
    lambda header: header.pop("__metadata__"), lambda header: header.update(__metadata__={}),
    lambda header: header["__metadata__"].pop("save_id"), lambda header: header["__metadata__"].update(rank="1"),
    lambda header: header["__metadata__"].update(rank=0.0), lambda header: header["__metadata__"].update(more="x")]


def test_a_file_that_says_something_else_is_of_another_checkpoint(tags: dict[str, Path], tmp_path: Path) -> None:
    changes: list[tuple[str, Callable[[Path], object]]] = [
        *(("", manifest(change)) for change in OTHER_MANIFEST),
        *(("file rank0.safetensors: ", tensors(change)) for change in OTHER_HEADER),
        ("file rank0-2.safetensors: .* is in another file of the rank as well", doubled),
        ("file shared.json: is of another checkpoint: save_id expected ",
         lambda folder: shutil.copy(tags["another step"] / "shared.json", folder))]
    for number, (message, change) in enumerate(changes):
        shutil.copytree(tags["ours"], tmp_path / TAG)
        change(tmp_path / TAG)
        reseal(tmp_path / TAG)
        # The script ignores what it does not know in a header.
        check_all_refuse(tmp_path, number, but="zero_to_fp32" if message == "file rank0.safetensors: " else "")
        with pytest.raises(CheckpointError, match=f"^tag {TAG}: {message}"):
            verify_tag(tmp_path, TAG)
        shutil.rmtree(tmp_path / TAG)


def opened_in_its_own_folder(rank: int, world_size: int, folders: list[str]) -> str:
    try:
        open_checkpoint(folders[rank], world=build().world)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_that_find_other_checkpoints_under_one_name_load_none(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_grid(tmp_path / name, Grid(1, 2))
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    a, b, copy = (str(tmp_path / name) for name in ("a", "b", "copy"))
    assert run_ranks(opened_in_its_own_folder, 2, [a, copy]) == ["", ""]
    first, second = run_ranks(opened_in_its_own_folder, 2, [a, b])
    assert first == second and first.startswith("the ranks find different checkpoints: tag global_step")


# ---- damaged bytes ---------------------------------------------------------------------------------------------------

def refusal(root: Path) -> str:
    """What the open that a resume begins with, and `verify`, say; so nothing of a damaged tag reaches a model."""
    with pytest.raises(CheckpointError, match=f"^tag {TAG}: ") as caught:
        open_quietly(root)
    with pytest.raises(CheckpointError, match=re.escape(str(caught.value))):
        verify_tag(root, TAG)
    return str(caught.value)


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "flipped": flip, "truncated": lambda path, draw: os.truncate(path, draw.randrange(path.stat().st_size)),
    "lengthened": lambda path, draw: path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 100))),
    "missing": lambda path, draw: path.unlink()}


@pytest.mark.parametrize(("damage", "times"), [("flipped", 400), ("truncated", 60), ("lengthened", 60),
                                               ("missing", 30)])
def test_a_damaged_file_is_refused_and_named(damage: str, times: int, tags: dict[str, Path], tmp_path: Path) -> None:
    root, draw = tmp_path / "s", random.Random(1)
    shutil.copytree(tags["ours"].parent, root)
    files = {path: path.read_bytes() for path in sorted((root / TAG).iterdir())}
    for path in draw.choices(list(files), k=times):
        DAMAGES[damage](path, draw)
        assert path.name in refusal(root), path
        path.write_bytes(files[path])
    assert open_quietly(root).tag == TAG


# ---- any value of any record replaced, and all checksums, origins and digests made to fit ----------------------------

Where = tuple[str | int, ...]

WORDS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 10**30, -10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "x", "F32", "U8", "global_step1", "../../x", "\u0000", "é" * 300, [], {}, [[]], [0], [1, 2, 3], [None], {"": {}},
    {"$tensor": "x"}, {"$tuple": 1}, {"$set": [[]]}, {"$bytes": "*"}, {"$array": ["<f4", [10**12], ""]},
    {"$numpy": ["O", ""]},
    {"$dict": [[{}, 1]]}, {"$default": ["eval", []]}, {"$unknown": 1}, {"$parameter": [1, 2]}, {"$size": ["x"]},
    {"$path": 3}, {"$namespace": [1]}, {"$counter": 5}, {"$torch_version": [1]})


def places(value: Any, where: Where = ()) -> Iterator[Where]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*where, key)
        yield from places(child, (*where, key))


def mutate(value: Any, random_: random.Random) -> None:
    found = list(places(value))
    where, how = random_.choice(found), random_.randrange(8)
    parent, key = value, where[-1]
    for step in where[:-1]:
        parent = parent[step]
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    elif how == 2 and isinstance(parent, list):
        parent.append(parent[key])
    elif how == 3 and len(found) > 1:
        other = value
        for step in random_.choice(found):
            other = other[step]
        parent[key] = json.loads(json.dumps(other))
    elif how == 4 and isinstance(parent[key], int):
        parent[key] += random_.choice([-1, 1, 8, 2**40])
    else:
        parent[key] = random_.choice(WORDS)


def make_senseless(folder: Path, random_: random.Random) -> None:
    path = random_.choice(sorted(folder.iterdir()))

    def change(value: Any) -> Any:
        if random_.randrange(40) == 0:
            return random_.choice([word for word in WORDS if word is not None])
        return mutate(value, random_)

    if path.suffix == ".safetensors":
        set_header(path, change)
    else:
        rewrite(path, change)
    try:
        (rejoin if path.name == MANIFEST else reseal)(folder)
    except (AttributeError, CheckpointError, KeyError, OSError, TypeError, ValueError):
        pass  # it makes too little sense for that: it is as it is


def sweep(tag: Path, root: Path, seeds: range, readers: Readers) -> int:
    """How many of the copies at `root`, one for each seed, were refused; every reader ends well with every one."""
    refused = 0
    for seed in seeds:
        shutil.copytree(tag, root / TAG)
        make_senseless(root / TAG, random.Random(seed))
        ends = outcomes(root, readers)
        assert set(ends.values()) <= {"fine", "refused"}, (seed, ends)
        refused += "refused" in ends.values()
        shutil.rmtree(root / TAG)
    return refused


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 5000), marks=pytest.mark.slow)])
def test_readers_understand_or_refuse(seeds: range, run: Path, tmp_path: Path) -> None:
    save_grid(tmp_path / "made", Grid(1, 2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for tag in (tmp_path / "made" / TAG, run):
        assert sweep(tag, tmp_path / "copy", seeds, READERS) > 0.4 * len(seeds)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def resumes(root: Path) -> None:
    train([*TINY, "--mock-data", "--train-iters", 2, "--load", root])


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(1000, 3000), marks=pytest.mark.slow)])
def test_a_run_resumes_or_says_what_makes_no_sense(seeds: range, run: Path, tmp_path: Path) -> None:
    assert sweep(run, tmp_path, seeds, {"resume": resumes}) > len(seeds) / 2


# ---- by name --------------------------------------------------------------------------------------------------------

def shared(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "shared.json", lambda value: change(value["state"]))


def rejoined(change: Callable[[Path], None]) -> Callable[[Path], object]:
    return lambda folder: (change(folder), rejoin(folder))


def first(header: dict[str, Any], kind: str = "exp_avg/") -> dict[str, Any]:
    found: dict[str, Any] = next(value for key, value in header.items() if key.startswith(kind))
    return found


def emptied(folder: Path) -> None:
    rewrite(folder / "rank0.json", lambda part: part["files"].pop("rank0.safetensors") and None)
    (folder / "rank0.safetensors").unlink()


NAMED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "empty state": ("shared.json: field 'run_id' is missing", shared(lambda state: state.clear())),
    "no counters": ("shared.json: field 'engine': field 'global_steps' is missing",
                    shared(lambda state: state["engine"].pop("global_steps") and None)),
    "counters of another type": ("field 'engine': field 'micro_steps' must be int, found 'x'",
                                 shared(lambda state: state["engine"].update(micro_steps="x"))),
    "a negative iteration": ("shared.json: field 'client_state': field 'iteration' must not be negative, found -3",
                             shared(lambda state: state["client_state"].update(iteration=-3))),
    "a huge iteration": ("field 'iteration' must be below", shared(
        lambda state: state["client_state"].update(iteration=10**18))),
    "a key of a schedule": ("schedule: unknown field 'cosine'", shared(
        lambda state: state["client_state"]["schedule"].update(cosine=1))),
    "a style of a schedule": ("schedule: cannot be used .KeyError: 'wavy'", shared(
        lambda state: state["client_state"]["schedule"].update(style="wavy"))),
    "a rate that is none": ("schedule: field 'peak' must be a finite number, found nan", shared(
        lambda state: state["client_state"]["schedule"].update(peak=float("nan")))),
    "no loss scale": ("field 'loss_scale' must be a finite number above 0, found 0", shared(
        lambda state: state["engine"].update(loss_scale=0))),
    "a mark that is none": ("shared.json: cannot be used .ValueError: '.wrong' marks nothing", shared(
        lambda state: state["client_state"].update(a={"$wrong": 1}))),
    "a scheduler's state": ("field 'lr_scheduler': cannot be used .KeyError: 'steps'", shared(
        lambda state: state["lr_scheduler"].clear())),
    "random streams": ("rank0.json: its random streams: cannot be used", lambda folder: rewrite(
        folder / "rank0.json", lambda part: part["state"]["rng"].update(python=[1, [2], None]))),
    "overlapping tensors": ("rank0.safetensors: .* overlaps", tensors(
        lambda header: first(header).update(data_offsets=first(header, "weight/")["data_offsets"],
                                            shape=first(header, "weight/")["shape"]))),
    "a dtype": ("expected to be F32 .*, found I32", tensors(lambda header: first(header).update(dtype="I32"))),
    "a shape": ("expected to be F32 .*, found F32 .1, ", tensors(
        lambda header: first(header).update(shape=[1, *first(header)["shape"]]))),
    "an empty shard": ("files of rank 0: .* expected to be F32 .*, found nothing", emptied),
    "no configuration": ("config: cannot be used .KeyError: 'model'", rejoined(manifest(
        lambda body: body.update(config={})))),
}


def test_it_is_named(run: Path, tmp_path: Path) -> None:
    for message, change in NAMED.values():
        shutil.copytree(run, tmp_path / TAG)
        change(tmp_path / TAG)
        reseal(tmp_path / TAG)
        with pytest.raises(CheckpointError, match=message) as caught:
            resumes(tmp_path)
        assert "\n" not in str(caught.value)
        shutil.rmtree(tmp_path / TAG)


def test_an_engine_refuses_it_as_a_run_does(tmp_path: Path) -> None:
    engine = zero.initialize(model=torch.nn.Linear(2, 2), config={
        "train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}})[0]
    engine.save_checkpoint(tmp_path, TAG)
    NAMED["counters of another type"][1](tmp_path / TAG)
    reseal(tmp_path / TAG)
    with pytest.raises(CheckpointError, match="field 'micro_steps' must be int"):
        engine.load_checkpoint(tmp_path)
