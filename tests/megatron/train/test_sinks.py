"""Files of the log: tables of CSV and runs of Weights & Biases have what the metrics file has; a file that cannot be
written ends a run with the flag, the file and the reason; lack of memory does not pass for a full disk."""

from __future__ import annotations

import csv
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

from megatron.config.tree import build_config
from megatron.distributed import exit_codes
from megatron.errors import ConfigError, NumericsError, StorageError
from megatron.metrics.sinks import TABLES, AppendOnlyFile
from megatron.metrics.step_metrics import StepMetrics
from megatron.train.run_log import RunLog
from tests.megatron.helpers import ROOT, TINY, records, steps, train
from tests.megatron.launch.processes import error_of, launched, python

STEP = StepMetrics(1, 0.1 + 0.2, float("nan"), 0.5, 1.0, True, 4, "00", 1.0, 1.0, 1.0, None, 2**30)

WANDB = """
import json, os

class errors:
    class Error(Exception): ...

class Run:
    def __init__(self, given):
        self.config = self
        self.say("init", given)
    def say(self, *what):
        with open(os.environ["WANDB_TOLD"], "a") as file:
            print(json.dumps(what), file=file)
    def update(self, settings, allow_val_change): self.say("config", settings)
    def define_metric(self, name, step_metric): self.say("axis", step_metric)
    def log(self, values):
        if os.environ.get("WANDB_LASTS") == str(values["iteration"]):
            raise errors.Error("the service\\nhas gone")
        self.say("log", values)
    def finish(self, exit_code): self.say("finish", exit_code)

def init(**given):
    if os.environ.get("WANDB_REFUSES"):
        raise errors.Error("api_key not configured (no-tty).\\n call wandb.login()")
    return Run(given)
"""
"""What is used of the package, writing down how."""


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def log_of(**values: Any) -> RunLog:
    return RunLog(build_config({"log_interval": 0, **values}).log, 1, 0, writes=True)


def tables(folder: Path, *iterations: int) -> None:
    """As a run leaves them."""
    with log_of(csv_dir=str(folder)) as log:
        for iteration in iterations:
            log.step(replace(STEP, iteration=iteration))
            log.evaluation("validation", iteration, 0.1 + 0.2, 1 / 3)


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which a package of that name notes what it is told."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("WANDB_TOLD", str(tmp_path / "told"))
    yield tmp_path / "told"
    sys.modules.pop("wandb", None)


def told(path: Path) -> list[tuple[str, Any]]:
    return [(kind, value) for kind, value in map(json.loads, path.read_text().splitlines())]


# ---- tables ------------------------------------------------------------------------------------------------------


def test_tables_hold_what_the_metrics_file_does_and_a_resume_appends(tmp_path: Path) -> None:
    run = [*TINY, "--mock-data", "--train-iters", 4, "--eval-interval", 2, "--eval-iters", 1, "--save", tmp_path / "s",
           "--load", tmp_path / "s", "--metrics-file", tmp_path / "m", "--csv-dir", tmp_path / "csv"]
    train([*run, "--exit-interval", 2])
    train(run)
    lines = records(tmp_path / "m")
    steps, evaluations = rows(tmp_path / "csv" / "steps.csv"), rows(tmp_path / "csv" / "evaluations.csv")
    assert [(int(row["iteration"]), float(row["lm_loss"]), int(row["consumed_samples"])) for row in steps] == [
        (line["iteration"], line["lm_loss"], line["consumed_samples"]) for line in lines if "eval" not in line]
    assert [(int(row["iteration"]), row["split"], float(row["lm_loss"])) for row in evaluations] == [
        (line["iteration"], line["split"], line["lm_loss"]) for line in lines if "eval" in line]


def test_a_row_is_there_when_its_step_is_over_and_a_table_of_something_else_is_left_alone(tmp_path: Path) -> None:
    log = log_of(csv_dir=str(tmp_path / "new" / "csv"))
    log.step(STEP)
    (row,) = rows(tmp_path / "new" / "csv" / "steps.csv")
    assert tuple(row) == TABLES["steps"] and float(row["lm_loss"]) == STEP.lm_loss
    assert (row["grad_norm"], row["mfu"], row["skipped"], row["pld_theta"]) == ("", "", "1", "")
    log.close()
    (tmp_path / "steps.csv").write_text("step,price\n1,2\n")
    with pytest.raises(StorageError, match=r"--csv-dir: .*steps.csv is another table"):
        log_of(csv_dir=str(tmp_path))
    assert (tmp_path / "steps.csv").read_text() == "step,price\n1,2\n"


@pytest.mark.parametrize("name", ["steps.csv", "evaluations.csv"])
def test_a_row_that_a_kill_has_cut_is_taken_away(name: str, tmp_path: Path) -> None:
    """Of any length: what is left of it would be a row of wrong numbers, alone or glued to the next."""
    tables(tmp_path, 1, 2)
    whole = (tmp_path / name).read_bytes()
    head, first, second = whole.splitlines(keepends=True)
    for length in range(len(head + first) + 1, len(whole), 5):
        (tmp_path / name).write_bytes(whole[:length])
        tables(tmp_path)
        assert (tmp_path / name).read_bytes() == whole[:length], "a run with nothing to say leaves it as it is"
        tables(tmp_path, 3)
        assert (tmp_path / name).read_bytes() == head + first + second.replace(b"2,", b"3,", 1)
    for length in (0, 1, 20, whole.index(b"\n")):  # the first line is written again
        (tmp_path / name).write_bytes(whole[:length])
        tables(tmp_path, 1)
        assert (tmp_path / name).read_bytes() == head + first


FULL_DISK = """
import resource, sys
from pathlib import Path
from megatron.distributed import exit_codes
from tests.megatron.train.test_sinks import tables
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sys.exit(exit_codes.run(lambda: tables(Path(sys.argv[1]), *range(1, 100)) or 0))
"""


def test_of_a_row_that_does_not_fit_nothing_stays(tmp_path: Path) -> None:
    done = python("-c", FULL_DISK, tmp_path)
    assert done.returncode == 7 and "--csv-dir" in done.stderr and "start the same command again" in done.stderr
    written = (tmp_path / "steps.csv").read_bytes()
    commas = {line.count(b",") for line in written.splitlines()}
    assert written.endswith(b"\r\n") and commas == {len(TABLES["steps"]) - 1}


# ---- Weights & Biases --------------------------------------------------------------------------------------------


def test_a_run_of_wandb_gets_every_step_and_evaluation(wandb: Path, tmp_path: Path) -> None:
    train([*TINY, "--mock-data", "--train-iters", 2, "--eval-interval", 2, "--eval-iters", 1, "--clip-grad", 0.25,
           "--wandb-project", "gpt", "--wandb-group", "sweep", "--wandb-entity", "us", "--metrics-file",
           tmp_path / "m"])
    (_, opened), (_, axis), (_, config), *logged, last = told(wandb)
    assert opened == {"project": "gpt", "group": "sweep", "entity": "us"} and axis == "iteration"
    assert config["optim"]["clip_grad"] == 0.25 and last == ("finish", 0)
    lines = records(tmp_path / "m")
    assert [value["iteration"] for _, value in logged] == [line["iteration"] for line in lines]
    for (_, value), line in zip(logged, lines, strict=True):
        assert value[f"{line.get('split', 'train')}/lm_loss"] == line["lm_loss"]
    assert logged[0][1]["tokens"] == 4 * 16 and "train/mfu" not in logged[0][1]


def test_a_run_that_fails_does_not_pass_for_a_finished_one_and_a_full_disk_does_not_hide_its_error(
        wandb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NumericsError, match="^loss$"):
        with log_of(wandb_project="gpt", metrics_file=str(tmp_path / "m")):
            monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
            raise NumericsError("loss")
    assert told(wandb)[-1] == ("finish", 1)


def test_a_service_that_ends_before_the_run_is_told_once_and_ends_no_run(wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_LASTS", "2")
    train([*TINY, "--mock-data", "--train-iters", 4, "--wandb-project", "gpt", "--metrics-file", tmp_path / "m"])
    assert len(records(tmp_path / "m")) == 4
    assert [value["iteration"] for kind, value in told(wandb) if kind == "log"] == [1]
    assert [line for line in capsys.readouterr().err.splitlines() if "wandb" in line] == [
        "warning: wandb takes no more scalars (Error: the service has gone); training goes on without it"]


def test_a_sink_that_cannot_be_opened_leaves_no_other_one_open(wandb, tmp_path, monkeypatch, capfd):
    """Seen while the errors are kept, whose tracebacks keep what was made until then."""
    monkeypatch.setenv("WANDB_REFUSES", "1")
    values = {"metrics_file": str(tmp_path / "m"), "csv_dir": str(tmp_path / "tables")}
    with pytest.raises(ConfigError, match=r"^--wandb-project p: wandb cannot start: api_key .* call wandb.log") as one:
        log_of(**values, wandb_project="p")
    (tmp_path / "tables" / "evaluations.csv").write_text("name,salary\n")
    with pytest.raises(StorageError) as other:
        log_of(**values)
    (tmp_path / "tables" / "evaluations.csv").unlink()
    log_of(**values).close()
    assert one.value and other.value and "warning" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("flags", [["--wandb-project", "gpt"], ["--deepspeed_config", "ds.json"]])
def test_without_the_package_a_run_ends_before_torch_is_imported(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"wandb": {"enabled": true}}')
    program = ("import sys, runpy; from importlib import util; found = util.find_spec\n"
               "util.find_spec = lambda name: None if name == 'wandb' else found(name)\n"
               f"sys.argv[0] = {str(ROOT / 'pretrain_gpt2.py')!r}\n"
               "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
               "finally: print('torch' in sys.modules)")
    done = python("-c", program, *TINY, "--mock-data", *flags, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    name = "wandb.enabled" if flags[0] == "--deepspeed_config" else "--wandb-project"
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {name}"), done.stderr
    assert "pip install wandb" in done.stderr


def failing(number: int) -> Callable[..., Any]:
    def fail(*arguments: object, **more: object) -> Any:
        raise OSError(number, os.strerror(number))
    return fail


def test_a_metrics_file_that_fails_is_named_with_its_flag_and_lack_of_memory_is_not_its_matter(tmp_path, monkeypatch):
    for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.ENOMEM):
        file = AppendOnlyFile("--metrics-file", str(tmp_path / "m"), print)
        with monkeypatch.context() as broken, pytest.raises((OSError, StorageError)) as caught:
            broken.setattr(os, "fsync", failing(number))
            file.close()
        failure = exit_codes.exit_reason_of(caught.value, {})
        if number == errno.ENOMEM:
            assert failure.code == 5 and "out of memory" in failure.text and "--metrics-file" not in failure.text
        else:
            assert failure.code == 7
            assert failure.text.startswith(f"--metrics-file {tmp_path / 'm'} cannot be written: {os.strerror(number)}")


def test_a_tensorboard_folder_that_fails_is_named_with_its_flag(tmp_path, monkeypatch, capfd):
    log = log_of(tensorboard_dir=str(tmp_path / "board"))
    monkeypatch.setattr(LocalFileSystem, "append", failing(errno.EIO))
    with pytest.raises(StorageError, match=f"^--tensorboard-dir {tmp_path}/board cannot be written: Input/output"):
        log.evaluation("validation", 1, 2.0)
        log.close()
    assert capfd.readouterr().err == "", "the thread that writes has no traceback"


def test_what_a_kill_has_cut_does_not_join_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for left, found in ((b"", ""), (b'{"iteration": 1}\n', '{"iteration": 1}\n'), (b'{"iterat', '{"iterat\n')):
        path.write_bytes(left)
        file = AppendOnlyFile("--metrics-file", str(path), print)
        assert path.read_bytes() == left, "a run with nothing to say leaves it as it is"
        file.append("{}\n")
        file.append("{}\n")
        file.close()
        assert path.read_text() == found + "{}\n{}\n"


HOLDING = """
import sys
from megatron.metrics.sinks import AppendOnlyFile
held = AppendOnlyFile("--metrics-file", sys.argv[1], print)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_that_writes_into_the_file_is_told_and_goes_on(tmp_path: Path) -> None:
    run = [*TINY, "--mock-data", "--train-iters", 1, "--metrics-file", tmp_path / "m"]
    words = (f"warning: another process, or another part of this one, has --metrics-file {tmp_path / 'm'} open to "
             "write into it")
    with subprocess.Popen([sys.executable, "-c", HOLDING, tmp_path / "m"], stdin=subprocess.PIPE, cwd=ROOT,
                          stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert train(run).count(words) == 1 and steps(tmp_path / "m")
        holder.kill()
    assert words not in train(run), "a lock goes with its process"


def test_the_rank_that_reports_ends_the_job_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to("/dev/full")
    ended = launched(2, "pretrain_gpt2.py", *TINY, "--mock-data", "--train-iters", 100_000, "--metrics-file",
                     tmp_path / "m")
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert error_of(ended, 7).startswith(
        f"error: --metrics-file {tmp_path / 'm'} cannot be written: No space left on device")
