"""Ctrl-C at a line of a forward, a backward or a step, or in a load: what follows is right, or refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch

from megatron.errors import ConfigError
from megatron.zero.api import checkpoint_io
from megatron.zero.api.engine import Engine
from tests.megatron.helpers import ROOT
from tests.megatron.zero.small import backward, engine_of, train, whole

INTERRUPTED = tuple(str(ROOT / "megatron" / "zero" / f"{name}.py")
                    for name in ("engine", "pass_coordinator", "bucket", "gradients", "update", "step_result"))

Line = tuple[str, int]


class InterruptAt:
    """Raises KeyboardInterrupt at the first visit of a line; collects the lines it passes."""

    def __init__(self, line: Line | None) -> None:
        self.line, self.passed = line, dict[Line, None]()

    def __call__(self, frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename not in INTERRUPTED:
            return None
        if event == "line":
            here = frame.f_code.co_filename, frame.f_lineno
            self.passed[here] = None
            if here == self.line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


def interrupted_step(engine: Engine, number: int, at: InterruptAt) -> None:
    """A step; what the interruption has prevented is called again."""
    core = engine.core
    try:
        with at:
            train(engine, number)
    except KeyboardInterrupt:
        if not core.has_gradients and core.counters.global_steps < 2:
            backward(engine, number)
        if core.counters.global_steps < 2:
            engine.step()


OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("stage, section, every", [
    (3, OFFLOAD, 4), *(pytest.param(stage, section, 1, marks=pytest.mark.slow)
                       for stage, section in ((0, {}), (1, {}), (2, {}), (3, {}), (3, OFFLOAD)))])
def test_what_follows_ctrl_c_is_right_or_refused(stage: int, section: dict[str, Any], every: int) -> None:
    def new_engine() -> Engine:
        engine = engine_of(stage, precision="bf16", **section)
        train(engine, 1)
        return engine

    plain, seen = new_engine(), InterruptAt(None)
    interrupted_step(plain, 2, seen)
    train(plain, 3)
    for line in list(seen.passed)[::every]:
        engine = new_engine()
        try:
            interrupted_step(engine, 2, InterruptAt(line))
            train(engine, 3)
        except ConfigError as error:  # the weights may be half new
            assert "an earlier step ended half way" in str(error), (line, error)
        else:
            assert torch.equal(whole(engine), whole(plain)) and engine.global_steps == 3, line


@pytest.mark.parametrize("stage, precision, part, calls, error", [
    (0, "fp32", "_read_segment", 1, MemoryError), (3, "fp32", "_read_segment", 1, KeyboardInterrupt),
    (2, "bf16", "load_buffers", 0, KeyboardInterrupt), (2, "bf16", "restore_param_groups", 0, KeyboardInterrupt)])
def test_a_load_that_ended_half_way_leaves_an_engine_that_only_loads(
        stage: int, precision: str, part: str, calls: int, error: type[BaseException], tmp_path: Path) -> None:
    """The part of the load fails after so many calls."""
    engine = engine_of(stage, precision=precision)
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    before = whole(engine)
    backward(engine, 0)
    fails = Mock(wraps=getattr(checkpoint_io, part), side_effect=[*calls * [DEFAULT], error])
    with pytest.raises(error), patch.object(checkpoint_io, part, fails):
        engine.load_checkpoint(tmp_path)
    for go_on in (lambda: backward(engine, 0), engine.step, lambda: engine.save_checkpoint(tmp_path)):
        with pytest.raises(ConfigError, match="an earlier load ended half way"):
            go_on()
    engine.load_checkpoint(tmp_path)
    assert torch.equal(whole(engine), before)
    train(engine, 2)
    assert engine.global_steps == 2
