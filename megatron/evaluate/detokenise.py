"""WikiText as it was before it was cut into words: the rules that all published figures share, and its documents.

The rules are applied in their order to the whole text. They are those of Megatron-LM and of lm-eval, letter for letter,
because every one moves the figures. `/' [0-9]/` was meant for something else, and matches next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PLAIN, PATTERN = False, True

RULES: tuple[tuple[bool, str, str], ...] = (
    (PLAIN, "s '", "s'"),
    (PATTERN, r"/' [0-9]/", r"/'[0-9]/"),
    *((PLAIN, f" @{mark}@ ", mark) for mark in "-,."),
    *((PLAIN, f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
    (PATTERN, r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (PATTERN, r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (PATTERN, r"{\s*([^}]*?)\s*}", r"{\1}"),
    *((PATTERN, rf"{mark}\s*([^{mark}]*?)\s*{mark}", rf"{mark}\1{mark}") for mark in "\"'"),
    *((PLAIN, " ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (PLAIN, " ° ", "°"),
    (PLAIN, " \n", "\n"),
    (PLAIN, "\n ", "\n"),
    (PLAIN, " N ", " 1 "),
    (PLAIN, " 's", "'s"),
)


def detokenised(text: str) -> str:
    for is_pattern, old, new in RULES:
        text = re.sub(old, new, text) if is_pattern else text.replace(old, new)
    return text


def articles(text: str) -> Iterator[str]:
    """The documents of a WikiText file, joined by line ends the file again: each begins at a heading of the first
    level. They are those of lm-eval's data set."""
    held: list[str] = []
    for line in text.split("\n"):
        if _is_title(line) and "".join(held).strip():
            yield "\n".join(held)
            held = []
        held.append(line)
    yield "\n".join(held)


def _is_title(line: str) -> bool:
    line = line.replace("= = =", "===").replace("= =", "==").strip()
    return line.startswith("= ") and line.endswith(" =")
