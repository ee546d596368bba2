"""The whole configuration of a run: one frozen section per topic, checks across sections, and settings without effect.

    Config().model.num_layers        build_config({"num_layers": 2, "bf16": True})

A section checks itself in `__post_init__`; what needs the world size is in `Config.check_world`.
Not here: parsing (cli.py), DeepSpeed's JSON (ds_json.py), anything that opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import InitVar, asdict, dataclass, field, fields
from typing import Any

from megatron.config.model_config import PRESETS, DataConfig, LayerDropConfig, ModelConfig, QuantizeConfig, TrainConfig
from megatron.config.optimizer_config import (AUTO_STEPS, DEFAULT_WARMUP_FRACTION, ONE_BIT_OPTIMIZERS, OPTIMIZERS,
                                              OptimConfig, ScheduleConfig)
from megatron.config.run_config import AutotuningConfig, LogConfig, ProfileConfig, SaveConfig
from megatron.config.schema import (ErrorCollector, ErrorList, FlagToKeyNames, Needs, error_sentences, fields_of,
                                    flag_name, location_presence, require, setting_of)
from megatron.config.zero_config import (FP8_ALIGNMENT, OffloadConfig, ParallelConfig, PrecisionConfig,
                                         RecomputeConfig, ZeroConfig,
                                         data_parallel_size)
from megatron.errors import ConfigError

__all__ = [
    "PRESETS", "SECTIONS", "AutotuningConfig", "Config", "DataConfig", "LayerDropConfig", "LogConfig", "ModelConfig",
    "OffloadConfig", "OptimConfig", "ParallelConfig", "PrecisionConfig", "ProfileConfig", "QuantizeConfig",
    "RecomputeConfig", "SaveConfig", "ScheduleConfig", "TrainConfig", "ZeroConfig", "build_config",
    "data_parallel_size", "flag_name", "require",
]


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    layer_drop: LayerDropConfig = field(default_factory=LayerDropConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    autotuning: AutotuningConfig = field(default_factory=AutotuningConfig)
    # not sections, not saved: notes printed once at the start, and the names of flags in the JSON file
    notes: tuple[str, ...] = field(default=(), compare=False)
    key_names: FlagToKeyNames = field(default_factory=FlagToKeyNames, compare=False)
    collector: InitVar[ErrorCollector | None] = None  # receives errors across sections; None: they are raised

    def __post_init__(self, collector: ErrorCollector | None) -> None:
        errors = ErrorList(self.settings())
        self._check_model_and_schedule(errors.require)
        self._check_methods(errors.require)
        if collector is None:
            errors.raise_if_any()
        else:
            collector.add_errors(errors)

    def _check_model_and_schedule(self, require: Callable[..., None]) -> None:
        model, schedule, tp = self.model, self.schedule, self.parallel.model_parallel_size
        require(self.seq_length <= model.max_position_embeddings, "{seq_length} {length} is above "
                "{max_position_embeddings=}, the size of the position table: give a shorter {seq_length}, or for a "
                "new model a larger {max_position_embeddings}", length=self.seq_length)
        for name in ("num_attention_heads", "num_query_groups", "hidden_size"):
            value = getattr(model, name)
            require(value is None or value % tp == 0, f"{{{name}=}} is not divisible by {{model_parallel_size=}}")
        require(model.ffn_size % tp == 0, "{intermediate_size} {width} is not divisible by {model_parallel_size=}",
                width=model.ffn_size)
        require(not self.parallel.sequence_parallel or self.seq_length % tp == 0, "{sequence_parallel} gives each "
                "rank as many positions, and {seq_length} {length} is not divisible by {model_parallel_size=}",
                length=self.seq_length)
        if self.precision.fp8:
            sizes = {"{hidden_size}": model.hidden_size // tp, "{intermediate_size}": model.ffn_size // tp,
                     "{num_query_groups} x head size": model.kv_heads * model.head_size // tp,
                     "{batch_size} x {seq_length}": self.train.batch_size * self.seq_length,
                     "{make_vocab_size_divisible_by}": model.make_vocab_size_divisible_by}
            for name, size in sizes.items():
                require(size % FP8_ALIGNMENT == 0, f"{{fp8}} needs multiples of {FP8_ALIGNMENT} on each rank: {name} "
                        f"gives {size}")
            require(not model.memory_centric_tiled_linear, "{fp8} and {memory_centric_tiled_linear} exclude each "
                    "other: tiles have products of their own; leave one out")
        if model.memory_centric_tiled_linear:
            require(tp == 1, "{memory_centric_tiled_linear} and {model_parallel_size=} exclude each other: both cut "
                    "the matrices of a block; give one of them")
            require(self.save.load_hf is None, "{load_hf} and {memory_centric_tiled_linear} exclude each other: its "
                    "matrices are whole; give one of them")
            require(not self.quantize.quantize_training,
                    "{quantize_training} and {memory_centric_tiled_linear} exclude each other: weights are scaled by "
                    "groups of rows of whole matrices, which are cut there; leave one out")

        warmup, whole = self.warmup_steps, self.decay_iters
        if schedule.lr_warmup_iters is not None and schedule.warmup is not None:
            steps = int(schedule.warmup * whole)
            require(steps == schedule.lr_warmup_iters, "{warmup=} is {steps} steps of {lr_decay_iters} {whole}, but "
                    "{lr_warmup_iters} is {given}: give one of them", steps=steps, whole=whole,
                    given=schedule.lr_warmup_iters)
        end = "{lr_decay_iters=}" if schedule.lr_decay_iters else "{train_iters=}"
        require(warmup <= whole, f"{{lr_warmup_iters}} {{steps}} is above {end}: the rate would never reach its peak",
                steps=warmup)
        steps = schedule.lr_wsd_decay_iters or 0
        require(schedule.lr_decay_style != "WSD" or warmup + steps <= whole,
                f"{{lr_wsd_decay_iters}} {{steps}} and a warm-up of {{warmup_steps}} steps are more than {end}",
                steps=steps, warmup_steps=warmup)

    def _check_methods(self, require: Callable[..., None]) -> None:
        """Checks of the stage, offloading, CUDA graphs, recomputation, layer drop and the optimizer."""
        stage, offload, optim, recompute = self.zero.zero_stage, self.offload, self.optim, self.recompute
        layer_drop = self.layer_drop.progressive_layer_drop
        require(offload.offload_optimizer_device == "none" or stage > 0,
                "{offload_optimizer_device=} needs {zero_stage} 1, 2 or 3, not 0")
        require(offload.offload_param_device == "none" or stage == 3, "{offload_param_device=} needs {zero_stage} 3, "
                "not {stage}: other stages keep whole parameters on the device", stage=stage)
        if self.train.cuda_graphs:
            require(stage < 3,
                    "{cuda_graphs} needs {zero_stage} 0, 1 or 2: at stage 3 parameters have no fixed address")
            require(not recompute.checkpoint_activations,
                    "{cuda_graphs} and {checkpoint_activations} exclude each other: the replay of a recomputed forward "
                    "takes the memory of the backward under way; leave one out")
            require(not layer_drop, "{progressive_layer_drop} and {cuda_graphs} exclude each other: what is replayed "
                    "is always the same, and each step leaves out other blocks; leave one out")
            require(not self.quantize.quantize_eigenvalue, "{quantize_eigenvalue} and {cuda_graphs} exclude each "
                    "other: an eigenvalue takes forwards that no step follows; leave one out")
        buffered = recompute.checkpoint_activations and recompute.contiguous_memory_optimization
        require(not buffered or (recompute.number_checkpoints or self.chunks) >= self.chunks,
                "{number_checkpoints=} is below the {chunks} chunks of {num_layers=} with {checkpoint_num_layers=}: "
                "leave it out", chunks=self.chunks)
        require(not self.train.skip_train or (self.save.load or self.save.load_hf) is not None,
                "{skip_train} without weights to evaluate: the model's would be random; give {load} or {load_hf}")
        require(not layer_drop or self.zero.ignore_unused_parameters, "{progressive_layer_drop} needs "
                "{ignore_unused_parameters}: a block that is left out has no gradient")
        require(not layer_drop or self.model.num_layers > 1, "{progressive_layer_drop} needs {num_layers} of at least "
                "2, not 1: the first block is never left out")
        if optim.optimizer in ONE_BIT_OPTIMIZERS:
            require(stage < 2, "{optimizer=} needs {zero_stage} 0 or 1, not {stage}: each rank says what its own "
                    "gradients are, whole, and from stage 2 on they are summed and split as they are made", stage=stage)
            require(optim.skip_step_on_spike is None, "{optimizer=} and {skip_step_on_spike} exclude each other: its "
                    "norm changes when compression begins; leave one out")
            require(self.zero.zero_shard_group_size is None, "{optimizer=} and {zero_shard_group_size} exclude each "
                    "other: every rank is a server of the momentum; leave one out")
            require(offload.offload_optimizer_device == "none",
                    "{optimizer=} and {offload_optimizer_device=} exclude each other: what a rank says is made of "
                    "the momentum, on the device; leave one out")
        if optim.optimizer == "muon":
            require(not self.model.memory_centric_tiled_linear,
                    "{optimizer=} and {memory_centric_tiled_linear} exclude each other: the matrices that are made "
                    "orthogonal never exist whole there; leave one out")
            hyper = optim.hyper_parameters()
            require(self.schedule.lr > 0 or hyper["muon_lr"] is hyper["adam_lr"] is None, "{lr} is 0, and muon_lr and "
                    "adam_lr are rates beside it, which follow its schedule: give one above 0")

    @property
    def chunks(self) -> int:
        """Recomputed chunks of blocks in one forward."""
        return math.ceil(self.model.num_layers / self.recompute.checkpoint_num_layers)

    @property
    def seq_length(self) -> int:
        return self.data.seq_length or self.model.max_position_embeddings

    @property
    def decay_iters(self) -> int:
        """The step at which the learning rate reaches its final value."""
        return self.schedule.lr_decay_iters or max(1, self.train.train_iters)

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises to its peak."""
        section = self.schedule
        share = DEFAULT_WARMUP_FRACTION if section.warmup is None else section.warmup
        return int(share * self.decay_iters) if section.lr_warmup_iters is None else section.lr_warmup_iters

    def check_world(self, world_size: int) -> None:
        """Raise a ConfigError if this number of ranks does not fit the configuration."""
        dp = data_parallel_size(world_size, self.parallel.model_parallel_size)
        micro, batch = self.train.batch_size, self.train.global_batch_size
        self.zero.shard_ranks(dp)
        require(batch is None or batch % (micro * dp) == 0, f"--global-batch-size {batch} is not divisible by "
                f"--batch-size {micro} x data parallel size {dp} = {micro * dp}")
        if (ramp := self.train.batch_ramp) is not None and batch is not None:
            start, increment, _ = ramp
            require(start % (micro * dp) == 0 == increment % (micro * dp) and start <= batch
                    and (batch - start) % increment == 0, f"--rampup-batch-size {start} {increment}: expected "
                    f"multiples of --batch-size {micro} x data parallel size {dp} = {micro * dp} that lead from START "
                    f"to --global-batch-size {batch} in whole increments")
        profile = self.profile
        require(profile.profile_steps is None or profile.profile_rank < world_size, f"--profile-rank "
                f"{profile.profile_rank} is not one of the {world_size} ranks, which are numbered from 0")

    def global_batch_size(self, dp_size: int) -> int:
        return self.train.global_batch_size or self.train.batch_size * dp_size

    def accumulation(self, dp_size: int) -> int:
        """Micro-batches per optimizer step."""
        return self.global_batch_size(dp_size) // (self.train.batch_size * dp_size)

    def settings(self) -> dict[str, Any]:
        """Field -> value, of all sections."""
        return {name: value for section in SECTIONS for name, value in vars(getattr(self, section)).items()}

    def rank_invariant_settings(self) -> dict[str, Any]:
        """Flag -> value, for everything that must be equal on all ranks; of paths only whether they are given."""
        return {flag_name(name): location_presence(value) if setting_of(FIELDS[name]).is_location else value
                for name, value in self.settings().items()}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain JSON values, section by section (saved in every checkpoint)."""
        return {name: {key: list(value) if isinstance(value, tuple) else value
                       for key, value in asdict(getattr(self, name)).items()} for name in SECTIONS}


# Section name -> its dataclass; field names are unique across sections (tested).
SECTIONS: dict[str, type] = {f.name: f.default_factory for f in fields(Config)  # type: ignore[misc]
                             if f.name not in ("notes", "key_names")}
FIELDS = {item.name: item for section in SECTIONS.values() for item in fields(section)}


def build_config(values: Mapping[str, Any], collector: ErrorCollector | None = None) -> Config:
    """A Config from flat field values. Errors are raised, or added to `collector`; their fields keep the defaults."""
    errors = ErrorCollector() if collector is None else collector
    assert values.keys() <= FIELDS.keys(), f"no section has {', '.join(sorted(values.keys() - FIELDS.keys()))}"
    sections: dict[str, Any] = {}
    for name, section in SECTIONS.items():
        given = {item.name: values[item.name] for item in fields(section) if item.name in values}
        while name not in sections:
            try:
                sections[name] = section(**given)
            except ConfigError as error:  # go on without the wrong values
                sentences = error_sentences(error)
                errors.add_errors(sentences)
                wrong = frozenset[str]().union(*map(fields_of, sentences))
                given = {field: value for field, value in given.items() if field not in wrong} \
                    if wrong & given.keys() else {}
    config = Config(**sections, collector=errors)
    if collector is None:
        errors.raise_if_any()
    return config


def config_to_flags(settings: Mapping[str, Any]) -> list[str]:
    """The flags of the fields that differ from their defaults; values may be those of JSON."""
    flags = list[str]()
    for name, item in FIELDS.items():
        value, flag = settings.get(name), flag_name(name)
        value = tuple(value) if isinstance(value, list) else value
        if value is None or value == item.default:
            continue
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, repr(value) if isinstance(value, float) else str(value)]
    return flags


def unused_settings(config: Config, candidates: Collection[str], given: Collection[str]) -> Iterator[str]:
    """A sentence for the fields of `candidates` that have no effect; `given` are all fields that were set explicitly.
    Files write out switches that are off, and DeepSpeed's guide the defaults of what a choice leaves unread."""
    values = config.settings()
    idle: dict[str, list[str]] = {}  # why -> the settings
    for name in dict.fromkeys(candidates):
        value, default, declared = values[name], FIELDS[name].default, setting_of(FIELDS[name])
        needs: Needs | None = {} if declared.unread_because else declared.needs
        missing = None if needs else needs  # {}: never read
        while needs:  # the outermost ones that are not met
            if not any(values[switch] in wanted if wanted else values[switch] for switch, wanted in needs.items()):
                missing = needs
            needs = setting_of(FIELDS[next(iter(needs))]).needs
        if missing is None:
            continue
        if () in missing.values():
            is_news = (value is not False or bool(default)) and missing.keys().isdisjoint(given)
        else:
            is_news = value != default and not (value is False and name.startswith("offload_") and
                                                flag_name(name) in config.key_names.keys_of_given)
        if is_news:
            lacking = (f"{flag_name(switch)} {' or '.join(map(str, wanted))}".rstrip()
                       for switch, wanted in missing.items())
            why = f" without {' or '.join(lacking)}" if missing else f": {declared.unread_because}"
            idle.setdefault(why, []).append(name)
    for why, names in idle.items():
        *most, last = map(flag_name, names)
        yield (f"{', '.join(most)} and {last} have" if most else f"{last} has") + f" no effect{why}"
    on = [name for name in dict.fromkeys(candidates) if values[name] is not False]
    optimizer = config.optim.optimizer
    for name in on:
        readers = [other for other, takes in OPTIMIZERS.items() if name in " ".join(takes.fields.values()).split()]
        if readers and optimizer not in readers:
            yield f"{flag_name(name)} has no effect with --optimizer {optimizer}: {', '.join(readers)} read it"
    if "weight_decay" in on and not OPTIMIZERS[optimizer].has_weight_decay:
        yield f"--weight-decay has no effect with --optimizer {optimizer}: its weights do not decay"


def run_errors(config: Config) -> ErrorList:
    """Errors of methods that would never start in this run, or that do not fit the model."""
    errors = ErrorList(config.settings())
    iters, optim, quantize = config.train.train_iters, config.optim, config.quantize
    if optim.optimizer in ONE_BIT_OPTIMIZERS and optim.freeze_step is None:
        each = max(1, round(1 / (1 - optim.adam_beta2)))
        errors.require(not 0 < iters <= 2 * each, "{onebit_freeze_step=} looks at the variance every {each} steps "
                       "with {adam_beta2=}, and can freeze it after {both}, which is not below {train_iters=}, so "
                       "that nothing would travel at one bit: give a number, 15 to 25 % of the steps are usual",
                       each=each, both=2 * each)
    elif optim.optimizer in ONE_BIT_OPTIMIZERS and optim.freeze_step is not None:
        errors.require(not 0 < iters <= optim.freeze_step, "{onebit_freeze_step=} is not below {train_iters=}, so "
                       "that nothing would travel at one bit: 15 to 25 % of the steps are usual, or give {auto}",
                       auto=AUTO_STEPS)
    if quantize.quantize_training:
        errors.require(not 0 < iters < quantize.quantize_offset,
                       "{quantize_offset=} is above {train_iters=}, so that nothing would be rounded: give 0 to "
                       "round from the first step on, or fewer steps than the run has")
        hidden, groups = config.model.hidden_size, quantize.quantize_groups  # the engine checks this for any model
        rows = {"3 x --hidden-size": 3 * hidden, "--hidden-size": hidden, "--intermediate-size": config.model.ffn_size}
        uneven = ", ".join(f"{count} ({name})" for name, count in rows.items() if count % groups)
        errors.require(not uneven, "{quantize_groups=} does not divide the rows of every matrix, {uneven}: give a "
                       "divisor of all", uneven=uneven)
    return errors
