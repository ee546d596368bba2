"""The predicted time on the command line: from rates that are kept, or given; beside what a run has measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, PeerError
from megatron.plan import cli, rate_cache
from megatron.plan.footprint import PlannedRun
from megatron.plan.gpus import Gpu
from megatron.plan.machine_rates import MachineRates
from megatron.plan.plan_report import settings_by_section
from megatron.plan.step_time import step_time
from megatron.plan.time_forecast import read_measured_run
from tests.megatron.plan.machines import machine, proportional
from tests.megatron.plan.test_time import FLAGS


def of_device(ranks: int, device: str, **changes: Any) -> MachineRates:
    made = machine(ranks, **changes)
    return replace(made, where=replace(made.where, device=device))


@pytest.fixture
def rates_file(tmp_path: Path) -> str:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(machine(update=proportional(1e-9), a_step=0.5).as_dict()))
    return str(file)


def test_each_row_of_the_table_has_its_time(rates_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.print_plan([*FLAGS, "--rates", rates_file]) == 0
    text = capsys.readouterr().out
    head, *rows = text.split("by the rates of 1 rank in fp32 on made up")[1].splitlines()[1:]
    assert head.split() == ["zero", "offload", "products", "attention", "rest", "optimizer", "exchange", "hidden",
                            "total", "tokens/s"]
    assert len(rows) == 4 and rows[0].startswith("* 0")
    found = dict(zip(head.split(), rows[0].strip("* ").split(), strict=True))
    _, run = cli.parse(FLAGS)
    assert float(found["total"]) == pytest.approx(1e3 * step_time(run, machine(
        update=proportional(1e-9), a_step=0.5)).total, rel=1e-3)


def test_a_measured_run_stands_beside_it_without_its_first_steps(
        rates_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = cli.parse(FLAGS)
    values: dict[str, Any] = run.config.as_dict()
    values["zero"]["zero_stage"] = 2
    records = [{"config": True, "start": 0, "world_size": 1, "values": values},
               *({"iteration": step, "lm_loss": 1.0, "step_ms": 9000.0 if step < 4 else 1000.0}
                 for step in range(1, 12))]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    cli.print_plan([*FLAGS, "--rates", rates_file, "--metrics-file", str(file)])
    *_, line, note = capsys.readouterr().out.splitlines()
    assert line.startswith("measured 1000 ms (median of 8 steps of ") and line.endswith("predicted 500.9 ms")
    assert note == "note: that run had other settings: --zero-stage 2 (here 0)"
    cli.print_plan([*FLAGS, "--rates", rates_file, "--metrics-file", str(file), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["seconds"] == 1.0 and found["rows"][0]["step"]["total"] > 0.5
    assert f"note: {found['notes'][-1]}" == note


@pytest.mark.parametrize("flags, words", [
    (["--bf16"], "the rates are of fp32, and the run is in bf16"),
    (["--ranks", "2"], "the rates are of one rank, which exchanges nothing, and the run has 2"),
    (["--device", "cuda"], "the rates are of a CPU, and the run is planned for GPUs: plan it with --device cpu, or"),
])
def test_rates_of_something_else_are_refused(flags: list[str], words: str, rates_file: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cli.print_plan([*FLAGS, "--rates", rates_file, *flags])


def test_rates_of_gpus_are_not_those_of_a_cpu(tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(json.dumps(of_device(1, "cuda").as_dict()))
    with pytest.raises(ConfigError, match="the rates are of GPUs, and the run is planned for the CPU"):
        cli.print_plan([*FLAGS, "--rates", str(tmp_path / "rates.json")])


def notes(tmp_path: Path, capsys: pytest.CaptureFixture[str], rates: MachineRates, *flags: str) -> list[str]:
    (tmp_path / "rates.json").write_text(json.dumps(rates.as_dict()))
    cli.print_plan([*FLAGS, "--rates", str(tmp_path / "rates.json"), *flags])
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]


def test_what_a_forecast_leaves_out_is_said_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert notes(tmp_path, capsys, machine(2), "--ranks", "2") == []
    shared, more = notes(tmp_path, capsys, machine(2), "--ranks", "4")
    assert shared.startswith("note: 4 ranks on one machine share the cores that 2 were measured with")
    assert more.startswith("note: 4 ranks exchange as fast as the 2 that were measured on one machine")
    fewer, = notes(tmp_path, capsys, machine(2), "--ranks", "1")
    assert fewer.startswith("note: the rates are of 2 ranks at work at the same time, and this run has 1")
    assert notes(tmp_path, capsys, machine(spread=1.19)) == []
    busy, = notes(tmp_path, capsys, machine(spread=1.5))
    assert busy.startswith("note: the rates were measured on a busy machine (two measurements are 50% apart)")
    calibrated, = notes(tmp_path, capsys, of_device(2, "cuda"), "--ranks", "2", "--device", "cuda")
    assert calibrated.startswith("note: hardly calibrated on GPUs")


@pytest.mark.parametrize("flags, words", [
    (["--optimizer", "muon"], "what --optimizer muon does otherwise than Adam"), (["--compile"], "--compile"),
    (["--zero-stage", "1", "--offload-optimizer-device", "nvme", "--offload-optimizer-nvme-path", "/tmp"], "the drive"),
    (["--quantize-training"], "--quantize-training"),
    (["--memory-centric-tiled-linear", "--optimizer", "sgd"],
     "what --optimizer sgd does otherwise than Adam, --memory-centric-tiled-linear")])
def test_what_no_rate_knows_is_told(
        flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert notes(tmp_path, capsys, machine(), *flags) == [f"note: not in the predicted time: {words}"]


def test_steps_that_were_skipped_are_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"iteration": step, "step_ms": 1.0 if step % 2 else 100.0, "skipped": bool(step % 2)}
             for step in range(1, 21)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_measured_run(str(file), planned(), machine())
    assert found is not None and (found.seconds, found.steps) == (0.1, 7)


def recorded(file: Path, run: PlannedRun, **facts: Any) -> str:
    """A metrics file of that run."""
    step = {"iteration": 1, "lm_loss": 1.0, "step_ms": 1000.0}
    head = {"config": True, "start": 0, "world_size": run.ranks, **facts, "values": settings_by_section(run)}
    file.write_text(f"{json.dumps(head)}\n{json.dumps(step)}\n")
    return str(file)


def several(file: Path, *starts: tuple[PlannedRun | None, int, int, float]) -> str:
    """A metrics file of starts: (its run, the step before it, its last step, milliseconds)."""
    lines = list[dict[str, Any]]()
    for run, before, last, milliseconds in starts:
        if run is not None:
            lines.append({"config": True, "start": before, "world_size": run.ranks, "values": settings_by_section(run)})
        lines += [{"iteration": step, "step_ms": milliseconds} for step in range(before + 1, last + 1)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


def test_only_steps_with_the_settings_that_are_asked_for_count(tmp_path: Path) -> None:
    """A run of batch 32 that is resumed with 4 says something of both; of neither where another one is asked for."""
    large, small = planned("--batch-size", "32"), planned("--batch-size", "4")
    file = several(tmp_path / "metrics.jsonl", (large, 0, 20, 800.0), (small, 20, 30, 100.0))
    found = [read_measured_run(file, run, machine()) for run in (large, small, planned("--batch-size", "2"))]
    assert [(one.seconds, one.steps, one.left_out) for one in found if one] == [
        (0.8, 17, 10), (0.1, 7, 20), (0.1, 7, 20)]
    assert [one.differs for one in found if one] == [
        (), (), ("--batch-size 4 (here 2)", "--global-batch-size 4 (here 2)")]


def test_steps_that_were_taken_again_count_as_they_were_taken_last(tmp_path: Path) -> None:
    large, small = planned("--batch-size", "32"), planned("--batch-size", "4")
    file = several(tmp_path / "metrics.jsonl", (small, 0, 20, 100.0), (large, 2, 12, 800.0), (large, 8, 20, 900.0))
    found = [read_measured_run(file, run, machine()) for run in (large, small)]
    assert [(one.seconds, one.left_out) for one in found if one] == [(0.9, 2), (0.1, 18)]


def test_a_file_that_says_nothing_of_its_settings_or_has_no_step_is_told(
        tmp_path: Path, rates_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--rates", rates_file, "--metrics-file"]
    cli.print_plan([*flags, several(tmp_path / "metrics.jsonl", (None, 0, 9, 100.0))])
    assert "metrics.jsonl does not say what its settings are" in capsys.readouterr().out
    cli.print_plan([*flags, several(tmp_path / "metrics.jsonl", (planned(), 0, 0, 0.0))])
    assert capsys.readouterr().out.endswith("metrics.jsonl has no step yet\n")


@pytest.mark.parametrize("flags, same", [
    (["--seq-length", "8"], False), (["--reset-attention-mask"], False), (["--deterministic"], False),
    (["--train-iters", "7", "--seed", "3", "--weight-decay", "0"], True), (["--mock-data"], True)])
def test_whatever_changes_the_time_of_a_step_is_compared(flags: list[str], same: bool, tmp_path: Path) -> None:
    found = read_measured_run(recorded(tmp_path / "metrics.jsonl", planned(*flags)), planned(), machine())
    assert found is not None and (not found.differs) == same


@pytest.mark.parametrize("milliseconds, is_far", [(500.0, False), (700.0, False), (900.0, True), (200.0, True)])
def test_a_measured_step_that_is_far_from_the_predicted_one_is_told(
        milliseconds: float, is_far: bool, tmp_path: Path, rates_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = several(tmp_path / "metrics.jsonl", (planned(), 0, 9, milliseconds))
    cli.print_plan([*FLAGS, "--rates", rates_file, "--metrics-file", file])  # about half a second
    assert ("measure the rates again with --probe" in capsys.readouterr().out) == is_far


def test_what_is_said_and_what_follows_are_the_same(tmp_path: Path) -> None:
    run = planned()
    said = planned("--seq-length", str(run.config.seq_length), "--global-batch-size",
                   str(run.config.global_batch_size(run.dp)))
    for one, other in ((run, said), (said, run)):
        found = read_measured_run(recorded(tmp_path / "metrics.jsonl", one), other, machine())
        assert found is not None and not found.differs


@pytest.mark.parametrize("flags, facts, words", [
    ([], {"device": "CPU", "torch": "2.13.0"}, None),
    ([], {"device": "NVIDIA H100"}, "device NVIDIA H100"),
    ([], {"torch": "2.11.0"}, "torch 2.11.0"),
    (["--compile"], {}, "--compile True (here None)"),
    (["--optimizer", "lamb"], {}, "--optimizer lamb (here adam)"),
    (["--clip-grad", "0"], {}, "--clip-grad 0.0 (here 1.0)"),
    (["--lr", "0.7"], {}, None),
    (["--zero-stage", "2", "--offload-optimizer-device", "cpu"], {},
     "--zero-stage 2 (here 0), --offload-optimizer-device cpu (here none)"),
])
def test_a_run_of_other_circumstances_is_told(flags: list[str], facts: dict[str, Any], words: str | None,
                                              tmp_path: Path) -> None:
    file = recorded(tmp_path / "metrics.jsonl", planned(*flags), **facts)
    found = read_measured_run(file, planned(), machine())
    assert found is not None and ", ".join(found.differs) == (words or "")


def test_a_run_that_keeps_its_state_where_the_plan_does_is_no_other(tmp_path: Path) -> None:
    run = planned("--zero-stage", "2", "--offload-optimizer-device", "cpu")
    found = read_measured_run(recorded(tmp_path / "metrics.jsonl", run), run, machine())
    assert found is not None and not found.differs


def test_a_card_is_that_of_the_rates_or_another_one(tmp_path: Path) -> None:
    made, run = of_device(1, "cuda"), cli.parse([*FLAGS, "--device", "cuda"])[1]
    rates = replace(made, where=replace(made.where, machine="node7, NVIDIA H100 80GB HBM3"))
    for device, differs in (("NVIDIA H100 80GB HBM3", ()), ("NVIDIA L4", ("device NVIDIA L4",))):
        found = read_measured_run(recorded(tmp_path / "metrics.jsonl", run, device=device), run, rates)
        assert found is not None and found.differs == differs


@pytest.mark.parametrize("text", ["", "[]", '{"where": 1}', "\x00"])
def test_a_file_that_holds_no_rates_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(ConfigError, match="holds no rates of a machine"):
        cli.print_plan([*FLAGS, "--rates", str(tmp_path / "rates.json")])
    with pytest.raises(ConfigError, match="cannot be read"):
        cli.print_plan([*FLAGS, "--rates", str(tmp_path / "absent.json")])


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that would have measured; rates are kept in a folder of the test's."""
    started: list[list[str]] = []

    def start(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(arguments)
        ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
        rates = of_device(ranks, arguments[-1])
        rates = replace(rates, where=replace(rates.where, machine=arguments[-3]))
        Path(arguments[-4]).write_text(json.dumps(rates.as_dict()))
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return started


def planned(*flags: str) -> PlannedRun:
    return cli.parse([*FLAGS, *flags])[1]


def test_a_machine_is_measured_once_for_each_number_of_ranks(probes: list[list[str]]) -> None:
    assert rate_cache.cached_or_measured_rates(planned()) == rate_cache.cached_or_measured_rates(planned())
    assert len(probes) == 1
    assert rate_cache.cached_or_measured_rates(planned("--ranks", "2")).where.ranks == 2 and len(probes) == 2
    rate_cache.cached_or_measured_rates(planned("--ranks", "64"), ranks_per_node=8)  # this machine has room for two
    assert len(probes) == 2
    rate_cache.cached_or_measured_rates(planned(), remeasure=True)
    assert len(probes) == 3


@pytest.mark.parametrize("again, measured_meanwhile", [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_who_waits_for_a_probe_takes_its_rates_if_they_are_the_ones_that_were_asked_for(
        again: bool, measured_meanwhile: int, probes: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """While this one waits for its turn another measures, for so many ranks."""
    rate_cache.cached_or_measured_rates(planned())
    file, = rate_cache.rates_folder().iterdir()
    if not again:
        file.unlink()
    probes.clear()

    @contextmanager
    def waiting(_: Path) -> Iterator[None]:
        with monkeypatch.context() as others:
            others.setattr(rate_cache, "wait_for_lock", lambda _: nullcontext())
            rate_cache.cached_or_measured_rates(planned("--ranks", str(measured_meanwhile)), remeasure=True)
        yield

    monkeypatch.setattr(rate_cache, "wait_for_lock", waiting)
    assert rate_cache.cached_or_measured_rates(planned(), remeasure=again).where.ranks == 1
    assert len(probes) == measured_meanwhile


@pytest.mark.parametrize("broken", ['{"where"', '"machine": "elsewhere"', '"hides": NaN'])
def test_kept_rates_that_are_damaged_or_of_another_machine_are_measured_anew(
        broken: str, probes: list[list[str]]) -> None:
    good = rate_cache.cached_or_measured_rates(planned())
    file, = rate_cache.rates_folder().iterdir()
    text = file.read_text()
    file.write_text({'{"where"': text[:99], '"hides": NaN': text.replace('"hides": 0.0', broken)}.get(
        broken, text.replace(f'"machine": "{good.where.machine}"', broken)))
    assert file.read_text() != text
    assert rate_cache.cached_or_measured_rates(planned()) == rate_cache.cached_or_measured_rates(
        planned()) == good and len(probes) == 2


def test_the_day_of_the_rates_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rates.json").write_text(json.dumps(machine(taken="2026-02-03").as_dict()))
    cli.print_plan([*FLAGS, "--rates", str(tmp_path / "rates.json")])
    assert "torch 2.13.0), measured on 2026-02-03\n" in capsys.readouterr().out


def test_another_version_or_number_of_threads_is_measured_anew(
        probes: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    rate_cache.cached_or_measured_rates(planned())
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    rate_cache.cached_or_measured_rates(planned())
    monkeypatch.setattr(rate_cache, "version", lambda _: "2.11.0")
    rate_cache.cached_or_measured_rates(planned())
    monkeypatch.setattr(rate_cache, "__version__", "77.0")
    rate_cache.cached_or_measured_rates(planned())
    assert len(probes) == 4


def test_gpus_are_measured_where_there_are_any_and_no_cpu_in_their_place(
        probes: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = planned("--device", "cuda", "--ranks", "8")
    monkeypatch.setattr(rate_cache, "visible_gpus", lambda: [])
    with pytest.raises(ConfigError, match="planned for GPUs, and there is none here .* --device cpu, or give --rates"):
        rate_cache.cached_or_measured_rates(run)
    assert not probes
    monkeypatch.setattr(rate_cache, "visible_gpus", lambda: [Gpu("H100", "GPU-1")] * 2)  # of eight
    assert rate_cache.cached_or_measured_rates(run).where.device == "cuda"
    assert probes[0][probes[0].index("--nproc-per-node") + 1] == "2" and probes[0][-1] == "cuda"


@pytest.mark.parametrize("flags, summary, here, device", [
    (["--time"], False, 0, "cpu"), (["--probe"], False, 0, "cpu"), (["--metrics-file", "m.jsonl"], False, 0, "cpu"),
    (["--time"], False, 1, "cuda"), (["--time", "--device", "cuda"], False, 0, "cuda"), ([], False, 0, "cuda"),
    (["--metrics-file", "m.jsonl"], True, 0, "cuda"), (["--time", "--rates", "r.json"], False, 0, "cuda")])
def test_a_time_is_that_of_the_device_that_is_here(flags: list[str], summary: bool, here: int, device: str,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "visible_gpus", lambda: [Gpu("H100", "GPU-1")] * here)
    without = [word for word in FLAGS if word not in ("--device", "cpu")]
    assert cli.parse([*without, *flags], summary=summary)[1].device == device


def test_a_probe_that_fails_is_an_error_with_its_last_words(
        probes: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda arguments, **_: subprocess.CompletedProcess(
        arguments, 5, "", "error: rank 0 is out of memory"))
    with pytest.raises(PeerError, match="ended with 5: error: rank 0 is out of memory"):
        rate_cache.cached_or_measured_rates(planned())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_this_machine_has_rates(ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rates = rate_cache.cached_or_measured_rates(planned("--ranks", str(ranks)))
    assert isinstance(rates, MachineRates) and rates.where.ranks == ranks
    step = step_time(planned("--ranks", str(ranks)), rates)
    assert min(step.products, step.attention, step.rest, step.optimizer) > 0 and (step.exchange > 0) == (ranks > 1)
    assert 1e-4 < step.total < 10
