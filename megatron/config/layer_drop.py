"""The section `layer_drop`: progressive layer dropping (megatron/layer_drop.py)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.kinds import NUMBER
from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, setting
from megatron.layer_drop import ThetaSchedule

_PROGRESSIVE_LAYER_DROP = "progressive_layer_drop."


@dataclass(frozen=True, kw_only=True)
class LayerDropConfig:
    """Progressive layer dropping: each training step leaves out some blocks, more of them later in the run and more of
    the later ones (docs/methods.md)."""

    progressive_layer_drop: bool = setting(False, "leave out blocks of a training step at random",
                                           json=_PROGRESSIVE_LAYER_DROP + "enabled")
    pld_theta: float = setting(
        0.5, "what the keep probability falls to, behind the last block",
        json=JsonKey(_PROGRESSIVE_LAYER_DROP + "theta", NUMBER, is_independent=False, default="1.0",
                     help="what the keep probability falls to, behind the last block; 1 leaves nothing out"))
    pld_gamma: float = setting(0.001, "how fast it falls: by exp(-this) a step", json=_PROGRESSIVE_LAYER_DROP + "gamma")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "pld_theta", 0, 1, open_low=True)
        problems.require_range(self, "pld_gamma", 0)
        problems.raise_if_any()

    @property
    def schedule(self) -> ThetaSchedule | None:
        """How theta falls; None where no block is left out."""
        return ThetaSchedule(self.pld_theta, self.pld_gamma) if self.progressive_layer_drop else None

    def notes(self) -> list[str]:
        """What is switched on and does nothing."""
        idle = {"--pld-theta is 1": self.pld_theta == 1, "--pld-gamma is 0": self.pld_gamma == 0}
        why = [reason for reason, holds in idle.items() if holds and self.progressive_layer_drop]
        return [f" note: --progressive-layer-drop leaves no block out: {why[0]}"] if why else []
