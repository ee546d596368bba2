"""Every optimizer trains alike however the model is split, and goes on from a checkpoint of another split."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.train import build
from megatron.zero.api.engine import Engine
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.zero.run import assemble, configure_gpt2, join_tensor_parallel, master_runs

STEPS, ROWS = 4, 8
RATES = {"lamb": 1e-2, "lion": 1e-3, "sgd": 0.5, "adagrad": 1e-2, "nadam": 1e-3, "rmsprop": 1e-3}


def engine_of(optimizer: str, stage: int, tp: int = 1) -> Engine:
    grid = groups.build(tp)
    # Its decay is 0.1, and its epsilon no blow-up of key biases.
    config = configure_gpt2(lr=RATES[optimizer], lr_decay_style="constant", warmup=0.0, optimizer=optimizer,
                            zero_stage=stage, model_parallel_size=tp, batch_size=ROWS // grid.dp.size,
                            global_batch_size=ROWS, adam_eps=1e-4)
    return build.engine(config, build.model(config, grid), grid, torch.device("cpu"))


def train(engine: Engine, first: int, last: int) -> None:
    for step in range(first, last):
        rows = torch.randint(0, 61, (ROWS, 17), generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(engine.groups.dp.size)[engine.groups.dp.rank]
        engine.backward(engine(mine[:, :-1], mine[:, 1:], grad_scale=engine.backward_scale))
        engine.step()


def trained(rank: int, world: int, optimizer: str, layouts: list[tuple[int, int]]) -> list[Any]:
    found = []
    for stage, tp in layouts:
        engine = engine_of(optimizer, stage, tp)
        train(engine, 0, STEPS)
        found.append(master_runs(engine.core))
    return found


def whole(by_rank: list[Any], number: int, tp: int) -> dict[str, torch.Tensor]:
    """The logical weights of layout `number` from what all ranks hold."""
    model = build.model(configure_gpt2(), groups.build(1))
    pieces = [assemble([run for runs in by_rank[rank::tp] for run in runs[number]]) for rank in range(tp)]
    return join_tensor_parallel(pieces, model) if tp > 1 else pieces[0]


def forget_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their gradients are nothing but rounding, which the sign of Lion and the norms of Lamb blow up."""
    return {name: torch.cat([w[:32], w[64:]]) if name.endswith("qkv.bias") else w for name, w in weights.items()}


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", RATES)
def test_every_split_is_the_same_training(optimizer: str) -> None:
    wanted = forget_key_biases(whole(run_ranks(trained, 1, optimizer, [(0, 1)]), 0, 1))
    layouts = [(0, 1), (1, 1), (2, 1), (3, 1)]
    by_rank = run_ranks(trained, 2, optimizer, [*layouts, (0, 2)])
    for number, (_, tp) in enumerate([*layouts, (0, 2)]):
        found = forget_key_biases(whole(by_rank, number, tp))
        for name, weight in wanted.items():
            # Sums in another order; Lion moves by a sign, which may turn where an update is almost zero.
            off = (found[name][: len(weight)] - weight).abs()
            assert off.mean() < 1e-6 and (optimizer == "lion" or off.max() < 2e-5), f"{name} in layout {layouts, tp}"


def saved(rank: int, world: int, optimizer: str, folder: str) -> Any:
    engine = engine_of(optimizer, world)
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    train(engine, 3, 6)
    return master_runs(engine.core)


def resumed(rank: int, world: int, optimizer: str, folder: str) -> Any:
    engine = engine_of(optimizer, world)
    engine.load_checkpoint(folder)
    train(engine, 3, 6)
    return master_runs(engine.core)


@pytest.mark.parametrize("optimizer", ["nadam", "lamb"])
def test_optimizer_state_goes_on_under_another_split(optimizer: str, tmp_path: Any) -> None:
    for before, after in ((1, 2), (2, 1)):
        folder = str(tmp_path / f"{before}")
        wanted = assemble([run for runs in run_ranks(saved, before, optimizer, folder) for run in runs])
        found = assemble([run for runs in run_ranks(resumed, after, optimizer, folder) for run in runs])
        for name, weight in forget_key_biases(wanted).items():
            torch.testing.assert_close(forget_key_biases(found)[name], weight, rtol=0, atol=2e-5)
