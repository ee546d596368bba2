"""The parser of all commands; and `--help`, one screen for people who are new here, and `--help-all`, every flag."""

from __future__ import annotations

import argparse
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, Literal, NoReturn

from data.cli import StrictArgumentParser, command_name
from megatron.config.presets import PRESETS
from megatron.config.setting import flag_name, plain_type, setting_of
from megatron.config.tree import SECTIONS
from megatron.errors import ConfigError

WIDTH, COLUMN = 100, 34

EXAMPLES = """\
Pretrain a GPT-2 with tensor and ZeRO data parallelism. A trial without data, a run on two GPUs:

  {program} --preset tiny --mock-data --train-iters 50
  {launch} --preset 124M --bf16 \\
      --zero-stage 2 --train-data corpus.jsonl --save runs/gpt2 --load runs/gpt2
"""
COMMON_FLAGS = {
    "--preset NAME": f"model shape: {', '.join(PRESETS)}; other flags win",
    "--deepspeed-config FILE": "DeepSpeed's JSON file (docs/ds_config.md); flags that are given must agree with it",
}
RARE_FLAGS = {
    "--dry-run": "print the plan of the run (memory, traffic, what is in its way) and leave; takes the options of "
                 "`python -m megatron.plan` as well",
    "--[no-]cpu-optimizer": "accepted for old scripts: --offload-optimizer-device cpu, unless the JSON file says "
                            "nvme [also --optimizer-cpu-offload]",
    "--[no-]deepspeed": "accepted for old scripts: there is one engine",
}


class CommandArgumentParser(StrictArgumentParser):
    """The command line of `python -m megatron.NAME`; what is wrong with it is a ConfigError, and so one line."""

    def __init__(self, module: str, description: str, examples: str = "", **more: Any) -> None:
        """`module` as it is run; help and examples have what was typed in its place."""
        program = command_name(module)
        super().__init__(program, description.replace(module, program), epilog=examples.replace(module, program),
                         formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _usage_lines() -> list[str]:
    """How to call it, in the words of a clone or of an installation."""
    program = command_name("python pretrain_gpt2.py")
    launch = ("gpt2-launch --nproc-per-node 2 -m pretrain_gpt2" if program == "gpt2-train" else
              "python -m megatron.launch --nproc-per-node 2 pretrain_gpt2.py")
    return [f"usage: {program} [FLAGS]", "", EXAMPLES.format(program=program, launch=launch)]


def short_help() -> str:
    """The flags of a first run."""
    lines = _usage_lines()
    for flag, text in COMMON_FLAGS.items():
        lines += _help_entry(flag, text)
    for section in SECTIONS.values():
        for item, hint in _fields_with_types(section):
            if setting_of(item).in_short_help:
                lines += _help_entry(_flag_usage(item, hint), _short_text(item))
    return "\n".join([*lines, "", "--help-all lists every flag; README.md and docs/ are the guide."])


def full_help() -> str:
    """Every flag, by topic."""
    lines = [*_usage_lines(), "Dashes and underscores are the same in flag names. --[no-]NAME is a switch.", ""]
    for flag, text in {**COMMON_FLAGS, **RARE_FLAGS}.items():
        lines += _help_entry(flag, text)
    for name, section in SECTIONS.items():
        lines += ["", *textwrap.wrap(f"{name}: {' '.join((section.__doc__ or '').split())}", WIDTH), ""]
        for item, hint in _fields_with_types(section):
            lines += _help_entry(_flag_usage(item, hint, switches=True), _full_text(item, hint))
    return "\n".join(lines)


def _fields_with_types(section: type) -> Iterator[tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(section)
    return ((item, plain_type(hints[item.name])[0]) for item in fields(section))


def _flag_usage(item: Field[Any], hint: Any, switches: bool = False) -> str:
    """The flag and what follows it."""
    flag = flag_name(item.name)
    if hint is bool:
        return flag if item.name.startswith("no_") or not switches else f"--[no-]{flag[2:]}"
    if typing.get_origin(hint) is tuple:
        return f"{flag} {setting_of(item).metavar or 'PATH'} ..."
    if hint in (int, float):
        return f"{flag} {'N' if hint is int else 'X'}"
    return f"{flag} {setting_of(item).metavar or ('NAME' if typing.get_origin(hint) is Literal else 'PATH')}"


def _short_text(item: Field[Any]) -> str:
    shown = item.default not in (None, False, ()) and "(default" not in setting_of(item).help
    return setting_of(item).help + (f" (default: {item.default})" if shown else "")


def _full_text(item: Field[Any], hint: Any) -> str:
    declared_setting = setting_of(item)
    text = declared_setting.help + (f"; one of {', '.join(typing.get_args(hint))}"
                                    if typing.get_origin(hint) is Literal else "")
    default = {True: "on"}.get(item.default, item.default) if isinstance(item.default, bool) else item.default
    shown = item.default not in (None, False, ()) and "(default" not in text
    aliases = [f"--{alias}" for alias in declared_setting.aliases if "contigious" not in alias]
    return text + (f" (default: {default})" if shown else "") + (f" [also {', '.join(aliases)}]" if aliases else "")


def _help_entry(flag: str, text: str) -> list[str]:
    """A flag and its text, in two columns."""
    lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
    if len(flag) + 4 > COLUMN:
        return [f"  {flag}", *(" " * COLUMN + line for line in lines)]
    return [f"  {flag}".ljust(COLUMN) + lines[0], *(" " * COLUMN + line for line in lines[1:])]
