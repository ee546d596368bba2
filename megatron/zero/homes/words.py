"""Bytes, times and refusals of a drive, as a person reads them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))

UNSUPPORTED_ERRNOS = (errno.ENOENT, errno.EPERM, errno.EOPNOTSUPP)
"""What a file system such as /proc says to a new folder in one that is there."""

ERRNO_REMEDIES = {errno.ENOSPC: "free space", errno.EDQUOT: "free space", errno.EACCES: "make it writable",
                  errno.EROFS: "make it writable", errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
                  errno.EMFILE: "raise the limit on open files (ulimit -n)"}


def format_bytes(count: float) -> str:
    """`1.4 MB`, `512 GB`."""
    unit, name = next((row for row in BYTE_UNITS if count >= row[0]), (1, "bytes"))
    value = count / unit
    return f"{value:.1f} {name}" if value < 10 and unit > 1 else f"{value:.0f} {name}"


def format_seconds(seconds: float) -> str:
    """`24.6 s`, `3.1 ms`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else "less than 0.1 ms"


def free_space(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def explain_create_error(error: OSError, folder: Path) -> str:
    """Why nothing new could be made in a folder that is there, and what to do."""
    if error.errno in UNSUPPORTED_ERRNOS:
        return "its file system takes no new files; choose a folder on a drive"
    why, remedy = explain_os_error(error, folder)
    return f"{why}; {remedy}, or choose another folder"


def explain_os_error(error: OSError, folder: Path) -> tuple[str, str]:
    """What is so, and the first thing to do about it."""
    remedy = ERRNO_REMEDIES.get(error.errno or 0, "check the drive")
    return f"{error.strerror}{_free_space_text(folder) if remedy == 'free space' else ''}", remedy


def _free_space_text(folder: Path) -> str:
    try:
        status = os.statvfs(folder)
    except OSError:
        return ""
    no_more_files = status.f_files and not status.f_favail
    return " for another file" if no_more_files else f", {format_bytes(status.f_bavail * status.f_frsize)} free"
