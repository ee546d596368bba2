"""Applies a tensor parallel plan to a module, and checks that the sharded module computes what the full one did.

Layers are replaced by parallel, optionally int8, layers with this rank's part. Int8 weights have one scale per output
row of the full matrix, so the levels do not depend on the number of ranks. A module whose sharding or cast failed half
way raises from every later forward (`poison_on_failure`).

The check: a wrong injection policy gives plausible garbage otherwise. The full module runs once on example inputs and
the output of every row-parallel layer is recorded. The sharded module runs on the same inputs; each row-parallel layer
returns the recorded output after the comparison, so rounding does not accumulate and the differing layer is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from megatron.checkpoint.int8_weights import quantise_into, scales_from_maxima
from megatron.config.schema import require
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.distributed.exit_codes import is_peer_loss
from megatron.errors import ConfigError
from megatron.inference.api.policy import TPLayer, TPPlan, in_out_features, is_conv1d, is_linear
from megatron.inference.int8 import Int8, allocate_levels
from megatron.zero.hooks import iter_tensors, map_module_outputs, map_tensors
from mpu.collectives import all_gather_json
from mpu.groups import Group
from mpu.layers import ColumnParallelLinear, RowParallelLinear
from mpu.partition import local_slice, set_partition
from mpu.split import Partition

POISONED_MESSAGE = "this model was refused by init_inference and is partly cut or cast: load it again"


@contextmanager
def poison_on_failure(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except BaseException:
        model.forward = _raise_poisoned
        raise


def check_not_poisoned(model: nn.Module) -> None:
    require(model.forward is not _raise_poisoned, f"init_inference: {POISONED_MESSAGE}")


def _raise_poisoned(*args: Any, **kwargs: Any) -> NoReturn:
    raise ConfigError(POISONED_MESSAGE)


def check_divisible(model: nn.Module, plan: TPPlan, tp: Group) -> None:
    """Raises ConfigError for a layer or attribute of the plan that has no equal parts."""
    for place in plan.tp_layers:
        inside, outside = in_out_features(model.get_submodule(place.path))
        width, side = (outside // place.num_fused, "output") if place.side == "column" else (inside, "input")
        require(outside % place.num_fused == 0, f"injection_policy: the {outside} output features of {place.path} are "
                f"not {place.num_fused} equal parts")
        require(width % tp.size == 0, f"{place.path} has {width} {side} features, which {tp.size} ranks cannot share "
                f"evenly: choose a tp_size that divides {width}")
    for number in plan.divided_attributes:
        owner, _, name = number.rpartition(".")
        value = getattr(model.get_submodule(owner), name)
        require(value % tp.size == 0, f"{number} is {value}, which {tp.size} ranks cannot share evenly: choose a "
                f"tp_size that divides {value}")


def unique_layers(model: nn.Module, plan: TPPlan) -> list[tuple[TPLayer, Any]]:
    """The layers of the plan; one that is in two places once, at the first."""
    found = dict[int, tuple[TPLayer, Any]]()
    for place in plan.tp_layers:
        layer = model.get_submodule(place.path)
        found.setdefault(id(layer), (place, layer))
    return [*found.values()]


@torch.no_grad()
def shard_module(model: nn.Module, plan: TPPlan, tp: Group) -> None:
    """In place. A layer that is in two places is sharded once."""
    made = dict[int, nn.Module]()  # by ids, so that full layers are freed: one that has another place is alive
    for place in plan.tp_layers:
        layer = model.get_submodule(place.path)
        if id(layer) not in made:
            made[id(layer)] = part = _shard_layer(layer, place, tp)
            made[id(part)] = part
        model.set_submodule(place.path, made[id(layer)])
    # an attribute of a module that is in two places is divided once
    owners = [(model.get_submodule(path), name) for path, _, name in (number.rpartition(".")
                                                                      for number in plan.divided_attributes)]
    for owner, name in {(id(owner), name): (owner, name) for owner, name in owners}.values():
        setattr(owner, name, getattr(owner, name) // tp.size)


def _shard_layer(layer: nn.Module, place: TPLayer, tp: Group) -> nn.Module:
    if isinstance(layer, nn.Embedding):
        table = nn.Embedding(layer.num_embeddings, layer.embedding_dim // tp.size, layer.padding_idx, device="meta")
        table.weight = _local_parameter(layer.weight, Partition(1, place.num_fused), tp)
        return table
    inside, outside = in_out_features(layer)
    weight, bias = cast(nn.Parameter, layer.weight), cast("nn.Parameter | None", layer.bias)
    made: ColumnParallelLinear | RowParallelLinear
    if place.side == "column":
        made = ColumnParallelLinear(inside, outside, bias is not None, gather_output=False, stride=place.num_fused,
                                    tp=tp, dtype=weight.dtype, device="meta")
    else:
        made = RowParallelLinear(inside, outside, bias is not None, input_is_parallel=True, tp=tp, dtype=weight.dtype,
                                 device="meta")
    partition = Partition(0 if place.side == "column" else 1, place.num_fused)
    made.weight = _local_parameter(weight.t() if is_conv1d(layer) else weight, partition, tp)
    if bias is not None:
        made.bias = _local_parameter(bias, partition if place.side == "column" else None, tp)
    return made.train(layer.training)


def _local_parameter(full: Tensor, partition: Partition | None, tp: Group) -> nn.Parameter:
    """This rank's part, copied so that the full tensor can be freed."""
    part = full if partition is None else local_slice(full, partition, tp.rank, tp.size)
    made = nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
    set_partition(made, partition)
    return made


# ---- int8 -----------------------------------------------------------------------------------------------------------

def linear_layers(model: nn.Module, plan: TPPlan) -> dict[str, Any]:
    """The linear layers of the plan, which become int8, each by one of its paths; ConfigError where there is none."""
    layers = {place.path: layer for place, layer in unique_layers(model, plan) if not isinstance(layer, nn.Embedding)}
    require(bool(layers), f"init_inference: which layers of a {type(model).__name__} are to be int8 is not known: give "
            "injection_policy={LayerClass: (names of its row-parallel layers,)}, or another dtype")
    return layers


def full_row_maxima(model: nn.Module, plan: TPPlan) -> dict[str, Tensor]:
    """Path -> the largest absolute value of each output row, in fp32, of layers that are not sharded yet. Raises
    CheckpointError for a layer that is not finite."""
    maxima = dict[str, Tensor]()
    for path, layer in linear_layers(model, plan).items():
        least, most = layer.weight.detach().aminmax(dim=0 if is_conv1d(layer) else 1)
        maxima[path] = torch.maximum(-least, most).float().cpu()
        scales_from_maxima(maxima[path], f"{path}.weight")
    return maxima


@torch.no_grad()
def quantize_layers(model: nn.Module, plan: TPPlan, maxima: Mapping[str, Tensor], world: Group,
                    activations: torch.dtype, device: torch.device) -> None:
    """Quantizes the layers of the plan, which are sharded by now, and casts and moves all else. Collective. `maxima`:
    of full rows."""
    def fill() -> None:
        def read_weight(start: int, out: Tensor) -> None:
            out.copy_(flat[start : start + len(out)])

        layers = linear_layers(model, plan)
        all_levels = allocate_levels({path: layer.weight.shape for path, layer in layers.items()}, device)
        made = dict[str, Int8]()
        for path, layer in layers.items():
            flat, levels = layer.weight.detach().contiguous().view(-1), all_levels[path]
            scale = quantise_into(levels, read_weight, f"{path}.weight",
                                  maxima[path] if isinstance(layer, RowParallelLinear) else None)
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # frees the original
            made[path] = Int8(levels, scale.to(levels.device, activations))
        model.to(device, activations)
        for path, weight in made.items():
            layers[path].weight = nn.Parameter(weight, requires_grad=False)

    all_succeed_or_raise(fill, world)


# ---- the checks -----------------------------------------------------------------------------------------------------

def assert_tensors_equal_across_ranks(tensors: Iterable[Tensor], tp: Group, what: str,
                                      remedy: str = "give the same to all") -> None:
    if tp.is_solo:
        return
    digest = hashlib.sha256()
    for one in tensors:
        flat = one.detach().flatten()[:4096].double()
        # weighted by position: the plain sum is the same in another order
        weighted = float(flat @ torch.arange(1.0, 1.0 + len(flat), dtype=flat.dtype, device=flat.device))
        total = float(one.detach().sum(dtype=torch.float64))
        digest.update(repr((tuple(one.shape), one.dtype, total, weighted)).encode())
    digests = all_gather_json(digest.hexdigest(), tp)
    other = next((rank for rank, one in enumerate(digests) if one != digests[0]), None)
    require(other is None, f"rank {other} of the tensor parallel group has other {what} than rank 0: {remedy}")


EXAMPLE_ROWS, EXAMPLE_LENGTH = 2, 8


def build_example(model: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Positional and keyword arguments of a forward; None where none were given and none can be made up."""
    given = getattr(model, "dummy_inputs", None) if given is None else given
    if given is not None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        given = map_tensors(given, lambda tensor: tensor.to(device))
        if isinstance(given, Mapping):
            return (), {**given}
        return tuple(given) if isinstance(given, tuple | list) else (given,), {}
    # for the first layer that reads: tokens for a table, numbers for a linear layer
    generator = torch.Generator().manual_seed(1234)  # the same on every rank
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            shape = EXAMPLE_ROWS, min(EXAMPLE_LENGTH, *tables)
            tokens = torch.randint(module.num_embeddings, shape, generator=generator)
            return (tokens.to(module.weight.device),), {}
        if is_linear(module):
            x = torch.randn(EXAMPLE_ROWS, EXAMPLE_LENGTH, in_out_features(module)[0], generator=generator)
            return (x.to(next(module.parameters())),), {}
    return None


# Allowed difference of an output, in units of eps times its largest number: the ranks sum in another order.
TOLERANCE_EPS = {torch.float32: 64, torch.float64: 64, torch.float16: 16, torch.bfloat16: 8}

POLICY_HELP = ("in injection_policy, row layers are those that read what column layers made; megatron.inference.Cut "
               "names both, fused outputs (q, k, v) and the counts of heads to divide (docs/inference.md)")
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class TPEquivalenceCheck:
    """Constructed with the full model; `check_sharded` compares the sharded one."""

    def __init__(self, model: nn.Module, plan: TPPlan, given: Any, tp: Group) -> None:
        self._plan, self._model, self._expected = plan, model, dict[str, list[Tensor]]()
        self._cut_by = f"cut by the policy for {', '.join(plan.class_names)},"
        inputs = "made-up inputs" if given is None else "example_inputs"
        example = build_example(model, given)
        problem = "its first layer takes neither tokens nor features"
        if example is not None:
            self._example = example
            assert_tensors_equal_across_ranks(iter_tensors(example), tp, "example_inputs")
            try:
                self._outputs = self._run(self._record)
                unused = [place.path for place, _ in unique_layers(model, plan)
                          if place.side == "row" and place.path not in self._expected]
                if not unused:
                    return
                problem = f"{unused[0]} is not used by {inputs}"
            except MODEL_ERRORS as error:
                problem = f"it fails on {inputs} ({_first_line(error)})"
        raise ConfigError(f"whether the cut model computes the same cannot be checked: {problem}; give init_inference "
                          "inputs that the model takes, example_inputs=(tensor, ...) or {name: tensor}")

    def check_sharded(self) -> None:
        """Raises ConfigError with the reason why the policy is wrong."""
        self._mismatch: str | None = None
        try:
            outputs = self._run(self._compare)
        except MODEL_ERRORS as error:
            if is_peer_loss(error):
                raise
            raise ConfigError(f"{self._cut_by} the model fails: {_first_line(error)}; {POLICY_HELP}") from error
        if self._mismatch is None and [one.shape for one in outputs] != [one.shape for one in self._outputs]:
            self._mismatch = "its outputs have other shapes"
        for one, whole in zip(outputs, self._outputs):
            if self._mismatch is None and (off := _difference(one, whole)) is not None:
                self._mismatch = f"its output differs from the whole model's by {off}"
        require(self._mismatch is None,
                f"{self._cut_by} the model computes something else: {self._mismatch}; {POLICY_HELP}")

    def _run(self, on_output: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
        """Outputs of the model in eval mode; `on_output` sees and may replace the output of each row layer."""
        modes = [(module, module.training) for module in self._model.modules()]
        handles = [map_module_outputs(layer, partial(on_output, place.path))
                   for place, layer in unique_layers(self._model, self._plan) if place.side == "row"]
        self._model.eval()
        try:
            args, kwargs = self._example
            with torch.no_grad():
                return list(iter_tensors(self._model(*args, **kwargs)))
        finally:
            for handle in handles:
                handle.remove()
            for module, mode in modes:  # from the outside in: each call changes what is inside as well
                module.train(mode)

    def _record(self, path: str, output: Tensor) -> Tensor:
        self._expected.setdefault(path, []).append(output.clone())
        return output

    def _compare(self, path: str, output: Tensor) -> Tensor:
        recorded = self._expected.get(path)
        if not recorded:
            self._mismatch = self._mismatch or f"{path} is used more often"
            return output
        whole = recorded.pop(0)
        if output.shape != whole.shape:
            raise ConfigError(f"{self._cut_by} {path} gives {list(output.shape)} numbers, and not "
                              f"{list(whole.shape)}; {POLICY_HELP}")
        if self._mismatch is None and (off := _difference(output, whole)) is not None:
            self._mismatch = f"the output of {path} differs from the whole model's by {off}"
        return whole


def _difference(one: Tensor, whole: Tensor) -> str | None:
    """A description of a difference beyond rounding, or None."""
    if not whole.is_floating_point():
        return None if torch.equal(one, whole) else "whole numbers"
    if not one.numel():
        return None
    most, scale = float((one - whole).abs().max()), float(whole.abs().max())
    allowed = TOLERANCE_EPS[whole.dtype] * torch.finfo(whole.dtype).eps * scale
    return None if most <= allowed else f"up to {most:.2g}, where its largest number is {scale:.2g}"  # NaN: neither


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:240]
