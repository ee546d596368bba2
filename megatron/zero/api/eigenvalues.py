"""Eigenvalues for quantisation in training: when a bit is about to fall, of every block, with the last batch of a step.

The forward of the last micro-batch is run again, with the same random numbers, so it has to return the loss. It is run
on every rank: each has its own micro-batch, and gradients are those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron.config.quantize import QuantizeConfig
from megatron.errors import ConfigError
from megatron.zero.curvature import HessianEigensolver
from megatron.zero.engine import ZeroEngine
from megatron.zero.quantise import MoQState
from mpu.random import capture_rng, restore_rng


class EigenvalueEstimator:
    def __init__(self, core: ZeroEngine, config: QuantizeConfig, quantisation: MoQState) -> None:
        self._core, self._quantisation = core, quantisation
        self._curvature = HessianEigensolver(core.buckets, core.groups, max_iter=config.eigenvalue_max_iter,
                                             tol=config.eigenvalue_tol, stability=config.eigenvalue_stability)
        self._last_forward: tuple[Sequence[Any], Mapping[str, Any], dict[str, object]] | None = None

    def record_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward of training begins, with these."""
        self._last_forward = (args, kwargs, capture_rng()) if self._quantisation.bits_may_fall_soon else None

    def after_step(self) -> None:
        """Find them, if they will be wanted by the next step. Collective."""
        if self._last_forward is None or not self._quantisation.bits_fall_next_step(self._core.applied_steps):
            return
        core, (args, kwargs, streams) = self._core, self._last_forward
        core.finish_step()
        now = capture_rng()
        try:
            with core.backwards_without_step() as begin_anew:
                def run() -> None:
                    begin_anew()
                    restore_rng(streams)
                    core.backward(_recompute_loss(core.module, args, kwargs) * core.accumulation_steps)

                self._quantisation.set_eigenvalues([
                    self._curvature.eigenvalue(block, f"{block} {self._quantisation.counter}", run)
                    for block in self._quantisation.blocks[1:]])
        finally:
            restore_rng(now)
        self._last_forward = None


def _recompute_loss(module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    loss = module(*args, **kwargs)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError("--quantize-eigenvalue: the forward of the model returns something else than its loss, which "
                          "is run again to find eigenvalues: let it return the loss, or leave the setting out")
    return loss
