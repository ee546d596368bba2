"""Checkpoints from other surroundings: umask, locale, `python -O`, closed standard streams, one folder under
several names. A run that is stopped and resumed there has the text and the state of one that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.checkpoint.commit import Keep, lock_save_root
from megatron.checkpoint.manifest import Lineage
from megatron.checkpoint.tags import complete_manifests, tag_names
from megatron.checkpoint.verify import verify_tag
from megatron.errors import ConfigError
from tests.distributed import run_ranks
from tests.megatron.checkpoint.made import load_candidates, save_solo
from tests.megatron.helpers import ROOT, TINY, lines, total_digest

RUN = [*TINY, "--mock-data", "--train-iters", 4, "--save-interval", 1]

SURROUNDINGS: dict[str, tuple[str, Mapping[str, str], list[str]]] = {
    "umask 000": ("umask 000;", {}, []),
    "umask 077": ("umask 077;", {}, []),
    "LC_ALL=C": ("", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, []),
    "LC_ALL=tr_TR.UTF-8": ("", {"LC_ALL": "tr_TR.UTF-8"}, []),
    "python -O": ("", {}, ["-O"]),
    "no standard streams": ("exec 0<&- 1>&- 2>&-;", {}, []),
    "no standard input and output": ("exec 0<&- 1>&-;", {}, []),
    "no standard error": ("exec 2>&-;", {}, []),
}
"""What the shell does before, variables, and flags of Python."""


def train_in(surroundings: str, *flags: object) -> subprocess.CompletedProcess[str]:
    before, variables, python = SURROUNDINGS[surroundings]
    command = [sys.executable, *python, "pretrain_gpt2.py", *map(str, [*RUN, *flags])]
    return subprocess.run(["bash", "-c", f'{before} exec "$@"', "bash", *command], cwd=ROOT, text=True, timeout=300,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), **variables})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """Metrics and state of a run that nothing interrupts, in our own surroundings."""
    folder = tmp_path_factory.mktemp("reference")
    done = subprocess.run([sys.executable, "pretrain_gpt2.py", *map(str, [
        *RUN, "--save", folder / "s", "--metrics-file", folder / "m"])], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return lines(folder / "m"), total_digest(folder / "s")


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_run_saves_and_resumes_in_any_surroundings(surroundings: str, reference: tuple[list[str], str],
                                                     tmp_path: Path) -> None:
    if "tr_TR" in surroundings and "tr_TR.utf8" not in subprocess.check_output(["locale", "-a"], text=True):
        pytest.skip("this system has no Turkish locale")
    folder = tmp_path / "çağrı ı"
    folder.mkdir()
    flags = ["--save", folder / "s", "--load", folder / "s", "--metrics-file", folder / "m", "--keep-last", 2]
    for more in (["--exit-interval", 2], []):
        done = train_in(surroundings, *flags, *more)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (lines(folder / "m"), total_digest(folder / "s")) == reference
    assert tag_names(folder / "s") == ["global_step3", "global_step4"]
    assert load_candidates(folder / "s") == ["global_step4", "global_step3"]
    modes = {path.stat().st_mode & 0o777 for path in (folder / "s").rglob("*") if path.is_file()}
    assert modes == {{"umask 000": 0o666, "umask 077": 0o600}.get(surroundings, 0o666 & ~umask())}
    again = train_in(surroundings, *flags, "--hidden-size", 64)
    assert again.returncode == 4 and ("standard" in surroundings or again.stderr.count("\n") == 1), again.stderr


def umask() -> int:
    now = os.umask(0o022)
    os.umask(now)
    return now


# ---- one folder, several names --------------------------------------------------------------------------------------

NAMES = ("s", "link", "s/../s", "beside/../s")


def names_of(root: Path) -> list[Path]:
    (root / "s").mkdir()
    (root / "beside").mkdir()
    (root / "link").symlink_to("s")
    return [root / name for name in NAMES]


def test_a_second_job_is_refused_under_every_name_of_the_folder(tmp_path: Path) -> None:
    first, *others = names_of(tmp_path)
    with lock_save_root(first):
        for name in others:
            with pytest.raises(ConfigError, match=f"locked by process {os.getpid()} on "), lock_save_root(name):
                pass


def save_many(rank: int, world: int, names: list[Path], count: int) -> None:
    """A program with a loop of its own, beside others in the same folder; a branch of its own, two tags kept."""
    lineage = Lineage()
    for step in range(1, count + 1):
        tag = "shared" if step % 3 == 0 else f"global_step{rank * 100 + step}"
        save_solo(names[rank], rank * 100 + step, tag=tag, run=f"run{rank}", lineage=lineage, keep=Keep(2))


@pytest.mark.parametrize("count", [7, pytest.param(60, marks=pytest.mark.slow)])
def test_programs_that_save_into_one_folder_have_numbers_and_branches_of_their_own(count: int, tmp_path: Path) -> None:
    run_ranks(save_many, 4 if count > 10 else 2, names_of(tmp_path), count, init=False, timeout=300)
    found = complete_manifests(tmp_path / "s")
    assert len({manifest.commit for manifest in found}) == len(found)
    assert max(manifest.commit for manifest in found) == (4 if count > 10 else 2) * count, "no number was given twice"
    for manifest in found:
        verify_tag(tmp_path / "s", manifest.tag)
        (tmp_path / "s" / "latest").write_text(manifest.tag)
        owners = {other.run_id for other in found if other.tag in load_candidates(tmp_path / "s")}
        assert owners == {manifest.run_id}
    assert not [name for name in os.listdir(tmp_path / "s") if name.startswith((".staging", ".aside", ".trash"))]


# ---- a file system without room for one more file -------------------------------------------------------------------
