"""Records FLOPs and time per module: a TorchDispatchMode counts operations, global hooks track the running module.

The model is not modified. In a backward the autograd sequence number of a node finds the module whose forward
made it; a module that runs inside a backward is recomputation. Compiled code runs uncompiled while a recording is
active.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from megatron.profiler.flop_formulas import DECOMPOSE, flop_formula, may_multiply
from megatron.profiler.module_tree import ModuleNode, RunPhase, build_module_tree, walk_nodes


class ProfilerClock:
    """Times of a GPU's stream, or of the host for models elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None

    def mark(self) -> Any:
        if self._gpu is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event

    def wait(self) -> None:
        """Until the GPU has passed all marks."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two marks; call `wait` first."""
        return float(stop - start if self._gpu is None else start.elapsed_time(stop) / 1e3)


_NO_BACKWARD = -1


def current_backward_id() -> int | None:
    number = torch._C._current_graph_task_id()
    return None if number == _NO_BACKWARD else number


def _is_checkpoint_recomputing() -> bool:
    """Inside a recomputation of torch.utils.checkpoint, non-reentrant or reentrant."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        return hooks[0].__qualname__.startswith("_recomputation_hook")
    node = torch._C._current_autograd_node()
    return torch.is_grad_enabled() and type(node).__name__ == "CheckpointFunctionBackward"


class _CallFrame(NamedTuple):
    """A running call of a module."""

    node: ModuleNode
    backward: int | None
    """Id of the backward that it runs in."""
    start: Any


class ModuleCallTracker:
    """Tracks the modules of one tree; `outside` is the node for operations outside of them."""

    def __init__(self, nodes: Mapping[nn.Module, ModuleNode], outside: ModuleNode, clock: ProfilerClock) -> None:
        self._nodes, self._outside, self._clock = nodes, outside, clock
        self._threads = threading.local()
        # autograd sequence numbers from _interval_starts[i] on belong to the module _interval_owners[i]
        self._interval_starts: list[int] = []
        self._interval_owners: list[ModuleNode] = []
        self.timed_calls: list[tuple[ModuleNode, Any, Any]] = []
        """(node, start, stop) of calls that `assign_times` has not handled yet."""
        self._tracked_thread = 0

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Track calls of this thread, and of autograd's threads."""
        self._tracked_thread = threading.get_ident()
        handles = (register_module_forward_pre_hook(self._enter),
                   register_module_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._threads = threading.local()

    @property
    def _frames(self) -> list[_CallFrame]:
        """The running calls of this thread."""
        frames: list[_CallFrame] = vars(self._threads).setdefault("frames", [])
        return frames

    def current_node(self) -> tuple[ModuleNode, RunPhase]:
        """The module and phase of the running operation."""
        frames = self._frames
        frame = frames[-1] if frames else None
        backward = current_backward_id()
        if backward is None:
            return (self._outside if frame is None else frame.node), RunPhase.FORWARD
        if frame is not None and frame.backward == backward:
            return frame.node, RunPhase.RECOMPUTE
        # a backward belongs to the module that was running when its autograd node was created
        node: Any = torch._C._current_autograd_node()
        interval = -1 if node is None else bisect_right(self._interval_starts, node._sequence_nr()) - 1
        owner = self._outside if interval < 0 else self._interval_owners[interval]
        return owner, RunPhase.RECOMPUTE if _is_checkpoint_recomputing() else RunPhase.BACKWARD

    def assign_times(self) -> None:
        """Add the time of each call to its node, and forget the calls."""
        self._clock.wait()
        for node, start, stop in self.timed_calls:
            node.seconds += self._clock.seconds(start, stop)
        self.timed_calls.clear()
        self._interval_starts.clear()
        self._interval_owners.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        node, backward = self._nodes.get(module), current_backward_id()
        if node is not None and (backward is not None or threading.get_ident() == self._tracked_thread):
            self._begin_interval(node)
            self._frames.append(_CallFrame(node, backward, self._clock.mark()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also after an exception, with which recomputation may stop early."""
        frames = self._frames
        if not frames or frames[-1].node is not self._nodes.get(module):
            return
        frame = frames.pop()
        if frame.backward is None:
            frame.node.calls += 1
            self.timed_calls.append((frame.node, frame.start, self._clock.mark()))
        self._begin_interval(frames[-1].node if frames else self._outside)

    def _begin_interval(self, owner: ModuleNode) -> None:
        if threading.get_ident() == self._tracked_thread:  # sequence numbers are per thread
            self._interval_starts.append(torch.autograd._get_sequence_nr())
            self._interval_owners.append(owner)


class FlopCountingMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, add_macs: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add_macs = add_macs
        self.uncounted_ops: Counter[str] = Counter()
        """Operations that may multiply but have no formula, and how often they ran."""
        self.saw_backward = False

    def reset(self) -> None:
        self.uncounted_ops.clear()
        self.saw_backward = False

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
        if formula is None or any(isinstance(arg, Tensor) and arg.is_nested for arg in args):
            if may_multiply(func):
                self.uncounted_ops[str(func)] += 1
            return func(*args, **named)
        if formula is DECOMPOSE:
            with self:
                result = func.decompose(*args, **named)
            return func(*args, **named) if result is NotImplemented else result
        result = func(*args, **named)
        self._add_macs(formula(result, args, named))
        return result


class FlopRecording:
    """Several recordings add up."""

    def __init__(self, model: nn.Module, ignore: Sequence[type[nn.Module]] = ()) -> None:
        """Operations in modules of the classes `ignore`, and in modules inside them, are not counted."""
        self.root, self.outside = build_module_tree(model), ModuleNode("(outside of modules)", nn.Identity())
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.seconds: dict[str, float] = {}
        """By part of a step."""
        nodes = list(walk_nodes(self.root))
        self._ignored = {inner for node in nodes if isinstance(node.module, tuple(ignore))
                         for inner in walk_nodes(node)}
        self._clock = ProfilerClock(self.device)
        self._call_tracker = ModuleCallTracker({node.module: node for node in nodes}, self.outside, self._clock)
        self._counting_mode = FlopCountingMode(self._add_macs)

    @property
    def uncounted_ops(self) -> dict[str, int]:
        return dict(self._counting_mode.uncounted_ops)

    @property
    def saw_backward(self) -> bool:
        return self._counting_mode.saw_backward

    @property
    def can_stop(self) -> bool:
        """Whether this is the innermost mode of the thread: torch always ends the innermost one."""
        return _get_current_dispatch_mode() is self._counting_mode

    @contextmanager
    def record(self, part: str = "") -> Iterator[None]:
        """Record everything inside, as a part of a step. After an exception the counts are as before."""
        with self._rolled_back_on_error(), self.record_time(part), run_uncompiled(), self._call_tracker.tracking(), \
                self._counting_mode:
            yield

    @contextmanager
    def record_time(self, part: str) -> Iterator[None]:
        """Record only the time of a part of a step."""
        start = self._clock.mark()
        yield
        stop = self._clock.mark()
        self._clock.wait()
        self.seconds[part] = self.seconds.get(part, 0.0) + self._clock.seconds(start, stop)

    def finish(self) -> None:
        """Call this before reading the results."""
        self._call_tracker.assign_times()

    def reset(self) -> None:
        self._call_tracker.assign_times()
        for node in self._nodes():
            node.reset()
        self._counting_mode.reset()
        self.seconds.clear()

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        counts = [(node, dict(node.macs), node.calls) for node in self._nodes()]
        num_timed_calls, uncounted_ops, saw_backward = (
            len(self._call_tracker.timed_calls), self.uncounted_ops, self.saw_backward)
        try:
            yield
        except BaseException:
            for node, macs, calls in counts:
                node.macs, node.calls = macs, calls
            del self._call_tracker.timed_calls[num_timed_calls:]
            self._counting_mode.uncounted_ops, self._counting_mode.saw_backward = Counter(uncounted_ops), saw_backward
            raise

    def _nodes(self) -> Iterator[ModuleNode]:
        yield from walk_nodes(self.root)
        yield self.outside

    def _add_macs(self, macs: int) -> None:
        node, phase = self._call_tracker.current_node()
        if node not in self._ignored:
            node.macs[phase] += macs


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
