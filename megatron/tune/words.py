"""A configuration as flags that make it again: what a trial is started with, whatever file or preset it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megatron.config.setting import flag_name
from megatron.config.tree import SECTIONS, Config


def config_to_flags(config: Config) -> list[str]:
    """Of all settings that are not as they are by default."""
    return [word for name, section in SECTIONS.items() for item in fields(section)
            for word in _flag_words(item.name, getattr(getattr(config, name), item.name), item.default)]


def _flag_words(name: str, value: Any, default: Any) -> Iterator[str]:
    if value == default or value is None:
        return
    flag = flag_name(name)
    if isinstance(value, bool):
        yield flag if value else f"--no-{flag[2:]}"
    elif isinstance(value, tuple):
        yield from (flag, *map(str, value))
    else:
        yield from (flag, repr(value) if isinstance(value, float) else str(value))
