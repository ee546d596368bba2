"""`deepspeed.ops` under this name: `from megatron.zero.ops.adam import DeepSpeedCPUAdam`. It imports torch."""

from megatron.zero.ops import adam

__all__ = ["adam"]
