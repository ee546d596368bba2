"""The tuner: whatever becomes of a trial is a result, a search that was killed goes on, the end says what to type."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.storage import DataError, StorageFault, hold_writer_lock
from megatron import host_memory
from megatron.config.cli import parse_args
from megatron.errors import ConfigError, PeerError, StorageError
from megatron.plan.footprint import PlannedRun, StatePlacement
from megatron.plan.memory import USABLE_FRACTION
from megatron.tune import cli, search, trial
from megatron.tune.cli import recommended_flags
from megatron.tune.search import (MemoryBudget, TrialResult, TuningChoice, common_error, legal_choices, next_repeat,
                                  samples_per_step)
from megatron.tune.trial import TRIALS_FILE, TrialRecords, TrialRunner, config_to_flags, trial_config
from tests.megatron.helpers import NO_DROPOUT, ROOT, TINY
from tests.megatron.tune.simulated import RATES

FAKE = (str(ROOT / "tests/megatron/tune/fake_trainer.py"),)
MODEL = [*TINY, *NO_DROPOUT, "--mock-data"]


def asked(*flags: str) -> PlannedRun:
    return cli.parse(["--device", "cpu", *MODEL, *flags])[1]


class Tuner:
    """Searches for two ranks that keep everything in a folder of the test's. No machine is measured, and the trainer
    is a fake."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        patch.setattr(cli, "measured_rates", lambda run: RATES)
        patch.setattr(trial, "TRAINER", FAKE)
        patch.setenv("PYTHONPATH", str(ROOT))
        self.results, self._trials, self._patch, self._capsys = folder / "results", folder / "trials", patch, capsys
        self.flags = ["--device", "cpu", "--ranks", "2", "--global-batch-size", "4", "--autotuning-results-dir",
                      str(self.results), "--autotuning-exps-dir", str(self._trials), *MODEL]
        self.fake()

    def fake(self, other: str = "done", **ways: str) -> None:
        """What trials do, by ZeRO stage."""
        self._patch.setenv("FAKE_TRAINER", json.dumps({"other": other, **{name[-1]: ways[name] for name in ways}}))

    def takes(self, *seconds: float | None) -> None:
        """The times of the trials to come; None: no memory."""
        left = iter(seconds)

        def run(*_: object) -> TrialResult:
            taken = next(left)
            return TrialResult("memory", words="no memory", code=5) if taken is None else TrialResult("done", taken)

        self._patch.setattr(TrialRunner, "run", run)

    def try_once(self, way: str, *flags: str, limit: float = 60.0) -> TrialResult:
        self.fake(way)
        return TrialRunner(self._trials, 3, 5, limit).run(1, asked(*flags), 0.1)

    def search(self, flags: str = "") -> str:
        """What it prints."""
        assert cli.main([*self.flags, *flags.split()]) == 0
        return self._capsys.readouterr().out

    def outcomes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.results / TRIALS_FILE).read_text().splitlines()[1:]]


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tuner:
    return Tuner(tmp_path, monkeypatch, capsys)


IN_ORDER = "--autotuning-tuner-early-stopping 0 --autotuning-tuner-type gridsearch --autotuning-tuner-num-trials"


# ---- one trial ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way, ranks, state, words", [
    ("memory", "2", "memory", "error: rank 0 is out of memory"), ("limit", "1", "memory", "MemoryError"),
    ("crash", "2", "crash", "what nobody has thought of"), ("cut", "1", "crash", "while it wrote a line"),
    ("silent", "1", "crash", "ended well without the times of steps 3 to 5"),
    ("hang", "2", "hang", "not over after 2 s"), ("done", "1", "done", ""), ("done", "2", "done", "")])
def test_whatever_becomes_of_a_trial_is_a_result(
        way: str, ranks: str, state: str, words: str, tuner: Tuner, tmp_path: Path) -> None:
    begin = time.monotonic()
    outcome = tuner.try_once(way, "--ranks", ranks, limit=2.0 if way == "hang" else 60.0)
    assert outcome.state == state and time.monotonic() - begin < 30
    assert outcome.seconds == (0.101 if state == "done" else None)
    assert words in outcome.words and not _processes(tmp_path)


def test_a_start_that_takes_long_is_no_hang(
        tuner: Tuner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What follows the first step has the short limit."""
    monkeypatch.setattr(trial, "EXTRA_SECONDS", 1.0)
    tuner.fake("slow", stage2="stuck", stage3="hang")
    trials, flags = TrialRunner(tmp_path, 3, 5), ["--startup-timeout-seconds", "15"]
    assert trials.run(1, asked(*flags), 0.01).state == "done"
    stuck = trials.run(2, asked(*flags, "--zero-stage", "2"), 0.01)
    assert (stuck.state, stuck.words) == ("hang", "not over 2 s after its first step")
    still = trials.run(3, asked("--startup-timeout-seconds", "3", "--zero-stage", "3"), 0.01)
    assert (still.state, still.words) == ("hang", "no step in 3 s")


def test_a_trial_is_waited_for_as_long_as_training_waits_for_its_first_step(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits: list[dict[str, float]] = []
    monkeypatch.setattr(trial, "_run_process", lambda *_, **each: limits.append(each) or "stopped")
    for given in (None, 50.0):
        TrialRunner(tmp_path, 3, 5, given).run(1, asked("--distributed-timeout-seconds", "100"), 0.4)
    assert limits == [{"first_step": 300.0, "steps": 200.0, "total": math.inf},
                      {"first_step": math.inf, "steps": math.inf, "total": 50.0}]


@pytest.mark.parametrize("said, state", [
    ("[rank0]: torch.AcceleratorError: CUDA error: out of memory", "memory"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "memory"),
    ("OSError: [Errno 12] Cannot allocate memory", "memory"),
    ("allocator: retries a request that was out of memory\nAssertionError: a bug", "crash"),
    ("a MemoryError would be told\n[rank0]: RuntimeError: a bug", "crash")])
def test_lack_of_memory_is_in_the_line_of_an_error(said: str, state: str, tuner: Tuner) -> None:
    outcome = tuner.try_once(f"says {said}")
    assert outcome == TrialResult(state, words=said.splitlines()[-1], code=outcome.code) and outcome.code


def test_an_attempt_does_not_mix_with_what_another_one_left_or_writes(tuner: Tuner, tmp_path: Path) -> None:
    for name in ("001", "001-2"):  # of a tuner that was killed, whose ranks may still write
        (tmp_path / "trials" / name).mkdir(parents=True)
        (tmp_path / "trials" / name / "metrics.jsonl").write_text('{"iteration": 3, "step_ms": 1.0}\n')
    assert tuner.try_once("done") == TrialResult("done", 0.101)
    assert [len((tmp_path / "trials" / name / "metrics.jsonl").read_text().splitlines()) for name in (
        "001", "001-2", "001-3")] == [1, 1, 5]


def test_a_trial_that_is_over_is_not_signalled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its number may be a stranger's by then."""
    signals: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: signals.append(number))
    ended = trial._run_process(["true"], {**os.environ}, subprocess.DEVNULL, tmp_path / "metrics",
                               first_step=9, steps=9, total=9)
    assert ended == 0 and not signals


def test_a_tuner_that_is_killed_takes_its_trial_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = ("from pathlib import Path; from megatron.tune import cli, trial; "
               f"run = cli.parse(['--device', 'cpu', '--ranks', '2', *{MODEL!r}])[1]; "
               f"trial.TRAINER = {FAKE!r}; "
               f"trial.TrialRunner(Path({str(tmp_path / 'trials')!r}), 3, 5, 600.0).run(1, run, 0.1)")
    monkeypatch.setenv("FAKE_TRAINER", json.dumps({"other": "hang"}))
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as tuner:
        _until(lambda: len(_processes(tmp_path / "trials")) == 1 + 1 + 2)  # itself, the launcher, its ranks
        tuner.kill()
    _until(lambda: not _processes(tmp_path / "trials"))


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def _processes(folder: Path) -> list[Path]:
    """Those that have this folder in their command."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _content(path)]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_flags_of_a_trial_make_its_configuration_again(tmp_path: Path) -> None:
    run = asked("--lr", "3e-4", "--no-overlap-comm", "--split", "90,5,5", "--checkpoint-activations", "--bf16",
                "--save", str(tmp_path), "--load", str(tmp_path), "--tensorboard-dir", str(tmp_path))
    config = trial_config(run, tmp_path / "m.jsonl", 5)
    assert parse_args(config_to_flags(config)) == config
    assert config.save.save is None and config.log.tensorboard_dir is None
    assert config.train.train_iters == run.config.train.train_iters and config.train.exit_interval == 5
    assert (config.optim, config.data, config.recompute) == (run.config.optim, run.config.data, run.config.recompute)


@pytest.mark.parametrize("flags", [
    ["--quantize-training", "--train-iters", "20000"], ["--exit-interval", "4"], ["--exit-duration-in-mins", "0.001"],
    ["--optimizer", "onebit_adam", "--onebit-freeze-step", "100", "--train-iters", "1000"], ["--train-iters", "3"]])
def test_what_is_set_for_a_long_run_can_be_tried(flags: list[str], tmp_path: Path) -> None:
    """Checks and schedules are those of the run, and the trial is left after its steps."""
    config = trial_config(asked(*flags), tmp_path / "m.jsonl", 5)
    assert parse_args(config_to_flags(config)) == config
    assert config.train.exit_interval == 5 and config.train.train_iters >= 5 and not config.train.exit_duration_in_mins


def test_steps_that_are_skipped_are_no_time_and_a_trial_is_not_scaled_until_they_are(tmp_path: Path) -> None:
    config = trial_config(asked("--fp16", "--initial-loss-scale", str(2.0**32)), tmp_path / "m.jsonl", 5)
    assert config.precision.initial_loss_scale == trial.SCALE
    file = tmp_path / "m.jsonl"
    lines = [{"iteration": step, "step_ms": 100.0 * step, "skipped": step == 2} for step in range(1, 6)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert trial._recorded_steps(file) == [(1, 0.1), (3, 0.3), (4, 0.4), (5, 0.5)]


# ---- a search -----------------------------------------------------------------------------------------------------


def test_failed_trials_do_not_stop_it_and_the_end_says_what_to_type(tuner: Tuner) -> None:
    tuner.fake(stage0="memory", stage1="crash", stage2="hang")
    text = tuner.search(f"--trial-seconds 3 --autotuning-mp-size 1 {IN_ORDER} 50")
    assert {"done", "crash"} <= {one["outcome"]["state"] for one in tuner.outcomes()}
    fastest = next(line for line in text.splitlines() if line.startswith("flags: ")).removeprefix("flags: ")
    assert "--zero-stage 3" in fastest and (tuner.results / "flags.txt").read_text() == fastest + "\n"
    parse_args([*MODEL, *fastest.split()], 2).check_world(2)
    assert "<table>" in (tuner.results / "tuning.html").read_text()


@pytest.mark.parametrize("flags", [
    ["--no-autotuning-fast", "--allgather-bucket-size", "1000"],
    ["--zero-stage", "1", "--offload-optimizer-device", "nvme", "--offload-optimizer-nvme-path", "DIR"]])
def test_the_flags_of_a_choice_make_it_beside_those_that_were_given(flags: list[str]) -> None:
    flags = [*MODEL, "--global-batch-size", "8", *flags]
    run = cli.parse(["--device", "cpu", "--ranks", "2", *flags])[1]
    found = legal_choices(run)
    for choice, chosen in found.items():
        config = parse_args([*flags, *choice.flags(run)], 2)
        assert PlannedRun(config).placement == choice.placement
        assert (config.zero, config.recompute, config.parallel, config.train) == (
            chosen.config.zero, chosen.config.recompute, chosen.config.parallel, chosen.config.train)
    assert {choice.placement for choice in found} >= {StatePlacement(), run.placement}


@pytest.mark.parametrize("content", [
    {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1, "cpu_offload": True}},
    {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {
        "stage": 2, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000}},
    {"zero_optimization": {"stage": 3}}, {"train_batch_size": 8}])
def test_beside_a_file_its_keys_are_told(content: dict[str, Any], tmp_path: Path) -> None:
    """With them in the file, and the flags beside it, a run is the choice."""
    file = tmp_path / "ds.json"
    given = [*MODEL, "--deepspeed_config", str(file)]
    for number in range(0, 20, 3):
        file.write_text(json.dumps(content))
        run = cli.parse(["--device", "cpu", "--ranks", "1", "--no-autotuning-fast", *given])[1]
        choice, chosen = list(legal_choices(run).items())[number % len(legal_choices(run))]
        *keys, flags = recommended_flags(run, choice)
        changed = json.loads(json.dumps(content))
        for word in (keys[0].removeprefix(f"in {file}: ").split(", ") if keys else []):
            name, value = word.split()
            *path, last = name.split(".")
            inner = changed
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = json.loads(value)
        file.write_text(json.dumps(changed))
        config = parse_args([*given, *flags.removeprefix("flags: ").split()], 1)
        assert (config.train, config.zero, config.recompute) == (
            replace(chosen.config.train, global_batch_size=config.train.global_batch_size), chosen.config.zero,
            chosen.config.recompute)
        assert config.global_batch_size(1) == samples_per_step(run) and PlannedRun(config).placement == choice.placement


def test_it_goes_on_where_it_was_killed(tuner: Tuner) -> None:
    tuner.search(f"{IN_ORDER} 3")
    first = tuner.outcomes()
    tuner.search(f"{IN_ORDER} 5")
    found = tuner.outcomes()
    assert len({one["trial"] for one in first}) == 3 and found[:len(first)] == first
    assert len({json.dumps(one["choice"]) for one in found}) == len({one["trial"] for one in found}) == 5


def test_the_best_are_measured_again_before_one_is_picked(tuner: Tuner) -> None:
    """Two are close at first: the one that was faster had luck, and the other one no peace."""
    tuner.takes(0.100, 0.105, 0.2, 0.104, 0.090, 0.21, 0.103, 0.091, 0.2)
    assert "90 ms a step" in tuner.search(f"{IN_ORDER} 3")
    found = tuner.outcomes()
    assert [(one["trial"], one["outcome"]["seconds"]) for one in found] == [(1, 0.1), (2, 0.09), (3, 0.2)]
    assert found[1]["outcome"]["times"] == [0.105, 0.09, 0.091]


@pytest.mark.parametrize("times, following", [
    ([(1.0,)], None), ([(1.0,), (1.2,)], 0), ([(1.0,), (1.05,)], 0), ([(1.0, 1.0), (1.05,)], 1),
    ([(1.0, 1.01), (1.05, 1.04)], None), ([(1.0, 1.06), (1.05, 1.04)], 0),
    ([(1.0, 1.06, 1.06), (1.05, 1.04, 1.04)], None), ([(1.03,), (1.0,), (1.02,), (1.01,)], 1), ([], None)])
def test_repeats_end_when_the_best_is_plain(times: list[tuple[float, ...]], following: int | None) -> None:
    assert next_repeat({number: TrialResult("done", min(one), times=one)
                        for number, one in enumerate(times)}) == following


def test_a_choice_that_fails_twice_when_it_is_measured_again_is_not_picked() -> None:
    once = TrialResult("done", 1.0).merge_repeat(TrialResult("hang", words="late"))
    assert (once.state, once.seconds, once.times) == ("done", 1.0, (1.0, math.inf))
    assert next_repeat({0: once, 1: TrialResult("done", 1.0), 2: TrialResult("done", 1.01)}) == 1
    assert once.merge_repeat(TrialResult("done", 0.9)).seconds == 0.9
    twice = once.merge_repeat(TrialResult("memory", words="gone", code=5))
    assert (twice.state, twice.seconds, twice.words) == ("memory", None, "gone")


def test_what_was_measured_stays_where_nothing_can_be_measured_any_more(tuner: Tuner) -> None:
    """A disk that is full, data that are gone: every choice fails from then on."""
    tuner.takes(0.3, 0.2, 0.1, 0.4, None, None)
    text = tuner.search(f"{IN_ORDER} 4")
    assert "over: what could be measured before cannot be any more (no memory)" in text and "100 ms a step" in text
    tuner.takes(0.11, 0.21, 0.31, 0.12, 0.22, 0.32)
    assert "100 ms a step" in tuner.search(f"{IN_ORDER} 4"), "and so it is on disk"


@pytest.mark.slow
def test_a_search_that_is_killed_outright_goes_on(tuner: Tuner) -> None:
    program = f"import sys; from megatron.tune import cli, trial; trial.TRAINER = {FAKE!r}; sys.exit(cli.main())"
    begun = [sys.executable, "-c", program, *tuner.flags]
    with subprocess.Popen(begun, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("trial 2"):
                break
        os.kill(process.pid, signal.SIGKILL)
    before = tuner.outcomes()
    text = subprocess.run(begun, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert f"goes on after {len(before)} trials" in text and tuner.outcomes()[:len(before)] == before


def test_trials_of_another_run_are_not_mixed_with_these(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner.search("--autotuning-tuner-num-trials 1")
    for flags, words in (("--hidden-size 64", r"trials of another run or machine \(--hidden-size 32 there, 64 here\)"),
                         ("--autotuning-end-profile-step 7", r"\(steps \[3, 5\] there, \[3, 7\] here\)")):
        with pytest.raises(ConfigError, match=words):
            tuner.search(flags)
    with monkeypatch.context() as elsewhere, pytest.raises(
            ConfigError, match=r"\(machine .* there, elsewhere, .*; threads \S+ there, 7 here; torch "):
        elsewhere.setenv("OMP_NUM_THREADS", "7")
        elsewhere.setattr(trial, "version", lambda _: "2.11.0")
        elsewhere.setattr(platform, "node", lambda: "elsewhere")
        tuner.search()
    tuner.search("--autotuning-tuner-num-trials 1 --hidden-size 64 --autotuning-overwrite")
    assert len(tuner.outcomes()) == 1


def test_a_dry_run_tries_nothing_and_leaves_what_was_tried(tuner: Tuner) -> None:
    said = tuner.search("--dry-run")
    assert "nothing is tried (--dry-run)" in said and "samples/s | --batch-size " in said and "trial 1" not in said
    assert not tuner.results.exists(), "nothing is written"
    tuner.search("--autotuning-tuner-num-trials 1")
    before = tuner.outcomes()
    tuner.search("--autotuning-overwrite --dry-run")
    assert tuner.outcomes() == before


def test_where_nothing_runs_it_says_so(tuner: Tuner) -> None:
    tuner.fake("crash")
    with pytest.raises(PeerError, match="no choice of .* ran: 2 trials failed"):
        tuner.search("--autotuning-tuner-num-trials 2")


@pytest.mark.few(2)
@pytest.mark.parametrize("code, kind", [(2, ConfigError), (3, DataError), (7, StorageError)])
def test_an_error_of_all_choices_ends_the_search_and_is_forgotten(
        code: int, kind: type[Exception], tuner: Tuner) -> None:
    tuner.fake(f"ends {code} --data: is wrong")
    with pytest.raises(kind, match=r"^--data: is wrong \(two trials in turn"):
        tuner.search("--autotuning-tuner-num-trials 6")
    assert tuner.outcomes() == []
    tuner.fake()
    tuner.search("--autotuning-tuner-num-trials 1")
    assert tuner.outcomes()[0]["outcome"]["state"] == "done"


def test_a_setting_that_some_choices_refuse_ends_nothing() -> None:
    refused, other = TrialResult("crash", words="no", code=2), TrialResult("crash", words="neither", code=2)
    done, unread = TrialResult("done", 1.0), TrialResult("crash", words="a", code=3)
    for several in ([refused], [refused, other], [done, refused, refused], [refused, unread], [unread, done],
                    [TrialResult("crash", code=5), TrialResult("crash", code=5)]):
        assert common_error(dict(enumerate(several))) is None
    assert common_error(dict(enumerate([refused, refused]))) == refused
    assert common_error(dict(enumerate([done, unread, unread]))) == unread


@pytest.mark.parametrize("flags, kind, words", [
    ([], ConfigError, "no training text: give --train-data"),
    (["--train-data", "nofile.jsonl"], DataError, "--train-data nofile.jsonl: no file or folder of this name"),
    (["--mock-data", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "none.json", "--merge-file", "none.txt"],
     DataError, "none.json")])
def test_what_no_trial_could_run_without_is_refused_before_any(
        flags: list[str], kind: type[Exception], words: str, tuner: Tuner) -> None:
    tuner.flags.remove("--mock-data")
    with pytest.raises(kind, match=words):
        cli.main([*tuner.flags, *flags])
    assert not tuner.results.exists()


@pytest.mark.parametrize("flag", ["--autotuning-exps-dir", "--autotuning-results-dir"])
def test_a_folder_that_cannot_be_one_is_refused_at_the_start(
        flag: str, tuner: Tuner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "measured_rates", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFault, match=f"{flag}: .*file: cannot write: File exists"):
        tuner.search(f"{flag} {tmp_path / 'file'}")


def test_what_is_told_of_a_search(tuner: Tuner) -> None:
    tuner.takes(0.2, 0.1, 0.1, 0.2)
    text = tuner.search("--autotuning-metric latency --autotuning-tuner-num-trials 1")
    assert " to try; a rank has " in text and "ms a step | measured 200 ms a step\n" in text
    assert "over: --autotuning-tuner-num-trials is 1\n" in text
    assert "fastest: 200 ms a step, after 1 trial of " in text
    text = tuner.search("--autotuning-metric latency --autotuning-tuner-num-trials 2")
    assert "; goes on after 1 trial\n" in text
    head, *rows = text[text.index("trial  micro-batch"):].splitlines()[:3]
    assert "bucket" in head and [row.split()[0] for row in rows] == ["2", "1"]


def test_an_interrupted_search_says_that_it_can_go_on(tuner: Tuner, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> TrialResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialRunner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuner.search()
    assert capsys.readouterr().err == "the same command goes on after 0 trials\n"


def test_two_searches_do_not_share_their_results(tuner: Tuner) -> None:
    tuner.results.mkdir()
    with hold_writer_lock(tuner.results / TRIALS_FILE):
        TrialRecords(tuner.results / TRIALS_FILE, {"a": 1}, overwrite=False)
        held = (tuner.results / TRIALS_FILE).read_text()
        with pytest.raises(StorageFault, match=f"--autotuning-results-dir: .*process {os.getpid()} on .* is writing"):
            tuner.search("--autotuning-overwrite")
        assert (tuner.results / TRIALS_FILE).read_text() == held
    assert sorted(path.name for path in tuner.results.iterdir()) == [TRIALS_FILE]


def test_what_does_not_fit_is_not_tried(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="no choice of .* fits, so nothing was tried: a rank has 0.0 MiB, where the one "
                                        "that lacks least needs [0-9.]+ MiB; "):
        tuner.search("--card-gb 1e-6")
    monkeypatch.setattr(host_memory, "available_bytes",
                        lambda: 307712 << 10)  # 0.5 MiB more than the libraries of a rank
    monkeypatch.setattr(cli, "num_visible_gpus", lambda: 1)
    with pytest.raises(PeerError, match=r"a rank has 0\.\d MiB of the GPU and 0\.5 MiB of the host, where the one that "
                                        r"lacks least needs [\d.]+ MiB of the GPU and [\d.]+ MiB of the host; "):
        tuner.search("--ranks 1 --device cuda --card-gb 0.0005 --autotuning-overwrite")


@pytest.mark.parametrize("visible, ranks, free", [(None, 4, 1000), (None, 2, 7000), ("3,2", 1, 9000), ("3,2", 2, 1000)])
def test_the_room_on_gpus_is_what_is_free_on_those_that_the_ranks_take(
        visible: str | None, ranks: int, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"""#!{sys.executable}
import sys
free = {{"0": 8000, "1": 7000, "2": 1000, "3": 9000}}
ids = [word.removeprefix("--id=").split(",") for word in sys.argv if word.startswith("--id=")]
assert "--query-gpu=memory.free" in sys.argv
print(*(free[one] for one in (ids or [free])[0]), sep="\\n")
""")
    driver.chmod(0o755)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2**33)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = PlannedRun(parse_args(MODEL), ranks, "cuda")
    host = 2**33 / ranks - search.LIBRARY_BYTES
    assert search.available_memory(run, None) == MemoryBudget(free * 2**20 * USABLE_FRACTION, host)
    assert search.available_memory(run, 80) == MemoryBudget(80 * 2**30 * USABLE_FRACTION, host)
    assert search.available_memory(PlannedRun(parse_args(MODEL), ranks, "cpu"), None) == MemoryBudget(host)


def test_it_runs_on_gpus_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, device in ((2, "cuda"), (0, "cpu")):
        monkeypatch.setattr(cli, "num_visible_gpus", lambda: count)
        assert cli.parse(MODEL)[0].device == device


def test_memory_that_nobody_tells_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="give --card-gb"):
        search.available_memory(PlannedRun(parse_args(MODEL), 1, "cuda"), None)


@pytest.mark.parametrize("flags, words", [
    ("--ranks 0", "--ranks is 0"), ("--trial-seconds 0", "--trial-seconds is 0"),
    ("--global-batch-size 3 --autotuning-mp-size 1", "leave no choice"),
    ("--autotuning-mp-size 3", "--autotuning-mp-size 3 does not divide --ranks 2"),
    ("--device cuda", "--device cuda needs a GPU that may be used: trials run here"),
    ("--rates rates.json", "--rates was retired: a search measures this machine itself, in about 10 s")])
def test_what_cannot_be_tuned_is_refused(flags: str, words: str, tuner: Tuner) -> None:
    with pytest.raises(ConfigError, match=words):
        tuner.search(flags)


def test_results_hold_what_was_added(tmp_path: Path) -> None:
    choices = [TuningChoice(batch, 0, False, "none", "none", 1, 5) for batch in (1, 2)]
    results = TrialRecords(tmp_path / TRIALS_FILE, {"a": 1}, overwrite=False)
    results.add(choices[0], TrialResult("done", 0.1 + 0.2))
    results.add(choices[1], TrialResult("hang", words="late"))
    again = TrialRecords(tmp_path / TRIALS_FILE, {"a": 1}, overwrite=False)
    expected = [TrialResult("done", 0.1 + 0.2), TrialResult("hang", words="late")]
    assert list(again.trials.items()) == list(zip(choices, expected, strict=True))
    again.remove([choices[0]])
    assert list(TrialRecords(tmp_path / TRIALS_FILE, {"a": 1}, overwrite=False).trials) == [
        choices[1]] == list(again.trials)
    head = (tmp_path / TRIALS_FILE).read_text().splitlines()[0]
    for line in ("no record", "null", "{}", '{"choice": {"batch": 1}, "outcome": {"state": "done"}}'):
        (tmp_path / TRIALS_FILE).write_text(f"{head}\n{line}\n")
        with pytest.raises(ConfigError, match="holds a line that is no record"):
            TrialRecords(tmp_path / TRIALS_FILE, {"a": 1}, overwrite=False)
    for subject in ("null", "[1]", '"x"'):
        (tmp_path / TRIALS_FILE).write_text(f'{{"subject": {subject}}}\n')
        with pytest.raises(ConfigError, match="holds a line that is no record"):
            TrialRecords(tmp_path / TRIALS_FILE, {"a": 1}, overwrite=False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_real_search_of_a_tiny_model(ranks: str, tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRAINER", (str(ROOT / "pretrain_gpt2.py"),))
    assert "samples/s" in tuner.search(f"--ranks {ranks} --autotuning-tuner-num-trials 3")
    found = tuner.outcomes()
    assert 1 <= len({one["trial"] for one in found}) <= 3 and all(one["outcome"]["state"] == "done" for one in found)
