"""Which module is running, and which one a gradient belongs to.

Torch tells of every call of every module by two hooks that are not a module's own, so nothing is put on the model and
nothing is left on it. During a backward no module is called; there the *sequence number* helps that autograd gives each
of its nodes as the forward makes them: numbers grow, so the calls of a forward cut them into intervals, and the
interval in which a node of the backward under way lies names its module.

A module that is called during a backward runs again: recomputation. So does what a checkpoint of torch's runs there. A
backward that runs with gradients switched on, to be differentiated itself, is none.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megatron.profiler.clock import ProfilerClock
from megatron.profiler.nodes import ModuleNode, RunPhase

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
