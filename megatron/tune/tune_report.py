"""The result of a search: a table, the recommended flags, and an HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path

from data.cli import format_count
from megatron.config.ds_cross_keys import BATCH_SIZE_KEYS
from megatron.plan.alternatives import format_bytes
from megatron.plan.footprint import PlannedRun
from megatron.report.page import UNKNOWN, html_document, html_notes, html_table
from megatron.train.flops import flops_per_token
from megatron.tune.search import TrialOption, TrialResult
from megatron.tune.space import TuningChoice, samples_per_step

COLUMNS = ("trial", "micro-batch", "zero", "offload", "recomputed", "tp", "bucket", "needs", "on the host", "predicted",
           "measured", "")
BATCH_KEYS = {"--batch-size": "train_micro_batch_size_per_gpu", "--global-batch-size": "train_batch_size"}
METRIC_UNITS = {"throughput": "samples/s", "latency": "ms a step", "flops": "TFLOP/s of a rank"}


def format_metric(requested: PlannedRun, seconds: float) -> str:
    """A step of `seconds` in the metric of --autotuning-metric."""
    kind, samples = requested.config.autotuning.autotuning_metric, samples_per_step(requested)
    if kind == "latency":
        return f"{1e3 * seconds:.4g} {METRIC_UNITS[kind]}"
    if kind == "throughput":
        return f"{samples / seconds:.4g} {METRIC_UNITS[kind]}"
    flops = samples * requested.config.seq_length * flops_per_token(requested.config.model, requested.config.seq_length)
    return f"{flops / seconds / requested.ranks / 1e12:.4g} {METRIC_UNITS[kind]}"


def trial_rows(trials: Mapping[TuningChoice, TrialResult],
               options: Mapping[TuningChoice, TrialOption]) -> Iterator[tuple[str, ...]]:
    """The fastest first, failed ones last."""
    rows = [(number, choice, result) for number, (choice, result) in enumerate(trials.items(), 1)]
    for number, choice, result in sorted(rows, key=lambda row: row[2].seconds or float("inf")):
        predicted, needed = options[choice].predicted, options[choice].memory_needed
        yield (str(number), str(choice.batch), str(choice.stage), str(choice.placement),
               "yes" if choice.recomputes else "no", str(choice.tp), f"{choice.bucket:,}",
               format_bytes(int(needed.device)), format_bytes(int(needed.host)) if needed.host else "",
               f"{1e3 * predicted:.4g} ms",
               UNKNOWN if result.seconds is None else f"{1e3 * result.seconds:.4g} ms",
               "" if result.state == "done" else f"{result.state}: {result.words}")


def recommended_flags(requested: PlannedRun, best: TuningChoice) -> list[str]:
    """The flags to append, and the keys to change in a DeepSpeed file that has the same settings."""
    names, samples, keys, flags = requested.config.key_names, samples_per_step(requested), list[str](), list[str]()
    given = dict(names.keys_of_given)
    if names.file and any(key in Path(names.file).read_text(encoding="utf-8") for key in BATCH_SIZE_KEYS):
        given |= BATCH_KEYS
    # "--flag value ..." -> [["--flag", "value", ...], ...]
    for flag, *values in map(str.split, re.split(r" (?=--)", " ".join(best.flags(requested, samples)))):
        key = given.get(flag.replace("--no-", "--", 1))
        if key is None:
            flags += [flag, *values]
        elif key.split(".")[-1].startswith("cpu_offload"):
            keys.append(f"{key} {str(values != ['none']).lower()}")
        else:
            keys.append(f"{key} {' '.join(values) or str(not flag.startswith('--no-')).lower()}")
    if "--batch-size" in given:
        keys.append(f"gradient_accumulation_steps {samples // (best.batch * (requested.ranks // best.tp))}")
    return [*([f"in {names.file}: {', '.join(keys)}"] if keys else []), "flags: " + " ".join(flags)]


def summarize_best(requested: PlannedRun, trials: Mapping[TuningChoice, TrialResult], num_choices: int,
                   best: TuningChoice) -> list[str]:
    seconds, times = trials[best].seconds, [seconds for seconds in trials[best].times if isfinite(seconds)]
    assert seconds is not None, "the best one was measured"
    metrics = dict.fromkeys((format_metric(requested, seconds), f"{1e3 * seconds:.4g} {METRIC_UNITS['latency']}"))
    all_times = f" (the least of {', '.join(f'{1e3 * one:.4g}' for one in times)})" if len(times) > 1 else ""
    lines = [f"fastest: {', '.join(metrics)}{all_times}, after {format_count(len(trials), 'trial')} of "
             f"{format_count(num_choices, 'choice')}"]
    # repeated choices whose least time is within the range of the fastest one
    ties = sum(len(trial.times) > 1 and trial.seconds is not None and trial.seconds <= max(times, default=0.0)
               for choice, trial in trials.items() if choice != best)
    if ties:
        lines.append(f"note: {format_count(ties, 'other choice')} cannot be told apart from it by these times; where "
                     "they are far apart, tune while the machine is idle")
    return lines + recommended_flags(requested, best)


def tuning_page(requested: PlannedRun, rows: Sequence[Sequence[str]], summary: Sequence[str]) -> str:
    """`rows`: COLUMNS, and trial_rows."""
    return html_document(
        f"Tuning {requested.config.model.parameters():,} parameters on {format_count(requested.ranks, 'rank')}",
        f"{html_notes(summary)}<section><h2>Trials</h2>\n{html_table(rows[0], rows[1:])}</section>\n")
