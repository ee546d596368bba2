"""The section `quantize`: quantisation in training, MoQ (megatron/quantize.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.kinds import one_of
from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, setting
from megatron.quantize import MIN_UNIFORM_BITS, BitSchedule

_QUANTIZE_TRAINING = "quantize_training."
_COMPRESSION = "compression_training.weight_quantization.shared_parameters."
MAX_BITS = 16
"""Bits of the weights at work where they are not quantised, as far as this method goes."""


def _quantize_keys(path: str, *others: str) -> tuple[JsonKey, ...]:
    return tuple(JsonKey(one) for one in (_QUANTIZE_TRAINING + path, *others))


def _eigenvalue_keys(name: str) -> tuple[JsonKey, ...]:
    return JsonKey(f"eigenvalue.{name}"), JsonKey(f"{_QUANTIZE_TRAINING}eigenvalue.{name}")


def _algorithm_keys(name: str, shared: str, *words: str) -> tuple[JsonKey, ...]:
    """A choice as the documentation spells its section, as the code did, and of the section that came after it."""
    paths = (f"{_QUANTIZE_TRAINING}quantize_algo.{name}", f"{_QUANTIZE_TRAINING}quantize-algo.{name}",
             _COMPRESSION + shared)
    return tuple(JsonKey(path, one_of(*words)) for path in paths)


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Quantisation in training (MoQ): the weights at work are rounded to fewer and fewer bits, their fp32 masters are
    not (docs/methods.md)."""

    quantize_training: bool = setting(False, "round the weights at work to fewer and fewer bits",
                                      json=_quantize_keys("enabled", _COMPRESSION + "enabled"))
    quantize_start_bits: int = setting(MAX_BITS, "bits that a weight begins with",
                                       json=_quantize_keys("quantize_bits.start_bits"))
    quantize_target_bits: int = setting(8, "bits that it ends with: 3 to 16, 2 is ternary, 1 is binary",
                                        json=_quantize_keys("quantize_bits.target_bits"))
    quantize_period: int = setting(
        1000, "applied steps until the first bit falls; the others fall after 2, 4, 8, ... times as many",
        json=_quantize_keys("quantize_schedule.quantize_period"))
    quantize_offset: int = setting(1000,
                                   "applied steps before the first weight is rounded",
                                   json=_quantize_keys("quantize_schedule.schedule_offset",
                                                       _COMPRESSION + "schedule_offset"))
    quantize_groups: int = setting(1, "groups of rows of each matrix, which are scaled each by itself",
                                   json=_quantize_keys("quantize_groups", _COMPRESSION + "quantize_groups"))
    quantize_type: Literal["symmetric", "asymmetric"] = setting(
        "symmetric",
        "whether a grid lies around 0, or between the smallest and the largest weight",
        json=(*_algorithm_keys("q_type", "quantization_type", "symmetric", "asymmetric"),
              JsonKey(_QUANTIZE_TRAINING + "quantize_type")))
    quantize_rounding: Literal["nearest", "stochastic"] = setting(
        "nearest", "how weights are rounded", json=_algorithm_keys("rounding", "rounding", "nearest", "stochastic"))
    quantize_mixed: bool = setting(
        False, "when a bit falls, go over to rounded weights little by little",
        json=_quantize_keys("fp16_mixed_quantize.enabled", _COMPRESSION + "fp16_mixed_quantize.enabled"))
    quantize_change_ratio: float = setting(0.001,
                                           "with --quantize-mixed: the share of rounded weights that a step adds",
                                           json=_quantize_keys(
                                               "fp16_mixed_quantize.quantize_change_ratio",
                                               _COMPRESSION + "fp16_mixed_quantize.quantize_change_ratio"))
    quantize_verbose: bool = setting(False, "print a line whenever a bit falls",
                                     json=_quantize_keys("quantize_verbose", _COMPRESSION + "quantize_verbose"))

    quantize_eigenvalue: bool = setting(
        False, "keep the bits of blocks longer in which the loss is steeper: the largest eigenvalue of each is looked "
        "for before a bit falls", json=_eigenvalue_keys("enabled"))
    eigenvalue_max_iter: int = setting(100, "steps of the search for an eigenvalue, at most",
                                       json=_eigenvalue_keys("max_iter"))
    eigenvalue_tol: float = setting(1e-2, "an eigenvalue that changes by less in a step is found",
                                    json=_eigenvalue_keys("tol"))
    eigenvalue_stability: float = setting(1e-6, "what is added to the length that directions are divided by",
                                          json=_eigenvalue_keys("stability"))
    eigenvalue_layer_name: str | None = setting(
        None, "the list of modules that are the blocks (default: the outermost)", json=_eigenvalue_keys("layer_name"))
    eigenvalue_layer_num: int = setting(0, "how many blocks there have to be; 0: as many as there are",
                                        json=_eigenvalue_keys("layer_num"))
    eigenvalue_verbose: bool = setting(False, "print the eigenvalues", json=_eigenvalue_keys("verbose"))

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "eigenvalue_max_iter", 1)
        problems.require_range(self, "eigenvalue_layer_num eigenvalue_stability", 0)
        problems.require_range(self, "eigenvalue_tol", 0, open_low=True)
        problems.require(not self.quantize_eigenvalue or self.quantize_training,
                         "--quantize-eigenvalue needs --quantize-training: it only says when bits fall")
        problems.require(not self.quantize_eigenvalue or self.quantize_period > 1,
                         "--quantize-eigenvalue needs --quantize-period of at least 2, not 1: an eigenvalue is found "
                         "with a batch of the step before a bit falls")
        problems.require_range(self, "quantize_start_bits quantize_target_bits", 1, MAX_BITS)
        problems.require_range(self, "quantize_period quantize_groups", 1)
        problems.require_range(self, "quantize_offset", 0)
        problems.require_range(self, "quantize_change_ratio", 0, 1, open_low=True)
        problems.require(self.quantize_target_bits <= self.quantize_start_bits,
                         f"--quantize-target-bits {self.quantize_target_bits} is above --quantize-start-bits "
                         f"{self.quantize_start_bits}: bits only fall")
        few = self.quantize_training and self.quantize_target_bits < MIN_UNIFORM_BITS
        for name, value, plain in (("type", self.quantize_type, "symmetric"),
                                   ("rounding", self.quantize_rounding, "nearest")):
            problems.require(
                not few or value == plain,
                f"--quantize-{name} {value} needs --quantize-target-bits of at least {MIN_UNIFORM_BITS}, not "
                f"{self.quantize_target_bits}: ternary and binary weights are symmetric and nearest")
        problems.raise_if_any()

    @property
    def schedule(self) -> BitSchedule | None:
        """How bits fall; None where weights are not quantised."""
        if not self.quantize_training:
            return None
        return BitSchedule(self.quantize_start_bits, self.quantize_target_bits, self.quantize_period,
                           self.quantize_change_ratio if self.quantize_mixed else None)

    def notes(self, train_iters: int | None = None) -> list[str]:
        """At which steps the bits fall, and whether the run is long enough for that."""
        schedule = self.schedule
        if schedule is None:
            return []
        start, target, begin = schedule.start, schedule.target, self.quantize_offset
        if train_iters is not None and train_iters < begin:
            return [f" note: nothing is rounded: --train-iters {train_iters} is below --quantize-offset {begin}"]
        since = f" from applied step {begin} on" if begin else ""
        falls = [begin + fall for fall in schedule.drop_counters()]
        if not falls:
            return [f" note: weights are rounded to {target} bits{since}"]
        if self.quantize_eigenvalue:
            lines = [f" note: weights are rounded to {start} bits{since}, and to fewer until they have {target}: at "
                     f"applied step {falls[0]} for the first time, then when eigenvalues say so"]
            if train_iters is not None and falls[0] > train_iters:
                lines.append(f" note: --train-iters {train_iters} ends the run at {start} bits, before an "
                             "eigenvalue is looked for")
            return lines
        when = ", ".join(map(str, falls))
        fewer = ", ".join(map(str, range(start - 1, target - 1, -1)))
        lines = [f" note: weights are rounded to {start} bits{since}, and to {fewer} bits at applied "
                 f"step{'s' * (len(falls) > 1)} {when}"]
        if train_iters is not None and falls[-1] > train_iters:
            reached = start - sum(fall <= train_iters for fall in falls)
            lines.append(f" note: --train-iters {train_iters} ends the run at {reached} bits: a period P takes "
                         f"2^{len(falls) - 1} P applied steps from {start} to {target} bits")
        return lines
