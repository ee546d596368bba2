"""A tag of any layout goes on in any other: the same state to the bit after the load, the same losses but for rounding.

Every ordered pair of layouts is compared with the run that goes on in the layout that wrote the tag.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from megatron.errors import CheckpointError
from megatron.train.resume import RunCheckpoints
from megatron.zero.api import checkpoint_io
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, total_digest, train, write_corpus
from tests.wires import accelerator_side

BEFORE, AFTER, BATCH = 5, 20, 8


class Layout(NamedTuple):
    tp: int
    dp: int
    stage: int
    splits_positions: bool = False  # which no tag records
    shards: int | None = None  # neither does a tag record this

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.dp}z{self.stage}{'sp' * self.splits_positions}{self.shards or ''}"

    def flags(self) -> list[object]:
        return ["--model-parallel-size", self.tp, "--zero-stage", self.stage, "--batch-size", BATCH // self.dp,
                "--global-batch-size", BATCH, *["--sequence-parallel"] * self.splits_positions,
                *([] if self.shards is None else ["--zero-shard-group-size", self.shards])]


LAYOUTS = [Layout(*row) for row in ((1, 1, 0), (1, 1, 3), (1, 2, 0), (1, 2, 1), (1, 2, 2), (1, 2, 3), (1, 4, 1),
                                    (1, 4, 3), (2, 1, 0), (2, 1, 3), (2, 2, 1), (2, 2, 2), (2, 2, 3), (4, 1, 0),
                                    (2, 2, 2, True), (4, 1, 0, True), (1, 4, 3, False, 2))]
SAMPLE = [Layout(1, 2, 3), Layout(2, 1, 1), Layout(2, 1, 1, True)]


def flags(corpus: str, layout: Layout) -> list[object]:
    return [*TINY, *NO_DROPOUT, "--train-data", corpus, "--train-iters", BEFORE + AFTER, "--lr", 1e-3, *layout.flags()]


def written_by(rank: int, world: int, corpus: str, layout: Layout, folder: Path) -> None:
    train([*flags(corpus, layout), "--save", folder / f"{layout}", "--exit-interval", BEFORE])


def loaded_by(rank: int, world: int, corpus: str, layout: Layout, others: list[Layout], folder: Path) -> list[str]:
    """Go on from the tag of each of the others; what was loaded is saved at once, before a step."""
    said = []
    resume = RunCheckpoints.resume
    for other in others:
        def and_save(checkpoints: RunCheckpoints, engine: Any, data: str, other: Layout = other) -> Any:
            state = resume(checkpoints, engine, data)
            engine.save_checkpoint(folder / f"{other}-{layout}")
            return state

        with patch.object(RunCheckpoints, "resume", and_save):
            said.append(train([*flags(corpus, layout), "--load", folder / f"{other}", "--metrics-file",
                               folder / f"{other}-{layout}.jsonl"]))
    return said


def interrupted(rank: int, world: int, corpus: str, layout: Layout, folder: Path) -> None:
    run = [*TINY, *NO_DROPOUT, "--train-data", corpus, "--train-iters", 4, "--lr", 1e-3, *layout.flags()]
    train([*run, "--save", folder / "whole"])
    train([*run, "--save", folder / "parts", "--exit-interval", 2])
    train([*run, "--save", folder / "parts", "--load", folder / "parts"])


def test_of_replicas_of_shards_the_first_saves_and_all_resume_bit_for_bit(tmp_path: Path) -> None:
    run_ranks(interrupted, 4, write_corpus(tmp_path / "corpus"), Layout(1, 4, 2, shards=2), tmp_path)
    assert total_digest(tmp_path / "parts") == total_digest(tmp_path / "whole")
    sizes = [(tmp_path / f"whole/global_step4/rank{rank}.safetensors").stat().st_size for rank in range(4)]
    assert max(sizes[2:]) < 20_000 < min(sizes[:2]), "random streams of all ranks, weights of the first two"


def check(layouts: list[Layout], folder: Path) -> None:
    corpus = write_corpus(folder / "corpus")
    for layout in layouts:
        run_ranks(written_by, layout.tp * layout.dp, corpus, layout, folder)
    for asked in layouts:
        said = run_ranks(loaded_by, asked.tp * asked.dp, corpus, asked, layouts, folder, timeout=600)[0]
        for written, text in zip(layouts, said, strict=True):
            relaid = [line for line in text.splitlines() if line.startswith(" resharded: ")]
            assert len(relaid) == (written[:3] != asked[:3]), text
            assert all(f"{key} {was} -> {now}" in relaid[0] for key, was, now
                       in zip(("tp", "dp", "zero_stage"), written, asked) if was != now)
    for written, asked in itertools.product(layouts, layouts):
        # Rounding of sums in another order, enlarged by 20 steps of Adam; equal layouts are compared as text.
        close = 1e-4 if written.tp != asked.tp else 5e-5 if written.dp != asked.dp else 1e-5
        name = f"{written}-{asked}"
        assert total_digest(folder / name) == total_digest(folder / f"{written}"), name
        expected, found = (steps(folder / f"{written}-{layout}.jsonl") for layout in (written, asked))
        assert len(found) == AFTER
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["samples_digest"] == theirs["samples_digest"]
            assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], abs=close, rel=0), name


def test_a_tag_goes_on_in_another_layout(tmp_path: Path) -> None:
    check(SAMPLE, tmp_path)


@pytest.mark.slow
def test_a_tag_of_each_layout_goes_on_in_each_other(tmp_path: Path) -> None:
    check(LAYOUTS, tmp_path)


PRECISIONS: dict[str, list[object]] = {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16", "--initial-loss-scale", 1024]}


@pytest.mark.parametrize(("written", "asked"), [("fp32", "bf16"), ("bf16", "fp16")])
def test_another_precision_is_said_explicitly_and_keeps_masters_and_moments(written, asked, tmp_path):
    common = [*TINY, *NO_DROPOUT, "--mock-data", "--train-iters", 6]
    train([*common, *PRECISIONS[written], "--save", tmp_path / "s", "--exit-interval", 3, "--loss-scale-window", 2])
    again = [*common, *PRECISIONS[asked], "--load", tmp_path / "s", "--metrics-file", tmp_path / "m"]
    with pytest.raises(CheckpointError, match=f"precision {written} in the checkpoint, {asked} here.*--load-precision"):
        train(again)
    assert not (tmp_path / "m").exists()
    resume = RunCheckpoints.resume

    def and_save(checkpoints: RunCheckpoints, engine: Any, data: str) -> Any:
        state = resume(checkpoints, engine, data)
        engine.save_checkpoint(tmp_path / "loaded")
        return state

    with patch.object(RunCheckpoints, "resume", and_save):
        said = train([*again, "--load-precision-change"])
    assert total_digest(tmp_path / "loaded") == total_digest(tmp_path / "s")
    assert f" resharded: precision {written} -> {asked}" in said
    assert ("the loss scale starts again at 1024" in said) == (asked == "fp16")
    found = steps(tmp_path / "m")
    assert [step["iteration"] for step in found] == [4, 5, 6]
    assert found[0]["loss_scale"] == (1024 if asked == "fp16" else 1)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """By the accelerator's ways, and with random streams of CUDA's kind: 16 bytes, of seed and offset."""
    captured = checkpoint_io.capture_rng

    def with_cuda() -> dict[str, object]:
        state, stream = captured(), torch.arange(16, dtype=torch.uint8)
        return {**state, "cuda": stream, "tracker": {name: stream for name in state["tracker"]}}

    with accelerator_side(), patch.object(checkpoint_io, "capture_rng", with_cuda):
        yield


@pytest.mark.parametrize("written_on_gpu, precision, words", [(True, "bf16", "saved on a GPU, now on the CPU"),
                                                              (False, "fp16", "saved on the CPU, now on a GPU")])
def test_a_16_bit_tag_goes_on_on_the_other_kind_of_device_and_one_line_says_what_starts_anew(
        written_on_gpu: bool, precision: str, words: str, tmp_path: Path) -> None:
    common = [*TINY, *NO_DROPOUT, *PRECISIONS[precision], "--mock-data", "--train-iters", 6]
    train([*common, "--metrics-file", tmp_path / "whole"])
    with as_on_a_gpu() if written_on_gpu else nullcontext():
        train([*common, "--save", tmp_path / "s", "--exit-interval", 3])
    with nullcontext() if written_on_gpu else as_on_a_gpu():
        said = train([*common, "--load", tmp_path / "s", "--metrics-file", tmp_path / "m"])
    assert [line for line in said.splitlines() if "random" in line and "tokens" not in line] == [
        f" random streams start from the seed: {words}, which draws other numbers"]
    assert " resharded: " not in said
    found, expected = steps(tmp_path / "m"), steps(tmp_path / "whole")[3:]
    assert [step["loss_scale"] for step in found] == [step["loss_scale"] for step in expected]
    # 16-bit weights of three steps, rounded elsewhere.
    assert [step["lm_loss"] for step in found] == pytest.approx([step["lm_loss"] for step in expected], abs=2e-3)


def test_a_resume_warns_of_another_global_batch(tmp_path: Path) -> None:
    common = [*TINY, "--mock-data", "--save", tmp_path, "--load", tmp_path, "--lr-decay-iters", 9]
    train([*common, "--train-iters", 1, "--batch-size", 4])
    warning = " warning: the global batch is 4 in the checkpoint, 2 here: --global-batch-size 4 keeps it"
    assert warning in train([*common, "--train-iters", 2, "--batch-size", 2])
    assert "the global batch" not in train([*common, "--train-iters", 3, "--batch-size", 1, "--global-batch-size", 2])
