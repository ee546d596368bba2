"""Name and version of this program: of `megatron`, `mpu` and `data` together, which are one distribution."""

DISTRIBUTION = "megatron-gpt2-trainer"
"""As pip knows it."""

__version__ = "0.1.0"
