"""A parameter whose elements are elsewhere refuses every use, and no use gives a number; questions are answered."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron import zero
from megatron.errors import ConfigError
from megatron.zero.partitioned_param import param_owner
from tests.megatron.zero.small import Model, engine_of, gathered, train


def in_an_engine() -> nn.Module:
    return engine_of(3).module


def in_init() -> nn.Module:
    with zero.Init():
        return Model()


@pytest.fixture(params=[in_an_engine, in_init])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = request.param()
    return made


USES: dict[str, Callable[[Any], object]] = {
    "sum": lambda p: p.sum(), "one plus": lambda p: 1 + p, "as index": lambda p: torch.ones(3)[p],
    "assign": lambda p: p.__setitem__(0, 1.0), "keyword": lambda p: torch.add(torch.ones(2), other=p),
    "aten": lambda p: torch.ops.aten.sum.default(p), "copy to": lambda p: torch.ones(2).copy_(p),
    "data": lambda p: p.data, "set data": lambda p: setattr(p, "data", torch.ones(2)), "array": lambda p: np.asarray(p),
    "float": lambda p: float(p), "parameter": lambda p: nn.Parameter(p), "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p), "save": lambda p: torch.save({"w": [p]}, io.BytesIO()),
    "other type": lambda p: p.double().sum(), "other place": lambda p: p.cpu().sum(),
    "as a target": lambda p: torch.ones(2).to(p), "share": lambda p: p.share_memory_(),
}
"""Those that a class of tensors is not asked about, or that look like something else; the others are below."""


def test_using_a_placeholder_is_an_error_that_says_what_to_do(model: nn.Module) -> None:
    said = {name: answer(use, model.head.weight) for name, use in USES.items()}
    assert {name: text for name, text in said.items() if "split over" not in text} == {}
    whose = "parameter 'head.weight'" if param_owner(model.head.weight).is_engine_owned else "a parameter"
    assert re.match(rf"{whose} of shape \(1, 8\) cannot be used here \(sum\): its elements are split over the data "
                    r"parallel ranks; (build a model that reads it outside zero.Init, )?use it inside "
                    r"zero.GatheredParameters", said["sum"])


def answer(use: Callable[[Any], object], value: object) -> str:
    try:
        return f"gave {use(value)!r}"
    except (ConfigError, RuntimeError) as error:
        return str(error)


ANSWERED = frozenset("""
    shape ndim dtype device layout is_leaf is_cpu is_cuda is_meta is_mps is_mkldnn is_nested is_quantized is_sparse
    is_sparse_csr is_xpu itemsize nbytes requires_grad retains_grad grad _grad grad_fn output_nr _backward_hooks
    _grad_fn _post_accumulate_grad_hooks _version size dim ndimension numel nelement stride storage_offset element_size
    get_device is_complex is_contiguous is_floating_point is_inference is_signed requires_grad_ register_hook
    register_post_accumulate_grad_hook __len__ __dir__ __hash__ __repr__ __format__ _has_compatible_shallow_copy_type
    to type cpu cuda xpu half float double bfloat16
""".split())
"""What may give something back: all of it is about the tensor, or the placeholder again."""


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Everything of torch that takes tensors and lets a class of tensors have its say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated ones
        found = torch.overrides.get_overridable_functions()
    for functions in found.values():
        for function in functions:
            owner = getattr(function, "__self__", None)  # of a property's getter
            yield getattr(owner, "__name__", None) or function.__name__, function


def arguments(p: nn.Parameter) -> Iterator[tuple[object, ...]]:
    yield from ((p,), (p, p), (p, p, p), (p, p, p, p), (p, p, p, p, p), (p, 1), (p, 1, 1), (p, 1, 1, 1), (p, 0, p),
                (p, 0, p, 1.0), (p, 0, p, p), (p, (1,)), (p, (1,), (1,)), (p, p, (1,)), (p, p, 1), (p, p, 1, 1),
                (p, 1.0), (p, 1.0, True), (p, 1.0, 1.0), (p, 1.0, 1.0, 1), ([p],), ([p], [p]), ([p], [p], [p]),
                ([p], 1), ([p], [1]), ("i,i", p), ("i", [p]), (1, p), (p, True), (p, torch.float32), (p, None))


def test_no_function_of_torch_gives_a_number_for_a_placeholder() -> None:
    model = in_an_engine()  # its engine lives as long
    p = model.get_parameter("head.weight")
    refused, gave = set(), {}
    for name, function in functions():
        for given in arguments(p):
            try:
                result = function(*given)
            except ConfigError:
                refused.add(name)
                break
            except Exception:  # not its arguments
                continue
            if name not in ANSWERED and result is not NotImplemented:
                gave[name] = result
            break
    assert gave == {}
    assert len(refused) > 600, "the arguments above fit too few functions to mean anything"


def test_questions_are_answered(model: nn.Module) -> None:
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf and weight.grad is None
    assert (weight.dtype, weight.device) == (torch.float32, torch.device("cpu"))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Model().named_parameters()]
    assert weight in {weight} and dir(weight)
    for text in (repr(weight), str(weight), f"{weight}"):
        assert text.startswith("Placeholder(") and "(1, 8)" in text and "tensor(" not in text
    torch.optim.AdamW(model.parameters(), lr=0.1).zero_grad()
    weight.register_hook(lambda grad: grad)


SIZES: dict[str, Callable[[Any], object]] = {
    "shape": lambda p: p.shape, "size": lambda p: p.size(), "a size": lambda p: p.size(-1), "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim, "numel": lambda p: p.numel(), "torch.numel": torch.numel, "nbytes": lambda p: p.nbytes,
    "len": len, "stride": lambda p: p.stride(),
}


def test_sizes_are_those_of_the_whole_parameter(model: nn.Module) -> None:
    for p, plain in zip(model.parameters(), Model().parameters(), strict=True):
        assert {name: ask(p) for name, ask in SIZES.items()} == {name: ask(plain) for name, ask in SIZES.items()}


def trained(prepare: Callable[[nn.Module], object]) -> list[Tensor]:
    model = in_init()
    prepare(model)
    engine = engine_of(3, model)
    for number in range(3):
        train(engine, number)
        prepare(engine.module)
    return gathered(engine.module)


def test_casting_a_split_module_is_refused_once_an_engine_has_it() -> None:
    said: list[str] = []

    def try_to_cast(model: nn.Module) -> None:
        try:
            model.half()
        except ConfigError as error:
            said.append(str(error))

    plain = trained(lambda m: None)
    assert all(map(torch.equal, trained(try_to_cast), plain)) and len(said) == 3
    assert re.search(r"^parameter 'blocks.0.weight' .* cannot become torch\.\w+ on \w+ \(\w+\): .* choose fp16 or bf16",
                     said[0])
