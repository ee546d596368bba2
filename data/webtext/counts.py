"""How many documents came in, how many were kept, and why the others were not.

Bytes are those of lines: as read on the way in (for a whole file: of the file), as written on the way out. Documents
in = kept + dropped, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DocumentCounts:
    """Adds up over documents, shards and nodes."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_kept: int = 0
    bytes_kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Documents by reason."""
    dropped_bytes: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    """Documents that reading mended, by fault; they may have been kept or dropped afterwards."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Documents kept by size: n counts those with at least 2^(n-1) and fewer than 2^n bytes."""

    def add_kept(self, size_in: int, size_out: int) -> None:
        self.documents_in += 1
        self.bytes_in += size_in
        self.documents_kept += 1
        self.bytes_kept += size_out
        self.sizes[size_out.bit_length()] += 1

    def add_dropped(self, reason: str, size_in: int) -> None:
        self.documents_in += 1
        self.bytes_in += size_in
        self.dropped[reason] += 1
        self.dropped_bytes[reason] += size_in

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        return DocumentCounts(self.documents_in + other.documents_in, self.bytes_in + other.bytes_in,
                              self.documents_kept + other.documents_kept, self.bytes_kept + other.bytes_kept,
                              self.dropped + other.dropped, self.dropped_bytes + other.dropped_bytes,
                              self.repaired + other.repaired, self.sizes + other.sizes)

    def followed_by(self, later: DocumentCounts) -> DocumentCounts:
        """These counts, where `later` says what became of the documents kept."""
        return DocumentCounts(self.documents_in, self.bytes_in, later.documents_kept, later.bytes_kept,
                              self.dropped + later.dropped, self.dropped_bytes + later.dropped_bytes, self.repaired,
                              later.sizes)

    def to_json(self) -> dict[str, Any]:
        """Equal counts give equal JSON, whatever came first."""
        return {
            "in": {"documents": self.documents_in, "bytes": self.bytes_in},
            "kept": {"documents": self.documents_kept, "bytes": self.bytes_kept},
            "dropped": {reason: {"documents": self.dropped[reason], "bytes": self.dropped_bytes[reason]}
                        for reason in sorted(self.dropped)},
            "repaired": {reason: self.repaired[reason] for reason in sorted(self.repaired)},
            "sizes": {str(power): self.sizes[power] for power in sorted(self.sizes)},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DocumentCounts:
        """KeyError or TypeError where `value` is not what `to_json` gives."""
        dropped = value["dropped"]
        return cls(value["in"]["documents"], value["in"]["bytes"], value["kept"]["documents"], value["kept"]["bytes"],
                   Counter({reason: tally["documents"] for reason, tally in dropped.items()}),
                   Counter({reason: tally["bytes"] for reason, tally in dropped.items()}),
                   Counter(value["repaired"]), Counter({int(power): n for power, n in value["sizes"].items()}))
