"""What can be known of a manifest without parsing it: its tag, its run, the time of its commit, its checksum. No
torch.

A manifest of an older format can be hundreds of megabytes, which take seconds to parse; these questions are asked at
every save, about every tag in the folder. All formats begin with the tag and end with the time and the checksum.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.strict import CHECKSUM, ending, read_bytes
from megatron.errors import CheckpointError

_BEGIN = re.compile(rb'\{"format":[0-9]+,"run_id":"([^"]*)","tag":"([^"\\\\]*)"')
_END = re.compile(rb'"saved_at":([0-9]{1,18})(?:,"hmac":"[0-9a-f]{64}")?,"crc32":"[0-9a-f]{8}"}\n\Z')
_LAST = 200
"""Bytes that hold the end."""


@dataclass(frozen=True)
class Stamp:
    """Of a manifest whose bytes match its checksum."""

    tag: str
    saved_at: int
    """0 in format 1, which does not record it."""
    run_id: str = ""


def stamp_of(folder: Path) -> Stamp | None:
    """None where there is no manifest, or a damaged one. It is read, and not parsed."""
    try:
        data = read_bytes(folder / MANIFEST, MANIFEST)
    except CheckpointError:
        return None
    text = memoryview(data)[:max(data.rfind(CHECKSUM), 0)]
    begin, end = _BEGIN.match(data), _END.search(data[-_LAST:])
    if data[len(text):] != ending(text) or begin is None:
        return None
    run_id, tag = (word.decode("utf-8", "replace") for word in begin.groups())
    return Stamp(tag, int(end[1]) if end else 0, run_id)


def seal_of(folder: Path) -> str | None:
    """The checksum that the manifest in `folder` ends with, which identifies one save; None without a manifest."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            file.seek(-len(ending(b"")), os.SEEK_END)
            return file.read()[len(CHECKSUM):-3].decode("ascii", "replace")
    except OSError:
        return None


def saved_at_of(folder: Path) -> int:
    """The time of the commit of the manifest in `folder`, from its last bytes alone. 0 where there is none."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
            found = _END.search(file.read())
    except OSError:
        return 0
    return int(found[1]) if found else 0
