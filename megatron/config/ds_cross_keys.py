"""DeepSpeed JSON keys that depend on each other: optimizer and scheduler parameters, monitors, layer drop, batch sizes.

Each generator yields (field, value, path of the key it came from); what does not fit goes to the error list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.ds_keys import DsKeyValues
from megatron.config.model_config import TrainConfig
from megatron.config.optimizer_config import (AUTO_STEPS, DEEPSPEED_TYPES, OPTIMIZER_SWITCHES, OPTIMIZERS,
                                              SCHEDULER_TYPES, OptimConfig)
from megatron.config.schema import require

FieldValue = tuple[str, Any, str]  # (field, value, path of the key)
OPTIMIZER_PARAMS, FREEZE_STEP = "optimizer.params.", "freeze_step"
# optimizer parameters with the same meaning for every type
COMMON_OPTIMIZER_PARAMS = ("max_grad_norm", "fp32_optimizer_states", "torch_adam", "cuda_aware", "comm_backend_name",
                           "ns_method")
WARMUP_STEPS, TOTAL_STEPS = "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"
WARMUP_TYPE, COSINE_FLOOR = "scheduler.params.warmup_type", "scheduler.params.cos_min_ratio"
WARMUP_PEAK = "scheduler.params.warmup_max_lr"
_WARMUP_PARAMS = "warmup_num_steps warmup_type last_batch_iteration"
# scheduler.type -> its parameters
SCHEDULER_PARAMS = {
    "WarmupLR": f"{_WARMUP_PARAMS} warmup_min_lr warmup_max_lr",
    "WarmupDecayLR": f"{_WARMUP_PARAMS} warmup_min_lr warmup_max_lr total_num_steps",
    "WarmupCosineLR": f"{_WARMUP_PARAMS} warmup_min_ratio total_num_steps cos_min_ratio",
    "OneCycle": "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
    "cycle_max_mom decay_mom_rate last_batch_iteration",
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
    "last_batch_iteration"}
DEEPSPEED_WARMUP_STEPS, DEEPSPEED_COSINE_FLOOR, DEEPSPEED_CYCLE_STEPS = 1000, 0.0001, 2000
# (field, its name in a group of compression_training, its key in quantize_training)
_WEIGHT_GROUP_FIELDS = (
    ("quantize_start_bits", "start_bits", "quantize_training.quantize_bits.start_bits"),
    ("quantize_target_bits", "target_bits", "quantize_training.quantize_bits.target_bits"),
    ("quantize_period", "quantization_period", "quantize_training.quantize_schedule.quantize_period"))
DEEPSPEED_JOB, DEEPSPEED_PROJECT = "DeepSpeedJobName", "deepspeed"


def optimizer_fields(ds_values: DsKeyValues, flags: Mapping[str, Any]) -> Iterator[FieldValue]:
    """Fields set by parameters whose meaning depends on the optimizer; a flag may name it if the file does not."""
    if "optimizer.type" in ds_values.invalid_keys:
        return
    named = ds_values.keys.get("optimizer.type")
    optimizer = DEEPSPEED_TYPES[named] if named else flags.get("optimizer", OptimConfig.optimizer)
    params, own = OPTIMIZERS[optimizer], {}
    for path in (*ds_values.keys, *ds_values.auto_keys):
        name: str = path.removeprefix(OPTIMIZER_PARAMS)
        value: Any = ds_values.keys.get(path)
        if not path.startswith(OPTIMIZER_PARAMS) or name in COMMON_OPTIMIZER_PARAMS:
            continue
        if name in OPTIMIZER_SWITCHES and name not in params.extra and value is False:
            continue
        if name not in params.parameters:
            ds_values.errors.append(f"{path} is not a parameter of {named or optimizer}, which takes "
                                    f"{', '.join(params.parameters)}; leave it out")
        elif path in ds_values.auto_keys:
            if name == FREEZE_STEP:
                yield params.fields[name], AUTO_STEPS, path
        else:
            parts = params.fields.get(name, "").split()
            yield from zip(parts, value if len(parts) > 1 else [str(value) if name == FREEZE_STEP else value],
                           [path, path])
            if name in params.extra:
                own[path] = f"{name}={json.dumps(value)}"
    if own:
        yield "optimizer_params", tuple(own.values()), next(iter(own))
    if named and optimizer == "sgd" and "sgd_momentum" not in flags \
            and not ds_values.is_given(OPTIMIZER_PARAMS + "momentum"):
        yield "sgd_momentum", 0.0, "optimizer.type"  # as in DeepSpeed; the flag's default is Megatron's


def param_group_min_lr(ds_values: DsKeyValues) -> float | None:
    """The rate's floor as a fraction of each param group's peak; None if the scheduler sets one peak for all."""
    kind = ds_values.keys.get("scheduler.type")
    if kind == "WarmupCosineLR":
        return float(ds_values.keys.get(COSINE_FLOOR, DEEPSPEED_COSINE_FLOOR))
    return 0.0 if kind in ("WarmupLR", "WarmupDecayLR") and WARMUP_PEAK not in ds_values.keys else None


def scheduler_fields(ds_values: DsKeyValues, flags: Mapping[str, Any], peak: float) -> Iterator[FieldValue]:
    """Fields of the scheduler section. `peak` is the learning rate if neither the file nor a flag sets one."""
    kind = ds_values.keys.get("scheduler.type")
    if kind is None:
        tried = (*ds_values.keys, *ds_values.auto_keys, *ds_values.invalid_keys)
        if "scheduler.type" not in tried and any(path.startswith("scheduler.params.") for path in tried):
            ds_values.errors.append(f"scheduler.type is missing; expected {' or '.join(SCHEDULER_TYPES)}")
        return
    for path in filter(lambda path: path.startswith("scheduler.params."), (*ds_values.keys, *ds_values.auto_keys)):
        ds_values.errors.require(path.removeprefix("scheduler.params.") in SCHEDULER_PARAMS[kind].split(),
                                 f"{path} is not a parameter of {kind}; leave it out")
    if kind.startswith("Warmup"):
        yield from _warm_up_fields(ds_values, kind, flags, peak)
        return
    ends = ("scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr") if kind == "OneCycle" else ()
    for path in ends:
        ds_values.errors.require(ds_values.is_given(path) or path in ds_values.invalid_keys, f"OneCycle needs {path}")
    if ds_values.keys.keys() >= {*ends}:
        yield from _cycle_or_range_fields(ds_values, kind)


def _warm_up_fields(ds_values: DsKeyValues, kind: str, flags: Mapping[str, Any], peak: float) -> Iterator[FieldValue]:
    if WARMUP_STEPS in ds_values.invalid_keys or TOTAL_STEPS in ds_values.invalid_keys:
        return
    total, warmup = ds_values.keys.get(TOTAL_STEPS), ds_values.keys.get(WARMUP_STEPS)
    if warmup is None and not (WARMUP_STEPS in ds_values.auto_keys or flags.keys() & {"warmup", "lr_warmup_iters"}):
        warmup = DEEPSPEED_WARMUP_STEPS
    if kind == "WarmupLR":
        total = max(1, warmup or 0)  # a constant rate has no end of decay
    if total is None:
        ds_values.errors.append(f"{kind} needs {TOTAL_STEPS} as a number")
        return
    if warmup is not None and warmup > total:
        ds_values.errors.append(f"{WARMUP_STEPS} {warmup} is above {TOTAL_STEPS} {total}")
        return
    where = ds_values.first_given(WARMUP_STEPS, "scheduler.type")
    yield "lr_decay_style", SCHEDULER_TYPES[kind], "scheduler.type"
    if warmup is not None:
        yield "lr_warmup_iters", warmup, where
    if kind != "WarmupLR":
        yield "lr_decay_iters", total, TOTAL_STEPS
    elif warmup is not None:
        yield "lr_decay_iters", total, where
    if warmup != 0 and "warmup_type" not in flags and not ds_values.is_given(WARMUP_TYPE):
        yield "warmup_type", "log", "scheduler.type"  # as in DeepSpeed
    if kind == "WarmupDecayLR":
        yield "min_lr", 0.0, "scheduler.type"
    elif kind == "WarmupCosineLR":  # its floor is a fraction of a peak that a flag may set
        peak = flags.get("lr", ds_values.keys.get("optimizer.params.lr", peak))
        floor = peak * ds_values.keys.get(COSINE_FLOOR, DEEPSPEED_COSINE_FLOOR)
        yield "min_lr", floor, ds_values.first_given(COSINE_FLOOR, "scheduler.type")


def _cycle_or_range_fields(ds_values: DsKeyValues, kind: str) -> Iterator[FieldValue]:
    """OneCycle: from cycle_min_lr to cycle_max_lr and back, then decay. LRRangeTest: growth in equal steps."""
    def of(name: str, default: Any = None) -> tuple[Any, str]:
        path = f"scheduler.params.{name}"
        return ds_values.keys.get(path, default), path if path in ds_values.keys else "scheduler.type"

    if kind == "LRRangeTest":
        stairs, where = of("lr_range_test_staircase", False)
        yield "lr_decay_style", "range-test-stairs" if stairs else "range-test", where
        for field, name, default in (("min_lr", "min_lr", 0.001), ("lr", "min_lr", 0.001),
                                     ("lr_decay_iters", "step_size", DEEPSPEED_CYCLE_STEPS),
                                     ("cycle_decay", "step_rate", 1.0)):
            yield field, *of(f"lr_range_test_{name}", default)
        return
    first, where = of("cycle_first_step_size", DEEPSPEED_CYCLE_STEPS)
    second, where_second = of("cycle_second_step_size", first)
    interval, _ = of("decay_step_size", 0)
    yield "lr_decay_style", SCHEDULER_TYPES[kind], "scheduler.type"
    yield "min_lr", *of("cycle_min_lr")
    yield "lr", *of("cycle_max_lr")
    yield "lr_warmup_iters", first, where
    yield "lr_decay_iters", first + second, where_second
    for field, name in (("cycle_decay", "decay_lr_rate"), ("cycle_mom_growth", "decay_mom_rate")):
        rate, path = of(name, 0.0)
        yield field, rate / interval if interval else 0.0, path
    for name, default in (("cycle_momentum", True), ("cycle_min_mom", 0.8), ("cycle_max_mom", 0.9)):
        yield name, *of(name, default)


def monitor_fields(ds_values: DsKeyValues) -> Iterator[FieldValue]:
    """Fields of the scalar writers."""
    for section, field in (("tensorboard", "tensorboard_dir"), ("csv_monitor", "csv_dir")):
        if ds_values.keys.get(f"{section}.enabled"):
            folder = ds_values.keys.get(f"{section}.output_path") or "runs"
            folder = os.path.join(folder, ds_values.keys.get(f"{section}.job_name", DEEPSPEED_JOB))
            yield field, folder, ds_values.first_given(f"{section}.output_path", f"{section}.enabled")
    if ds_values.keys.get("wandb.enabled"):
        yield ("wandb_project", ds_values.keys.get("wandb.project", DEEPSPEED_PROJECT),
               ds_values.first_given("wandb.project", "wandb.enabled"))
        for name in ("group", "team"):
            if f"wandb.{name}" in ds_values.keys:
                yield f"wandb_{name}", ds_values.keys[f"wandb.{name}"], f"wandb.{name}"


def layer_drop_fields(ds_values: DsKeyValues, flags: Mapping[str, Any]) -> Iterator[FieldValue]:
    """As in DeepSpeed, a file without theta drops nothing; the flag's default is the published value."""
    theta = "progressive_layer_drop.theta"
    if theta in ds_values.keys:
        yield "pld_theta", ds_values.keys[theta], theta
    elif (ds_values.keys.get("progressive_layer_drop.enabled") and "pld_theta" not in flags
          and not ds_values.is_given(theta)):
        yield "pld_theta", 1.0, theta


def weight_group_fields(ds_values: DsKeyValues, flags: Mapping[str, Any]) -> Iterator[FieldValue]:
    """Bits of compression_training's weight group; DeepSpeed's defaults unless a flag or another key sets them."""
    path = "compression_training.weight_quantization.different_groups"
    if path not in ds_values.keys:
        return
    ((group, settings),) = ds_values.raw_values[path].items()
    for (field, name, other), value in zip(_WEIGHT_GROUP_FIELDS, ds_values.keys[path], strict=True):
        if name in settings["params"]:
            yield field, value, f"{path}.{group}.params.{name}"
        elif field not in flags and not ds_values.is_given(other):
            yield field, value, path


# ---- batch sizes: train batch = micro-batch x accumulation x data parallel size, solved or refused -----------------


BATCH_SIZE_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BATCH_FIELDS = {"train_batch_size": "global_batch_size", "train_micro_batch_size_per_gpu": "batch_size"}

ValueAndSource = tuple[int, str] | None  # (number, name of its source), or None


def solve_batch_sizes(total: ValueAndSource, micro: ValueAndSource, accumulation: ValueAndSource,
                      dp_size: int) -> tuple[int, int]:
    """(train batch, micro-batch); computes missing values, and raises if given ones contradict each other."""
    if total is None:
        size, steps = (micro or (TrainConfig.batch_size, ""))[0], (accumulation or (1, ""))[0]
        return size * steps * dp_size, size
    if micro is None or accumulation is None:
        name, given = ("micro_batch", micro) if micro else ("accumulation", accumulation)
        product = (given[0] if given else 1) * dp_size
        named = f"{name} {given[0]} ({given[1]}) x " if given else ""
        require(total[0] % product == 0, f"train_batch_size {total[0]} ({total[1]}) is not divisible by {named}"
                f"data_parallel {dp_size}" + (f" = {product}" if given else ""))
        return total[0], micro[0] if micro else total[0] // product
    product = micro[0] * accumulation[0] * dp_size
    sources = dict.fromkeys((total[1], micro[1], accumulation[1]))
    require(total[0] == product, f"train_batch_size {total[0]} != micro_batch {micro[0]} x accumulation "
            f"{accumulation[0]} x data_parallel {dp_size} = {product} ({', '.join(sources)})")
    return total[0], micro[0]
