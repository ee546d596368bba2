"""Run the ranks of one node as child processes, forward their signals and errors, and end them together.

The *culprit* is the rank whose failure ended the job; its *victims* failed because of it (exit code 5, or SIGABRT from
NCCL's watchdog). One `error:` line reaches the user: the culprit's. Standard library only: the launcher must start in
milliseconds and must not die of what kills its ranks.
Not here: a rank's environment (launcher.py), how an exception becomes an exit code (distributed/exit_codes.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from megatron.distributed.rank_status import DONE, RESUME_ADVICE, UNKNOWN, StatusSnapshot, Straggler, StragglerMonitor
from megatron.distributed.signals import (SIGNAL_INTERRUPTS_OWNED_BY_RANK0, STOP_SIGNALS, STOPPING_LINE,
                                          is_handled_signal, write_lines, write_stderr)
from megatron.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PEER, is_listed_error
from megatron.launch.node_monitor import Failure, NodeMonitor

TICK_SECONDS = 0.2
STOP_PATIENCE_SECONDS = 1.0  # seconds a rank may stay stopped (SIGSTOP): a debugger's short stop is not a failure
GRACE_SECONDS = 2.5  # seconds from the first failure to SIGTERM, in which victims notice and the culprit exits
TERM_SECONDS = 1.0  # from SIGTERM to SIGKILL; with GRACE_SECONDS no rank lives 5 seconds after a kill
SIGNAL_DELAY_SECONDS = 1.0  # from the start until stop signals are forwarded: earlier they would end Python itself
OTHER_NODES_SECONDS = GRACE_SECONDS + TERM_SECONDS + 1.0  # for other launchers to find their culprit
MAX_HELD_LINES = 16
PASSED_ON_EXIT_CODES = frozenset({*range(2, 8), EXIT_INTERRUPTED})
PR_SET_PDEATHSIG = 1
INTERRUPTED_TWICE_LINE = b"error: interrupted twice, so the ranks were ended at once; earlier checkpoints are intact\n"


class JobState(Enum):
    RUNNING = auto()
    FAILING = auto()  # a rank failed, here or on another node; the others have GRACE_SECONDS to notice
    TERMINATING = auto()  # the remaining ranks were signalled


class StopRequest(IntEnum):
    """What the user or a batch system asked for, in increasing order of urgency."""

    NONE = 0
    SIGNAL = 1  # a stop signal other than Ctrl-C
    INTERRUPT = 2
    SECOND_INTERRUPT = 3  # the ranks are killed


@dataclass(frozen=True)
class RankExit:
    """How one rank ended; exactly one of `code` and `signal` is set."""

    rank: int
    pid: int
    code: int | None = None
    signal: int | None = None
    was_stopped: bool = False
    stop_was_requested: bool = False  # the launcher or this rank received a stop signal before the exit
    status: StatusSnapshot = StatusSnapshot()

    @property
    def failed(self) -> bool:
        return self.code != EXIT_OK

    @property
    def exited_early(self) -> bool:
        """Exit code 0 in the middle of an operation."""
        return self.code == EXIT_OK and self.status.is_mid_operation

    @property
    def is_victim(self) -> bool:
        return self.code == EXIT_PEER or self.signal == signal.SIGABRT

    @property
    def job_exit_code(self) -> int:
        if self.stop_was_requested and self.signal in STOP_SIGNALS:
            return EXIT_INTERRUPTED
        return EXIT_PEER if self.code is None or self.code not in PASSED_ON_EXIT_CODES else self.code

    def describe(self, others: Sequence[int] = ()) -> str:
        """The job's error line for a rank that did not print its own. Any of `others` that failed alike may have been
        first, since foreign programs may exit slowly."""
        who = f"error: {describe_rank(self.rank, self.pid)}"
        at = "" if self.status.state == UNKNOWN else f" at {self.status}"
        if self.code == EXIT_OK:
            return (
                f"{who} left with exit code 0{at}, without the others; look for what ends its program; {RESUME_ADVICE}")
        if self.signal is None:
            also = f" (so did rank{'s' * (len(others) > 1)} {', '.join(map(str, others))})" if others else ""
            return f"{who} ended with exit code {self.code}{at}{also}; its own output above says why"
        name = f"signal {self.signal} ({signal.Signals(self.signal).name})"
        if self.was_stopped:
            return f"{who} was stopped by {name}{at} and did not go on, so the job was ended; {RESUME_ADVICE}"
        if self.stop_was_requested:
            return f"{who} ended by {name}{at} before it could save; {RESUME_ADVICE}"
        if self.signal == signal.SIGKILL:
            return (f"{who} ended by {name}{at}: killed from outside, often by the kernel for lack of memory; "
                    "start the same command to resume, with a smaller --batch-size if memory was short")
        return f"{who} ended by {name}{at}; {RESUME_ADVICE}"


def describe_rank(rank: int, pid: int) -> str:
    return f"rank {rank} (pid {pid} on {socket.gethostname()})"


class RankProcess:
    """A running rank. Its stderr is forwarded by line; lines that begin with `error:` are held back, with the errors
    listed below them."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], local_rank: int) -> None:
        # A new session: Ctrl-C on the terminal reaches the launcher alone, and one killpg also reaches data workers.
        # stdout is inherited, so that a progress bar sees the terminal; stdin only by the job's first rank.
        self.rank, self.local_rank = int(environment["RANK"]), local_rank
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL if self.rank else None,
                                        stderr=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent())
        assert self.process.stderr is not None
        self.stderr = self.process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self.exit: RankExit | None = None
        self.stopped_since: float | None = None
        self.held_errors: list[bytes] = []
        self._partial_line = b""
        self._in_error = False  # the previous line belongs to an error

    def relay_stderr(self) -> bool:
        """Forward the available lines; False at the end of the stream."""
        while True:
            try:
                chunk = os.read(self.stderr, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            lines = (self._partial_line + chunk).splitlines(keepends=True)
            # A progress bar ends its line with \r, so an unfinished line is one without either ending.
            self._partial_line = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
            self._relay(lines)

    def relay_rest(self) -> None:
        """Forward the rest after the rank exited; a stray grandchild may hold the pipe open, so do not wait."""
        self.relay_stderr()
        self._relay([self._partial_line + b"\n"] if self._partial_line else [])
        self._partial_line = b""

    def _relay(self, lines: list[bytes]) -> None:
        others = []
        for line in lines:
            begins = line.startswith(b"error:")
            self._in_error = begins or self._in_error and is_listed_error(line.decode(errors="replace"))
            if not self._in_error:
                others.append(line)
            elif not begins:
                self.held_errors[-1] += line
            elif len(self.held_errors) < MAX_HELD_LINES:
                self.held_errors.append(line)
        write_lines(b"".join(others))

    def send_signal(self, number: int) -> None:
        """Signal the rank's process only. Popen.send_signal could reap a rank, and `_poll_rank` would miss it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.process.pid, number)

    def kill_group(self, number: signal.Signals) -> None:
        """Signal a rank and its children; only before it is reaped, while its process group id is not reused."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


@dataclass
class Supervisor:
    """Starts `command` once per environment; `run` returns the job's exit code."""

    command: list[str]
    environments: list[dict[str, str]]
    nodes: NodeMonitor  # the other nodes of the job
    straggler_monitor: StragglerMonitor
    _ranks: list[RankProcess] = field(default_factory=list)
    _running: list[RankProcess] = field(default_factory=list)
    _exits: list[RankExit] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _stop_request: StopRequest = StopRequest.NONE
    _rank0_owns_interrupts: bool = False
    _pending_signals: list[int] = field(default_factory=list)  # signals not forwarded yet
    _started_at: float = field(default_factory=time.monotonic)
    _state: JobState = JobState.RUNNING
    _failed_at: float = 0.0  # when the state became FAILING
    _early_exit_at: float | None = None  # when the first rank exited early (`RankExit.exited_early`)
    # found when the first rank failed
    _stragglers: list[Straggler] = field(default_factory=list)
    _unannounced_exits: list[RankExit] = field(default_factory=list)

    def run(self) -> int:
        with self._signals_as_bytes():
            self._selector.register(self.nodes, selectors.EVENT_READ, self.nodes)
            try:
                for local_rank, environment in enumerate(self.environments):
                    rank = RankProcess(self.command, environment, local_rank)
                    self._ranks.append(rank)
                    self._running.append(rank)
                    self._selector.register(rank.stderr, selectors.EVENT_READ, rank)
                while self._running and self._stop_request is not StopRequest.SECOND_INTERRUPT:
                    self._tick()
                if self._early_exit_at is not None and self._state is JobState.RUNNING:
                    # all local ranks have exited, one of them early: a failure if other nodes are still running
                    self.nodes.announce_early_exit()
                    while self.nodes.others_are_running and not self.nodes.others_failure \
                            and time.monotonic() - self._early_exit_at < GRACE_SECONDS:
                        self.nodes.receive(TICK_SECONDS)
                    if self.nodes.others_are_running or self.nodes.others_failure:
                        self.nodes.announce_failure(is_victim=False)
                        self._start_teardown(self._early_exit_at)
            finally:
                for rank in self._running:
                    rank.kill_group(signal.SIGKILL)
                for rank in self._running:
                    rank.process.wait()
        return self._report_outcome()

    def _tick(self) -> None:
        for key, _ in self._selector.select(TICK_SECONDS):
            if isinstance(key.data, RankProcess):
                if not key.data.relay_stderr():
                    self._selector.unregister(key.fileobj)
            elif isinstance(key.data, NodeMonitor):
                self.nodes.receive()
                if self.nodes.others_failure:
                    self._start_teardown(time.monotonic())
            else:
                for number in key.data.recv(256):
                    self._on_signal(number)
        self._forward_signals()
        self.nodes.send_heartbeats()
        self.straggler_monitor.update()
        for rank in list(self._running):
            self._poll_rank(rank)
        self._enforce_deadlines()

    def _start_teardown(self, since: float) -> None:
        """A rank failed, here or on another node: record stragglers now, before the deadlines end the ranks."""
        if self._state is JobState.RUNNING:
            self._state, self._failed_at = JobState.FAILING, since
            self._stragglers = self.straggler_monitor.stragglers(
                [rank.local_rank for rank in self._running if rank.exit is None])
            # exit code 0 without the DONE status that our programs set
            self._unannounced_exits = [end for end in self._exits if end.code == EXIT_OK and end.status.state != DONE]

    def _on_signal(self, number: int) -> None:
        if number not in STOP_SIGNALS:
            self._rank0_owns_interrupts = self._rank0_owns_interrupts or number == SIGNAL_INTERRUPTS_OWNED_BY_RANK0
            return  # SIGCHLD only wakes the loop
        if number == signal.SIGINT and self._rank0_owns_interrupts:
            self._ranks[0].send_signal(number)
            return
        if number != signal.SIGINT:
            self._stop_request = max(self._stop_request, StopRequest.SIGNAL)
        elif self._stop_request < StopRequest.INTERRUPT:
            self._stop_request = StopRequest.INTERRUPT
            write_lines(STOPPING_LINE)
        else:
            self._stop_request = StopRequest.SECOND_INTERRUPT
        self._pending_signals.append(number)

    def _forward_signals(self) -> None:
        if self._pending_signals and time.monotonic() - self._started_at >= SIGNAL_DELAY_SECONDS:
            for rank in self._running:
                for number in self._pending_signals:
                    rank.send_signal(number)
            self._pending_signals.clear()

    def _poll_rank(self, rank: RankProcess) -> None:
        """Record whether a rank has exited or has been stopped for too long."""
        # WNOWAIT keeps the zombie, and so its process group id, until the group is killed.
        status = os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            rank.stopped_since = None
        elif status.si_code == os.CLD_STOPPED:
            rank.stopped_since = rank.stopped_since or time.monotonic()
            if rank.exit is None and time.monotonic() - rank.stopped_since >= STOP_PATIENCE_SECONDS:
                self._record_exit(rank, RankExit(rank.rank, rank.process.pid, signal=status.si_status, was_stopped=True,
                                                 status=self.straggler_monitor.status_of(rank.local_rank)))
                rank.kill_group(signal.SIGKILL)
        else:
            rank.kill_group(signal.SIGKILL)
            result = rank.process.wait()
            rank.relay_rest()
            self._running.remove(rank)
            code, number = (result, None) if result >= 0 else (None, -result)
            is_terminating = self._state is JobState.TERMINATING
            requested = self._stop_request is not StopRequest.NONE or not is_terminating and number in STOP_SIGNALS
            ended_by_us = is_terminating and (number is not None or code == EXIT_INTERRUPTED and not requested)
            if rank.exit is None and not ended_by_us:
                self._record_exit(rank, RankExit(rank.rank, rank.process.pid, code, number,
                                                 stop_was_requested=requested,
                                                 status=self.straggler_monitor.status_of(rank.local_rank)))

    def _record_exit(self, rank: RankProcess, rank_exit: RankExit) -> None:
        rank.exit = rank_exit
        self._exits.append(rank_exit)
        if rank_exit.failed:
            self._start_teardown(time.monotonic())
            self.nodes.announce_failure(is_victim=rank_exit.is_victim)
        if rank_exit.exited_early and self._early_exit_at is None:
            self._early_exit_at = time.monotonic()

    def _enforce_deadlines(self) -> None:
        if self._early_exit_at is not None and time.monotonic() - self._early_exit_at >= GRACE_SECONDS:
            self._start_teardown(self._early_exit_at)  # the other ranks have not exited
            self.nodes.announce_failure(is_victim=False)
        waited = 0.0 if self._state is JobState.RUNNING else time.monotonic() - self._failed_at
        if waited >= GRACE_SECONDS + TERM_SECONDS or waited >= GRACE_SECONDS and self._state is JobState.FAILING:
            self._state = JobState.TERMINATING
            for rank in self._running:
                rank.kill_group(signal.SIGKILL if waited >= GRACE_SECONDS + TERM_SECONDS else signal.SIGTERM)

    def _report_outcome(self) -> int:
        if self._stop_request is StopRequest.SECOND_INTERRUPT:
            return self._finish_job(EXIT_INTERRUPTED, INTERRUPTED_TWICE_LINE)
        # ranks that failed, and not because of another rank
        own_failures = [end for end in self._exits if end.failed and not end.is_victim
                        or end.exited_early and self._state is not JobState.RUNNING]
        if self.nodes.given_up_after_seconds and all(end.was_stopped for end in own_failures):
            status = self.straggler_monitor.status_of(0)
            absence = self.nodes.describe_absence("" if status.state == UNKNOWN else f" at {status}")
            return self._finish_job(EXIT_PEER, f"{absence}\n".encode(), is_victim=True)
        failures = [end for end in self._exits if end.failed]
        culprit: RankExit | Straggler | None = next(iter(own_failures), None)
        if culprit is None and self.nodes.others_failure is not Failure.CULPRIT:
            # the local rank that the victims waited for: one that exited with code 0, or a straggler
            ended = {end.rank for end in self._exits if not end.was_stopped}
            missing: list[RankExit | Straggler] = [
                *(end for end in self._unannounced_exits if end.status.state != UNKNOWN),
                *(one for one in self._stragglers if self._ranks[one.local_rank].rank not in ended),
                *self._unannounced_exits]
            culprit = next(iter(missing), None)
        if isinstance(culprit, Straggler):
            rank = self._ranks[culprit.local_rank]
            return self._finish_job(EXIT_PEER,
                                    culprit.describe(describe_rank(rank.rank, rank.process.pid)).encode() + b"\n")
        if culprit is None and (failures or self.nodes.others_failure):
            victim = next((end for end in self._exits if end.is_victim and end.status.state != UNKNOWN), None)
            waited = "" if victim is None else f", while rank {victim.rank} waited at {victim.status}"
            other = self.nodes.wait_for_culprit(OTHER_NODES_SECONDS, waited)
            if other is None and not failures and self.nodes.failed_nodes:
                other = self.nodes.failed_nodes[0]
            if other is not None:
                return self._finish_job(other.code, other.describe().encode(errors="backslashreplace") + b"\n",
                                        is_victim=True)
        culprit = culprit or (failures[0] if failures else None)
        if culprit is None:
            return self._finish_job(EXIT_OK, b"".join(line for rank in self._ranks for line in rank.held_errors))
        held_errors = {rank.rank: rank.held_errors for rank in self._ranks}
        silent = [end.rank for end in failures
                  if end is not culprit and not end.is_victim and not held_errors[end.rank]]
        held = held_errors[culprit.rank]
        return self._finish_job(culprit.job_exit_code, held[0] if held else culprit.describe(silent).encode() + b"\n",
                                is_victim=culprit.is_victim)

    def _finish_job(self, code: int, line: bytes, *, is_victim: bool = False) -> int:
        """Print the job's final line and announce the exit to the other launchers."""
        write_stderr(line)
        self.nodes.announce_exit(code, line.decode(errors="replace").strip() if code != EXIT_OK else "",
                                 is_victim=is_victim)
        self.nodes.close()
        return code

    @contextlib.contextmanager
    def _signals_as_bytes(self) -> Iterator[None]:
        """Deliver signals as bytes on a socket that wakes the selector; handlers do nothing."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._selector.register(receiver, selectors.EVENT_READ, receiver)
        numbers = (*filter(is_handled_signal, STOP_SIGNALS), SIGNAL_INTERRUPTS_OWNED_BY_RANK0, signal.SIGCHLD)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number in numbers:
                # the job has ended
                signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
            self._selector.close()
            receiver.close()
            sender.close()


def die_with_parent() -> Callable[[], None]:
    """A preexec function: the kernel kills the child when the launcher dies (Linux)."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # the launcher died between fork and prctl
            os._exit(EXIT_PEER)

    return ask_kernel
