"""Whether all ranks shard the same module, in the same order and from the same weights: one number travels where they
do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from data.storage import crc32
from megatron.checkpoint.agree import find_differences
from megatron.errors import ConfigError
from megatron.launch.alike import mismatch_message
from megatron.zero.api.same import describe_tensor, first_difference
from megatron.zero.holders import full_shape, param_owner
from mpu.device import on_accelerator
from mpu.groups import Group

CHECKSUM_CHUNK = 1 << 22
"""Numbers that are summed at a time."""


def check_same_on_all_ranks(
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        group: Group,
        where: str,
        *,
        sharded_before: Sequence[str] = (),
        settings: Mapping[str, object] = MappingProxyType({}),
        values: bool = True,
) -> None:
    """A ConfigError on every rank that names the first parameter or buffer that differs, or those whose values do.
    `inside`: the modules that are sharded already, in that order."""
    if group.is_solo:
        return
    rows = {"setting": [[name, str(value)] for name, value in settings.items()],
            "module sharded before": [[name] for name in sharded_before],
            "parameter": [[name, _describe_param(parameter)] for name, parameter in parameters.items()],
            "buffer": [[name, describe_tensor(buffer, buffer.shape)] for name, buffer in buffers.items()]}
    digests = {name: _checksum(tensor) for name, tensor in (*parameters.items(), *buffers.items()) if values}
    per_rank = find_differences({**rows, "values": digests}, group)
    if not per_rank:
        return
    for kind in rows:
        if found := first_difference(per_rank, kind):
            raise ConfigError(f"the ranks shard {where} differently: {found}")
    raise ConfigError(mismatch_message(
        [(one["values"], [rank]) for rank, one in enumerate(per_rank)],
        f"the ranks start in {where} from different weights or buffers (give them the same seed before the model is "
        "made, or sync_module_states=True, and all take those of the first; set a buffer that is each rank's own after "
        "the module is sharded)"))


def _describe_param(parameter: nn.Parameter) -> str:
    return describe_tensor(parameter, full_shape(parameter)) + " (frozen)" * (not parameter.requires_grad)


def _checksum(tensor: Tensor) -> str:
    if param_owner(tensor) is not None or tensor.is_meta:  # of zero.Init: the parts of one rank's values
        return ""
    return byte_checksum(tensor.detach())


def byte_checksum(values: Tensor) -> str:
    data = values.contiguous().view(-1).view(torch.uint8)
    if not on_accelerator(data):
        return f"{crc32(data.numpy()):08x}"
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for number, chunk in enumerate(data.split(CHECKSUM_CHUNK)):
        wide = chunk.to(torch.int64)
        place = torch.arange(1, len(chunk) + 1, device=data.device)
        total += torch.stack([wide.sum(), (wide * place).sum() * (2 * number + 1)])
    return "/".join(f"{one & (1 << 64) - 1:016x}" for one in total.tolist())
