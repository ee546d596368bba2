"""Buffers of a module (a batch norm's running statistics): alike on all ranks at first, and as they were after a look.
"""

from __future__ import annotations

import torch
from torch import nn

from mpu.collectives import broadcast_into
from mpu.groups import Groups


class ModuleBufferSnapshot:
    """The values of all buffers, and which tensors they are: a forward may write to them, or put others there."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers_by_module = [(part, {name: (buffer, None if buffer is None else buffer.detach().clone())
                                           for name, buffer in part._buffers.items()}) for part in module.modules()]

    @torch.no_grad()
    def restore(self) -> None:
        for part, buffers in self._buffers_by_module:
            for name, (buffer, values) in buffers.items():
                part._buffers[name] = buffer
                if buffer is not None and values is not None:
                    buffer.copy_(values)


def broadcast_module_buffers(module: nn.Module, groups: Groups) -> None:
    """Every data parallel rank starts from those of the first. (Parameters do the same as buckets take them over.)"""
    for buffer in module.buffers() if not groups.dp.is_solo else ():
        values = buffer.contiguous()
        broadcast_into(values.view(-1).view(torch.uint8), 0, groups.dp).wait()  # as bytes: not every type can travel
        buffer.copy_(values)
