"""Parse the command line into a Config: every flag is a field, and one walk over the words reads them.

Precedence: explicit flags, those of the file of `--config`, and the keys of `--deepspeed-config` (which must agree with
both), then the preset, then the field's default. Dashes and underscores in flag names are the same.

`--config run.yaml` (or .toml) reads flags from a file, and `--print-config yaml` writes one:

    preset: 124M            # --preset 124M
    train_data: [a, b]      # --train-data a b
    bf16: true              # --bf16; false is --no-bf16
    lr: 6e-4

There are no sections; null leaves a setting out.
"""

from __future__ import annotations

import json
import re
import sys
import typing
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data.cli import parse_config_file, suggest_spelling
from data.storage import UsageError
from megatron.config import ds_json
from megatron.config.cli_help import FOREIGN_FLAGS, NOTED_FLAGS, PLANNER_FLAGS, fields_with_types, help_text
from megatron.config.ds_json import value_text
from megatron.config.hf_config import read_model_fields, read_tokenizer_fields
from megatron.config.schema import (JSON_TYPE_OF, ErrorCollector, ErrorList, FlagToKeyNames, flag_name,
                                    setting_of)
from megatron.config.tree import FIELDS, PRESETS, SECTIONS, Config, build_config, run_errors, unused_settings
from megatron.errors import ConfigError
from megatron.package import DISTRIBUTION, __version__

YES, NO = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}  # values that may follow a switch
OPTIMIZER_DEVICE = "offload_optimizer_device"
CPU_OPTIMIZER_TEXT = "--cpu-optimizer, which is --offload-optimizer-device"
LISTS_EVERY_FLAG = "`--help-all` lists every flag"
FORMATS = ("yaml", "toml")
PRINTED_TEXTS: dict[str, Callable[[], str]] = {  # flags that print a text and exit
    **dict.fromkeys(("-h", "--help"), lambda: help_text(short=True)), "--help-all": lambda: help_text(short=False),
    "--version": lambda: f"{DISTRIBUTION} {__version__}"}


def parse_args(argv: Sequence[str], world_size: int = 1, *, other_options: Collection[str] = ()) -> Config:
    """The Config that these flags describe; ConfigError names every flag that is wrong. `world_size` is used to solve
    the batch sizes of a `--deepspeed_config`. `other_options` are the options of another command (planner, tuner) that
    these flags were given to."""
    errors = ErrorCollector()
    command_line = CommandLine(deque(argv), errors, other_options)
    values = command_line.read()
    file_values = _read_config_file(values.pop("config"), errors, command_line.notes) if "config" in values else {}
    values = {**file_values, **values}
    errors.raise_if_any()
    print_format = values.pop("print_config", None)
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
            errors.add_errors([f"--cpu-optimizer keeps the optimizer's state on the host, but "
                               f"{flag_name(OPTIMIZER_DEVICE)} is none: give one of them"])
        errors.add_errors(run_errors(config))
        errors.raise_if_any()
    given_fields = {*values, *(flag[2:].replace("-", "_") for flag in config.key_names.keys_of_given)}
    if print_format is not None:
        config.check_world(world_size)
        print(config_as_text(config, print_format), flush=True)
        sys.exit(0)
    # A file may write defaults out, as --print-config does.
    candidates = [name for name in values if name not in file_values or values[name] != FIELDS[name].default]
    unread = (f" note: {line}" for line in unused_settings(config, candidates, given_fields))
    return replace(config, notes=(*command_line.notes, *unread, *config.notes))


def _read_config_file(path: str, errors: ErrorList, notes: list[str]) -> dict[str, Any]:
    """Field -> value, from the file of `--config`. Its errors and notes begin with its name."""
    found, values, words, seen = ErrorList(), dict[str, Any](), deque[str](), set[str]()
    known = {*known_flags(), *(f"--{name}" for name in FOREIGN_FLAGS)} - {"--config", "--print-config", "--dry-run"}
    try:
        for name, value in parse_config_file(Path(path)).items():
            flag = f"--{str(name).replace('_', '-')}"
            if flag in seen:
                found.append(f"{name} is given twice, with dashes and with underscores; keep one")
            elif isinstance(value, dict):
                found.append(f"{name} is a section: write the names of flags without sections, as in `lr: 6e-4`")
            elif flag not in known:
                hint = suggest_spelling(flag, known).replace("--", "").replace("-", "_")
                found.append(f"unknown name {name}: {hint or 'the names are those of the flags (--help-all)'}")
            elif isinstance(value, list):
                words += [flag, *map(str, value)] if value else []
            elif value is not None:
                words.append(f"{flag}={str(value).lower() if isinstance(value, bool) else value}")
            seen.add(flag)
    except UsageError as error:
        found.append(str(error))
    if not found:
        command_line = CommandLine(words, found)
        values = command_line.read()
        notes += command_line.notes
    errors += [f"{path}: {error}" for error in found]
    return values


def config_as_text(config: Config, file_format: str) -> str:
    """The file for `--config` that gives this Config, with every setting that has a value."""
    lines = ["# Every setting of a run, for --config."]
    for section, settings in config.as_dict().items():
        lines += ["", f"# {section}"]
        # A JSON value is also one of YAML and TOML.
        lines += [f"{name}{': ' if file_format == 'yaml' else ' = '}{json.dumps(value, ensure_ascii=False)}"
                  for name, value in settings.items() if value not in (None, [])]
    return "\n".join(lines)


def is_dry_run(argv: Sequence[str]) -> bool:
    """Whether --dry-run is given: plan the run, do not start it."""
    words = (word.replace("_", "-").partition("=") for word in argv)
    return any(name == "--dry-run" and (not equals or value.lower() in YES) for name, equals, value in words)


class Flag(NamedTuple):
    """What a flag sets."""

    field: str
    kind: Any  # str, int, float, tuple (one word or more), or a tuple of choices
    switch_value: Any = None  # what a switch sets; None: a value follows
    opposite: str = ""  # the flag that takes a switch back


@cache
def known_flags() -> dict[str, Flag]:
    """Each name of each flag."""
    flags = {"--preset": Flag("preset", tuple(PRESETS)), "--dry-run": Flag("dry_run", bool, True),
             "--use-distributed-optimizer": Flag("zero_stage", int, 1)}
    flags |= {"--config": Flag("config", str), "--print-config": Flag("print_config", FORMATS)}
    declared: list[tuple[Any, ...]] = [
        ("deepspeed", bool, "deepscale"), ("deepspeed_config", str, "deepscale-config"),
        ("cpu_optimizer", bool, "optimizer-cpu-offload"),
        *((item.name, kind, *setting_of(item).aliases)
          for section in SECTIONS.values() for item, kind in fields_with_types(section))]
    for name, kind, *aliases in declared:
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else None
        for flag in (flag_name(name), *(f"--{alias}" for alias in aliases)):
            if kind is not bool:
                flags[flag] = Flag(name, choices or typing.get_origin(kind) or kind)
            elif name.startswith("no_"):
                flags[flag] = Flag(name, bool, True)
            else:
                off = f"--no-{flag[2:]}"
                flags |= {flag: Flag(name, bool, True, off), off: Flag(name, bool, False, flag)}
    return flags


@dataclass
class CommandLine:
    """Reads the words of a command line; what cannot be accepted goes to `errors`. `other_options` are those of another
    command that these words were given to."""

    words: deque[str]
    errors: ErrorList
    other_options: Collection[str] = ()
    notes: list[str] = field(default_factory=list)  # on flags without effect

    def read(self) -> dict[str, Any]:
        """Field -> value. Of a flag that is given twice the last value wins: scripts' flags yield to their user's."""
        foreign = PLANNER_FLAGS if self.other_options else FOREIGN_FLAGS
        values, typed = dict[str, Any](), dict[str, dict[str, Any]]()  # `typed`: field -> name -> value
        while self.words:
            name, equals, text = self.words.popleft().partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            if name in PRINTED_TEXTS:
                print(PRINTED_TEXTS[name](), flush=True)
                sys.exit(0)
            try:
                if name.startswith("--") and name[2:].lower() in foreign:
                    if not equals and self._value_follows():
                        text = self.words.popleft()
                    if not self._is_remote_device(name, text, *foreign[name[2:].lower()]):
                        continue
                    name, equals = name.lower(), "="
                flag = known_flags().get(name)
                if flag is None:
                    raise self._unknown_word_error(name)
                if flag.switch_value is None:
                    given = [text] if equals else []
                    while not equals and self._value_follows() and (not given or flag.kind is tuple):
                        given.append(self.words.popleft())
                    value = _convert(flag, given)
                else:
                    value = self._switch_value(name, flag, text if equals else None)
            except ConfigError as error:  # collected: one message names everything that is wrong
                self.errors.append(str(error))
                continue
            if value is not None:
                values[flag.field] = typed.setdefault(flag.field, {})[name.replace("--no-", "--")] = value
        for (first, value), *others in (list(names.items()) for names in typed.values()):
            self.errors += [f"{first} is {value_text(value)}, but {name} is {value_text(other)}: they set the same "
                            "option; give only one of them" for name, other in others if other != value]
        return values

    def _value_follows(self) -> bool:
        """Whether the next word is no flag. A negative number is a value, as are "-" and a text with blanks."""
        return bool(self.words) and not re.fullmatch(r"-(?!\.?\d)\S+", self.words[0])

    def _is_remote_device(self, name: str, value: str, answer: str, *accepted: str) -> bool:
        """Answer a flag of another program; True for --remote-device with a value that our flag of this name takes."""
        if name.lower() == "--remote-device" and value and value not in accepted:
            return True
        if value not in accepted and not (value and "*" in accepted):
            raise ConfigError(f"{name}{f' {value}' if value else ''} is not a flag here: {answer}")
        if name[2:].lower() in NOTED_FLAGS:
            self.notes.append(f" note: {name} has no effect: {answer}")
        return False

    def _unknown_word_error(self, word: str) -> ConfigError:
        """The error of an unknown flag or a stray word; the words that follow up to the next flag are passed over."""
        while self._value_follows():
            self.words.popleft()
        if not word.startswith("-"):
            return ConfigError(f"unexpected argument {word}: flags begin with --; `--help` lists those of a first run")
        hint = suggest_spelling(word, {*known_flags(), *PRINTED_TEXTS, *self.other_options}) or LISTS_EVERY_FLAG
        return ConfigError(f"unknown flag {word}: {hint}")

    def _switch_value(self, name: str, flag: Flag, text: str | None) -> Any:
        """What a switch sets, or None: --compile=False is --no-compile. `text` follows its `=`."""
        word = self.words[0] if text is None and self._value_follows() else ""
        if word.lower() in YES | NO:
            remedy = (f"give {name} alone" if word.lower() in YES else
                      f"give {flag.opposite}" if flag.opposite else f"leave {name} out")
            raise ConfigError(f"unexpected argument {self.words.popleft()}: {name} takes no value; {remedy}")
        if word and name == "--deepspeed":
            raise ConfigError(f"unexpected argument {self.words.popleft()}: use --deepspeed --deepspeed_config {word}")
        if text is None or text.lower() in YES:
            return flag.switch_value
        if text.lower() in NO:
            return known_flags()[flag.opposite].switch_value if flag.opposite else None
        if name == "--deepspeed":
            raise ConfigError(f"{name}={text}: use --deepspeed --deepspeed_config {text}")
        raise ConfigError(f"{name}={text}: {name} is a switch, use {name} or {flag.opposite or 'leave it out'}")


def _convert(flag: Flag, given: list[str]) -> Any:
    """The value of the words behind a flag. An integer may be in scientific notation (5e8)."""
    name, kind = flag_name(flag.field), flag.kind
    if not given:
        count = "at least one" if kind is tuple else "one"
        raise ConfigError(f"{name}: expected {count} argument; {LISTS_EVERY_FLAG}")
    text = given[0]
    if kind is tuple or kind is str or isinstance(kind, tuple) and text in kind:
        return tuple(given) if kind is tuple else text
    if isinstance(kind, tuple):
        keys = setting_of(FIELDS[flag.field]).keys if flag.field in FIELDS else ()
        refused = {value: reason for key in keys for value, reason in key.refused.items()}  # that users may expect
        why = refused.get(text.lower().replace("_", "")) or suggest_spelling(text, kind)
        raise ConfigError(f"{name} is {text}: expected {', '.join(kind[:-1])} or {kind[-1]}{why and f'; {why}'}")
    try:
        return JSON_TYPE_OF[kind].convert(int(text) if text.strip().lstrip("+-").isdigit() else float(text))
    except ValueError:
        raise ConfigError(f"{name} is {text}: expected {JSON_TYPE_OF[kind].expected}") from None
