"""A run that goes on with another training method, or with other settings of it, says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.helpers import TINY, train

FLAGS = [*TINY, "--mock-data", "--lr", 1e-3, "--batch-size", 4, "--eval-interval", 0, "--train-iters", 5]
ROUNDED = ["--quantize-training", "--quantize-offset", 0, "--quantize-start-bits", 6, "--quantize-target-bits", 4,
           "--quantize-period", 2]
DROPPED = ["--progressive-layer-drop", "--pld-theta", 0.5]
FROZEN = ["--optimizer", "onebit_adam", "--onebit-freeze-step", 2]


@pytest.mark.parametrize("before, after, said", [
    (ROUNDED, [], "--quantize-training on -> off"),
    (ROUNDED, [*ROUNDED, "--quantize-target-bits", 3], "--quantize-target-bits 4 -> 3"),
    (DROPPED, [], "--progressive-layer-drop on -> off"), ([], DROPPED, "--progressive-layer-drop off -> on"),
    ([*DROPPED, *ROUNDED], ["--pld-theta", 0.4], "--progressive-layer-drop on -> off, --quantize-training on -> off"),
    (FROZEN, [*FROZEN, "--onebit-freeze-step", 3],
     "--onebit-freeze-step 2 -> 3 (no effect: the variance has been frozen since step 2)"),
    (["--optimizer", "onebit_adam", "--onebit-freeze-step", 3], FROZEN, "--onebit-freeze-step 3 -> 2"),
    ([*DROPPED, *ROUNDED, *FROZEN], [*DROPPED, *ROUNDED, *FROZEN], ""),
    (["--pld-theta", 0.5], ["--pld-theta", 0.4], ""),
])
def test_a_run_that_goes_on_otherwise_says_so(before: list[object], after: list[object], said: str, tmp_path: Path,
                                              ) -> None:
    train([*FLAGS, *before, "--exit-interval", 4 if before == FROZEN else 2, "--save", tmp_path])
    text = train([*FLAGS, *after, "--load", tmp_path])
    assert [line for line in text.splitlines() if line.startswith(" changed: ")] == [f" changed: {said}"] * bool(said)
