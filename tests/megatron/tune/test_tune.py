"""The tuner: whatever becomes of a trial is a result, and the end says what to type."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron import host_memory
from megatron.config.cli import parse_args
from megatron.config.tree import config_to_flags
from megatron.errors import ConfigError, PeerError
from megatron.plan.footprint import PlannedRun, StatePlacement
from megatron.tune import cli, trial
from megatron.tune.cli import recommended_flags
from megatron.tune.search import TrialResult, legal_choices, next_repeat, samples_per_step
from megatron.tune.trial import TrialRunner, trial_config
from tests.megatron.helpers import NO_DROPOUT, ROOT, TINY
from tests.megatron.tune.test_search import RATES

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
        self.results, self._patch, self._capsys = folder / "results", patch, capsys
        self.flags = ["--device", "cpu", "--ranks", "2", "--global-batch-size", "4", "--autotuning-results-dir",
                      str(self.results), *MODEL]
        self.fake()

    def fake(self, way: str = "done") -> None:
        """What trials do."""
        self._patch.setenv("FAKE_TRAINER", way)

    def takes(self, *seconds: float | None) -> None:
        """The times of the trials to come; None: no memory."""
        left = iter(seconds)

        def run(*_: object) -> TrialResult:
            taken = next(left)
            return TrialResult("memory", words="no memory") if taken is None else TrialResult("done", taken)

        self._patch.setattr(TrialRunner, "run", run)

    def try_once(self, way: str, *flags: str, limit: float = 60.0) -> TrialResult:
        self.fake(way)
        return TrialRunner(self.results, 3, 5, limit).run(1, asked(*flags), 0.1)

    def search(self, flags: str = "") -> str:
        """What it prints."""
        assert cli.main([*self.flags, *flags.split()]) == 0
        return self._capsys.readouterr().out

    def trials(self, flags: str = "") -> tuple[str, list[TrialResult]]:
        """What it prints, and what came of each choice."""
        with patch.object(cli, "_report_results", wraps=cli._report_results) as report:
            text = self.search(flags)
        return text, list(report.call_args.args[2].values())


@pytest.fixture
def tuner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tuner:
    return Tuner(tmp_path, monkeypatch, capsys)


MOST = "--autotuning-tuner-num-trials"


# ---- one trial ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way, ranks, state, words", [
    ("memory", "2", "memory", "error: rank 0 is out of memory"), ("limit", "1", "memory", "MemoryError"),
    ("crash", "2", "crash", "what nobody has thought of"), ("cut", "1", "crash", "while it wrote a line"),
    ("silent", "1", "crash", "ended well without the times of steps 3 to 5"),
    ("hang", "2", "hang", "not over after 2 s"), ("done", "1", "done", ""), ("done", "2", "done", "")])
def test_whatever_becomes_of_a_trial_is_a_result(way, ranks, state, words, tuner, tmp_path):
    begin = time.monotonic()
    outcome = tuner.try_once(way, "--ranks", ranks, limit=2.0 if way == "hang" else 60.0)
    assert outcome.state == state and time.monotonic() - begin < 30
    assert outcome.seconds == (0.101 if state == "done" else None)
    assert words in outcome.words and not _processes(tmp_path)


def test_a_tuner_that_is_killed_takes_its_trial_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = ("from pathlib import Path; from megatron.tune import cli, trial; "
               f"run = cli.parse(['--device', 'cpu', '--ranks', '2', *{MODEL!r}])[1]; "
               f"trial.TRAINER = {FAKE!r}; "
               f"trial.TrialRunner(Path({str(tmp_path / 'trials')!r}), 3, 5, 600.0).run(1, run, 0.1)")
    monkeypatch.setenv("FAKE_TRAINER", "hang")
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
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found += [path] * (str(folder).encode() in path.read_bytes())
    return found


def test_the_flags_of_a_trial_make_its_configuration_again(tmp_path: Path) -> None:
    run = asked("--lr", "3e-4", "--no-overlap-comm", "--split", "90,5,5", "--checkpoint-activations", "--bf16",
                "--save", str(tmp_path), "--load", str(tmp_path), "--tensorboard-dir", str(tmp_path))
    config = trial_config(run, tmp_path / "m.jsonl", 5)
    for settings in (config.settings(), json.loads(json.dumps(config.settings()))):
        assert parse_args(config_to_flags(settings)) == config
    assert config.save.save is None and config.log.tensorboard_dir is None
    assert config.train.train_iters == run.config.train.train_iters and config.train.exit_interval == 5
    assert (config.optim, config.data, config.recompute) == (run.config.optim, run.config.data, run.config.recompute)


# ---- a search -----------------------------------------------------------------------------------------------------


def test_failed_trials_do_not_stop_it_and_the_end_says_what_to_type(tuner, monkeypatch):
    def outcome(runner: TrialRunner, number: int, run: PlannedRun, predicted: float) -> TrialResult:
        state = ("memory", "crash", "hang", "done")[run.config.zero.zero_stage]
        return TrialResult(state, 0.1 if state == "done" else None)  # type: ignore[arg-type]

    monkeypatch.setattr(TrialRunner, "run", outcome)
    text, trials = tuner.trials(f"--autotuning-mp-size 1 {MOST} 50")
    assert {trial.state for trial in trials} >= {"done", "crash", "hang"}
    fastest = next(line for line in text.splitlines() if line.startswith("flags: ")).removeprefix("flags: ")
    assert "--zero-stage 3" in fastest and (tuner.results / "flags.txt").read_text() == fastest + "\n"
    parse_args([*MODEL, *fastest.split()], 2).check_world(2)


@pytest.mark.parametrize("flags", [
    [], ["--zero-stage", "1", "--offload-optimizer-device", "nvme", "--offload-optimizer-nvme-path", "DIR"]])
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
    """Without them in the file, and with the flags beside it, a run is the choice."""
    file = tmp_path / "ds.json"
    given = [*MODEL, "--deepspeed_config", str(file)]
    for number in range(0, 20, 3):
        file.write_text(json.dumps(content))
        run = cli.parse(["--device", "cpu", "--ranks", "1", *given])[1]
        choice, chosen = list(legal_choices(run).items())[number % len(legal_choices(run))]
        *keys, flags = recommended_flags(run, choice)
        changed = json.loads(json.dumps(content))
        for name in (keys[0].removeprefix(f"leave out of {file}: ").split(", ") if keys else []):
            *path, last = name.split(".")
            inner = changed
            for part in path:
                inner = inner[part]
            del inner[last]
        file.write_text(json.dumps(changed))
        config = parse_args([*given, *flags.removeprefix("flags: ").split()], 1)
        assert (config.train, config.zero, config.recompute) == (
            replace(chosen.config.train, global_batch_size=config.train.global_batch_size), chosen.config.zero,
            chosen.config.recompute)
        assert config.global_batch_size(1) == samples_per_step(run) and PlannedRun(config).placement == choice.placement


def test_the_best_are_measured_again_before_one_is_picked(tuner: Tuner) -> None:
    """Two are close at first: the one that was faster had luck, and the other one no peace."""
    tuner.takes(0.100, 0.105, 0.2, 0.104, 0.090, 0.21, 0.103, 0.091, 0.2)
    text, trials = tuner.trials(f"{MOST} 3")
    assert "90 ms a step" in text and [trial.seconds for trial in trials] == [0.1, 0.09, 0.2]
    assert trials[1].times == (0.105, 0.09, 0.091)


@pytest.mark.parametrize("times, following", [
    ([(1.0,)], None), ([(1.0,), (1.2,)], 0), ([(1.0,), (1.05,)], 0), ([(1.0, 1.0), (1.05,)], 1),
    ([(1.0, 1.01), (1.05, 1.04)], None), ([(1.0, 1.06), (1.05, 1.04)], 0),
    ([(1.0, 1.06, 1.06), (1.05, 1.04, 1.04)], None), ([(1.03,), (1.0,), (1.02,), (1.01,)], 1), ([], None)])
def test_repeats_end_when_the_best_is_plain(times: list[tuple[float, ...]], following: int | None) -> None:
    assert next_repeat({number: TrialResult("done", min(one), times=one)
                        for number, one in enumerate(times)}) == following


def test_what_was_measured_stays_where_nothing_can_be_measured_any_more(tuner: Tuner) -> None:
    """A disk that is full, data that are gone: every choice fails from then on."""
    tuner.takes(0.3, 0.2, 0.1, 0.4, None, None)
    text = tuner.search(f"{MOST} 4")
    assert "over: what could be measured before cannot be any more (no memory)" in text and "100 ms a step" in text


def test_what_does_not_fit_is_not_tried(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerError, match="no choice of .* fits, so nothing was tried: a rank has 0.0 MiB, where the one "
                                        "that lacks least needs [0-9.]+ MiB; "):
        tuner.search("--card-gb 1e-6")
    monkeypatch.setattr(host_memory, "available_bytes",
                        lambda: 307712 << 10)  # 0.5 MiB more than the libraries of a rank
    monkeypatch.setattr(cli, "num_visible_gpus", lambda: 1)
    with pytest.raises(PeerError, match=r"a rank has 0\.\d MiB of the GPU and 0\.5 MiB of the host, where the one that "
                                        r"lacks least needs [\d.]+ MiB of the GPU and [\d.]+ MiB of the host; "):
        tuner.search("--ranks 1 --device cuda --card-gb 0.0005")


@pytest.mark.parametrize("flags, words", [
    ("--ranks 0", "--ranks is 0"), ("--trial-seconds 0", "--trial-seconds is 0"),
    ("--global-batch-size 3 --autotuning-mp-size 1", "leave no choice"),
    ("--autotuning-mp-size 3", "--autotuning-mp-size 3 does not divide --ranks 2"),
    ("--device cuda", "--device cuda needs a GPU that may be used: trials run here")])
def test_what_cannot_be_tuned_is_refused(flags: str, words: str, tuner: Tuner) -> None:
    with pytest.raises(ConfigError, match=words):
        tuner.search(flags)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_real_search_of_a_tiny_model(ranks: str, tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRAINER", (str(ROOT / "pretrain_gpt2.py"),))
    text, trials = tuner.trials(f"--ranks {ranks} --autotuning-tuner-num-trials 3")
    assert "samples/s" in text and 1 <= len(trials) <= 3 and all(trial.state == "done" for trial in trials)
