"""Turn an exception into one `error:` line and an exit code (docs/launch.md has the table).

`run(main)` is the outermost call of every command; `install_excepthook` does the same in users' scripts, for our own
errors only. Errors of errors.py carry their code; others are recognised by class name and text, without importing
torch; anything else is a bug. With several ranks every rank exits at once, without destructors.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, NoReturn

from megatron.distributed.process_group import (CallbackList, Environment, is_rendezvous_error, on_early_exit,
                                                read_environment, run_shutdown_callbacks)
from megatron.distributed.rank_status import RUNNING, STATUS
from megatron.distributed.signals import StopRequested, ignore_stop_signals_at_exit, raise_on_stop_signal
from megatron.errors import (EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_OK, EXIT_PEER, EXIT_STORAGE, ConfigError, PeerError,
                             exit_code, to_error_lines)

LINGER_SECONDS = 2.0  # seconds that the reporter of an error stays, so that other ranks see that it was reported
# equal in all processes of one job, different between jobs
JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
                 "SLURM_STEP_ID", "PMIX_NAMESPACE")
_CLAIMED_SOCKETS: list[socket.socket] = []  # bound by this process; module state, as stderr belongs to it too


def is_error_reporter(text: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank is the first of its node to report this error, and so prints it: the first to bind an abstract
    socket name made of the job and the message. Our launcher chooses among its ranks itself."""
    if _CLAIMED_SOCKETS:
        return False  # this process has printed its error already
    if "MEGATRON_LAUNCHER" in environ or _environment(environ).local_world_size == 1:
        return True
    # rank numbers are left out: they may differ between the ranks that report one error
    parts = [str(os.getuid()), *(environ.get(name, "") for name in JOB_VARIABLES), re.sub(r"\brank \d+", "rank", text)]
    digest = hashlib.sha256("\n".join(parts).encode(errors="backslashreplace")).hexdigest()
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(b"\0megatron-error-" + digest.encode())
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    _CLAIMED_SOCKETS.append(claim)
    return True


# Bug or out of memory, under our launcher, which turns it into 5. From a rank itself, 5 means a victim: a lost peer.
EXIT_OWN_FAILURE_OF_RANK = 1
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # the shell's code for a program that writes to a closed pipe (`| head`)
HELP_FLAGS = frozenset({"-h", "--help", "--help-all", "--version"})  # flags that print a text in place of running a job
DEBUG_VARIABLE = "MEGATRON_DEBUG"  # "1" has the effect of --debug, for users' scripts, which have no such flag
# Read when torch is imported. Its warnings about a lost peer print one C++ stack per connection beside our error line.
TORCH_LOG_LEVEL = ("TORCH_CPP_LOG_LEVEL", "ERROR")
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
BEFORE_FAILURE = CallbackList()  # called before this process exits with an error of its own
before_failure = BEFORE_FAILURE.register


class ExplainedMemoryError(MemoryError):
    """Out of memory, with a text that says what to do."""


class ExitReason(NamedTuple):
    code: int
    text: str  # the error, for the user
    is_peer_loss: bool = False


def run(main: Callable[[], int | None], debug: bool | None = None, *, is_job: bool = False) -> int:
    """Call `main` and return the exit code; `debug` (default: `shows_tracebacks`) adds tracebacks. If the reader of
    stdout closes the pipe, a command exits silently; a job (`is_job`) reports it, unless it only prints help."""
    prepare_streams()
    os.environ.setdefault(*TORCH_LOG_LEVEL)
    if not is_job:  # a job installs a StopListener, which saves first
        raise_on_stop_signal()
    is_job = is_job and not HELP_FLAGS.intersection(word.replace("_", "-") for word in sys.argv[1:])
    try:
        code = _run_main(main)
        sys.stdout.flush()  # write errors surface here, not while the interpreter shuts down
    except BaseException as error:
        code = EXIT_BROKEN_PIPE
        if is_job or has_other_ranks() or not (isinstance(error, BrokenPipeError) and stdout_reader_is_gone()):
            failure = exit_reason_of(error, is_job=is_job)
            code = _report_failure(error, failure, shows_tracebacks() if debug is None else debug)
        if has_other_ranks():
            # exit inside the handler: the traceback holds the store open, and closing a broken store hangs
            exit_now(code)
    if has_other_ranks():
        if code == EXIT_OK:
            run_shutdown_callbacks()
        exit_now(code)
    if not flush_streams():
        discard_stdout()
    ignore_stop_signals_at_exit()
    return code


def _report_failure(error: BaseException, failure: ExitReason, debug: bool) -> int:
    if debug and not failure.is_peer_loss:  # this rank's traceback does not explain a lost peer
        traceback.print_exception(error, file=sys.__stderr__)  # sys.stderr itself would go through torch's hook
    write_error(failure.text)
    if not failure.is_peer_loss:  # a victim's peers learn the cause from the culprit
        BEFORE_FAILURE.run()
    return failure.code


def shows_tracebacks() -> bool:
    """Whether explained errors also print their traceback."""
    return "--debug" in sys.argv or os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def install_excepthook() -> None:
    """Make uncaught errors of ours end a script as `run` would. Idempotent."""
    on_early_exit(_handle_early_exit)
    if not (isinstance(sys.excepthook, partial) and sys.excepthook.func is _excepthook):
        sys.excepthook = partial(_excepthook, sys.excepthook)


def _excepthook(previous_hook: Callable[..., object], kind: type[BaseException], error: BaseException,
                trace: TracebackType | None) -> None:
    """sys.excepthook; `previous_hook` handles foreign errors. An interactive interpreter is never ended."""
    is_ours = exit_code(error) is not None or isinstance(error, ExplainedMemoryError) or is_peer_loss(error)
    if not is_ours or hasattr(sys, "ps1") or sys.flags.interactive:
        previous_hook(kind, error, trace)
        return
    failure = exit_reason_of(error)
    first, *listed = to_error_lines(failure.text).splitlines()
    script_line = ""  # the line of the script that led into our code or torch's
    for frame, line in traceback.walk_tb(trace):
        if frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARY_PACKAGES:
            break
        script_line = f" ({os.path.basename(frame.f_code.co_filename)}, line {line})"
    text = "\n".join([first + script_line, *listed])
    code = _report_failure(error, failure._replace(text=text), shows_tracebacks())
    if has_other_ranks():
        exit_now(code)
    raise SystemExit(code)  # SystemExit from an excepthook sets the exit code and still runs atexit callbacks


def _run_main(main: Callable[[], int | None]) -> int:
    try:
        return main() or EXIT_OK
    except SystemExit as leaving:
        if isinstance(leaving, StopRequested):
            raise
        if isinstance(leaving.code, str):
            write_error(leaving.code)
        if leaving.code in (None, EXIT_OK) and has_other_ranks() and STATUS.snapshot.state == RUNNING:
            raise EarlyExit from leaving
        return leaving.code if isinstance(leaving.code, int) else EXIT_CONFIG if leaving.code else EXIT_OK


class EarlyExit(Exception):
    """This rank exits with code 0 while other ranks still expect it."""

    def __init__(self) -> None:
        who = f"rank {read_environment().rank} (pid {os.getpid()} on {socket.gethostname()})"
        super().__init__(f"{who} left with exit code 0 at {STATUS.snapshot}, without the others; look for the "
                         "sys.exit() in its program")


def _handle_early_exit() -> None:
    """Handler of a script that exits in the middle of a step. With other ranks: print the error and exit."""
    if has_other_ranks():
        failure = exit_reason_of(EarlyExit())
        exit_with_error(failure.text, failure.code)


def exit_reason_of(error: BaseException, environ: Mapping[str, str] = os.environ, *, is_job: bool = True) -> ExitReason:
    """The exit code and the error text for one exception."""
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
    if is_peer_loss(error):
        # The rest of gloo's message is general advice.
        what = re.sub(r"^\[.*?\] ", "", message).partition(". This is typically")[0]
        return ExitReason(EXIT_PEER, f"{rank} lost contact with another rank ({what}); look for the first failure "
                          "among the ranks, then start the same command to resume", True)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        if error.errno == errno.EPIPE:
            where = "standard output" if stdout_reader_is_gone() else "a pipe"
            return ExitReason(EXIT_STORAGE, f"cannot write {where}: {error.strerror}; its reader has ended")
        where = error.filename or "standard output or a file"
        return ExitReason(EXIT_STORAGE, f"cannot write {where}: {error.strerror}; free space or choose another folder")
    how = "run with --debug" if is_job else f"set {DEBUG_VARIABLE}=1"  # only jobs have --debug
    hint = "" if shows_tracebacks() else f" ({how} for the traceback)"
    return ExitReason(own_failure, f"internal error in {rank}: {type(error).__name__}: {message}{hint}")


def is_out_of_memory(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if MEMORY_CLASSES & names or isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MEMORY_TEXTS)


def is_peer_loss(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    if PEER_CLASSES & names:
        return True
    if not isinstance(error, RuntimeError):
        return False
    # Errors from inside a collective are peer errors whatever their text, except CUDA errors.
    among_others = STATUS.snapshot.in_collective or is_rendezvous_error(error)
    return any(text in str(error) for text in PEER_TEXTS) or among_others and "CUDA" not in str(error)


def write_error(text: str) -> None:
    """Print one `error:` line and the errors listed below it, unless another rank of this node printed the same."""
    lines = to_error_lines(text)
    if is_error_reporter(lines):
        flush_streams()
        with suppress(OSError):  # stderr is closed; the exit code is still right
            os.write(2, f"error: {lines.removeprefix('error: ')}\n".encode(errors="backslashreplace"))


def _environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """That of a single rank if the variables contradict each other."""
    try:
        return read_environment(environ)
    except ConfigError:
        return Environment()


def has_other_ranks() -> bool:
    return _environment().world_size > 1


def exit_now(code: int) -> NoReturn:
    """Exit this rank without destructors and atexit callbacks. `main` has closed its resources before."""
    logging.shutdown()
    flush_streams()
    if _CLAIMED_SOCKETS:  # keep the socket name bound while other ranks fail
        with suppress(ValueError):  # only the main thread can
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(LINGER_SECONDS)
    os._exit(code)


def exit_with_error(text: str, code: int = EXIT_INTERRUPTED) -> NoReturn:
    """Print the error and exit this rank, from any thread: the main thread may hang, or not react to a signal."""
    write_error(text)
    exit_now(code)


def flush_streams() -> bool:
    """Flush stdout and stderr; False if stdout accepts no more. Never raises, so that the first error stays visible."""
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # full or closed
            good = good and stream is not sys.stdout
    return good


def stdout_reader_is_gone() -> bool:
    """Whether stdout is a pipe whose reader has closed it."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))  # POLLERR and POLLHUP are always reported
    except (OSError, ValueError):
        return False


def discard_stdout() -> None:
    """Redirect stdout to /dev/null: the interpreter's own flush at exit would fail again and print an error."""
    with suppress(OSError, ValueError):  # not a file, or closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_streams() -> None:
    """Switch the standard streams to UTF-8 whatever the locale; undecodable bytes print as backslash escapes. A stream
    that was closed before the start (`>&-`) is opened on /dev/null, inherited by child processes. Call this before
    opening any file: the next file would get the closed stream's descriptor, and the error lines with it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream, errors = getattr(sys, name), "surrogateescape" if mode == "r" else "backslashreplace"
        if stream is None:
            nowhere = open(os.devnull, mode, encoding="utf-8", errors=errors)
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper) and (stream.encoding, stream.errors) != ("utf-8", errors):
            stream.reconfigure(encoding="utf-8", errors=errors)
