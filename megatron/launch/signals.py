"""Asked to stop: SIGTERM, SIGUSR1 or Ctrl-C become a request that the training loop honours after the step it is in.

Any rank may be asked; the loop makes all ranks agree (training.py). Further signals change nothing, but for a second
Ctrl-C, which does not wait: it raises KeyboardInterrupt. The clock of --exit-duration-in-mins stands here too, because
a job's time limit counts its start-up. No torch: handlers and clock stand before the slow imports.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop, and by what first."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupts = 0
        self._began = time.monotonic()

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def minutes(self) -> float:
        """Since the program began."""
        return (time.monotonic() - self._began) / 60

    def listen(self) -> StopRequest:
        """Install the handlers (only the main thread can)."""
        if threading.current_thread() is threading.main_thread():
            for number in GRACEFUL:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts > 1:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
