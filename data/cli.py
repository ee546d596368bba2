"""What this package's commands share: one-line errors and exit codes.

Exit codes: 0 done, 2 usage, 3 data, 5 a system limit or a bug, 7 storage, 130 interrupted. Every failure prints one
line that begins with `error:`. A closed standard output (`| head`) ends a command silently with 141, as it ends `yes`.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import re
import signal
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from data.storage import DataError, StorageFault, UsageError, escape_to_one_line

# Signals from users, closing terminals and batch systems that would otherwise end a program without an error line.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)

EXIT_CODES = ((UsageError, 2), (DataError, 3), (StorageFault, 7), (KeyboardInterrupt, 130))


def command_name(default: str) -> str:
    """The command that the user typed if it is one of our entry points (`gpt2-...`), else `default`."""
    name = os.path.basename(sys.argv[0])
    return name if name.startswith("gpt2-") else default


def normalize_flag_names(arguments: Sequence[str]) -> list[str]:
    """Replace underscores by dashes in flag names, up to a `--` argument."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names = (word.partition("=") for word in arguments[:end])
    return ["".join((name.replace("_", "-"), *rest)) if name.startswith("--") else "".join((name, *rest))
            for name, *rest in names] + list(arguments[end:])


def suggest_spelling(word: str, known: Iterable[str]) -> str:
    """"did you mean X?" where up to three names begin with `word`, or one is spelt alike; otherwise ""."""
    spelt = {name.lower().replace("-", "").replace("_", ""): name for name in sorted(known)}
    typed = word.lower().replace("-", "").replace("_", "")
    found = [name for plain, name in spelt.items() if plain.startswith(typed)] if len(typed) >= 4 else []
    if not 1 <= len(found) <= 3:
        found = [spelt[plain] for plain in difflib.get_close_matches(typed, spelt, n=1, cutoff=0.75)]
    return f"did you mean {' or '.join(found)}?" if found else ""


class StrictArgumentParser(argparse.ArgumentParser):
    """argparse whose usage errors are exceptions, with dashes or underscores in flags, and no abbreviations."""

    def __init__(self, prog: str, description: str | None = None, *, usage_error: type[Exception] = UsageError,
                 **more: Any) -> None:
        if prog.startswith("data."):  # a sub-command's prog is set by argparse
            prog = command_name(f"python -m {prog}")
        super().__init__(prog=prog, description=description, allow_abbrev=False, **more)
        self._usage_error = usage_error

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        args_found, unknown = self.parse_known_args(normalize_flag_names(sys.argv[1:] if args is None else args))
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
            hint = "" if flag is None else suggest_spelling(flag, self.flag_names())
            self.error(f"unexpected argument {unknown[0]}: flags begin with --" if flag is None else
                       f"unknown flag {flag}{': ' * bool(hint)}{hint}")
        return args_found

    def flag_names(self) -> set[str]:
        """All flag names, including those of sub-commands."""
        inner = [parser for action in self._actions if isinstance(action, argparse._SubParsersAction)
                 for parser in action.choices.values()]
        return {*self._option_string_actions, *(flag for parser in inner for flag in parser.flag_names())}

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[\w-]+)(?:/--[\w-]+)*:", r"\1:", message)  # the first of its names
        raise self._usage_error(f"{message}; see {self.prog} --help")


def parse_config_file(path: Path) -> dict[str, Any]:
    """Name -> value of a .toml or .yaml file; raises a UsageError that does not name the file."""
    is_toml = path.suffix == ".toml"
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        settings = tomllib.loads(text) if is_toml else _parse_yaml(text)
    except ValueError as error:  # tomllib's is one
        raise UsageError(f"no valid {'TOML' if is_toml else 'YAML'}: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UsageError("expected names and values, as in `lr: 6e-4`")
    return settings


def _parse_yaml(text: str) -> Any:
    import yaml  # here, since --help needs no package

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(error) from None
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:  # YAML would keep the last
        raise UsageError(f"{', '.join(twice)} is given twice; keep one")
    return settings


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def size(text: str) -> int:
    """Parse bytes: `67108864` or `64M`."""
    unit = {"k": 10, "m": 20, "g": 30, "t": 40}.get(text[-1:].lower())
    return positive(text) if unit is None else positive(text[:-1]) << unit


def format_count(number: int, what: str) -> str:
    """`1 file`, `1,234 files`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _prepare_streams() -> None:
    """Switch the standard streams to UTF-8. A stream closed before the start (`2>&-`) is opened on /dev/null: otherwise
    the next opened file would get its descriptor, and the error lines."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream, errors = getattr(sys, name), "surrogateescape" if mode == "r" else "backslashreplace"
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors=errors))
            os.set_inheritable(getattr(sys, name).fileno(), True)  # for child processes
        elif isinstance(stream, io.TextIOWrapper) and (stream.encoding, stream.errors) != ("utf-8", errors):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _interrupt_on_stop_signals() -> None:
    """Treat these signals like Ctrl-C. Further ones are ignored, so that cleanup is not interrupted."""
    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for other in handled_signals:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")

    if threading.current_thread() is threading.main_thread():  # only the main thread can install handlers
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
        handled_signals = [number for number in STOP_SIGNALS if not (ignores_hangup and number == signal.SIGHUP)]
        for number in handled_signals:
            signal.signal(number, interrupt)


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run a command and exit with its exit code."""
    _interrupt_on_stop_signals()
    _prepare_streams()
    code = 0
    try:
        try:
            main()
        except SystemExit as leaving:  # --help
            code = leaving.code if isinstance(leaving.code, int) else 0
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter would flush the rest of the buffer again and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except (DataError, StorageFault, KeyboardInterrupt) as error:
        message = " ".join(str(error).split()) or "interrupted"
        print(f"error: {escape_to_one_line(message)}", file=sys.stderr)
        code = next(code for kind, code in EXIT_CODES if isinstance(error, kind))
    except Exception as error:
        if os.environ.get("MEGATRON_DEBUG", "0") not in ("", "0"):
            traceback.print_exception(error)
        is_limit = (isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EMFILE, errno.ENFILE)
                    or "can't start new thread" in str(error))
        what = "a limit of the system on open files, threads or processes" if is_limit else "internal error"
        remedy = "raise it (ulimit -n, ulimit -u)" if is_limit else "MEGATRON_DEBUG=1 shows the traceback"
        print(f"error: {what}: {type(error).__name__}: {error}; {remedy}", file=sys.stderr)
        code = 5
    sys.exit(code)
