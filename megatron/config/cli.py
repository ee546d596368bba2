"""Parse the command line into a Config. The only module that builds the trainer's argparse parser.

Precedence: explicit flags and the keys of `--deepspeed-config` (which must agree), then the preset, then the field's
default. Dashes and underscores in flag names are the same.
"""

from __future__ import annotations

import argparse
import sys
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from data.cli import StrictArgumentParser, normalize_flag_names, suggest_spelling
from megatron.config import ds_json
from megatron.config.cli_help import (FOREIGN_FLAGS, NOTED_FLAGS, PLANNER_FLAGS, fields_with_types, full_help,
                                      short_help)
from megatron.config.config_errors import ErrorCollector, ErrorList, FlagToKeyNames, SettingError
from megatron.config.ds_json import value_text
from megatron.config.hf_config import read_model_fields, read_tokenizer_fields
from megatron.config.schema import flag_name, setting_of
from megatron.config.tree import PRESETS, SECTIONS, Config, build_config, run_errors, unused_settings
from megatron.errors import ConfigError
from megatron.package import DISTRIBUTION, __version__

YES, NO = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}  # values that may follow a switch
OPTIMIZER_DEVICE = "offload_optimizer_device"
CPU_OPTIMIZER_TEXT = "--cpu-optimizer, which is --offload-optimizer-device"


class _PrintTextAction(argparse.Action):
    """Print a text and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        text: Callable[[], str] = self.const
        print(text(), flush=True)
        sys.exit(0)


def parse_args(argv: Sequence[str], world_size: int = 1, *, other_options: Collection[str] = ()) -> Config:
    """The Config that these flags describe; ConfigError names every flag that is wrong. `world_size` is used to solve
    the batch sizes of a `--deepspeed_config`. `other_options` are the options of another command (planner, tuner) that
    these flags were given to."""
    parser, errors = build_parser(), ErrorCollector()
    words, notes = translate_argv(parser, argv, errors, foreign=PLANNER_FLAGS if other_options else FOREIGN_FLAGS)
    given = argparse.Namespace()
    try:
        given, unknown = parser.parse_known_args(words)
        if unknown:
            errors += _unknown_flag_errors(parser, unknown, words, other_options)
        errors += _alias_errors(parser, words)
    except ConfigError as error:  # collected: one message names everything that is wrong
        errors.append(str(error))
    errors.raise_if_any()
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                              for name, value in vars(given).items()}
    preset = PRESETS[values.pop("preset")] if "preset" in values else {}
    folder = values.get("load_hf")
    if folder is not None and ("load" not in values or Path(folder).exists()):  # gone: the run resumes
        own = {"tokenizer_type", "tokenizer_path", "vocab_file", "merge_file"} & values.keys()
        # a preset that contradicts the folder is refused when the folder is read
        preset = {**read_model_fields(folder), **({} if own else read_tokenizer_fields(folder)), **preset}
    for name in ("deepspeed", "dry_run"):  # no part of the configuration
        values.pop(name, None)
    source, on_host = values.pop("deepspeed_config", None), values.pop("cpu_optimizer", False)
    names = FlagToKeyNames()
    if on_host:  # yields to a file that says more
        preset = {**preset, OPTIMIZER_DEVICE: "cpu"}
        if OPTIMIZER_DEVICE not in values:
            names = FlagToKeyNames({flag_name(OPTIMIZER_DEVICE): CPU_OPTIMIZER_TEXT})
    with names.translate_errors():
        config = build_config({**preset, **values}, errors) if source is None else ds_json.build_ds_config(
            source, flags=values, fallback=preset, world_size=world_size, argument="--deepspeed-config",
            collector=errors)
        if on_host and config.offload.offload_optimizer_device == "none":
            errors.add_errors([SettingError("--cpu-optimizer keeps the optimizer's state on the host, but "
                                            "{offload_optimizer_device} is none: give one of them",
                                            config.settings())])
        errors.add_errors(run_errors(config))
        errors.raise_if_any()
    given_fields = {*values, *(flag[2:].replace("-", "_") for flag in config.key_names.keys_of_given)}
    unread = (f" note: {line}" for line in unused_settings(config, values, given_fields))
    return replace(config, notes=(*notes, *unread, *config.notes))


def is_dry_run(argv: Sequence[str]) -> bool:
    """Whether --dry-run is given: plan the run, do not start it."""
    words = (word.partition("=") for word in normalize_flag_names(argv))
    return any(name == "--dry-run" and (not equals or value.lower() in YES) for name, equals, value in words)


def build_parser() -> argparse.ArgumentParser:
    parser = StrictArgumentParser("pretrain_gpt2.py", hint="`--help-all` lists every flag", usage_error=ConfigError,
                                  add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action=_PrintTextAction, nargs=0, const=short_help)
    parser.add_argument("--help-all", action=_PrintTextAction, nargs=0, const=full_help)
    parser.add_argument("--version", action=_PrintTextAction, nargs=0, const=lambda: f"{DISTRIBUTION} {__version__}")
    parser.add_argument("--preset", type=partial(_choice, "--preset", tuple(PRESETS), {}))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--cpu-optimizer", "--optimizer-cpu-offload", action=argparse.BooleanOptionalAction)
    parser.add_argument("--use-distributed-optimizer", dest="zero_stage", action="store_const", const=1)
    parser.add_argument("--deepspeed-config", "--deepscale-config")
    parser.add_argument("--deepspeed", "--deepscale", action=argparse.BooleanOptionalAction)
    for item, kind in (pair for section in SECTIONS.values() for pair in fields_with_types(section)):
        flag = flag_name(item.name)
        names = [flag, *(f"--{alias}" for alias in setting_of(item).aliases)]
        if kind is bool:
            action = "store_true" if item.name.startswith("no_") else argparse.BooleanOptionalAction
            parser.add_argument(*names, dest=item.name, action=action)
        elif typing.get_origin(kind) is tuple:
            parser.add_argument(*names, dest=item.name, nargs="+")
        elif typing.get_origin(kind) is Literal:
            refused = {text: why for key in setting_of(item).keys for text, why in key.refused.items()}
            parser.add_argument(*names, dest=item.name, type=partial(_choice, flag, typing.get_args(kind), refused))
        else:
            parser.add_argument(*names, dest=item.name, type=kind if kind is str else partial(_number, flag, kind))
    return parser


def _number(flag: str, kind: type, text: str) -> Any:
    """A number; an integer may be in scientific notation (5e8)."""
    try:
        value = float(text)
        if kind is int and not value.is_integer():
            raise ValueError
        return value if kind is float else int(text) if text.strip().lstrip("+-").isdigit() else int(value)
    except ValueError:
        raise ConfigError(f"{flag} is {text}: expected {'an integer' if kind is int else 'a number'}") from None


def _choice(flag: str, choices: tuple[str, ...], refused: Mapping[str, str], text: str) -> str:
    """One of `choices`; `refused` explains values that users may expect."""
    if text not in choices:
        why = refused.get(text.lower().replace("_", "")) or suggest_spelling(text, choices)
        raise ConfigError(f"{flag} is {text}: expected {', '.join(choices[:-1])} or {choices[-1]}"
                          + (f"; {why}" if why else ""))
    return text


def translate_argv(parser: argparse.ArgumentParser, argv: Sequence[str], errors: ErrorList,
                   foreign: Mapping[str, tuple[str, ...]] = FOREIGN_FLAGS) -> tuple[list[str], list[str]]:
    """(words for the parser, notes on flags without effect). Names get dashes, --compile=False becomes --no-compile,
    and flags of other programs are answered; what cannot be accepted goes to `errors`."""
    switches = {option: action for action in parser._actions if action.nargs == 0 for option in action.option_strings}
    given, words, notes = deque(normalize_flag_names(argv)), list[str](), list[str]()
    while given:
        word = given.popleft()
        name, equals, value = word.partition("=")
        flag = name[2:].lower()
        if name.startswith("--") and flag in foreign:
            if not equals and given and given[0] and not given[0].startswith("--"):
                value = given.popleft()
            answer, *accepted = foreign[flag]
            if flag == "remote-device" and value and value not in accepted:
                words += [name.lower(), value]
            elif value not in accepted and not (value and "*" in accepted):
                errors.append(f"{name}{f' {value}' if value else ''} is not a flag here: {answer}")
            elif flag in NOTED_FLAGS:
                notes.append(f" note: {name} has no effect: {answer}")
        elif equals and name in switches:
            opposite = _negated_flag(name, switches[name])
            if value.lower() in YES:
                words.append(name)
            elif value.lower() in NO:
                words += [opposite] if opposite else []
            elif name == "--deepspeed":
                errors.append(f"{word}: use --deepspeed --deepspeed_config {value}")
            else:
                errors.append(f"{word}: {name} is a switch, use {name} or {opposite or 'leave it out'}")
        else:
            words.append(word)
    return words, notes


def _negated_flag(name: str, action: argparse.Action) -> str:
    """The flag that turns a switch off; "" if there is none."""
    if not isinstance(action, argparse.BooleanOptionalAction):
        return ""
    return f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}"


def _unknown_flag_errors(parser: argparse.ArgumentParser, unknown: Sequence[str], arguments: Sequence[str],
                         other_options: Collection[str]) -> list[str]:
    """An error text for each unknown flag and for each switch with a value; else for the first stray argument."""
    known = {option: action for action in parser._actions for option in action.option_strings}
    valued = [(before, word) for before, word in zip(arguments, arguments[1:])
              if before in known and known[before].nargs == 0 and word.lower() in YES | NO]
    sentences = [f"unexpected argument {word}: {before} takes no value; "
                 + (f"give {before} alone" if word.lower() in YES else
                    f"give {opposite}" if (opposite := _negated_flag(before, known[before])) else f"leave {before} out")
                 for before, word in valued]
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("-")):
        hint = suggest_spelling(flag, {*known, *other_options}) or "`--help-all` lists every flag"
        sentences.append(f"unknown flag {flag}: {hint}")
    for word in () if sentences else unknown[:1]:
        is_ds_config = arguments.index(word) > 0 and arguments[arguments.index(word) - 1] == "--deepspeed"
        hint = f"use --deepspeed --deepspeed_config {word}" if is_ds_config else \
            "flags begin with --; `--help` lists those of a first run"
        sentences.append(f"unexpected argument {word}: {hint}")
    return sentences


def _alias_errors(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> Iterator[str]:
    """An error text for each setting whose aliases differ. Of one name the last value wins (scripts' flags)."""
    known, typed = parser._option_string_actions, dict[str, dict[str, list[str]]]()
    words: list[str] = []  # a flag and its values
    for word in arguments:
        if word.startswith("--"):
            words, action = [], known.get(word.partition("=")[0])
            if action is not None:
                typed.setdefault(action.dest, {})[word.partition("=")[0].replace("--no-", "--")] = words
        words.append(word)
    for field, names in typed.items():
        if len(names) > 1:
            values = {name: getattr(parser.parse_known_args(words)[0], field) for name, words in names.items()}
            (first, value), *others = values.items()
            yield from (f"{first} is {value_text(value)}, but {name} is {value_text(other)}: they set the same option; "
                        "give only one of them" for name, other in others if other != value)
