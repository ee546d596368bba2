"""The training program's parts: building a run, its loop, evaluation, and saving and resuming it.

Begin with loop.py; pretrain_gpt2.py puts the parts together. Metrics and loggers are in megatron/metrics.
"""

from megatron.package import check_package_shadowing

check_package_shadowing()
