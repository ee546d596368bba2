"""Where a profile goes: its file's ending says as what, .json, .html, or text."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.errors import StorageError
from megatron.profiler.page import profile_page
from megatron.profiler.profile import ModelProfile
from megatron.profiler.text import format_profile

_JSON, _PAGE = ".json", (".html", ".htm")


def check_output_path(path: str, flag: str) -> None:
    """It can be made, as far as that shows without making it."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or Path(path).is_dir():
        raise StorageError(f"{flag} {path} cannot be written: {folder if not folder.is_dir() else path} is "
                           f"{'no' if not folder.is_dir() else 'a'} folder; name a file in a folder that is there")


def includes_modules(path: str, detailed: bool) -> bool:
    """What is written there has each module: a text only where that is asked for."""
    return detailed or Path(path).suffix.lower() in (_JSON, *_PAGE)


def write_profile(profile: ModelProfile,
                  path: str,
                  module_depth: int = -1,
                  top_modules: int = 1,
                  detailed: bool = True) -> None:
    """The file is replaced."""
    ending = Path(path).suffix.lower()
    if ending == _JSON:
        text = json.dumps(profile.as_dict(), indent=1)
    elif ending in _PAGE:
        text = profile_page(profile)
    else:
        text = format_profile(profile, module_depth, top_modules, detailed)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"the profile cannot be written to {path}: {error.strerror}; name a file in a folder that "
                           "can be written") from error
