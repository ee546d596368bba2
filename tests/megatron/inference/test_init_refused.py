"""What `init_inference` refuses before it cuts or casts a model stays as it was; what breaks off later says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.errors import TrainerError
from megatron.inference import init_inference
from tests.distributed import run_ranks
from tests.megatron.inference.gpt2s import ours, theirs


def facts(model: nn.Module) -> list[Any]:
    modules = [(path, type(module), module.training, vars(module).get("forward"))
               for path, module in model.named_modules()]
    return modules + [(name, id(parameter), parameter.dtype, parameter.requires_grad, parameter.tolist())
                      for name, parameter in model.named_parameters()]


@contextmanager
def refused(model: nn.Module, words: str) -> Iterator[None]:
    """And not changed."""
    before = facts(model)
    with pytest.raises(TrainerError, match=words):
        yield
    assert facts(model) == before


def large(make: Callable[[], Any], value: float = 1e5) -> Any:
    """Partly frozen, partly in evaluation, with a number that fp16 does not have."""
    model = make().train()
    next(model.children()).requires_grad_(False).eval()
    matrix = [parameter for parameter in model.parameters() if parameter.dim() == 2][-1]
    matrix.data[0, 0] = value
    return model


def one_layer() -> nn.Module:
    return nn.Sequential(nn.Dropout(), nn.Linear(4, 4))


@pytest.mark.parametrize("make", [ours, theirs, one_layer])
def test_weights_that_do_not_fit_a_precision_stay_as_they_were(make: Callable[[], Any]) -> None:
    with refused(model := large(make), "is not finite in float16: ask for another dtype"):
        init_inference(model, dtype="fp16")


@pytest.mark.parametrize("make, given, words", [
    (ours, {"dtype": "bf16", "min_out_tokens": 99}, "min_out_tokens is 99, and there is room for 24"),
    (theirs, {"dtype": "bf16", "injection_policy": {"GPT2Block": "oot"}}, "has no oot"),
    (one_layer, {"dtype": "int8"}, "which layers of a Sequential are to be int8 is not known"),
])
def test_wrong_arguments_change_no_model(make: Callable[[], Any], given: dict[str, Any], words: str) -> None:
    with refused(model := large(make), words):
        init_inference(model, **given)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = one_layer()
    with pytest.raises(TrainerError, match="1.weight is on the meta device, and has no values: make"):
        init_inference(model)


def test_weights_that_cannot_be_int8_stay_as_they_were() -> None:
    with refused(model := large(theirs, torch.inf), "c_proj.weight is not finite: it cannot be quantised to int8"):
        init_inference(model, dtype="int8")


def test_a_checkpoint_that_does_not_fit_is_not_left_in_the_model(tmp_path: Path) -> None:
    large(theirs).save_pretrained(tmp_path)
    with refused(model := theirs(seed=9), "is not finite in float16"):
        init_inference(model, checkpoint=str(tmp_path), dtype="fp16")


def wrong_example(rank: int, world: int) -> None:
    model = large(theirs)
    layer = model.transformer.h[0].mlp.c_proj
    layer.forward = layer.forward  # as accelerate puts another one there
    with refused(model, "it fails on example_inputs"):
        init_inference(model, mp_size=world, example_inputs=torch.ones(1, 2))
    init_inference(model, mp_size=world)


def test_an_example_that_does_not_run_changes_no_model() -> None:
    run_ranks(wrong_example, 2)


@pytest.mark.parametrize("make", [ours, one_layer])
def test_a_model_that_is_partly_cast_says_so_and_one_that_is_partly_moved_is_taken(
        make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any) -> None:
        raise MemoryError

    model = make()
    for dtype in (None, "bf16"):
        with monkeypatch.context() as patched, pytest.raises(MemoryError):
            patched.setattr(nn.Module, "to", no_memory)
            init_inference(model, dtype=dtype)
        if dtype is None:
            init_inference(model)
    for again in (lambda: init_inference(model), lambda: model(torch.ones(1, 4))):
        with pytest.raises(TrainerError, match="partly cut or cast: load it again"):
            again()
