"""Counts the functions and files of the product that a flow passes, so that a flow cannot grow unnoticed.

A function counts once, however often it is called. Lambdas, comprehensions and generated methods do not count, nor does
the model's own forward: `megatron/model` and the layers of `mpu`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = tuple(f"{ROOT / name}/" for name in ("megatron", "mpu", "data")) + (str(ROOT / "pretrain_gpt2.py"),)
MODEL = ("megatron/model/", "mpu/layers.py", "mpu/regions.py", "mpu/partition.py", "mpu/cross_entropy.py", "mpu/rng.py",
         "mpu/kernels/", "mpu/loss_head.py", "megatron/recompute/")


class Flow:
    """(file, function) of the product in the order of their first call, while `is_recording`."""

    def __init__(self, passes: Callable[[FrameType, Any], bool] = lambda frame, value: True) -> None:
        """`passes` chooses the calls that count, from a frame at its end and what it returns."""
        self.is_recording = True
        self._passes = passes
        self._functions: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if not self.is_recording or event != "return" or not code.co_filename.startswith(PRODUCT) \
                or code.co_name.startswith("<"):
            return
        file = str(Path(code.co_filename).relative_to(ROOT))
        if not file.startswith(MODEL) and self._passes(frame, value):
            self._functions[file, code.co_qualname] = None

    @contextmanager
    def of_this_thread(self) -> Iterator[Flow]:
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)

    @contextmanager
    def of_all_threads(self) -> Iterator[Flow]:
        """This thread, and those that start inside."""
        threading.setprofile(self)
        try:
            with self.of_this_thread():
                yield self
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def functions(self) -> list[tuple[str, str]]:
        return list(self._functions)
