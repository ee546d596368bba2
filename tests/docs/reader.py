"""Markdown pages -> what a reader would do with them, in order. The convention is in docs/README.md.

    ```bash                 commands, run as one script (`set -e`)
    ```python               code, run in one interpreter a page
    ```json name.json       a second word: the file to save the block as; nothing is run
    ```text                 what the block before it prints; `...` stands for what is left out or varies
    <!-- docs-test: skip REASON -->     before a block: it is not run, and why
    <!-- docs-test: needs a, b -->      before a block: it is run where these packages are installed

Not here: running and comparing (`session.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md")) + [ROOT / "README.md"]
RUN = ("bash", "python")
LANGUAGES = (*RUN, "text", "json", "yaml", "mermaid")

_FENCE = re.compile(r"^(\s*)```\s*([\w+-]*)[ \t]*(.*)$")
_MARKER = re.compile(r"<!--\s*docs-test:\s*(?:skip:?\s+(?P<skip>\S.*?)|needs\s+(?P<needs>[\w, ]+?))\s*-->")
_LOOKS_LIKE_A_COMMAND = re.compile(r"^\s+(\$ |python |bash |pip |torchrun |srun |[A-Z_]+=\S+ (bash|python) )")


class PageError(AssertionError):
    """A page that does not keep to the convention."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it starts, what it is, and what is to be done with it."""

    line: int
    language: str
    text: str
    file: str = ""
    skip: str = ""
    needs: tuple[str, ...] = ()
    prints: str | None = None
    """The ```text block after it; None: nothing is said about what it prints."""


def blocks(text: str) -> list[Block]:
    """Every fenced block that is run or saved, each with what the page says it prints."""
    found: list[Block] = []
    for line, language, name, body, marker in _fenced(text):
        skip = marker["skip"] or "" if marker else ""
        if language not in LANGUAGES:
            raise PageError(f"line {line}: a block of {language or 'no language'}; expected one of {LANGUAGES}")
        if language == "text" and skip:
            continue
        if language == "text":
            if not found or found[-1].prints is not None or found[-1].file:
                raise PageError(f"line {line}: a text block is what a bash or python block before it prints; "
                                "indent drawings and formulas instead")
            found[-1] = replace(found[-1], prints=body)
        elif language in ("json", "yaml", "mermaid") and not name:
            continue
        else:
            needs = tuple(re.findall(r"\w+", marker["needs"] or "")) if marker else ()
            found.append(Block(line, language, body, name, skip, needs))
    return found


def _fenced(text: str) -> Iterator[tuple[int, str, str, str, re.Match[str] | None]]:
    """(line, language, file name, body, the marker before it) of every fence."""
    lines = text.splitlines()
    at, marker = 0, None
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            if "<!-- docs-test" in lines[at] and "`" not in lines[at]:
                marker = _MARKER.fullmatch(lines[at].strip())
                if marker is None:
                    raise PageError(f"line {at + 1}: {lines[at].strip()}; expected <!-- docs-test: skip REASON -->")
            elif lines[at].strip():
                marker = None
            at += 1
            continue
        indent, language, name = opening.groups()
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == "```"), None)
        if end is None:
            raise PageError(f"line {at + 1}: a fence without an end")
        body = "\n".join(line.removeprefix(indent) for line in lines[at + 1:end])
        yield at + 1, language, name.strip(), body, marker
        at, marker = end + 1, None


def prose(text: str) -> str:
    """The page without its fenced blocks, line by line, so that line numbers stay."""
    inside, kept = False, []
    for line in text.splitlines():
        fence = _FENCE.match(line) is not None
        kept.append("" if inside or fence else line)
        inside ^= fence
    return "\n".join(kept)


def stray_commands(text: str) -> list[str]:
    """Commands in indented blocks, which no test would run."""
    return [line.strip() for line in prose(text).splitlines()
            if line.startswith("    ") and _LOOKS_LIKE_A_COMMAND.match(line)]


def inline_code(text: str) -> list[tuple[int, str]]:
    """(line, code) of every `code` in the prose."""
    whole = prose(text)
    return [(whole.count("\n", 0, match.start()) + 1, " ".join(match.group(1).split()))
            for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", whole)]


def links(text: str) -> list[tuple[int, str]]:
    """(line, target) of every Markdown link."""
    whole = prose(text)
    return [(whole.count("\n", 0, match.start()) + 1, match.group(1))
            for match in re.finditer(r"\]\(([^)\s]+)\)", whole)]


def anchors(text: str) -> set[str]:
    """The anchors GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}
