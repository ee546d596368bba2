"""Each argument of DeepSpeed's call does what it says, or is refused by name. What is refused before a model is cut or
cast leaves it as it was, and what breaks off later says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.errors import ConfigError, TrainerError
from megatron.inference import init_inference
from megatron.inference.api.arguments import FIXED_ARGUMENTS, InferenceArguments, parse_arguments
from tests.distributed import run_ranks
from tests.megatron.inference.gpt2s import ours, theirs


def test_the_call_of_the_tutorial() -> None:
    asked = parse_arguments(None, {"tensor_parallel": {"tp_size": 2}, "dtype": torch.half, "checkpoint": "folder",
                                   "replace_with_kernel_inject": True, "replace_method": "auto", "training_mp_size": 1,
                                   "max_out_tokens": 1024, "min_tokens": 3, "injection_policy": {nn.Linear: ("out",)}})
    assert asked.notes == () and asked == InferenceArguments(
        tp_size=2, dtype=torch.float16, checkpoint="folder", replace_with_kernel_inject=True, max_out_tokens=1024,
        min_out_tokens=3, injection_policy={nn.Linear: ("out",)})


def test_config_is_a_dict_or_a_file_and_a_dtype_has_several_names(tmp_path: Path) -> None:
    tree = {"kernel_inject": True, "tensor_parallel": {"tp_size": 4, "enabled": True}, "dtype": "bf16"}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(tree))
    expected = InferenceArguments(tp_size=4, dtype=torch.bfloat16, replace_with_kernel_inject=True)
    for config, given in ((tree, {}), (str(file), {}), (file, {"mp_size": 4, "dtype": torch.bfloat16})):
        assert parse_arguments(config, given) == expected
    for name, dtype in (("float", torch.float32), ("torch.bfloat16", torch.bfloat16), ("half", torch.float16),
                        (torch.float32, torch.float32), ("int8", torch.int8), (torch.int8, torch.int8)):
        assert parse_arguments({"dtype": name}, {}).dtype is dtype
    file.write_text('{"tensor_parallel": {"tp_size": 2, "tp_size": 4}}')
    with pytest.raises(ConfigError, match="tensor_parallel.tp_size is given twice"):
        parse_arguments(file, {})


def test_every_argument_that_is_not_supported_says_what_to_do() -> None:
    for path, (accepted, remedy) in FIXED_ARGUMENTS.items():
        with pytest.raises(ConfigError) as error:
            parse_arguments(None, nested(path, "unlike any"))
        assert str(error.value) == f"init_inference: {path} is 'unlike any', which is not supported: {remedy}"
        for harmless in accepted:
            assert parse_arguments(None, nested(path, harmless)).notes == ()


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"config": {"tensor_parallel": {"tp_size": 2}}, "mp_size": 4},
     "tensor_parallel.tp_size of config is 2 and mp_size is 4: leave one of them out"),
    ({"mp_size": 2, "tp": {"tp_size": 1}}, "mp_size is 2 and tensor_parallel.tp_size is 1: leave one"),
    ({"mp_sise": 2}, "mp_sise is unknown; did you mean mp_size?"),
    ({"tensor_parallel": {"tp_sizes": 2}}, "did you mean tensor_parallel.tp_size?"),
    ({"tensor_parallel": 2}, 'tensor_parallel is 2: expected an object, such as {"tp_size": 2}'),
    ({"frobnicate": 2}, "frobnicate is unknown; docs/inference.md lists every argument"),
    ({"mp_size": 0}, "mp_size is 0: expected a number of ranks, 1 or more"),
    ({"dtype": "fp8"}, "dtype is 'fp8': expected torch.float32"),
    ({"checkpoint": 3}, "checkpoint is 3: expected a folder"),
    ({"injection_policy": ["out"]}, "injection_policy is ['out']: expected {LayerClass"),
    ({"max_out_tokens": 0, "dtype": "x"}, "2 errors:\n  (1) max_out_tokens is 0"),
    ({"config": "nowhere.json"}, "config nowhere.json: cannot be read"),
    ({}, "init_inference needs a model, or checkpoint="),
    ({"model": 3}, "model is a int: expected a module"),
    ({"model": nn.Linear(3, 3), "mp_size": 2}, "tensor_parallel.tp_size is 2, and there are 1 ranks: start 2 of them"),
    ({"model": nn.Linear(3, 3), "checkpoint": "runs"}, "checkpoint= fills a GPT-2, and the model is a Linear"),
    ({"checkpoint": "nowhere"}, "nowhere"),
    ({"checkpoint": {"type": "Megatron", "version": 0.0, "checkpoints": ["mp_rank_00/model_optim_rng.pt"]}},
     "a list of files of type 'Megatron' is not read here: make a checkpoint of it with `python -m megatron."),
    ({"checkpoint": "nowhere.json"}, "nowhere.json: cannot be read"),
]


def test_a_wrong_call_is_refused_by_name() -> None:
    for given, said in REFUSED:
        with pytest.raises(TrainerError) as error:
            init_inference(**given)
        assert said in str(error.value)


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


FLOAT16 = "is not finite in float16: ask for another dtype"


@pytest.mark.parametrize("make, given, words", [
    *((make, {"dtype": "fp16"}, FLOAT16) for make in (ours, theirs, one_layer)),
    (ours, {"dtype": "bf16", "min_out_tokens": 99}, "min_out_tokens is 99, and there is room for 24"),
    (theirs, {"dtype": "bf16", "injection_policy": {"GPT2Block": "oot"}}, "has no oot"),
    (one_layer, {"dtype": "int8"}, "which layers of a Sequential are to be int8 is not known"),
])
def test_a_refused_call_changes_no_model(make: Callable[[], Any], given: dict[str, Any], words: str) -> None:
    with refused(model := large(make), words):
        init_inference(model, **given)
    with refused(model := large(theirs, torch.inf), "c_proj.weight is not finite: it cannot be quantised to int8"):
        init_inference(model, dtype="int8")


@pytest.mark.parametrize("make", [ours, one_layer])
def test_a_model_that_is_partly_cast_says_so_and_one_that_is_partly_moved_is_taken(make, monkeypatch):
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf")
    theirs().save_pretrained(path)
    return str(path)


def refusal(model: Any, folder: str) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TrainerError) as error:
        init_inference(model, checkpoint=folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(error.value)


def test_every_difference_is_named_at_once(folder: str) -> None:
    for model in (ours(max_position_embeddings=32), theirs(n_positions=32)):
        assert refusal(model, folder) == (
            f"checkpoint {folder} is another model: its max_position_embeddings is 24, and the given model's is 32; "
            "leave the model out, and it is made as the checkpoint says")
    for name, saved, given in (("scale_attn_weights", True, False), ("scale_attn_by_inverse_layer_idx", False, True),
                               ("tie_word_embeddings", True, False), ("layer_norm_epsilon", 1e-5, 1e-3),
                               ("vocab_size", 211, 100)):
        shown = "layernorm_epsilon" if name == "layer_norm_epsilon" else name
        assert f"its {shown} is {saved}, and the given model's is {given}; " in refusal(theirs(**{name: given}), folder)
    said = refusal(theirs(n_layer=2, n_head=2, n_embd=32, activation_function="relu"), folder)
    assert said.count("its ") == 5 and "\n" not in said
    assert all(f"its {name} is {saved}, and the given model's is {given}; " in said for name, saved, given in (
        ("num_layers", 3, 2), ("hidden_size", 48, 32), ("num_attention_heads", 4, 2), ("intermediate_size", 192, 128),
        ("activation_function", "gelu_new", "relu")))


def on_one_rank(rank: int, world: int, folder: str) -> str:
    return refusal(theirs(seed=9, n_head=4 - 2 * rank), folder)


def test_a_model_that_is_another_on_one_rank_is_refused_on_all(folder: str) -> None:
    for said in run_ranks(on_one_rank, 2, folder):
        assert "its num_attention_heads is 4, and the given model's is 2" in said
