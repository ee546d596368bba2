"""Asked to stop: SIGTERM, SIGUSR1 or Ctrl-C become a request that the training loop honours after the step it is in.

Any rank may be asked; the loop makes all ranks agree (training.py). A second Ctrl-C does not wait: it raises
KeyboardInterrupt. No torch here: the handlers stand before the slow imports.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

GRACEFUL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop, and by what."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def listen(self) -> StopRequest:
        """Install the handlers (only the main thread can)."""
        if threading.current_thread() is threading.main_thread():
            for number in GRACEFUL:
                signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
