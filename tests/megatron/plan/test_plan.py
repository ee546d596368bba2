"""The planner: same flags as training, the published formulas in the limit, remedies that help, a clear end."""

from __future__ import annotations

import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pretrain_gpt2
from megatron import host_memory
from megatron.config.cli import is_dry_run
from megatron.config.optimizer_config import ONE_BIT_OPTIMIZERS, OPTIMIZERS
from megatron.config.tree import build_config
from megatron.distributed import exit_codes
from megatron.errors import ConfigError
from megatron.model import GPT2, count_parameters
from megatron.plan import cli as plan
from megatron.plan.alternatives import all_choices, cheapest_fit, largest_micro_batches, suggest_changes
from megatron.plan.cli import TargetMachine, describe_requirements
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import USABLE_FRACTION, peak_memory, persistent_memory
from tests.megatron.helpers import TINY, train

FLAGS = ["--preset", "345M", "--bf16", "--batch-size", "8", "--ranks", "8", "--zero-stage", "2"]


def planned(*argv: str) -> PlannedRun:
    return plan.parse(argv)[1]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def print_plan(*argv: str) -> str:
        assert plan.print_plan(argv) == 0
        return capsys.readouterr().out

    return print_plan


def cells(text: str) -> dict[tuple[str, str], dict[str, str]]:
    """(stage, offload) -> head -> cell, of the table of memory."""
    head, *rows = text.split("\n\n")[1].splitlines()[1:]
    names = head.split()
    found = [dict(zip(names, row.strip("* ").split(), strict=True)) for row in rows
             if not row.startswith("left out: ")]
    return {(row["zero"], row["offload"]): row for row in found}


ALL_ROWS = [("0", "none"), ("1", "none"), ("1", "cpu"), ("2", "none"), ("2", "cpu"), ("3", "none"), ("3", "cpu"),
            ("3", "cpu+params"), ("3", "nvme"), ("3", "nvme+params")]


def test_the_table_has_a_row_for_every_legal_choice_and_marks_the_one_asked_for(printed: Callable[..., str]) -> None:
    text = printed(*FLAGS)
    lines = text.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("*")] == [["*", "2", "none"]] * 2
    assert list(cells(text)) == ALL_ROWS
    assert max(map(len, lines)) <= 120


METHODS = [(), ("--progressive-layer-drop",), ("--quantize-training", "--quantize-eigenvalue"), ("--cuda-graphs",),
           ("--offload-update", "device"), ("--delayed-param-update",)]


@pytest.mark.few(12)
@pytest.mark.parametrize("optimizer, method", [
    *((optimizer, ()) for optimizer in OPTIMIZERS if optimizer not in ONE_BIT_OPTIMIZERS),
    *((optimizer, method) for optimizer in ("adam", *ONE_BIT_OPTIMIZERS) for method in METHODS)])
def test_every_run_that_training_accepts_is_planned_and_rows_that_it_forbids_are_left_out(optimizer, method, printed):
    argv = ["--preset", "124M", "--ranks", "2", "--train-iters", "10000", "--tflops", "40", "--optimizer", optimizer]
    argv += ["--onebit-freeze-step", "1500"] if optimizer in ONE_BIT_OPTIMIZERS else []
    text = printed(*argv, *method)
    asked = planned(*argv, *method)
    assert suggest_changes(asked)
    flat = {name: value for section in asked.config.as_dict().values() for name, value in section.items()}
    for stage, place in ALL_ROWS:
        device, param = {"none": ("none", "none"), "cpu+params": ("cpu", "cpu"), "nvme+params": ("nvme", "nvme")}.get(
            place, (place, "none"))
        wanted = {**flat, "zero_stage": int(stage), "offload_optimizer_device": device, "offload_param_device": param,
                  "offload_optimizer_nvme_path": "DIR", "offload_param_nvme_path": "DIR"}
        try:
            build_config(wanted)
        except ConfigError:
            assert (stage, place) not in cells(text)
            assert any(line.startswith(f"left out: {stage} ") and place in line for line in text.splitlines())
        else:
            assert (stage, place) in cells(text)


def test_a_row_that_is_left_out_says_why(printed: Callable[..., str]) -> None:
    text = printed("--preset", "124M", "--ranks", "2", "--optimizer", "onebit_lamb", "--onebit-freeze-step", "10",
                   "--train-iters", "100", "--zero-stage", "1")
    assert list(cells(text)) == [("0", "none"), ("1", "none")]
    assert [line for line in text.splitlines() if line.startswith("left out")] == [
        "left out: 1 cpu: --optimizer onebit_lamb and --offload-optimizer-device cpu exclude each other",
        "left out: 2 none, cpu: --optimizer onebit_lamb needs --zero-stage 0 or 1, not 2",
        "left out: 3 none, cpu, cpu+params, nvme, nvme+params: "
        "--optimizer onebit_lamb needs --zero-stage 0 or 1, not 3"]


# The table of the ZeRO paper for 7.5 B parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB of 1e9 bytes.
def test_the_published_sums_of_what_lasts_are_in_the_table(printed: Callable[..., str]) -> None:
    found = cells(printed("--num-layers", "36", "--hidden-size", "4096", "--num-attention-heads", "32", "--fp16",
                          "--ranks", "64", "--stage3-param-persistence-threshold", "0",
                          "--make-vocab-size-divisible-by", "1"))
    assert [float(found[stage, "none"]["sum"]) for stage in "0123"] == [111.16, 29.09, 15.41, 1.74]


PUBLISHED_100B = ["--preset", "100B", "--fp16", "--ranks", "400", "--model-parallel-size", "16", "--batch-size", "32",
                  "--zero-stage", "2", "--checkpoint-activations"]


def test_the_published_run_of_100b_parameters_fits_with_split_inputs_only() -> None:
    """125 inputs of 32 x 1024 x 8192 numbers of 2 bytes are 62.5 GiB; a sixteenth of them 3.91."""
    whole, split, on_host, both = (planned(*PUBLISHED_100B, *flags) for flags in (
        [], ["--partition-activations"], ["--cpu-checkpointing"], ["--partition-activations", "--cpu-checkpointing"]))
    capacity = 32 * 2**30 * 0.92
    assert peak_memory(split).total < capacity < peak_memory(whole).total
    inputs = 125 * 32 * 1024 * 8192 * 2
    assert whole.activations.alive_at_loss() == inputs == 62.5 * 2**30
    assert split.activations.alive_at_loss() == inputs // 16 and split.offloaded_host_bytes < 2**30 * 30
    for run, waiting in ((on_host, inputs), (both, inputs // 16)):
        assert run.activations.alive_at_loss() == 0 and run.activations.host_input_bytes == waiting
    assert on_host.offloaded_host_bytes - on_host.activations.host_input_bytes < 1 < both.offloaded_host_bytes
    assert [count > 31 for count in largest_micro_batches(split, [capacity])] == [True]
    assert largest_micro_batches(whole, [capacity])[0] < 32


ON_DRIVE = ["--offload-optimizer-device", "nvme", "--offload-optimizer-nvme-path", "/n",
            "--offload-param-device", "nvme", "--offload-param-nvme-path", "/n"]


def test_what_leaves_the_device_is_on_the_host_or_on_the_drive() -> None:
    """10 B parameters on one rank: 12 bytes of state and 2 of weights a parameter."""
    count = count_parameters(planned("--preset", "10B").config.model)[0]
    argv = ["--preset", "10B", "--fp16", "--zero-stage", "3", "--batch-size", "10", "--checkpoint-activations"]
    here, host, drive = (planned(*argv, *flags) for flags in (
        [], ["--offload-optimizer-device", "cpu", "--offload-param-device", "cpu"],
        [*ON_DRIVE, "--offload-param-max-in-cpu", "0"]))
    assert persistent_memory(here).total == pytest.approx(16 * count, rel=2e-3)
    assert host.offloaded_host_bytes == pytest.approx(16 * count, rel=2e-3) and host.nvme_bytes == 0
    assert drive.nvme_bytes == pytest.approx(14 * count, rel=2e-3)
    assert max(peak_memory(host).total,
               peak_memory(drive).total) < 32e9 * 0.92, "the published run on one card of 32 GB"
    beside = planned(*argv, *ON_DRIVE)
    stays = drive.nvme_bytes - beside.nvme_bytes  # of 1e9 weights as many as whole buckets have
    assert 2 * (1e9 - beside.block.shard_numel) < stays <= 2e9
    # 1 %: buffers are as large as the largest part of what is on the drive.
    assert beside.offloaded_host_bytes - drive.offloaded_host_bytes == pytest.approx(stays, rel=1e-2)


REFUSED = [
    (["--ranks", "0"], "--ranks is 0"), (["--card-gb", "-1"], "--card-gb is -1"),
    (["--gpus", "8"], "--gpus 8 is not a flag here: use --ranks N"),
    (["--nproc_per_node=8"], "--nproc-per-node 8 is not a flag here: use --ranks N"),
    (["--zero-stagee", "1"], "did you mean --zero-stage"),
    (["--ranks", "3", "--model-parallel-size", "2"], "2 does not divide the number of ranks, 3"),
    (["--offload-optimizer-device", "cpu"], "--offload-optimizer-device cpu needs --zero-stage 1, 2 or 3, not 0"),
    (["--offload-optimizer-device", "nvme", "--zero-stage", "1"], "nvme needs --offload-optimizer-nvme-path"),
    (["--offload-param-device", "cpu", "--zero-stage", "2"], "needs --zero-stage 3, not 2"),
    (["--ranks-per-node", "0"], "--ranks-per-node is 0"), (["--tflops", "-1"], "--tflops is -1"),
    (["--card-gb", "x"], "--card-gb: invalid float value: 'x'"),
    (["--time", "H1000"], "--time H1000: expected one of H200, H100 PCIe, H100"),
    (["--time", "H100", "--device", "cpu"], "--time H100 is a GPU, and --device is cpu")]


def test_what_cannot_be_planned_is_refused_in_one_line() -> None:
    for argv, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            plan.print_plan(["--preset", "tiny", *argv])


def test_the_cheapest_that_fits_fits_as_typed_and_nothing_cheaper_does() -> None:
    asked = planned("--preset", "1.5B", "--bf16", "--batch-size", "8", "--ranks", "8")
    found = all_choices(asked)
    for card in (12, 16, 24, 40, 80):
        capacity = card * 2**30 * 0.92
        best = cheapest_fit(found, capacity)
        assert best is not None
        typed = planned("--preset", "1.5B", "--bf16", "--batch-size", "8", "--ranks", "8", *best.flags.split())
        assert peak_memory(typed).total == best.device_bytes <= capacity
        assert all(other.device_bytes > capacity for other in found if other.slowdown_percent < best.slowdown_percent)
    assert cheapest_fit(found, 1e9) is None
    away = cheapest_fit(found, 2.9e9)  # nothing of today fits, offloading would
    assert away is not None and "--offload-optimizer-device cpu" in away.flags


def test_time_follows_from_the_work_of_a_step_and_the_ranks(printed: Callable[..., str]) -> None:
    argv = [*PUBLISHED_100B, "--tflops", "38", "--train-iters", "1000"]
    found = json.loads(printed(*argv, "--json"))["time"]
    tokens = 32 * 25 * 1024
    assert found["tokens_per_step"] == tokens
    # 6 N + 12 L h s a token, on 400 ranks of 38 TFLOP/s.
    seconds = tokens * (6 * 101_096_718_336 + 12 * 125 * 8192 * 1024) / (400 * 38e12)
    assert found["seconds_per_step"] == pytest.approx(seconds)
    assert found["days"] == pytest.approx(seconds * 1000 / 86400)
    assert "at 38 TFLOP/s per rank: " in printed(*argv)
    assert "TFLOP/s" not in printed(*PUBLISHED_100B)


def test_blocks_that_are_left_out_take_neither_time_nor_traffic(printed: Callable[..., str]) -> None:
    """At theta 0.5 from the first steps on, 24 layers: (1 - theta) (L - 1) / (2 L) of the blocks' arithmetic, and of
    what stage 3 gathers of them. Memory is that of a step that runs all."""
    argv = ["--preset", "345M", "--zero-stage", "3", "--ranks", "2", "--tflops", "30", "--stage3-param-persistence-"
            "threshold", "0", "--train-iters", "1000000"]
    drops = ["--progressive-layer-drop", "--pld-theta", "0.5", "--pld-gamma", "1"]
    whole, found = (json.loads(printed(*argv, *more, "--json")) for more in ([], drops))
    everything, block = count_parameters(planned(*argv).config.model)
    blocks = 24 * (6 * block + 12 * 1024 * 1024)
    outside = 6 * (everything - 24 * block)
    saved = 1 - found["time"]["seconds_per_step"] / whole["time"]["seconds_per_step"]
    assert saved == pytest.approx(0.2396 * blocks / (blocks + outside), rel=1e-3)
    chosen, before = (next(row for row in rows["rows"] if row["chosen"]) for rows in (found, whole))
    gathered = 2 * 24 * block * 4 / 2  # in fp32, half of it is this rank's own
    assert before["sent_parameters"] - chosen["sent_parameters"] == pytest.approx(0.2396 * gathered, rel=1e-2)
    assert chosen["peak"] == before["peak"] and chosen["lasting"] == before["lasting"]
    assert "18.3 of 24 blocks run in a step" in printed(*argv, *drops)


def test_one_bit_takes_memory_for_debts_and_hardly_any_traffic() -> None:
    """124M on 2 ranks: 15.6 MB, as benchmarks/one_bit.py counts them. 1-bit Lamb keeps one more state."""
    flags = ("--preset", "124M", "--ranks", "2", "--device", "cpu", "--train-iters", "99", "--onebit-freeze-step", "15")
    plain, adam, lamb = (planned(*flags, "--optimizer", kind) for kind in ("adam", "onebit_adam", "onebit_lamb"))
    numel = plain.root.numel + plain.num_layers * plain.block.numel
    assert plain.traffic()["gradients"] / 1e6 == pytest.approx(497.9, abs=0.1)
    for one_bit, more in ((adam, 0), (lamb, 4)):
        assert one_bit.traffic()["gradients"] / 1e6 == pytest.approx(15.56, abs=0.01)
        assert one_bit.device_optimizer_bytes - plain.device_optimizer_bytes == pytest.approx(
            numel * (more + 4 + 4 / 2 + 1 / 4), rel=1e-6)


def test_muon_sends_its_matrices_once_more_in_16_bits() -> None:
    """From stage 1 on: at stage 0 every rank has them whole. 124M has 12 blocks of 12 h^2 in matrices."""
    for stage in range(4):
        flags = ("--preset", "124M", "--ranks", "8", "--zero-stage", str(stage))
        traffic = planned(*flags, "--optimizer", "muon").traffic()
        assert traffic["matrices"] == pytest.approx(2 * 12 * 12 * 768**2 * 7 / 8 if stage else 0, rel=0.01)
        del traffic["matrices"]
        assert traffic == planned(*flags).traffic()


@pytest.mark.parametrize("stage, formula", [(0, lambda a: (2, 0)), (1, lambda a: (1, 1)), (2, lambda a: (a, 1)),
                                            (3, lambda a: (a, 2 * a))])
def test_traffic_is_what_the_guide_says(stage: int, formula) -> None:  # type: ignore[no-untyped-def]
    for steps in (1, 3):
        run = planned("--preset", "10B", "--ranks", "1024", "--batch-size", "1", "--global-batch-size",
                      str(1024 * steps), "--zero-stage", str(stage))
        elements = [part / (4 * count_parameters(run.config.model)[0]) for part in
                    (run.traffic()["gradients"], run.traffic()["parameters"])]
        # 3 %: rings send (N - 1) / N, the tables are gathered once, and buckets are padded.
        assert elements == pytest.approx(formula(steps), rel=0.03)


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    run = planned("--preset", "124M", "--bf16", "--ranks", "4", "--batch-size", "2", "--global-batch-size", "24")
    capacities = (1e9, 4e9, 8e9, 20e9)
    for capacity, best in zip(capacities, largest_micro_batches(run, capacities), strict=True):
        trains = [replace(run.config.train, batch_size=size, global_batch_size=size * 12) for size in (best, best + 1)
                  if size]
        totals = [peak_memory(replace(run, config=replace(run.config, train=train))).total for train in trains]
        assert totals[-1] > capacity and all(total <= capacity for total in totals[:-1])


def test_remedies_keep_the_samples_of_a_step_and_save_what_they_say() -> None:
    run = planned(*FLAGS[:-1], "0")
    found = suggest_changes(run)
    assert list(found) == ["--batch-size 4 --global-batch-size 64", "--checkpoint-activations", "--zero-stage 1",
                           "--zero-stage 2", "--zero-stage 3", "--model-parallel-size 2"]
    argv = [word for word in FLAGS[:-1] if word not in ("--batch-size", "8", "--ranks", "--zero-stage")]
    smaller = planned(*argv, "--ranks", "8", "--batch-size", "4", "--global-batch-size", "64")
    assert found["--batch-size 4 --global-batch-size 64"] == peak_memory(run).total - peak_memory(smaller).total
    assert found["--zero-stage 3"] == peak_memory(run).total - peak_memory(planned(*FLAGS[:-1], "3")).total


def test_lack_of_memory_in_a_run_ends_in_one_error_line_with_the_plan_before_it(capfd, monkeypatch):
    def exhausted(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(GPT2, "forward", exhausted)
    argv = [*TINY, "--mock-data", "--batch-size", "64", "--train-iters", "2"]
    assert exit_codes.run(lambda: train(argv) and 0, debug=False) == 5  # type: ignore[func-returns-value]
    shown, error = capfd.readouterr().err.splitlines()
    run = planned(*[word for word in argv if word != "--mock-data"], "--device", "cpu")
    assert shown.startswith(" rank 0 needs ") and f"({peak_memory(run).name})" in shown
    assert error.startswith("error: rank 0 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.; try "
                            "--batch-size 32 --global-batch-size 64 (saves ")
    assert "or --checkpoint-activations (saves" in error


# ---- --dry-run -----------------------------------------------------------------------------------------------------

BIG = ["--preset", "10B", "--bf16", "--batch-size", "10", "--checkpoint-activations"]
ON_HOST = ["--zero-stage", "2", "--offload-optimizer-device", "cpu"]


def lines(*argv: str, cards: tuple[int, ...] = (32,), per_node: int = 1) -> list[str]:
    usable = {str(card): card * 2**30 * USABLE_FRACTION for card in cards}
    return list(describe_requirements(planned(*argv), TargetMachine(usable, per_node)))


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan has room here."""
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 2**60)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2**60))


def launched(monkeypatch: pytest.MonkeyPatch, rank: int, *argv: str) -> int:
    """One rank of eight on two nodes, none of which is waited for."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 8, "LOCAL_RANK": rank % 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt2.py", *argv])
    return pretrain_gpt2.main()


def test_rank_0_prints_the_plan_of_the_ranks_that_would_run(monkeypatch, capsys, tmp_path):
    argv = [*BIG, *ON_HOST, "--dry_run", "--save", str(tmp_path / "save"), "--train-data", "no such file"]
    assert launched(monkeypatch, 0, *argv) == 0
    text = capsys.readouterr().out
    assert " on 8 ranks, 4 per node: tensor parallel 1, data parallel 8" in text
    assert "\na node of 4 ranks needs " in text and "\n* 2     cpu " in text and "\nrecommended: --zero" in text
    assert launched(monkeypatch, 1, *argv) == 0 and capsys.readouterr().out == ""
    assert launched(monkeypatch, 0, *argv, "--ranks", "2", "--tflops", "30", "--device", "cpu") == 0
    text = capsys.readouterr().out
    assert " on 2 ranks, 2 per node" in text and "at 30 TFLOP/s per rank: " in text and "--tflops" not in text
    assert not list(tmp_path.iterdir())


def test_wrong_flags_are_refused_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean --zero-stage"):
        launched(monkeypatch, 0, "--dry-run", "--zero-stagee", "2")
    with pytest.raises(ConfigError, match="did you mean --dry-run"):
        launched(monkeypatch, 0, "--dry-rum", "--preset", "tiny")
    assert not is_dry_run(["--dry-run=false"]) and is_dry_run(["--dry_run=true"])


def test_what_is_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_machine: None) -> None:
    folder = str(tmp_path / "not made yet")
    argv = [*BIG, "--zero-stage", "3", *(folder if word == "/n" else word for word in ON_DRIVE)]
    assert [line for line in lines(*argv) if line.startswith("problem")] == [
        f"problem: --offload-optimizer-nvme-path and --offload-param-nvme-path {folder}: there is no such folder on "
        "this machine; the run needs it"]
    Path(folder).mkdir()
    assert not [line for line in lines(*argv) if line.startswith("problem")]
    (card,) = [line for line in lines(*argv, cards=(4, 6, 80)) if line.startswith("problem")]
    assert card.startswith("problem: a card of 4, 6 GB is too small; try --batch-size 5 --global-batch-size 10 (saves ")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2**30))
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 2**32)
    run = planned(*argv)
    host, nvme = (f"{2 * count / 2**30:.2f} GiB" for count in (run.offloaded_host_bytes, run.nvme_bytes))
    assert [line for line in lines(*argv, per_node=2) if line.startswith("problem")] == [
        f"problem: a node needs {host} of memory, and this machine has 4.00 GiB",
        f"problem: a node needs {nvme} of NVMe, and {folder} has 1.00 GiB free"]


def test_the_recommendation_names_ranges_of_cards_and_equal_rows_are_folded(capsys):
    typed = "--preset 345M --bf16 --batch-size 16 --vocab-size 50257 --card-gb 1 6 8 12 16 24 40 80".split()
    assert plan.print_plan(typed) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert plan.print_plan([*typed, "--json"]) == 0
    cheapest = json.loads(capsys.readouterr().out)["cheapest"]
    assert first.startswith("recommended: nothing on 1 GB at this --batch-size") and first.endswith(" or more")
    for choice in filter(None, cheapest.values()):
        assert f"{choice['flags']} on " in first
    assert any(row.startswith("* 0,1   none ") for row in rest)
    assert not any(row.startswith("  1     none") for row in rest)
