"""The reference parts of the guide, written from the declarations of the configuration: docs/flags.md, and the tables
of docs/ds_config.md between `<!-- table: NAME -->` and `<!-- end -->`.

    python scripts/reference.py            write them
    python scripts/reference.py --check    exit with 1 where the pages differ from the declarations
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.config import SECTIONS, flag_name  # noqa: E402
from megatron.config.ds_cross_keys import BATCH_SIZE_KEYS  # noqa: E402
from megatron.config.ds_keys import DS_KEYS, FixedValue, IgnoredKey, RenamedKey, UnsupportedSection  # noqa: E402
from megatron.config.optimizer_config import DEEPSPEED_TYPES, OPTIMIZERS  # noqa: E402
from megatron.config.schema import JsonKey, plain_type, setting_of  # noqa: E402

FIELDS = {item.name: item for section in SECTIONS.values() for item in fields(section)}


# ---- flags -------------------------------------------------------------------------------------------------------


def flags_page() -> str:
    """docs/flags.md"""
    lines = ["# Flags of `pretrain_gpt2.py`", "",
             "This page is written by `scripts/reference.py`; do not edit it. Dashes and underscores are the same in",
             "flag names, and so are a blank and `=` before a value. A switch `--name` has a counterpart `--no-name`,",
             "and `--name=False` is the same; without a default it is off. DeepSpeed's keys are in",
             "[ds_config.md](ds_config.md)."]
    for name, section in SECTIONS.items():
        hints = typing.get_type_hints(section)
        lines += ["", f"## {name}", "", " ".join((section.__doc__ or "").split()), "",
                  "| flag | default | effect |", "|---|---|---|"]
        for item in fields(section):
            said, kind = setting_of(item), plain_type(hints[item.name])[0]
            names = [flag_name(item.name), *(f"--{alias}" for alias in said.aliases if "contigious" not in alias)]
            flag = ", ".join(f"`{flag}`" for flag in names)
            choices = f" ({', '.join(typing.get_args(kind))})" if typing.get_origin(kind) is typing.Literal else ""
            default = "" if item.default is False else _default(item.default)
            lines.append(f"| {flag} | {default} | {_cell(said.help + choices)} |")
    return "\n".join(lines) + "\n"


# ---- JSON keys ---------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """The tables of docs/ds_config.md by name."""
    named: dict[str, str] = {name: _keys_of_topic(belongs) for name, belongs in TOPICS.items()}
    named["types"] = _types()
    ignored = {path: row for path, row in DS_KEYS.items() if isinstance(row, IgnoredKey)}
    named["only"] = _by_section((path, _accepted_values(row)) for path, row in DS_KEYS.items()
                                if isinstance(row, FixedValue))
    named["no effect"] = _by_section((path, f"`{json.dumps(row.default)}`") for path, row in ignored.items()
                                     if not row.has_effect_in_engine)
    named["engine"] = _by_section((path, f"`{json.dumps(row.default)}`") for path, row in ignored.items()
                                  if row.has_effect_in_engine)
    named["absent"] = _unsupported()
    return named


def _under(*prefixes: str) -> Callable[[str], bool]:
    return lambda path: path.startswith(prefixes)


TOPICS: dict[str, Callable[[str], bool]] = {
    "batch": lambda path: path in BATCH_SIZE_KEYS,
    "training": lambda path: "." not in path and path not in BATCH_SIZE_KEYS and path != "zero_optimization",
    "precision": _under("fp16.", "bf16.", "bfloat16."),
    "optimizer": lambda path: path in ("optimizer.params.lr", "optimizer.params.weight_decay",
                                       "optimizer.params.max_grad_norm"),
    "scheduler": _under("scheduler."),
    "zero": lambda path: path.startswith("zero_optimization.") and ".offload_" not in path,
    "offload": _under("zero_optimization.offload_", "aio."),
    "activation checkpointing": _under("activation_checkpointing."),
    "layer dropping": _under("progressive_layer_drop."),
    "quantisation": _under("quantize_training.", "compression_training.weight_quantization.", "eigenvalue."),
    "flops profiler": _under("flops_profiler."),
    "autotuning": _under("autotuning.")}


def _keys_of_topic(belongs: Callable[[str], bool]) -> str:
    """The keys that have name and default of their flag, as a list, and a table of the others.

    A row is for all keys that set the same field with the same default, or are read as the same key. Its last column
    names the flag, and what only the key does; what the flag does is in docs/flags.md."""
    rows: dict[tuple[str, str], list[str]] = {}
    same: list[str] = []
    for path, row in DS_KEYS.items():
        if not belongs(path) or path.startswith(SAME_AS_EIGENVALUE):
            continue
        if isinstance(row, JsonKey) and row.field:
            names_of_key = path.rpartition(".")[2], path.replace(".", "_"), _short(path).replace(".", "_")
            if row.field in names_of_key and row.default is None and not row.help:
                same.append(f"`{_short(path)}`")
                continue
            default = row.default if row.default is not None else _default(FIELDS[row.field].default)
            what = default, f"`{flag_name(row.field)}`" + (f": {_cell(row.help)}" if row.help else "")
        elif isinstance(row, JsonKey):
            what = "", WORDS.get(path, "")
        elif isinstance(row, RenamedKey):
            how, section = "deprecated name of" if row.deprecated else "another name of", path.partition(".")[0]
            targets = [_short(new) if new.startswith(f"{section}.") else new for new in row.new_paths]
            what = "", f"{how} {' and '.join(f'`{target}`' for target in targets)}"
            if row.new_paths == (path.replace(".", ".stage3_"),):
                what = "", "other names of the keys with `stage3_`"
        else:
            continue
        rows.setdefault(what, []).append(f"`{_short(path)}`")
    listed = textwrap.fill(f"As the flag of the same name: {', '.join(same)}.", 120, break_on_hyphens=False)
    table = ["| key | default | flag |", "|---|---|---|",
             *(f"| {', '.join(names)} | {default} | {flag} |" for (default, flag), names in rows.items())]
    return "\n".join([*([listed, ""] if same else []), *table])


SECTION = re.compile(r"(zero_optimization|scheduler\.params|scheduler|optimizer\.params|optimizer"
                     r"|activation_checkpointing|progressive_layer_drop|autotuning|flops_profiler|quantize_training"
                     r"|compression_training\.weight_quantization)\.")


def _short(path: str) -> str:
    """The path within the section that the page's heading names."""
    return SECTION.sub("", path, count=1) if SECTION.match(path) else path


SAME_AS_EIGENVALUE = "quantize_training.eigenvalue."
"""The section `eigenvalue` may stand in `quantize_training` as well, with the same keys; the page says so once."""

WORDS = {"gradient_accumulation_steps": "none: micro-batches per optimizer step; 1 where no key decides",
         "scheduler.params.decay_step_size": "none: of `OneCycle`: steps per decay; 0, the default, is no decay",
         "compression_training.weight_quantization.different_groups":
             "one group of modules, `[\"*\"]`, with the params `start_bits` (16), `target_bits` (8) and "
             "`quantization_period` (1): `--quantize-start-bits`, `--quantize-target-bits`, `--quantize-period`"}
"""Keys that set no field of their own."""


def _types() -> str:
    lines = ["| type | `--optimizer` | parameters beside `lr` and `weight_decay` |", "|---|---|---|"]
    for name, takes in OPTIMIZERS.items():
        types = ", ".join(f"`{given}`" for given, ours in DEEPSPEED_TYPES.items() if ours == name)
        own = [f"`{key}` {_default(value)}".rstrip() for key, value in takes.extra.items()]
        named = [f"`{key}`" for key in takes.fields if key != "adam_w_mode" or name == "adam"]
        lines.append(
            f"| {types} | `{name}` | {', '.join(named + own) or '-'}{'' if takes.has_weight_decay else '; no decay'} |")
    return "\n".join(lines)


def _accepted_values(row: FixedValue) -> str:
    return " or ".join(f"`{json.dumps(value)}`" for value in row.values[:2]
                       if not isinstance(value, float) or value < 1e18)


def _by_section(values: Iterable[tuple[str, str]]) -> str:
    """A line for the keys of each section, those with the same value together."""
    sections: dict[str, dict[str, list[str]]] = {}
    for path, value in values:
        if not path.startswith(SAME_AS_EIGENVALUE):
            section, _, key = path.rpartition(".")
            sections.setdefault(section, {}).setdefault(value, []).append(f"`{key}`")
    return "\n".join(f"- {f'`{section}`' if section else 'top level'}: "
                     + "; ".join(f"{', '.join(names)}: {value}" for value, names in keys.items())
                     for section, keys in sections.items())


def _unsupported() -> str:
    """A table of the sections that are refused, and why. Within a row a common beginning is not repeated."""
    reasons: dict[str, list[str]] = {}
    for path, row in DS_KEYS.items():
        if isinstance(row, UnsupportedSection):
            named = reasons.setdefault(row.reason, [])
            named.append(f"`{path.rpartition('.')[2] if named else path}`")
    return "\n".join(["| section | why |", "|---|---|",
                      *(f"| {', '.join(names)} | {_cell(reason)} |" for reason, names in reasons.items())])


# ---- pages -------------------------------------------------------------------------------------------------------


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(_default, value))
    if isinstance(value, int) and value >= 100_000 and value % 10 ** (len(str(value)) - 1) == 0:
        return f"{value:.0e}".replace("e+0", "e")
    return f"{value:g}" if isinstance(value, float) else f"`{value}`" if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def filled(page: str) -> str:
    """The page with every table between its marks written again."""
    found = tables()

    def table(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{found.pop(match[1])}\n<!-- end -->"

    text = re.sub(r"<!-- table: ([\w ]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)
    if found:
        raise SystemExit(f"docs/ds_config.md has no place for the tables {', '.join(found)}")
    return text


def pages() -> dict[Path, str]:
    """Page -> its text as the declarations have it."""
    guide = ROOT / "docs" / "ds_config.md"
    return {ROOT / "docs" / "flags.md": flags_page(), guide: filled(guide.read_text())}


def main() -> int:
    stale = [page for page, text in pages().items() if not page.exists() or page.read_text() != text]
    if "--check" not in sys.argv:
        for page, text in pages().items():
            page.write_text(text)
        return 0
    for page in stale:
        print(f"{page.relative_to(ROOT)} differs from the declarations: run python scripts/reference.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
