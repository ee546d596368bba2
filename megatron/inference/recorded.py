"""A decoder's step on an accelerator: recorded once for each size, then replayed.

A step for a few rows is hundreds of small operations, which a host cannot start as fast as the device ends them. A
recording (a CUDA graph) is started at once, but its sizes are fixed: so there is one for 1, 2, 4, ... rows and for
128, 256, 512, ... positions, each made when it is first needed. Rows and positions beyond what is asked for are masked;
what a row that holds no text gets is never read. A recording holds on to the tensors of the step and not to
who made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

Run = Callable[[], Tensor]
Step = Callable[[Tensor, Tensor, int], Tensor]
"""[b] tokens, [b] places, positions to attend to -> [b, V]"""

Record = Callable[[Run], Run]
"""What runs, on the same tensors each time -> what does it again."""

FEWEST_POSITIONS = 128


@dataclass(frozen=True)
class _Recording:
    inputs: Tensor
    """[2, b]: tokens and their places."""
    run: Run


@final
class Recorded:
    def __init__(self, rows: int, length: int, device: torch.device, record: Record | None = None) -> None:
        self._rows, self._length, self._device = rows, length, device
        self._record = record or (Graphs() if device.type == "cuda" else None)
        self._recordings: dict[tuple[int, int], _Recording] = {}

    def __call__(self, step: Step, tokens: Sequence[int], places: Sequence[int]) -> Tensor:
        """The same as the step, which is the same each time; the result is good until the next one."""
        rows = min(self._rows, power_of_two(len(tokens)))
        positions = min(self._length, max(FEWEST_POSITIONS, power_of_two(max(places) + 1)))
        inputs = torch.zeros(2, rows, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        inputs[:, : len(tokens)] = torch.tensor([tokens, places])
        if self._record is None:
            return step(inputs[0], inputs[1], positions)[: len(tokens)]
        found = self._recordings.get((rows, positions))
        if found is None:  # recording may run the step: with these inputs running it twice changes nothing
            example = inputs.to(self._device, copy=True)
            found = _Recording(example, self._record(lambda: step(example[0], example[1], positions)))
            self._recordings[rows, positions] = found
        found.inputs.copy_(inputs, non_blocking=True)
        return found.run()[: len(tokens)]


def power_of_two(number: int) -> int:
    """The next, or itself."""
    return 1 << (number - 1).bit_length()


@final
class Graphs:
    """CUDA graphs that share their memory: one runs at a time, and what it made is used before the next."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside a recording
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            made = run()
        self._pool = graph.pool()

        def again() -> Tensor:
            graph.replay()
            return made
        return again
