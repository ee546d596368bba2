"""The flops profiler, with DeepSpeed's names: FLOPs, latency and parameters per module, counted by dispatch.

    from megatron.profiler import FlopsProfiler, get_model_profile

Start at flops_profiler.py; flop_recorder.py counts, profile.py sums up and prints.
"""

from megatron.profiler.flops_profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
