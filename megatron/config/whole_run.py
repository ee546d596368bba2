"""Checks of a run of pretrain_gpt2.py, whose length and model are known from its flags: what it asks for has to happen.

An engine of `zero.initialize` has a loop and a model of its user's, so these are no checks of a Config.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.optimizers import AUTO, ONE_BIT
from megatron.config.tree import Config


def problems_of_run(config: Config) -> Iterator[str]:
    """A sentence for each method that would never begin, or that this model does not take."""
    if config.optim.optimizer in ONE_BIT:
        yield from _too_long_a_warm_up(config)
    if config.quantize.quantize_training:
        yield from _nothing_rounded(config)
        yield from _groups_of_rows(config)


def _too_long_a_warm_up(config: Config) -> Iterator[str]:
    """A run that ends before its optimizer's warm-up does is another one than was asked for."""
    warm_up, iters = config.optim.freeze_step, config.train.train_iters
    if warm_up is None:
        beta2, each = config.optim.adam_beta2, max(1, round(1 / (1 - config.optim.adam_beta2)))
        if 0 < iters <= 2 * each:
            yield (f"--onebit-freeze-step {AUTO} looks at the variance every {each} steps with --adam-beta2 {beta2:g}, "
                   f"and can freeze it after {2 * each}, which is not below --train-iters {iters}, so that nothing "
                   "would travel at one bit: give a number, 15 to 25 % of the steps are usual")
    elif 0 < iters <= warm_up:
        yield (f"--onebit-freeze-step {warm_up} is not below --train-iters {iters}, so that nothing would travel at "
               f"one bit: 15 to 25 % of the steps are usual, or give {AUTO}")


def _nothing_rounded(config: Config) -> Iterator[str]:
    offset, iters = config.quantize.quantize_offset, config.train.train_iters
    if 0 < iters < offset:
        yield (f"--quantize-offset {offset} is above --train-iters {iters}, so that nothing would be rounded: give 0 "
               "to round from the first step on, or fewer steps than the run has")


def _groups_of_rows(config: Config) -> Iterator[str]:
    """As the engine finds it (zero/rows.py) for a model of any kind."""
    groups, hidden = config.quantize.quantize_groups, config.model.hidden_size
    rows = {"3 x --hidden-size": 3 * hidden, "--hidden-size": hidden, "--intermediate-size": config.model.ffn_size}
    uneven = [f"{count} ({name})" for name, count in rows.items() if count % groups]
    if uneven:
        yield (f"--quantize-groups {groups} does not divide the rows of every matrix, {', '.join(uneven)}: give "
               "a divisor of all")
