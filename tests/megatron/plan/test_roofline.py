"""The time of a step: FLOPs that torch counts, bytes of the plan's traffic, and rates that are measured here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.cli import parse_args
from megatron.config.tree import build_config
from megatron.errors import ConfigError
from megatron.plan import cli
from megatron.plan.footprint import PlannedRun
from megatron.plan.roofline import KNOWN_GPUS, MachineRates, StepTime, known_rates, measured_rates, step_time
from megatron.train import build
from megatron.train.batches import Batch
from mpu import groups
from mpu.groups import Groups
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY
from tests.wires import accelerator_side, counted

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"num_layers": 6, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64,
                         "vocab_size": 1000, "attention_dropout": 0.0, "hidden_dropout": 0.0, "batch_size": 4}
RATES = MachineRates("made up", "cpu", 2, flops=1e11, memory=2e10, exchange=1e9, operation_seconds=1e-5,
                     collective_seconds=1e-4)


def predicted(ranks: int = 1, device: Any = "cpu", rates: Any = RATES, **values: Any) -> StepTime:
    return step_time(PlannedRun(build_config({**SHAPE, **values}), ranks, device), rates)


@pytest.mark.parametrize("chunk", [0, 1, 2, 3])
def test_products_are_those_that_torch_runs(chunk: int) -> None:
    """Attention aside, of which a causal kernel computes the lower triangle: it vanishes for short sequences."""
    values = {**SHAPE, "seq_length": 2, "hidden_size": 256,
              **({"checkpoint_activations": True, "checkpoint_num_layers": chunk} if chunk else {})}
    config = build_config(values)
    model = build.model(config, Groups(), build.recomputation(config, Groups()))
    engine = build.engine(config, model, Groups(), CPU)
    tokens = torch.zeros(config.train.batch_size, 2, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        engine.backward(engine(tokens, tokens.clone()))
    assert predicted(**values).products * RATES.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_exchange_is_the_traffic_of_the_plan() -> None:
    rates = replace(RATES, collective_seconds=0.0)
    for stage, accumulation in product(range(4), (1, 2)):
        config = build_config({**SHAPE, "zero_stage": stage, "global_batch_size": 16 * accumulation})
        run = PlannedRun(config, 4)
        sent = run.traffic()
        assert step_time(run, rates).exchange == pytest.approx((sent.gradients + sent.parameters) / rates.exchange)


def test_tensor_parallel_ranks_share_the_products_and_exchange_activations() -> None:
    alone, both = predicted(), predicted(2, model_parallel_size=2)
    assert both.products == pytest.approx(alone.products / 2, rel=0.02) and both.exchange > 0 == alone.exchange


def test_on_gpus_exchange_hides_behind_the_backward_unless_it_may_not_overlap() -> None:
    step = predicted(2, "cuda")
    assert 0 < step.hidden <= min(step.exchange, (step.products + step.memory) / 2)
    assert predicted(2, "cuda", overlap_comm=False).hidden == predicted(2).hidden == 0


def test_known_gpus_are_planned_by_their_names(capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in KNOWN_GPUS:
        narrow, default, wide = (known_rates(gpu, build_config({**SHAPE, **more})).flops for more in (
            {"bf16": True}, {}, {"matmul_precision": "highest"}))
        assert narrow >= max(default, wide) > 0
    monkeypatch.setattr(sys, "argv", ["plan", "--preset", "124M", "--bf16", "--ranks", "8", "--time", "H100"])
    assert cli.main() == 0
    text = capsys.readouterr().out
    assert "predicted ms of a step, by the rates of H100\n" in text and "measuring" not in text
    lines = text[text.index("predicted ms"):].splitlines()
    assert lines[1].split()[-2:] == ["total", "tokens/s"] and [line[:3] for line in lines[2:]].count("* 0") == 1


def test_what_the_roofline_leaves_out_is_named_below_it(capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "measured_rates", lambda run, on_node: RATES)
    flags = ["--preset", "tiny", "--device", "cpu", "--time", "--ranks", "4"]
    assert cli.print_plan([*flags, "--compile", "--optimizer", "lion"]) == 0
    text = capsys.readouterr().out
    assert "note: not in the predicted time: what --optimizer lion does otherwise than Adam, --compile\n" in text
    assert "note: 4 ranks are predicted to work and to exchange as fast as the 2 that were measured" in text
    on_gpus = ["--preset", "124M", "--ranks", "8", "--time", "H100"]
    assert cli.print_plan([*on_gpus, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(("step" in row) != ("nvme" in row["offload"]) for row in rows) and len(rows) == 10
    assert all(row["step"]["total"] > 0 for row in rows if "step" in row)
    assert cli.print_plan(on_gpus) == 0
    assert "note: not in the predicted time: rows with state on a drive\n" in capsys.readouterr().out


def test_without_a_gpu_its_rates_have_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="this machine has none that may be used: give --time and the name of a GPU"):
        measured_rates(PlannedRun(build_config(SHAPE), 1, "cuda"))
    assert cli.parse(["--preset", "tiny", "--time"])[0].device == "cpu"
    assert cli.parse(["--preset", "tiny"])[0].device == "cuda"


QUICK = """
import sys
from megatron.plan import roofline
roofline.SECONDS = 0.02
sys.exit(roofline.main(*sys.argv[1:]))
"""


def test_this_machine_has_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by a few samples, where a user's are of a second."""
    run, name = subprocess.run, "megatron.plan.roofline"
    (tmp_path / "quick.py").write_text(QUICK)

    def quick(command: list[str], **options: Any) -> Any:
        at = command.index(name)
        return run([*command[:at - 1], str(tmp_path / "quick.py"), *command[at + 1:]], **options)

    monkeypatch.setattr(subprocess, "run", quick)
    rates = measured_rates(PlannedRun(build_config(SHAPE), 2, "cpu"))
    assert (rates.device, rates.ranks) == ("cpu", 2)
    assert min(rates.flops, rates.memory) > 1e8 and 0 < rates.operation_seconds < 1e-2
    assert rates.exchange > 1e6 and rates.collective_seconds > 0


# ---- bytes of gradients --------------------------------------------------------------------------------------------

WAYS = {"all_reduce": 2, "reduce_scatter": 1}
"""Times that all but a rank's own part goes out, by rings."""
LARGE = 128
"""Elements of a unit, at least; the norm and flags are smaller."""


def bytes_of_gradients(rank: int, world: int, stage: int, flags: list[str]) -> tuple[int, int]:
    """(planned, sent)"""
    config = parse_args([*TINY, *NO_DROPOUT, "--mock-data", "--vocab-size", "512", "--zero-stage", str(stage), *flags],
                        world)
    with accelerator_side():
        grid = groups.build(1)
        engine = build.engine(config, build.model(config, grid), grid, CPU)
        rows = torch.zeros(config.train.batch_size, config.seq_length + 1, dtype=torch.int64)
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        with counted() as sent:
            for _ in range(config.accumulation(world)):
                engine.backward(engine(*batch, grad_scale=engine.backward_scale))
                engine.step()
    found = sum(WAYS[kind] * numel * dtype.itemsize * (world - 1) // world for kind, numel, dtype in sent
                if kind in WAYS and numel >= LARGE)
    return PlannedRun(config, world, "cuda").traffic().gradients, found


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", range(4))
def test_the_plan_of_gpus_counts_the_bytes_that_travel(stage: int) -> None:
    for accumulation, flags in product((1, 2), ([], ["--bf16"], ["--bf16", "--communication-data-type", "bf16"])):
        more = ["--batch-size", "2", "--global-batch-size", str(4 * accumulation)]
        for planned, sent in run_ranks(bytes_of_gradients, 2, stage, [*flags, *more]):
            assert planned == sent, (accumulation, flags)
