"""The section `train`: how long a run is, its batches, and how reproducible it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.kinds import COUNT
from megatron.config.problems import ErrorList
from megatron.config.setting import JsonKey, require, setting


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The length of the run, its batches, and how reproducible it is."""

    batch_size: int = setting(
        4, "micro-batch: samples per data parallel rank in one forward", "micro-batch-size",
        "per-device-train-batch-size", in_short_help=True,
        json=JsonKey("train_micro_batch_size_per_gpu", COUNT, is_independent=False, nullable=True, default=""))
    global_batch_size: int | None = setting(
        None, "samples per optimizer step (default: batch size x data parallel size)", in_short_help=True,
        json=JsonKey("train_batch_size", COUNT, is_independent=False, nullable=True))
    train_iters: int = setting(1000, "optimizer steps of the whole run", "max-iters", "max-steps", in_short_help=True)
    eval_interval: int = setting(1000, "steps between evaluations; 0 turns them off", "eval-steps", in_short_help=True)
    eval_iters: int = setting(100, "global batches per evaluation; 0 turns evaluations off")
    skip_train: bool = setting(False, "evaluate what --load or --load-hf names, and neither train nor save",
                               "eval-only")
    exit_interval: int = setting(0, "exit after steps divisible by this; 0 turns it off")
    exit_duration_in_mins: float = setting(0.0, "exit after the step in which the run is this many minutes old; 0 "
                                                "turns it off")
    gc_interval: int = setting(
        0, "steps between looks of Python's garbage collector, at the same steps on all ranks; 0: whenever it wants to",
        "manual-gc-interval")
    seed: int = setting(1234, "seed of weights, dropout and data order")
    compile: bool | None = setting(None, "compile the model with torch.compile (default: on a GPU)", "torch-compile")
    compile_scope: Literal["auto", "blocks", "model"] = setting(
        "auto", "what --compile makes one graph of: each block, or the whole model (auto: the model, where nothing has "
                "to happen between blocks)")
    cuda_graphs: bool = setting(False, "--compile on a GPU: replay launches as CUDA graphs (torch's reduce-overhead); "
                                       "faster for small models, takes more memory; stages 0 to 2, no recomputation")
    deterministic: bool = setting(False, "on a GPU: only kernels that give the same bits in every run, slower ones if "
                                         "need be (docs/training.md)")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "batch_size global_batch_size", 1)
        problems.require_range(self, "train_iters eval_interval eval_iters", 0)
        problems.require_range(self, "exit_interval exit_duration_in_mins gc_interval", 0)
        problems.require_range(self, "seed", 0, 2**63 - 1)
        problems.raise_if_any()
        require(self.compile is not False or not self.cuda_graphs,
                "--cuda-graphs and --no-compile exclude each other: only what is compiled is replayed; leave one out")
        require(not self.skip_train or self.evaluates_every > 0,
                "--skip-train leaves nothing to do with --eval-interval 0 or --eval-iters 0: leave that out")

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: there are none."""
        return self.eval_interval if self.eval_iters else 0
