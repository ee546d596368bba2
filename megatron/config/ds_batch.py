"""DeepSpeed's three batch sizes: train batch = micro-batch x accumulation x data parallel size, solved or refused."""

from __future__ import annotations

from megatron.config.setting import require
from megatron.config.train import TrainConfig

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BATCH_FIELDS = {"train_batch_size": "global_batch_size", "train_micro_batch_size_per_gpu": "batch_size"}

Given = tuple[int, str] | None
"""A number and the name of its source."""


def solve_batch(total: Given, micro: Given, accumulation: Given, dp_size: int) -> dict[str, int]:
    """The fields of the batch sizes, with what is missing computed."""
    solved, size = _solved(total, micro, accumulation, dp_size)
    return {"global_batch_size": solved, "batch_size": size}


def _solved(total: Given, micro: Given, accumulation: Given, dp_size: int) -> tuple[int, int]:
    """(train batch, micro-batch)"""
    if total is None:
        size, steps = (micro or (TrainConfig.batch_size, ""))[0], (accumulation or (1, ""))[0]
        return size * steps * dp_size, size
    if micro is None:
        return total[0], _quotient(total, "accumulation", accumulation, dp_size)
    if accumulation is None:
        _quotient(total, "micro_batch", micro, dp_size)
        return total[0], micro[0]
    product = micro[0] * accumulation[0] * dp_size
    sources = dict.fromkeys((total[1], micro[1], accumulation[1]))
    require(total[0] == product, f"train_batch_size {total[0]} != micro_batch {micro[0]} x accumulation "
            f"{accumulation[0]} x data_parallel {dp_size} = {product} ({', '.join(sources)})")
    return total[0], micro[0]


def _quotient(total: tuple[int, str], name: str, given: Given, dp_size: int) -> int:
    """total / (given x dp_size), which must be whole."""
    product = (given[0] if given else 1) * dp_size
    named = f"{name} {given[0]} ({given[1]}) x " if given else ""
    require(total[0] % product == 0, f"train_batch_size {total[0]} ({total[1]}) is not divisible by {named}"
            f"data_parallel {dp_size}" + (f" = {product}" if given else ""))
    return total[0] // product
