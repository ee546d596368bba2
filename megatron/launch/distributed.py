"""The environment of a rank under its documented path; the rest is in megatron/distributed."""

from megatron.distributed.process_group import init_process_group, read_environment

__all__ = ["init_process_group", "read_environment"]
