"""Counts FLOPs and time per module: a TorchDispatchMode counts operations, global hooks track the running module.

Counted are multiply-accumulates (MACs) of matrix products, attention and convolutions; one MAC is two FLOPs. Causal
attention counts s (s + 1) / 2 scores, and its backward five products for the forward's two. The formulas are those of
torch's registry (torch.utils.flop_counter.register_flop_formula) and the ones of this file.

The model is not modified. In a backward the autograd sequence number of a node finds the module whose forward
made it (torch's ModuleTracker does not find it for modules whose input needs no gradient); a module that runs inside
a backward is recomputation. Compiled code runs uncompiled while a recording is active.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# ---- formulas ----------------------------------------------------------------------------------------------------

Formula = Callable[[Any, Sequence[Any], Mapping[str, Any]], int]  # (result, args, kwargs) -> multiply-accumulates


def _product(first: int, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """[..., m, k] x [..., k, n] or [k]; `first` is the index of the first factor in `args`."""
    a, b = args[first], args[first + 1]
    return int(a.numel() * (b.shape[-1] if b.dim() > 1 else 1))


def _convolution_backward(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """One product for the gradient of the image and one for the weight's, each like the forward. Torch's formula
    ignores groups."""
    grad_output, image, weight, transposed, output_mask = args[0], args[1], args[2], args[7], args[10]
    points = image if transposed else grad_output  # one filter application per element
    return int(sum(output_mask[:2])) * int(points.numel() * prod(weight.shape[1:]))


def _attention(func: Any, backward: bool, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """query [b, n, s, d], key [b, m, t, d], value [b, m, t, e]: q k^T and its product with v; backward, q k^T again and
    the gradients of q, k, the scores and v."""
    def argument(name: str) -> Any:
        index, default = _argument_positions(func)[name]
        return args[index] if index < len(args) else kwargs.get(name, default)

    query, key, value = argument("query"), argument("key"), argument("value")
    *heads, rows, width = query.shape
    scores = rows * key.shape[-2]
    if argument("is_causal"):  # row i has at most i + 1
        corner = min(rows, key.shape[-2])
        scores = corner * (corner + 1) // 2 + (rows - corner) * key.shape[-2]
    return int(prod(heads) * scores * (3 * width + 2 * value.shape[-1] if backward else width + value.shape[-1]))


@cache
def _argument_positions(func: Any) -> dict[str, tuple[int, Any]]:
    """Argument -> (index, default)."""
    arguments = enumerate(func._schema.arguments)
    return {item.name: (index, item.default_value if item.has_default_value() else None) for index, item in arguments}


# Products -> the argument index of the first factor.
_FIRST_FACTOR_INDEX = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "_int_mm": 0, "_scaled_mm": 0, "addmm": 1,
                       "baddbmm": 1, "addbmm": 1, "addmv": 1, "_addmm_activation": 1}

# Operations that torch's registry lacks, or counts differently.
_FORMULAS: dict[str, Formula] = {
    **{name: partial(_product, first) for name, first in _FIRST_FACTOR_INDEX.items()},
    "convolution_backward": _convolution_backward,
    # a product of both matrices, extended by two columns: ones and the squared norms of the rows
    "_euclidean_dist": lambda result, args, kwargs: int(result.numel() * (args[0].shape[-1] + 2))}
_SDPA_PREFIX = "_scaled_dot_product_"
_MULTIPLYING_NAMES = re.compile(
    "mm|matmul|linear|conv|attention|transformer_encoder|multi_head|rnn|lstm|gru|[cp]dist|dot|mv$|"
    "trilinear|sparse_mm|linalg|cholesky|solve|svd|geqrf|ormqr|_fft_[cr]2[cr]")
# Patterns in the names of torch operations that multiply matrices, and exceptions. Torch has no complete marking of
# element-wise operations, views and copies, so only names remain.
_NOT_MULTIPLYING_NAMES = re.compile(
    "gamma|cumm|dummy|hamming|upsample|powsum|vector_norm|cross|linalg_check|convert|reorder|"
    "mm_search|flatten")
_TORCH_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor")


@cache
def flop_formula(func: Any) -> Formula | None:
    space, name, packet = _names(func)
    if space == "aten" and name.removesuffix("_") in _FORMULAS:  # also in place
        return _FORMULAS[name.removesuffix("_")]
    if space == "aten" and name.startswith(_SDPA_PREFIX) and name != _SDPA_PREFIX + "attention_math":
        return partial(_attention, func, name.endswith("_backward"))
    formula = flop_registry.get(packet)
    return formula and (lambda result, args, kwargs: int(formula(*args, **kwargs, out_val=result)) // 2)


@cache
def is_composite(func: Any) -> bool:
    """Whether it consists of other operations; in inference mode it is dispatched undecomposed."""
    return (isinstance(func, torch._ops.OpOverload) and func.namespace != "prim"
            and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


@cache
def may_multiply(func: Any) -> bool:
    """Whether it may contain products: without a formula, the profile lists it as not counted."""
    space, name, _ = _names(func)
    return (flop_formula(func) is not None or space not in _TORCH_NAMESPACES
            or _MULTIPLYING_NAMES.search(name) is not None and _NOT_MULTIPLYING_NAMES.search(name) is None)


def _names(func: Any) -> tuple[str, str, Any]:
    """(namespace, name, key in torch's flop registry)."""
    if isinstance(func, torch._ops.OpOverload):
        packet = func.overloadpacket
        return func.namespace, packet.__name__, packet
    return "higher_order", str(func), func


# ---- recording ---------------------------------------------------------------------------------------------------


def current_backward_id() -> int | None:
    return None if (number := torch._C._current_graph_task_id()) == -1 else number


def _is_checkpoint_recomputing() -> bool:
    """Inside a recomputation of torch.utils.checkpoint, non-reentrant or reentrant."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        return hooks[0].__qualname__.startswith("_recomputation_hook")
    node = torch._C._current_autograd_node()
    return torch.is_grad_enabled() and type(node).__name__ == "CheckpointFunctionBackward"


class _CallFrame(NamedTuple):
    """A running call of a module."""

    path: str
    backward: int | None  # id of the backward that it runs in
    start: Any


class FlopRecording(TorchDispatchMode):
    """Counts and times of a model's modules by path, without those of modules inside them. Several recordings add up.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, ignore: Sequence[type[nn.Module]] = ()) -> None:
        """Operations in modules of the classes `ignore`, and in modules inside them, are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        # (path, or None outside of modules; forward, backward or recomputation) -> multiply-accumulates.
        self.macs: Counter[tuple[str | None, str]] = Counter()
        self.calls: Counter[str] = Counter()
        self.module_seconds: defaultdict[str, float] = defaultdict(float)
        self.part_seconds: defaultdict[str, float] = defaultdict(float)  # seconds by part of a step
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._paths = {module: path for path, module in model.named_modules()}  # a shared one has its first path
        self._ignored = {self._paths[inner] for module in model.modules() if isinstance(module, tuple(ignore))
                         for inner in module.modules()}
        # Operations that may multiply but have no formula, and how often they ran.
        self.uncounted_ops: Counter[str] = Counter()
        self.saw_backward = False
        self._threads = threading.local()
        self._tracked_thread = 0
        # autograd sequence numbers from _interval_starts[i] on belong to the module _interval_owners[i]
        self._interval_starts: list[int] = []
        self._interval_owners: list[str | None] = []
        # (path, start, stop) of calls that `assign_times` has not handled yet.
        self._timed_calls: list[tuple[str, Any, Any]] = []

    @contextmanager
    def record(self, part: str = "") -> Iterator[None]:
        """Record everything that this thread, and autograd's threads for it, run inside, as a part of a step."""
        self._tracked_thread = threading.get_ident()
        handles = (register_module_forward_pre_hook(self._enter),
                   register_module_forward_hook(self._leave, always_call=True))
        try:
            with self.record_time(part), run_uncompiled(), self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._threads = threading.local()

    @contextmanager
    def record_time(self, part: str) -> Iterator[None]:
        """Record only the time of a part of a step."""
        start = self._mark()
        yield
        self.part_seconds[part] += _seconds_between(start, self._mark())

    def assign_times(self) -> None:
        """Add the time of each call to its module; call this before reading the results."""
        for path, start, stop in self._timed_calls:
            self.module_seconds[path] += _seconds_between(start, stop)
        self._forget_calls()

    def reset(self) -> None:
        self._forget_calls()
        for results in (self.macs, self.calls, self.module_seconds, self.part_seconds, self.uncounted_ops):
            results.clear()
        self.saw_backward = False

    def _forget_calls(self) -> None:
        self._timed_calls.clear()
        self._interval_starts.clear()
        self._interval_owners.clear()

    @property
    def _frames(self) -> list[_CallFrame]:
        """The running calls of this thread."""
        frames: list[_CallFrame] = vars(self._threads).setdefault("frames", [])
        return frames

    def _enter(self, module: nn.Module, args: Any) -> None:
        path, backward = self._paths.get(module), current_backward_id()
        if path is not None and (backward is not None or threading.get_ident() == self._tracked_thread):
            self._begin_interval(path)
            self._frames.append(_CallFrame(path, backward, self._mark()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also after an exception, with which recomputation may stop early."""
        frames = self._frames
        if not frames or frames[-1].path != self._paths.get(module):
            return
        frame = frames.pop()
        if frame.backward is None:
            self.calls[frame.path] += 1
            self._timed_calls.append((frame.path, frame.start, self._mark()))
        self._begin_interval(frames[-1].path if frames else None)

    def _begin_interval(self, owner: str | None) -> None:
        if threading.get_ident() == self._tracked_thread:  # sequence numbers are per thread
            self._interval_starts.append(torch.autograd._get_sequence_nr())
            self._interval_owners.append(owner)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: compilation is off during a recording, and skipping would load the compiler, which is slow."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if NestedTensor in types:
            return NotImplemented  # its component operations are dispatched next
        named, formula = kwargs or {}, flop_formula(func)
        self.saw_backward = self.saw_backward or current_backward_id() is not None
        # nested tensors have their own kernels, and no shape to count by
        is_nested = any(isinstance(arg, Tensor) and arg.is_nested for arg in args)
        if formula is None and not is_nested and is_composite(func):
            with self:
                result = func.decompose(*args, **named)
            return func(*args, **named) if result is NotImplemented else result
        result = func(*args, **named)
        if formula is not None and not is_nested:
            self._add_macs(formula(result, args, named))
        elif may_multiply(func):
            self.uncounted_ops[str(func)] += 1
        return result

    def _add_macs(self, macs: int) -> None:
        """Add the count of the running operation to its module and phase."""
        frame, backward = next(reversed(self._frames), None), current_backward_id()
        path = None if frame is None else frame.path
        if backward is None:
            phase = "forward"
        elif frame is not None and frame.backward == backward:
            phase = "recomputation"
        else:  # a backward belongs to the module that was running when its autograd node was created
            node: Any = torch._C._current_autograd_node()
            interval = -1 if node is None else bisect_right(self._interval_starts, node._sequence_nr()) - 1
            path = None if interval < 0 else self._interval_owners[interval]
            phase = "recomputation" if _is_checkpoint_recomputing() else "backward"
        if path not in self._ignored:
            self.macs[path, phase] += macs

    def _mark(self) -> Any:
        """A point in time of the GPU's stream, or of the host for models elsewhere."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds_between(start: Any, stop: Any) -> float:
    if isinstance(start, float):
        return float(stop - start)
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Compiled code runs eagerly inside and stays compiled for later; torch's transformer does not take its fast path,
    in which a layer is one operation."""
    # set_stance would load the compiler if nothing is compiled
    is_compiler_loaded = "torch._dynamo" in sys.modules
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager") if is_compiler_loaded else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
