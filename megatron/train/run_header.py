"""What a run prints about itself before its first step; with --verbose every setting."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from data.cli import format_count
from data.tokenizer import Tokenizer
from megatron.config.tree import Config
from megatron.train.compile import compilation_line
from mpu.groups import Groups


def header_record(config: Config, groups: Groups, device: torch.device) -> dict[str, Any]:
    """Fields of the metrics file's header that the configuration does not contain."""
    return {"began": datetime.now(UTC).isoformat(timespec="seconds"), "world_size": groups.world.size,
            "device": _device_name(device), "torch": torch.__version__, "parameters": config.model.parameters()}


def header_lines(config: Config, groups: Groups, device: torch.device, tokenizer: Tokenizer) -> list[str]:
    """Console lines: model, devices, batch, precision, data, save folder."""
    lines, tp, dp = list[str](), groups.tp.size, groups.dp.size
    if config.log.verbose:
        names = {f"{section}.{key}": value for section, values in config.as_dict().items()
                 for key, value in values.items()}
        lines += ["configuration", *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in names.items())]
    where = _device_name(device)
    if device.type == "cpu" or config.offload.offload_optimizer_device != "none":
        threads = torch.get_num_threads()
        where += f", {threads}{' host' * (device.type != 'cpu')} thread{'s' if threads > 1 else ''}"
    batch = config.global_batch_size(dp)
    lines.append(
        f"GPT-2 with {config.model.parameters():,} parameters in {config.precision.name} on {tp * dp} x {where}: "
        f"tensor parallel {tp}, data parallel {dp}, ZeRO stage {config.zero.zero_stage}; global batch "
        f"{batch} = {config.train.batch_size} x {config.accumulation(dp)} x {dp}")
    if compiled := compilation_line(config, dp, device):
        lines.append(compiled)
    source = "random tokens" if config.data.mock_data else " ".join(config.data.train_data)
    lines.append(f" data: {source}, with the {tokenizer.vocab_size:,} tokens of {tokenizer.name}; "
                 f"{format_count(config.train.train_iters, 'iteration')} of {batch} x {config.seq_length} tokens")
    every = f"every {config.save.save_interval:,} iterations and " if config.save.save_interval else ""
    lines.append(" evaluates and saves nothing: --skip-train" if config.train.skip_train else
                 " saves nothing: --save is not given" if config.save.save is None else
                 f" saves to {config.save.save} {every}at the end")
    return lines


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
