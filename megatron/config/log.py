"""The section `log`: what a run prints and records."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from megatron.config.kinds import BOOLEAN, COUNT_FROM_0
from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, flag_name, setting
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run prints, and where it records it."""

    log_interval: int | None = setting(
        None, "steps between console lines; 0 turns them off (default: a round number, at most 100, that gives at "
              "least ten lines)",
        "logging-steps", in_short_help=True,
        json=JsonKey("steps_per_print", COUNT_FROM_0, nullable=True, flag_wins=True, help="a flag wins over it"))
    metrics_file: str | None = setting(None, "append one JSON object per step to this file", in_short_help=True)
    tensorboard_dir: str | None = setting(None,
                                          "write tensorboard scalars to this folder",
                                          "logging-dir",
                                          in_short_help=True,
                                          json=JsonKey("tensorboard.enabled", BOOLEAN, is_independent=False))
    csv_dir: str | None = setting(None, "append steps and evaluations to two tables in this folder",
                                  json=JsonKey("csv_monitor.enabled", BOOLEAN, is_independent=False))
    wandb_project: str | None = setting(
        None, "send scalars to this project of Weights & Biases, with the package wandb", metavar="NAME",
        json=JsonKey("wandb.enabled", BOOLEAN, is_independent=False))
    wandb_group: str | None = setting(None, "group of the run in its project", metavar="NAME",
                                      json=JsonKey("wandb.group", is_independent=False))
    wandb_team: str | None = setting(None, "whose project it is (default: the user's own)", "wandb-entity",
                                     metavar="NAME", json=JsonKey("wandb.team", is_independent=False))
    peak_tflops: float | None = setting(None, "peak of one device, for MFU (default: by the device's name)")
    sample_tokens: int = setting(64, "tokens of the text sample at the end; 0 turns it off")
    sample_prompt: str = setting("The", "prompt of the text sample at the end", metavar="TEXT")
    verbose: bool = setting(False, "print the whole configuration at the start")
    debug: bool = setting(False, "print tracebacks")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "log_interval sample_tokens", 0)
        problems.require_range(self, "peak_tflops", 0, open_low=True)
        for name in ("wandb_group", "wandb_team"):
            problems.require(getattr(self, name) is None or self.wandb_project is not None,
                             f"{flag_name(name)} needs --wandb-project")
        problems.raise_if_any()


def check_wandb(flag: str) -> None:
    """The package that `flag` needs is installed. Nothing of it is imported."""
    if find_spec("wandb") is None:
        raise ConfigError(f"{flag} needs the package wandb, which is not installed: pip install wandb, or leave "
                          f"{flag} out")
