"""Whether all ranks start from the same weights: one number travels where they do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from data.storage import crc32
from megatron.checkpoint.agree import alike
from megatron.zero.holders import holder_of
from mpu.groups import Group

CHUNK = 1 << 22
"""Numbers that are summed at a time."""


def check_same(parameters: Mapping[str, nn.Parameter], group: Group, where: str) -> None:
    """A ConfigError on every rank that names the parameters whose values differ."""
    if group.is_solo:
        return
    told = {name: _digest(parameter) for name, parameter in parameters.items()}
    alike(told, group, f"the ranks start {where} from different weights (give them the same seed before the model is "
                       "made, or sync_module_states=True, and all take those of the first)")


def _digest(parameter: nn.Parameter) -> str:
    kind = f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
    if holder_of(parameter) is not None:  # of zero.Init: the parts of one rank's values
        return kind
    return f"{kind} {sum_of_bytes(parameter.detach())}"


def sum_of_bytes(values: Tensor) -> str:
    data = values.contiguous().view(-1).view(torch.uint8)
    if data.device.type == "cpu":
        return f"{crc32(data.numpy()):08x}"
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for number, chunk in enumerate(data.split(CHUNK)):
        wide = chunk.to(torch.int64)
        place = torch.arange(1, len(chunk) + 1, device=data.device)
        total += torch.stack([wide.sum(), (wide * place).sum() * (2 * number + 1)])
    return "/".join(f"{one & (1 << 64) - 1:016x}" for one in total.tolist())
