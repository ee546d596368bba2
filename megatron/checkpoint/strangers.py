"""What lies in a save root or a tag and is none of ours: links that lead elsewhere, files that no save wrote. No torch.

A link is not followed out of the save root: what is there is neither read, written nor deleted. (A save root may itself
be a link, and so may a single file of a tag, whose bytes are checked.) Other files are named, and stay with the tag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from megatron.checkpoint.manifest import LATEST, MANIFEST
from megatron.checkpoint.part import rank_of_file
from megatron.errors import CheckpointError

MAX_NAMES = 3
"""Files that a line names; of others it gives the number."""
_OLD_FORMAT_FILE = re.compile(r"rank[0-9]{1,9}\.s[0-9]{1,9}\.safetensors")


def link_target_outside(path: Path, root: Path) -> str | None:
    """Where a link leads that leaves the save root; None for anything else."""
    if not path.is_symlink():
        return None
    target, root_path = os.path.realpath(path), os.path.realpath(root)
    return None if os.path.commonpath([target, root_path]) == root_path else target


def check_link_inside(path: Path, root: Path, what: str, remedy: str) -> None:
    if (target := link_target_outside(path, root)) is not None:
        raise CheckpointError(f"{what}: {path} is a link to {target}, outside the save root, and is not followed; "
                              f"{remedy}")


def check_tag_inside(folder: Path, root: Path, tag: str) -> None:
    check_link_inside(folder, root, f"tag {tag}", "give that folder itself, or move it here")


def check_latest_inside(root: Path) -> None:
    check_link_inside(root / LATEST, root, LATEST, "write the name of a tag into a file in its place")


def remove_link(path: Path) -> Path:
    """The path, about to be written: a link there makes way, and what it leads to stays as it is."""
    if path.is_symlink():
        path.unlink()
    return path


def unknown_files(folder: Path) -> list[str]:
    """Names in the folder of a tag that no save uses. Nothing is opened."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name for name in names if name != MANIFEST and rank_of_file(name) is None
                  and not _OLD_FORMAT_FILE.fullmatch(name))


def format_file_names(names: Iterable[str]) -> str:
    """`'notes.txt'`, `'a', 'b', 'c' and 5 more`."""
    known = sorted(names)
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return ", ".join(f"{name!r:.120}" for name in known[:MAX_NAMES]) + more


def unknown_files_warning(tag: str, names: Iterable[str]) -> str:
    """The warning of a reader."""
    return f"warning: tag {tag}: not part of this checkpoint, and not read: {format_file_names(names)}"
