"""`zero.initialize` builds an engine for any model and loop from a DeepSpeed-style configuration;
`zero.init_distributed`.

    engine, optimizer, loader, scheduler = zero.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from megatron.config import ds_cross_keys, ds_json
from megatron.config.schema import ErrorCollector
from megatron.config.ds_cross_keys import BATCH_SIZE_KEYS
from megatron.config.ds_keys import DsKeyValues
from megatron.config.optimizer_config import DEEPSPEED_TYPES, OPTIMIZERS
from megatron.config.tree import Config, ModelConfig
from megatron.distributed import exit_codes, process_group
from megatron.distributed.consistency import assert_equal_across_ranks
from megatron.distributed.process_group import DEFAULT_TIMEOUT_SECONDS
from megatron.distributed.watchdog import start_watchdog
from megatron.distributed.step_consistency import to_plain_values
from megatron.errors import ConfigError
from megatron.metrics.sinks import WandbProject
from megatron.optim.adam import MAX_TILE_NUMEL
from megatron.optim.muon import Muon
from megatron.optim.rule import ParamGroup, UpdateRule
from megatron.optim.torch_rule import build_rule, from_torch
from megatron.zero.api.engine import Engine
from megatron.zero.api.engine_features import MonitorConfig, check_forward_signature
from megatron.zero.api.init import groups_from_mpu
from megatron.zero.api.model_checks import check_argument, check_parameters, check_same_model, claim_model
from megatron.zero.api.offload_plan import create_engine_storage, offload_notes
from megatron.zero.api.torch_interfaces import LRScheduleAdapter, LRSchedulerProtocol, ZeroOptimizer, build_lr_schedule
from megatron.zero.engine import NO_OPTIMIZER, ZeroEngine
from megatron.zero.flat_buffers import DTYPES
from megatron.zero.layout import align
from megatron.zero.muon_groups import muon_split_note, split_muon_groups
from megatron.zero.stages import ineffective_on_gpu_notes
from mpu.groups import Groups

DEFAULT_PORT = 29500
OTHER_LAUNCHER_PREFIXES = ("SLURM_", "OMPI_")


def initialize(args: Namespace | None = None, model: nn.Module | None = None,
               optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
               model_parameters: Iterable[nn.Parameter] | Iterable[ParamGroup] | None = None,
               training_data: Dataset[Any] | None = None, lr_scheduler: Any = None,
               distributed_port: int = DEFAULT_PORT, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
               config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
               config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
               device: torch.device | None = None,
               ) -> tuple[Engine, ZeroOptimizer, DataLoader[Any] | None, LRSchedulerProtocol | None]:
    """Build (engine, optimizer, loader of `training_data` or None, learning rate scheduler or None).

    `config` is a path or dict with DeepSpeed's keys (or `args.deepspeed_config`). `optimizer` may be an optimizer or a
    callable that takes the parameters, default the config's; `lr_scheduler` a scheduler or a callable that takes the
    optimizer, default the config's. Without an optimizer, a scheduler and `model_parameters` the engine only evaluates:
    it freezes the parameters and keeps no masters or optimizer state. `mpu` gives the groups of a tensor parallel
    model. Parameters get the values of data parallel rank 0 and move one by one to `device` (default: this rank's) and
    to the working precision. Collective; raises ConfigError.
    """
    exit_codes.install_excepthook()
    check_argument("model", model, nn.Module, "an nn.Module")
    check_argument("training_data", training_data, Sized | None, "a dataset with a length")
    if not hasattr(lr_scheduler, "state_dict"):
        check_argument("lr_scheduler", lr_scheduler, Callable | None, "a scheduler, or a function that makes one")
    assert model is not None
    argument, source = _config_source(args, config, config_params)
    if isinstance(source, Config):  # the trainer has initialized torch.distributed
        process_group.init_process_group()
    else:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    groups = groups_from_mpu(mpu)
    config, ds_config = _read_config(source, argument, groups)
    if isinstance(shape := getattr(model, "config", None), ModelConfig):  # a checkpoint records it
        config = replace(config, model=shape)
    with config.key_names.translate_errors():
        # first: with other settings a rank would take part in other collectives
        assert_equal_across_ranks(config.rank_invariant_settings(), groups.world,
                                  "the ranks give zero.initialize different configurations")
        device = _choose_device(device)
        check_parameters(model)
        # nothing could train: as in DeepSpeed, the engine is for evaluation
        evaluates = not (_is_configured(ds_config, "optimizer") or _is_configured(ds_config, "scheduler")) and \
            all(given is None for given in (optimizer, model_parameters, lr_scheduler))
        if optimizer is None and not (_is_configured(ds_config, "optimizer") or evaluates):
            raise ConfigError(NO_OPTIMIZER)
        rule, param_groups, defaults, client = _build_rule_and_groups(
            config, model, () if evaluates else model_parameters, optimizer)
        if not evaluates:
            _check_groups(model, param_groups)
        if config.layer_drop.progressive_layer_drop:
            check_forward_signature(model)
        # after a function made the optimizer: it may have changed the model
        check_same_model(model, groups.world)
        assert_equal_across_ranks(_optimizer_description(rule, param_groups, model), groups.world,
                                  "the ranks give zero.initialize different optimizers")
        storage, offload_lines = create_engine_storage(config, rule, model, device, groups)
    # from here on the model changes: claim_model marks it if this fails
    with claim_model(model), ExitStack() as on_failure:
        on_failure.callback(storage.close)  # frees NVMe space for a retry
        if evaluates:
            model.requires_grad_(False)
        _move_buffers(model, device, DTYPES[config.precision.name])
        with config.key_names.translate_errors():
            core = ZeroEngine(model, groups, zero=config.zero, precision=config.precision, rule=rule,
                              param_groups=param_groups, device=device, engine_storage=storage,
                              clip_grad=config.optim.clip_grad, spike_sigmas=config.optim.skip_step_on_spike,
                              accumulation=config.accumulation(groups.dp.size),
                              quantize=config.quantize, seed=config.train.seed)
        start_watchdog(core)
        wrapped = ZeroOptimizer(core, defaults, client)
        scheduler = _build_scheduler(lr_scheduler, wrapped, config, ds_config)
        schedule_state = {} if scheduler is None else to_plain_values(scheduler.state_dict())
        assert_equal_across_ranks({"lr_scheduler": type(scheduler).__name__, **schedule_state}, groups.world,
                                  "the ranks give zero.initialize different schedules")
        engine = Engine(core, config, wrapped, scheduler, _monitor_config(config, ds_config), mpu)
        on_failure.callback(engine.monitor.close)
        engine.notes = [*offload_lines, *_engine_notes(config, core, None if ds_config else config.train.train_iters)]
        if groups.world.rank == 0:
            if ds_config is not None:
                _print_notes(ds_config, engine)
            for number, group in enumerate(() if evaluates else param_groups):
                if not group["params"]:
                    print(f"warning: param group {number} of the optimizer is empty: its hyper-parameters apply to "
                          "nothing")
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
        on_failure.pop_all()  # the engine owns storage and monitor now
    return engine, wrapped, engine.training_dataloader, scheduler


def _is_configured(ds_config: DsKeyValues | None, section: str) -> bool:
    """Whether the configuration has an optimizer or a scheduler; the trainer's has both."""
    return ds_config is None or f"{section}.type" in ds_config.keys


def _choose_device(device: torch.device | None) -> torch.device:
    """`device` (default: this rank's) with its index; a GPU becomes the current one."""
    device = device or process_group.device_for(process_group.read_environment())
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)  # control messages use the current device
    return device


def _build_scheduler(given: Any, optimizer: ZeroOptimizer, config: Config,
                     ds_config: DsKeyValues | None) -> LRSchedulerProtocol | None:
    """The caller's scheduler, else the configuration's, which sets the rates of the first step."""
    if given is None and _is_configured(ds_config, "scheduler"):
        floor_ratio = None if ds_config is None else ds_cross_keys.param_group_min_lr(ds_config)
        return LRScheduleAdapter(optimizer, build_lr_schedule(config), floor_ratio)
    scheduler: LRSchedulerProtocol | None = given
    if given is not None and not hasattr(given, "state_dict"):
        scheduler = given(optimizer)
    return scheduler


def _monitor_config(config: Config, ds_config: DsKeyValues | None) -> MonitorConfig:
    """What the engine itself reports; nothing for the trainer, which has its own log."""
    if ds_config is None:
        return MonitorConfig()
    keys, log = {**ds_config.keys, **ds_config.engine_values}, config.log
    wandb = None if log.wandb_project is None else WandbProject(log.wandb_project, log.wandb_group, log.wandb_team)
    return MonitorConfig(keys.get("steps_per_print") or 0, keys.get("wall_clock_breakdown", False),
                         keys.get("memory_breakdown", False), log.tensorboard_dir, log.csv_dir, wandb)


def _engine_notes(config: Config, core: ZeroEngine, train_iters: int | None) -> Iterator[str]:
    """What the user should know of the settings; `train_iters`: None if a script has the loop."""
    params_are_sharded = any(bucket.params_are_sharded for bucket in core.all_buckets)
    yield from offload_notes(config, core.engine_storage, params_are_sharded=params_are_sharded)
    yield from (*config.parallel.notes(), *config.layer_drop.notes(), *config.quantize.notes(train_iters),
                *config.profile.notes(train_iters))
    if isinstance(core.rule, Muon):
        yield muon_split_note(core.param_groups)


def _optimizer_description(rule: UpdateRule, param_groups: Iterable[ParamGroup], model: nn.Module) -> dict[str, Any]:
    """For comparison between ranks: the rule, hyper-parameters and parameter names (in any order) of each group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    description: dict[str, Any] = {"the rule": type(rule).__name__}
    for number, group in enumerate(param_groups):
        description |= {f"{name} of param group {number}": to_plain_values(value) for name, value in group.items()
                        if name != "params"}
        in_group = " ".join(sorted(names.get(parameter, "?") for parameter in group["params"]))
        description[f"param group {number}"] = f"{len(group['params'])} parameters ({crc32(in_group.encode()):08x})"
    return description


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config FILE. (`--local_rank` is left to the script.)"""
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument("--deepspeed", action="store_true", help="accepted for old scripts: the engine is always used")
    group.add_argument("--deepspeed_config", "--deepspeed-config", default=None, metavar="FILE",
                       help="JSON configuration")
    return parser


def _config_source(args: Namespace | None, config: Any, config_params: Any) -> tuple[str, Any]:
    """(name, value) of the one argument that gives the configuration. Raises ConfigError unless it is exactly one."""
    by_name = {"args.deepspeed_config": vars(args).get("deepspeed_config") if args is not None else None,
               "config": config, "config_params": config_params}
    given = [name for name, value in by_name.items() if value is not None]
    if len(given) != 1:
        raise ConfigError(f"zero.initialize needs one configuration, found {' and '.join(given) or 'none'}: "
                          "give config= (a path or a dict), or args.deepspeed_config")
    check_argument(given[0], by_name[given[0]], str | os.PathLike | Mapping | Config, "a path, or a dict")
    return given[0], by_name[given[0]]


# Where DeepSpeed's defaults differ from ours; the default learning rate depends on the optimizer.
DEEPSPEED_DEFAULTS = {"clip_grad": 0.0, "weight_decay": 0.0}

# Config sections that belong to the engine entirely.
ENGINE_SECTIONS = ("parallel", "optim", "schedule", "precision", "zero", "offload", "recompute", "layer_drop",
                   "quantize")


def _read_config(source: Any, argument: str, groups: Groups) -> tuple[Config, DsKeyValues | None]:
    """The configuration, and the parsed file or dict; None if `source` is a Config."""
    if isinstance(source, Config):
        return source, None
    errors, sizes = ErrorCollector(), BATCH_SIZE_KEYS[:2]
    ds_config = ds_json.parse_ds_json(source, argument)
    optimizer = DEEPSPEED_TYPES[ds_config.keys.get("optimizer.type", "AdamW")]
    config = ds_json.build_ds_config(ds_config, flags={"model_parallel_size": groups.tp.size},
                                     fallback={**DEEPSPEED_DEFAULTS, "lr": OPTIMIZERS[optimizer].lr},
                                     world_size=groups.world.size, in_engine=True, collector=errors)
    if ds_config.keys.keys().isdisjoint(sizes) and ds_config.invalid_keys.isdisjoint(sizes):
        errors.add_errors([f"give {' or '.join(sizes)} as a number: nothing else says how many samples a step has"
                           + ' ("auto" is for programs that do)' * any(key in ds_config.auto_keys for key in sizes)],
                          ds_config.name)
    errors.raise_if_any()
    return config, ds_config


def _print_notes(ds_config: DsKeyValues, engine: Engine) -> None:
    """Print notes about keys that are read differently or have no effect, and with `dump_state` the whole
    configuration, one value per line."""
    config = engine.config
    lines = [*config.notes]
    for note in (*engine.notes, *(ineffective_on_gpu_notes(config.zero) if engine.device.type == "cuda" else ())):
        in_keys = config.key_names.translate(note)  # keys in place of flags; the file's name tells whose they are
        prefix = f"{ds_config.name}: " if note.startswith(" note: ") and in_keys != note else ""
        lines.append(prefix + in_keys.removeprefix(" note: "))
    ranks, threads = process_group.read_environment().local_world_size, torch.get_num_threads()
    if ranks > 1 and (engine.device.type == "cpu" or config.offload.offload_optimizer_device != "none"):
        lines.append(f"{ranks} ranks on this node compute on {threads} thread{'s' * (threads > 1)} each "
                     "(OMP_NUM_THREADS)")
    for line in lines:
        print(line.strip(), flush=True)
    if ds_config.engine_values.get("dump_state"):
        sizes = engine.train_batch_size(), engine.core.micro_batch, engine.core.accumulation_steps
        tree = {"batch": dict(zip(BATCH_SIZE_KEYS, sizes, strict=True)), **config.as_dict(),
                "report": asdict(engine.monitor.config)}
        print("configuration", *(f"  {section}.{name}: {value}" for section in ("batch", *ENGINE_SECTIONS, "report")
                                 for name, value in tree[section].items()), sep="\n", flush=True)


def _build_rule_and_groups(config: Config, model: nn.Module, parameters: Any, client: Any,
                           ) -> tuple[UpdateRule, list[ParamGroup], dict[str, Any], Optimizer | None]:
    """(rule, param groups, defaults, client optimizer): the client's optimizer, or the config's over `parameters`
    (default: the model's). Groups get the default hyper-parameters that they do not set."""
    given = list(model.parameters() if parameters is None else parameters)
    if client is not None and not isinstance(client, Optimizer):
        client = client(given)
    if client is not None:
        # it is never stepped: its class and its hyper-parameters say what the engine computes
        return from_torch(client), client.param_groups, client.defaults, client
    # Tiles end at row boundaries, so that their size does not change results.
    rule, defaults = build_rule(config.optim, min(MAX_TILE_NUMEL, align(config.zero.sub_group_size)))
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    # the rate of every step if there is no scheduler; a scheduler sets its own at once
    defaults = {"lr": config.schedule.lr, **defaults}
    complete = [{**defaults, **group, "params": list(group["params"])} for group in groups]
    if isinstance(rule, Muon):
        complete = split_muon_groups(model, complete, config.schedule.lr)
    return rule, complete, defaults, None


def _check_groups(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Raise ConfigError unless each trainable parameter is in exactly one group, and groups hold only the model's."""
    # by identity: tensors compare element by element
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    count = Counter(id(parameter) for group in groups for parameter in group["params"])
    strangers = len(count.keys() - names.keys())
    twice = [names[key] for key, times in count.items() if times > 1 and key in names]
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in count]
    if strangers:
        raise ConfigError(f"the optimizer has {strangers} parameters that are not the model's; "
                          "make it from model.parameters()")
    if twice:
        raise ConfigError(f"{twice[0]} is in more than one param group of the optimizer; leave it in one")
    if missing:
        raise ConfigError(f"{len(missing)} parameters are in no param group of the optimizer, {missing[0]} first; "
                          "add them, or freeze them with requires_grad_(False)")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("no parameter of the model requires a gradient: there is nothing to train")


def _move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move buffers to the device, floating point ones to the working precision. (Parameters move with their
    buckets.)"""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device, dtype if buffer.is_floating_point() else None))


def init_distributed(dist_backend: str | None = None, auto_mpi_discovery: bool = True,
                     distributed_port: int = DEFAULT_PORT, verbose: bool = True,
                     timeout: timedelta | float | None = None, init_method: str | None = None,
                     dist_init_required: bool | None = None, config: Any = None, rank: int = -1,
                     world_size: int = -1) -> None:
    """Initialize torch.distributed; may be called again.

    `rank` and `world_size` are for runs without a launcher. `distributed_port` applies if MASTER_PORT is not set, and
    `init_method` (torch's) replaces both. Slurm's and OpenMPI's variables are read unless `auto_mpi_discovery` is off.
    `timeout` (timedelta or seconds) is the limit for a silent peer. `verbose` and `config` are ignored.
    `dist_init_required=False` means that the script has already initialized it.
    """
    exit_codes.install_excepthook()
    if dist_init_required is False:
        return
    environ = {name: value for name, value in os.environ.items()
               if auto_mpi_discovery or not name.startswith(OTHER_LAUNCHER_PREFIXES)}
    for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)):  # -1: not given
        if number >= 0 and environ.setdefault(name, str(number)) != str(number):
            raise ConfigError(f"init_distributed: {name.lower()} is {number}, but the launcher set {name} to "
                              f"{environ[name]}; leave the argument out")
    env = process_group.read_environment(environ)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    # a failed call leaves the environment as it was, for another attempt with other arguments
    with process_group.restore_variables_on_error():
        if env.world_size > 1 and "MEGATRON_STORE_FILE" not in os.environ:
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
        process_group.init_process_group(env, dist_backend, DEFAULT_TIMEOUT_SECONDS if seconds is None else seconds,
                                         init_method=init_method, even_for_one_rank=True)
    # torchrun's variables, if another launcher (or none) was used, so that `read_environment` agrees.
    for name, number in (("RANK", env.rank), ("LOCAL_RANK", env.local_rank), ("WORLD_SIZE", env.world_size),
                         ("LOCAL_WORLD_SIZE", env.local_world_size)):
        os.environ.setdefault(name, str(number))
