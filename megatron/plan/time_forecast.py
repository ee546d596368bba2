"""The predicted time of a step as text, and its comparison with what a run has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from megatron.config.schema import flag_name
from megatron.plan.footprint import PlannedRun
from megatron.plan.machine_rates import QUIET_SPREAD, MachineRates, Where
from megatron.plan.plan_report import CARDS_HEAD, align_columns, row_label, settings_by_section
from megatron.plan.step_time import step_time
from megatron.report.history import MetricsFileReader, RunHistory, RunStart

PARTS = ("products", "attention", "rest", "optimizer", "exchange", "hidden", "total")
WARM_UP = 3
"""Steps of a start that the median leaves out, where it has more than twice as many."""
TIME_NEUTRAL_SETTINGS = frozenset(
    {"model.layernorm_epsilon", "model.init_method_std", "data.train_data", "data.valid_data", "data.test_data",
     "data.split", "data.tokenizer_type", "data.vocab_file", "data.merge_file", "data.tokenizer_path", "data.mock_data",
     "data.data_cache_path", "data.text_key", "data.document_separator", "data.num_workers", "data.lazy_loader",
     "parallel.distributed_backend", "parallel.distributed_timeout_seconds", "parallel.startup_timeout_seconds",
     "parallel.local_rank", "optim.weight_decay", "optim.adam_beta1", "optim.adam_beta2", "optim.adam_eps",
     "optim.sgd_momentum", "precision.loss_scale", "precision.initial_loss_scale", "precision.loss_scale_window",
     "precision.hysteresis", "precision.min_scale", "precision.max_skipped_in_a_row", "zero.load_from_fp32_weights",
     "zero.ignore_unused_parameters", "zero.stage3_gather_16bit_weights_on_model_save", "train.train_iters",
     "train.eval_interval", "train.eval_iters", "train.exit_interval", "train.exit_duration_in_mins", "train.seed"})
"""Settings that leave the time of a step as it is; with all others it is that of another run."""
TIME_NEUTRAL_SECTIONS = ("schedule.", "save.", "log.", "profile.", "autotuning.")
SHOWN = 3
MAX_TIME_RATIO = 1.5
"""Times more or less than predicted: the rates may be those of a busy machine."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run says of its steps."""

    name: str
    seconds: float
    """Median of its steps."""
    steps: int
    differs: tuple[str, ...] = ()
    """Settings that are others there."""
    is_told: bool = True
    """The file says what its settings are."""
    left_out: int = 0
    """Steps of starts with other settings than those that count."""


def read_measured_run(path: str, requested: PlannedRun, rates: MachineRates) -> MeasuredRun | None:
    """Of a metrics file, beside a prediction by these rates; None while it has no step. Those starts of the run count
    that are the run that is asked for; where there is none, those that are as the last one."""
    history = RunHistory(path).add_records(MetricsFileReader(Path(path)))
    taken = [(tuple(_differences(start.settings, requested, rates.where)), bool(start.config), steps)
             for start, steps in _steps(history)]
    if not taken:
        return None
    differs, is_told = ((), True) if any(one[:2] == ((), True) for one in taken) else taken[-1][:2]
    same = [steps for *kind, steps in taken if kind == [differs, is_told]]
    counted = [step for steps in same for step in steps[WARM_UP if len(steps) > 2 * WARM_UP else 0:]]
    left_out = sum(len(steps) for *_, steps in taken) - sum(map(len, same))
    return MeasuredRun(path, median(counted) / 1e3, len(counted), differs, is_told, left_out)


def _steps(history: RunHistory) -> Iterator[tuple[RunStart, list[float]]]:
    """The times that are left of each start, where there are any: a later one takes back what it takes again. Of steps
    that were skipped nothing was updated."""
    times = zip(history.steps, history.columns["step_ms"], history.columns["skipped"], strict=True)
    owned = [(next(start for start in reversed(history.starts) if start.step < step), milliseconds)
             for step, milliseconds, skipped in times if isfinite(milliseconds) and not skipped > 0]
    for start in history.starts:
        if steps := [milliseconds for owner, milliseconds in owned if owner is start]:
            yield start, steps


def _differences(settings: dict[str, Any], requested: PlannedRun, where: Where) -> Iterator[str]:
    if settings.get("world_size", requested.ranks) != requested.ranks:
        yield f"{settings['world_size']} ranks"
    device, torch = settings.get("device"), settings.get("torch", where.torch)
    if device is not None and not _is_same_device(device, where):
        yield f"device {device}"
    if torch != where.torch:
        yield f"torch {torch}"
    here = _effective({f"{section}.{name}": value for section, fields in settings_by_section(requested).items()
                       for name, value in fields.items()}, requested.ranks)
    there = _effective(settings, settings.get("world_size", requested.ranks))
    for name, value in there.items():
        is_harmless = name in TIME_NEUTRAL_SETTINGS or name.startswith(TIME_NEUTRAL_SECTIONS)
        if name in here and not is_harmless and value != here[name]:
            yield f"{flag_name(name.rpartition('.')[2])} {value} (here {here[name]})"


def _effective(settings: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """With what follows from other settings where nothing is said; as JSON has them."""
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    if known.get("data.seq_length") is None and "model.max_position_embeddings" in known:
        known["data.seq_length"] = known["model.max_position_embeddings"]
    batch, tp = settings.get("train.batch_size"), settings.get("parallel.model_parallel_size") or 1
    if known.get("train.global_batch_size") is None and batch is not None:
        known["train.global_batch_size"] = batch * ranks // tp
    return known


def _is_same_device(device: str, where: Where) -> bool:
    """Runs name the model of a GPU, and rates that of a machine, in which it is."""
    return device == "CPU" if where.device == "cpu" else device in where.machine


def format_forecast(requested: PlannedRun, rates: MachineRates, rows: Sequence[dict[str, Any]],
                    measured_run: MeasuredRun | None) -> Iterator[str]:
    """`rows`: those of plan_report.py."""
    day = f", measured on {rates.taken}" if rates.taken else ""
    yield from ("", f"predicted ms of a step, by the rates of {rates.where}{day}")
    tokens = requested.config.global_batch_size(requested.dp) * requested.config.seq_length
    head = [*CARDS_HEAD, *PARTS, "tokens/s"]
    cells = [[*row_label(row), *(f"{1e3 * row['step'][part]:.4g}" for part in PARTS),
              f"{tokens / row['step']['total']:,.0f}"] for row in rows]
    yield from align_columns([head, *cells], left=(0, 1))
    yield from (f"note: {sentence}" for sentence in _caveats(requested, rates))
    if measured_run is not None:
        yield from ("", _comparison_line(step_time(requested, rates).total, measured_run))
        yield from (f"note: {sentence}" for sentence in _comparison_notes(requested, rates, measured_run))


def forecast_notes(requested: PlannedRun, rates: MachineRates, measured_run: MeasuredRun | None) -> list[str]:
    """What is to be known of the prediction, and of its likeness to what was measured."""
    return [*_caveats(requested, rates), *(() if measured_run is None
                                           else _comparison_notes(requested, rates, measured_run))]


def _caveats(requested: PlannedRun, rates: MachineRates) -> Iterator[str]:
    where = rates.where
    if rates.spread > QUIET_SPREAD:
        yield (f"the rates were measured on a busy machine (two measurements are {rates.spread - 1:.0%} apart): "
               "measure them anew with --probe while it is idle")
    if unknown := ", ".join(_not_predicted(requested)):
        yield f"not in the predicted time: {unknown}"
    if requested.ranks < where.ranks:
        yield (f"the rates are of {where.ranks} ranks at work at the same time, and this run has {requested.ranks}: a "
               "rank may be faster")
    if where.device == "cuda":
        yield ("hardly calibrated on GPUs: one prediction has stood beside a measured step, of one GPU (docs/plan.md), "
               "and none with several; and these are of a model that is not compiled")
    if requested.ranks > where.ranks and where.device == "cpu":
        yield (f"{requested.ranks} ranks on one machine share the cores that {where.ranks} were measured with: each is "
               "slower than predicted")
    if requested.ranks > where.ranks:
        yield (f"{requested.ranks} ranks exchange as fast as the {where.ranks} that were measured on one machine: a "
               "slower network between nodes is not predicted")


def _not_predicted(requested: PlannedRun) -> Iterator[str]:
    config = requested.config
    if config.optim.optimizer not in ("adam", "adamw"):
        yield f"what --optimizer {config.optim.optimizer} does otherwise than Adam"
    if "nvme" in (requested.placement.optimizer, requested.placement.params):
        yield "the drive"
    if config.train.compile:
        yield "--compile"
    if config.quantize.quantize_training:
        yield "--quantize-training"
    if config.model.memory_centric_tiled_linear:
        yield "--memory-centric-tiled-linear"


def _comparison_notes(requested: PlannedRun, rates: MachineRates, measured_run: MeasuredRun) -> Iterator[str]:
    if measured_run.differs:
        more = f" and {len(measured_run.differs) - SHOWN} more" if len(measured_run.differs) > SHOWN else ""
        yield f"that run had other settings: {', '.join(measured_run.differs[:SHOWN])}{more}"
    if not measured_run.is_told:
        yield f"{measured_run.name} does not say what its settings are: they may be others"
    if measured_run.left_out:
        yield (f"{measured_run.left_out} steps of that file are left out: they have other settings than those that are "
               "compared")
    if not measured_run.differs \
            and not 1 / MAX_TIME_RATIO <= step_time(requested, rates).total / measured_run.seconds <= MAX_TIME_RATIO:
        yield ("that is far apart: one of the two machines may have been busy; measure the rates anew with --probe "
               "while this one is idle")


def _comparison_line(predicted: float, measured_run: MeasuredRun) -> str:
    error = "" if measured_run.differs else f": {predicted / measured_run.seconds - 1:+.1%}"
    return (f"measured {1e3 * measured_run.seconds:.4g} ms (median of {measured_run.steps} steps of "
            f"{measured_run.name}), predicted {1e3 * predicted:.4g} ms{error}")
