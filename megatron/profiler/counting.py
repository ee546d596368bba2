"""Sees every operation that torch runs, by whatever name a model called it, and passes on how much it multiplies.

A mode of torch's dispatch is asked below autograd, by operations of functionals, of backwards and of our own autograd
functions alike. What torch.compile has compiled runs as it is written while a mode is active.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from megatron.profiler.calls import backward_under_way
from megatron.profiler.formulas import OPENED, may_multiply, way_of


class Counting(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, credit: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._credit = credit
        self.unknown: Counter[str] = Counter()
        """Operations that nobody has a formula for, and how often they ran."""
        self.saw_backward = False

    def forget(self) -> None:
        self.unknown.clear()
        self.saw_backward = False

    @property
    def is_innermost(self) -> bool:
        """Of the modes of this thread. Torch ends the innermost one, whichever is told to end."""
        return _get_current_dispatch_mode() is self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled while it is active (recording.py), and to keep the compiler from looking here would
        load it, and take longer than what is done here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if NestedTensor in types:
            return NotImplemented  # it says what it consists of, which then passes here
        given, way = kwargs or {}, way_of(func)
        self.saw_backward = self.saw_backward or backward_under_way() is not None
        if way is None or _are_nested(args):
            if may_multiply(func):
                self.unknown[str(func)] += 1
            return func(*args, **given)
        if way is OPENED:
            with self:
                result = func.decompose(*args, **given)
            return func(*args, **given) if result is NotImplemented else result
        result = func(*args, **given)
        self._credit(way(result, args, given))
        return result


def _are_nested(args: Any) -> bool:
    """Tensors of several lengths, which have kernels of their own and no shape to count by."""
    return any(isinstance(arg, Tensor) and arg.is_nested for arg in args)
