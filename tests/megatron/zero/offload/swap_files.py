"""Swap files have no names: how tests see them and get at their bytes."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.zero.offload.swap_drive import AsyncSwapFile


def content_of(file: AsyncSwapFile) -> Path:
    """A path that opens the file."""
    return Path(f"/proc/self/fd/{file.file.descriptor}")


def open_swap_files(folder: Path) -> list[Path]:
    """Paths that open the files without names of this process in `folder`; also asserts that names are left of none."""
    assert [path for path in folder.iterdir() if path.is_file()] == []
    found: dict[int, Path] = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # the descriptor of the listing
            continue
        if target.startswith(f"{folder.resolve()}/") and target.endswith(" (deleted)"):
            found[link.stat().st_ino] = link
    return [*found.values()]
