"""`deepspeed.ops.adam` under this name; the class is in megatron/optim/torch_rule.py."""

from megatron.optim.torch_rule import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
