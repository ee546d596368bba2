"""The section `parallel`: how the ranks are arranged, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.problems import ErrorList
from megatron.config.setting import require, setting


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks are arranged: the data parallel size is the number of ranks / the tensor parallel size."""

    model_parallel_size: int = setting(1, "tensor parallel size", "tensor-model-parallel-size", in_short_help=True)
    distributed_backend: Literal["nccl", "gloo"] | None = setting(
        None, "communication backend (default: nccl with GPUs, gloo without)", "backend")
    distributed_timeout_seconds: float = setting(600.0, "longest wait for a peer in one collective")
    startup_timeout_seconds: float | None = setting(
        None, "the same until all ranks have taken a step: meeting, indexing the corpus, loading, compiling (default: "
        "three times as long)")
    local_rank: int | None = setting(None, "accepted for old launchers: LOCAL_RANK in the environment is used")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "model_parallel_size", 1)
        problems.require_range(self, "distributed_timeout_seconds startup_timeout_seconds", 0, open_low=True)
        problems.raise_if_any()

    @property
    def startup_limit(self) -> float:
        """Seconds."""
        given = self.startup_timeout_seconds
        return 3 * self.distributed_timeout_seconds if given is None else given


def data_parallel_size(world_size: int, tp: int) -> int:
    """The ranks of one data parallel group."""
    require(world_size % tp == 0, f"{world_size} ranks cannot be arranged in groups of --model-parallel-size {tp}: "
            f"{world_size} is not divisible by {tp}")
    return world_size // tp
