"""Records FLOPs and time per module: a TorchDispatchMode counts every operation, global hooks track the running
module.

Nothing is put on the model. In a backward the autograd sequence number of a node finds the module whose forward
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from megatron.profiler.flop_formulas import DECOMPOSE, flop_formula, may_multiply
from megatron.profiler.module_tree import ModuleNode, RunPhase, build_module_tree, walk_nodes


class ProfilerClock(Protocol):
    def mark(self) -> Any:
        """The present moment."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two marks, once `wait` has returned."""

    def wait(self) -> None:
        """Until everything that was given to the device is done."""


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self) -> None:
        """The host computes while it is asked to."""


class DeviceClock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return float(start.elapsed_time(stop)) / 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)


def build_clock(device: torch.device) -> ProfilerClock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


_NO_BACKWARD = -1


def current_backward_id() -> int | None:
    """Its number."""
    number = torch._C._current_graph_task_id()
    return None if number == _NO_BACKWARD else number


def _is_checkpoint_recomputing() -> bool:
    """In a checkpoint of torch's: of the kind that saves its tensors anew, or of the one with a backward of its own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        return hooks[0].__qualname__.startswith("_recomputation_hook")
    node = torch._C._current_autograd_node()
    return torch.is_grad_enabled() and type(node).__name__ == "CheckpointFunctionBackward"


class _CallFrame(NamedTuple):
    """A call that has begun."""

    node: ModuleNode
    backward: int | None
    """The one it runs in."""
    start: Any


class ModuleCallTracker:
    """Of the modules of one tree; `outside` is the node of what runs in none of them."""

    def __init__(self, nodes: Mapping[nn.Module, ModuleNode], outside: ModuleNode, clock: ProfilerClock) -> None:
        self._nodes, self._outside, self._clock = nodes, outside, clock
        self._threads = threading.local()
        self._interval_starts: list[int] = []  # where an interval begins ...
        self._interval_owners: list[ModuleNode] = []  # ... and whose it is
        self._timed_calls: list[tuple[ModuleNode, Any, Any]] = []
        self._tracked_thread = 0  # the one that is watched

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Calls inside are noted: of this thread, and of those in which autograd makes a backward. What ends them by
        force leaves some that never returned."""
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
        """The calls under way in this thread."""
        frames: list[_CallFrame] = vars(self._threads).setdefault("frames", [])
        return frames

    def current_node(self) -> tuple[ModuleNode, RunPhase]:
        """Of the operation under way."""
        frames = self._frames
        frame = frames[-1] if frames else None
        backward = current_backward_id()
        if backward is None:
            return (self._outside if frame is None else frame.node), RunPhase.FORWARD
        if frame is not None and frame.backward == backward:
            return frame.node, RunPhase.RECOMPUTE
        return self._owner_of_autograd_node(), RunPhase.RECOMPUTE if _is_checkpoint_recomputing() else RunPhase.BACKWARD

    @property
    def num_timed_calls(self) -> int:
        """Calls whose time is not given to their nodes yet."""
        return len(self._timed_calls)

    def discard_calls_after(self, num_timed_calls: int) -> None:
        """The time of the later ones counts for nothing."""
        del self._timed_calls[num_timed_calls:]

    def assign_times(self) -> None:
        """Give each node the time of its calls, and begin anew."""
        self._clock.wait()
        for node, start, stop in self._timed_calls:
            node.seconds += self._clock.seconds(start, stop)
        self._timed_calls.clear()
        self._interval_starts.clear()
        self._interval_owners.clear()

    def _owner_of_autograd_node(self) -> ModuleNode:
        """The module that was running when the node of the backward under way was made."""
        node: Any = torch._C._current_autograd_node()
        interval = -1 if node is None else bisect_right(self._interval_starts, node._sequence_nr()) - 1
        return self._outside if interval < 0 else self._interval_owners[interval]

    def _enter(self, module: nn.Module, args: Any) -> None:
        node, backward = self._nodes.get(module), current_backward_id()
        if node is not None and (backward is not None or threading.get_ident() == self._tracked_thread):
            self._begin_interval(node)
            self._frames.append(_CallFrame(node, backward, self._clock.mark()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also when the forward has raised, as recomputation does once it has what it wants."""
        frames = self._frames
        if not frames or frames[-1].node is not self._nodes.get(module):
            return
        frame = frames.pop()
        if frame.backward is None:
            frame.node.calls += 1
            self._timed_calls.append((frame.node, frame.start, self._clock.mark()))
        self._begin_interval(frames[-1].node if frames else self._outside)

    def _begin_interval(self, owner: ModuleNode) -> None:
        if threading.get_ident() == self._tracked_thread:  # each thread numbers by itself
            self._interval_starts.append(torch.autograd._get_sequence_nr())
            self._interval_owners.append(owner)


class FlopCountingMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, add_macs: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add_macs = add_macs
        self.uncounted_ops: Counter[str] = Counter()
        """Operations that nobody has a formula for, and how often they ran."""
        self.saw_backward = False

    def reset(self) -> None:
        self.uncounted_ops.clear()
        self.saw_backward = False

    @property
    def is_innermost(self) -> bool:
        """Of the modes of this thread. Torch ends the innermost one, whichever is told to end."""
        return _get_current_dispatch_mode() is self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled while a `FlopRecorder` is active, and to keep the compiler from looking here would
        load it, and take longer than what is done here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if NestedTensor in types:
            return NotImplemented  # it says what it consists of, which then passes here
        given, formula = kwargs or {}, flop_formula(func)
        self.saw_backward = self.saw_backward or current_backward_id() is not None
        if formula is None or _are_nested(args):
            if may_multiply(func):
                self.uncounted_ops[str(func)] += 1
            return func(*args, **given)
        if formula is DECOMPOSE:
            with self:
                result = func.decompose(*args, **given)
            return func(*args, **given) if result is NotImplemented else result
        result = func(*args, **given)
        self._add_macs(formula(result, args, given))
        return result


def _are_nested(args: Any) -> bool:
    """Tensors of several lengths, which have kernels of their own and no shape to count by."""
    return any(isinstance(arg, Tensor) and arg.is_nested for arg in args)


class FlopRecording:
    """It can be switched on several times, and adds up. Neither hooks nor attributes are put on the model."""

    def __init__(self, model: nn.Module, ignore: Sequence[type[nn.Module]] = ()) -> None:
        """What runs in modules of the classes `ignore`, and in modules inside them, is not counted."""
        self.root, self.outside = build_module_tree(model), ModuleNode("(outside of modules)", nn.Identity())
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.seconds: dict[str, float] = {}
        """Of the parts of a step."""
        kinds = tuple(ignore)
        self._ignored = {inner for node in walk_nodes(self.root) if isinstance(node.module, kinds)
                         for inner in walk_nodes(node)}
        self._clock = build_clock(self.device)
        self._call_tracker = ModuleCallTracker({node.module: node
                                                for node in walk_nodes(self.root)}, self.outside, self._clock)
        self._counting_mode = FlopCountingMode(self._add_macs)

    @property
    def uncounted_ops(self) -> dict[str, int]:
        """Operations that were not counted, though they may multiply, and how often they ran."""
        return dict(self._counting_mode.uncounted_ops)

    @property
    def saw_backward(self) -> bool:
        return self._counting_mode.saw_backward

    @property
    def can_stop(self) -> bool:
        """Nothing that was switched on after it is on still."""
        return self._counting_mode.is_innermost

    @contextmanager
    def record(self, part: str = "") -> Iterator[None]:
        """What happens inside is recorded; its time is that of a part of a step. Of what fails nothing is kept."""
        with self._rolled_back_on_error(), self.record_time(part), run_uncompiled(), self._call_tracker.tracking(), \
                self._counting_mode:
            yield

    @contextmanager
    def record_time(self, part: str) -> Iterator[None]:
        """What happens inside is a part of a step of which nothing is recorded but its time."""
        start = self._clock.mark()
        yield
        stop = self._clock.mark()
        self._clock.wait()
        self.seconds[part] = self.seconds.get(part, 0.0) + self._clock.seconds(start, stop)

    def finish(self) -> None:
        """Before what was recorded is read."""
        self._call_tracker.assign_times()

    def reset(self) -> None:
        """Begin anew."""
        self._call_tracker.assign_times()
        for node in self._nodes():
            node.reset()
        self._counting_mode.reset()
        self.seconds.clear()

    @contextmanager
    def _rolled_back_on_error(self) -> Iterator[None]:
        counts = [(node, dict(node.macs), node.calls) for node in self._nodes()]
        num_timed_calls, uncounted_ops, saw_backward = (
            self._call_tracker.num_timed_calls, dict(self._counting_mode.uncounted_ops), self.saw_backward)
        try:
            yield
        except BaseException:
            for node, macs, calls in counts:
                node.macs, node.calls = macs, calls
            self._call_tracker.discard_calls_after(num_timed_calls)
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
    """What torch.compile has compiled runs as it is written, and stays compiled for later. Torch's transformer takes no
    fast path, in which each of its layers is one operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _force_eager():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _force_eager() -> AbstractContextManager[object]:
    """Where torch.compile was never used there is nothing to say, and to say it would load the compiler."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
