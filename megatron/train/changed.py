"""What a resumed run does otherwise than the run of its checkpoint, of the methods that change what is learnt
(docs/methods.md): said in one line. That is allowed; what must not differ is refused elsewhere (resume.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.optimizers import ONE_BIT
from megatron.config.setting import flag_name
from megatron.config.tree import Config

SWITCHES = {"layer_drop": "progressive_layer_drop", "quantize": "quantize_training"}
"""Section of a method -> its switch."""
Tree = Mapping[str, Mapping[str, Any]]


def changed_methods(saved: Tree, config: Config, rule: Mapping[str, Any]) -> list[str]:
    """`saved`: the configuration of the checkpoint; `rule`: what it says of its optimizer, where that is loaded."""
    present = config.as_dict()
    changes = [change for section, switch in SWITCHES.items() for change in _of_method(saved, present, section, switch)]
    changes += _of_warm_up(saved, present, rule)
    return [f" changed: {', '.join(changes)}"] if changes else []


def _of_method(saved: Tree, present: Tree, section: str, switch: str) -> Iterator[str]:
    before, now = saved.get(section, {}), present[section]
    was_on, is_on = bool(before.get(switch)), bool(now[switch])
    if was_on != is_on:
        yield f"{flag_name(switch)} {_word(was_on)} -> {_word(is_on)}"
    elif is_on:
        yield from (f"{flag_name(name)} {_word(before[name])} -> {_word(value)}" for name, value in now.items()
                    if name in before and before[name] != value)


def _of_warm_up(saved: Tree, present: Tree, rule: Mapping[str, Any]) -> Iterator[str]:
    before, now = saved.get("optim", {}), present["optim"]
    name, frozen_at = "onebit_freeze_step", rule.get("frozen_at")
    if now["optimizer"] in ONE_BIT and before.get("optimizer") == now["optimizer"] and before.get(name) != now[name]:
        kept = "" if frozen_at is None else f" (no effect: the variance has been frozen since step {frozen_at})"
        yield f"{flag_name(name)} {before.get(name)} -> {now[name]}{kept}"


def _word(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
