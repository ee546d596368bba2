"""Run the ranks of one node as child processes, relay their signals and errors, and end them together.

Vocabulary: a *rank* is one child process; an *ending* is how it stopped running (exit code, signal, or stopped by
SIGSTOP); the *culprit* is the rank whose failure ended the job; its *victims* failed only because the culprit did
(exit code 5, or SIGABRT, which is how NCCL's watchdog leaves). One `error:` line reaches the user: the culprit's.

Not here: which environment a rank gets (`command.py`), and how a rank turns an exception into an exit code
(`exits.py`). Standard library only: the parent of the ranks must start in milliseconds and must not die of
what kills them.
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

from megatron.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PEER, is_listed
from megatron.launch.blame import AGAIN, Late, Sight
from megatron.launch.leaving import REQUESTS, heard
from megatron.launch.nodes import Nodes
from megatron.launch.signals import STOPPING, TAKEN, write_lines, write_stderr
from megatron.whereabouts import DONE, UNKNOWN, Place

TICK_SECONDS = 0.2
STOP_PATIENCE_SECONDS = 1.0
"""How long a rank may stay stopped: a debugger's short stop is not a failure."""
GRACE_SECONDS = 2.5
"""From the first failure until SIGTERM: time for the victims to notice, and for the culprit to be among the ended."""
TERM_SECONDS = 1.0
"""From SIGTERM until SIGKILL. Together they keep the promise: nobody is left 5 seconds after a kill."""
DEAF_SECONDS = 1.0
"""From the start of the ranks until a request to stop is passed on: at first Python itself starts, which a signal would
end, with a traceback."""
OTHERS_SECONDS = GRACE_SECONDS + TERM_SECONDS + 1.0
"""For the launchers of other nodes to find out which of their ranks was the first."""
HELD_LINES = 16
PASSED_THROUGH = frozenset({*range(2, 8), EXIT_INTERRUPTED})
PR_SET_PDEATHSIG = 1
INTERRUPTED = b"error: interrupted twice, so the ranks were ended at once; earlier checkpoints are intact\n"
RESUME = AGAIN


@dataclass(frozen=True)
class Ending:
    """How one rank ended; exactly one of `code` and `signal` is set."""

    rank: int
    pid: int
    code: int | None = None
    signal: int | None = None
    stopped: bool = False
    asked: bool = False
    """The launcher, or this rank itself, had got a request to stop before this ending."""
    place: Place = Place()
    """Where the rank was."""

    @property
    def failed(self) -> bool:
        return self.code != EXIT_OK

    @property
    def left_early(self) -> bool:
        """With exit code 0, in the middle of something."""
        return self.code == EXIT_OK and self.place.is_inside

    @property
    def left_the_others(self) -> bool:
        """With exit code 0, and without taking leave, as a program of ours does."""
        return self.code == EXIT_OK and self.place.state != DONE

    @property
    def is_victim(self) -> bool:
        return self.code == EXIT_PEER or self.signal == signal.SIGABRT

    @property
    def job_exit_code(self) -> int:
        if self.asked and self.signal in REQUESTS:
            return EXIT_INTERRUPTED
        return EXIT_PEER if self.code is None or self.code not in PASSED_THROUGH else self.code

    def describe(self, others: Sequence[int] = ()) -> str:
        """The job's error line for a rank that could not write its own. Of `others` that failed like it, any may have
        been the first: a program of somebody else's may end slowly."""
        who, at = f"error: {self.who}", "" if self.place.state == UNKNOWN else f" at {self.place}"
        if self.code == EXIT_OK:
            return f"{who} left with exit code 0{at}, without the others; look for what ends its program; {RESUME}"
        if self.signal is None:
            so_did = f" (so did {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))})"
            also = so_did if others else ""
            return f"{who} ended with exit code {self.code}{at}{also}; its own output above says why"
        name = f"signal {self.signal} ({signal.Signals(self.signal).name})"
        if self.stopped:
            return f"{who} was stopped by {name}{at} and did not go on, so the job was ended; {RESUME}"
        if self.asked:
            return f"{who} ended by {name}{at} before it could save; {RESUME}"
        if self.signal == signal.SIGKILL:
            return (f"{who} ended by {name}{at}: killed from outside, often by the kernel for lack of memory; "
                    "start the same command to resume, with a smaller --batch-size if memory was short")
        return f"{who} ended by {name}{at}; {RESUME}"

    @property
    def who(self) -> str:
        return described(self.rank, self.pid)


def described(rank: int, pid: int) -> str:
    return f"rank {rank} (pid {pid} on {socket.gethostname()})"


class ErrorRelay:
    """Passes a rank's stderr through line by line, and holds back the lines that begin with `error:`, with the errors
    that are listed below."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.held: list[bytes] = []
        self._partial = b""
        self._in_error = False
        """The line before belongs to an error."""

    def pump(self) -> bool:
        """Relay what is there; False at the end of the stream."""
        while True:
            try:
                chunk = os.read(self.descriptor, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            lines = (self._partial + chunk).splitlines(keepends=True)
            # A progress bar ends its line with \r, so an unfinished line is one without either ending.
            self._partial = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
            self._relay(lines)

    def finish(self) -> None:
        """The rank is gone: relay the rest. Not to the end of the stream, which a stray grandchild may hold open."""
        self.pump()
        self._relay([self._partial + b"\n"] if self._partial else [])
        self._partial = b""

    def _relay(self, lines: list[bytes]) -> None:
        others = []
        for line in lines:
            begins = line.startswith(b"error:")
            self._in_error = begins or self._in_error and is_listed(line.decode(errors="replace"))
            if not self._in_error:
                others.append(line)
            elif not begins:
                self.held[-1] += line
            elif len(self.held) < HELD_LINES:
                self.held.append(line)
        write_lines(b"".join(others))


@dataclass
class Rank:
    """A child process and what is known about it."""

    rank: int
    local: int
    process: subprocess.Popen[bytes]
    relay: ErrorRelay
    ending: Ending | None = None
    stopped_since: float | None = None


@dataclass
class Supervisor:
    """Starts `command` once for every environment and returns the job's exit code."""

    command: list[str]
    environments: list[dict[str, str]]
    nodes: Nodes
    """The other ones of the job."""
    sight: Sight
    _ranks: list[Rank] = field(default_factory=list)
    _running: list[Rank] = field(default_factory=list)
    _endings: list[Ending] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _interrupts: int = 0
    _asked: bool = False
    _interrupts_taken: bool = False
    _requests: list[int] = field(default_factory=list)
    """Signals that have not been passed on yet."""
    _began: float = field(default_factory=time.monotonic)
    _failed_at: float | None = None
    _left_at: float | None = None
    """The first rank left in the middle of something, with exit code 0."""
    _late: list[Late] = field(default_factory=list)
    _left: list[Ending] = field(default_factory=list)
    """Whom the others missed when the first rank failed."""
    _terminated: bool = False

    def run(self) -> int:
        with self._signals_as_bytes():
            self._selector.register(self.nodes, selectors.EVENT_READ, self.nodes)
            try:
                for environment in self.environments:
                    self._start(environment)
                while self._running and self._interrupts < 2:
                    self._tick()
                if self._left_at is not None and self._failed_at is None:
                    self._see_whether_others_left(self._left_at)
            finally:
                self._end_everyone(signal.SIGKILL)
                for rank in self._running:
                    rank.process.wait()
        return self._verdict()

    def _start(self, environment: dict[str, str]) -> None:
        # A session of its own: Ctrl-C on the terminal reaches the launcher alone, and one killpg also reaches data
        # workers. stdout is inherited, so that a progress bar still sees the terminal; stdin by the job's first rank.
        stdin = None if environment["RANK"] == "0" else subprocess.DEVNULL
        process = subprocess.Popen(self.command, env=environment, stdin=stdin, stderr=subprocess.PIPE,
                                   start_new_session=True, preexec_fn=end_with_parent())
        assert process.stderr is not None
        rank = Rank(int(environment["RANK"]), len(self._ranks), process, ErrorRelay(process.stderr.fileno()))
        self._ranks.append(rank)
        self._running.append(rank)
        self._selector.register(process.stderr, selectors.EVENT_READ, rank.relay)

    def _tick(self) -> None:
        for key, _ in self._selector.select(TICK_SECONDS):
            if isinstance(key.data, ErrorRelay):
                if not key.data.pump():
                    self._selector.unregister(key.fileobj)
            elif isinstance(key.data, Nodes):
                self._hear_of_others()
            else:
                for number in key.data.recv(256):
                    self._on_signal(number)
        self._pass_on_requests()
        self.nodes.keep_in_touch()
        self.sight.look()
        for rank in list(self._running):
            self._look_at(rank)
        self._enforce_deadlines()

    def _hear_of_others(self) -> None:
        self.nodes.hear()
        if self.nodes.are_failing:
            self._begin_to_end(time.monotonic())

    def _see_whether_others_left(self, since: float) -> None:
        """No rank is here any more, and one left in the middle of something: where others go on, it has failed them."""
        self.nodes.tell_left()
        while self.nodes.are_at_work and not self.nodes.are_failing and time.monotonic() - since < GRACE_SECONDS:
            self.nodes.hear(TICK_SECONDS)
        if self.nodes.are_at_work or self.nodes.are_failing:
            self.nodes.warn(is_victim=False)
            self._begin_to_end(since)

    def _begin_to_end(self, since: float) -> None:
        """A rank has failed, here or on another node."""
        if self._failed_at is None:
            self._failed_at = since
            self._late = self.sight.late([rank.local for rank in self._running if rank.ending is None])
            self._left = [ending for ending in self._endings if ending.left_the_others]

    def _on_signal(self, number: int) -> None:
        if number not in REQUESTS:
            self._interrupts_taken = self._interrupts_taken or number == TAKEN
            return  # SIGCHLD only wakes the loop
        if number == signal.SIGINT and self._interrupts_taken:
            pass_on(self._ranks[0], number)
            return
        self._asked = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts == 1:
                write_lines(STOPPING)
        self._requests.append(number)

    def _pass_on_requests(self) -> None:
        if self._requests and time.monotonic() - self._began >= DEAF_SECONDS:
            for rank in self._running:
                for number in self._requests:
                    pass_on(rank, number)
            self._requests.clear()

    def _look_at(self, rank: Rank) -> None:
        """Notice that a rank has ended, or has been stopped for too long."""
        # WNOWAIT keeps the zombie, and with it the number of its process group, until that group is cleared.
        options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        status = os.waitid(os.P_PID, rank.process.pid, options)
        if status is None:
            rank.stopped_since = None
        elif status.si_code == os.CLD_STOPPED:
            rank.stopped_since = rank.stopped_since or time.monotonic()
            if rank.ending is None and time.monotonic() - rank.stopped_since >= STOP_PATIENCE_SECONDS:
                self._record(rank, Ending(rank.rank, rank.process.pid, signal=status.si_status, stopped=True,
                                          place=self.sight.place(rank.local)))
                kill_group(rank, signal.SIGKILL)
        else:
            kill_group(rank, signal.SIGKILL)
            result = rank.process.wait()
            rank.relay.finish()
            self._running.remove(rank)
            code, number = (result, None) if result >= 0 else (None, -result)
            asked = self._asked or not self._terminated and number in REQUESTS
            is_ended_here = self._terminated and (number is not None or code == EXIT_INTERRUPTED and not asked)
            if rank.ending is None and not is_ended_here:
                self._record(rank, Ending(rank.rank, rank.process.pid, code, number, asked=asked,
                                          place=self.sight.place(rank.local)))

    def _record(self, rank: Rank, ending: Ending) -> None:
        rank.ending = ending
        self._endings.append(ending)
        if ending.failed:
            self._begin_to_end(time.monotonic())
            self.nodes.warn(is_victim=ending.is_victim)
        if ending.left_early and self._left_at is None:
            self._left_at = time.monotonic()

    def _enforce_deadlines(self) -> None:
        if self._left_at is not None and time.monotonic() - self._left_at >= GRACE_SECONDS:
            self._begin_to_end(self._left_at)  # the others have not left as well
            self.nodes.warn(is_victim=False)
        if self._failed_at is None:
            return
        waited = time.monotonic() - self._failed_at
        if waited >= GRACE_SECONDS + TERM_SECONDS:
            self._end_everyone(signal.SIGKILL)
        elif waited >= GRACE_SECONDS and not self._terminated:
            self._end_everyone(signal.SIGTERM)

    def _end_everyone(self, number: signal.Signals) -> None:
        self._terminated = True
        for rank in self._running:
            kill_group(rank, number)

    def _verdict(self) -> int:
        if self._interrupts >= 2:
            return self._end(EXIT_INTERRUPTED, INTERRUPTED)
        if self.nodes.is_given_up and not any(self._is_own_failure(end) and not end.stopped for end in self._endings):
            return self._end(EXIT_PEER, self._of_absence(), is_victim=True)
        failures = [ending for ending in self._endings if ending.failed]
        culprit: Ending | Late | None = next((end for end in self._endings if self._is_own_failure(end)), None)
        if culprit is None and not self.nodes.has_culprit:
            culprit = self._missed()
        if isinstance(culprit, Late):
            rank = self._ranks[culprit.local]
            return self._end(EXIT_PEER, culprit.describe(described(rank.rank, rank.process.pid)).encode() + b"\n")
        if culprit is None and (failures or self.nodes.are_failing):
            other = self.nodes.culprit(OTHERS_SECONDS, self._where_it_waited())
            if other is None and not failures and self.nodes.failed:
                other = self.nodes.failed[0]
            if other is not None:
                return self._end(other.code, other.describe().encode(errors="backslashreplace") + b"\n", is_victim=True)
        culprit = culprit or (failures[0] if failures else None)
        if culprit is None:
            return self._end(EXIT_OK, b"".join(line for rank in self._ranks for line in rank.relay.held))
        held = self._held_of(culprit)
        others = [ending.rank for ending in failures
                  if ending is not culprit and not ending.is_victim and not self._held_of(ending)]
        return self._end(culprit.job_exit_code, held[0] if held else culprit.describe(others).encode() + b"\n",
                         is_victim=culprit.is_victim)

    def _where_it_waited(self) -> str:
        waited = next((ending for ending in self._endings if ending.is_victim and ending.place.state != UNKNOWN), None)
        return "" if waited is None else f", while rank {waited.rank} waited at {waited.place}"

    def _of_absence(self) -> bytes:
        place = self.sight.place(0)
        return (self.nodes.describe_absence("" if place.state == UNKNOWN else f" at {place}") + "\n").encode()

    def _is_own_failure(self, ending: Ending) -> bool:
        """Not for the sake of another rank."""
        return ending.failed and not ending.is_victim or ending.left_early and self._failed_at is not None

    def _missed(self) -> Ending | Late | None:
        """The rank of this node that the victims waited for: it has left with exit code 0, or does not come."""
        ended = {self._local_of(ending) for ending in self._endings if not ending.stopped}
        found: list[Ending | Late] = [ending for ending in self._left if ending.place.state != UNKNOWN]
        found += [one for one in self._late if one.local not in ended]
        return next(iter([*found, *self._left]), None)

    def _local_of(self, ending: Ending) -> int:
        return next(rank.local for rank in self._ranks if rank.rank == ending.rank)

    def _end(self, code: int, line: bytes, *, is_victim: bool = False) -> int:
        """The last word, to whoever started this launcher and to those of other nodes."""
        write_stderr(line)
        self.nodes.tell(code, line.decode(errors="replace").strip() if code != EXIT_OK else "", is_victim=is_victim)
        self.nodes.close()
        return code

    def _held_of(self, ending: Ending) -> list[bytes]:
        return next(rank.relay.held for rank in self._ranks if rank.rank == ending.rank)

    @contextlib.contextmanager
    def _signals_as_bytes(self) -> Iterator[None]:
        """Signals wake the selector and arrive as bytes on a socket; no work is done inside a handler."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        self._selector.register(receiver, selectors.EVENT_READ, receiver)
        numbers = (*filter(heard, REQUESTS), TAKEN, signal.SIGCHLD)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number in numbers:
                signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)  # the job is over
            self._selector.close()
            receiver.close()
            sender.close()


def pass_on(rank: Rank, number: int) -> None:
    """Signal a rank alone. Popen.send_signal would reap a rank that has just ended, and `_look_at` miss it."""
    if rank.process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(rank.process.pid, number)


def kill_group(rank: Rank, number: signal.Signals) -> None:
    """Signal a rank and its own children. Called only before the rank is reaped, so its number is still its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, number)


def end_with_parent() -> Callable[[], None]:
    """A function for a fresh child to call: the kernel then kills it when the launcher dies (Linux)."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(EXIT_PEER)

    return ask_kernel
