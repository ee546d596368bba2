"""Our packages beside others of the same names: NVIDIA's `megatron.core`, a project's own `data` and `mpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: object, path: list[Path], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | variables
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True,
                          text=True, timeout=60)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of somebody's project, and one that holds `megatron.core`."""
    (tmp_path / "project").mkdir()
    core = tmp_path / "nvidia" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("NAME = 'core'\n")
    return tmp_path / "project"


def test_megatron_core_is_found_in_either_order(project: Path) -> None:
    nvidia = project.parent / "nvidia"
    for path in ([nvidia, ROOT], [ROOT, nvidia]):
        done = python("-c", "import megatron.core, megatron.package, megatron.zero; print(megatron.core.NAME)",
                      path=path, cwd=project)
        assert done.stdout == "core\n", done.stderr


HIDING = {"a package": ("data/__init__.py", "data"), "a module": ("data.py", "data"), "mpu": ("mpu/__init__.py", "mpu")}


@pytest.mark.parametrize(("file", "name"), HIDING.values(), ids=HIDING)
def test_a_package_that_hides_ours_is_named_with_what_to_do(project: Path, file: str, name: str) -> None:
    hiding = project / file
    hiding.parent.mkdir(exist_ok=True)
    hiding.write_text("raise SystemExit('the foreign package was run')\n")
    said = (f"{hiding} hides the package `{name}` of this program ({ROOT / name}): set PYTHONSAFEPATH=1 (or start "
            f"Python with -P), which keeps the current folder off the path; or put {ROOT} first in PYTHONPATH; or "
            f"rename the other {name}")
    for module in ("megatron.zero", "megatron.checkpoint.manifest", "megatron.train.build"):
        done = python("-c", f"import {module}", path=[ROOT], cwd=project)
        assert done.stderr.endswith(f"ShadowedPackageError: {said}\n"), done.stderr
    for statement in (["-m", "pretrain_gpt2", "--mock-data", "--preset", "tiny"],
                      ["-m", "megatron.launch", "-m", "pretrain_gpt2", "--mock-data", "--preset", "tiny"],
                      ["-m", "megatron.plan", "--preset", "1.5B"],
                      ["-m", "megatron.checkpoint", "list", "nowhere"],
                      ["-c", "import sys; from megatron.commands import preprocess; sys.exit(preprocess())"]):
        done = python(*statement, path=[ROOT], cwd=project)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}\n")
    (project / "own.py").write_text("print('it ran')\n")  # imports nothing of ours
    done = python("-m", "megatron.launch", "--nproc-per-node", "1", "own.py", path=[ROOT], cwd=project)
    assert (done.returncode, done.stdout) == (0, "it ran\n"), done.stderr


def test_what_does_not_hide_ours_is_no_matter(project: Path) -> None:
    (project / "data").mkdir()  # without __init__.py, as nanoGPT's: a regular package later on the path wins
    (project / "data" / "prepare.py").touch()
    hidden_from_p = project / "mpu.py"
    hidden_from_p.touch()
    done = python("-P", "-c", "from megatron import zero; import data.storage", path=[ROOT], cwd=project)
    assert done.returncode == 0, done.stderr
    hidden_from_p.unlink()
    done = python("-c", "from megatron import zero; import data.storage", path=[ROOT], cwd=project)
    assert done.returncode == 0, done.stderr
