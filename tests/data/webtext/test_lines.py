"""Copied lines and paragraphs, against a slow definition: a set of all that came before."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from data.webtext import lines
from data.webtext.__main__ import main
from data.webtext.documents import Document

PHRASES = [f"{'word ' * (number % 7)}number {number}" for number in range(40)]


def documents(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(PHRASES) + rng.choice(["\n", "\n", "\n\n", "  \n \n"])
                    for _ in range(rng.randint(1, 9))).strip() for _ in range(count)]


def slowly(texts: list[str], unit: str, min_words: int) -> list[str | None]:
    """What is left of each text; None: nothing."""
    seen, found = set[str](), list[str | None]()
    for text in texts:
        parts, own, kept = re.split(r"(\n)" if unit == "lines" else r"(\n\s*\n)", text), set[str](), ""
        for part, separator in zip(parts[::2], [*parts[1::2], ""]):
            words = part.split()
            if words and len(words) >= min_words:
                if " ".join(words) in seen:
                    continue
                own.add(" ".join(words))
            kept += part + separator
        seen |= own
        changed = kept != text
        found.append(text if not changed else kept.strip() or None)
    return found


@pytest.mark.parametrize("unit", lines.UNITS)
@pytest.mark.parametrize("memory, workers", [("1K", 1), ("1G", 2)])
def test_a_part_stays_where_it_comes_first(unit: str, memory: str, workers: int, tmp_path: Path) -> None:
    texts = documents(1, 300)
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes(b"".join(Document(text, str(number)).to_line() for number, text in enumerate(texts)))
    main(["read", str(raw), "--output", str(tmp_path / "read"), "--shard-bytes", "2K", "--workers", "1"])
    main(["lines", str(tmp_path / "read"), "--output", str(tmp_path / "out"), "--drop-copied", unit,
          "--copied-min-words", "3", "--memory", memory, "--workers", str(workers)])
    found = {document["url"]: document["text"] for path in (tmp_path / "out").glob("part-*") for document in
             map(json.loads, path.read_text().splitlines())}
    expected = {str(number): text for number, text in enumerate(slowly(texts, unit, 3)) if text is not None}
    assert found == expected
    assert 0 < len(expected) < len(texts) and any(expected[key] != texts[int(key)] for key in expected)
    counts = json.loads((tmp_path / "out/stage.json").read_text())["counts"]
    assert counts["dropped"] == {lines.COPIED: {"documents": 300 - len(expected), "bytes": counts["dropped"][
        lines.COPIED]["bytes"]}}
