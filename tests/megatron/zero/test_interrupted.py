"""Ctrl-C at any line of what makes parameters come and go: after a load training is as if nothing had been."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from megatron.zero import partitioned_param
from megatron.zero.api.engine import Engine
from megatron.zero.bucket import FlatBucket
from megatron.zero.partitioned_param import InPlaceWriteGuard, Placeholder
from mpu import groups
from tests.megatron.zero.models import WIDTH, Net
from tests.megatron.zero.run import configure, engine_around, weights

COME = (FlatBucket.gather, FlatBucket.start_gather, FlatBucket._launch_gather, FlatBucket.wait_for_param_gather)
GO = (FlatBucket.reshard, FlatBucket._free_gathered_params, partitioned_param.replace_by_placeholder,
      partitioned_param.set_param_data, InPlaceWriteGuard.shift_versions, partitioned_param.shift_version_counters)

Line = tuple[CodeType, int]


@contextmanager
def at_lines(functions: tuple[Any, ...], do: Callable[[Line], None]) -> Iterator[None]:
    """Inside, `do` is called before each line of these functions."""
    codes, before = {function.__code__ for function in functions}, sys.gettrace()

    def within(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            do((frame.f_code, frame.f_lineno))
        return within

    sys.settrace(lambda frame, event, argument: within if frame.f_code in codes else None)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def interrupted(functions: tuple[Any, ...], line: Line, which: int) -> Iterator[None]:
    """Inside, Ctrl-C comes before this line of these functions for the `which`th time, and ends what is inside."""
    left = [which]

    def interrupt(here: Line) -> None:
        left[0] -= here == line
        if here == line and left[0] == 0:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), at_lines(functions, interrupt):
        yield


def train(engine: Engine, steps: int) -> list[float]:
    seen = []
    for number in range(steps):
        loss = engine(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(engine.working_dtype))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("functions", [COME, GO], ids=["come", "go"])
def test_a_load_makes_good_an_interruption_at_any_line(tmp_path: Path, functions: tuple[Any, ...]) -> None:
    engine = engine_around(Net(), configure(zero_stage=3, bf16=True), groups.build(1))
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    lines: dict[Line, int] = {}
    with at_lines(functions, lambda line: lines.update({line: lines.get(line, 0) + 1})):
        losses = train(engine, 2)
    expected = weights(engine)
    assert len(lines) > 10
    for line, times in lines.items():
        for which in {1, times // 2 + 1}:
            with interrupted(functions, line, which):
                train(engine, 2)
            engine.load_checkpoint(tmp_path)
            assert train(engine, 2) == losses, line
            assert all(isinstance(parameter, Placeholder) for parameter in engine.module.parameters()), line
            assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items()), line
