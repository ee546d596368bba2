"""How gloo ends a process, and how to be faster.

Where a peer sends more than is waited for (the ranks are not in the same operation), a thread of gloo's throws, nobody
catches, and std::terminate aborts the process: at once, and with a message about bytes. `delay_gloo_terminate` lets that
thread wait first, so that somebody who knows more can end the process in words.
"""

from __future__ import annotations

import atexit
import ctypes
from functools import cache
from threading import Event

TERMINATE_DELAY_SECONDS = 15.0


@cache
def delay_gloo_terminate() -> None:
    """From now on, and once a process. Where the C++ library is another one, everything stays as it is."""
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return
    handler_type = ctypes.CFUNCTYPE(None)
    set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def delayed_terminate() -> None:
        Event().wait(TERMINATE_DELAY_SECONDS)
        handler_type(previous_handler)()

    handler = handler_type(delayed_terminate)
    previous_handler = set_terminate(ctypes.cast(handler, ctypes.c_void_p))
    # An interpreter that winds down runs no Python in other threads. This also keeps `handler` alive.
    atexit.register(lambda: handler and set_terminate(previous_handler))
