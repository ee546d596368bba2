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
from megatron.report.history import MetricsFileReader, RunHistory

PARTS = ("products", "attention", "rest", "optimizer", "exchange", "hidden", "total")
WARM_UP = 3
"""Steps of a start that the median leaves out if it has more than twice as many."""
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
"""Settings that do not change the time of a step; all others do."""
TIME_NEUTRAL_SECTIONS = ("schedule.", "save.", "log.", "profile.", "autotuning.")
SHOWN = 3
MAX_TIME_RATIO = 1.5
"""A larger ratio of measured and predicted time, or its inverse, suggests a busy machine."""


@dataclass(frozen=True)
class MeasuredRun:
    """Step times in a metrics file."""

    name: str
    seconds: float
    """Median of the steps."""
    steps: int
    differs: tuple[str, ...] = ()
    """Settings that differ from the planned run."""
    has_settings: bool = True
    """Whether the file contains its settings."""
    left_out: int = 0
    """Steps of starts with other settings."""


def read_measured_run(path: str, requested: PlannedRun, rates: MachineRates) -> MeasuredRun | None:
    """The step times of a metrics file, to compare with a prediction by `rates`; None while it has no step. Only the
    starts with the settings of the planned run count, or, if there are none, those with the settings of the last."""
    history = RunHistory(path).add_records(MetricsFileReader(Path(path)))
    times = zip(history.steps, history.columns["step_ms"], history.columns["skipped"], strict=True)
    # a skipped step has no update; a step belongs to the last start before it
    owned = [(next(start for start in reversed(history.starts) if start.step < step), milliseconds)
             for step, milliseconds, skipped in times if isfinite(milliseconds) and not skipped > 0]
    by_start = [(start, [milliseconds for owner, milliseconds in owned if owner is start]) for start in history.starts]
    measured = [(tuple(_differences(start.settings, requested, rates.where)), bool(start.config), steps)
                for start, steps in by_start if steps]
    if not measured:
        return None
    differs, has_settings = ((), True) if any(one[:2] == ((), True) for one in measured) else measured[-1][:2]
    same = [steps for *kind, steps in measured if kind == [differs, has_settings]]
    counted = [step for steps in same for step in steps[WARM_UP if len(steps) > 2 * WARM_UP else 0:]]
    left_out = sum(len(steps) for *_, steps in measured) - sum(map(len, same))
    return MeasuredRun(path, median(counted) / 1e3, len(counted), differs, has_settings, left_out)


def _differences(settings: dict[str, Any], requested: PlannedRun, where: Where) -> Iterator[str]:
    if settings.get("world_size", requested.ranks) != requested.ranks:
        yield f"{settings['world_size']} ranks"
    device, torch = settings.get("device"), settings.get("torch", where.torch)
    # runs record the model of a GPU; the machine of rates contains it
    if device is not None and not (device == "CPU" if where.device == "cpu" else device in where.machine):
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
    """With derived values in place of None; tuples as lists, as in JSON."""
    known = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    if known.get("data.seq_length") is None and "model.max_position_embeddings" in known:
        known["data.seq_length"] = known["model.max_position_embeddings"]
    batch, tp = settings.get("train.batch_size"), settings.get("parallel.model_parallel_size") or 1
    if known.get("train.global_batch_size") is None and batch is not None:
        known["train.global_batch_size"] = batch * ranks // tp
    return known


def format_forecast(requested: PlannedRun, rates: MachineRates, rows: Sequence[dict[str, Any]],
                    measured_run: MeasuredRun | None) -> Iterator[str]:
    """`rows`: of build_report."""
    day = f", measured on {rates.taken}" if rates.taken else ""
    yield from ("", f"predicted ms of a step, by the rates of {rates.where}{day}")
    tokens = requested.config.global_batch_size(requested.dp) * requested.config.seq_length
    head = [*CARDS_HEAD, *PARTS, "tokens/s"]
    cells = [[*row_label(row), *(f"{1e3 * row['step'][part]:.4g}" for part in PARTS),
              f"{tokens / row['step']['total']:,.0f}"] for row in rows]
    yield from align_columns([head, *cells], left=(0, 1))
    yield from (f"note: {sentence}" for sentence in _caveats(requested, rates))
    if measured_run is not None:
        predicted, measured = step_time(requested, rates).total, measured_run.seconds
        error = "" if measured_run.differs else f": {predicted / measured - 1:+.1%}"
        yield from ("", f"measured {1e3 * measured:.4g} ms (median of {measured_run.steps} steps of "
                    f"{measured_run.name}), predicted {1e3 * predicted:.4g} ms{error}")
        yield from (f"note: {sentence}" for sentence in _comparison_notes(requested, rates, measured_run))


def forecast_notes(requested: PlannedRun, rates: MachineRates, measured_run: MeasuredRun | None) -> list[str]:
    """Limits of the prediction, and of its comparison with the measured run."""
    return [*_caveats(requested, rates), *(() if measured_run is None
                                           else _comparison_notes(requested, rates, measured_run))]


def _caveats(requested: PlannedRun, rates: MachineRates) -> Iterator[str]:
    where = rates.where
    if rates.spread > QUIET_SPREAD:
        yield (f"the rates were measured on a busy machine (two measurements are {rates.spread - 1:.0%} apart): "
               "measure them again with --probe while it is idle")
    config = requested.config
    not_predicted = [what for what, is_used in (
        (f"what --optimizer {config.optim.optimizer} does otherwise than Adam",
         config.optim.optimizer not in ("adam", "adamw")),
        ("the drive", "nvme" in (requested.placement.optimizer, requested.placement.params)),
        ("--compile", config.train.compile), ("--quantize-training", config.quantize.quantize_training),
        ("--memory-centric-tiled-linear", config.model.memory_centric_tiled_linear)) if is_used]
    if not_predicted:
        yield f"not in the predicted time: {', '.join(not_predicted)}"
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


def _comparison_notes(requested: PlannedRun, rates: MachineRates, measured_run: MeasuredRun) -> Iterator[str]:
    if measured_run.differs:
        more = f" and {len(measured_run.differs) - SHOWN} more" if len(measured_run.differs) > SHOWN else ""
        yield f"that run had other settings: {', '.join(measured_run.differs[:SHOWN])}{more}"
    if not measured_run.has_settings:
        yield f"{measured_run.name} does not say what its settings are: they may be others"
    if measured_run.left_out:
        yield (f"{measured_run.left_out} steps of that file are left out: they have other settings than those that are "
               "compared")
    if not measured_run.differs \
            and not 1 / MAX_TIME_RATIO <= step_time(requested, rates).total / measured_run.seconds <= MAX_TIME_RATIO:
        yield ("that is far apart: one of the two machines may have been busy; measure the rates again with --probe "
               "while this one is idle")
