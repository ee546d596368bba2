"""The wheel: what is in it, and that it works from an empty folder with nothing of the repository on the path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from contextlib import suppress
from pathlib import Path

import pytest

from megatron import commands
from megatron.package import DISTRIBUTION, __version__

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("gpt2-train", "gpt2-launch", "gpt2-plan", "gpt2-checkpoint", "gpt2-generate", "gpt2-evaluate", "gpt2-serve",
            "gpt2-report", "gpt2-tune", "gpt2-preprocess", "gpt2-webtext")
SCRIPTS = {"lib.sh", "setup.sh", "trained.sh", "preprocess_webtext.sh", "generate_text.sh", "evaluate_gpt2.sh",
           "tune_gpt2.sh",
           *(path.name for pattern in ("pretrain_gpt2*.sh", "ds_*.sh") for path in (ROOT / "scripts").glob(pattern))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without network from a copy of the sources: setuptools leaves folders behind where it works."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for name in ("megatron", "mpu", "data", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "corpus*"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "pretrain_gpt2.py"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                    "--wheel-dir", source / "dist", source], check=True, timeout=180)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as pip does, with a `megatron.core` in the same folder."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "megatron" / "core").mkdir()
    (site / "megatron" / "core" / "__init__.py").write_text("NAME = 'core'\n")
    return site


def run(site: Path, cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(list(map(str, arguments)), cwd=cwd, env=environment, capture_output=True, text=True,
                          timeout=200)


def console(site: Path, cwd: Path, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A console command, started as the script that pip writes for it does."""
    parser = ConfigParser(delimiters="=")
    parser.read(next(site.glob("*.dist-info")) / "entry_points.txt")
    module, _, function = parser["console_scripts"][command].partition(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    return run(site, cwd, sys.executable, "-P", "-c", program, *arguments)


def test_every_pattern_of_what_the_wheel_holds_names_a_file() -> None:
    """One a line: setuptools takes a comma in several lines for a part of a name."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    patterns = [(package, pattern) for package, lines in parser["options.package_data"].items()
                for pattern in lines.strip().split("\n" if "\n" in lines.strip() else ", ")]
    assert ("megatron.scripts", "ds_*.sh") in patterns
    for package, pattern in patterns:
        folder = ROOT if package == "*" else ROOT / package.replace("megatron.scripts", "scripts").replace(".", "/")
        assert any(folder.rglob(pattern)), (package, pattern)


@pytest.mark.slow
def test_the_wheel_holds_the_program_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kept = {name for name in names if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for package in ("megatron", "mpu", "data")
               for path in (ROOT / package).rglob("*.py")} | {"pretrain_gpt2.py"}
    assert sources <= kept
    rooms = {f"{path.parent.relative_to(ROOT)}/py.typed" for path in (ROOT / "megatron").glob("*/__init__.py")}
    configs = {f"megatron/scripts/configs/{path.name}" for path in (ROOT / "scripts" / "configs").glob("*.json")}
    tools = {f"megatron/scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")}  # small, and of no harm there
    expected = {"mpu/py.typed", "data/py.typed", "megatron/serve/page.html", "megatron/report/charts.html",
                "data/page.css", "data/webtext/blacklisted_domains.txt",
                "data/webtext/blacklisted_extensions.txt", *rooms, *configs,
                *(f"megatron/scripts/{name}" for name in SCRIPTS)}
    assert kept - sources - tools == expected


@pytest.mark.slow
def test_every_command_runs_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    for command in COMMANDS:
        done = console(site, tmp_path, command, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{DISTRIBUTION} {__version__}\n", ""), command
        done = console(site, tmp_path, command, "--help")
        assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
        done = console(site, tmp_path, command, "--no-such-flag")
        assert done.returncode == 2 and done.stderr.startswith("error: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_text_to_model_with_the_commands_alone(site: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It was a dark and stormy night.\n\n" * 200)
    steps = [
        ("gpt2-preprocess", "--input", "book.txt", "--document-separator", "blank-line", "--output-prefix", "book",
         "--tokenizer-type", "byte", "--append-eod"),
        ("gpt2-launch", "--nproc-per-node", "1", "-m", "pretrain_gpt2", "--preset", "tiny", "--train-data", "book",
         "--train-iters", "2", "--save", "run"),
        ("gpt2-checkpoint", "verify", "run"),
        ("gpt2-train", "--preset", "tiny", "--train-data", "book.txt", "--train-iters", "2", "--load", "run"),
        ("gpt2-plan", "--preset", "tiny"),
    ]
    for command, *arguments in steps:
        done = console(site, tmp_path, command, *arguments)
        assert done.returncode == 0, (command, done.stderr)
    configs = run(site, tmp_path, sys.executable, "-P", "-c", "from importlib.resources import files; "
                  "print('zero_optimization' in (files('megatron.scripts.configs') / 'ds_config.json').read_text())")
    assert configs.stdout == "True\n", configs.stderr


@pytest.mark.slow
def test_the_scripts_run_from_the_wheel(site: Path, tmp_path: Path) -> None:
    environment = {"PRESET": "tiny", "GPUS_PER_NODE": "1"}
    done = run(site, tmp_path, "env", *(f"{key}={value}" for key, value in environment.items()), "bash",
               site / "megatron" / "scripts" / "ds_pretrain_gpt2.sh", "--mock-data", "--train-iters", "2")
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["runs"]


MODULES = [
    ("train", "python pretrain_gpt2.py"), ("launch", "python -m megatron.launch"), ("plan", "python -m megatron.plan"),
    ("checkpoint", "python -m megatron.checkpoint"), ("preprocess", "python -m data.preprocess"),
    ("webtext", "python -m data.webtext"), ("tune", "python -m megatron.tune"),
    ("generate", "python -m megatron.generate")]


def test_a_usage_names_the_command_as_it_was_typed(monkeypatch, capsys):
    for command, typed, expected in [
            case for command, module in MODULES for case in ((command, f"/usr/bin/gpt2-{command}", f"gpt2-{command}"),
                                                             (command, "/home/a/program.py", module))]:
        monkeypatch.setattr("sys.argv", [typed, "--help"])
        with suppress(SystemExit):
            getattr(commands, command)()
        said = capsys.readouterr().out
        assert said.startswith(f"usage: {expected} ") and (typed != "/usr/bin/gpt2-train" or "python" not in said)


def test_an_installation_keeps_the_default_corpus_in_the_current_folder(tmp_path: Path) -> None:
    """Beside the runs, not among the packages, which may be read-only."""
    shutil.copytree(ROOT / "data", tmp_path / "site" / "data", ignore=shutil.ignore_patterns("__pycache__", "corpus*"))
    program = "from data.sources import check_sources; check_sources(['default'], '--train-data')"
    done = run(tmp_path / "site", tmp_path, sys.executable, "-P", "-c", program)
    assert done.stderr.splitlines()[-1].endswith(
        "default corpus: .cache/default-corpus/corpus.idx is missing; build it (5 seconds, no download): "
        "python -m data.default_corpus")
