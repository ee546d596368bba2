"""Settings that were given and come to nothing: what they belong to is switched off (a note), or the run is over before
it begins (an error, of a run of pretrain_gpt2.py alone: an engine has a loop and a model of its user's).

One table says which switch a setting needs. A default that nobody gave is nothing to tell, nor is a setting whose
switch was given as off: whoever writes that knows it. Not here: offloading (offload.py), and what only the device or
the model decides (zero/policy.py, recompute/replay.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any

from megatron.config.layer_drop import LayerDropConfig
from megatron.config.optim import OptimConfig
from megatron.config.optimizers import AUTO_STEPS, ONE_BIT_OPTIMIZERS, OPTIMIZERS
from megatron.config.profile import ProfileConfig
from megatron.config.quantize import QuantizeConfig
from megatron.config.setting import flag_name, flags_have
from megatron.config.tree import Config


def _fields_with_switch(section: Any, switch: str, prefix: str = "") -> dict[str, str]:
    return {item.name: switch for item in fields(section) if item.name.startswith(prefix) and item.name != switch}


REQUIRED_SWITCH: dict[str, str] = {
    **_fields_with_switch(LayerDropConfig, "progressive_layer_drop"),
    **_fields_with_switch(ProfileConfig, "flops_profiler", "flops_profiler_"),
    **dict.fromkeys(("profile_rank", "profile_dir"), "profile_steps"),
    **_fields_with_switch(QuantizeConfig, "quantize_training"),
    "quantize_change_ratio": "quantize_mixed",
    **_fields_with_switch(QuantizeConfig, "quantize_eigenvalue", "eigenvalue_"),
}
"""Field -> the switch without which nothing reads it."""

OPTIMIZER_FIELDS = {name: [one for one, takes in OPTIMIZERS.items() if name in " ".join(takes.fields.values()).split()]
                    for takes in OPTIMIZERS.values() for names in takes.fields.values() for name in names.split()}
"""Field of `optim` -> the optimizers that read it."""


def unused_settings(config: Config, candidates: Collection[str], given: Collection[str]) -> Iterator[str]:
    """A sentence for those of the fields `asked` that nothing reads. `given`: all fields that somebody has given."""
    values = {name: value for section in config.as_dict().values() for name, value in section.items()}
    found: dict[str, list[str]] = {}
    on = [name for name in dict.fromkeys(candidates) if values[name] is not False]
    for name in on:
        if (switch := _outermost_switch_off(name, values)) and switch not in given:
            found.setdefault(switch, []).append(name)
    yield from (f"{flags_have(names)} no effect without {flag_name(switch)}" for switch, names in found.items())
    if config.schedule.lr_decay_style != "WSD" and (names := [name for name in on if name.startswith("lr_wsd_")]):
        yield f"{flags_have(names)} no effect without --lr-decay-style WSD"
    yield from _settings_of_other_optimizers(config.optim, on)


def _outermost_switch_off(name: str, values: dict[str, Any]) -> str | None:
    """The outermost switch that this setting needs and that is off."""
    switch = REQUIRED_SWITCH.get(name)
    return None if switch is None else _outermost_switch_off(switch, values) or (None if values[switch] else switch)


def _settings_of_other_optimizers(optim: OptimConfig, candidates: Collection[str]) -> Iterator[str]:
    for name in candidates:
        readers = OPTIMIZER_FIELDS.get(name)
        if readers is not None and optim.optimizer not in readers:
            yield f"{flag_name(name)} has no effect with --optimizer {optim.optimizer}: {', '.join(readers)} read it"
    if "weight_decay" in candidates and not OPTIMIZERS[optim.optimizer].has_weight_decay:
        yield f"--weight-decay has no effect with --optimizer {optim.optimizer}: its weights do not decay"


def run_errors(config: Config) -> Iterator[str]:
    """A sentence for each method that would never begin, or that this model does not take."""
    if config.optim.optimizer in ONE_BIT_OPTIMIZERS:
        yield from _one_bit_warm_up_too_long(config)
    if config.quantize.quantize_training:
        yield from _quantize_offset_too_large(config)
        yield from _uneven_quantize_groups(config)


def _one_bit_warm_up_too_long(config: Config) -> Iterator[str]:
    """A run that ends before its optimizer's warm-up does is another one than was asked for."""
    warm_up, iters = config.optim.freeze_step, config.train.train_iters
    if warm_up is None:
        beta2, each = config.optim.adam_beta2, max(1, round(1 / (1 - config.optim.adam_beta2)))
        if 0 < iters <= 2 * each:
            yield (
                f"--onebit-freeze-step {AUTO_STEPS} looks at the variance every {each} steps with --adam-beta2 {beta2:g}, "
                f"and can freeze it after {2 * each}, which is not below --train-iters {iters}, so that nothing "
                "would travel at one bit: give a number, 15 to 25 % of the steps are usual")
    elif 0 < iters <= warm_up:
        yield (f"--onebit-freeze-step {warm_up} is not below --train-iters {iters}, so that nothing would travel at "
               f"one bit: 15 to 25 % of the steps are usual, or give {AUTO_STEPS}")


def _quantize_offset_too_large(config: Config) -> Iterator[str]:
    offset, iters = config.quantize.quantize_offset, config.train.train_iters
    if 0 < iters < offset:
        yield (f"--quantize-offset {offset} is above --train-iters {iters}, so that nothing would be rounded: give 0 "
               "to round from the first step on, or fewer steps than the run has")


def _uneven_quantize_groups(config: Config) -> Iterator[str]:
    """As the engine finds it (zero/rows.py) for a model of any kind."""
    groups, hidden = config.quantize.quantize_groups, config.model.hidden_size
    rows = {"3 x --hidden-size": 3 * hidden, "--hidden-size": hidden, "--intermediate-size": config.model.ffn_size}
    uneven = [f"{count} ({name})" for name, count in rows.items() if count % groups]
    if uneven:
        yield (f"--quantize-groups {groups} does not divide the rows of every matrix, {', '.join(uneven)}: give "
               "a divisor of all")
