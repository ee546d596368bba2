"""Own parameters of optimizers: each has a range, pairs are in order, and errors name the one that is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.ds_json import build_ds_config
from megatron.config.optimizer_config import DEEPSPEED_TYPES, EXTRA_RANGES, OPTIMIZERS
from megatron.config.tree import OptimConfig
from megatron.errors import ConfigError

BASE = {"train_batch_size": 8}
NUMBERS = [(optimizer, name) for optimizer, takes in OPTIMIZERS.items() for name, default in takes.extra.items()
           if not isinstance(default, bool | str)]
TYPES = {ours: given for given, ours in DEEPSPEED_TYPES.items()}
WRONG = [("onebit_lamb", "coeff_beta", 2), ("onebit_lamb", "factor_threshold", -1), ("lamb", "max_coeff", 0),
         ("lion", "betas", [0.9, 1.5]), ("rmsprop", "alpha", -1), ("adagrad", "eps", -1e-8), ("sgd", "dampening", 2)]
OUT_OF_ORDER = [("lamb", {"min_coeff": 11}), ("onebit_lamb", {"max_coeff": 0.3, "min_coeff": 0.5}),
                ("onebit_lamb", {"factor_min": 5}), ("onebit_lamb", {"factor_max": 0.1}),
                ("rprop", {"etas": [1.2, 0.5]}), ("rprop", {"step_sizes": [1, 0.1]})]


def of_flags(optimizer: str, params: dict[str, Any]) -> str:
    texts = tuple(f"{name}={str(value).lower()}" for name, value in params.items())
    with pytest.raises(ConfigError) as caught:
        OptimConfig(optimizer=optimizer, optimizer_params=texts)  # type: ignore[arg-type]
    return str(caught.value)


def of_file(optimizer: str, params: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_ds_config({**BASE, "optimizer": {"type": TYPES[optimizer], "params": params}})
    return str(caught.value)


def test_each_number_has_a_range_its_default_is_in_it_and_one_beyond_is_named_as_it_was_written() -> None:
    for optimizer, name in NUMBERS:
        default = OPTIMIZERS[optimizer].extra[name]
        numbers, wrong = (default, [-1, -1]) if isinstance(default, tuple) else ((default,), -1)
        assert default is None or all(EXTRA_RANGES[name].least <= one <= EXTRA_RANGES[name].most for one in numbers)
        assert of_flags(optimizer, {name: wrong}).startswith(f"--optimizer-params {name} is ")
    for optimizer, name, value in WRONG:
        assert of_flags(optimizer, {name: value}).startswith(f"--optimizer-params {name} is {value}: expected ")
        assert f"optimizer.params.{name} is {value}: expected " in of_file(optimizer, {name: value})


def test_pairs_are_in_order() -> None:
    for optimizer, params in OUT_OF_ORDER:
        assert of_flags(optimizer, params).startswith(f"--optimizer-params {[*params][-1][:3]}".replace("max", "min"))
        assert "optimizer.params." in of_file(optimizer, params)


def test_a_parameter_that_is_a_flag_says_which() -> None:
    assert of_flags("onebit_adam", {"freeze_step": 5}) == (
        "--optimizer-params freeze_step has a flag of its own: give --onebit-freeze-step")
    assert of_flags("adam", {"betas": [0, 1]}).endswith("give --adam-beta1 and --adam-beta2")
