"""The section `log`: what a run prints and records."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.kinds import COUNT_0
from megatron.config.problems import Problems
from megatron.config.setting import Key, setting


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run prints, and where it records it."""

    log_interval: int | None = setting(
        None, "steps between console lines; 0 turns them off (default: a round number, at most 100, that gives at "
              "least ten lines)",
        "logging-steps", newcomer=True, json=Key("steps_per_print", COUNT_0, nullable=True))
    metrics_file: str | None = setting(None, "append one JSON object per step to this file", newcomer=True)
    tensorboard_dir: str | None = setting(None, "write tensorboard scalars to this folder", "logging-dir",
                                          newcomer=True)
    peak_tflops: float | None = setting(None, "peak of one device, for MFU (default: by the device's name)")
    sample_tokens: int = setting(64, "tokens of the text sample at the end; 0 turns it off")
    sample_prompt: str = setting("The", "prompt of the text sample at the end", metavar="TEXT")
    verbose: bool = setting(False, "print the whole configuration at the start")
    debug: bool = setting(False, "print tracebacks")

    def __post_init__(self) -> None:
        problems = Problems()
        problems.require_range(self, "log_interval sample_tokens", 0)
        problems.require_range(self, "peak_tflops", 0, open_low=True)
        problems.stop()
