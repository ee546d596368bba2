"""The tables of docs/deepspeed.md, made from the code: `python -m tests.megatron.zero.names_page` rewrites the page."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from megatron.zero.api.compat_names import COMPAT_NAMES, AttributeName, MethodName, UnsupportedName
from megatron.zero.api.engine import Engine

PAGE = Path(__file__).resolve().parents[3] / "docs" / "deepspeed.md"


def methods() -> str:
    """The engine's own names with the first sentence of their docstrings."""
    rows = []
    for name in sorted(name for name in dir(Engine) if not name.startswith("_")):
        text = " ".join((getattr(getattr(Engine, name), "__doc__", None) or "").split())
        first = re.split(r"(?<=[.;:])\s", text)[0].rstrip(".;:")
        rows.append(f"| `{name}` | {first or 'as in DeepSpeed'} |")
    return "\n".join(["| name | |", "|---|---|", *rows])


def table(*kinds: type) -> str:
    """Rows of these kinds, those of one reason together."""
    said = {name: row.description if isinstance(row, (MethodName, AttributeName)) else row.reason
            for name, row in COMPAT_NAMES.items() if isinstance(row, kinds)}
    rows = [f"| {', '.join(f'`{name}`' for name, _ in group)} | {reason} |"
            for reason, group in groupby(sorted(said.items(), key=lambda item: item[1]), key=lambda item: item[1])]
    return "\n".join(["| name | |", "|---|---|", *rows])


def page(text: str) -> str:
    """The page with its tables as the code has them."""
    tables = {"methods": methods(), "answers": table(MethodName, AttributeName),
              "refused": table(UnsupportedName)}
    for name, made in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda match: match[1] + made + match[2], text,
                      flags=re.S)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
