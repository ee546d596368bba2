"""Counting: what a piece of the program would ask of an accelerator, counted on CPU tensors.

    with accelerator_side(), Launches() as counted:  # tests/wires.py
        engine.step()
    counted.kernels, counted.waits

Every operation that reaches a device is one launch, or a few: views and queries are none, `_foreach` and `_fused`
operations are one. Reading a number of a tensor (`item`, `tolist`, a branch on it) is a wait of the host.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "set_", "resize_",
             "lift_fresh", "_local_scalar_dense", "_unsafe_view", "split", "split_with_sizes", "unbind"}
"""Operations that take or name memory, beside those that torch itself calls views."""


WAITS_INSIDE = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
"""Operations after which the host knows a number; `item` and a branch on a tensor end in the first."""

WAITS_OUTSIDE = {"tolist", "numpy", "cpu"}
"""Methods that torch's dispatcher does not see on CPU tensors."""


class Calls:
    """Counts calls of Python functions in the files of a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.count = 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call" and self._folder in frame.f_code.co_filename


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        self.count += getattr(func, "__name__", "") in WAITS_OUTSIDE
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()
        self._reads = _Reads()

    def __enter__(self) -> Launches:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        if not func.is_view:  # type: ignore[attr-defined]
            self.by_name[func._schema.name.partition("::")[2]] += 1  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        """The host waited for the device."""
        return self._reads.count + sum(self.by_name[name] for name in WAITS_INSIDE)

    @property
    def kernels(self) -> Counter[str]:
        """Launches by the name of the operation."""
        return Counter({name: count for name, count in self.by_name.items() if name not in NO_LAUNCH})
