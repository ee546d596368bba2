"""int8 engines: the same levels and scales whatever the number of ranks, a byte a weight, nearly the same logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import TrainerError
from megatron.inference import init_inference
from megatron.inference.int8 import Int8
from tests.distributed import run_ranks
from tests.megatron.inference.gpt2s import CLOSE, PROMPTS, greedy, ours, theirs, tokens


def levels(module: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (weight.data.levels, weight.data.scale) for name, weight in module.named_parameters()
            if isinstance(weight.data, Int8)}


@contextmanager
def in_fp32() -> Iterator[None]:
    """Activations, on any processor: so that sums of parts are nearly those of the whole."""
    with ExitStack() as stack:
        for module in ("inference.api.init_inference", "inference.load"):
            stack.enter_context(patch(f"megatron.{module}.activation_dtype", lambda device: torch.float32))
        yield


def work(rank: int, world: int, fast: bool) -> tuple[Mapping[str, tuple[Tensor, Tensor]], Any, Any, Any]:
    with in_fp32():
        engine = init_inference(theirs(), mp_size=world, dtype=torch.int8, replace_with_kernel_inject=fast)
        own = init_inference(ours(), mp_size=world, dtype="int8")
    return levels(engine.module), engine(tokens()).logits, greedy(engine), own(tokens())


@pytest.mark.parametrize("fast", [False, True])
def test_levels_and_scales_are_the_same_at_any_tensor_parallel_size(fast: bool) -> None:
    ((alone, logits, text, own),) = run_ranks(work, 1, fast)
    assert len(alone) == 12
    found = run_ranks(work, 2, fast)
    for name, (whole, scale) in alone.items():
        parts = [one[0][name] for one in found]
        if name.endswith("c_proj.weight"):  # a row layer
            assert torch.equal(torch.cat([part for part, _ in parts], 1), whole)
            assert all(torch.equal(part, scale) for _, part in parts)
        else:
            count = 3 if name.endswith("c_attn.weight") else 1
            for number, expected in ((0, whole), (1, scale)):
                joined = torch.cat([part[number].unflatten(0, (count, -1)) for part in parts], 1).flatten(0, 1)
                assert torch.equal(joined, expected), name
    for _, of_rank, text_of_rank, own_of_rank in found:
        torch.testing.assert_close(of_rank, logits, **CLOSE)
        torch.testing.assert_close(own_of_rank, own, **CLOSE)
        assert torch.equal(text_of_rank, text)


def test_int8_is_nearly_the_model_in_half_the_bytes() -> None:
    whole = theirs()
    with in_fp32():
        engine = init_inference(theirs(), dtype=torch.int8)
    for name, (level, scale) in levels(engine.module).items():
        weight = whole.get_parameter(name).detach().t()
        assert bool(((level * scale[:, None] - weight).abs() <= 0.501 * scale[:, None]).all())
        assert level.nbytes == weight.numel()
    logits = whole(tokens()).logits.detach()
    assert float((engine(tokens()).logits - logits).norm() / logits.norm()) < 0.05


def test_without_layers_to_quantise_int8_is_refused() -> None:
    whole = nn.Linear(4, 4)
    with pytest.raises(TrainerError, match="which layers of a Linear are to be int8 is not known: give"):
        init_inference(whole, dtype=torch.int8)
    init_inference(whole, dtype=torch.bfloat16)
    broken = theirs()
    broken.transformer.h[1].mlp.c_proj.weight.data[3, 3] = torch.inf
    with pytest.raises(TrainerError, match=r"h.1.mlp.c_proj.weight is not finite: it cannot be quantised"):
        init_inference(broken, dtype=torch.int8)


def test_levels_lie_side_by_side_in_large_pages() -> None:
    found = [level for level, _ in levels(init_inference(theirs(), dtype=torch.int8).module).values()]
    assert len({level.untyped_storage().data_ptr() for level in found}) == 1
    assert all(level.data_ptr() % 64 == 0 for level in found)


def broken_on_one_rank(rank: int, world: int) -> str:
    model = theirs()
    model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = torch.nan  # of rank 0's part alone
    with pytest.raises(TrainerError) as error:
        init_inference(model, mp_size=world, dtype=torch.int8)
    return str(error.value)


def test_what_one_rank_cannot_quantise_all_say() -> None:
    one, other = run_ranks(broken_on_one_rank, 2)
    assert one == other


def test_our_model_answers_in_int8() -> None:
    assert init_inference(ours(), dtype=torch.int8).generate(PROMPTS, max_new_tokens=3).shape == (3, 7)
