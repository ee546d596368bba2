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
    compiled = compilation_line(config, groups.dp.size, device)
    found = [_model_line(config, groups, device), *([compiled] if compiled else []),
             _data_line(config, groups, tokenizer), _saving_line(config)]
    return [*(config_lines(config) if config.log.verbose else []), *found]


def config_lines(config: Config) -> list[str]:
    """Every setting on one dotted line."""
    rows = [(f"{section}.{key}", value) for section, values in config.as_dict().items()
            for key, value in values.items()]
    return ["configuration", *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in rows)]


def nothing_to_do_line(config: Config, iteration: int) -> str:
    """Line for a run whose checkpoint has already reached --train-iters."""
    return (f" nothing to do: {config.save.load} is at iteration {iteration} already, and --train-iters is "
            f"{config.train.train_iters}")


def _model_line(config: Config, groups: Groups, device: torch.device) -> str:
    tp, dp = groups.tp.size, groups.dp.size
    where = _device_name(device)
    if device.type == "cpu" or config.offload.offload_optimizer_device != "none":
        threads = torch.get_num_threads()
        where += f", {threads}{' host' * (device.type != 'cpu')} thread{'s' if threads > 1 else ''}"
    return (
        f"GPT-2 with {config.model.parameters():,} parameters in {config.precision.name} on {tp * dp} x {where}: "
        f"tensor parallel {tp}, data parallel {dp}, ZeRO stage {config.zero.zero_stage}; global batch "
        f"{config.global_batch_size(dp)} = {config.train.batch_size} x {config.accumulation(dp)} x {dp}")


def _data_line(config: Config, groups: Groups, tokenizer: Tokenizer) -> str:
    source = "random tokens" if config.data.mock_data else " ".join(config.data.train_data)
    batch = config.global_batch_size(groups.dp.size)
    return (f" data: {source}, with the {tokenizer.vocab_size:,} tokens of {tokenizer.name}; "
            f"{format_count(config.train.train_iters, 'iteration')} of {batch} x {config.seq_length} tokens")


def _saving_line(config: Config) -> str:
    section = config.save
    if config.train.skip_train:
        return " evaluates and saves nothing: --skip-train"
    if section.save is None:
        return " saves nothing: --save is not given"
    every = f"every {section.save_interval:,} iterations and " if section.save_interval else ""
    return f" saves to {section.save} {every}at the end"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
