"""Which checkpoint a file is of: every file of a tag says so itself, beside all checksums. No torch.

A checksum says that a file is whole, not that it belongs here: one that was copied from another tag, with its sums
corrected, would be read. So the header of a file of tensors, `shared.json` and the parts hold the *origin* of what is
in them, and `config.json` repeats what the manifest says. From format 4 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron.checkpoint.manifest import Manifest
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class Origin:
    """Save, and rank in it. The save's name ends with a digest of the manifest; run, tag and step are for people."""

    save_id: str
    rank: int
    run_id: str
    tag: str
    iteration: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_metadata(self) -> dict[str, str]:
        """In the header of a safetensors file, which holds texts."""
        return {name: str(value) for name, value in asdict(self).items()}


def origin_of(manifest: Manifest, rank: int) -> Origin:
    return Origin(manifest.save_id, rank, manifest.run_id, manifest.tag, manifest.iteration)


def check_origin(found: object, expected: Origin, where: str) -> None:
    """`found` is the origin that a file has, as a dict or as metadata."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: does not say which checkpoint it is of")
    for field in fields(Origin):
        said, right = found.get(field.name), getattr(expected, field.name)
        if type(said) not in (str, type(right)) or str(said) != str(right):
            raise CheckpointError(f"{where}: is of another checkpoint: {field.name} expected {right}, found "
                                  f"{str(said):.80}")
    if strange := set(found) - {field.name for field in fields(Origin)}:
        raise CheckpointError(f"{where}: unknown field {min(map(str, strange))!r} in its origin")
