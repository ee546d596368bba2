"""The section `precision`: the working precision, loss scaling, and the precision of communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.kinds import EXPONENT, NUMBER_FROM_0, one_of
from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, require, setting


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The working precision of weights and activations. Master weights and moments are always fp32."""

    fp16: bool = setting(False, "train in fp16 with loss scaling", json="fp16.enabled", in_short_help=True)
    bf16: bool = setting(False, "train in bf16", json="bf16.enabled", in_short_help=True)
    loss_scale: float | None = setting(
        None, "fp16: fixed loss scale (default: dynamic)",
        json=JsonKey("fp16.loss_scale", NUMBER_FROM_0, lambda scale: scale or None, help="0 is dynamic"))
    initial_loss_scale: float = setting(
        2.0**16, "fp16: first dynamic loss scale",
        json=JsonKey("fp16.initial_scale_power", EXPONENT, lambda power: 2.0**power, default="16",
                     help="as the exponent of 2"))
    loss_scale_window: int = setting(1000, "fp16: steps without overflow before the scale doubles", json="fp16.")
    hysteresis: int = setting(2, "fp16: overflows before the scale halves", json="fp16.")
    min_scale: float = setting(1.0, "fp16: smallest loss scale; an overflow at this scale ends the run",
                               json="fp16.min_loss_scale")
    max_skipped_in_a_row: int | None = setting(
        None, "bf16, fp32: steps in a row that may be skipped for a gradient that is not finite before the run ends "
        "(default: none of the first 10 steps, then 3); without effect in fp16, where the loss scale decides")
    auto_cast: bool = setting(
        False, "fp16, in zero.initialize: cast floating point inputs of the engine's forward", json="fp16.")
    matmul_precision: Literal["highest", "high", "medium"] | None = setting(
        None, "products of fp32 matrices: highest is fp32, high TF32, medium bf16, where the device has them (default: "
              "high on a GPU, highest on a CPU)")
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = setting(
        None, "precision in which gradients are sent between ranks (default: that in which they are accumulated)",
        json=JsonKey("communication_data_type", one_of("fp32", "fp16", "bf16"), nullable=True,
                     refused={"fp8": "gradients are sent in 16 or 32 bits; use fp32, fp16 or bf16"}))
    fp32_allreduce: bool = setting(False, "the old name of --communication-data-type fp32")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "loss_scale initial_loss_scale min_scale", 0, 2.0**64, open_low=True)
        problems.require_range(self, "loss_scale_window hysteresis", 1)
        problems.require_range(self, "max_skipped_in_a_row", 0)
        problems.raise_if_any()
        require(
            not (self.fp16 and self.bf16), "--fp16 and --bf16 exclude each other: give one (--no-bf16 takes one back)"
        )
        require(
            self.loss_scale is None or self.fp16,
            f"--loss-scale {self.loss_scale} needs --fp16: other precisions are not scaled",
        )
        require(not self.fp32_allreduce or self.communication_data_type in (None, "fp32"),
                f"--fp32-allreduce and --communication-data-type {self.communication_data_type} contradict each other: "
                "give one of them")
        require(self.fp16 or not self.auto_cast, "--auto-cast needs --fp16: it casts inputs to fp16")
        require(self.min_scale <= self.initial_loss_scale,
                f"--min-scale {self.min_scale:g} is above --initial-loss-scale {self.initial_loss_scale:g}")

    @property
    def communication(self) -> Literal["fp32", "fp16", "bf16"] | None:
        """The precision that gradients are sent in; None: as they are accumulated."""
        return "fp32" if self.fp32_allreduce else self.communication_data_type

    @property
    def name(self) -> Literal["fp32", "fp16", "bf16"]:
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"
