"""Content that is well-formed and senseless is exit code 4 with its file, by every reader, in bounded memory."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
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
from tests.megatron.checkpoint.made import Grid, rejoin, reseal, rewrite, save_grid, set_header
from tests.megatron.helpers import TINY, train

TAG = "global_step1"

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
    """Of every value inside."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*where, key)
        yield from places(child, (*where, key))


def mutate(value: Any, random_: random.Random) -> str:
    """Change something in a record; what it was."""
    found = list(places(value))
    where = random_.choice(found)
    parent = value
    for step in where[:-1]:
        parent = parent[step]
    how = random_.randrange(8)
    if how == 0:
        del parent[where[-1]]
        return f"{where} deleted"
    if how == 1 and isinstance(parent, dict):
        parent[f"{where[-1]}x"] = parent.pop(where[-1])
        return f"{where} renamed"
    if how == 2 and isinstance(parent, list):
        parent.append(parent[where[-1]])
        return f"{where} repeated"
    if how == 3 and len(found) > 1:
        other = value
        for step in random_.choice(found):
            other = other[step]
        parent[where[-1]] = json.loads(json.dumps(other))
        return f"{where} copied from elsewhere"
    if how == 4 and isinstance(parent[where[-1]], int):
        parent[where[-1]] += random_.choice([-1, 1, 8, 2**40])
        return f"{where} is {parent[where[-1]]}"
    parent[where[-1]] = random_.choice(WORDS)
    return f"{where} is {parent[where[-1]]!r:.60}"


def make_senseless(folder: Path, random_: random.Random) -> str:
    """Change one file of a tag; what was done."""
    path = random_.choice(sorted(folder.iterdir()))
    said = ""

    def change(value: Any) -> Any:
        nonlocal said
        if random_.randrange(40) == 0:
            said = "all of it"
            return random_.choice([word for word in WORDS if word is not None])
        said = mutate(value, random_)
        return None

    if path.suffix == ".safetensors":
        set_header(path, change)
    else:
        rewrite(path, change)
    try:
        (rejoin if path.name == MANIFEST else reseal)(folder)
    except (AttributeError, CheckpointError, KeyError, OSError, TypeError, ValueError):
        pass  # it makes too little sense for that: it is as it is
    return f"{path.name}: {said}"


def copies(tag: Path, root: Path, seeds: range) -> Iterator[tuple[int, str]]:
    """One after the other at `root`/<name of the tag>, what was done to each."""
    for seed in seeds:
        shutil.copytree(tag, root / tag.name)
        yield seed, make_senseless(root / tag.name, random.Random(seed))
        shutil.rmtree(root / tag.name)


# ---- what readers make of it ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    save_grid(root, Grid(1, 2))
    return root / TAG


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run: its state is what the engine saves."""
    root = tmp_path_factory.mktemp("run")
    train([*TINY, "--mock-data", "--train-iters", 2, "--exit-interval", 1, "--save", root])
    return root / TAG


def load(root: Path) -> None:
    found = open_checkpoint(root, TAG)
    assert isinstance(found.shared_state, dict)
    for rank in range(found.manifest.world_size):
        found.rank_state(rank)


def export(root: Path) -> None:
    for entry in zero_to_fp32.output_tensors(*zero_to_fp32.open_tag(root, TAG)):
        entry.load()


READERS: dict[str, Callable[[Path], Any]] = {
    "verify": lambda root: verify_tag(root, TAG), "load": load, "zero_to_fp32": export,
    "digest": lambda root: list(digest_lines(open_checkpoint(root, TAG))),
    "merge": lambda root: write_fp32_weights(open_checkpoint(root, TAG), root / "merged.safetensors")}


def outcome(read: Callable[[Path], Any], root: Path) -> str:
    """`fine`, `refused` in one line (a schedule that another one is: by the flag that decides), or the exception that
    nobody would understand."""
    try:
        read(root)
        return "fine"
    except (CheckpointError, ConfigError, zero_to_fp32.DamagedCheckpoint, zero_to_fp32.InvalidArguments) as error:
        return "refused" if "\n" not in str(error) and str(error) else f"says {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def sweep(tag: Path, root: Path, seeds: range, readers: dict[str, Callable[[Path], Any]]) -> int:
    """How many were refused; every reader ends well with every one."""
    refused = 0
    for seed, what in copies(tag, root, seeds):
        ends = {name: outcome(read, root) for name, read in readers.items()}
        assert set(ends.values()) <= {"fine", "refused"}, (seed, what, ends)
        refused += "refused" in ends.values()
    return refused


def test_readers_understand_or_refuse(made: Path, tmp_path: Path) -> None:
    assert sweep(made, tmp_path, range(250), READERS) > 150


@pytest.mark.slow
def test_readers_understand_or_refuse_many(made: Path, run: Path, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for tag in (made, run):
        assert sweep(tag, tmp_path, range(1000, 5000), READERS) > 2400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def resumes(root: Path) -> None:
    train([*TINY, "--mock-data", "--train-iters", 2, "--load", root])


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(1000, 3000), marks=pytest.mark.slow)])
def test_a_run_resumes_or_says_what_makes_no_sense(seeds: range, run: Path, tmp_path: Path) -> None:
    assert sweep(run, tmp_path, seeds, {"resume": resumes}) > len(seeds) / 2


# ---- by name --------------------------------------------------------------------------------------------------------

def shared(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / "shared.json", lambda value: change(value["state"]))


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: (rewrite(folder / MANIFEST, lambda body: change(body) and None), rejoin(folder)) and None


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: set_header(folder / "rank0.safetensors", change)


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
    "the manifest's iteration": ("manifest.json: field 'iteration' must be below",
                                 manifest(lambda body: body.update(iteration=10**30))),
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
    "a layout": ("layout expected with sizes tp and dp", manifest(lambda body: body.update(layout={"x": []}))),
    "more ranks": ("rank1.json .rank 1 of 2. missing|are not in", manifest(lambda body: body["layout"].update(dp=2))),
    "no configuration": ("config: cannot be used .KeyError: 'model'", manifest(
        lambda body: body.update(config={}))),
}


@pytest.mark.parametrize("what", NAMED)
def test_it_is_named(what: str, run: Path, tmp_path: Path) -> None:
    message, change = NAMED[what]
    shutil.copytree(run, tmp_path / TAG)
    change(tmp_path / TAG)
    reseal(tmp_path / TAG)
    with pytest.raises(CheckpointError, match=message) as caught:
        resumes(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_engine_refuses_it_as_a_run_does(tmp_path: Path) -> None:
    engine = zero.initialize(model=torch.nn.Linear(2, 2), config={
        "train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}})[0]
    engine.save_checkpoint(tmp_path, TAG)
    NAMED["counters of another type"][1](tmp_path / TAG)
    reseal(tmp_path / TAG)
    with pytest.raises(CheckpointError, match="field 'micro_steps' must be int"):
        engine.load_checkpoint(tmp_path)
