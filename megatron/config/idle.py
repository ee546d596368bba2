"""Settings that were given and that nothing reads, because what they belong to is switched off.

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
from megatron.config.optimizers import OPTIMIZERS
from megatron.config.profile import ProfileConfig
from megatron.config.quantize import QuantizeConfig
from megatron.config.setting import flag_name, have
from megatron.config.tree import Config


def _of(section: Any, switch: str, prefix: str = "") -> dict[str, str]:
    return {item.name: switch for item in fields(section) if item.name.startswith(prefix) and item.name != switch}


NEEDS: dict[str, str] = {
    **_of(LayerDropConfig, "progressive_layer_drop"), **_of(ProfileConfig, "flops_profiler", "flops_profiler_"),
    **dict.fromkeys(("profile_rank", "profile_dir"), "profile_steps"),
    **_of(QuantizeConfig, "quantize_training"), "quantize_change_ratio": "quantize_mixed",
    **_of(QuantizeConfig, "quantize_eigenvalue", "eigenvalue_"),
}
"""Field -> the switch without which nothing reads it."""

OPTIMIZER_FIELDS = {name: [one for one, takes in OPTIMIZERS.items() if name in " ".join(takes.fields.values()).split()]
                    for takes in OPTIMIZERS.values() for names in takes.fields.values() for name in names.split()}
"""Field of `optim` -> the optimizers that read it."""


def idle(config: Config, asked: Collection[str], given: Collection[str]) -> Iterator[str]:
    """A sentence for those of the fields `asked` that nothing reads. `given`: all fields that somebody has given."""
    values = {name: value for section in config.as_dict().values() for name, value in section.items()}
    found: dict[str, list[str]] = {}
    on = [name for name in dict.fromkeys(asked) if values[name] is not False]
    for name in on:
        if (switch := _first_off(name, values)) and switch not in given:
            found.setdefault(switch, []).append(name)
    yield from (f"{have(names)} no effect without {flag_name(switch)}" for switch, names in found.items())
    yield from _of_other_optimizers(config.optim, on)


def _first_off(name: str, values: dict[str, Any]) -> str | None:
    """The outermost switch that this setting needs and that is off."""
    switch = NEEDS.get(name)
    return None if switch is None else _first_off(switch, values) or (None if values[switch] else switch)


def _of_other_optimizers(optim: OptimConfig, asked: Collection[str]) -> Iterator[str]:
    for name in asked:
        readers = OPTIMIZER_FIELDS.get(name)
        if readers is not None and optim.optimizer not in readers:
            yield f"{flag_name(name)} has no effect with --optimizer {optim.optimizer}: {', '.join(readers)} read it"
    if "weight_decay" in asked and not OPTIMIZERS[optim.optimizer].decays:
        yield f"--weight-decay has no effect with --optimizer {optim.optimizer}: its weights do not decay"
