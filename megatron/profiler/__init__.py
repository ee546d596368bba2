"""Where the arithmetic, the time and the parameters of a model are: DeepSpeed's flops profiler, counted by dispatch.

    from megatron.profiler import FlopsProfiler, get_model_profile

    formulas.py        how many multiply-accumulates an operation is
    nodes.py           the tree of modules, its parameters
    clock.py           of the host, of a GPU
    calls.py           which module is running, or whose gradient is made
    counting.py        every operation passes here
    recording.py       the three together
    profile.py         what was recorded, as plain numbers
    numbers.py, text.py, page.py, output.py    how it is shown
    profiler.py        FlopsProfiler; model_profile.py: get_model_profile

`zero/api/profiled.py` profiles one step of an engine.
"""

from megatron.profiler.model_profile import get_model_profile
from megatron.profiler.profiler import FlopsProfiler

__all__ = ["FlopsProfiler", "get_model_profile"]
