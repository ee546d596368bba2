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

from megatron.profiler.clock import Clock
from megatron.profiler.nodes import Node, Phase

_NO_BACKWARD = -1


def backward_under_way() -> int | None:
    """Its number."""
    number = torch._C._current_graph_task_id()
    return None if number == _NO_BACKWARD else number


def _checkpoint_runs_again() -> bool:
    """In a checkpoint of torch's: of the kind that saves its tensors anew, or of the one with a backward of its own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        return hooks[0].__qualname__.startswith("_recomputation_hook")
    node = torch._C._current_autograd_node()
    return torch.is_grad_enabled() and type(node).__name__ == "CheckpointFunctionBackward"


class _Frame(NamedTuple):
    """A call that has begun."""

    node: Node
    backward: int | None
    """The one it runs in."""
    start: Any


class Calls:
    """Of the modules of one tree; `outside` is the node of what runs in none of them."""

    def __init__(self, nodes: Mapping[nn.Module, Node], outside: Node, clock: Clock) -> None:
        self._nodes, self._outside, self._clock = nodes, outside, clock
        self._threads = threading.local()
        self._numbers: list[int] = []  # where an interval begins ...
        self._owners: list[Node] = []  # ... and whose it is
        self._spans: list[tuple[Node, Any, Any]] = []
        self._thread = 0  # the one that is watched

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Calls inside are noted: of this thread, and of those in which autograd makes a backward. What ends them by
        force leaves some that never returned."""
        self._thread = threading.get_ident()
        handles = (register_module_forward_pre_hook(self._enter),
                   register_module_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._threads = threading.local()

    @property
    def _frames(self) -> list[_Frame]:
        """The calls under way in this thread."""
        frames: list[_Frame] = vars(self._threads).setdefault("frames", [])
        return frames

    def place(self) -> tuple[Node, Phase]:
        """Of the operation under way."""
        frames = self._frames
        frame = frames[-1] if frames else None
        backward = backward_under_way()
        if backward is None:
            return (self._outside if frame is None else frame.node), Phase.FORWARD
        if frame is not None and frame.backward == backward:
            return frame.node, Phase.AGAIN
        return self._maker_of_node(), Phase.AGAIN if _checkpoint_runs_again() else Phase.BACKWARD

    @property
    def timed(self) -> int:
        """Calls whose time is not given to their nodes yet."""
        return len(self._spans)

    def drop_after(self, timed: int) -> None:
        """The time of the later ones counts for nothing."""
        del self._spans[timed:]

    def settle(self) -> None:
        """Give each node the time of its calls, and begin anew."""
        self._clock.wait()
        for node, start, stop in self._spans:
            node.seconds += self._clock.seconds(start, stop)
        self._spans.clear()
        self._numbers.clear()
        self._owners.clear()

    def _maker_of_node(self) -> Node:
        """The module that was running when the node of the backward under way was made."""
        node: Any = torch._C._current_autograd_node()
        interval = -1 if node is None else bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._outside if interval < 0 else self._owners[interval]

    def _enter(self, module: nn.Module, args: Any) -> None:
        node, backward = self._nodes.get(module), backward_under_way()
        if node is not None and (backward is not None or threading.get_ident() == self._thread):
            self._begin_interval(node)
            self._frames.append(_Frame(node, backward, self._clock.mark()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also when the forward has raised, as recomputation does once it has what it wants."""
        frames = self._frames
        if not frames or frames[-1].node is not self._nodes.get(module):
            return
        frame = frames.pop()
        if frame.backward is None:
            frame.node.calls += 1
            self._spans.append((frame.node, frame.start, self._clock.mark()))
        self._begin_interval(frames[-1].node if frames else self._outside)

    def _begin_interval(self, owner: Node) -> None:
        if threading.get_ident() == self._thread:  # each thread numbers by itself
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._owners.append(owner)
