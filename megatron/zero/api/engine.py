"""`Engine`: DeepSpeed's training engine API over the ZeRO mechanism (megatron/zero/engine.py).

    loss = engine(batch);  engine.backward(loss);  engine.step()
    engine.save_checkpoint(folder, client_state={...});  path, client_state = engine.load_checkpoint(folder)

It adds the learning rate schedule, checkpoints, monitoring and DeepSpeed's queries. `pretrain_gpt2.py` uses it as well.
"""

from __future__ import annotations

import difflib
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from megatron.checkpoint.commit import Keep, check_save_root_is_writable
from megatron.checkpoint.manifest import Lineage, tag_of_iteration
from megatron.checkpoint.reader import Checkpoint, open_checkpoint
from megatron.checkpoint.tags import has_no_checkpoint
from megatron.checkpoint.writer import AsyncSaver, SaveReport, finish
from megatron.config.schema import require
from megatron.config.tree import Config
from megatron.distributed.collective_log import LOAD, SAVE
from megatron.distributed.consistency import all_succeed_or_raise, assert_same_arguments, on_rank_0
from megatron.distributed.process_group import read_environment
from megatron.distributed.rank_status import STATUS
from megatron.errors import ConfigError, TrainerError
from megatron.metrics.step_metrics import NvmeStats
from megatron.zero.api.checkpoint_io import (LoadOptions, check_save_call, check_shared_state, load_engine,
                                             plan_engine_save, restore_rng_streams)
from megatron.zero.api.compat_names import NAMES, resolve_name
from megatron.zero.api.engine_features import (EigenvalueEstimator, EngineMonitor, MonitorConfig, ProfiledStep,
                                               ProgressiveLayerDrop)
from megatron.zero.api.full_state_dict import gather_full_state_dict, load_module_weights, write_state_dict
from megatron.zero.api.model_checks import check_argument, to_folder
from megatron.zero.api.torch_interfaces import (EpochDataLoader, LRSchedulerProtocol, ReversibleSchedulerStep,
                                                ZeroOptimizer, is_reversible)
from megatron.zero.engine import ZeroEngine
from megatron.zero.flat_buffers import DTYPES
from megatron.zero.hooks import map_tensors
from megatron.zero.offload.nvme import NvmeStorage
from megatron.zero.offload_states import parse_offload_states
from megatron.zero.step_result import StepReport
from mpu.collectives import broadcast_json


# Prefix of names in the engine's (not the model's) state dict, as in DeepSpeed and DistributedDataParallel.
MODULE_PREFIX = "module."


class Engine:
    """A model in training. Counters and the loss scale are those of `core`, the ZeRO mechanism."""

    def __init__(self, core: ZeroEngine, config: Config, optimizer: ZeroOptimizer,
                 scheduler: LRSchedulerProtocol | None, monitor_config: MonitorConfig = MonitorConfig(),
                 mpu: Any = None) -> None:
        self.core, self.config, self.optimizer, self.lr_scheduler = core, config, optimizer, scheduler
        self.module, self.groups, self.device = core.module, core.groups, core.state.device
        self.mpu, self.local_rank = mpu, read_environment().local_rank
        self.working_dtype = DTYPES[config.precision.name]  # dtype of weights and activations
        # As stored in checkpoints.
        self.layout = {"tp": core.groups.tp.size, "dp": core.groups.dp.size, "zero_stage": config.zero.zero_stage}
        core.micro_batch = config.train.batch_size
        self.configured_batch_size = config.global_batch_size(core.groups.dp.size)
        # fp32 accumulation buffers can only be allocated with the engine
        self._can_accumulate = (core.accumulation_steps > 1 or config.precision.fp32_allreduce
                                or self.working_dtype == torch.float32)
        # Number of samples in all optimizer steps so far, summed over changes of the batch size.
        self.global_samples = 0
        self.monitor = EngineMonitor(monitor_config, self.device, core.groups.world.rank == 0, self.drive_use)
        # Profiles one step module by module, if the configuration asks for it.
        self.profiled_step = ProfiledStep(config, core, self)
        self._observers = [one for one in (self.monitor, self.profiled_step) if one.is_active]
        # Passes theta to the model's forward; None unless configured.
        self.progressive_layer_drop = (
            ProgressiveLayerDrop(config.layer_drop, core.module, lambda: self.global_steps)
            if config.layer_drop.progressive_layer_drop else None)
        quantisation = core.state.moq
        self._eigenvalues = EigenvalueEstimator(core, config.quantize, quantisation) if quantisation is not None and \
            config.quantize.quantize_eigenvalue else None
        # The loader of `training_data`, if given; its epoch is saved in checkpoints.
        self.training_dataloader: DataLoader[Any] | None = None
        self.is_compiled = self._warned_offload_has_no_effect = False
        # `step` returns after the new parameters are gathered. A loop that reads parameters only through this engine
        # may set False: the gathers then overlap the next forward.
        self.block_until_params_gathered = True
        self.run_id: str = broadcast_json(secrets.token_hex(8), core.groups.world)
        self.lineage = Lineage()
        self._reversible_lr_step: ReversibleSchedulerStep | None = None
        self._unreported_step: StepReport | None = None
        self._background_save = AsyncSaver(core.groups.world, core.assert_collective_call)
        self.notes: list[str] = []  # for the user, printed once by `zero.initialize`
        # Why random streams could not continue from the loaded checkpoint, or None.
        self.rng_note: str | None = None
        if (monitor_config.tensorboard_dir, monitor_config.csv_dir, monitor_config.wandb) != (None, None, None):
            on_rank_0(self.monitor.open, core.groups.world)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.precision.auto_cast:
            args, kwargs = map_tensors((args, kwargs), lambda x: x.to(torch.float16) if x.is_floating_point() else x)
        if self._eigenvalues is not None and self.training:
            self._eigenvalues.record_forward(args, kwargs)  # of the full model: before layer drop arguments
        if self.progressive_layer_drop is not None and self.training:
            kwargs = {**kwargs, **self.progressive_layer_drop.forward_arguments()}
        with self._phase("forward"):
            return self.core.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward; returns the loss divided by the number of micro-batches of a step."""
        with self._phase("backward"):
            part = self.core.backward(loss, retain_graph, scale_wrt_gas)
        for observer in self._observers:
            observer.backward_done(part)
        return part

    def step(self, lr_kwargs: Mapping[str, Any] | None = None, *, extra_scalars: Sequence[Tensor | float] = ()
             ) -> StepReport | None:
        """Call once per micro-batch, after `backward`. At the accumulation boundary: clip, update, zero the gradients
        and step the scheduler (with `lr_kwargs`), unless the step is skipped for an overflow. `extra_scalars`, at most
        8 numbers, are summed over all ranks in the step's all-reduce (`StepReport.extra_scalars`). None off the
        boundary."""
        with self._phase("step"):
            if self._unreported_step is not None:  # before the learning rate of this step is read
                self.finish_step()
            report = self.core.step(extra_scalars, self._background_save.progress)
            if self.block_until_params_gathered:
                self.core.wait_for_param_gathers()
        if self._eigenvalues is not None and report is not None and report.applied:
            with self.config.key_names.translate_errors():
                self._eigenvalues.after_step()
        if self.core.state.moq is not None:
            for line in self.core.state.moq.take_messages():  # the bit widths that fell in this step
                self._print(line)
        if report is None:
            return None
        self.global_samples += self.train_batch_size()
        self.optimizer.mark_step_taken()
        scheduler, arguments = self.lr_scheduler, lr_kwargs or {}
        if scheduler is not None and self.core.is_deferred and is_reversible(scheduler):
            # The overflow check is pending. A scheduler that cannot be undone waits for the result.
            self._reversible_lr_step = ReversibleSchedulerStep(scheduler, self.optimizer.param_groups, arguments)
        elif scheduler is not None and report.applied:
            scheduler.step(**arguments)
        self._unreported_step = report
        if not self.core.is_deferred:
            self._report_last_step()
        for observer in self._observers:
            observer.step_done(self)
        return report

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Around each forward, backward and step: observers measure it, and an error names the settings in the user's
        words and marks this rank as failed."""
        try:
            with ExitStack() as observed:
                for observer in self._observers:
                    observed.enter_context(observer.phase(name))
                yield
        except BaseException as error:
            STATUS.mark_failed(error)
            if isinstance(error, TrainerError):
                error.args = (self.config.key_names.translate(str(error)),)
            raise

    def get_lr(self) -> list[float]:
        """Learning rate of each param group in the next step."""
        self._undo_lr_step_if_skipped()
        return [float(group["lr"]) for group in self.core.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each param group in the next step."""
        self._undo_lr_step_if_skipped()
        return [group.get("betas", group.get("momentum")) for group in self.core.param_groups]

    def _undo_lr_step_if_skipped(self) -> None:
        """Undo a scheduler step that was taken before the result, if the step was skipped. Local."""
        if self._reversible_lr_step is not None and (report := self.core.read_step_result()) is not None:
            scheduler_step, self._reversible_lr_step = self._reversible_lr_step, None
            if not report.applied:
                scheduler_step.undo()

    def finish_step(self) -> None:
        """Wait for the result of the last step, and raise its errors. Collective. The next `step` calls it first if
        need be: on an accelerator the host reads the result of a step one step late."""
        self.core.finish_step()
        self._report_last_step()

    def _report_last_step(self) -> None:
        """Undo the scheduler step of a skipped step, print its warning, and advance the background save. Collective if
        that save is ready for its next phase."""
        report, self._unreported_step = self._unreported_step, None
        if report is None:
            return
        self._undo_lr_step_if_skipped()
        if report.skip_warning is not None:
            self._print(f"warning: {report.skip_warning}")
        if report.note is not None:
            self._print(report.note)
        self._background_save.poll(report.engine_scalars)

    def _print(self, line: str) -> None:
        """On rank 0; warnings to stderr."""
        if self.groups.world.rank == 0:
            print(line, file=sys.stderr if line.startswith("warning: ") else sys.stdout, flush=True)

    def train(self, mode: bool = True) -> Engine:
        self.core.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.core.module.training

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the accumulated gradients."""
        self.core.zero_grad()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next `step` ends an optimizer step; None returns to counting micro-batches. Ranks must pass
        the same value: if they differ, the step raises or the collective check ends the run."""
        self.core.forced_boundary = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip gradient reduction in backward; stages 0 and 1 only. Call `step` outside."""
        return self.core.no_sync()

    def compile(self, backend: str | Callable[..., Any] = "inductor",
                compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """torch.compile the forward of each unit, or of the whole model if it has no blocks. The engine's hooks stay
        outside the compiled code."""
        units = [unit.module for unit in self.core.units]
        for module in units[1:] or units:
            module.forward = torch.compile(module.forward, backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def deepspeed_io(self, dataset: Dataset[Any], batch_size: int | None = None, route: str = "train",
                     pin_memory: bool = True, data_sampler: Sampler[Any] | None = None,
                     collate_fn: Callable[[list[Any]], Any] | None = None,
                     num_local_io_workers: int | None = None) -> DataLoader[Any]:
        """A loader of this data parallel rank's samples, shuffled if `route` is "train"; samples repeat if they do not
        divide evenly. A given `data_sampler` replaces the distribution over ranks."""
        options: dict[str, Any] = {
            "batch_size": batch_size or self.core.micro_batch, "collate_fn": collate_fn,
            "num_workers": num_local_io_workers or 0, "pin_memory": pin_memory and self.device.type == "cuda"}
        if data_sampler is not None:
            return DataLoader(dataset, sampler=data_sampler, **options)
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, self.groups.dp.size, self.groups.dp.rank, shuffle=route == "train", seed=self.config.train.seed)
        return EpochDataLoader(dataset, sampler, **options)

    def to(self, *places: Any, **named: Any) -> Engine:
        """Returns self if the model already has that device and dtype; otherwise raises ConfigError."""
        for place in (*places, *(named[name] for name in ("device", "dtype") if name in named)):
            wanted = place if isinstance(place, torch.dtype) else torch.device(place)
            if wanted not in (self.working_dtype, self.device, torch.device(self.device.type)):
                raise ConfigError(f"engine.to({place}): the engine's parameters are in place, on {self.device} in "
                                  f"{self.working_dtype}; choose the device by the launcher, and fp16 or bf16 in the "
                                  "configuration")
        return self

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """From the next step on; the number of micro-batches stays. Existing loaders keep their size. Ranks must pass
        the same value: this call does not compare them, but the next step raises if they differ."""
        self._check_between_steps("set_train_micro_batch_size")
        require(isinstance(micro_batch_size, int) and micro_batch_size >= 1,
                f"set_train_micro_batch_size: {micro_batch_size!r}; expected an integer >= 1")
        self.core.micro_batch = micro_batch_size

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on, by another number of micro-batches of the same size. Ranks must pass the same value,
        as above."""
        self._check_between_steps("set_train_batch_size")
        require(isinstance(train_batch_size, int),
                f"set_train_batch_size: {train_batch_size!r}; expected an integer")
        micro_batch, dp = self.core.micro_batch, self.groups.dp.size
        count, rest = divmod(train_batch_size, micro_batch * dp)
        require(count >= 1 and rest == 0, f"set_train_batch_size: {train_batch_size} is not a multiple of micro-batch "
                f"{micro_batch} x data parallel {dp} = {micro_batch * dp}")
        require(count == 1 or self._can_accumulate, f"set_train_batch_size: {count} micro-batches need an fp32 sum of "
                "their gradients, which an engine has that starts with gradient_accumulation_steps above 1")
        self.core.set_accumulation_steps(count)

    def _check_between_steps(self, call: str) -> None:
        require(not self.core.has_gradients and not self.core.micro_batches_taken,
                f"{call}: a step is under way; call it after the last micro-batch of one")

    def wait_for_param_gathers(self) -> None:
        """Wait for pending parameter gathers. Call it before the process exits."""
        self.core.wait_for_param_gathers()

    def offload_states(self, include: Iterable[Any] | str | None = None, device: Any = "cpu", pin_memory: bool = True,
                       non_blocking: bool = False) -> None:
        """Move GPU state to the host between two steps, until `reload_states`. `include` is a subset of
        `zero.OffloadStateTypeEnum` (default: everything). Collective."""
        self.core.assert_collective_call("engine.offload_states()")
        states = all_succeed_or_raise(lambda: parse_offload_states(include, device), self.groups.world)
        assert_same_arguments("offload_states", {"include": states}, self.groups.world)
        has_effect = self.core.offload_states(states, pinned=pin_memory, non_blocking=non_blocking)
        if not has_effect and not self._warned_offload_has_no_effect:
            self._warned_offload_has_no_effect = True
            self._print(" note: engine.offload_states() has no effect here: the device is the host")

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move offloaded state back, bit for bit."""
        self.core.state_offloader.reload(non_blocking=non_blocking)

    def destroy(self) -> None:
        """Detach the engine: remove its hooks and leave full parameters in the working precision. Collective;
        idempotent."""
        if self.core.is_detached:
            return
        self.finish_save()
        self.finish_step()
        self.monitor.close()
        self.core.detach()

    # ---- status ----------------------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Number of optimizer steps so far, skipped ones included."""
        return self.core.state.counters.global_steps

    @property
    def backward_scale(self) -> float:
        """The factor by which `backward` multiplies the loss."""
        return self.core.backward_scale

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward."""
        return self.core.state.counters.scaler.scale

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.core.micro_batch

    def train_batch_size(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.core.micro_batch * self.core.accumulation_steps * self.groups.dp.size

    def zero_optimization_stage(self) -> int:
        return self.config.zero.zero_stage

    def drive_use(self) -> NvmeStats | None:
        """Seconds the training thread waited for NVMe, and bytes read and written, since the engine was created. None
        if no state is on NVMe."""
        storage = self.core.engine_storage
        stats = [backend.stats for backend in (storage.optimizer, storage.params)
                 if isinstance(backend, NvmeStorage) and backend.has_nvme_shards]
        return sum(stats, NvmeStats()) if stats else None

    @property
    def parameters_kept(self) -> int:
        """Parameter elements that this rank stores between steps, with padding: at stage 3 its shards."""
        return sum(bucket.layout.shard_numel if bucket.params_are_sharded else bucket.layout.numel
                   for bucket in (*self.core.buckets, *self.core.frozen_buckets))

    # ---- the model ----------------------------------------------------------------------------------------------

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the model; at stage 3 empty placeholders outside their block's forward and backward. During
        a delayed update they hold the values before it, until the step is finished."""
        self.core.wait_for_param_gathers()
        return self.core.module.parameters(recurse)

    def module_state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False,
                          exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state dict in the working precision. At stage 3 it is collective and needs
        `stage3_gather_16bit_weights_on_model_save`: rank 0 gets full tensors on its host, the others an empty dict."""
        self.core.sync_delayed_update("engine.module_state_dict()")
        if self.zero_optimization_stage() == 3:
            if not self.config.zero.stage3_gather_16bit_weights_on_model_save:
                raise ConfigError("at stage 3 parameters are split, and a state dict would be without them: set "
                                  "stage3_gather_16bit_weights_on_model_save to gather them, or call save_checkpoint "
                                  "and zero.get_fp32_state_dict_from_zero_checkpoint")
            self.core.assert_collective_call(SAVE)
            assert_same_arguments("module_state_dict", {"exclude_frozen_parameters": exclude_frozen_parameters},
                                  self.groups.world)
            gathered = gather_full_state_dict(self.core, frozen=not exclude_frozen_parameters)
            state: dict[str, Any] = {prefix + name: tensor for name, tensor in gathered.items()}
        else:
            state = self.core.module.state_dict(prefix=prefix, keep_vars=keep_vars)
            for name, parameter in self.core.module.named_parameters() if exclude_frozen_parameters else ():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        destination = {} if destination is None else destination
        destination.update(state)
        return destination

    def state_dict(self) -> dict[str, Any]:
        """`module_state_dict` with the name prefix `module.`, as in DeepSpeed and DistributedDataParallel."""
        return self.module_state_dict(prefix=MODULE_PREFIX)

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load data parallel rank 0's weights into the model and the optimizer's masters. Collective."""
        check_argument("the state dict of load_module_state_dict", state_dict, Mapping, "a dict of tensors by name")
        load_module_weights(self.core, state_dict, strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """`load_module_state_dict` for the output of `state_dict`, with its prefix."""
        weights = {name.removeprefix(MODULE_PREFIX): value for name, value in state_dict.items()}
        load_module_weights(self.core, weights, strict)

    if not TYPE_CHECKING:  # for user scripts only: mypy checks our own attribute names

        def __getattr__(self, name: str) -> Any:
            """DeepSpeed's names (compat_names.py), then the model's attributes."""
            if hasattr(type(self), name):  # an AttributeError inside a property of the engine
                raise AttributeError(f"engine.{name} is not available here")
            if name in NAMES:
                return resolve_name(self, name)
            module = None if "core" not in vars(self) else self.core.module
            if not name.startswith("__") and hasattr(module, name):
                return getattr(module, name)
            near = difflib.get_close_matches(name, {*dir(type(self)), *vars(self), *NAMES}, n=1, cutoff=0.75)
            raise AttributeError(f"neither the engine nor its {type(module).__name__} has {name!r}"
                                 + (f"; did you mean {near[0]}?" if near else "; docs/deepspeed.md lists the names"))

    # ---- checkpoints --------------------------------------------------------------------------------------------

    @STATUS.in_activity(SAVE)
    def save_checkpoint(self, save_dir: str | os.PathLike[str], tag: str | int | None = None,
                        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False, *, save_optimizer_states: bool = True,
                        save_rng_states: bool = True, keep: Keep = Keep(), in_background: bool = False,
                        on_complete: Callable[[SaveReport], None] = lambda report: None) -> bool:
        """Save everything a resumed run needs. Collective. The tag is `global_step<N>` unless given; without
        `save_latest` a load finds it only by tag.

        `client_state` (JSON values and tensors) and the folder are rank 0's; `load_checkpoint` returns the former. Its
        values may differ between ranks (a loss); a warning names keys that rank 0 lacks. All other arguments must be
        equal.

        `in_background` returns after a copy to the host. The checkpoint is complete when a later `step`, `finish_save`
        or the end of the program has called `on_complete`; write errors are raised there, on every rank. Offloaded
        state is saved in the foreground, as there is no memory for a copy.
        """
        root = to_folder("save_checkpoint", save_dir)
        self.core.assert_collective_call(SAVE)
        check_save_call({
            "tag": tag if tag is None else str(tag), "save_latest": save_latest, "in_background": in_background,
            "exclude_frozen_parameters": exclude_frozen_parameters, "save_optimizer_states": save_optimizer_states,
            "save_rng_states": save_rng_states, "keep": asdict(keep)}, client_state or {}, self.groups.world)
        self.finish_step()
        name = tag_of_iteration(self.global_steps) if tag is None else str(tag)
        on_rank_0(lambda: check_save_root_is_writable(root), self.groups.world)
        self.finish_save()
        in_background &= not self.core.engine_storage.has_offloaded_state
        plan = plan_engine_save(
            self, root, name, client_state or {}, optimizer=save_optimizer_states, rng=save_rng_states,
            frozen=not exclude_frozen_parameters, keep=keep, latest=save_latest, on_complete=on_complete,
            hold=partial(self._background_save.copy_tensors, self.device) if in_background else None)
        if in_background:
            self._background_save.start(plan)
        else:
            finish(plan)
        return True

    @property
    def is_saving(self) -> bool:
        """A background save is pending."""
        return self._background_save.plan is not None

    def finish_save(self) -> None:
        """Wait for the pending save, if any. Collective. Call it before the process exits."""
        self._background_save.wait_for_save()

    def abandon_save(self) -> bool:
        """Abandon the pending save, if any; True if it was already complete. Communicates nothing: a rank that exits
        may call it alone, other ranks between the same two steps."""
        return self._background_save.abandon()

    def load_checkpoint(self, load_dir: str | os.PathLike[str], tag: str | int | None = None,
                        load_module_strict: bool = True, load_optimizer_states: bool = True,
                        load_lr_scheduler_states: bool = True, load_module_only: bool = False,
                        custom_load_fn: None = None) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """Restore a checkpoint saved with any layout, `tag` or the one named by `latest`; returns its path and
        client_state. Returns (None, None) with a warning if no tag is given and `load_dir` has no checkpoint.
        Collective with equal arguments; the folders may differ if they hold the same save."""
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn is not supported: the engine places pieces of parameters; edit weights "
                              "afterwards, inside zero.GatheredParameters")
        root = to_folder("load_checkpoint", load_dir)
        self.core.assert_collective_call(LOAD)
        assert_same_arguments("load_checkpoint", {
            "tag": tag if tag is None else str(tag), "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states, "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only}, self.groups.world)
        self.finish_save()
        if tag is None and on_rank_0(lambda: has_no_checkpoint(root), self.groups.world):
            self._print(f"warning: {root} holds no checkpoint: nothing was loaded, weights are the initial ones")
            return None, None
        checkpoint = open_checkpoint(root, None if tag is None else str(tag), world=self.groups.world)
        all_succeed_or_raise(lambda: check_shared_state(checkpoint), self.groups.world)
        return str(checkpoint.folder), self.restore(checkpoint, LoadOptions(
            optimizer=load_optimizer_states and not load_module_only, counters=not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only, strict=load_module_strict,
            rng=not load_module_only))

    @STATUS.in_activity(LOAD)
    def restore(self, checkpoint: Checkpoint, options: LoadOptions = LoadOptions()) -> dict[str, Any]:
        """`load_checkpoint` for an open checkpoint that passed `check_shared_state`; returns the client_state.
        Collective with equal arguments."""
        assert_same_arguments("restore", {**asdict(options), "tag": checkpoint.tag}, self.groups.world)
        self.finish_step()
        load_engine(self.core, checkpoint, self.lr_scheduler, options)
        self.monitor.loss = None  # the accumulated gradients were discarded
        if options.counters:
            self.run_id, self.lineage = checkpoint.shared_state["run_id"], Lineage(checkpoint.manifest)
            loop_state = checkpoint.shared_state.get("loop", {})
            self.global_samples = loop_state.get("global_samples", self.global_steps * self.train_batch_size())
            saved_size = loop_state.get("train_batch_size")
            if saved_size not in (None, self.train_batch_size()):  # the batch sizes stay those of this run
                self._print("warning: the checkpoint's run had called set_train_batch_size or "
                            f"set_train_micro_batch_size, and took {saved_size} samples a step; this one takes "
                            f"{self.train_batch_size()}: call it here as well to go on with {saved_size}")
            epochs = self.training_dataloader
            if isinstance(epochs, EpochDataLoader) and loop_state.get("epoch") is not None:
                epochs.set_epoch(loop_state["epoch"])
        self.rng_note = None
        if options.rng:
            self.rng_note = all_succeed_or_raise(lambda: restore_rng_streams(
                checkpoint, self.groups, self.layout, self.config.train.seed), self.groups.world)
        state: dict[str, Any] = checkpoint.shared_state["client_state"]
        return state

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
                         exclude_frozen_parameters: bool = False) -> bool:
        """Write the weights in the working precision as one state dict (safetensors if the name ends so), to rank 0's
        folder. At stage 3 without `stage3_gather_16bit_weights_on_model_save` it warns and returns False.
        Collective."""
        check_argument("save_filename", save_filename or None, str | os.PathLike, "the name of a file")
        path = to_folder("save_16bit_model", save_dir) / save_filename
        self.core.assert_collective_call("engine.save_16bit_model()")
        assert_same_arguments(
            "save_16bit_model", {"save_filename": str(save_filename),
                                 "exclude_frozen_parameters": exclude_frozen_parameters}, self.groups.world)
        if self.zero_optimization_stage() == 3 and not self.config.zero.stage3_gather_16bit_weights_on_model_save:
            self._print("warning: save_16bit_model wrote nothing: parameters are split; set "
                        "stage3_gather_16bit_weights_on_model_save to gather them")
            return False
        weights = gather_full_state_dict(self.core, frozen=not exclude_frozen_parameters)
        on_rank_0(lambda: write_state_dict(weights, path), self.groups.world)
        return True

    save_fp16_model = save_16bit_model
