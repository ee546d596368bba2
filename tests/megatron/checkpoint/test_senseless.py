"""Content that is well-formed and senseless is exit code 4 with its file, by every reader, in bounded memory."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import zero_to_fp32
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.reader import digest_lines, open_checkpoint, write_fp32_weights
from megatron.checkpoint.verify import verify_tag
from megatron.errors import CheckpointError, ConfigError
from tests.megatron.checkpoint.made import Grid, rejoin, reseal, rewrite, save_grid, set_header
from tests.megatron.checkpoint.senseless import copies
from tests.megatron.helpers import TINY, train

TAG = "global_step1"


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
    for entry in zero_to_fp32.open_tag(root, TAG).output_tensors():
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


def test_a_run_resumes_or_says_what_makes_no_sense(run: Path, tmp_path: Path) -> None:
    assert sweep(run, tmp_path, range(40), {"resume": resumes}) > 20


@pytest.mark.slow
def test_a_run_resumes_or_says_what_makes_no_sense_often(run: Path, tmp_path: Path) -> None:
    assert sweep(run, tmp_path, range(1000, 3000), {"resume": resumes}) > 1000


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
