"""The table of DeepSpeed's JSON keys: path -> what happens to it here. A key that is not in the table is an error.

A row is one of
    Key      has an effect: sets a field (declared with the field, in its section), or is used with others (ds_together)
    Only     known to DeepSpeed; accepted with the values that mean what happens here anyway
    NoEffect accepted with any value of its kind; a note says so unless the value is the default
    Old      another name, read as the new key
    Absent   a section of DeepSpeed that does not exist here: accepted switched off, otherwise refused
This file holds the rows that belong to no field. Reasons are true for any model and any caller.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.config.kinds import (ANY, ANY_TEXT, AT_LEAST_0, BOOLEAN, COUNT, COUNT_0, COUNT_0_OR_NONE, INTEGER,
                                   NUMBER, OF_TYPE, SWITCH_OR_OBJECT, TEXT, WEIGHT_GROUP, Kind, choice)
from megatron.config.optimizers import OPTIMIZERS, WORDS
from megatron.config.save import NOT_SIGNED
from megatron.config.setting import Key, declared, kind_of, plain_type
from megatron.config.tree import SECTIONS

AUTO = "auto"


@dataclass(frozen=True)
class Only:
    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class NoEffect:
    kind: Kind
    default: Any
    reason: str
    in_engine: bool = False
    """The engine of `zero.initialize` does what it says: `reason` is the trainer's, which has its own."""


@dataclass(frozen=True)
class Old:
    new: tuple[str, ...]
    kind: Kind
    to: Callable[[Any], Any] = lambda value: value
    deprecated: bool = True
    """In DeepSpeed; otherwise the two names are equals, and no note says so."""


@dataclass(frozen=True)
class Absent:
    reason: str
    off: tuple[Any, ...] = ()
    """Further values that switch it off."""


Row = Key | Only | NoEffect | Old | Absent


def keys_of_fields() -> Iterator[Key]:
    """The keys that are declared with a field, with path, kind and field filled in."""
    for section in SECTIONS.values():
        hints = typing.get_type_hints(section)
        for item in fields(section):
            hint, optional = plain_type(hints[item.name])
            for key in declared(item).keys:
                path = key.path + item.name if key.path.endswith(".") else key.path
                yield replace(key, path=path, field=item.name, kind=key.kind or kind_of(hint),
                              nullable=key.nullable or optional and key.kind is None)


# ---- keys that set no field of their own -------------------------------------------------------------------------

_PURE_SPEED = "DeepSpeed's inner workings differ from ours, and its result is the same either way"
_ZEROPP = "quantised and hierarchical exchange (ZeRO++, MiCS) does not exist here"
_ONE_WIRE = "what is packed to one bit travels like everything else"
_16BIT_STATE = "master weights, gradients' sums and moments are fp32 here"
_ZERO, _OPTIMIZER_HOME = "zero_optimization.", "zero_optimization.offload_optimizer"


def _together(path: str, kind: Kind) -> dict[str, Row]:
    """A key whose effect depends on others."""
    return {path: Key(path, kind, alone=False)}


def _kind_of_own(name: str, default: Any) -> Kind:
    return choice(*WORDS[name]) if name in WORDS else AT_LEAST_0 if default is None else OF_TYPE[type(default)]


def _offload_to_cpu(kind: str) -> Old:
    return Old((f"zero_optimization.offload_{kind}.device",), BOOLEAN, lambda given: "cpu" if given else "none")


_TOP: dict[str, Row] = {
    **_together("gradient_accumulation_steps", COUNT),
    "managed_gradient_accumulation": Only(
        (True,), "the engine counts micro-batches; set_gradient_accumulation_boundary says otherwise"),
    "gradient_allreduce_op": Only(
        ("mean",), "gradients are averaged over the ranks; for their sum multiply the loss by the data parallel size"),
    "disable_python_gc": NoEffect(BOOLEAN, False, "--gc-interval says when garbage is collected"),
    "fp32_allreduce": Old(("communication_data_type",), BOOLEAN, lambda given: "fp32" if given else None),
    "data_types.grad_accum_dtype": Only((None, "fp32"), "sums over micro-batches are taken in fp32"),
    "sparse_gradients": Only((False,), "gradients are reduced as dense tensors; make embeddings without sparse=True"),
    "disable_allgather": Only((False,), "ranks always collect the updated weights; allgather_partitions says how"),
    "seq_parallel_comm_data_type": NoEffect(ANY, None, "there is no sequence parallelism here"),
    "seq_parallel_communication_data_type": NoEffect(ANY, None, "there is no sequence parallelism here"),
    "use_data_before_expert_parallelism": NoEffect(BOOLEAN, False, "there are no experts here"),
    "dataloader_drop_last": Only(
        (False,), "the last batch of an epoch is not dropped; give a loader of your own that does"),
    "graph_harvesting": NoEffect(BOOLEAN, False, "pretrain_gpt2.py captures CUDA graphs with --cuda-graphs"),
    "vocabulary_size": Only((None,), "the size of the vocabulary is the model's own"),
    "sequence_parallel_size": Only((None, 1), "there is no sequence parallelism here"),
    "cuda_visible_devices": NoEffect(ANY, None, "DeepSpeed ignores it too; set CUDA_VISIBLE_DEVICES in the "
                                                "environment"),
    "zero_allow_untested_optimizer": NoEffect(BOOLEAN, False, "every optimizer that is accepted is supported"),
    "zero_force_ds_cpu_optimizer": NoEffect(BOOLEAN, True, "the same optimizer runs on every device"),
    "wall_clock_breakdown": NoEffect(BOOLEAN, False, "each step's time is in the console line and --metrics-file",
                                     in_engine=True),
    "memory_breakdown": NoEffect(BOOLEAN, False, "each step's peak memory is in --metrics-file", in_engine=True),
    "dump_state": NoEffect(BOOLEAN, False, "--verbose prints the configuration", in_engine=True),
    "allgather_size": Old((_ZERO + "allgather_bucket_size",), INTEGER),
}

_PRECISION: dict[str, Row] = {
    "fp16.consecutive_hysteresis": Only((False,), "the hysteresis is restored when the loss scale grows"),
    "fp16.fp16_master_weights_and_grads": Only((False,), _16BIT_STATE),
    "fp16.fused_mode": NoEffect(BOOLEAN, True, _PURE_SPEED),
    "bf16.immediate_grad_update": NoEffect(BOOLEAN, True, _PURE_SPEED),
    "bf16.check_grad_overflow": NoEffect(BOOLEAN, False, "in bf16 a gradient that is not finite is always noticed"),
    "bf16.bf16_master_weights_and_grads": Only((False,), _16BIT_STATE),
    "bf16.bf16_optimizer_states": Only((False,), _16BIT_STATE),
    "bfloat16.enabled": Old(("bf16.enabled",), BOOLEAN),
}

_OPTIMIZER: dict[str, Row] = {
    "optimizer.legacy_fusion": NoEffect(BOOLEAN, False, _PURE_SPEED),
    **_together("optimizer.params.adam_w_mode", BOOLEAN),
    **{path: row for takes in OPTIMIZERS.values() for name, default in takes.own.items()
       for path, row in _together(f"optimizer.params.{name}", _kind_of_own(name, default)).items()},
    "optimizer.params.ns_method": NoEffect(choice("standard", "gram"), "gram", _PURE_SPEED),
    "optimizer.params.fp32_optimizer_states": Only((True,), _16BIT_STATE),
    "optimizer.params.cuda_aware": NoEffect(BOOLEAN, False, _ONE_WIRE),
    "optimizer.params.comm_backend_name": NoEffect(choice("nccl", "mpi", "compressed", "hccl"), "nccl", _ONE_WIRE),
    "optimizer.params.torch_adam": NoEffect(BOOLEAN, False, "the same optimizer runs on every device"),
    "optimizer.params.max_grad_norm": Old(("gradient_clipping",), NUMBER),
}

_SCHEDULER: dict[str, Row] = {
    "scheduler.params.warmup_min_lr": Only((0,), "the warm-up starts from 0"),
    "scheduler.params.warmup_min_ratio": Only((0,), "the warm-up starts from 0"),
    **_together("scheduler.params.decay_step_size", COUNT_0),
    **{f"scheduler.params.cycle_{half}_stair_count": NoEffect(COUNT_0_OR_NONE, 0, "rates do not rise in stairs")
       for half in ("first", "second")},
    "scheduler.params.last_batch_iteration": Only((-1,), "the step is the checkpoint's"),
}

_ZERO_OPTIMIZATION: dict[str, Row] = {
    "zero_optimization": Old((_ZERO + "stage",), SWITCH_OR_OBJECT, int),
    **{_ZERO + name: Old((f"{_ZERO}stage3_{name}",), kind, deprecated=False) for kind, names in (
        (INTEGER, "prefetch_bucket_size param_persistence_threshold max_live_parameters max_reuse_distance"),
        (BOOLEAN, "gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential"),
        (NUMBER, "model_persistence_threshold module_granularity_threshold")) for name in names.split()},
    _ZERO + "stage3_gather_fp16_weights_on_model_save": Old(
        (_ZERO + "stage3_gather_16bit_weights_on_model_save",), BOOLEAN),
    _ZERO + "cpu_offload": _offload_to_cpu("optimizer"),
    _ZERO + "cpu_offload_param": _offload_to_cpu("param"),
    _ZERO + "cpu_offload_params": _offload_to_cpu("param"),
    _ZERO + "cpu_offload_use_pin_memory": Old(
        tuple(f"{_ZERO}offload_{kind}.pin_memory" for kind in ("optimizer", "param")), BOOLEAN),
    _ZERO + "stage3_model_persistence_threshold": NoEffect(
        NUMBER, 2.0**63, "parameters that are not partitioned have no common limit; lower "
                         "stage3_param_persistence_threshold to save memory"),
    _ZERO + "stage3_module_granularity_threshold": NoEffect(COUNT_0, 0, _PURE_SPEED),
    _ZERO + "stage3_use_all_reduce_for_fetch_params": NoEffect(BOOLEAN, False, _PURE_SPEED),
    _ZERO + "stage3_allgather_sequential": NoEffect(BOOLEAN, False, _PURE_SPEED),
    _ZERO + "enable_sanity_checks": NoEffect(BOOLEAN, False, "ranks compare what they do at every step"),
    _ZERO + "use_multi_rank_bucket_allreduce": NoEffect(BOOLEAN, True, _PURE_SPEED),
    _ZERO + "save_muon_momentum_buffer_in_memory": NoEffect(
        BOOLEAN, False, "momenta are where offload_optimizer has the optimizer's state"),
    _ZERO + "memory_efficient_linear": NoEffect(BOOLEAN, True, _PURE_SPEED),
    _ZERO + "log_trace_cache_warnings": NoEffect(BOOLEAN, False, "fetches are not traced"),
    _ZERO + "override_module_apply": NoEffect(BOOLEAN, True, "Module.apply is torch's own"),
    _ZERO + "legacy_stage1": NoEffect(BOOLEAN, False, "every stage is the same engine"),
    _ZERO + "grad_hooks": NoEffect(BOOLEAN, True, "DeepSpeed documents this key but does not have it"),
    _ZERO + "elastic_checkpoint": NoEffect(BOOLEAN, False, "every checkpoint can be loaded with any number of ranks"),
    _ZERO + "pipeline_loading_checkpoint": NoEffect(BOOLEAN, False, "there is no pipeline parallelism here"),
    **{_ZERO + name: Only((False,), _ZEROPP) for name in (
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
        "mics_hierarchical_params_gather")},
    _ZERO + "zero_hpz_partition_size": Only((1,), _ZEROPP),
    _ZERO + "mics_shard_size": Only((-1,), _ZEROPP),
    _ZERO + "zeropp_loco_param": Only((None,), _ZEROPP),
    _ZERO + "zenflow": Only((None,), "the optimizer step is not split in time (delayed_param_update of "
                                     "offload_optimizer runs the host's beside the next pass)"),
    _ZERO + "leaf_module": NoEffect(ANY, None, "the engine itself decides which modules are gathered together"),
    f"{_OPTIMIZER_HOME}.fast_init": NoEffect(
        BOOLEAN, False, "a drive is never filled with zeros first: what was not written yet is zero"),
    f"{_OPTIMIZER_HOME}.pipeline": NoEffect(
        BOOLEAN, False, "DeepSpeed does not read it either; pipeline_read and pipeline_write say it"),
    f"{_OPTIMIZER_HOME}.super_offload": NoEffect(
        BOOLEAN, False, "there is no step of that kind, whose result is that of others"),
    f"{_OPTIMIZER_HOME}.cpuadam_cores_perc": NoEffect(NUMBER, 0.8, "OMP_NUM_THREADS sets the number of cores per rank"),
    "aio.thread_count": Old(("aio.intra_op_parallelism",), INTEGER),
    "aio.use_gds": NoEffect(BOOLEAN, False, "NVMe is read and written through the host, not by the GPU"),
}

_CHECKPOINT: dict[str, Row] = {
    "checkpoint.tag_validation": NoEffect(
        choice("Ignore", "Warn", "Fail"), "Fail", "ranks always agree on a tag, or the run ends"),
    "checkpoint.load_universal": NoEffect(BOOLEAN, False, "every checkpoint can be loaded with any layout"),
    "checkpoint.use_node_local_storage": Only((False,), "a checkpoint is one folder that all nodes share"),
    "checkpoint.key_file": Absent(NOT_SIGNED),
    "checkpoint.parallel_write.pipeline_stage": NoEffect(BOOLEAN, False, "there is no pipeline parallelism here"),
}

_MONITORS: dict[str, Row] = {
    **_together("tensorboard.output_path", ANY_TEXT),
    **_together("tensorboard.job_name", TEXT),
    **_together("csv_monitor.output_path", ANY_TEXT),
    **_together("csv_monitor.job_name", TEXT),
    **_together("wandb.project", TEXT),
    "comet": Absent("scalars can go to tensorboard, csv_monitor and wandb, and from pretrain_gpt2.py to "
                    "--metrics-file"),
    "flops_profiler.recompute_fwd_factor": NoEffect(NUMBER, 0.0, "recomputation is counted as it runs"),
    "autotuning.arg_mappings": NoEffect(ANY, None, "python -m megatron.tune knows the flags of the trainer"),
    **{f"autotuning.{name}": NoEffect(ANY, None, "python -m megatron.tune plans the memory of the model itself")
       for name in ("model_info", "model_info_path")},
    "autotuning.metric_path": NoEffect(ANY, None, "trials report to a metrics file in exps_dir"),
    "autotuning.min_train_batch_size": NoEffect(COUNT, 1, "the samples of a step are given, and stay"),
    **{f"autotuning.{name}_train_micro_batch_size_per_gpu": NoEffect(
        ANY, None, "every micro-batch that fits is looked at") for name in ("min", "max")},
    "comms_logger": Absent("collectives are not logged one by one"),
    "timers": Absent("there are no timers to configure"),
}

_SHARED = "compression_training.weight_quantization.shared_parameters."
_QUANTISED: dict[str, Row] = {
    **{f"{place}eigenvalue.gas_boundary_resolution": NoEffect(
        COUNT, 1, "eigenvalues are found when a bit is about to fall, and at no other step")
       for place in ("", "quantize_training.")},
    "compression_training.enabled": Only((False,), "each of its sections has a switch of its own"),
    "quantize_training.quantizer_kernel": NoEffect(BOOLEAN, False, _PURE_SPEED),
    _SHARED + "quantizer_kernel": NoEffect(BOOLEAN, False, _PURE_SPEED),
    _SHARED + "quantize_weight_in_forward": NoEffect(
        BOOLEAN, False, "the forward has weights that were rounded when the step before made them, in any precision"),
    **_together("compression_training.weight_quantization.different_groups", WEIGHT_GROUP),
}

_ABSENT: dict[str, Row] = {
    "torch_autocast": Absent("autocast is not used; enable bf16 or fp16, or call torch.autocast in the model"),
    "amp": Absent("apex is not used; enable bf16 or fp16"),
    "elasticity": Absent(
        "the batch size does not change with the world; a run can be resumed with any number of ranks that divides it"),
    **{f"compression_training.{name}": Absent("of compression in training there is weight_quantization alone") for name
       in ("activation_quantization", "sparse_pruning", "row_pruning", "head_pruning", "channel_pruning",
           "layer_reduction")},
    "curriculum_learning": Absent("samples are not ordered by difficulty; a loader of your own can do so"),
    "data_efficiency": Absent("samples are not selected, and no tokens are dropped"),
    "sparse_attention": Absent("attention layers are not replaced; use a model with sparse attention of its own"),
    "hybrid_engine": Absent("the engine trains; it has no inference mode of its own"),
    "nebula": Absent("checkpoints are written to the folder that save_checkpoint, or --save, names"),
    "pipeline": Absent("there is no pipeline parallelism here"),
    "tensor_parallel": Absent(
        "tensor parallelism is set up by --model-parallel-size, or by the mpu given to zero.initialize",
        off=({"autotp_size": 0}, {"autotp_size": 1})),
    "expert_parallel": Absent("there are no experts here"),
    "zenflow": Absent("the optimizer step is not split in time"),
    "compile": Absent("call engine.compile(); pretrain_gpt2.py does with --compile"),
}

TABLE: dict[str, Row] = {**{key.path: key for key in keys_of_fields()}, **_TOP, **_PRECISION, **_OPTIMIZER,
                         **_SCHEDULER, **_ZERO_OPTIMIZATION, **_CHECKPOINT, **_MONITORS, **_QUANTISED, **_ABSENT}
"""Every key that is known, by its path."""

OBJECTS = frozenset(path[:index] for path in TABLE for index, letter in enumerate(path) if letter == ".")
"""Every path that holds further keys."""
