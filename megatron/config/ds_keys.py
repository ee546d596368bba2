"""The table of DeepSpeed's JSON keys: path -> what this trainer does with it. Nothing is accepted that is not a row.

A row is one of
    Key      sets configuration fields (or none: ds_config.py reads it together with its neighbours)
    Only     known to DeepSpeed, and accepted with the values that mean what happens here anyway
    NoEffect accepted with any value of its kind; one that is not the default is told to have no effect
    Old      a deprecated name, read as the new key
    Absent   a section of DeepSpeed that does not exist here: accepted switched off, otherwise refused
Ranges of fields are checked by the sections of config.py; a kind has a range only where its value is converted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.config.optimizers import OPTIMIZERS

AUTO = "auto"


# ---- kinds of values ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A type of JSON value: `convert` gives the Python value, or raises ValueError for what is not `expected`."""

    expected: str
    convert: Callable[[Any], Any]
    words: tuple[str, ...] = ()
    """The texts it can be, where it is one of a few."""


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
        raise ValueError
    if math.isnan(value):
        raise ValueError
    return float(value)


def _integer(value: Any) -> int:
    """5e8 is an integer, 1.5 is not."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not _number(value).is_integer():
        raise ValueError
    return int(value)


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError
    return _number(value[0]), _number(value[1])


def _from(low: int, convert: Callable[[Any], Any], high: float = math.inf) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        number = convert(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return checked


def choice(*words: str) -> Kind:
    """One of these texts, in whatever case."""
    known = {word.lower(): word for word in words}

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError
        return known[value.lower()]

    return Kind(" or ".join(f'"{word}"' for word in words), convert, words)


BOOLEAN = Kind("true or false", _boolean)
TEXT = Kind("a text that is not empty", _text)
NUMBER = Kind("a number", _number)
AT_LEAST_0 = Kind("a number of at least 0", _from(0, _number))
SHARE = Kind("a number from 0 to 1", _from(0, _number, 1))
INTEGER = Kind("an integer", _integer)
COUNT = Kind("an integer of at least 1", _from(1, _integer))
COUNT_0 = Kind("an integer of at least 0", _from(0, _integer))
EXPONENT = Kind("an integer from 0 to 64", _from(0, _integer, 64))
PAIR = Kind("a list of two numbers", _pair)
ANY = Kind("anything", lambda value: value)


# ---- kinds of rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    kind: Kind
    fields: str = ""
    """Names of fields; `to` gives as many values where it is several."""
    to: Callable[[Any], Any] = lambda value: value
    nullable: bool = False
    """null means that nothing is said."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Lower-case text that DeepSpeed accepts and we do not -> reason."""


@dataclass(frozen=True)
class Only:
    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class NoEffect:
    kind: Kind
    default: Any
    reason: str


@dataclass(frozen=True)
class Old:
    new: tuple[str, ...]
    kind: Kind
    to: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Absent:
    reason: str


Row = Key | Only | NoEffect | Old | Absent


def shown(value: Any) -> str:
    """A value as it stands in the file, cut where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- the table ---------------------------------------------------------------------------------------------------

OPTIMIZER_TYPES = {
    "Adam": "adam", "AdamW": "adamw", "FusedAdam": "adam", "DeepSpeed_Adam": "adam", "DeepSpeedCPUAdam": "adam",
    "SGD": "sgd", "Lamb": "lamb", "FusedLamb": "lamb", "Lion": "lion", "FusedLion": "lion", "DeepSpeedCPULion": "lion",
    "Adagrad": "adagrad", "DeepSpeedCPUAdagrad": "adagrad", "RMSprop": "rmsprop", "NAdam": "nadam", "RAdam": "radam",
    "Adamax": "adamax", "Adadelta": "adadelta", "ASGD": "asgd", "Rprop": "rprop",
}
"""optimizer.type -> --optimizer"""
_WHOLE_MATRICES = "it works on whole matrices, and ranks hold parts of flat ones"
_REFUSED_OPTIMIZERS = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), "gradients are not compressed here; use Adam or Lamb"),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "learning rates do not depend on a layer's width"),
    **dict.fromkeys(("muon", "adafactor"), _WHOLE_MATRICES),
    "lbfgs": "it evaluates the loss several times a step", "sparseadam": "gradients are dense here; use Adam",
}
_SCHEDULERS = {
    "lrrangetest": "a range test is no schedule to train with; try values of --lr",
    "onecycle": "there is no cyclic schedule, and momentum is constant; use WarmupDecayLR or WarmupCosineLR",
}
_PURE_SPEED = "DeepSpeed's inner workings differ from ours, and its result is the same either way"
_ZEROPP = "quantised and hierarchical exchange (ZeRO++, MiCS) does not exist here"
_16BIT_STATE = "master weights, gradients' sums and moments are fp32 here"
_OTHER_PARALLELISM = "is set up by the flags of this trainer (--model-parallel-size), not by the engine's JSON"


def _same(prefix: str, kind: Kind, names: str, nullable: bool = False) -> dict[str, Row]:
    """Keys whose field has their name."""
    return {f"{prefix}{name}": Key(kind, name, nullable=nullable) for name in names.split()}


def _under(prefix: str, field_prefix: str, kind: Kind, names: str, nullable: bool = False) -> dict[str, Row]:
    return {f"{prefix}.{name}": Key(kind, f"{field_prefix}_{name}", nullable=nullable) for name in names.split()}


def _old_pin_memory() -> tuple[str, ...]:
    return tuple(f"zero_optimization.offload_{kind}.pin_memory" for kind in ("optimizer", "param"))


def _offload_to_cpu(kind: str) -> Old:
    return Old((f"zero_optimization.offload_{kind}.device",), BOOLEAN, lambda given: "cpu" if given else "none")


_TOP: dict[str, Row] = {
    "train_batch_size": Key(COUNT, nullable=True),
    "train_micro_batch_size_per_gpu": Key(COUNT, nullable=True),
    "gradient_accumulation_steps": Key(COUNT, nullable=True),
    "steps_per_print": Key(COUNT_0, "log_interval", nullable=True),
    "gradient_clipping": Key(AT_LEAST_0, "clip_grad"),
    "communication_data_type": Key(
        choice("fp32"), "fp32_allreduce", lambda given: given == "fp32", nullable=True,
        refused=dict.fromkeys(("fp16", "bf16", "fp8"), "gradients travel in the working precision, or in fp32")),
    "fp32_allreduce": Old(("communication_data_type",), BOOLEAN, lambda given: "fp32" if given else None),
    "data_types.grad_accum_dtype": Only((None, "fp32"), "sums over micro-batches are taken in fp32"),
    "prescale_gradients": Only((False,), "gradients are summed first and divided once, inside the optimizer"),
    "gradient_predivide_factor": Only((1.0,), "gradients are summed first and divided once, inside the optimizer"),
    "sparse_gradients": Only((False,), "the gradient of the token table is dense: the output layer shares it"),
    "disable_allgather": Only((False,), "allgather_partitions says how weights are collected"),
    "seq_parallel_comm_data_type": Only((None, "fp32"), "there is no sequence parallelism here"),
    "seq_parallel_communication_data_type": Only((None, "fp32"), "there is no sequence parallelism here"),
    "use_data_before_expert_parallelism": Only((False,), "there are no experts here"),
    "dataloader_drop_last": Only((False,), "the stream of samples has no last batch: it goes on with the next epoch"),
    "graph_harvesting": Only((False,), "kernels are not captured in graphs; --compile fuses them"),
    "vocabulary_size": Only((None,), "the vocabulary is the tokenizer's, or --vocab-size"),
    "zero_allow_untested_optimizer": NoEffect(BOOLEAN, False, "whatever is accepted as optimizer is tested"),
    "zero_force_ds_cpu_optimizer": NoEffect(BOOLEAN, True, "the same optimizer runs on every device"),
    "wall_clock_breakdown": NoEffect(BOOLEAN, False, "each step's time is in the console line and --metrics-file"),
    "memory_breakdown": NoEffect(BOOLEAN, False, "each step's peak memory is in --metrics-file"),
    "dump_state": NoEffect(BOOLEAN, False, "the resolved configuration is always printed"),
    "allgather_size": Old(("zero_optimization.allgather_bucket_size",), INTEGER),
}

_PRECISION: dict[str, Row] = {
    "fp16.enabled": Key(BOOLEAN, "fp16"),
    "fp16.loss_scale": Key(AT_LEAST_0, "loss_scale", lambda scale: scale or None),
    "fp16.initial_scale_power": Key(EXPONENT, "initial_loss_scale", lambda power: 2.0**power),
    **_same("fp16.", INTEGER, "loss_scale_window hysteresis"),
    "fp16.min_loss_scale": Key(NUMBER, "min_scale"),
    "fp16.auto_cast": Only((False,), "the model is cast once, its inputs are token numbers"),
    "fp16.consecutive_hysteresis": Only((False,), "the hysteresis is restored when the scale grows"),
    "fp16.fp16_master_weights_and_grads": Only((False,), _16BIT_STATE),
    "fp16.fused_mode": NoEffect(BOOLEAN, True, _PURE_SPEED),
    "bf16.enabled": Key(BOOLEAN, "bf16"),
    "bf16.immediate_grad_update": NoEffect(BOOLEAN, True, _PURE_SPEED),
    "bf16.check_grad_overflow": NoEffect(BOOLEAN, False, "a gradient that is not finite always ends the run"),
    "bf16.bf16_master_weights_and_grads": Only((False,), _16BIT_STATE),
    "bf16.bf16_optimizer_states": Only((False,), _16BIT_STATE),
    "bfloat16.enabled": Old(("bf16.enabled",), BOOLEAN),
}

_KINDS: dict[type, Kind] = {bool: BOOLEAN, float: NUMBER, tuple: PAIR}
_OPTIMIZER: dict[str, Row] = {
    "optimizer.type": Key(choice(*OPTIMIZER_TYPES), "optimizer", lambda given: OPTIMIZER_TYPES[given],
                          refused=_REFUSED_OPTIMIZERS),
    "optimizer.legacy_fusion": NoEffect(BOOLEAN, False, _PURE_SPEED),
    "optimizer.params.lr": Key(NUMBER, "lr"),
    "optimizer.params.weight_decay": Key(NUMBER, "weight_decay"),
    "optimizer.params.adam_w_mode": Key(BOOLEAN),
    **{f"optimizer.params.{name}": Key(_KINDS[type(default)])  # fields depend on the type
       for takes in OPTIMIZERS.values() for name, default in takes.own.items()},
    "optimizer.params.fp32_optimizer_states": Only((True,), _16BIT_STATE),
    "optimizer.params.torch_adam": NoEffect(BOOLEAN, False, "the same optimizer runs on every device"),
    "optimizer.params.max_grad_norm": Old(("gradient_clipping",), NUMBER),
}

_SCHEDULER: dict[str, Row] = {
    "scheduler.type": Key(choice("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"), refused=_SCHEDULERS),
    "scheduler.params.warmup_max_lr": Key(NUMBER, "lr"),
    "scheduler.params.warmup_min_lr": Only((0,), "the warm-up starts from 0"),
    "scheduler.params.warmup_min_ratio": Only((0,), "the warm-up starts from 0"),
    "scheduler.params.warmup_num_steps": Key(COUNT_0),
    "scheduler.params.warmup_type": Key(choice("linear", "log"), "warmup_type"),
    "scheduler.params.total_num_steps": Key(COUNT, nullable=True),
    "scheduler.params.cos_min_ratio": Key(SHARE),
    "scheduler.params.last_batch_iteration": Only((-1,), "the step is the checkpoint's"),
}

_ZERO: dict[str, Row] = {
    "zero_optimization": Old(("zero_optimization.stage",), Kind("an object {...}", _boolean), int),
    "zero_optimization.stage": Key(INTEGER, "zero_stage"),
    **_same("zero_optimization.", BOOLEAN, """contiguous_gradients reduce_scatter allgather_partitions
        load_from_fp32_weights ignore_unused_parameters round_robin_gradients
        stage3_gather_16bit_weights_on_model_save"""),
    **_same("zero_optimization.", BOOLEAN, "overlap_comm", nullable=True),
    **_same("zero_optimization.", INTEGER, """reduce_bucket_size allgather_bucket_size sub_group_size
        stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
        stage3_param_persistence_threshold"""),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Old(
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save",), BOOLEAN),
    "zero_optimization.cpu_offload": _offload_to_cpu("optimizer"),
    "zero_optimization.cpu_offload_param": _offload_to_cpu("param"),
    "zero_optimization.cpu_offload_params": _offload_to_cpu("param"),
    "zero_optimization.cpu_offload_use_pin_memory": Old(_old_pin_memory(), BOOLEAN),
    "zero_optimization.stage3_model_persistence_threshold": Only(
        (sys.maxsize, 2.0**63), "unsplit parameters have no common limit; lower stage3_param_persistence_threshold"),
    "zero_optimization.stage3_module_granularity_threshold": NoEffect(COUNT_0, 0, _PURE_SPEED),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": NoEffect(BOOLEAN, False, _PURE_SPEED),
    "zero_optimization.use_multi_rank_bucket_allreduce": NoEffect(BOOLEAN, True, _PURE_SPEED),
    "zero_optimization.memory_efficient_linear": NoEffect(BOOLEAN, True, _PURE_SPEED),
    "zero_optimization.log_trace_cache_warnings": NoEffect(BOOLEAN, False, "fetches are not traced"),
    "zero_optimization.override_module_apply": NoEffect(BOOLEAN, True, "Module.apply is torch's own"),
    "zero_optimization.legacy_stage1": NoEffect(BOOLEAN, False, "every stage is the same engine"),
    "zero_optimization.grad_hooks": NoEffect(BOOLEAN, True, "DeepSpeed documents this key, and has none of that name"),
    "zero_optimization.elastic_checkpoint": NoEffect(
        BOOLEAN, False, "every checkpoint can be loaded with any number of ranks"),
    "zero_optimization.pipeline_loading_checkpoint": Only((False,), "there is no pipeline parallelism here"),
    **{f"zero_optimization.{name}": Only((False,), _ZEROPP) for name in (
        "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
        "mics_hierarchical_params_gather")},
    "zero_optimization.zero_hpz_partition_size": Only((1,), _ZEROPP),
    "zero_optimization.mics_shard_size": Only((-1,), _ZEROPP),
    "zero_optimization.zeropp_loco_param": Only((None,), _ZEROPP),
    "zero_optimization.zenflow": Only((None,), "the optimizer step is never split in time"),
    "zero_optimization.leaf_module": Only((None,), "the engine gathers a transformer block at a time"),
}

_OPTIMIZER_HOME, _PARAM_HOME = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
_DEVICE = choice("none", "cpu", "nvme")
_OFFLOAD: dict[str, Row] = {
    **_under(_OPTIMIZER_HOME, "offload_optimizer", _DEVICE, "device"),
    **_under(_OPTIMIZER_HOME, "offload_optimizer", TEXT, "nvme_path", nullable=True),
    **_under(_OPTIMIZER_HOME, "offload_optimizer", INTEGER, "buffer_count"),
    **_under(_OPTIMIZER_HOME, "offload_optimizer", BOOLEAN, "pin_memory pipeline_read pipeline_write"),
    f"{_OPTIMIZER_HOME}.ratio": Only((1.0,), "the optimizer state moves as a whole, or not at all"),
    f"{_OPTIMIZER_HOME}.fast_init": NoEffect(BOOLEAN, False, _PURE_SPEED),
    f"{_OPTIMIZER_HOME}.super_offload": Only((False,), "there is no such step"),
    f"{_OPTIMIZER_HOME}.cpuadam_cores_perc": NoEffect(NUMBER, 0.8, "OMP_NUM_THREADS says how many cores a rank has"),
    **_under(_PARAM_HOME, "offload_param", _DEVICE, "device"),
    **_under(_PARAM_HOME, "offload_param", TEXT, "nvme_path", nullable=True),
    **_under(_PARAM_HOME, "offload_param", INTEGER, "buffer_count buffer_size max_in_cpu"),
    **_under(_PARAM_HOME, "offload_param", BOOLEAN, "pin_memory"),
    **_under("aio", "aio", INTEGER, "block_size queue_depth intra_op_parallelism"),
    **_under("aio", "aio", BOOLEAN, "single_submit overlap_events"),
    "aio.thread_count": Old(("aio.intra_op_parallelism",), INTEGER),
    "aio.use_gds": Only((False,), "NVMe is read through the host, not by the GPU"),
}

_CHECKPOINTING: dict[str, Row] = {
    **_same("activation_checkpointing.", BOOLEAN, """partition_activations cpu_checkpointing
        contiguous_memory_optimization synchronize_checkpoint_boundary"""),
    "activation_checkpointing.number_checkpoints": Key(INTEGER, "number_checkpoints", nullable=True),
    "activation_checkpointing.profile": Key(BOOLEAN, "profile_backward"),
    "checkpoint.tag_validation": NoEffect(
        choice("Ignore", "Warn", "Fail"), "Fail", "ranks always agree on a tag, or the run ends"),
    "checkpoint.load_universal": NoEffect(BOOLEAN, False, "every checkpoint can be loaded with any layout"),
    "checkpoint.use_node_local_storage": Only((False,), "--save is one folder that all nodes share"),
    "checkpoint.parallel_write.pipeline_stage": Only((False,), "there is no pipeline parallelism here"),
}

_MONITORS: dict[str, Row] = {
    "tensorboard.enabled": Key(BOOLEAN),
    "tensorboard.output_path": Key(Kind("a text", lambda v: v if v == "" else _text(v))),
    "tensorboard.job_name": Key(TEXT),
    **{name: Absent("scalars go to tensorboard and --metrics-file") for name in ("wandb", "csv_monitor", "comet")},
    "flops_profiler": Absent("each step's tflops and MFU are in --metrics-file; there is no profile per module"),
    "comms_logger": Absent("single collectives are not logged"),
    "timers": Absent("the throughput is always logged"),
}

_ABSENT: dict[str, Row] = {
    "amp": Absent("apex is not used; give bf16 or fp16"),
    "elasticity": Absent("the batch is given; any number of ranks that divides it can resume the run"),
    "autotuning": Absent("nothing is tuned automatically"),
    "progressive_layer_drop": Absent("every layer is trained in every step"),
    "quantize_training": Absent("weights are not quantised in training"),
    "compression_training": Absent("the model is not compressed in training"),
    "weight_quantization": Absent("weights are not quantised"),
    "eigenvalue": Absent("weights are not quantised in training, which this would guide"),
    "curriculum_learning": Absent("the sequence length is constant"),
    "data_efficiency": Absent("samples are drawn in a fixed order, and every token is computed"),
    "sparse_attention": Absent("attention is dense and causal"),
    "hybrid_engine": Absent("the engine trains; it has no inference mode of its own"),
    "nebula": Absent("checkpoints are written to --save"),
    "pipeline": Absent("there is no pipeline parallelism here"),
    "tensor_parallel": Absent(f"tensor parallelism {_OTHER_PARALLELISM}"),
    "expert_parallel": Absent("there are no experts here"),
    "zenflow": Absent("the optimizer step is never split in time"),
    "compile": Absent("--compile compiles each block"),
}

TABLE: dict[str, Row] = {**_TOP, **_PRECISION, **_OPTIMIZER, **_SCHEDULER, **_ZERO, **_OFFLOAD, **_CHECKPOINTING,
                         **_MONITORS, **_ABSENT}
"""Every key that is known, by its path."""

SECTIONS: frozenset[str] = frozenset(
    path[:index] for path in TABLE for index, letter in enumerate(path) if letter == "."
)
"""Every path that holds further keys."""
