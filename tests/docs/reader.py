"""Markdown pages -> what a reader would do with them, in order. The convention is in docs/README.md.

    ```bash                 commands, run as one script (`set -e`)
    ```python               code, run in one interpreter a page
    ```json name.json       a second word: the file to save the block as; nothing is run
    ```text                 what the block before it prints; `...` stands for what is left out or varies
    <!-- docs-test: skip REASON -->    before a block: it is not run, and why

Not here: running (`session.py`), comparing (`compare.py`), flags (`programs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md")) + [ROOT / "README.md"]
RUN = ("bash", "python")
LANGUAGES = (*RUN, "text", "json", "mermaid")

_FENCE = re.compile(r"^(\s*)```\s*([\w+-]*)[ \t]*(.*)$")
_SKIP = re.compile(r"<!--\s*docs-test:\s*skip\b:?\s*(.*?)\s*-->")
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
    prints: str | None = None
    """The ```text block after it; None: nothing is said about what it prints."""


def blocks(text: str) -> list[Block]:
    """Every fenced block that is run or saved, each with what the page says it prints."""
    found: list[Block] = []
    for line, language, name, body, skip in _fenced(text):
        if language not in LANGUAGES:
            raise PageError(f"line {line}: a block of {language or 'no language'}; expected one of {LANGUAGES}")
        if language == "text" and skip:
            continue
        if language == "text":
            if not found or found[-1].prints is not None or found[-1].file:
                raise PageError(f"line {line}: a text block is what a bash or python block before it prints; "
                                "indent drawings and formulas instead")
            found[-1] = _printing(found[-1], body)
        elif language in ("json", "mermaid") and not name:
            continue
        else:
            found.append(Block(line, language, body, file=name, skip=skip))
    return found


def _printing(block: Block, text: str) -> Block:
    return Block(block.line, block.language, block.text, block.file, block.skip, text)


def _fenced(text: str) -> Iterator[tuple[int, str, str, str, str]]:
    """(line, language, file name, body, reason to skip) of every fence."""
    lines = text.splitlines()
    at, skip = 0, ""
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            marker = _SKIP.search(lines[at])
            if "docs-test" in lines[at] and (marker is None or not marker.group(1)):
                raise PageError(f"line {at + 1}: {lines[at].strip()}; expected <!-- docs-test: skip REASON -->")
            if marker:
                skip = marker.group(1)
            elif lines[at].strip():
                skip = ""
            at += 1
            continue
        indent, language, name = opening.groups()
        end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == "```"), None)
        if end is None:
            raise PageError(f"line {at + 1}: a fence without an end")
        body = "\n".join(line.removeprefix(indent) for line in lines[at + 1:end])
        yield at + 1, language, name.strip(), body, skip
        at, skip = end + 1, ""


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
