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

from megatron.profiler.calls import current_backward_id
from megatron.profiler.formulas import DECOMPOSE, flop_formula, may_multiply


class FlopCountingMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, add_macs: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add_macs = add_macs
        self.uncounted_ops: Counter[str] = Counter()
        """Operations that nobody has a formula for, and how often they ran."""
        self.saw_backward = False

    def reset(self) -> None:
        self.uncounted_ops.clear()
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
        given, formula = kwargs or {}, flop_formula(func)
        self.saw_backward = self.saw_backward or current_backward_id() is not None
        if formula is None or _are_nested(args):
            if may_multiply(func):
                self.uncounted_ops[str(func)] += 1
            return func(*args, **given)
        if formula is DECOMPOSE:
            with self:
                result = func.decompose(*args, **given)
            return func(*args, **given) if result is NotImplemented else result
        result = func(*args, **given)
        self._add_macs(formula(result, args, given))
        return result


def _are_nested(args: Any) -> bool:
    """Tensors of several lengths, which have kernels of their own and no shape to count by."""
    return any(isinstance(arg, Tensor) and arg.is_nested for arg in args)
