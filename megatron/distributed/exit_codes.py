"""Turn an exception into one `error:` line and an exit code (docs/launch.md has the table).

`run(main)` is the outermost call of every command. Errors of errors.py carry their code; a lost peer, a full disk, lack
of memory and Ctrl-C are recognised by class name and text, without importing torch; anything else is a bug.
`install_excepthook` does the same in users' scripts, for our own errors only. With several ranks every rank exits at
once, without destructors. Under torchrun, srun and mpirun one rank per node prints an error that several ranks raise:
the first to bind an abstract socket name made of the message (`is_error_reporter`).
Not here: which rank is to blame (megatron/launch/supervisor.py).
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import NamedTuple, NoReturn

from megatron.distributed.process_group import (is_rendezvous_error, on_early_exit, read_environment,
                                                run_shutdown_callbacks)
from megatron.distributed.rank_status import RUNNING, STATUS
from megatron.distributed.signals import StopRequested, ignore_stop_signals_at_exit, raise_on_stop_signal
from megatron.errors import (EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, EXIT_PEER, EXIT_STORAGE, ConfigError, PeerError,
                             exit_code, to_error_lines)

LINGER_SECONDS = 2.0
JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
                 "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""What the environments of one job have in common, and those of two jobs have not."""

_CLAIMED_SOCKETS: list[socket.socket] = []
"""Of the process, as its standard error is."""


def is_error_reporter(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether no other rank of this node says the same."""
    if _CLAIMED_SOCKETS:
        return False  # this process has said why it ends
    if "MEGATRON_LAUNCHER" in environ or not _has_local_peers(environ):
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(_socket_name(text, environ))
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    _CLAIMED_SOCKETS.append(claim)
    return True


def linger(code: int) -> None:
    """To be called by a process that ends with this code, also if its launcher grows impatient."""
    if _CLAIMED_SOCKETS:
        with suppress(ValueError):  # only the main thread can
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(LINGER_SECONDS)


def _has_local_peers(environ: Mapping[str, str]) -> bool:
    try:
        return read_environment(environ).local_world_size > 1
    except ConfigError:
        return False


def _socket_name(text: str, environ: Mapping[str, str]) -> bytes:
    """The same error on two ranks may name them."""
    job = [str(os.getuid()), *(environ.get(name, "") for name in JOB_VARIABLES)]
    what = "\n".join([*job, re.sub(r"\brank \d+", "rank", text)])
    return b"\0megatron-error-" + hashlib.sha256(what.encode(errors="backslashreplace")).hexdigest().encode()


EXIT_OWN_FAILURE_OF_RANK = 1
"""A bug or lack of memory under our launcher, which makes it 5; from a rank itself, 5 means a victim: a lost peer."""

EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE
"""What a shell reports of a program that writes to a pipe nobody reads any more (`| head`)."""

STORE_VARIABLE = "MEGATRON_STORE_FILE"
"""Where the ranks of one node meet."""

HELP_FLAGS = frozenset({"-h", "--help", "--help-all", "--version"})
"""With one of these a job does not begin: it prints a text."""

DEBUG_VARIABLE = "MEGATRON_DEBUG"
"""Set to 1, it does what --debug does: scripts of one's own have no such flag."""

TORCH_LOG_LEVEL = ("TORCH_CPP_LOG_LEVEL", "ERROR")
"""Read when torch is imported. Its warnings of a lost peer are a stack in C++ for each connection, beside our line."""

LIBRARY_PACKAGES = frozenset({"megatron", "mpu", "torch"})

MEMORY_CLASSES = frozenset({"MemoryError", "OutOfMemoryError"})
MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "CUDA out of memory", "CUDA error: out of memory",
                "STATUS_ALLOC_FAILED")
LIMIT_ERRNOS = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE})
LIMIT_TEXTS = ("can't start new thread", os.strerror(errno.EAGAIN), os.strerror(errno.EMFILE))
PEER_CLASSES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
PEER_TEXTS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL", "wait timeout after",
              "Socket Timeout")
STORAGE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EPIPE, errno.EFBIG, errno.ESTALE})


_BEFORE_FAILURE: list[weakref.WeakMethod[Callable[[], None]]] = []
_BEFORE_EXIT: list[Callable[[], None]] = []
"""Of the process, as the exit code is."""


class ExplainedMemoryError(MemoryError):
    """Memory ran out, and the text says what to do."""


class ExitReason(NamedTuple):
    """What the user reads, and the exit code for the shell."""

    code: int
    text: str
    is_peer_loss: bool = False


def run(main: Callable[[], int | None], debug: bool | None = None, *, is_job: bool = False) -> int:
    """Call `main` and return the exit code of the process; `debug` (default: `shows_tracebacks`) adds tracebacks.

    A reader of standard output that has seen enough ends a command quietly; a job (`is_job`) says why it stops, unless
    it was asked for its help."""
    prepare_streams()
    os.environ.setdefault(*TORCH_LOG_LEVEL)
    if not is_job:  # a job listens by itself, and saves
        raise_on_stop_signal()
    is_job = is_job and not HELP_FLAGS.intersection(word.replace("_", "-") for word in sys.argv[1:])
    try:
        code = _run_main(main)
        sys.stdout.flush()  # what cannot be written is found here, not when the interpreter winds down
    except BaseException as error:
        code = EXIT_BROKEN_PIPE
        if is_job or has_other_ranks() or not (isinstance(error, BrokenPipeError) and stdout_reader_is_gone()):
            failure = exit_reason_of(error, is_job=is_job)
            code = _report_failure(error, failure, shows_tracebacks() if debug is None else debug)
        if has_other_ranks():
            exit_now(code)  # from here, where the traceback still holds the store: to close one that is cut off hangs
    if has_other_ranks():
        if code == EXIT_OK:
            run_shutdown_callbacks()
        exit_now(code)
    if not flush_streams():
        discard_stdout()
    ignore_stop_signals_at_exit()
    return code


def _report_failure(error: BaseException, failure: ExitReason, debug: bool) -> int:
    if debug and not failure.is_peer_loss:  # of a lost peer only the peer's own traceback helps
        traceback.print_exception(error, file=sys.__stderr__)  # torch's hook would catch it in sys.stderr
    write_error(failure.text)
    if not (failure.is_peer_loss or is_store_write_error(error)):  # the peers of a victim hear it from the culprit
        _call_each_once(_BEFORE_FAILURE)
    return failure.code


def shows_tracebacks() -> bool:
    """Whether errors that are explained show their traceback as well."""
    return "--debug" in sys.argv or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def install_excepthook() -> None:
    """From now on an error of ours that a script does not catch ends it as `run` would. May be called again."""
    on_early_exit(_handle_early_exit)
    if not (isinstance(sys.excepthook, partial) and sys.excepthook.func is _excepthook):
        sys.excepthook = partial(_excepthook, sys.excepthook)


def _excepthook(previous_hook: Callable[..., object], kind: type[BaseException], error: BaseException,
                trace: TracebackType | None) -> None:
    """Python's excepthook; `others` is the one before. An interpreter that somebody types into must not end."""
    is_ours = exit_code(error) is not None or isinstance(error, ExplainedMemoryError) or is_peer_loss(error)
    if not is_ours or hasattr(sys, "ps1") or sys.flags.interactive:
        previous_hook(kind, error, trace)
        return
    failure = exit_reason_of(error)
    first, *listed = to_error_lines(failure.text).splitlines()
    text = "\n".join([first + _script_line(trace), *listed])
    code = _report_failure(error, failure._replace(text=text), shows_tracebacks())
    if has_other_ranks():
        exit_now(code)
    raise SystemExit(code)  # out of an excepthook it sets the exit code; what the script left for atexit is done


def _script_line(trace: TracebackType | None) -> str:
    """The line of the script that led into our code or torch's."""
    frames = [(frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line)
              for frame, line in traceback.walk_tb(trace)]
    own = list(takewhile(lambda frame: frame[0].partition(".")[0] not in LIBRARY_PACKAGES, frames))
    return f" ({os.path.basename(own[-1][1])}, line {own[-1][2]})" if own else ""


def before_failure(callback: Callable[[], None]) -> None:
    """Call this method, while its object lives, when this process is about to leave with an error of its own."""
    _BEFORE_FAILURE.append(weakref.WeakMethod(callback))


def before_exit(callback: Callable[[], None]) -> None:
    """Call this function when this process leaves at once, whatever for: nothing else of what is left for the end of a
    program is done then."""
    if callback not in _BEFORE_EXIT:
        _BEFORE_EXIT.append(callback)


def _call_each_once(methods: list[weakref.WeakMethod[Callable[[], None]]]) -> None:
    """Each once, if its object lives."""
    while methods:
        method = methods.pop()()
        if method is not None:
            method()


def _run_main(main: Callable[[], int | None]) -> int:
    try:
        return main() or EXIT_OK
    except SystemExit as leaving:
        if isinstance(leaving, StopRequested):
            raise
        if isinstance(leaving.code, str):
            write_error(leaving.code)
        if leaving.code in (None, EXIT_OK) and has_other_ranks() and STATUS.snapshot.state == RUNNING:
            raise EarlyExit(_early_exit_text()) from leaving
        return leaving.code if isinstance(leaving.code, int) else EXIT_CONFIG if leaving.code else EXIT_OK


class EarlyExit(Exception):
    """An exit with code 0 that other ranks know nothing of."""


def _early_exit_text() -> str:
    who = f"rank {read_environment().rank} (pid {os.getpid()} on {socket.gethostname()})"
    return f"{who} left with exit code 0 at {STATUS.snapshot}, without the others; look for the sys.exit() in its program"


def _handle_early_exit() -> None:
    """Of a script, in the middle of a step. For a rank that is alone nobody waits."""
    if not has_other_ranks():
        return
    failure = exit_reason_of(EarlyExit(_early_exit_text()))
    write_error(failure.text)
    exit_now(failure.code)


def exit_reason_of(error: BaseException, environ: Mapping[str, str] = os.environ, *, is_job: bool = True) -> ExitReason:
    """The exit code and the text for one exception."""
    rank = f"rank {environ.get('RANK', '0')}"
    message = str(error) or type(error).__name__
    own_failure = EXIT_OWN_FAILURE_OF_RANK if "MEGATRON_LAUNCHER" in environ else EXIT_PEER
    known = exit_code(error)
    if known is not None:
        return ExitReason(known, message, isinstance(error, PeerError))
    if isinstance(error, StopRequested):
        return ExitReason(EXIT_INTERRUPTED, error.text)
    if isinstance(error, EarlyExit):
        return ExitReason(own_failure, message)
    if isinstance(error, KeyboardInterrupt):
        remedy = " before training could save; start the same command to resume" if is_job else ""
        return ExitReason(EXIT_INTERRUPTED, "interrupted" + remedy)
    if is_out_of_memory(error):
        explained = isinstance(error, ExplainedMemoryError)
        what = message if explained else (f"{message.strip().splitlines()[0]}; use a smaller --batch-size, "
                                          "--checkpoint-activations or a higher --zero-stage")
        return ExitReason(own_failure, f"{rank} is out of memory: {what}")
    if isinstance(error, OSError) and error.errno in LIMIT_ERRNOS or \
            isinstance(error, RuntimeError) and message.startswith(LIMIT_TEXTS):
        return ExitReason(own_failure, f"{rank} reached a limit of the system on open files, threads or processes "
                          f"({message.splitlines()[0]}); raise it (ulimit -n, ulimit -u)")
    if is_store_write_error(error, environ):
        return ExitReason(EXIT_STORAGE, f"{rank} cannot write {environ[STORE_VARIABLE]}, where the ranks of this node "
                          f"meet: {message.splitlines()[0]}; free space there or name another folder in "
                          "TMPDIR, then start the same command to resume")
    if is_peer_loss(error):
        # The rest of gloo's message is advice and a greeting.
        what = re.sub(r"^\[.*?\] ", "", message).partition(". This is typically")[0]
        return ExitReason(
            EXIT_PEER, f"{rank} lost contact with another rank ({what}); look for the first failure among "
            "the ranks, then start the same command to resume", True)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        if error.errno == errno.EPIPE:
            where = "standard output" if stdout_reader_is_gone() else "a pipe"
            return ExitReason(EXIT_STORAGE, f"cannot write {where}: {error.strerror}; its reader has ended")
        where = error.filename or "standard output or a file"
        return ExitReason(EXIT_STORAGE, f"cannot write {where}: {error.strerror}; free space or choose another folder")
    how = "run with --debug" if is_job else f"set {DEBUG_VARIABLE}=1"  # commands have no such flag
    hint = "" if shows_tracebacks() else f" ({how} for the traceback)"
    return ExitReason(own_failure, f"internal error in {rank}: {type(error).__name__}: {message}{hint}")


def is_out_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if MEMORY_CLASSES & names or isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_TEXTS)


def is_store_write_error(error: BaseException, environ: Mapping[str, str] = os.environ) -> bool:
    """A note for the other ranks did not fit in our launcher's file: a rank that reads it, or writes one, hangs
    (folders.py)."""
    return (STORE_VARIABLE in environ and any(cls.__name__ == "DistStoreError" for cls in type(error).__mro__)
            and any(os.strerror(number) in str(error) for number in STORAGE_ERRNOS))


def is_peer_loss(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if PEER_CLASSES & names:
        return True
    if not isinstance(error, RuntimeError):
        return False
    # Out of an exchange comes what became of the others, in many words; but a device fails there as well.
    among_others = STATUS.snapshot.in_collective or is_rendezvous_error(error)
    return any(text in str(error) for text in PEER_TEXTS) or among_others and "CUDA" not in str(error)


def write_error(text: str) -> None:
    """Exactly one line that begins so, and below it those of errors that it lists. None, where another rank says the
    same."""
    said = to_error_lines(text)
    if not is_error_reporter(said):
        return
    line = f"error: {said.removeprefix('error: ')}\n"
    try:
        flush_streams()
        os.write(2, line.encode(errors="backslashreplace"))
    except OSError:
        pass  # nobody reads stderr any more; the exit code is still right


def has_other_ranks() -> bool:
    try:
        return read_environment().world_size > 1
    except ConfigError:
        return False


def exit_now(code: int) -> NoReturn:
    """End this rank without destructors. `main` has closed by now what it opened."""
    while _BEFORE_EXIT:
        with suppress(Exception):  # nobody is left to hear of it
            _BEFORE_EXIT.pop()()
    logging.shutdown()
    flush_streams()
    linger(code)
    os._exit(code)


def exit_on_request(text: str) -> NoReturn:
    """For a thread whose main thread does not hear that the program was asked to end."""
    write_error(text)
    exit_now(EXIT_INTERRUPTED)


def flush_streams() -> bool:
    """Write what is buffered; False where standard output accepts no more: no reason to hide the first error."""
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # full or closed
            good = good and stream is not sys.stdout
    return good


def stdout_reader_is_gone() -> bool:
    """Standard output is a pipe whose reader has closed it."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))  # errors and hang-ups are reported unasked
    except (OSError, ValueError):
        return False


def discard_stdout() -> None:
    """What is left in the buffer has nowhere to go: the interpreter would try once more, and make an error of it."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # not a file, or closed


def prepare_streams() -> None:
    """UTF-8 whatever the locale says; what is no text, as a file name may be, is printed with backslashes.
    A stream that was closed before the start (`>&-`) goes nowhere, and programs that this one starts inherit that.
    To be called before a command opens anything: the next file gets the number of a closed stream, and error lines."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream, errors = getattr(sys, name), "surrogateescape" if mode == "r" else "backslashreplace"
        if stream is None:
            nowhere = open(os.devnull, mode, encoding="utf-8", errors=errors)
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper) and (stream.encoding, stream.errors) != ("utf-8", errors):
            stream.reconfigure(encoding="utf-8", errors=errors)
