"""The error family: what went wrong decides the exit code; the message says what, why and what to do.

`data/` and `mpu/` raise their own DataError and ParallelError; `exit_code` maps those too. Programmer mistakes
are `assert`s and keep their traceback; nothing here is raised for them.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

EXIT_OK, EXIT_CONFIG, EXIT_DATA, EXIT_CHECKPOINT, EXIT_PEER, EXIT_NUMERICS, EXIT_STORAGE = 0, 2, 3, 4, 5, 6, 7
EXIT_INTERRUPTED = 130


class TrainerError(Exception):
    """Base of every error a user can cause or must act on."""

    code = EXIT_PEER


class ConfigError(TrainerError):
    """A flag, a JSON key or a combination of them that cannot be honoured."""

    code = EXIT_CONFIG


class CheckpointError(TrainerError):
    """A checkpoint whose content is missing, damaged or does not fit this run."""

    code = EXIT_CHECKPOINT


class PeerError(TrainerError):
    """Another rank failed or stopped answering."""


class NumericsError(TrainerError):
    """Training produced a value it must not go on with."""

    code = EXIT_NUMERICS


class StorageError(TrainerError):
    """A disk or directory that cannot be written."""

    code = EXIT_STORAGE


class RankOutOfMemory(TrainerError):
    """A rank has too little memory for what all ranks do together: all exit with the same message."""


class Interrupted(TrainerError):
    """Stopped on request, without a place to save to."""

    code = EXIT_INTERRUPTED


# Errors of the packages that must not import this one, by class name.
CODES_BY_NAME = {"UsageError": EXIT_CONFIG, "DataError": EXIT_DATA, "ParallelError": EXIT_CONFIG,
                 "StorageFault": EXIT_STORAGE}


def exit_code(error: BaseException) -> int | None:
    """The exit code of an error of the family, or None for anything else (a bug, which keeps its traceback)."""
    if isinstance(error, TrainerError):
        return error.code
    for cls in type(error).__mro__:
        if cls.__name__ in CODES_BY_NAME:
            return CODES_BY_NAME[cls.__name__]
    return None


_LISTED = re.compile(r" {2}\(\d+\) ")


def format_listed_error(number: int, sentence: str) -> str:
    """The line of one of several errors, below a heading with their count."""
    return f"  ({number}) {sentence}"


def is_listed_error(line: str) -> bool:
    return _LISTED.match(line) is not None


def to_error_lines(message: str) -> str:
    """One line, and one for each listed error; other newlines become spaces. Control characters become escapes
    (`\\x1b`)."""
    lines: list[str] = []
    for line in filter(str.strip, message.splitlines()):
        if is_listed_error(line) or not lines:
            lines.append(line.rstrip() if is_listed_error(line) else line.strip())
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join("".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line) for line in lines)


BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

ERRNO_REMEDIES = {errno.ENOSPC: "free space", errno.EDQUOT: "free space", errno.EACCES: "make it writable",
                  errno.EROFS: "make it writable", errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
                  errno.EMFILE: "raise the limit on open files (ulimit -n)"}


def format_bytes(count: float) -> str:
    """`1.4 MB`, `512 GB`."""
    unit, name = next((row for row in BYTE_UNITS if count >= row[0]), (1, "bytes"))
    value = count / unit
    return f"{value:.1f} {name}" if value < 10 and unit > 1 else f"{value:.0f} {name}"


def explain_os_error(error: OSError, folder: Path) -> tuple[str, str]:
    """(the reason, with the free space if that is the problem; the first thing to do about it)."""
    remedy, free = ERRNO_REMEDIES.get(error.errno or 0, "check the drive"), ""
    if remedy == "free space":
        with suppress(OSError):
            status = os.statvfs(folder)
            no_more_files = status.f_files and not status.f_favail
            free = " for another file" if no_more_files else f", {format_bytes(status.f_bavail * status.f_frsize)} free"
    return f"{error.strerror}{free}", remedy
