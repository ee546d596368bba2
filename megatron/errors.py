"""The error family: what went wrong decides the exit code; the message says what, why and what to do.

`data/` and `mpu/` raise their own DataError and ParallelError; `exit_code` maps those too. Programmer mistakes
are `assert`s and keep their traceback; nothing here is raised for them.
"""

from __future__ import annotations

import re

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

    code = EXIT_PEER


class NumericsError(TrainerError):
    """Training produced a value it must not go on with."""

    code = EXIT_NUMERICS


class StorageError(TrainerError):
    """A disk or directory that cannot be written."""

    code = EXIT_STORAGE


class RankOutOfMemory(TrainerError):
    """A rank has too little memory for what all ranks do together: they leave with the same line."""

    code = EXIT_PEER


class Interrupted(TrainerError):
    """Asked to stop, without a place to save to."""

    code = EXIT_INTERRUPTED


CODES_BY_NAME = {"UsageError": EXIT_CONFIG, "DataError": EXIT_DATA, "ParallelError": EXIT_CONFIG,
                 "StorageFault": EXIT_STORAGE}
"""Errors of the packages that must not import this one, by class name."""


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
    """The line of one of several errors, below one that says how many they are."""
    return f"  ({number}) {sentence}"


def is_listed_error(line: str) -> bool:
    return _LISTED.match(line) is not None


def to_error_lines(message: str) -> str:
    """One line, and one for each error that is listed: other newlines do not hold. What a terminal would obey becomes
    an escape (`\\x1b`)."""
    lines: list[str] = []
    for line in filter(str.strip, message.splitlines()):
        if is_listed_error(line) or not lines:
            lines.append(line.rstrip() if is_listed_error(line) else line.strip())
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join("".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line) for line in lines)
