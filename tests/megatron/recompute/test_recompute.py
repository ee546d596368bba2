"""Recomputed activations are the same activations: gradients are bit-equal, dropout and every switch included; and
what waits for backward is as small as the switches promise."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import mpu
from megatron import recompute
from megatron.config.tree import RecomputeConfig, TrainConfig
from megatron.config.zero_config import RECOMPUTE_MODULES
from megatron.errors import ConfigError
from megatron.model import GPT2
from megatron.recompute import Recomputation, activation_checkpoint, selective
from megatron.train import build
from mpu.groups import SOLO, Group, Groups, build as build_groups
from mpu.layers import use_fp8
from mpu.random import capture_rng, get_rng_tracker, model_parallel_cuda_manual_seed
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, engine_of, lines, tiny_model, train
from tests.megatron.zero.run import gradient_runs

LAYERS = 5
"""Chunks of 2 and 3 leave a short last one."""

Run = tuple[dict[str, torch.Tensor], dict[str, object], int]


# Every switch alone, and those that work on the same input together.
SPLIT = RecomputeConfig(partition_activations=True)
ROWS = RecomputeConfig(partition_activations=True, contiguous_memory_optimization=True, number_checkpoints=LAYERS)
ALL = replace(ROWS, cpu_checkpointing=True, synchronize_checkpoint_boundary=True, profile_backward=True)
SWITCHES = [SPLIT, ROWS, ALL, replace(SPLIT, cpu_checkpointing=True), RecomputeConfig(cpu_checkpointing=True),
            RecomputeConfig(synchronize_checkpoint_boundary=True), RecomputeConfig(profile_backward=True)]


def gradients(tp: int, chunk: int | None, precision: str, accumulation: int = 1, stage: int = 0,
              switches: RecomputeConfig = RecomputeConfig(), modules: tuple[str, ...] | None = None,
              sequence_parallel: bool = False) -> Run:
    """Gradients after backward, every random stream after it, and how often blocks ran."""
    groups = build_groups(tp)
    build.seed_everything(TrainConfig(seed=3), groups)
    shape = tiny_model(num_layers=LAYERS, attention_dropout=0.1, hidden_dropout=0.1)
    model = GPT2(shape, groups.tp, sequence_parallel=sequence_parallel)
    for block in model.blocks if modules is not None else ():
        recompute.recompute_selectively(block, modules or ())
    if chunk is not None:
        model.run_blocks = recompute.in_chunks(chunk, Recomputation(switches, groups.tp).checkpoint)
    engine = engine_of(model, groups, accumulation=accumulation, bf16=precision == "bf16", zero_stage=stage,
                       stage3_param_persistence_threshold=0)
    model.train()
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))  # torch leaves the last block early
    tokens = torch.randint(257, (accumulation, 2, 17), generator=torch.Generator().manual_seed(7 + groups.dp.rank))
    for rows in tokens:
        engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
        if not engine.is_at_boundary:
            engine.step()
    found = {segment.slot.name: grad.clone() for segment, grad in gradient_runs(engine)}
    return found, capture_rng(), len(calls)


def same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.equal(second)
    if isinstance(first, dict):
        return isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k])
                                                                                  for k in first)
    return first == second


def every_chunk(tp: int, precision: str) -> None:
    expected, streams, calls = gradients(tp, None, precision)
    other_masks, _, _ = gradients(tp, None, precision, accumulation=2)
    assert calls == LAYERS and all(grad.any() for grad in expected.values())
    assert not same(expected, other_masks)
    for chunk in (1, 2, 3, LAYERS, LAYERS + 1):
        found, streams_after, calls = gradients(tp, chunk, precision)
        assert calls == 2 * LAYERS, "nothing was recomputed"
        assert same(found, expected), f"chunk {chunk}: gradients differ"
        assert same(streams_after, streams), f"chunk {chunk}: recomputation moved a random stream"
    twice = gradients(tp, None, precision, accumulation=2)
    assert same(gradients(tp, 2, precision, accumulation=2)[0], twice[0])


def every_switch(tp: int, stage: int) -> None:
    for precision, tried in (("fp32", SWITCHES), ("bf16", [SPLIT, ALL])):
        expected, streams, _ = gradients(tp, None, precision, stage=stage)
        for switches in tried:
            found, streams_after, calls = gradients(tp, 2, precision, stage=stage, switches=switches)
            assert calls == 2 * LAYERS, "nothing was recomputed"
            assert same(found, expected), f"{precision}, {switches}: gradients differ"
            assert same(streams_after, streams), f"{precision}, {switches}: recomputation moved a random stream"


def every_module(tp: int, stage: int) -> None:
    for modules, split in ((RECOMPUTE_MODULES, True), (RECOMPUTE_MODULES[:2], False), ((), False)):
        expected, streams, _ = gradients(tp, None, "fp32", stage=stage, sequence_parallel=split)
        found, streams_after, calls = gradients(tp, None, "fp32", stage=stage, modules=modules, sequence_parallel=split)
        assert calls == LAYERS, "a block was recomputed as a whole"
        assert same(found, expected), f"{modules}: gradients differ"
        assert same(streams_after, streams), f"{modules}: recomputation moved a random stream"


def every_run(rank: int, world: int) -> None:
    every_module(tp=2, stage=0)
    every_module(tp=1, stage=3)
    every_chunk(2, "fp32")
    every_chunk(1, "bf16")
    every_switch(tp=2, stage=0)
    every_switch(tp=1, stage=3)


def test_recomputation_with_dropout_gives_bit_equal_gradients_with_every_switch() -> None:
    run_ranks(every_run, 2, timeout=120)


def test_an_evaluation_recomputes_nothing() -> None:
    model = GPT2(tiny_model())
    model.run_blocks = recompute.in_chunks(1)
    calls: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    rows = torch.zeros(1, 17, dtype=torch.long)
    with torch.no_grad():
        model(rows[:, :-1], rows[:, 1:])
    assert len(calls) == 1


class Operations(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.name().split("::")[1].partition("_for_")[0]] += 1
        return func(*args, **(kwargs or {}))


def operations(modules: tuple[str, ...] | None, fp8: bool = False) -> Counter[str]:
    model = GPT2(tiny_model(num_layers=1, attention_dropout=0.0, hidden_dropout=0.0))
    if fp8:
        use_fp8(model.bfloat16())
    if modules is not None:
        recompute.recompute_selectively(model.blocks[0], modules)
    rows = torch.zeros(1, 17, dtype=torch.long)
    with Operations() as counted:
        model(rows[:, :-1], rows[:, 1:]).backward()
    return counted.count


def test_selective_recomputation_runs_the_modules_again_and_no_product() -> None:
    assert set(RECOMPUTE_MODULES) == set(selective.OPERATIONS)
    names = {"layernorm": ("native_layer_norm", 2), "mlp_act": ("gelu", 1),
             "core_attn": ("_scaled_dot_product_flash_attention", 1)}
    plain = operations(None)
    for modules in ((), *((module,) for module in RECOMPUTE_MODULES), RECOMPUTE_MODULES):
        again = operations(modules)
        assert all(again[name] == plain[name] for name in ("mm", "addmm"))
        assert {module: again[name] - plain[name] for module, (name, _) in names.items()} == {
            module: times if module in modules else 0 for module, (_, times) in names.items()}
    with patch("mpu.fp8.on_accelerator", lambda x: True):
        assert operations((), fp8=True)["_scaled_mm"] == operations(None, fp8=True)["_scaled_mm"] == 3 * 4


# ---- what waits for backward -------------------------------------------------------------------------------------


def waiting(tp: Group, switches: RecomputeConfig, chunk: int = 1) -> tuple[int, int, int]:
    """Between forward and backward of a GPT-2 of LAYERS blocks: bytes of the chunks' inputs that are still there,
    bytes of the memory that was made to keep them elsewhere, and the number of its storages."""
    model = GPT2(tiny_model(num_layers=LAYERS, hidden_size=36, num_attention_heads=2), tp)
    again, inputs, homes = Recomputation(switches, tp), Storages(), Storages()
    model.run_blocks = recompute.in_chunks(
        chunk, lambda function, x, *args: again.checkpoint(function, inputs.add(x), *args))
    rows = torch.zeros(1, 16, dtype=torch.long)
    make = activation_checkpoint._allocate_like
    with patch.object(activation_checkpoint, "_allocate_like", lambda *args: homes.add(make(*args))):
        loss = model(rows[:, :-1], rows[:, 1:])
    found = sum(inputs.alive()), sum(homes.alive()), len(homes.alive())
    loss.backward()
    again.reset()
    assert not inputs.alive() and not homes.alive(), "something waits for a backward that is done"
    return found


class Storages:
    """The memory of tensors, watched but not held."""

    def __init__(self) -> None:
        self._seen: list[tuple[StorageWeakRef, int]] = []

    def add(self, tensor: Tensor) -> Tensor:
        self._seen.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))
        return tensor

    def alive(self) -> list[int]:
        return [size for storage, size in self._seen if not storage.expired()]


INPUT = 15 * 36 * 4
"""Bytes of a block's input."""


def kept_memory(rank: int, world: int) -> None:
    tp = build_groups(world).tp
    for chunk in (1, 2):
        count = math.ceil(LAYERS / chunk)
        whole, part = count * INPUT, count * INPUT // world
        assert waiting(tp, RecomputeConfig(), chunk) == (whole, 0, 0)
        assert waiting(tp, SPLIT, chunk) == ((0, part, count) if world > 1 else (whole, 0, 0))
        assert waiting(tp, replace(ROWS, number_checkpoints=count), chunk) == (0, part, 1)


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_keeps_its_share_of_each_input_and_no_whole_one(world: int) -> None:
    run_ranks(kept_memory, world)


def odd_sizes(rank: int, world: int) -> None:
    """Sizes that do not divide by the ranks: scalars, and what ends in the middle of a rank's part."""
    for switches in (SPLIT, ROWS):
        for shape in ((), (1,), (2,), (5,), (3, 5), (2, 3, 7)):
            again = Recomputation(switches, build_groups(world).tp)
            x = torch.arange(float(math.prod(shape))).view(shape).requires_grad_()
            again.checkpoint(torch.Tensor.square, x).sum().backward()
            assert x.grad is not None and x.grad.equal(2 * x.detach())


def test_an_input_of_any_size_is_split() -> None:
    run_ranks(odd_sizes, 3)


def test_a_buffer_refuses_what_it_has_no_room_for_and_has_room_again_after_backward() -> None:
    again = Recomputation(replace(ROWS, number_checkpoints=2))
    wide, narrow = torch.ones(4, requires_grad=True), torch.ones(3, requires_grad=True)
    for _ in range(3):
        kept = [again.checkpoint(torch.sin, wide) for _ in range(2)]
        sum(kept).sum().backward()
    kept = [again.checkpoint(torch.sin, wide)]
    with pytest.raises(ConfigError, match="3 elements of torch.float32 .* rows of 4 of torch.float32"):
        again.checkpoint(torch.sin, narrow)
    with pytest.raises(ConfigError, match="3 elements of torch.float64"):
        again.checkpoint(torch.sin, narrow.double())
    kept.append(again.checkpoint(torch.sin, wide))
    with pytest.raises(ConfigError, match="2 kept inputs wait for their backward, and number_checkpoints is 2"):
        again.checkpoint(torch.sin, wide)
    del kept
    again.checkpoint(torch.sin, narrow).sum().backward()  # a forward without backward has left nothing behind
    assert narrow.grad is not None and narrow.grad.equal(narrow.detach().cos())


def test_reset_lets_go_of_the_buffer_but_not_of_what_waits_in_it() -> None:
    again = Recomputation(replace(ROWS, number_checkpoints=1))
    x = torch.ones(3, requires_grad=True)
    forgotten = again.checkpoint(torch.sin, x)
    again.reset()
    again.checkpoint(torch.exp, 2 * x).sum().backward()
    assert x.grad is not None and x.grad.equal(2 * (2 * x.detach()).exp())
    forgotten.sum().backward()
    assert x.grad.equal(2 * (2 * x.detach()).exp() + x.detach().cos())


# ---- what may be given to it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("switches", [RecomputeConfig(), ROWS], ids=["plain", "kept elsewhere"])
def test_arguments_may_be_anything(switches: RecomputeConfig) -> None:
    """Positional and by name; tensors with and without gradient, integers, and no tensors at all."""
    def function(x: Tensor, index: Tensor, power: int, *, scale: Tensor, use_reentrant: str) -> tuple[Tensor, str]:
        return (x[index] ** power * scale).sin() * weight, use_reentrant

    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    for x in (torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0])):
        wanted, found = [], []
        for grads, call in ((wanted, function), (found, Recomputation(switches).checkpoint)):
            args = (x, torch.tensor([2, 0]), 2)
            words: dict[str, Any] = {"scale": scale, "use_reentrant": "the function's own"}
            y, text = call(*args, **words) if call is function else call(function, *args, **words)
            assert text == "the function's own"
            y.sum().backward()
            for tensor in (x, weight, scale):
                grads.append(tensor.grad)
                tensor.grad = None
        assert all(a is b is None or a.equal(b) for a, b in zip(wanted, found, strict=True))


def noisy(x: Tensor) -> Tensor:
    with get_rng_tracker().fork():
        return torch.nn.functional.dropout(x.sin(), 0.5)


def test_backward_may_run_again_and_grad_may_be_asked_for() -> None:
    x = torch.ones(50, requires_grad=True)
    model_parallel_cuda_manual_seed(3, Groups())
    expected, = torch.autograd.grad(noisy(x).sum(), x)
    for switches in (RecomputeConfig(), ROWS):
        model_parallel_cuda_manual_seed(3, Groups())
        y = Recomputation(switches).checkpoint(noisy, x).sum()
        for _ in range(3):
            found, = torch.autograd.grad(y, x, retain_graph=True)
            assert found.equal(expected)
        y.backward()
        assert x.grad is not None and x.grad.equal(expected)
        x.grad = None


# ---- borders, and the module interface ---------------------------------------------------------------------------


def test_the_device_is_waited_for_at_each_border_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    for switches, expected in ((RecomputeConfig(), 0), (RecomputeConfig(synchronize_checkpoint_boundary=True), 4),
                               (RecomputeConfig(profile_backward=True), 4)):
        waits: list[int] = []
        again, x = Recomputation(switches), torch.ones(3, requires_grad=True)
        monkeypatch.setattr(again, "_synchronize", lambda: waits.append(1))
        y = again.checkpoint(torch.sin, x)
        assert len(waits) == expected // 2
        y.sum().backward()
        assert len(waits) == expected


def test_the_report_counts_chunks_and_begins_anew() -> None:
    again = Recomputation(RecomputeConfig(profile_backward=True))
    x = torch.ones(3, requires_grad=True)
    again.checkpoint(torch.sin, again.checkpoint(torch.sin, x)).sum().backward()
    times = r"\d+\.\d\d ms x 2"
    assert re.fullmatch(rf" recomputation, each chunk \| forward {times} \| again in backward {times}", again.report())
    assert again.report() == ""
    quiet = Recomputation(RecomputeConfig())
    quiet.checkpoint(torch.sin, x).sum().backward()
    assert quiet.report() == ""


@pytest.fixture
def unconfigured() -> Iterator[None]:
    """`configure` lasts as long as the process: put back what was there."""
    fresh = Recomputation(RecomputeConfig())
    with patch.multiple(activation_checkpoint._ActiveRecomputation, recomputation=fresh, is_configured=False):
        yield


@pytest.mark.usefixtures("unconfigured")
def test_configure_reads_a_deepspeed_section_and_arguments_win(tmp_path: Path) -> None:
    tree = {"train_batch_size": 7, "activation_checkpointing": {"partition_activations": True, "profile": True,
                                                                "contiguous_memory_optimization": True}}
    (tmp_path / "ds.json").write_text(json.dumps(tree))
    asked = RecomputeConfig(partition_activations=True, profile_backward=True)
    with patch.object(activation_checkpoint, "Recomputation") as made:
        for source in (tree, str(tmp_path / "ds.json"), tmp_path / "ds.json"):
            recompute.configure(None, source, contiguous_checkpointing=False)
            recompute.configure(None, source, num_checkpoints=5 / 2)
            recompute.configure(None, source, False, False, checkpoint_in_cpu=True, synchronize=True, profile=False)
            assert [call.args for call in made.call_args_list[-3:]] == [(switches, SOLO) for switches in (
                asked, replace(asked, contiguous_memory_optimization=True, number_checkpoints=3),
                RecomputeConfig(cpu_checkpointing=True, synchronize_checkpoint_boundary=True))]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"partition_activation": True}, "no argument partition_activation: did you mean partition_activations?"),
    ({"xyzzy": True}, "no argument xyzzy"),
    ({"contiguous_checkpointing": True, "num_checkpoints": 4}, "needs --partition-activations"),
    ({"contiguous_checkpointing": True, "partition_activations": True}, "needs number_checkpoints"),
    ({"deepspeed_config": {"activation_checkpointing": {"cpu_chekpointing": True}}}, "did you mean"),
]


def test_selective_recomputation_refuses_other_modules_and_storage_of_inputs() -> None:
    chosen = {"checkpoint_activations": True, "recompute_granularity": "selective"}
    for values, told in (
            ({"recompute_modules": ("mlp",)}, "--recompute-modules is mlp: expected of layernorm, mlp_act, core_attn"),
            ({"cpu_checkpointing": True}, "leave out --cpu-checkpointing")):
        with pytest.raises(ConfigError, match=told):
            RecomputeConfig(**chosen, **values)


@pytest.mark.usefixtures("unconfigured")
def test_configure_refuses_what_it_cannot_honour() -> None:
    for arguments, told in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(told)):
            recompute.configure(None, **arguments)
        assert not recompute.is_configured()


def split_by_configure(rank: int, world: int) -> None:
    mpu.initialize_model_parallel(world)
    x = torch.arange(6.0, requires_grad=True)
    with patch.object(activation_checkpoint, "all_gather_into",
                      wraps=activation_checkpoint.all_gather_into) as gathered:
        recompute.checkpoint(torch.square, x).sum().backward()
        assert not gathered.called and not recompute.is_configured()
        recompute.configure(mpu, {"activation_checkpointing": {"partition_activations": True}})
        recompute.checkpoint(torch.square, x).sum().backward()
        assert gathered.call_count == 1 and recompute.is_configured()
    assert x.grad is not None and x.grad.equal(4 * x.detach())


def test_the_module_checkpoints_as_configured_over_the_groups_of_an_mpu() -> None:
    run_ranks(split_by_configure, 2)


# ---- whole runs --------------------------------------------------------------------------------------------------


FLAGS = ("--checkpoint-activations --partition-activations --contigious-checkpointing --checkpoint-in-cpu "
         "--synchronize-each-layer --profile-backward").split()
"""As DeepSpeed's scripts spell them."""


def test_every_flag_and_key_reaches_a_run_and_changes_no_bit_of_it(tmp_path: Path) -> None:
    key = {"activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True,
                                        "cpu_checkpointing": True, "profile": True}}
    (tmp_path / "ds.json").write_text(json.dumps(key))
    runs: dict[str, list[object]] = {"plain": [], "flags": [*FLAGS],
                                     "file": ["--checkpoint-activations", "--deepspeed_config", tmp_path / "ds.json"]}
    said = {name: train([*TINY, "--mock-data", "--train-iters", "2", "--batch-size", "2", "--log-interval", "1",
                         "--metrics-file", tmp_path / name, *argv]) for name, argv in runs.items()}
    assert lines(tmp_path / "flags") == lines(tmp_path / "file") == lines(tmp_path / "plain")
    key_name = "activation_checkpointing.partition_activations"
    for name, given in (("flags", "--partition-activations"), ("file", key_name)):
        assert said[name].count("recomputation, each chunk | forward") == 2
        assert said[name].count(f"{given} has no effect: the tensor parallel size is 1") == 1
    assert "recomputation, each" not in said["plain"] and "has no effect" not in said["plain"]
