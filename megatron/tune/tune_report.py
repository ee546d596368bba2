"""The result of a search: a table, the recommended flags, and an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median

from megatron.config.ds_cross_keys import BATCH_SIZE_KEYS
from megatron.plan.alternatives import format_bytes
from megatron.plan.footprint import PlannedRun
from megatron.plan.plan_report import align_columns
from megatron.report.page import UNKNOWN, ReportTable, html_document, html_notes, html_table
from megatron.train.flops import flops_per_token
from megatron.tune.search import TrialOption, TrialResult
from megatron.tune.space import TuningChoice, samples_per_step

COLUMNS = ("trial", "micro-batch", "zero", "offload", "recomputed", "tp", "bucket", "needs", "on the host", "predicted",
           "measured", "")
BATCH_KEYS = {"--batch-size": "train_micro_batch_size_per_gpu", "--global-batch-size": "train_batch_size"}
MISPREDICTION_RATIO = 1.4
"""Measured / predicted, or the other way round: twice what is aimed at, and what hours of one machine differ by."""
METRIC_UNITS = {"throughput": "samples/s", "latency": "ms a step", "flops": "TFLOP/s of a rank"}


def format_metric(requested: PlannedRun, seconds: float) -> str:
    """What a step of so many seconds is in the metric that was asked for."""
    kind, samples = requested.config.autotuning.autotuning_metric, samples_per_step(requested)
    if kind == "latency":
        return f"{1e3 * seconds:.4g} {METRIC_UNITS[kind]}"
    if kind == "throughput":
        return f"{samples / seconds:.4g} {METRIC_UNITS[kind]}"
    flops = samples * requested.config.seq_length * flops_per_token(requested.config.model, requested.config.seq_length)
    return f"{flops / seconds / requested.ranks / 1e12:.4g} {METRIC_UNITS[kind]}"


def trial_rows(trials: Mapping[TuningChoice, TrialResult],
               options: Mapping[TuningChoice, TrialOption]) -> Iterator[tuple[str, ...]]:
    """The fastest first, and last what was not done."""
    ordered = sorted(trials.items(), key=lambda item: item[1].seconds or float("inf"))
    numbers = {choice: number for number, choice in enumerate(trials, 1)}
    for choice, outcome in ordered:
        option = options[choice]
        measured = UNKNOWN if outcome.seconds is None else f"{1e3 * outcome.seconds:.4g} ms"
        yield (str(numbers[choice]), str(choice.batch), str(choice.stage), str(choice.placement),
               "yes" if choice.recomputes else "no", str(choice.tp), f"{choice.bucket:,}",
               format_bytes(int(option.memory_needed.device)), format_bytes(int(option.memory_needed.host))
               if option.memory_needed.host else "", f"{1e3 * option.candidate.predicted.total:.4g} ms", measured,
               "" if outcome.state == "done" else f"{outcome.state}: {outcome.words}")


def trials_table(trials: Mapping[TuningChoice, TrialResult],
                 options: Mapping[TuningChoice, TrialOption]) -> Iterator[str]:
    yield from align_columns([COLUMNS, *trial_rows(trials, options)], left=(3, 11))


def recommended_flags(requested: PlannedRun, found: TuningChoice) -> list[str]:
    """What to type after the other flags; and what to change in a DeepSpeed file that says the same settings."""
    words, samples, keys, flags = requested.config.key_names, samples_per_step(requested), list[str](), list[str]()
    given = dict(words.keys_of_given) | (BATCH_KEYS if _file_sets_batch(words.file) else {})
    for flag, *values in _group_flags(found.flags(requested, samples)):
        key = given.get(flag.replace("--no-", "--", 1))
        if key is None:
            flags += [flag, *values]
        elif key.split(".")[-1].startswith("cpu_offload"):
            keys.append(f"{key} {str(values != ['none']).lower()}")
        else:
            keys.append(f"{key} {' '.join(values) or str(not flag.startswith('--no-')).lower()}")
    if "--batch-size" in given:
        keys.append(f"gradient_accumulation_steps {samples // (found.batch * (requested.ranks // found.tp))}")
    return [*([f"in {words.file}: {', '.join(keys)}"] if keys else []), "flags: " + " ".join(flags)]


def _file_sets_batch(file: str) -> bool:
    return bool(file) and any(key in Path(file).read_text(encoding="utf-8") for key in BATCH_SIZE_KEYS)


def _group_flags(words: Sequence[str]) -> list[list[str]]:
    """Each flag with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return found


def summarize_best(requested: PlannedRun, trials: Mapping[TuningChoice, TrialResult],
                   options: Mapping[TuningChoice, TrialOption], found: TuningChoice) -> list[str]:
    seconds = trials[found].seconds
    assert seconds is not None, "the best one was measured"
    metrics = dict.fromkeys((format_metric(requested, seconds), f"{1e3 * seconds:.4g} {METRIC_UNITS['latency']}"))
    return [f"fastest: {', '.join(metrics)}{_repeat_range(trials[found])}, "
            f"after {counted(len(trials), 'trial')} of {counted(len(options), 'choice')}",
            *_tie_note(trials, found), *_misprediction_note(trials, options), *recommended_flags(requested, found)]


def _repeat_range(outcome: TrialResult) -> str:
    """Of the times that its own is the least of."""
    times = [f"{1e3 * seconds:.4g}" for seconds in outcome.times if isfinite(seconds)]
    return f" (the least of {', '.join(times)})" if len(times) > 1 else ""


def _tie_note(trials: Mapping[TuningChoice, TrialResult], found: TuningChoice) -> list[str]:
    """Where another choice that was measured again was no slower at its best than the fastest one at its worst."""
    slowest = max(filter(isfinite, trials[found].times), default=0.0)
    others = [outcome for choice, outcome in trials.items()
              if choice != found and len(outcome.times) > 1 and outcome.seconds is not None]
    near = sum(outcome.seconds is not None and outcome.seconds <= slowest for outcome in others)
    if not near:
        return []
    return [f"note: {counted(near, 'other choice')} cannot be told apart from it by these times; where they are far "
            "apart, tune while the machine is idle"]


def _misprediction_note(trials: Mapping[TuningChoice, TrialResult],
                        options: Mapping[TuningChoice, TrialOption]) -> list[str]:
    """Where steps took another time than the planner thinks: what was left out by its word may be faster then."""
    factor = median(outcome.seconds / options[choice].candidate.predicted.total
                    for choice, outcome in trials.items() if outcome.seconds is not None)
    if 1 / MISPREDICTION_RATIO < factor < MISPREDICTION_RATIO:
        return []
    return [f"note: steps took {factor:.3g} x the predicted time (median), so choices that were not tried may be "
            "misjudged: python -m megatron.plan --probe measures the rates of this machine anew"]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def tuning_page(requested: PlannedRun, trials: Mapping[TuningChoice, TrialResult],
                options: Mapping[TuningChoice, TrialOption], words: Sequence[str]) -> str:
    made = html_table(ReportTable(COLUMNS, tuple(trial_rows(trials, options))))
    return html_document(
        f"Tuning {requested.config.model.parameters():,} parameters on {counted(requested.ranks, 'rank')}",
        f"{html_notes(words)}<section><h2>Trials</h2>\n{made}</section>\n")
