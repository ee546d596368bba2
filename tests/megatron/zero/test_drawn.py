"""The trainer's model is filled by the engine: each rank draws its shard, from the numbers that one process has."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron import zero
from megatron.config.tree import Config, build_config
from megatron.errors import ConfigError
from megatron.model import GPT2
from megatron.train import build
from megatron.zero import deferred_init
from megatron.zero.api.checkpoint_io import gather_full_state_dict
from megatron.zero.partitioned_param import Placeholder
from mpu import groups, weight_init
from mpu.groups import Groups
from tests.distributed import run_ranks

CPU = torch.device("cpu")


def config_of(stage: int, precision: str, tp: int = 1) -> Config:
    return build_config({
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16, "vocab_size": 61,
        "make_vocab_size_divisible_by": 8, "zero_stage": stage, "model_parallel_size": tp, "batch_size": 2,
        "stage3_param_persistence_threshold": 100, **({} if precision == "fp32" else {precision: True})})


def start(rank: int, world: int, stage: int, precision: str, tp: int) -> tuple[dict[str, torch.Tensor], int, int, int]:
    """The weights that the engine has, how many numbers were drawn, how many broadcasts there were, and how many
    elements this rank has to keep."""
    config = config_of(stage, precision, tp)
    grid = groups.build(tp)
    drawn, rows, sent = [0], weight_init.fill_normal_rows, mock.Mock(wraps=deferred_init.broadcast_into)

    def counted(out: torch.Tensor, *places: Any) -> None:
        drawn[0] += out.numel()
        rows(out, *places)

    with mock.patch.object(weight_init, "fill_normal_rows", counted), mock.patch.object(deferred_init, "broadcast_into",
                                                                                        sent):
        engine = build.engine(config, build.model(config, grid), grid, CPU)
    kept = sum(bucket.layout.shard_numel for bucket in engine.core.buckets)
    return gather_full_state_dict(engine.core), drawn[0], sent.call_count, kept


@pytest.mark.parametrize(("stage", "precision", "tp"), [
    (0, "fp32", 1), (1, "bf16", 1), (2, "fp32", 1), (3, "bf16", 1), (3, "fp32", 1), (1, "fp32", 2), (3, "bf16", 2)])
def test_every_stage_starts_from_the_weights_of_one_process(stage: int, precision: str, tp: int) -> None:
    config = config_of(stage, precision)
    model = GPT2(config.model, seed=config.train.seed)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    found = run_ranks(start, 2, stage, precision, tp)
    weights = found[0][0]
    for name, value in model.state_dict().items():
        rows = value[:config.model.known_vocab_size] if name == "wte.weight" else value
        assert torch.equal(weights[name], rows.to(dtype)), name
    for _, drawn, broadcasts, kept in found:
        assert drawn <= kept, "a rank draws what it keeps"
        assert broadcasts == 0, "nobody is told what all can draw"


def test_until_then_a_parameter_is_a_placeholder_without_memory() -> None:
    model = build.model(config_of(1, "fp32"), Groups())
    assert all(isinstance(parameter, Placeholder) for parameter in model.parameters())
    with torch._C.DisableTorchFunctionSubclass():
        assert not any(parameter.untyped_storage().nbytes() for parameter in model.parameters())
    eager = GPT2(config_of(1, "fp32").model)
    assert [p.shape for p in model.parameters()] == [p.shape for p in eager.parameters()]
    with pytest.raises(ConfigError, match="cannot be used here"):
        model.wpe.weight + 1


def test_edits_before_the_engine_count() -> None:
    config = config_of(1, "fp32")
    model = build.model(config, Groups())
    with zero.GatheredParameters(list(model.wpe.parameters()), modifier_rank=0):
        model.wpe.weight.zero_()
    with zero.GatheredParameters(list(model.ln_f.parameters())):
        assert torch.equal(model.ln_f.weight, torch.ones_like(model.ln_f.weight))
    with pytest.raises(ConfigError, match="edited inside GatheredParameters without modifier_rank"), \
            zero.GatheredParameters(list(model.ln_f.parameters())):
        model.ln_f.weight.zero_()
    build.engine(config, model, Groups(), CPU)
    assert not model.wpe.weight.any() and model.ln_f.weight.all() and model.wte.weight.any()
