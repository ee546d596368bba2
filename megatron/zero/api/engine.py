"""Engine: what a training script holds. The names that DeepSpeed's tutorials teach, over the mechanism of engine.py.

    loss = engine(batch);  engine.backward(loss);  engine.step()
    engine.save_checkpoint(folder, client_state={...});  path, client_state = engine.load_checkpoint(folder)

It adds what belongs around the mechanism: the learning rate schedule, checkpoints, and things to ask. Counters and the
loss scale are the mechanism's. `pretrain_gpt2.py` trains through it like everybody else.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.agree import on_rank_0
from megatron.checkpoint.background import Background, HostCopy
from megatron.checkpoint.choice import is_empty
from megatron.checkpoint.commit import Keep, probe
from megatron.checkpoint.manifest import step_tag
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.writer import SaveReport, complete
from megatron.config.tree import Config
from megatron.errors import ConfigError
from megatron.zero.api.casting import cast_inputs
from megatron.zero.api.monitor import Monitor, Watch
from megatron.zero.api.optimizer import ZeroOptimizer
from megatron.zero.api.saved import (
    Identity,
    load_engine,
    restore_streams,
    saving_engine,
    whole_weights,
    write_weights,
)
from megatron.zero.api.schedule import Scheduler
from megatron.zero.engine import ZeroEngine
from megatron.zero.step import StepReport
from mpu.collectives import all_gather_json
from mpu.groups import Groups


@dataclass(frozen=True)
class LoadOptions:
    """What of a checkpoint is taken."""

    optimizer: bool = True
    scheduler: bool = True
    counters: bool = True
    strict: bool = True
    rng: bool = True
    loss_scale: bool = True
    """With the counters: a loss scale belongs to the precision it was found in."""


class Engine:
    """A model in training. Counters and the loss scale are those of `core`, the mechanism."""

    def __init__(self, core: ZeroEngine, config: Config, optimizer: ZeroOptimizer, scheduler: Scheduler | None,
                 watch: Watch = Watch()) -> None:
        self.core, self.config, self.optimizer, self.lr_scheduler = core, config, optimizer, scheduler
        self.monitor = Monitor(watch, self.device, core.groups.world.rank == 0)
        self.reads_weights_between_steps = True
        """New weights are complete when `step` returns. A loop that looks at them only through this engine may switch
        it off: they then travel during the forward that follows."""
        self._run_id: str = all_gather_json(secrets.token_hex(8), core.groups.world)[0]
        self.last_save: SaveReport | None = None
        """What the last complete save cost."""
        self._background, self._host_copy = Background(core.groups.world), HostCopy(self.device)
        self.rng_note: str | None = None
        """What to tell about random streams that could not go on where the loaded checkpoint's stopped."""

    # ---- the loop -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.precision.auto_cast:
            args, kwargs = cast_inputs((args, kwargs), torch.float16)
        with self.monitor.phase("forward"):
            return self.core.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of the loss; returns the loss divided by the number of micro-batches of a step."""
        with self.monitor.phase("backward"):
            part = self.core.backward(loss, retain_graph, scale_wrt_gas)
        self.monitor.add_loss(part)
        return part

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> StepReport | None:
        """Once per micro-batch, after `backward`. At the accumulation boundary: clip, update, forget the gradients, and
        move the learning rate on, unless the step was skipped for an overflow. `lr_kwargs` go to the scheduler."""
        with self.monitor.phase("step"):
            report = self.core.step()
            if self.reads_weights_between_steps:
                self.core.settle()
        if report is None:
            return None
        if report.applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.monitor.step_done(self)
        self._background.poll()
        return report

    def train(self, mode: bool = True) -> Engine:
        self.core.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def zero_grad(self) -> None:
        self.core.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward without summing over ranks; stages 0 and 1 only."""
        return self.core.no_sync()

    def is_gradient_accumulation_boundary(self) -> bool:
        """The micro-batch under way is the last of its optimizer step."""
        return self.core.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide oneself where optimizer steps end; None goes back to counting."""
        self.core.set_gradient_accumulation_boundary(is_boundary)

    def settle(self) -> None:
        """Wait for what is still on its way between ranks; before leaving the process."""
        self.core.settle()

    def destroy(self) -> None:
        """Leave the model to itself: without hooks, with whole parameters in the working precision. Collective."""
        self.finish_save()
        self.monitor.close()
        self.core.detach()

    # ---- things to ask ------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        return self.core.module

    @property
    def groups(self) -> Groups:
        return self.core.groups

    @property
    def device(self) -> torch.device:
        return self.core.buckets[0].shard.device

    @property
    def global_steps(self) -> int:
        """Optimizer steps, skipped ones included."""
        return self.core.global_steps

    @property
    def skipped_steps(self) -> int:
        return self.core.skipped_steps

    @property
    def micro_steps(self) -> int:
        return self.core.micro_steps

    @property
    def global_samples(self) -> int:
        return self.core.global_steps * self.train_batch_size()

    @property
    def applied_steps(self) -> int:
        return self.core.applied_steps

    @property
    def backward_scale(self) -> float:
        """What `backward` multiplies the loss by."""
        return self.core.backward_scale

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self.core.scaler.scale

    loss_scale = cur_scale

    def was_step_applied(self) -> bool:
        """The last optimizer step changed the weights (it was not skipped for an overflow)."""
        return self.core.last_report is not None and self.core.last_report.applied

    def get_global_grad_norm(self) -> float | None:
        """Of the last optimizer step, before clipping; None before the first."""
        return None if self.core.last_report is None else self.core.last_report.grad_norm

    def get_lr(self) -> list[float]:
        """Learning rate of each param group in the next step."""
        return [float(group["lr"]) for group in self.core.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each param group."""
        return [group.get("betas", group.get("momentum")) for group in self.core.param_groups]

    def get_type(self) -> list[str]:
        """What kind of optimizer steps each param group."""
        return [self.core.rule.name] * len(self.core.param_groups)

    def fp16_enabled(self) -> bool:
        return self.config.precision.fp16

    def bfloat16_enabled(self) -> bool:
        return self.config.precision.bf16

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train.batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.core.accumulation

    def train_batch_size(self) -> int:
        return self.config.train.batch_size * self.core.accumulation * self.core.groups.dp.size

    def zero_optimization_stage(self) -> int:
        return self.config.zero.zero_stage

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @property
    def layout(self) -> dict[str, int]:
        return {"tp": self.groups.tp.size, "dp": self.groups.dp.size, "zero_stage": self.config.zero.zero_stage}

    def save_checkpoint(self, save_dir: str | os.PathLike[str], tag: str | int | None = None,
                        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False, *, save_optimizer_states: bool = True,
                        save_rng_states: bool = True, keep: Keep = Keep(), in_background: bool = False,
                        then: Callable[[SaveReport], None] | None = None) -> bool:
        """Save everything a resumed run needs; every rank calls it. The tag is `global_step<N>` unless given. Without
        `save_latest` a load takes it only by its tag.
        `client_state` (JSON values and tensors, rank 0's) comes back from `load_checkpoint`.

        `in_background` returns after a copy; the checkpoint is complete when a later `step`, or `finish_save`, has told
        `then`. An error of the writing is raised there, on every rank."""
        root, name = Path(save_dir), step_tag(self.global_steps) if tag is None else str(tag)
        on_rank_0(lambda: probe(root), self.groups.world)
        self.finish_save()
        who = Identity(self._run_id, self.config.as_dict(), self.layout)
        steps = saving_engine(
            self.core, root, name, who, client_state=client_state or {}, scheduler=self.lr_scheduler,
            optimizer=save_optimizer_states, rng=save_rng_states, frozen=not exclude_frozen_parameters, keep=keep,
            hold=self._host_copy.hold if in_background else None, latest=save_latest)
        self._background.start(steps, partial(self._saved, then)) if in_background else \
            self._saved(then, complete(steps, self.groups.world))
        return True

    def _saved(self, then: Callable[[SaveReport], None] | None, report: SaveReport) -> None:
        self.last_save = report
        if then is not None:
            then(report)

    @property
    def is_saving(self) -> bool:
        """A save is under way in the background."""
        return self._background.busy

    def finish_save(self) -> None:
        """Wait for the save under way, if there is one; every rank calls it. Before leaving the process."""
        self._background.wait()

    def load_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | int | None = None,
                        load_module_strict: bool = True, load_optimizer_states: bool = True,
                        load_lr_scheduler_states: bool = True, load_module_only: bool = False,
                        custom_load_fn: None = None) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Restore a checkpoint of any layout, `tag` or else the one that `latest` names; its path and the client_state.
        (None, None), with a warning, where `load_dir` holds no checkpoint and none was named."""
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn is not supported: the engine places pieces of parameters; edit weights "
                              "afterwards, inside zero.GatheredParameters")
        self.finish_save()
        root = Path(load_dir)
        if tag is None and on_rank_0(lambda: is_empty(root), self.groups.world):
            if self.groups.world.rank == 0:
                print(f"warning: {root} holds no checkpoint: nothing was loaded, weights are the initial ones",
                      file=sys.stderr)
            return None, None
        found = open_checkpoint(root, None if tag is None else str(tag), world=self.groups.world)
        state = self.restore(found, LoadOptions(
            optimizer=load_optimizer_states and not load_module_only, counters=not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only, strict=load_module_strict,
            rng=not load_module_only))
        return str(found.folder), state

    def restore(self, found: Checkpoint, options: LoadOptions = LoadOptions()) -> dict[str, Any]:
        """`load_checkpoint` for one that is open already; the client_state."""
        load_engine(self.core, found, scheduler=self.lr_scheduler if options.scheduler else None,
                    optimizer=options.optimizer, counters=options.counters, loss_scale=options.loss_scale,
                    strict=options.strict)
        if options.counters:
            self._run_id = found.shared_state["run_id"]
        self.rng_note = (restore_streams(found, self.groups, self.layout, self.config.train.seed)
                         if options.rng else None)
        state: dict[str, Any] = found.shared_state["client_state"]
        return state

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
                         exclude_frozen_parameters: bool = False) -> bool:
        """Write the weights in the working precision as one state dict (safetensors where the name says so). At stage 3
        only if `stage3_gather_16bit_weights_on_model_save` allows it; otherwise a warning and False."""
        if self.zero_optimization_stage() == 3 and not self.config.zero.stage3_gather_16bit_weights_on_model_save:
            if self.groups.world.rank == 0:
                print("warning: save_16bit_model wrote nothing: parameters are split; set "
                      "stage3_gather_16bit_weights_on_model_save to gather them", file=sys.stderr)
            return False
        weights = whole_weights(self.core, frozen=not exclude_frozen_parameters)
        on_rank_0(lambda: write_weights(weights, Path(save_dir) / save_filename), self.groups.world)
        return True

    save_fp16_model = save_16bit_model
