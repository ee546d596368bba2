"""The version of this program: of `megatron`, `mpu` and `data` together, which are one distribution."""

__version__ = "0.1.0"
