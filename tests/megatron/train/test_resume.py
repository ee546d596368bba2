"""A run that was interrupted goes on as if it had not been: the same metrics text, the same final checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import writer
from megatron.checkpoint.tags import tag_names
from megatron.distributed import exit_codes
from megatron.distributed.signals import StopListener
from megatron.errors import CheckpointError, ConfigError, StorageError
from megatron.train.loop import Trainer
from megatron.train.resume import RunCheckpoints
from tests.distributed import run_ranks
from tests.megatron.helpers import TINY, lines, steps, total_digest, train, train_all, write_corpus

STEPS = 6


def interrupted_after_every_step(rank: int, world: int, common: list[object], folder: Path) -> None:
    """One run in one go, and one that leaves after each step and is started again."""
    train([*common, "--save", folder / "whole", "--metrics-file", folder / "whole.jsonl"])
    again = [*common, "--save", folder / "parts", "--load", folder / "parts", "--metrics-file", folder / "parts.jsonl"]
    for _ in range(STEPS):
        train([*again, "--exit-interval", 1])


ROUNDED = ["--quantize-training", "--quantize-offset", 0, "--quantize-start-bits", 6, "--quantize-target-bits", 4,
           "--quantize-period", 2]
DROPPED = ["--progressive-layer-drop", "--pld-theta", 0.5]


@pytest.mark.parametrize("precision, tp, dp, accumulation, recomputes, more", [
    ("fp16", 2, 1, 4, True, ["--sequence-parallel"]), ("fp32", 2, 2, 1, False, []),
    ("bf16", 1, 2, 4, True, ["--fp8", *DROPPED, "--pld-gamma", 0.5, *ROUNDED, "--quantize-rounding", "stochastic",
                             "--quantize-mixed", "--quantize-change-ratio", 0.4])])
def test_a_run_interrupted_after_every_step_equals_one_that_was_not(
        precision: str, tp: int, dp: int, accumulation: int, recomputes: bool, more: list[object], tmp_path: Path,
) -> None:
    """Every grid, and every value of what must not matter to a resume; also in the middle of a bit schedule and of a
    blend, with blocks left out."""
    # The fp16 scale starts just above what fits and grows again soon: it moves both ways in six steps.
    flags = {"fp32": [], "bf16": ["--bf16"], "fp16": [
        "--fp16", "--initial-loss-scale", 2**17 * accumulation, "--loss-scale-window", 2, "--hysteresis", 2]}[precision]
    common = [*TINY, "--train-data", write_corpus(tmp_path / "corpus"), "--split", "8,1,1", "--train-iters", STEPS,
              *flags, "--model-parallel-size", tp, "--batch-size", 2, "--global-batch-size", 2 * accumulation * dp,
              *["--checkpoint-activations"] * recomputes, "--lr", 1e-3, "--warmup", 0.5, "--eval-interval", 4,
              "--eval-iters", 1, *more]
    run_ranks(interrupted_after_every_step, tp * dp, common, tmp_path, timeout=300)
    assert lines(tmp_path / "parts.jsonl") == lines(tmp_path / "whole.jsonl")
    scales = [step["loss_scale"] for step in steps(tmp_path / "whole.jsonl")]
    assert len(scales) == STEPS
    if precision == "fp16":  # or it would prove nothing about the scaler
        assert min(scales[1:]) < scales[0] and any(b > a for a, b in itertools.pairwise(scales)), scales
    assert total_digest(tmp_path / "parts") == total_digest(tmp_path / "whole")


def asked_to_stop(rank: int, world: int, argv: list[object], culprit: int, number: int, at: int) -> str:
    """A run whose rank `culprit` gets a signal while it is in step `at`, or (0) whose clock says that time is up."""
    taken = Trainer.train_step

    with pytest.MonkeyPatch.context() as patching:
        def signalled(trainer: Trainer, *args: Any) -> Any:
            if rank == culprit and trainer.engine.global_steps == at - 1:
                if number:
                    os.kill(os.getpid(), number)
                else:
                    patching.setattr(StopListener, "minutes_since_start", 90.0)
            return taken(trainer, *args)

        patching.setattr(Trainer, "train_step", signalled)
        return train(argv)


@pytest.mark.few(2)
@pytest.mark.parametrize(("world", "culprit", "number"),
                         [(1, 0, signal.SIGTERM), (2, 1, signal.SIGUSR1), (2, 1, signal.SIGINT), (2, 1, 0)])
def test_a_reason_to_stop_on_any_rank_saves_after_the_step_and_the_rest_is_the_same_text(
        world: int, culprit: int, number: int, tmp_path: Path) -> None:
    common = [*TINY, "--model-parallel-size", world, "--train-data", write_corpus(tmp_path / "corpus"),
              "--train-iters", STEPS]
    run_ranks(train_all, world, [[*common, "--save", tmp_path / "whole", "--metrics-file", tmp_path / "whole.jsonl"]])
    again = [*common, "--save", tmp_path / "s", "--load", tmp_path / "s", "--metrics-file", tmp_path / "m",
             "--exit-duration-in-mins", 60]
    said = run_ranks(asked_to_stop, world, again, culprit, number, 3)[0]
    why = {signal.SIGINT: "interrupted at step 3",
           0: "leaving after iteration 3 (--exit-duration-in-mins 60), saved"}.get(number, "preempted at step 3")
    assert why in said and (tmp_path / "s" / "latest").read_text().strip() == "global_step3"
    run_ranks(train_all, world, [again])
    assert lines(tmp_path / "m") == lines(tmp_path / "whole.jsonl")
    assert total_digest(tmp_path / "s") == total_digest(tmp_path / "whole")


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1),
                                     (signal.SIGUSR1, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)], ids=str)
def test_further_signals_change_nothing(numbers, tmp_path, monkeypatch):
    """They come during the step, and again during the save."""
    save, take_step, saves = RunCheckpoints._save, Trainer.train_step, list[None]()

    def signalled_step(trainer: Trainer, *args: Any) -> Any:
        if trainer.engine.global_steps == 1:
            for number in numbers:
                os.kill(os.getpid(), number)
        return take_step(trainer, *args)

    def signalled_save(*args: Any) -> None:
        for number in set(numbers) - {signal.SIGINT}:
            os.kill(os.getpid(), number)
        saves.append(save(*args))

    monkeypatch.setattr(Trainer, "train_step", signalled_step)
    monkeypatch.setattr(RunCheckpoints, "_save", signalled_save)
    try:
        said = train([*TINY, "--mock-data", "--train-iters", STEPS, "--save", tmp_path / "s"])
    except KeyboardInterrupt:
        pytest.fail("one Ctrl-C among other signals ended the run")
    why = "interrupted" if numbers[0] == signal.SIGINT else "preempted"
    assert f"{why} at step 2" in said and len(saves) == 1 and tag_names(tmp_path / "s") == ["global_step2"]


def interrupted_twice(rank: int, world: int, argv: list[object], where: str) -> int:
    """The exit code of a run in which Ctrl-C comes twice. In a process of its own, which may hear it in any thread."""
    def twice(*args: Any) -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(*((Trainer, "train_step") if where == "step" else (writer, "commit_tag")), twice)
        with pytest.raises(KeyboardInterrupt) as caught:
            train(argv)
    return exit_codes.exit_reason_of(caught.value).code


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_second_ctrl_c_ends_at_once_with_130_and_loses_nothing(where: str, tmp_path: Path) -> None:
    common = [*TINY, "--mock-data", "--train-iters", STEPS, "--save-interval", 1]
    again = [*common, "--save", tmp_path / "s", "--load", tmp_path / "s"]
    train([*common, "--save", tmp_path / "whole"])
    train([*again, "--exit-interval", 2])

    assert run_ranks(interrupted_twice, 1, again, where) == [130]
    assert tag_names(tmp_path / "s") == ["global_step1", "global_step2"]
    assert "loaded weights and optimizer of global_step2" in train(again)
    assert total_digest(tmp_path / "s") == total_digest(tmp_path / "whole")


# ---- going back, and which tag a run starts from -------------------------------------------------------------------

def tags_and_latest(root: Path) -> tuple[list[str], str]:
    return tag_names(root), (root / "latest").read_text().strip()


@pytest.mark.parametrize("how", ["step", "tag", "latest"])
def test_a_run_goes_back_and_the_next_start_goes_on_with_its_branch(how: str, tmp_path: Path) -> None:
    common = [*TINY, "--train-data", write_corpus(tmp_path / "corpus"), "--train-iters", STEPS, "--save-interval", 2]
    root = tmp_path / "s"
    train([*common, "--save", root])
    assert tags_and_latest(root) == ([f"global_step{step}" for step in (2, 4, 6)], "global_step6")
    back: list[object] = ["--save", root, "--load", root]
    if how == "step":
        back += ["--ckpt-step", 2]
    elif how == "tag":
        back[-1] = f"{root}:global_step2"
    else:
        (root / "latest").write_text("global_step2\n")
    # Another seed of the weights does not matter, another rate does: the branches hold other states.
    other = [*common, "--lr", 1e-2, "--override-lr-scheduler"]
    said = train([*other, *back, "--exit-interval", 4])
    assert "of global_step2 from" in said and "holds global_step4, global_step6, later than iteration 2" in said
    assert tags_and_latest(root) == ([f"global_step{step}" for step in (2, 4, 6)], "global_step4")
    assert "of global_step4 from" in train([*other, "--save", root, "--load", root])
    train([*other, "--save", tmp_path / "straight", "--load", f"{root}:global_step2"])
    assert total_digest(root) == total_digest(tmp_path / "straight")


def test_a_start_from_scratch_names_a_tag_that_is_gone_and_a_folder_may_have_a_colon_in_its_name(tmp_path):
    folder = tmp_path / "run:10"
    folder.mkdir()
    (folder / "latest").write_text("global_step9\n")
    again = [*TINY, "--mock-data", "--train-iters", 2, "--save", folder, "--load", folder]
    assert f"holds no checkpoint yet; {folder}/latest names global_step9, which is not there" in train(again)
    assert f"of global_step2 from {folder}" in train(again)


def test_a_tag_that_is_not_there_is_named(tmp_path: Path) -> None:
    common, root = [*TINY, "--mock-data", "--train-iters", 2], tmp_path / "s"
    train([*common, "--save", root])
    for flags, words in ((["--load", root, "--ckpt-step", 1], "--ckpt-step 1: .* holds global_step2"),
                         (["--load", f"{root}:global_step9"], "no tag global_step9 under .*, which holds global_st")):
        with pytest.raises(CheckpointError, match=words):
            train([*common, *flags])
    for flags, words in ((["--load", f"{root}:global_step2", "--ckpt-step", 2], "give one of them"),
                         (["--ckpt-step", 2], "--ckpt-step needs --load")):
        with pytest.raises(ConfigError, match=words):
            train([*common, *flags])


def test_a_finished_run_is_saved_where_another_folder_is_asked_for(tmp_path: Path) -> None:
    common = [*TINY, "--mock-data", "--train-iters", 2, "--load", tmp_path / "s", "--metrics-file", tmp_path / "m",
              "--eval-interval", 1, "--eval-iters", 1]
    train([*common, "--save", tmp_path / "s"])
    before = lines(tmp_path / "m"), total_digest(tmp_path / "s")
    assert "nothing to do" in train([*common, "--save", tmp_path / "s"])
    assert (lines(tmp_path / "m"), total_digest(tmp_path / "s")) == before, "it changes nothing where it is"
    said = train([*common, "--save", tmp_path / "copy"])
    assert "nothing to do" in said and "saved global_step2 to" in said
    assert total_digest(tmp_path / "copy") == total_digest(tmp_path / "s")
    assert "saved global" not in train([*common, "--save", tmp_path / "copy"])


def test_a_place_that_cannot_be_used_ends_the_run_before_its_text_is_tokenized(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some text " * 500)
    (tmp_path / "file").touch()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "ckpt.pt").touch()
    for flag, place, words in (("--save", "file/x", "Not a dir"), ("--load", "nowhere", "there is no such folder"),
                               ("--load", "foreign", "nanoGPT"),
                               ("--metrics-file", "file/m", "--metrics-file .* not a folder"),
                               ("--tensorboard-dir", "file/x", "--tensorboard-dir .* not a folder that can be ")):
        with pytest.raises((StorageError, CheckpointError), match=words):
            train([*TINY, "--train-data", tmp_path / "texts", flag, tmp_path / place])
    assert not (tmp_path / "texts.cache").exists()


def test_a_run_does_not_go_on_with_another_tokenizer_of_as_many_ids(tmp_path: Path) -> None:
    own, other = tmp_path / "own.txt", tmp_path / "other.txt"
    own.write_text("abcdef")
    other.write_text("uvwxyz")
    common = [*TINY, "--tokenizer-type", "CharacterLevelTokenizer", "--mock-data", "--save", tmp_path / "s", "--load",
              tmp_path / "s"]
    train([*common, "--vocab-file", own, "--train-iters", 1])
    with pytest.raises(CheckpointError, match="was trained with CharacterLevelTokenizer .* give its own"):
        train([*common, "--vocab-file", other, "--train-iters", 2, "--override-lr-scheduler"])
    assert "they know nothing of its ids" in train([*common, "--vocab-file", other, "--train-iters", 2, "--finetune"])
    own.rename(tmp_path / "moved.txt")
    shutil.rmtree(tmp_path / "s" / "global_step2")
    again = [*common, "--vocab-file", tmp_path / "moved.txt", "--train-iters", 3, "--override-lr-scheduler"]
    assert "loaded weights and optimizer" in train(again)


# ---- another training method -----------------------------------------------------------------------------------------

CHANGED_FLAGS = [*TINY, "--mock-data", "--lr", 1e-3, "--batch-size", 4, "--eval-interval", 0, "--train-iters", 5]
FROZEN = ["--optimizer", "onebit_adam", "--onebit-freeze-step", 2]


@pytest.mark.parametrize("before, after, said", [
    (ROUNDED, [*ROUNDED, "--quantize-target-bits", 3], "--quantize-target-bits 4 -> 3"),
    ([], DROPPED, "--progressive-layer-drop off -> on"),
    ([*DROPPED, *ROUNDED], ["--pld-theta", 0.4], "--progressive-layer-drop on -> off, --quantize-training on -> off"),
    (FROZEN, [*FROZEN, "--onebit-freeze-step", 3],
     "--onebit-freeze-step 2 -> 3 (no effect: the variance has been frozen since step 2)"),
    (["--optimizer", "onebit_adam", "--onebit-freeze-step", 3], FROZEN, "--onebit-freeze-step 3 -> 2"),
    ([*DROPPED, *ROUNDED, *FROZEN], [*DROPPED, *ROUNDED, *FROZEN], ""),
    (["--pld-theta", 0.5], ["--pld-theta", 0.4], ""),
    (["--global-batch-size", 8, "--rampup-batch-size", 4, 4, 8], ["--global-batch-size", 8],
     "--rampup-batch-size 4 4 8 -> off"),
])
def test_a_run_that_goes_on_otherwise_says_so(before, after, said, tmp_path):
    train([*CHANGED_FLAGS, *before, "--exit-interval", 4 if before == FROZEN else 2, "--save", tmp_path])
    text = train([*CHANGED_FLAGS, *after, "--load", tmp_path])
    assert [line for line in text.splitlines() if line.startswith(" changed: ")] == [f" changed: {said}"] * bool(said)
