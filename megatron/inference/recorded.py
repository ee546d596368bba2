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

ReplayFn = Callable[[], Tensor]
DecodeFnOfSize = Callable[[Tensor, Tensor, int], Tensor]
"""[b] tokens, [b] places, positions to attend to -> [b, V]"""

CaptureFn = Callable[[ReplayFn], ReplayFn]
"""What runs, on the same tensors each time -> what does it again."""

MIN_GRAPH_POSITIONS = 128


@dataclass(frozen=True)
class _CapturedGraph:
    inputs: Tensor
    """[2, b]: tokens and their places."""
    replay: ReplayFn


@final
class CudaGraphRunner:
    def __init__(self, rows: int, length: int, device: torch.device, capture: CaptureFn | None = None) -> None:
        self._rows, self._length, self._device = rows, length, device
        self._capture = capture or (CudaGraphCapture() if device.type == "cuda" else None)
        self._graphs: dict[tuple[int, int], _CapturedGraph] = {}

    def __call__(self, step: DecodeFnOfSize, tokens: Sequence[int], position_ids: Sequence[int]) -> Tensor:
        """The same as the step, which is the same each time; the result is good until the next one."""
        rows = min(self._rows, next_power_of_two(len(tokens)))
        positions = min(self._length, max(MIN_GRAPH_POSITIONS, next_power_of_two(max(position_ids) + 1)))
        inputs = torch.zeros(2, rows, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        inputs[:, : len(tokens)] = torch.tensor([tokens, position_ids])
        if self._capture is None:
            return step(inputs[0], inputs[1], positions)[: len(tokens)]
        found = self._graphs.get((rows, positions))
        if found is None:  # recording may run the step: with these inputs running it twice changes nothing
            example = inputs.to(self._device, copy=True)
            found = _CapturedGraph(example, self._capture(lambda: step(example[0], example[1], positions)))
            self._graphs[rows, positions] = found
        found.inputs.copy_(inputs, non_blocking=True)
        return found.replay()[: len(tokens)]


def next_power_of_two(number: int) -> int:
    """The next, or itself."""
    return 1 << (number - 1).bit_length()


@final
class CudaGraphCapture:
    """CUDA graphs that share their memory: one runs at a time, and what it made is used before the next."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: ReplayFn) -> ReplayFn:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up outside a recording
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            made = run()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return made
        return replay
