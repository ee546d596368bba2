"""Checks that all tensor parallel ranks got the same inputs, and that a sharded module computes what the full one did.

A wrong injection policy gives plausible garbage otherwise. The full module runs once on example inputs and the
output of every row-parallel layer is recorded. The sharded module runs on the same inputs; each row-parallel layer
returns the recorded output after the comparison, so rounding does not accumulate and the differing layer is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from megatron.config.schema import require
from megatron.distributed.exit_codes import is_peer_loss
from megatron.errors import ConfigError
from megatron.inference.api.policy import TPPlan, in_out_features, is_linear
from megatron.zero.hooks import iter_tensors
from mpu.collectives import all_gather_json
from mpu.groups import Group


def assert_weights_equal_across_ranks(model: nn.Module, tp: Group) -> None:
    _assert_equal_across_ranks(
        model.parameters(), tp, "the model of rank {} of the tensor parallel group has other weights than that of "
        "rank 0: load the same checkpoint on every rank, or set the same seed before the model is made")


def assert_tensors_equal_across_ranks(given: Iterable[Tensor], tp: Group, what: str) -> None:
    _assert_equal_across_ranks(
        given, tp, f"rank {{}} of the tensor parallel group was given other {what} than rank 0: give the same to all")


def _assert_equal_across_ranks(tensors: Iterable[Tensor], tp: Group, message: str) -> None:
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
    require(other is None, message.format(other))


EXAMPLE_ROWS, EXAMPLE_LENGTH = 2, 8


def build_example(model: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Positional and keyword arguments of a forward; None where none were given and none can be made up."""
    given = getattr(model, "dummy_inputs", None) if given is None else given
    if given is not None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

        def to_device(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        if isinstance(given, Mapping):
            return (), {name: to_device(value) for name, value in given.items()}
        return tuple(map(to_device, given if isinstance(given, (tuple, list)) else (given,))), {}
    # for the first layer that reads: tokens for a table, numbers for a linear layer
    generator = torch.Generator().manual_seed(1234)  # the same on every rank
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            shape = EXAMPLE_ROWS, min(EXAMPLE_LENGTH, *tables)
            tokens = torch.randint(module.num_embeddings, shape, generator=generator)
            return (tokens.to(module.weight.device),), {}
        if is_linear(module):
            weight = next(module.parameters())
            x = torch.randn(EXAMPLE_ROWS, EXAMPLE_LENGTH, in_out_features(module)[0], generator=generator)
            return (x.to(weight),), {}
    return None


TOLERANCE_EPS = {torch.float32: 64, torch.float64: 64, torch.float16: 16, torch.bfloat16: 8}
"""Allowed difference of an output, in units of eps times its largest number: the ranks sum in another order."""

POLICY_HELP = ("in injection_policy, row layers are those that read what column layers made; megatron.inference.Cut "
               "names both, fused outputs (q, k, v) and the counts of heads to divide (docs/inference.md)")
MODEL_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


@final
class TPEquivalenceCheck:
    """Constructed with the full model; `check_sharded` compares the sharded one."""

    def __init__(self, model: nn.Module, plan: TPPlan, given: Any, tp: Group) -> None:
        self._plan, self._model, self._expected = plan, model, dict[str, list[Tensor]]()
        self._cut_by = f"cut by the policy for {', '.join(dict.fromkeys(plan.layer_classes.values()))},"
        inputs = "made-up inputs" if given is None else "example_inputs"
        example = build_example(model, given)
        problem = "its first layer takes neither tokens nor features"
        if example is not None:
            self._example = example
            assert_tensors_equal_across_ranks(iter_tensors(example), tp, "example_inputs")
            try:
                self._outputs = self._run(self._record)
                unused = [path for path in self._row_layers() if path not in self._expected]
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
        def intercept(path: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *args, **kwargs: on_output(path, forward(*args, **kwargs))

        layers, modes = self._row_layers(), [(module, module.training) for module in self._model.modules()]
        own = {path: vars(layer)["forward"] for path, layer in layers.items() if "forward" in vars(layer)}
        self._model.eval()
        try:
            for path, layer in layers.items():
                layer.forward = intercept(path, layer.forward)
            args, kwargs = self._example
            with torch.no_grad():
                return list(iter_tensors(self._model(*args, **kwargs)))
        finally:
            for path, layer in layers.items():
                vars(layer).pop("forward", None)
                if path in own:  # not its class's: another library has put one around it
                    layer.forward = own[path]
            for module, mode in modes:  # from the outside in: each call changes what is inside as well
                module.train(mode)

    def _row_layers(self) -> dict[str, nn.Module]:
        """Path -> row layer; the first path of a layer that is in two places."""
        paths = [place.path for place in self._plan.tp_layers if place.side == "row"]
        layers = {path: self._model.get_submodule(path) for path in paths}
        first = {id(layer): path for path, layer in reversed(layers.items())}
        return {path: layer for path, layer in layers.items() if first[id(layer)] == path}

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
