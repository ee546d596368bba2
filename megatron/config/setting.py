"""How a configuration field is declared: one line says its default, its help, its flag's aliases and its JSON keys.

    clip_grad: float = setting(1.0, "largest global gradient norm; 0 turns clipping off",
                               json=Key("gradient_clipping", NUMBER_FROM_0))

The flag is the field's name with dashes. Flags (flags.py), the table of JSON keys (ds_keys.py), `--help` and the
reference pages are all derived from these declarations. Not here: keys that set no field (ds_keys.py).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, Literal

from megatron.config.kinds import JSON_TYPE_OF, JsonType, one_of
from megatron.errors import ConfigError


@dataclass(frozen=True)
class JsonKey:
    """A key of a DeepSpeed file that has an effect here."""

    path: str
    """Dotted. One that ends in a dot names a section, in which the key has the field's name."""
    json_type: JsonType | None = None
    """None: the kind that follows from the field's type, nullable where the field may be None."""
    convert: Callable[[Any], Any] = lambda value: value
    """The key's value -> the field's."""
    nullable: bool = False
    """null says nothing, like an absent key."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Lower-case text that DeepSpeed accepts and we do not -> reason."""
    is_independent: bool = True
    """False: the field's value depends on further keys; ds_together.py finds it."""
    flag_wins: bool = False
    """A flag that says otherwise wins, with a note; of other keys that is an error."""
    default: str | None = None
    """What the reference page calls the default, where it is not the field's."""
    help: str = ""
    """What the reference page says beside the field's own help."""
    field: str = ""
    """The field it sets; filled in by the table."""

    @property
    def known_json_type(self) -> JsonType:
        assert self.json_type is not None, "the table fills in the kind"
        return self.json_type


@dataclass(frozen=True)
class FieldSetting:
    """What a field's declaration says beside its default."""

    help: str
    aliases: tuple[str, ...] = ()
    keys: tuple[JsonKey, ...] = ()
    metavar: str | None = None
    in_short_help: bool = False
    """Listed by `--help`; the others are listed by `--help-all` only."""
    is_location: bool = False
    """Where something lies, which may differ from node to node: ranks compare whether it is given, and what is found
    there."""


def setting(default: Any, help: str, *aliases: str, json: str | JsonKey | tuple[JsonKey, ...] = (),
            metavar: str | None = None, in_short_help: bool = False, is_location: bool = False) -> Any:
    """A field that is also a flag: `aliases` are further spellings of it, `json` names the keys that set it."""
    keys = (JsonKey(json),) if isinstance(json, str) else (json,) if isinstance(json, JsonKey) else json
    return field(default=default,
                 metadata={"setting": FieldSetting(help, aliases, keys, metavar, in_short_help, is_location)})


def setting_of(item: Field[Any]) -> FieldSetting:
    found: FieldSetting = item.metadata["setting"]
    return found


def location_presence(value: Any) -> str:
    """What ranks compare of a place before they look there: what they do depends on whether there is one."""
    return "given" if value else "not given"


def plain_type(hint: Any) -> tuple[Any, bool]:
    """A field's type without `| None`, and whether it had one."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        options = [member for member in typing.get_args(hint) if member is not type(None)]
        return options[0], True
    return hint, False


def json_type_of(hint: Any) -> JsonType:
    """The kind of JSON value that a field of this (plain) type has."""
    if typing.get_origin(hint) is Literal:
        return one_of(*typing.get_args(hint))
    return JSON_TYPE_OF[hint]


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def flags_have(names: Sequence[str]) -> str:
    """The beginning of a sentence about the flags of these fields: "--a has", "--a and --b have"."""
    *most, last = map(flag_name, names)
    return f"{', '.join(most)} and {last} have" if most else f"{last} has"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
