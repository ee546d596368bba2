"""The command line -> Config. The only file that knows argparse; no `args` object leaves it.

The flags are the fields of the sections. Dashes and underscores are the same in flag names. Order of
precedence: explicit flags and the keys of `--deepspeed_config` (which must agree, see ds_file.py), then the preset,
then the field's default.
"""

from __future__ import annotations

import argparse
import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from megatron.config import ds_file
from megatron.config.hf_shape import shape_in
from megatron.config.setting import declared, flag_name, plain_type
from megatron.config.tree import PRESETS, SECTIONS, Config, build_config
from megatron.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors, so that they end like every other error: in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `--help` lists every flag")


def parse_args(argv: Sequence[str], world_size: int = 1, *, planning: bool = False) -> Config:
    """The configuration these flags describe; ConfigError names the flag that cannot be honoured.

    `world_size` is what the batch sizes of a `--deepspeed_config` are solved with; `planning` as in `build_config`.
    """
    parser = build_parser()
    given, unknown = parser.parse_known_args([_dashed(word) for word in argv])
    if unknown:
        raise ConfigError(_unknown_flag(parser, unknown[0]))
    values = vars(given)
    preset = PRESETS[values.pop("preset")] if "preset" in values else {}
    preset = {**_shape_of_hf(values), **preset}  # flags and a preset that differ are refused when the folder is read
    values.pop("deepspeed", None)
    source = values.pop("deepspeed_config", None)
    if source is None:
        return build_config({**preset, **values}, planning=planning)
    return ds_file.build(source, flags=values, fallback=preset, world_size=world_size, planning=planning)


def _shape_of_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `--load-hf` says of the model; a run that resumes with --load does not need the folder any more."""
    folder = values.get("load_hf")
    if folder is None or ("load" in values and not Path(folder).exists()):
        return {}
    return shape_in(folder)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pretrain_gpt2.py", allow_abbrev=False, argument_default=argparse.SUPPRESS,
                     description="Pretrain a GPT-2 with tensor and ZeRO data parallelism.",
                     epilog="See docs/ for guides; README.md for the two commands to start with.")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="model shape; explicit flags win")
    parser.add_argument("--deepspeed-config", "--deepscale-config", metavar="FILE",
                        help="DeepSpeed-style JSON file (docs/ds_config.md); flags that are given must agree with it")
    parser.add_argument("--deepspeed", "--deepscale", action=argparse.BooleanOptionalAction,
                        help="accepted for old scripts: there is one engine, with and without it")
    for name, section in SECTIONS.items():
        group = parser.add_argument_group(name, (section.__doc__ or "").strip())
        hints = typing.get_type_hints(section)
        for item in fields(section):
            _add_flag(group, item, hints[item.name])
    return parser


def _add_flag(group: argparse._ArgumentGroup, item: Field[Any], hint: Any) -> None:
    said = declared(item)
    names = [flag_name(item.name), *(f"--{alias}" for alias in said.aliases)]
    default = "" if item.default in (None, False, ()) else f" (default: {item.default})"
    help_text = (said.help + default).replace("%", "%%")
    kind, _ = plain_type(hint)
    if kind is bool:
        action = "store_true" if item.name.startswith("no_") else argparse.BooleanOptionalAction
        group.add_argument(*names, dest=item.name, action=action, help=help_text)
    elif typing.get_origin(kind) is Literal:
        group.add_argument(*names, dest=item.name, choices=typing.get_args(kind), help=help_text)
    elif typing.get_origin(kind) is tuple:
        group.add_argument(*names, dest=item.name, nargs="+", action=_TupleAction, help=help_text,
                           metavar=said.metavar or "PATH")
    else:
        convert = _integer if kind is int else kind
        group.add_argument(*names, dest=item.name, type=convert, help=help_text, metavar=kind.__name__.upper())


class _TupleAction(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _integer(text: str) -> int:
    """An integer, also in scientific notation (5e8) when it is whole."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
        return int(value)


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown_flag(parser: argparse.ArgumentParser, word: str) -> str:
    known = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "`--help` lists every flag"
    what = "unknown flag" if word.startswith("-") else "unexpected argument"
    return f"{what} {word}: {hint}"
