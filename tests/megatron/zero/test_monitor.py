"""What a configuration asks an engine to report is reported; what can do nothing is named; and nothing else happens."""

from __future__ import annotations

import csv
import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron import zero
from megatron.errors import StorageError
from tests.distributed import on_ranks

CONFIG: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}


def trained(steps: int = 4, **keys: Any) -> zero.Engine:
    torch.manual_seed(0)
    engine = zero.initialize(model=nn.Linear(2, 1), config={**CONFIG, **keys})[0]
    dtype = torch.half if engine.fp16_enabled() else torch.float
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 2, dtype=dtype)).square().mean())
        engine.step()
    return engine


def test_a_line_has_step_skipped_rate_momentum_and_the_mean_loss_over_the_micro_batches(capsys: Any) -> None:
    torch.manual_seed(0)
    built = zero.initialize(model=nn.Linear(1, 1, bias=False),
                            config={**CONFIG, "steps_per_print": 1, "gradient_accumulation_steps": 2})[0]
    losses = []
    for value in (1.0, 3.0):
        loss = built(torch.full((2, 1), value)).square().mean()
        losses.append(loss.item())
        built.backward(loss)
        built.step()
    line = f"step=1, skipped=0, lr=[0.5], mom=[(0.9, 0.999)], loss={sum(losses) / 2:.6g}"
    assert line in capsys.readouterr().out.splitlines()


def test_breakdowns_name_every_phase(capsys: Any) -> None:
    trained(20, wall_clock_breakdown=True, memory_breakdown=True)
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in out] == ["step=10,", "time", "memory", "step=20,", "time", "memory"]
    for line in out[1:3]:
        assert re.fullmatch(r"(time|memory) \(\w+\) \| forward: [\d.]+ \| backward: [\d.]+ \| step: [\d.]+", line), line


def test_nothing_is_printed_that_nobody_asked_for(capsys: Any) -> None:
    trained()
    assert capsys.readouterr() == ("", "")


class NoReading(nn.Module):
    """A loss that may not be read from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return Unreadable(self.weight.sum())


class Unreadable(torch.Tensor):
    def __new__(cls, value: torch.Tensor) -> Unreadable:
        return value.as_subclass(cls)

    def item(self) -> float:
        raise AssertionError("a loss was read from the device")

    __float__ = item


def test_a_loss_is_read_only_where_a_line_or_a_scalar_is_due() -> None:
    def run(**keys: Any) -> None:
        engine = zero.initialize(model=NoReading(), config={**CONFIG, **keys})[0]
        engine.backward(engine())
        engine.step()

    run()
    run(steps_per_print=2)
    with pytest.raises(AssertionError, match="was read"):
        run(steps_per_print=1)


def test_scalars_have_deepspeeds_names_and_count_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = trained(3, tensorboard=monitor, csv_monitor=monitor, fp16={"enabled": True, "initial_scale_power": 4})
    engine.monitor.write_events([("Train/Samples/mine", 7.0, engine.global_samples)])
    engine.destroy()
    names = ["train_loss", "lr", "loss_scale", "mine"]
    for name in names:
        rows = list(csv.reader((tmp_path / "job" / f"Train_Samples_{name}.csv").read_text().splitlines()))
        assert rows[0] == ["step", name]
        assert [row[0] for row in rows[1:]] == (["12"] if name == "mine" else ["4", "8", "12"])
    assert rows[1] == ["12", "7.0"]
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"Train/Samples/{name}" for name in names}
    assert [event.step for event in events.Scalars("Train/Samples/lr")] == [4, 8, 12]
    assert {event.value for event in events.Scalars("Train/Samples/loss_scale")} == {16.0}


@on_ranks(2)
def test_every_rank_ends_with_the_error_of_the_one_that_writes(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for section in ("tensorboard", "csv_monitor"):
        with pytest.raises(StorageError, match=rf"{section}.output_path: .*file/job cannot be written"):
            trained(0, **{section: {"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "job"}})


@on_ranks(2)
def test_rank_0_alone_speaks_and_names_what_has_no_effect(rank: int, world: int, tmp_path: Path) -> None:
    with redirect_stdout(io.StringIO()) as told:
        trained(1, steps_per_print=1, csv_monitor={"enabled": True, "output_path": str(tmp_path)}, zero_optimization={
            "stage": 2, "cpu_offload": False, "stage3_max_live_parameters": 5})
    said = told.getvalue()
    assert len(said.splitlines()) == (0 if rank else 4)
    for text in () if rank else ("zero_optimization.cpu_offload is deprecated", "2 ranks on this node compute on",
                                 "stage3_max_live_parameters has no effect without zero_optimization.stage 3"):
        assert text in said
