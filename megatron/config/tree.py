"""The whole configuration of a run: one frozen section per topic, checks across sections, and settings without effect.

    Config().model.num_layers        build_config({"num_layers": 2, "bf16": True})

A section checks itself in `__post_init__`; what needs the world size is in `Config.check_world`.
Not here: parsing (cli.py), DeepSpeed's JSON (ds_json.py), anything that opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import InitVar, asdict, dataclass, field, fields
from typing import Any

from megatron.config.config_errors import ErrorCollector, ErrorList, FlagToKeyNames, error_sentences, flags_in
from megatron.config.model_config import PRESETS, DataConfig, LayerDropConfig, ModelConfig, QuantizeConfig, TrainConfig
from megatron.config.optimizer_config import (AUTO_STEPS, DEFAULT_WARMUP_FRACTION, ONE_BIT_OPTIMIZERS, OPTIMIZERS,
                                              OptimConfig, ScheduleConfig)
from megatron.config.run_config import AutotuningConfig, LogConfig, ProfileConfig, SaveConfig
from megatron.config.schema import Needs, flag_name, flags_have, location_presence, require, setting_of
from megatron.config.zero_config import (OffloadConfig, ParallelConfig, PrecisionConfig, RecomputeConfig, ZeroConfig,
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
    conflicts: InitVar[ErrorList | None] = None  # receives errors across sections; None: they are raised

    def __post_init__(self, errors: ErrorList | None) -> None:
        problems = ErrorList() if errors is None else errors
        self._check_model(problems)
        self._check_schedule(problems)
        self._check_stage(problems)
        if self.train.cuda_graphs:
            self._check_graphs(problems)
        recompute = self.recompute
        buffered = recompute.checkpoint_activations and recompute.contiguous_memory_optimization
        problems.require(not buffered or (recompute.number_checkpoints or self.chunks) >= self.chunks,
                         f"--number-checkpoints {recompute.number_checkpoints} is below the {self.chunks} chunks of "
                         f"--num-layers {self.model.num_layers} with --checkpoint-num-layers "
                         f"{recompute.checkpoint_num_layers}: leave it out")
        problems.require(not self.train.skip_train or (self.save.load or self.save.load_hf) is not None,
                         "--skip-train without weights to evaluate: the model's would be random; give --load or "
                         "--load-hf")
        if self.layer_drop.progressive_layer_drop:
            problems.require(self.zero.ignore_unused_parameters, "--progressive-layer-drop needs "
                             "--ignore-unused-parameters: a block that is left out has no gradient")
            problems.require(self.model.num_layers > 1, "--progressive-layer-drop needs --num-layers of at least 2, "
                             "not 1: the first block is never left out")
        if self.optim.optimizer in ONE_BIT_OPTIMIZERS:
            self._check_one_bit(problems)
        if self.optim.optimizer == "muon":
            self._check_muon(problems)
        if errors is None:
            problems.raise_if_any()

    def _check_model(self, errors: ErrorList) -> None:
        length, table = self.seq_length, self.model.max_position_embeddings
        errors.require(length <= table, f"--seq-length {length} is above --max-position-embeddings {table}: the "
                       "position table is too short")
        tp = self.parallel.model_parallel_size
        for name in ("num_attention_heads", "hidden_size", "intermediate_size"):
            value = getattr(self.model, name)
            errors.require(value is None or value % tp == 0,
                           f"{flag_name(name)} {value} is not divisible by --model-parallel-size {tp}")
        if self.model.memory_centric_tiled_linear:
            self._check_tiles(errors, tp)

    def _check_schedule(self, errors: ErrorList) -> None:
        section, whole = self.schedule, f"--lr-decay-iters {self.decay_iters}"
        if section.lr_warmup_iters is not None and section.warmup is not None:
            steps = int(section.warmup * self.decay_iters)
            errors.require(steps == section.lr_warmup_iters, f"--warmup {section.warmup:g} is {steps} steps of "
                           f"{whole}, but --lr-warmup-iters is {section.lr_warmup_iters}: give one of them")
        errors.require(self.warmup_steps <= self.decay_iters, f"--lr-warmup-iters {self.warmup_steps} is above {whole} "
                       "(default: --train-iters): the rate would never reach its peak")
        if section.lr_decay_style == "WSD":
            steps = section.lr_wsd_decay_iters or 0
            errors.require(self.warmup_steps + steps <= self.decay_iters, f"--lr-wsd-decay-iters {steps} and a warm-up "
                           f"of {self.warmup_steps} steps are more than {whole} (default: --train-iters)")

    def _check_tiles(self, errors: ErrorList, tp: int) -> None:
        errors.require(tp == 1, f"--memory-centric-tiled-linear and --model-parallel-size {tp} exclude each other: "
                       "both cut the matrices of a block; give one of them")
        errors.require(self.save.load_hf is None, "--load-hf and --memory-centric-tiled-linear exclude each other: its "
                       "matrices are whole; give one of them")
        errors.require(not self.quantize.quantize_training,
                       "--quantize-training and --memory-centric-tiled-linear exclude each other: weights are scaled "
                       "by groups of rows of whole matrices, which are cut there; leave one out")

    def _check_stage(self, errors: ErrorList) -> None:
        stage, offload = self.zero.zero_stage, self.offload
        errors.require(offload.offload_optimizer_device == "none" or stage > 0, "--offload-optimizer-device "
                       f"{offload.offload_optimizer_device} needs --zero-stage 1, 2 or 3, not 0")
        errors.require(offload.offload_param_device == "none" or stage == 3,
                       f"--offload-param-device {offload.offload_param_device} needs --zero-stage 3, not {stage}: "
                       "other stages keep whole parameters on the device")

    def _check_graphs(self, errors: ErrorList) -> None:
        errors.require(self.zero.zero_stage < 3,
                       "--cuda-graphs needs --zero-stage 0, 1 or 2: at stage 3 parameters have no fixed address")
        errors.require(not self.recompute.checkpoint_activations,
                       "--cuda-graphs and --checkpoint-activations exclude each other: the replay of a recomputed "
                       "forward takes the memory of the backward under way; leave one out")
        errors.require(not self.layer_drop.progressive_layer_drop,
                       "--progressive-layer-drop and --cuda-graphs exclude each other: what is replayed is always the "
                       "same, and each step leaves out other blocks; leave one out")
        errors.require(not self.quantize.quantize_eigenvalue, "--quantize-eigenvalue and --cuda-graphs exclude each "
                       "other: an eigenvalue takes forwards that no step follows; leave one out")

    def _check_one_bit(self, errors: ErrorList) -> None:
        name = f"--optimizer {self.optim.optimizer}"
        errors.require(self.zero.zero_stage < 2,
                       f"{name} needs --zero-stage 0 or 1, not {self.zero.zero_stage}: each rank says what its own "
                       "gradients are, whole, and from stage 2 on they are summed and split as they are made")
        errors.require(self.offload.offload_optimizer_device == "none",
                       f"{name} and --offload-optimizer-device {self.offload.offload_optimizer_device} exclude each "
                       "other: what a rank says is made of the momentum, on the device; leave one out")

    def _check_muon(self, errors: ErrorList) -> None:
        errors.require(not self.model.memory_centric_tiled_linear,
                       "--optimizer muon and --memory-centric-tiled-linear exclude each other: the matrices that are "
                       "made orthogonal never exist whole there; leave one out")
        hyper = self.optim.hyper_parameters()
        errors.require(self.schedule.lr > 0 or hyper["muon_lr"] is hyper["adam_lr"] is None,
                       f"--lr is {self.schedule.lr:g}, and muon_lr and adam_lr are rates beside it, which follow its "
                       "schedule: give one above 0")

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
        require(batch is None or batch % (micro * dp) == 0, f"--global-batch-size {batch} is not divisible by "
                f"--batch-size {micro} x data parallel size {dp} = {micro * dp}")
        profile = self.profile
        require(profile.profile_steps is None or profile.profile_rank < world_size, f"--profile-rank "
                f"{profile.profile_rank} is not one of the {world_size} ranks, which are numbered from 0")

    def global_batch_size(self, dp_size: int) -> int:
        return self.train.global_batch_size or self.train.batch_size * dp_size

    def accumulation(self, dp_size: int) -> int:
        """Micro-batches per optimizer step."""
        return self.global_batch_size(dp_size) // (self.train.batch_size * dp_size)

    def translate(self, message: str) -> str:
        """The message with the JSON file's keys in place of flags."""
        return self.key_names.translate(message)

    def rank_invariant_settings(self) -> dict[str, Any]:
        """Flag -> value, for everything that must be equal on all ranks; of paths only whether they are given."""
        values = ((item, getattr(getattr(self, name), item.name))
                  for name, section in SECTIONS.items() for item in fields(section))
        return {flag_name(item.name): location_presence(value) if setting_of(item).is_location else value
                for item, value in values}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain JSON values, section by section (saved in every checkpoint)."""
        return {name: {key: list(value) if isinstance(value, tuple) else value
                       for key, value in asdict(getattr(self, name)).items()} for name in SECTIONS}


SECTIONS: dict[str, type] = {f.name: f.default_factory for f in fields(Config)  # type: ignore[misc]
                             if f.name not in ("notes", "key_names")}
"""Section name -> its dataclass; field names are unique across sections (tested)."""


def build_config(values: Mapping[str, Any], collector: ErrorCollector | None = None) -> Config:
    """A Config from flat field values. Errors are raised, or added to `collector`; their fields keep the defaults."""
    errors, conflicts = ErrorCollector() if collector is None else collector, ErrorList()
    known = {item.name for section in SECTIONS.values() for item in fields(section)}
    assert values.keys() <= known, f"no section has {', '.join(sorted(values.keys() - known))}"
    sections = {name: _build_section(section, {item.name: values[item.name] for item in fields(section)
                                               if item.name in values}, errors) for name, section in SECTIONS.items()}
    config = Config(**sections, conflicts=conflicts)
    errors.add_errors(conflicts)
    if collector is None:
        errors.raise_if_any()
    return config


def _build_section(section: Any, values: Mapping[str, Any], collector: ErrorCollector) -> Any:
    """The section, built from the values without errors."""
    try:
        return section(**values)
    except ConfigError as error:
        sentences = error_sentences(error)
        collector.add_errors(sentences)
        wrong = flags_in(" ".join(sentences))
        left = {name: value for name, value in values.items() if wrong.isdisjoint(flags_in(flag_name(name)))}
        return _build_section(section, left if len(left) < len(values) else {}, collector)


_FIELDS = {item.name: item for section in SECTIONS.values() for item in fields(section)}
OPTIMIZER_FIELDS: dict[str, list[str]] = {}  # field of `optim` -> the optimizers that read it
for _optimizer, _takes in OPTIMIZERS.items():
    for _name in " ".join(_takes.fields.values()).split():
        OPTIMIZER_FIELDS.setdefault(_name, []).append(_optimizer)


def unused_settings(config: Config, candidates: Collection[str], given: Collection[str]) -> Iterator[str]:
    """A sentence for the fields of `candidates` that have no effect; `given` are all fields that were set explicitly.
    Files write out switches that are off, and DeepSpeed's guide the defaults of what a choice leaves unread."""
    values = {name: value for section in config.as_dict().values() for name, value in section.items()}
    idle: dict[str, list[str]] = {}  # why -> the settings
    for name in dict.fromkeys(candidates):
        value, default, needs = values[name], _FIELDS[name].default, _missing_needs(name, values)
        if needs is None:
            continue
        if () in needs.values():
            is_news = (value is not False or bool(default)) and needs.keys().isdisjoint(given)
        else:
            is_news = value != default and not (value is False and name.startswith("offload_") and
                                                flag_name(name) in config.key_names.keys_of_given)
        if is_news:
            missing = (f"{flag_name(switch)} {' or '.join(map(str, wanted))}".rstrip()
                       for switch, wanted in needs.items())
            why = f" without {' or '.join(missing)}" if needs else f": {setting_of(_FIELDS[name]).unread_because}"
            idle.setdefault(why, []).append(name)
    yield from (f"{flags_have(names)} no effect{why}" for why, names in idle.items())
    on = [name for name in dict.fromkeys(candidates) if values[name] is not False]
    optimizer = config.optim.optimizer
    for name in on:
        readers = OPTIMIZER_FIELDS.get(name, [optimizer])
        if optimizer not in readers:
            yield f"{flag_name(name)} has no effect with --optimizer {optimizer}: {', '.join(readers)} read it"
    if "weight_decay" in on and not OPTIMIZERS[optimizer].has_weight_decay:
        yield f"--weight-decay has no effect with --optimizer {optimizer}: its weights do not decay"


def _missing_needs(name: str, values: Mapping[str, Any]) -> Needs | None:
    """The outermost need of a field that is not met, empty for a field that is never read; None if all are met."""
    declared = setting_of(_FIELDS[name])
    needs = {} if declared.unread_because else declared.needs
    if needs is None:
        return None
    outer = next(filter(None, (_missing_needs(switch, values) for switch in needs)), None)
    is_met = any(values[switch] in wanted if wanted else values[switch] for switch, wanted in needs.items())
    return outer or (None if is_met else needs)


def run_errors(config: Config) -> Iterator[str]:
    """An error text for each method that would never start in this run, or that does not fit the model."""
    iters, quantize = config.train.train_iters, config.quantize
    if config.optim.optimizer in ONE_BIT_OPTIMIZERS:
        yield from _one_bit_warm_up_too_long(config)
    if not quantize.quantize_training:
        return
    if 0 < iters < quantize.quantize_offset:
        yield (f"--quantize-offset {quantize.quantize_offset} is above --train-iters {iters}, so that nothing would be "
               "rounded: give 0 to round from the first step on, or fewer steps than the run has")
    hidden = config.model.hidden_size  # the check that the engine makes for any model
    rows = {"3 x --hidden-size": 3 * hidden, "--hidden-size": hidden, "--intermediate-size": config.model.ffn_size}
    if uneven := [f"{count} ({name})" for name, count in rows.items() if count % quantize.quantize_groups]:
        yield (f"--quantize-groups {quantize.quantize_groups} does not divide the rows of every matrix, "
               f"{', '.join(uneven)}: give a divisor of all")


def _one_bit_warm_up_too_long(config: Config) -> Iterator[str]:
    """A run shorter than the optimizer's warm-up would never compress."""
    warm_up, iters = config.optim.freeze_step, config.train.train_iters
    if warm_up is None:
        beta2, each = config.optim.adam_beta2, max(1, round(1 / (1 - config.optim.adam_beta2)))
        if 0 < iters <= 2 * each:
            yield (f"--onebit-freeze-step {AUTO_STEPS} looks at the variance every {each} steps with --adam-beta2 "
                   f"{beta2:g}, and can freeze it after {2 * each}, which is not below --train-iters {iters}, so that "
                   "nothing would travel at one bit: give a number, 15 to 25 % of the steps are usual")
    elif 0 < iters <= warm_up:
        yield (f"--onebit-freeze-step {warm_up} is not below --train-iters {iters}, so that nothing would travel at "
               f"one bit: 15 to 25 % of the steps are usual, or give {AUTO_STEPS}")
