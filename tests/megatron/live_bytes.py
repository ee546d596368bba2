"""LiveBytes: an exact memory meter for any device, also the CPU, which has no allocator statistics.

Inside the context every tensor that an operation takes or makes is noted by its storage; a storage counts with its
present size for as long as anybody holds it. `peak` is the most that was alive at once, to STEP bytes. What an
operation allocates inside itself and gives back before it returns is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

STEP = 16 << 10
"""So much must be new before everything alive is added up again: most new tensors are scalars."""


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest: Counter[str] = Counter()
        """Bytes at the peak, by the operation that made them: what to look at when a prediction is off."""
        self._new = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if is_traceable_wrapper_subclass(value):  # it has no memory but that of the tensors it is made of
                for name in value.__tensor_flatten__()[0]:
                    self._note(getattr(value, name), func)
            elif isinstance(value, torch.Tensor) and not value.is_meta:  # which has a size and no memory
                self._note(value, func)
        if self._new >= STEP:  # a peak is reached when something new has come
            self.sample()
        return result

    def _note(self, tensor: torch.Tensor, maker: object) -> None:
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None or known[0]() is None:
            self._alive[storage._cdata] = weakref.ref(storage), f"{maker} {tuple(tensor.shape)} {tensor.dtype}"
            self._new += storage.nbytes()

    def sample(self) -> int:
        """Bytes alive now."""
        held = {key: (storage.nbytes(), maker) for key, (weak, maker) in self._alive.items()
                if (storage := weak()) is not None}
        self._alive = {key: self._alive[key] for key in held}
        total, self._new = sum(size for size, _ in held.values()), 0
        if total > self.peak:
            self.peak, self.largest = total, Counter()
            for size, maker in held.values():
                self.largest[maker] += size
        return total

    def reset_peak(self) -> None:
        self.peak = 0
        self.sample()
