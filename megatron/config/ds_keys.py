"""The table of DeepSpeed's JSON keys: path -> what happens to it here. A key that is not in the table is an error.

    JsonKey             has an effect: sets a field (declared in its section), or is used with others (ds_cross_keys.py)
    FixedValue          accepted with the values that mean what happens here anyway
    IgnoredKey          accepted with any value of its type; a note says so unless it is the default
    RenamedKey          another name of a key
    UnsupportedSection  accepted when switched off, otherwise refused
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from megatron.config.optimizer_config import OPTIMIZERS, extra_param_type
from megatron.config.schema import (ANY, ANY_TEXT, BOOLEAN, COUNT, COUNT_FROM_0, COUNT_FROM_0_OR_NULL, INTEGER,
                                    JSON_TYPE_OF, NUMBER, SWITCH_OR_OBJECT, TEXT, WEIGHT_GROUP, ErrorList, JsonKey,
                                    JsonType, one_of, plain_type, setting_of)
from megatron.config.tree import SECTIONS

AUTO_VALUE = "auto"


@dataclass(frozen=True)
class FixedValue:
    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class IgnoredKey:
    json_type: JsonType
    default: Any
    reason: str
    has_effect_in_engine: bool = False  # of `zero.initialize`; `reason` is for the trainer


@dataclass(frozen=True)
class RenamedKey:
    new_paths: tuple[str, ...]
    json_type: JsonType
    convert: Callable[[Any], Any] = lambda value: value
    deprecated: bool = True  # deprecated in DeepSpeed; otherwise both names are equal, and no note is printed


@dataclass(frozen=True)
class UnsupportedSection:
    reason: str
    off: tuple[Any, ...] = ()  # more values that mean "off"


DsKeyRow = JsonKey | FixedValue | IgnoredKey | RenamedKey | UnsupportedSection


def keys_of_fields() -> Iterator[JsonKey]:
    """The keys declared with fields, with path, type and field filled in."""
    for section in SECTIONS.values():
        hints = typing.get_type_hints(section)
        for item in fields(section):
            hint, optional = plain_type(hints[item.name])
            own_type = one_of(*typing.get_args(hint)) if typing.get_origin(hint) is Literal else JSON_TYPE_OF.get(hint)
            for key in setting_of(item).keys:
                path = key.path + item.name if key.path.endswith(".") else key.path
                yield replace(key, path=path, field=item.name, json_type=key.json_type or own_type,
                              nullable=key.nullable or optional and key.json_type is None)


# ---- keys that set no field of their own -------------------------------------------------------------------------

_SAME_RESULT = "DeepSpeed's inner workings differ from ours, and its result is the same either way"
_ZEROPP = "quantised and hierarchical exchange (ZeRO++, MiCS) does not exist here"
_ONE_BACKEND = "what is packed to one bit travels like everything else"
_16BIT_STATE = "master weights, gradients' sums and moments are fp32 here"
_NO_PIPELINE = "there is no pipeline parallelism here"
_NO_SEQUENCE = "there is no sequence parallelism of attention (Ulysses) here"
_ZERO_SECTION, _OFFLOAD_OPTIMIZER_SECTION = "zero_optimization.", "zero_optimization.offload_optimizer"
_WEIGHT_QUANTIZATION = "compression_training.weight_quantization.shared_parameters."

# their effect depends on other keys (ds_cross_keys.py)
_DEPENDENT_KEYS: tuple[tuple[str, JsonType], ...] = (
    ("gradient_accumulation_steps", COUNT), ("optimizer.params.adam_w_mode", BOOLEAN),
    *((f"optimizer.params.{name}", extra_param_type(name, default))
      for takes in OPTIMIZERS.values() for name, default in takes.extra.items()),
    ("scheduler.params.decay_step_size", COUNT_FROM_0), ("wandb.project", TEXT),
    *((f"{section}.{name}", kind) for section in ("tensorboard", "csv_monitor")
      for name, kind in (("output_path", ANY_TEXT), ("job_name", TEXT))),
    ("compression_training.weight_quantization.different_groups", WEIGHT_GROUP))

# Path -> row, for every known key.
DS_KEYS: dict[str, DsKeyRow] = {
    **{key.path: key for key in keys_of_fields()},
    **{path: JsonKey(path, kind, is_independent=False) for path, kind in _DEPENDENT_KEYS},
    # top level
    "managed_gradient_accumulation": FixedValue((True,), "the engine counts micro-batches; "
                                                "set_gradient_accumulation_boundary says otherwise"),
    "gradient_allreduce_op": FixedValue(("mean",), "gradients are averaged over the ranks; for "
                                        "their sum multiply the loss by the data parallel size"),
    "disable_python_gc": IgnoredKey(BOOLEAN, False, "--gc-interval says when garbage is collected"),
    "fp32_allreduce": RenamedKey(("communication_data_type",), BOOLEAN, lambda given: "fp32" if given else None),
    "data_types.grad_accum_dtype": FixedValue((None, "fp32"), "sums over micro-batches are taken in fp32"),
    "sparse_gradients": FixedValue((False,),
                                   "gradients are reduced as dense tensors; make embeddings without sparse=True"),
    "disable_allgather": FixedValue((False,),
                                    "ranks always collect the updated weights; allgather_partitions says how"),
    **dict.fromkeys(("seq_parallel_comm_data_type", "seq_parallel_communication_data_type"),
                    IgnoredKey(ANY, None, _NO_SEQUENCE)),
    "use_data_before_expert_parallelism": IgnoredKey(BOOLEAN, False, "there are no experts here"),
    "dataloader_drop_last": FixedValue((False,), "the last batch of an epoch is not "
                                       "dropped; give a loader of your own that does"),
    "graph_harvesting": IgnoredKey(BOOLEAN, False, "pretrain_gpt2.py captures CUDA graphs with --cuda-graphs"),
    "vocabulary_size": FixedValue((None,), "the size of the vocabulary is the model's own"),
    "sequence_parallel_size": FixedValue((None, 1), _NO_SEQUENCE),
    "cuda_visible_devices": IgnoredKey(ANY, None,
                                       "DeepSpeed ignores it too; set CUDA_VISIBLE_DEVICES in the environment"),
    "zero_allow_untested_optimizer": IgnoredKey(BOOLEAN, False, "every optimizer that is accepted is supported"),
    "zero_force_ds_cpu_optimizer": IgnoredKey(BOOLEAN, True, "the same optimizer runs on every device"),
    "wall_clock_breakdown": IgnoredKey(BOOLEAN, False, "each step's time is in the console line and --metrics-file",
                                       has_effect_in_engine=True),
    "memory_breakdown": IgnoredKey(BOOLEAN, False, "each step's peak memory is in --metrics-file",
                                   has_effect_in_engine=True),
    "dump_state": IgnoredKey(BOOLEAN, False, "--verbose prints the configuration", has_effect_in_engine=True),
    "allgather_size": RenamedKey((_ZERO_SECTION + "allgather_bucket_size",), INTEGER),
    # precision
    "fp16.consecutive_hysteresis": FixedValue((False,), "the hysteresis is restored when the loss scale grows"),
    "fp16.fp16_master_weights_and_grads": FixedValue((False,), _16BIT_STATE),
    "fp16.fused_mode": IgnoredKey(BOOLEAN, True, _SAME_RESULT),
    "bf16.immediate_grad_update": IgnoredKey(BOOLEAN, True, _SAME_RESULT),
    "bf16.check_grad_overflow": IgnoredKey(BOOLEAN, False, "in bf16 a gradient that is not finite is always noticed"),
    **dict.fromkeys(("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
                    FixedValue((False,), _16BIT_STATE)),
    "bfloat16.enabled": RenamedKey(("bf16.enabled",), BOOLEAN),
    # optimizer
    "optimizer.legacy_fusion": IgnoredKey(BOOLEAN, False, _SAME_RESULT),
    "optimizer.params.ns_method": IgnoredKey(one_of("standard", "gram"), "gram", _SAME_RESULT),
    "optimizer.params.fp32_optimizer_states": FixedValue((True,), _16BIT_STATE),
    "optimizer.params.cuda_aware": IgnoredKey(BOOLEAN, False, _ONE_BACKEND),
    "optimizer.params.comm_backend_name": IgnoredKey(one_of("nccl", "mpi", "compressed", "hccl"), "nccl", _ONE_BACKEND),
    "optimizer.params.torch_adam": IgnoredKey(BOOLEAN, False, "the same optimizer runs on every device"),
    "optimizer.params.max_grad_norm": RenamedKey(("gradient_clipping",), NUMBER),
    # scheduler
    "scheduler.params.warmup_min_lr": FixedValue((0,), "the warm-up starts from 0"),
    "scheduler.params.warmup_min_ratio": FixedValue((0,), "the warm-up starts from 0"),
    **{f"scheduler.params.cycle_{half}_stair_count": IgnoredKey(COUNT_FROM_0_OR_NULL, 0, "rates do not rise in stairs")
       for half in ("first", "second")},
    "scheduler.params.last_batch_iteration": FixedValue((-1,), "the step is the checkpoint's"),
    # zero_optimization and aio
    "zero_optimization": RenamedKey((_ZERO_SECTION + "stage",), SWITCH_OR_OBJECT, int),
    **{_ZERO_SECTION + name: RenamedKey((f"{_ZERO_SECTION}stage3_{name}",), kind, deprecated=False) for kind, names in (
        (INTEGER, "prefetch_bucket_size param_persistence_threshold max_live_parameters max_reuse_distance"),
        (BOOLEAN, "gather_16bit_weights_on_model_save use_all_reduce_for_fetch_params allgather_sequential"),
        (NUMBER, "model_persistence_threshold module_granularity_threshold")) for name in names.split()},
    _ZERO_SECTION + "stage3_gather_fp16_weights_on_model_save": RenamedKey(
        (_ZERO_SECTION + "stage3_gather_16bit_weights_on_model_save",), BOOLEAN),
    **{_ZERO_SECTION + name: RenamedKey((f"{_ZERO_SECTION}offload_{kind}.device",), BOOLEAN,
                                        lambda given: "cpu" if given else "none")
       for name, kind in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param"),
                          ("cpu_offload_params", "param"))},
    _ZERO_SECTION + "cpu_offload_use_pin_memory": RenamedKey(tuple(f"{_ZERO_SECTION}offload_{kind}.pin_memory"
                                                                   for kind in ("optimizer", "param")), BOOLEAN),
    _ZERO_SECTION + "stage3_model_persistence_threshold": IgnoredKey(
        NUMBER, 2.0**63, "parameters that are not partitioned have no common limit; lower "
        "stage3_param_persistence_threshold to save memory"),
    _ZERO_SECTION + "stage3_module_granularity_threshold": IgnoredKey(COUNT_FROM_0, 0, _SAME_RESULT),
    _ZERO_SECTION + "stage3_use_all_reduce_for_fetch_params": IgnoredKey(BOOLEAN, False, _SAME_RESULT),
    _ZERO_SECTION + "stage3_allgather_sequential": IgnoredKey(BOOLEAN, False, _SAME_RESULT),
    _ZERO_SECTION + "enable_sanity_checks": IgnoredKey(BOOLEAN, False, "ranks compare what they do at every step"),
    _ZERO_SECTION + "use_multi_rank_bucket_allreduce": IgnoredKey(BOOLEAN, True, _SAME_RESULT),
    _ZERO_SECTION + "save_muon_momentum_buffer_in_memory": IgnoredKey(
        BOOLEAN, False, "momenta are where offload_optimizer has the optimizer's state"),
    _ZERO_SECTION + "memory_efficient_linear": IgnoredKey(BOOLEAN, True, _SAME_RESULT),
    _ZERO_SECTION + "log_trace_cache_warnings": IgnoredKey(BOOLEAN, False, "fetches are not traced"),
    _ZERO_SECTION + "override_module_apply": IgnoredKey(BOOLEAN, True, "Module.apply is torch's own"),
    _ZERO_SECTION + "legacy_stage1": IgnoredKey(BOOLEAN, False, "every stage is the same engine"),
    _ZERO_SECTION + "grad_hooks": IgnoredKey(BOOLEAN, True, "DeepSpeed documents this key but does not have it"),
    _ZERO_SECTION + "elastic_checkpoint": IgnoredKey(BOOLEAN, False,
                                                     "every checkpoint can be loaded with any number of ranks"),
    _ZERO_SECTION + "pipeline_loading_checkpoint": IgnoredKey(BOOLEAN, False, _NO_PIPELINE),
    **{_ZERO_SECTION + name: FixedValue((False,), _ZEROPP)
       for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights",
                    "zero_quantized_gradients", "mics_hierarchical_params_gather")},
    _ZERO_SECTION + "zero_hpz_partition_size": FixedValue((1,), _ZEROPP),
    _ZERO_SECTION + "zeropp_loco_param": FixedValue((None,), _ZEROPP),
    _ZERO_SECTION + "zenflow": FixedValue((None,), "the optimizer step is not split in time (delayed_param_update of "
                                          "offload_optimizer runs the host's beside the next pass)"),
    _ZERO_SECTION + "leaf_module": IgnoredKey(ANY, None,
                                              "the engine itself decides which modules are gathered together"),
    f"{_OFFLOAD_OPTIMIZER_SECTION}.fast_init": IgnoredKey(
        BOOLEAN, False, "a drive is never filled with zeros first: what was not written yet is zero"),
    f"{_OFFLOAD_OPTIMIZER_SECTION}.pipeline": IgnoredKey(
        BOOLEAN, False, "DeepSpeed does not read it either; pipeline_read and pipeline_write say it"),
    f"{_OFFLOAD_OPTIMIZER_SECTION}.super_offload": IgnoredKey(
        BOOLEAN, False, "there is no step of that kind, whose result is that of others"),
    f"{_OFFLOAD_OPTIMIZER_SECTION}.cpuadam_cores_perc": IgnoredKey(NUMBER, 0.8,
                                                                   "OMP_NUM_THREADS sets the number of cores per rank"),
    "aio.thread_count": RenamedKey(("aio.intra_op_parallelism",), INTEGER),
    "aio.use_gds": IgnoredKey(BOOLEAN, False, "NVMe is read and written through the host, not by the GPU"),
    # checkpoint
    "checkpoint.tag_validation": IgnoredKey(one_of("Ignore", "Warn", "Fail"), "Fail",
                                            "ranks always agree on a tag, or the run ends"),
    "checkpoint.load_universal": IgnoredKey(BOOLEAN, False, "every checkpoint can be loaded with any layout"),
    "checkpoint.use_node_local_storage": FixedValue((False,), "a checkpoint is one folder that all nodes share"),
    "checkpoint.parallel_write.pipeline_stage": IgnoredKey(BOOLEAN, False, _NO_PIPELINE),
    # monitors, profiler, autotuning
    "comet": UnsupportedSection("scalars can go to tensorboard, csv_monitor and wandb, and from pretrain_gpt2.py to "
                                "--metrics-file"),
    "flops_profiler.recompute_fwd_factor": IgnoredKey(NUMBER, 0.0, "recomputation is counted as it runs"),
    **{f"autotuning.{name}": IgnoredKey(ANY, None, "python -m megatron.tune decides this itself") for name in (
        "arg_mappings exps_dir fast max_train_batch_size metric num_tuning_micro_batch_sizes overwrite "
        "tuner_early_stopping tuner_type").split()},
    "comms_logger": UnsupportedSection("collectives are not logged one by one"),
    "timers": UnsupportedSection("there are no timers to configure"),
    # quantisation
    **{f"{place}eigenvalue.gas_boundary_resolution": IgnoredKey(COUNT, 1, "eigenvalues are found when a bit "
                                                                "is about to fall, and at no other step")
       for place in ("", "quantize_training.")},
    "compression_training.enabled": FixedValue((False,), "each of its sections has a switch of its own"),
    "quantize_training.quantizer_kernel": IgnoredKey(BOOLEAN, False, _SAME_RESULT),
    _WEIGHT_QUANTIZATION + "quantizer_kernel": IgnoredKey(BOOLEAN, False, _SAME_RESULT),
    _WEIGHT_QUANTIZATION + "quantize_weight_in_forward": IgnoredKey(
        BOOLEAN, False, "the forward has weights that were rounded when the step before made them, in any precision"),
    # what does not exist here
    "torch_autocast": UnsupportedSection("autocast is not used; enable bf16 or fp16, "
                                         "or call torch.autocast in the model"),
    "amp": UnsupportedSection("apex is not used; enable bf16 or fp16"),
    "elasticity": UnsupportedSection("the batch size does not change with the world; a run can "
                                     "be resumed with any number of ranks that divides it"),
    **{f"compression_training.{name}": UnsupportedSection("of compression in training there "
                                                          "is weight_quantization alone")
       for name in ("activation_quantization", "sparse_pruning", "row_pruning",
                    "head_pruning", "channel_pruning", "layer_reduction")},
    "curriculum_learning": UnsupportedSection("samples are not ordered by difficulty; a loader of your own can do so"),
    "data_efficiency": UnsupportedSection("samples are not selected, and no tokens are dropped"),
    "sparse_attention": UnsupportedSection("attention layers are not replaced; use a "
                                           "model with sparse attention of its own"),
    "hybrid_engine": UnsupportedSection("the engine trains; it has no inference mode of its own"),
    "nebula": UnsupportedSection("checkpoints are written to the folder that save_checkpoint, or --save, names"),
    "pipeline": UnsupportedSection(_NO_PIPELINE),
    "tensor_parallel": UnsupportedSection("tensor parallelism is set up by --model-parallel-size, or by the mpu "
                                          "given to zero.initialize", off=({"autotp_size": 0}, {"autotp_size": 1})),
    "expert_parallel": UnsupportedSection("there are no experts here"),
    "zenflow": UnsupportedSection("the optimizer step is not split in time"),
    "compile": UnsupportedSection("call engine.compile(); pretrain_gpt2.py does with --compile")}

DS_OBJECTS = frozenset(path[:index] for path in DS_KEYS for index, letter in enumerate(path) if letter == ".")


@dataclass
class DsKeyValues:
    """The keys of one file by path, checked one by one."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    raw_values: dict[str, Any] = field(default_factory=dict)  # path -> unconverted value
    deprecated_names: dict[str, str] = field(default_factory=dict)  # path -> the deprecated name used in the file
    auto_keys: tuple[str, ...] = ()
    notices: list[str] = field(default_factory=list)
    engine_values: dict[str, Any] = field(default_factory=dict)  # that only the engine of `zero.initialize` honours
    invalid_keys: set[str] = field(default_factory=set)  # keys with an invalid value or a misspelt name
    errors: ErrorList = field(default_factory=ErrorList)

    def is_given(self, path: str) -> bool:
        return path in self.keys or path in self.auto_keys

    def raw_value(self, path: str) -> Any:
        """The unconverted value, also inside a key that holds an object."""
        value: Any = self.raw_values
        while path:
            key = next(key for key in value if f"{path}.".startswith(f"{key}."))
            value, path = value[key], path[len(key) + 1:]
        return value

    def first_given(self, *paths: str) -> str:
        """The first of `paths` that is given."""
        return next(path for path in paths if path in self.keys)

    def name_as_written(self, path: str) -> str:
        return self.deprecated_names.get(path, path)
