"""A recording: what a model does while it is switched on, in its tree of modules."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from megatron.profiler.calls import ModuleCallTracker
from megatron.profiler.clock import build_clock
from megatron.profiler.counting import FlopCountingMode
from megatron.profiler.nodes import ModuleNode, build_module_tree, walk_nodes


class FlopRecording:
    """It can be switched on several times, and adds up. Neither hooks nor attributes are put on the model."""

    def __init__(self, model: nn.Module, ignore: Sequence[type[nn.Module]] = ()) -> None:
        """What runs in modules of the classes `ignore`, and in modules inside them, is not counted."""
        self.root, self.outside = build_module_tree(model), ModuleNode("(outside of modules)", nn.Identity())
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.seconds: dict[str, float] = {}
        """Of the parts of a step."""
        kinds = tuple(ignore)
        self._ignored = {
            inner
            for node in walk_nodes(self.root) if isinstance(node.module, kinds) for inner in walk_nodes(node)
        }
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
        with self._rolled_back_on_error(), self.record_time(
                part), run_uncompiled(), self._call_tracker.tracking(), self._counting_mode:
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
        num_timed_calls, uncounted_ops, saw_backward = self._call_tracker.num_timed_calls, dict(
            self._counting_mode.uncounted_ops), self.saw_backward
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
