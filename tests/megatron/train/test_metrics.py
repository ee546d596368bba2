"""What a run reports: the metrics file, the console, tensorboard, and what the intervals turn on and off."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import time
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import pretrain_gpt2
from megatron.checkpoint.reader import open_checkpoint
from megatron.checkpoint.tags import tag_names
from megatron.config.tree import LogConfig
from megatron.errors import format_bytes
from megatron.metrics.step_metrics import STEP_SCALARS, StepMetrics
from megatron.train.evaluation import printable
from megatron.train.run_log import CHART_COLUMNS, CHART_ROWS, RunLog, console_line, loss_chart
from megatron.zero.offload.direct_io import DirectIoFile
from tests.megatron.helpers import TINY, own_signals, records, steps, train, write_corpus

PROMISED = {"iteration", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "consumed_samples",
            "samples_digest", "step_ms", "tokens_per_s", "tflops", "mfu", "max_memory_bytes"}


def strict(line: str) -> dict[str, Any]:
    """JSON as the standard has it: no NaN, no Infinity."""
    value = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(value, dict)
    return value


def test_every_step_is_one_line_with_every_promised_key(tmp_path: Path) -> None:
    train([*TINY, "--mock-data", "--train-iters", 4, "--eval-interval", 2, "--eval-iters", 1, "--peak-tflops", 1,
           "--metrics-file", tmp_path / "m"])
    first, *found = [strict(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert first["config"] is True
    assert [line["iteration"] for line in found] == [1, 2, 2, 3, 4, 4, 4]
    for line in found:
        if line.get("eval"):
            assert {"iteration", "lm_loss", "ppl"} <= set(line)
            continue
        assert set(line) == PROMISED
        assert re.fullmatch("[0-9a-f]{64}", line["samples_digest"])
        assert line["tokens_per_s"] == pytest.approx(4 * 16 / line["step_ms"] * 1e3)
        assert line["mfu"] == pytest.approx(line["tflops"] / 1) and line["max_memory_bytes"] > 2**20
    assert [line["consumed_samples"] for line in found if "eval" not in line] == [4, 8, 12, 16]


DRIVE_LINE = re.compile(r".* \| memory [\d.]+ GiB \| drive wait \(ms\): ([\d.]+) \| drive read (.*), written (.*)")


def test_a_step_tells_how_long_it_waited_for_a_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drive").mkdir()
    write = DirectIoFile.write
    monkeypatch.setattr(DirectIoFile, "write", lambda *args: (time.sleep(0.002), write(*args)) and None)
    said = train([*TINY, "--mock-data", "--train-iters", 4, "--log-interval", 2, "--metrics-file", tmp_path / "m",
                  "--tensorboard-dir", tmp_path / "board", "--zero-stage", 3, "--sub-group-size", 1024,
                  "--offload-optimizer-device", "nvme", "--offload-optimizer-nvme-path", tmp_path / "drive"])
    config, *found = [strict(line) for line in (tmp_path / "m").read_text().splitlines()]
    state = 12 * config["parameters"]
    for line in found:
        assert set(line) == PROMISED | {"drive_wait_ms", "drive_read_bytes", "drive_written_bytes"}
        assert 2 < line["drive_wait_ms"] < line["step_ms"]
        assert state <= line["drive_written_bytes"] < 1.25 * state, "with the padding of the vocabulary"
    assert [12 * line["drive_read_bytes"] / line["drive_written_bytes"] for line in found] == [8, 16, 12, 16], (
        "the first step finds no moments; steps 1, 2 and 4 compare masters with weights")
    told = [match for line in said.splitlines() if (match := DRIVE_LINE.fullmatch(line))]
    for match, pair in zip(told, (found[:2], found[2:]), strict=True):
        assert float(match[1]) == pytest.approx(sum(line["drive_wait_ms"] for line in pair) / 2, abs=0.06)
        assert match[3] == format_bytes(pair[0]["drive_written_bytes"])
    curve = events_of(tmp_path / "board").Scalars("train/drive_wait_ms")
    assert [event.value for event in curve] == pytest.approx([line["drive_wait_ms"] for line in found])


def test_floats_are_written_with_all_their_bits(tmp_path: Path) -> None:
    log = RunLog(LogConfig(metrics_file=str(tmp_path / "m"), log_interval=0), 1, 0, writes=True)
    values = (0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308)
    log.step(StepMetrics(1, values[0], values[1], values[2], values[3], False, 4, "00", 1.0, 1.0, 1.0, None, 1))
    assert len((tmp_path / "m").read_text().splitlines()) == 1, "a job that is killed keeps the figures of its steps"
    log.step(StepMetrics(2, math.nan, math.inf, 0.0, 1.0, True, 8, "00", 1.0, 1.0, 1.0, None, 1))
    log.evaluation("validation", 2, math.nan)
    log.close()
    first, second, evaluation = (strict(line) for line in (tmp_path / "m").read_text().splitlines())
    assert (first["lm_loss"], first["grad_norm"], first["learning_rate"], first["loss_scale"]) == values
    assert (second["lm_loss"], second["grad_norm"]) == (None, None)
    assert (evaluation["lm_loss"], evaluation["ppl"]) == (None, None), "no perplexity of something that is not a number"


CONSOLE = re.compile(
    r" iteration +(\d+)/ +(\d+) \| elapsed time per iteration \(ms\): \d+\.\d \| learning rate (\d\.\d{3}E[+-]\d\d) \| "
    r"lm loss (\d\.\d{6}E[+-]\d\d) \| loss scale (\d+\.\d) \| grad norm \d+\.\d{3} \| tokens/s \d+ \| .*")


def test_the_console_line_is_the_classic_one_at_every_log_interval(tmp_path: Path) -> None:
    said = train([*TINY, "--mock-data", "--train-iters", 7, "--log-interval", 3, "--metrics-file", tmp_path / "m"])
    matches = [match for line in said.splitlines() if (match := CONSOLE.fullmatch(line))]
    assert "drive" not in said
    assert [match[1] for match in matches] == ["3", "6"] and all(match[2] == "7" for match in matches)
    losses = [step["lm_loss"] for step in steps(tmp_path / "m")]
    for match, window in zip(matches, (losses[:3], losses[3:6]), strict=True):
        assert float(match[4]) == pytest.approx(sum(window) / 3, rel=1e-6), "the mean since the line before"


def step(number: int, loss: float, skipped: bool = False, milliseconds: float = 10.0, mfu: float = 0.5) -> StepMetrics:
    return StepMetrics(number, loss, math.inf if skipped else 1.0, 1e-3, 64.0, skipped, 4, "", milliseconds, 100.0,
                       2 * mfu, mfu, 2**30)


def test_the_console_line_has_rates_over_the_same_time_and_leaves_skipped_steps_out_of_the_loss() -> None:
    line = console_line([step(1, 2.0, milliseconds=30.0, mfu=0.1), step(2, 2.0, milliseconds=10.0, mfu=0.3)], 10)
    assert "TFLOP/s 0.30" in line and "MFU 15.0%" in line
    line = console_line([step(1, 2.0, False), step(2, 99.0, True), step(3, 4.0, False)], 10)
    assert CONSOLE.fullmatch(line) and "lm loss 3.000000E+00" in line and line.endswith("skipped 1")
    assert "elapsed time per iteration (ms): 10.0" in line and "tokens/s 100 " in line and "MFU 50.0%" in line
    assert "lm loss nan" in console_line([step(1, 2.0, True)], 10).lower()
    short = console_line([step(1, 2.0, False), step(599_999, 4.0, False)], 600_000, is_short=True)
    assert short == (" step 599999/600000 | loss 3.0000 | grad norm 1.000 | lr 1.00E-03 | 10.0 ms | 100 tokens/s | "
                     "MFU 50.0%")


@pytest.mark.parametrize(("fields", "is_terminal", "is_short"), [("auto", True, True), ("auto", False, False),
                                                                 ("all", True, False), ("short", False, True)])
def test_a_terminal_gets_short_lines(fields: str, is_terminal: bool, is_short: bool,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    config = LogConfig(log_fields=fields, log_interval=1)  # type: ignore[arg-type]
    with patch("sys.stdout.isatty", return_value=is_terminal), RunLog(config, 4, 0, writes=True) as log:
        log.step(step(1, 2.0))
    assert (" step 1/4 | loss 2.0000 | " in capsys.readouterr().out) == is_short


def test_loss_lines_come_by_default_and_after_a_resume_too(tmp_path: Path) -> None:
    quiet = [*TINY, "--mock-data"]
    quiet[quiet.index("--log-interval"):quiet.index("--log-interval") + 2] = []
    run = [*quiet, "--train-iters", 23, "--save", tmp_path / "s", "--load", tmp_path / "s"]

    def printed(*flags: object) -> list[int]:
        return [int(match[1]) for line in train([*run, *flags]).splitlines() if (match := CONSOLE.fullmatch(line))]

    assert printed("--exit-interval", 12) == [2, 4, 6, 8, 10, 12]
    assert printed("--exit-interval", 20) == list(range(13, 21)), "the steps left count"
    assert printed() == [21, 22, 23]
    (tmp_path / "s").rename(tmp_path / "other")
    assert printed()[-1] == 23, "the last step has a line"


def test_the_console_shows_the_facts_and_verbose_the_whole_configuration(tmp_path: Path) -> None:
    run = [*TINY, "--mock-data", "--train-iters", 1, "--clip-grad", 0.25]
    said = train([*run, "--save", tmp_path / "s", "--save-interval", 50])
    assert "configuration" not in said and len(said.splitlines()) == 4, "three facts, and the save"
    for fact in ("GPT-2 with", "in fp32 on 1 x CPU, 1 thread:", "tensor parallel 1, data parallel 1", "random tokens",
                 "ByteLevelTokenizer", "; 1 iteration of 4 x 16 tokens",
                 f"saves to {tmp_path / 's'} every 50 iterations and at the end"):
        assert said.count(fact) == 1
    said = train([*run, "--verbose"])
    assert len(re.findall(r"^  optim\.clip_grad \.+ 0\.25$", said, re.MULTILINE)) == 1
    assert "saves nothing: --save is not given" in said


def test_a_run_and_each_resume_begin_with_their_configuration(tmp_path: Path) -> None:
    """Without `iteration`, by which steps and evaluations are found."""
    run = [*TINY, "--mock-data", "--save", tmp_path / "s", "--load", tmp_path / "s", "--metrics-file", tmp_path / "m",
           "--train-iters", 4]
    train([*run, "--exit-interval", 2])
    train([*run, "--clip-grad", 0.5])
    found = [strict(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [line.get("iteration") for line in found if "save" not in line] == [None, 1, 2, None, 3, 4]
    first, second = (line for line in found if line.get("config"))
    for line in (first, second):
        assert abs(datetime.fromisoformat(line["began"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert (first["start"], second["start"]) == (0, 2) and "eval" not in first
    assert (first["values"]["optim"]["clip_grad"], second["values"]["optim"]["clip_grad"]) == (1.0, 0.5)
    assert first["world_size"] == 1 and first["device"] == "CPU" and first["parameters"] > 10_000
    assert second["values"] == open_checkpoint(tmp_path / "s").config


def test_a_complete_save_is_a_line_that_no_reader_takes_for_a_step(tmp_path: Path) -> None:
    said = train([*TINY, "--async-save", "--mock-data", "--save", tmp_path / "s", "--metrics-file", tmp_path / "m",
                  "--train-iters", 5, "--save-interval", 2])
    found = [line for line in map(strict, (tmp_path / "m").read_text().splitlines()) if "save" in line]
    assert [(line["step"], line["tag"]) for line in found] == [(n, f"global_step{n}") for n in (2, 4, 5)]
    assert said.count(" saved global_step") == 3 and len(steps(tmp_path / "m")) == 5
    for line in found:
        assert set(line) == {"save", "step", "tag", "bytes", "seconds"} and line["save"] is True
        assert line["bytes"] > 12 * 10_000 and 0 < line["seconds"] < 60


def test_the_sample_is_one_printable_line_and_can_be_read_back() -> None:
    for text in ("The end\n", "a\x00\x1b[2Jb\x7f", "\ufffd\ufffd x \ufffd", "it's \"so\" \\ é", ""):
        shown = printable(text)
        assert shown.isprintable() and "\ufffd" not in shown
        literal = shown.removesuffix(r" (\ufffd: bytes that are not UTF-8)")
        assert ast.literal_eval(literal) == text and (literal != shown) == ("\ufffd" in text)


def test_a_chart_shows_every_loss_at_its_step_and_is_not_flattened_by_the_beginning() -> None:
    records: list[dict[str, Any]] = [{"config": True}]
    records += [{"iteration": step, "lm_loss": 100.0 if step < 30 else 4.0 - step / 500} for step in range(1, 641)]
    records += [{"iteration": 640, "lm_loss": 3.0, "eval": True, "split": split} for split in ("validation", "test")]
    records += [{"iteration": 5, "lm_loss": math.nan}, {"save": True, "step": 640}]
    *rows, axis, steps_line, legend = loss_chart(records)
    assert len(rows) == CHART_ROWS and [row.split("|")[0].strip() for row in rows] == ["3.91", *[""] * 8, "2.73"]
    columns = list(zip(*(row.split("|")[1].ljust(CHART_COLUMNS) for row in rows), strict=True))
    assert all("".join(column).count("*") == 1 for column in columns[:-1]), "one mean for each column"
    heights = [column.index("*") for column in columns[:-1]]
    assert heights[:4] == [0] * 4 and heights == sorted(heights) and len(set(heights[4:])) == CHART_ROWS
    assert columns[-1].index("o") == round((3.91 - 3.0) / (3.91 - 2.73) * 9) and steps_line.endswith("640")
    assert loss_chart(records[:2]) == []


def test_the_last_lines_of_a_run_name_its_folder_and_continue_each_prompt(tmp_path: Path) -> None:
    said = train([*TINY, "--train-data", write_corpus(tmp_path / "corpus"), "--save", tmp_path / "a b", "--summary",
                  "--metrics-file", tmp_path / "m", "--train-iters", 3, "--sample-tokens", 9, "--sample-prompt", "one",
                  "two"])
    chart, first, second, after = said.split("\n\n")[-4:]
    assert "loss of training (*)" in chart and first.startswith("  one") and second.startswith("  two")
    assert f"generate_text.sh --load '{tmp_path / 'a b'}'" in after


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_gets_every_step_and_the_configuration(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    train([*TINY, "--mock-data", "--train-iters", 2, "--tensorboard-dir", tmp_path / "board", "--eval-interval", 2,
           "--eval-iters", 1, "--peak-tflops", 1, "--metrics-file", tmp_path / "m", "--clip-grad", 0.25])
    events = events_of(tmp_path / "board")
    found = [line for line in map(json.loads, (tmp_path / "m").read_text().splitlines()) if "samples_digest" in line]
    for key in STEP_SCALARS:
        curve = events.Scalars(f"train/{key}")
        assert [event.step for event in curve] == [1, 2]
        assert [event.value for event in curve] == pytest.approx([step[key] for step in found], rel=1e-6)
    assert [event.value for event in events.Scalars("train/memory_gib")] == pytest.approx(
        [step["max_memory_bytes"] / 2**30 for step in found])
    assert [event.step for event in events.Scalars("validation/lm_loss")] == [2]
    tokens = 4 * 16
    assert [event.step for event in events.Scalars("train/lm_loss_by_tokens")] == [tokens, 2 * tokens]
    assert [event.step for event in events.Scalars("validation/lm_loss_by_tokens")] == [2 * tokens]
    text, = events.Tensors("configuration/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "| optim.clip_grad | 0.25 |" in shown and "GPT-2 with" in shown
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["optim.clip_grad"].number_value == 0.25
    assert start.hparams["schedule.lr_decay_style"].string_value == "cosine"


def test_a_terminal_gets_a_progress_bar_and_a_file_does_not() -> None:
    argv = ["pretrain_gpt2.py", *TINY, "--mock-data", "--train-iters", "2"]
    for is_terminal in (True, False):
        stream = io.StringIO()
        with own_signals(), patch("sys.argv", argv), patch.object(stream, "isatty", lambda: is_terminal), \
                redirect_stdout(stream):
            pretrain_gpt2.main()
        assert ("step/s" in stream.getvalue()) == is_terminal


# ---- intervals ---------------------------------------------------------------------------------------------------


def tags(folder: Path) -> list[int]:
    return [int(tag.removeprefix("global_step")) for tag in tag_names(folder)]


def test_save_interval_0_saves_only_at_the_end_and_keep_last_keeps_the_newest(tmp_path: Path) -> None:
    for interval, keep, expected in ((0, [], [7]), (3, [], [3, 6, 7]), (2, ["--keep-last", 2], [6, 7])):
        folder = tmp_path / str(interval)
        train([*TINY, "--mock-data", "--train-iters", 7, "--save", folder, "--save-interval", interval, *keep])
        assert tags(folder) == expected
        assert (folder / "latest").read_text().strip() == "global_step7"


def test_exit_interval_leaves_after_a_divisible_step_with_a_save(tmp_path: Path) -> None:
    argv = [*TINY, "--mock-data", "--train-iters", 7, "--save", tmp_path / "s", "--load", tmp_path / "s",
            "--exit-interval", 3, "--metrics-file", tmp_path / "m", "--eval-interval", 100, "--eval-iters", 1]
    for expected in ([3], [3, 6], [3, 6, 7]):
        said = train(argv)
        assert tags(tmp_path / "s") == expected
        assert ("leaving after" in said) == (expected[-1] != 7)
    assert [step["iteration"] for step in steps(tmp_path / "m")] == [1, 2, 3, 4, 5, 6, 7]
    evaluated = [record["iteration"] for record in records(tmp_path / "m") if record.get("eval")]
    assert evaluated == [7, 7], "a run that leaves early is not at its end"
    for interval, last in ((2, 2), (0, 5)):  # without --save it just leaves
        train([*TINY, "--mock-data", "--train-iters", 5, "--exit-interval", interval, "--metrics-file",
               tmp_path / f"m{interval}"])
        assert steps(tmp_path / f"m{interval}")[-1]["iteration"] == last


def test_eval_interval_0_never_evaluates_and_train_iters_0_only_evaluates(tmp_path: Path) -> None:
    train([*TINY, "--mock-data", "--train-iters", 3, "--eval-interval", 0, "--metrics-file", tmp_path / "none"])
    assert not [r for r in records(tmp_path / "none") if r.get("eval")]
    train([*TINY, "--mock-data", "--train-iters", 0, "--eval-interval", 1, "--eval-iters", 1, "--metrics-file",
           tmp_path / "only"])
    assert [r["iteration"] for r in records(tmp_path / "only")] == [0, 0]
