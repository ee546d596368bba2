"""The memory that memory.py predicts is what a run allocates: tensors that autograd saves, and peaks of real steps. The
time of a step is made of FLOPs that torch counts, bytes of the plan's traffic, and rates that are measured here."""

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
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import megatron.plan.memory
from megatron.config.cli import parse_args
from megatron.config.tree import Config, build_config
from megatron.errors import ConfigError
from megatron.model import GPT2
from megatron.plan import cli
from megatron.plan.footprint import PlannedRun
from megatron.plan.memory import all_phases, peak_memory, step_phases
from megatron.plan.roofline import KNOWN_GPUS, MachineRates, StepTime, known_rates, measured_rates, step_time
from megatron.train import build
from megatron.train.batches import Batch
from megatron.train.build import engine as build_engine, model as build_model, seed_everything
from mpu import groups
from mpu.groups import Groups
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY
from tests.megatron.live_bytes import LiveBytes
from tests.wires import accelerator_side, counted

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 1000,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "batch_size": 4}

SELECTIVE: dict[str, Any] = {"checkpoint_activations": True, "recompute_granularity": "selective", "num_layers": 8,
                             "batch_size": 16, "vocab_size": 200}

KEPT_INPUTS: dict[str, Any] = {"model_parallel_size": 2, "checkpoint_activations": True, "num_layers": 12,
                               "batch_size": 24, "vocab_size": 200}
"""A run of 12 chunks whose kept inputs are much of its memory."""

TOLERANCE = 0.03
"""memory.py leaves out the seeds of recomputed chunks; it counts, and the meter does not see, the fp32 copy that
log_softmax makes inside itself of 16-bit logits: 2.5 % of the smallest model here, on four ranks."""


def described(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run; `accumulation` and `world` stand for the global batch size."""
    settings = {**SHAPE, **values}
    steps, world = settings.pop("accumulation", 1), settings.pop("world", 1)
    dp = world // settings.get("model_parallel_size", 1)
    return {**settings, "global_batch_size": settings["batch_size"] * steps * dp}


def peaks(rank: int, world: int, runs: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(bytes at the peak of building, at the peak of two steps) of each run on this rank."""
    found = []
    for values in runs:
        config = build_config(described({**values, "world": world}))
        grid = groups.build(config.parallel.model_parallel_size)
        seed_everything(config.train, grid)
        with LiveBytes() as live:
            engine = build_engine(config, build_model(config, grid), grid, CPU).core
            building = live.peak
            live.reset_peak()
            for _ in range(2):
                step(config, engine)
            engine.wait_for_param_gathers()
        found.append((building, live.peak))
        del engine
    return found


def step(config: Config, engine: Any) -> None:
    report = None
    while report is None:
        rows = torch.randint(0, config.model.known_vocab_size, (config.train.batch_size, config.seq_length + 1))
        tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        segments = (tokens == 5).long().cumsum(1) if config.data.reset_attention_mask else None
        engine.backward(engine(tokens, targets, segments=segments, grad_scale=engine.backward_scale))
        report = engine.step()


def check(world: int, runs: list[dict[str, Any]]) -> None:
    measured = peaks(0, 1, runs) if world == 1 else run_ranks(peaks, world, runs, timeout=600)[0]
    for values, (building, stepping) in zip(runs, measured, strict=True):
        run = PlannedRun(build_config(described({**values, "world": world})), world, "cpu")
        at_building, *others = all_phases(run)
        predicted = max(moment.total for moment in others)
        assert at_building.total == pytest.approx(building, rel=TOLERANCE), f"building {values}"
        assert predicted == pytest.approx(stepping, rel=TOLERANCE), f"{values}: {peak_memory(run)}"


@pytest.mark.parametrize("values", [
    {}, {"bf16": True, "accumulation": 2, "zero_stage": 1}, {"fp16": True, "fp32_allreduce": True, "zero_stage": 3},
    {"hidden_dropout": 0.1, "attention_dropout": 0.1, "checkpoint_activations": True, "checkpoint_num_layers": 4},
    {"reset_attention_mask": True, "zero_stage": 2},
    {"activation": "swiglu", "num_query_groups": 2, "zero_stage": 2},
    SELECTIVE, {**SELECTIVE, "recompute_modules": ("core_attn",), "activation": "swiglu"},
    {"position_embedding_type": "rope", "activation": "squared_relu"}, {"qk_norm": True, "normalization": "RMSNorm"},
], ids=str)
def test_the_predicted_peak_of_one_process_is_the_measured_one(values: dict[str, Any]) -> None:
    check(1, [values])


@pytest.mark.parametrize("cells", [
    [{"zero_stage": stage, "bf16": stage % 2 == 1, "accumulation": 2 - stage % 2} for stage in range(4)],
    # A large table and few tokens: the peak is its exchange, or its gathered weights.
    pytest.param([{"zero_stage": stage, "vocab_size": 20_000, "batch_size": 1, "seq_length": 16}
                  for stage in (1, 2, 3)], marks=pytest.mark.slow),
    [{"zero_stage": 3, "stage3_param_persistence_threshold": 0, **recompute} for recompute in (
        {}, {"checkpoint_activations": True, "checkpoint_num_layers": 2, "bf16": True})],
    [{"model_parallel_size": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1},
     {"model_parallel_size": 2, "sequence_parallel": True, "hidden_dropout": 0.1, "attention_dropout": 0.1},
     {**KEPT_INPUTS, "sequence_parallel": True, "checkpoint_num_layers": 3},
     {**SELECTIVE, "model_parallel_size": 2, "sequence_parallel": True, "hidden_dropout": 0.1}],
    [{**KEPT_INPUTS, "partition_activations": True, "checkpoint_num_layers": 3}],
    pytest.param([{**KEPT_INPUTS, "partition_activations": True, **more} for more in (
        {}, {"contiguous_memory_optimization": True, "number_checkpoints": 18})], marks=pytest.mark.slow)],
    ids=["stages", "a large table", "split", "tensor parallel", "kept inputs", "kept inputs, whole"])
def test_the_predicted_peak_of_two_ranks_is_the_measured_one(cells: list[dict[str, Any]]) -> None:
    check(2, cells)


def test_the_predicted_peak_of_muon_has_the_matrices_that_are_made_whole() -> None:
    """Few tokens and wide blocks: the peak is the update."""
    muon = {"optimizer": "muon", "batch_size": 1, "seq_length": 8, "vocab_size": 200, "hidden_size": 256,
            "num_layers": 1}
    check(2, [{**muon, **more} for more in (
        {}, {"zero_stage": 1}, {"zero_stage": 3, "bf16": True}, {"zero_stage": 2, "bf16": True, "accumulation": 2},
        {"model_parallel_size": 2})])


ON_DRIVE = {"offload_optimizer_device": "nvme", "sub_group_size": 65536}
ALL_ON_DRIVE = {**ON_DRIVE, "offload_param_device": "nvme", "offload_param_max_in_cpu": 0,
                "offload_param_buffer_size": 65536, "stage3_param_persistence_threshold": 0, "zero_stage": 3}


@pytest.mark.parametrize("values", [
    {**ON_DRIVE, "zero_stage": 1}, {**ON_DRIVE, "zero_stage": 1, "bf16": True}, {**ON_DRIVE, "zero_stage": 3},
    ALL_ON_DRIVE, {**ON_DRIVE, "zero_stage": 2, "offload_optimizer_ratio": 0.5},
    {**ON_DRIVE, "zero_stage": 2, "bf16": True, "offload_optimizer_ratio": 0.3},
    {**ALL_ON_DRIVE, "bf16": True, "offload_optimizer_ratio": 0.5},
], ids=str)
def test_the_predicted_peak_of_a_run_from_a_drive_is_the_measured_one(tmp_path: Path, values: dict[str, Any]) -> None:
    """Of its steps; when it is built a probe of the drive takes more than so small a model."""
    folders = {f"offload_{kind}_nvme_path": str(tmp_path) for kind in ("optimizer", "param")
               if f"offload_{kind}_device" in values}
    settings = {**values, **folders}
    (_, stepping), = peaks(0, 1, [settings])
    config = build_config(described({**settings, "world": 1}))
    predicted = max(moment.total for moment in step_phases(PlannedRun(config, 1, "cpu")))
    assert predicted == pytest.approx(stepping, rel=TOLERANCE)


def saved_bytes(config: Config) -> int:
    """Every storage autograd saves in a forward, once, parameters aside."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision.name]
    model = GPT2(config.model, seed=config.train.seed).to(dtype)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.zeros(config.train.batch_size, config.seq_length, dtype=torch.int64)
    segments = tokens.clone() if config.data.reset_attention_mask else None
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(tokens, tokens, segments=segments)
        assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in parameters)


@pytest.mark.parametrize("values", [
    {}, {"bf16": True}, {"fp16": True}, {"batch_size": 3}, {"seq_length": 48}, {"hidden_dropout": 0.1},
    {"attention_dropout": 0.1}, {"attention_dropout": 0.1, "hidden_dropout": 0.2, "bf16": True},
    {"reset_attention_mask": True}, {"reset_attention_mask": True, "fp16": True}, {"intermediate_size": 192},
    {"reset_attention_mask": True, "attention_dropout": 0.1},
], ids=str)
def test_a_block_saves_exactly_what_the_formula_says(values: dict[str, Any]) -> None:
    three, two = (build_config({**SHAPE, **values, "num_layers": layers}) for layers in (3, 2))
    assert saved_bytes(three) - saved_bytes(two) == PlannedRun(three, device="cpu").activations.block


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_extreme_blocks_include_the_largest_of_all(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk, batch, steps in product((None, 1, 2, 3, 5, 9), (1, 64), (1, 2)):
        chunking = {} if chunk is None else {"checkpoint_activations": True, "checkpoint_num_layers": chunk}
        config = build_config(described({"num_layers": 9, "zero_stage": stage, "batch_size": batch, **chunking,
                                         "accumulation": steps, "world": 4}))
        quick = peak_memory(PlannedRun(config, 4, "cpu"))
        with monkeypatch.context() as patch:
            patch.setattr(megatron.plan.memory, "_extreme_blocks", lambda run: iter(range(run.num_layers)))
            assert peak_memory(PlannedRun(config, 4, "cpu")) == quick


# ---- the time of a step --------------------------------------------------------------------------------------------

DEEP = {**SHAPE, "num_layers": 6}
RATES = MachineRates("made up", "cpu", 2, flops=1e11, memory=2e10, exchange=1e9, operation_seconds=1e-5,
                     collective_seconds=1e-4)


def predicted(ranks: int = 1, device: Any = "cpu", rates: Any = RATES, **values: Any) -> StepTime:
    return step_time(PlannedRun(build_config({**DEEP, **values}), ranks, device), rates)


@pytest.mark.parametrize("recompute", [{}, *({"checkpoint_num_layers": chunk} for chunk in (1, 2, 3)),
                                       {"recompute_granularity": "selective"}], ids=str)
def test_products_are_those_that_torch_runs(recompute: dict[str, Any]) -> None:
    """Attention aside, of which a causal kernel computes the lower triangle: it vanishes for short sequences."""
    values = {**DEEP, "seq_length": 2, "hidden_size": 256, "checkpoint_activations": bool(recompute), **recompute}
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
        config = build_config({**DEEP, "zero_stage": stage, "global_batch_size": 16 * accumulation})
        run = PlannedRun(config, 4)
        assert step_time(run, rates).exchange == pytest.approx(run.traffic().total() / rates.exchange)


def test_tensor_parallel_ranks_share_the_products_and_exchange_activations() -> None:
    alone, both = predicted(), predicted(2, model_parallel_size=2)
    assert both.products == pytest.approx(alone.products / 2, rel=0.02) and both.exchange > 0 == alone.exchange


def test_on_gpus_exchange_hides_behind_the_backward_unless_it_may_not_overlap() -> None:
    step = predicted(2, "cuda")
    assert 0 < step.hidden <= min(step.exchange, step.products + step.memory)
    assert predicted(2, "cuda", overlap_comm=False).hidden == predicted(2).hidden == 0


CLUSTER = MachineRates("made up", "cuda", 0, flops=6e14, memory=2.5e12, exchange=400e9, operation_seconds=0,
                       collective_seconds=20e-6, hop_seconds=1.5e-6, network=37.5e9, ranks_per_node=8)
TP = ("--model-parallel-size", "4", "--num-attention-heads", "20")


def on_cluster(nodes: int, *flags: str) -> StepTime:
    run = ["--preset", "1.5B", "--bf16", "--batch-size", "4", "--checkpoint-activations", "--ranks", str(8 * nodes)]
    return step_time(cli.parse([*run, *flags])[1], CLUSTER)


def test_a_collective_takes_its_hops_and_its_bytes_by_the_slowest_link() -> None:
    """By hand: a block of 1.5B has 30.74 million parameters, 48 of them; gradients travel in fp32, weights in bf16."""
    blocks = 48 * 30.74e6
    cases = [
        (1, 0, (), "gradients", (20 + 14 * 1.5) * 48, 2 * 7 / 8 * 4 * blocks / 400e9),
        (64, 0, (), "gradients", (20 + 14 * 1.5 + 2 * 6 * 6) * 48, 2 * 511 / 512 * 4 * blocks / 300e9),
        (1, 1, (), "gradients", (20 + 7 * 1.5) * 48, 7 / 8 * 4 * blocks / 400e9),
        (64, 1, (), "parameters", (20 + 448 * 1.5 + 63 * 6) * 48, 511 / 512 * 2 * blocks / 300e9),
        (64, 3, (), "parameters", (20 + 448 * 1.5 + 63 * 6) * 95, 511 / 512 * 2 * 95 / 48 * blocks / 300e9),
        (64, 2, ("--zero-shard-group-size", "8"), "gradients", (20 + 7 * 1.5 + 20 + 2 * 6 * 6) * 48,
         7 / 8 * 4 * blocks / 400e9 + 2 * 63 / 64 * 4 * blocks / 8 / 37.5e9),
        (64, 2, ("--no-reduce-scatter",), "gradients", (20 + 14 * 1.5 + 2 * 6 * 6) * 48, 2 * 4 * blocks / 300e9),
        (64, 1, TP, "gradients", (20 + 64 * 1.5 + 63 * 6) * 48, 4 * blocks / 4 / 75e9),
        (64, 1, TP, "activations", (20 + 6 * 1.5) * (6 * 48 + 3),
         2 * 3 / 4 * (6 * 48 + 2) * 4 * 1024 * 1600 * 2 / 400e9)]
    for nodes, stage, flags, purpose, microseconds, transfer in cases:
        found = [one for one in on_cluster(nodes, "--zero-stage", str(stage), *flags).collectives
                 if one.of.purpose == purpose and one.of.units in ("blocks", "all")]
        assert sum(one.latency for one in found) == pytest.approx(microseconds / 1e6), (nodes, stage, flags)
        assert sum(one.transfer for one in found) == pytest.approx(transfer, rel=0.01), (nodes, stage, flags)


def test_more_nodes_take_longer_and_shard_groups_pay_from_some_number_of_nodes_on() -> None:
    for stage in range(4):
        exposed: list[list[float]] = []
        for flags in ([], ["--zero-shard-group-size", "8"])[:1 + bool(stage)]:
            steps = [on_cluster(nodes, "--zero-stage", str(stage), *flags) for nodes in (1, 2, 4, 8, 16, 32, 64)]
            exchange = [step.exchange for step in steps]
            exposed.append([step.exchange - step.hidden for step in steps])
            assert exchange == sorted(exchange) and exposed[-1] == sorted(exposed[-1])
        if stage:  # on one node both are the same; then groups send more bytes, and a flat ring has more hops
            (alone, two, *_, last), (same, two_groups, *_, last_groups) = exposed
            assert alone == same and two < two_groups and last > 5 * last_groups


def test_known_gpus_are_planned_by_their_names(capsys, monkeypatch):
    for gpu in KNOWN_GPUS:
        narrow, default, wide = (known_rates(gpu, build_config({**DEEP, **more})).flops for more in (
            {"bf16": True}, {}, {"matmul_precision": "highest"}))
        assert narrow >= max(default, wide) > 0
    monkeypatch.setattr(sys, "argv", ["plan", "--preset", "124M", "--bf16", "--ranks", "8", "--time", "H100"])
    assert cli.main() == 0
    text = capsys.readouterr().out
    assert "predicted ms of a step, by the rates of H100\n" in text and "measuring" not in text
    lines = text[text.index("predicted ms"):].splitlines()
    assert lines[1].split()[-2:] == ["total", "tokens/s"] and [line[:3] for line in lines[2:]].count("* 0") == 1


def test_what_the_roofline_leaves_out_is_named_below_it(capsys, monkeypatch):
    monkeypatch.setattr(cli, "measured_rates", lambda run, on_node: RATES)
    flags = ["--preset", "tiny", "--device", "cpu", "--time", "--ranks", "4"]
    assert cli.print_plan([*flags, "--compile", "--optimizer", "lion", "--bf16", "--fp8"]) == 0
    text = capsys.readouterr().out
    assert "note: not in the predicted time: what --optimizer lion does otherwise than Adam, --compile, --fp8\n" \
        in text
    assert "note: the temporary copies of --fp8 are not planned" in text
    assert "note: 4 ranks are predicted to work and to exchange as fast as the 2 that were measured" in text
    on_gpus = ["--preset", "124M", "--ranks", "8", "--time", "H100"]
    assert cli.print_plan([*on_gpus, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(("step" in row) != ("nvme" in row["offload"]) for row in rows) and len(rows) == 10
    for row in rows:
        sent = [one["sent"] for one in row.get("collectives", ()) if one["of"]["purpose"] == "gradients"]
        assert "step" not in row or row["step"]["total"] > 0 and sum(sent) == row["sent_gradients"]
    assert cli.print_plan(on_gpus) == 0
    assert "note: not in the predicted time: rows with state on a drive\n" in capsys.readouterr().out


def test_without_a_gpu_its_rates_have_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="this machine has none that may be used: give --time and the name of a GPU"):
        measured_rates(PlannedRun(build_config(DEEP), 1, "cuda"))
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
    rates = measured_rates(PlannedRun(build_config(DEEP), 2, "cpu"))
    assert (rates.device, rates.ranks) == ("cpu", 2)
    assert min(rates.flops, rates.memory) > 1e8 and 0 < rates.operation_seconds < 1e-2
    assert rates.exchange > 1e6 and rates.collective_seconds > 0


# ---- what travels --------------------------------------------------------------------------------------------------

LARGE = 128
"""Elements of a unit, at least; the norm and flags are smaller."""


def planned_and_sent(rank: int, world: int, stage: int, flags: list[str]) -> list[dict[str, tuple[float, int]]]:
    """Kind of a collective -> (calls, bytes of the full tensors), of the plan and of a step."""
    config = parse_args([*TINY, *NO_DROPOUT, "--mock-data", "--vocab-size", "512", "--zero-stage", str(stage),
                         *["--stage3-param-persistence-threshold", "200"] * (stage == 3), *flags], world)
    with accelerator_side():
        grid = groups.build(1)
        engine = build.engine(config, build.model(config, grid), grid, CPU)
        rows = torch.zeros(config.train.batch_size, config.seq_length + 1, dtype=torch.int64)
        batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        with counted() as sent:
            for _ in range(config.accumulation(world)):
                engine.backward(engine(*batch, grad_scale=engine.backward_scale))
                engine.step()
    plan = [(one.kind.replace("-", "_"), one.calls, one.full_bytes)
            for one in PlannedRun(config, world, "cuda").collectives() if one.purpose != "norm"]
    done = [(kind, 1, numel * dtype.itemsize) for kind, numel, dtype in sent if numel >= LARGE]
    return [{kind: (sum(calls for one, calls, _ in found if one == kind),
                    sum(full_bytes for one, _, full_bytes in found if one == kind))
             for kind, _, _ in found} for found in (plan, done)]


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", range(4))
def test_the_plan_of_gpus_counts_calls_and_bytes_that_travel(stage: int) -> None:
    for accumulation, flags in product((1, 2), ([], ["--bf16"], ["--bf16", "--communication-data-type", "bf16"])):
        more = ["--batch-size", "2", "--global-batch-size", str(4 * accumulation)]
        for planned, sent in run_ranks(planned_and_sent, 2, stage, [*flags, *more]):
            assert planned == sent, (accumulation, flags)
    for flags in (["--zero-shard-group-size", "2"], ["--no-reduce-scatter"],
                  ["--no-reduce-scatter", "--zero-shard-group-size", "2"]) if stage else ():
        for planned, sent in run_ranks(planned_and_sent, 4, stage, flags):
            assert planned == sent, flags
