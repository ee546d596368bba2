"""--compile changes the speed, not the training; it composes with recomputation and every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.helpers import records, train

FLAGS = ["--preset", "tiny", "--mock-data", "--train-iters", "8", "--batch-size", "4", "--eval-interval", "0",
         "--log-interval", "0", "--attention-dropout", "0", "--hidden-dropout", "0"]


@pytest.mark.slow  # the compiler takes 10 s
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch
@pytest.mark.parametrize("extra", [[], ["--checkpoint-activations", "--zero-stage", "3"]], ids=["plain", "composed"])
def test_a_compiled_run_trains_like_an_eager_one(extra: list[str], tmp_path: Path) -> None:
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        train([*FLAGS, *extra, *flags, "--metrics-file", tmp_path / name])
    eager, compiled = (records(tmp_path / name) for name in ("eager", "compiled"))
    for key in ("lm_loss", "grad_norm"):
        # Fused kernels round elsewhere: 1e-4 over 8 fp32 steps.
        assert [row[key] for row in compiled] == pytest.approx([row[key] for row in eager], rel=1e-4)
    assert [row["samples_digest"] for row in compiled] == [row["samples_digest"] for row in eager]
