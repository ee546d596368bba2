"""Over which ranks and on which device a module is sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.errors import ConfigError
from megatron.launch import distributed
from mpu import groups
from mpu.groups import Group


distributed.leave_at_exit()  # before the script meets, where it imports before that


def group_of_mesh(mesh: Any) -> Group:
    """Of a torch DeviceMesh; None: all ranks."""
    if mesh is None:
        return group_of(None)
    if mesh.ndim != 1:
        raise ConfigError(f"a mesh of {mesh.ndim} dimensions is not supported: give the one to shard over, such as "
                          "mesh['shard']")
    return group_of(mesh.get_group())


def group_of(process_group: ProcessGroup | None) -> Group:
    """None: all ranks, or this process alone where none have met."""
    return groups.build(1).world if process_group is None else groups.of_handle(process_group)


def device_of(module: nn.Module, group: Group) -> torch.device:
    """The GPU that the module is on, or this rank's where the ranks' backend wants one."""
    device = next((parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"), None)
    if device is None:
        if group.is_solo or group.sends_from_host:
            return torch.device("cpu")
        device = distributed.device_for(distributed.read_environment())
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and control messages go by way of it
    return device
