"""A recording: what a model does while it is switched on, in its tree of modules."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from megatron.profiler.calls import Calls
from megatron.profiler.clock import clock_of
from megatron.profiler.counting import Counting
from megatron.profiler.nodes import Node, tree_of, walk


class Recording:
    """It can be switched on several times, and adds up. Neither hooks nor attributes are put on the model."""

    def __init__(self, model: nn.Module, ignore: Sequence[type[nn.Module]] = ()) -> None:
        """What runs in modules of the classes `ignore`, and in modules inside them, is not counted."""
        self.root, self.outside = tree_of(model), Node("(outside of modules)", nn.Identity())
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.seconds: dict[str, float] = {}
        """Of the parts of a step."""
        kinds = tuple(ignore)
        self._ignored = {inner for node in walk(self.root) if isinstance(node.module, kinds) for inner in walk(node)}
        self._clock = clock_of(self.device)
        self._calls = Calls({node.module: node for node in walk(self.root)}, self.outside, self._clock)
        self._counting = Counting(self._credit)

    @property
    def unknown(self) -> dict[str, int]:
        """Operations that were not counted, though they may multiply, and how often they ran."""
        return dict(self._counting.unknown)

    @property
    def saw_backward(self) -> bool:
        return self._counting.saw_backward

    @property
    def can_end(self) -> bool:
        """Nothing that was switched on after it is on still."""
        return self._counting.is_innermost

    @contextmanager
    def on(self, part: str = "") -> Iterator[None]:
        """What happens inside is recorded; its time is that of a part of a step. Of what fails nothing is kept."""
        with self._kept_if_whole(), self.timed(part), as_written(), self._calls.watched(), self._counting:
            yield

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """What happens inside is a part of a step of which nothing is recorded but its time."""
        start = self._clock.mark()
        yield
        stop = self._clock.mark()
        self._clock.wait()
        self.seconds[part] = self.seconds.get(part, 0.0) + self._clock.seconds(start, stop)

    def settle(self) -> None:
        """Before what was recorded is read."""
        self._calls.settle()

    def forget(self) -> None:
        """Begin anew."""
        self._calls.settle()
        for node in self._nodes():
            node.forget()
        self._counting.forget()
        self.seconds.clear()

    @contextmanager
    def _kept_if_whole(self) -> Iterator[None]:
        counts = [(node, dict(node.macs), node.calls) for node in self._nodes()]
        timed, unknown, saw_backward = self._calls.timed, dict(self._counting.unknown), self.saw_backward
        try:
            yield
        except BaseException:
            for node, macs, calls in counts:
                node.macs, node.calls = macs, calls
            self._calls.drop_after(timed)
            self._counting.unknown, self._counting.saw_backward = Counter(unknown), saw_backward
            raise

    def _nodes(self) -> Iterator[Node]:
        yield from walk(self.root)
        yield self.outside

    def _credit(self, macs: int) -> None:
        node, phase = self._calls.place()
        if node not in self._ignored:
            node.macs[phase] += macs


@contextmanager
def as_written() -> Iterator[None]:
    """What torch.compile has compiled runs as it is written, and stays compiled for later. Torch's transformer takes no
    fast path, in which each of its layers is one operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _not_compiled():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _not_compiled() -> AbstractContextManager[object]:
    """Where torch.compile was never used there is nothing to say, and to say it would load the compiler."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
