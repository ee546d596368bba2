"""A bad flag, corpus, checkpoint or folder: one line that begins `error:`, and the exit code that says which."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain_gpt2
from data.writer import CorpusWriter
from megatron.checkpoint.reader import digest_lines, open_checkpoint, read_logical
from megatron.distributed import exit_codes
from tests.megatron.helpers import TINY, own_signals, steps, train, write_corpus
from tests.megatron.launch.processes import python

Cli = Callable[[Sequence[object]], tuple[int, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """The program's outermost call in this process: (exit code, its stderr). What a run holds it gives back when it
    ends, not when Python looks for garbage."""
    def call(argv: Sequence[object]) -> tuple[int, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt2.py", *map(str, argv)])
        with own_signals():
            code = exit_codes.run(pretrain_gpt2.main)
        return code, capfd.readouterr().err
    gc.disable()
    yield call
    gc.enable()


def check(result: tuple[int, str], code: int, *words: object) -> None:
    """One line, the code, and each of the words in it."""
    found, stderr = result
    lines = stderr.splitlines()
    assert found == code, stderr
    assert [line.startswith("error: ") for line in lines] == [True], stderr
    for word in words:
        assert str(word) in lines[0]


# ---- one table of all kinds ---------------------------------------------------------------------------------------

MOCK = "--mock-data "
WRONG = [
    (MOCK + "--model-parallel-size 2", 2, "number of ranks, 1", "--model-parallel-size 2"),
    (MOCK + "--batch-size 4 --global-batch-size 6", 2, "--global-batch-size 6", "--batch-size 4"),
    (MOCK + "--vocab-size 200", 2, "--vocab-size 200", "257"),
    (MOCK + "--distributed-backend mpi", 2, "--distributed-backend", "mpi"),
    (MOCK + "--distributed-backend nccl", 2, "nccl", "GPU"),
    ("", 2, "--train-data", "--mock-data"),
    ("--train-data {}/nothing", 3, "{}/nothing", "no file or folder"),
    ("--train-data {}/nothing.jsonl", 3, "{}/nothing.jsonl"),
    ("--train-data {}/bad.jsonl --data-cache-path {}/cache", 3, "bad.jsonl"),
    ("--train-data {}/short", 3, "17", "--seq-length"),
    ("--train-data {}/ids --split 1,0,0", 3, "{}/ids.bin", "document 2", "offset 4", "383", "257"),
    ("--train-data {}/cut", 3, "{}/cut.bin"),
    ("--train-data {}/mixture.yaml --split 1,0,0", 3, "--train-data: {}/fine", "max_epochs is 0.1", "read at most"),
    *((f"{MOCK}--load {{}}/{name}{more}", 4, "{}/" + name)
      for name in ("missing", "folder") for more in ("", " --save {}/fresh")),
    (MOCK + "--save {}/file --metrics-file {}/m", 7, "--save", "{}/file"),
    (MOCK + "--save {}/file/deeper --metrics-file {}/m", 7, "--save", "{}/file"),
    (MOCK + "--metrics-file {}/file/m", 7, "--metrics-file", "{}/file"),
    (MOCK + "--tensorboard-dir {}/file", 7, "--tensorboard-dir", "{}/file"),
]
"""Flags, exit code and words of the line; {} is a folder."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "folder").mkdir()
    (folder / "file").touch()
    (folder / "bad.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with CorpusWriter(folder / "short", vocab_size=257) as writer:
        writer.add_documents([1, 2, 3], [3])
    with CorpusWriter(folder / "ids", dtype=np.dtype(np.int32)) as writer:
        for number in range(3):
            writer.add_documents([7] * 4 + [383 if number == 2 else 8] + [9] * 60, [65])
    (folder / "ids.json").unlink()  # like a corpus of Megatron-LM's; the padded table has a row 383
    (folder / "mixture.yaml").write_text(f"sources: [{{name: {write_corpus(folder / 'fine')}, max_epochs: 0.1}}]")
    cut = Path(write_corpus(folder / "cut") + ".bin")
    cut.write_bytes(cut.read_bytes()[:-3])
    return folder


@pytest.mark.parametrize(("flags", "code", "words"), [(flags, code, words) for flags, code, *words in WRONG])
def test_what_is_wrong_is_one_line_and_its_code(flags: str, code: int, words: list[str], place: Path, cli: Cli) -> None:
    check(cli([*TINY, "--train-iters", 3, *flags.replace("{}", str(place)).split()]), code,
          *(word.replace("{}", str(place)) for word in words))
    assert not (place / "m").exists()


# ---- config: 2 ---------------------------------------------------------------------------------------------------


def test_a_tokenizer_file_that_is_named_and_absent_is_a_config_error_before_torch(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text " * 99)
    program = (
        "import sys, pretrain_gpt2; from megatron.distributed import exit_codes; "
        "code = exit_codes.run(pretrain_gpt2.main); sys.exit('torch' if 'torch' in sys.modules else code)")
    for kind, flag in (("sentencepiece", "--tokenizer-path"), ("gpt2", "--merge-file"), ("character", "--vocab-file")):
        done = python("-c", program, *TINY, "--train-data", text, "--tokenizer-type", kind, flag, f"{tmp_path}/x")
        check((done.returncode, done.stderr), 2, f"{flag} {tmp_path}/x: no such file")


# ---- checkpoints: 4 ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of three steps, saved after the second and the third."""
    train([*TINY, "--mock-data", "--train-iters", 3, "--save", tmp_path / "s", "--save-interval", 2])
    return tmp_path / "s"


RUN = [*TINY, "--mock-data", "--train-iters", "3"]


def test_a_save_folder_whose_only_checkpoint_is_damaged_is_not_taken_for_empty(saved: Path, cli: Cli) -> None:
    shutil.rmtree(saved / "global_step2")
    (saved / "global_step3" / "manifest.json").unlink()
    check(cli([*RUN, "--load", saved, "--save", saved]), 4, "global_step3", "manifest.json")


def test_a_damaged_newest_tag_makes_way_when_asked_and_is_replaced_in_time(saved, tmp_path, cli):
    expected = list(digest_lines(open_checkpoint(saved)))[-1]
    shard = saved / "global_step3" / "rank0.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    again = [*RUN, "--load", saved, "--save", saved, "--keep-last", 1, "--metrics-file", tmp_path / "m"]
    check(cli(again), 4, "global_step3", shard.name)
    asked = [*RUN, "--load", saved, "--ckpt-step", 3]
    check(cli(asked), 4, "global_step3", shard.name)
    code, stderr = cli([*asked, "--resume-fallback"])
    assert code == 0 and stderr.count("warning: tag global_step3: ") == stderr.count("older tag, global_step2") == 1
    code, stderr = cli([*again, "--resume-fallback"])
    assert code == 0 and stderr.count("falling back to an older tag") == 1 and shard.name in stderr
    assert [step["iteration"] for step in steps(tmp_path / "m")] == [3]
    assert list(digest_lines(open_checkpoint(saved)))[-1] == expected
    assert not (saved / "global_step2").exists(), "--keep-last counts again"


def test_what_an_interrupted_save_left_is_removed_at_the_next_start_with_one_line(saved: Path, cli: Cli) -> None:
    (saved / ".staging-global_step4-dead").mkdir()
    (saved / "global_step3").rename(saved / ".aside-global_step3")
    code, stderr = cli([*RUN, "--load", saved, "--save", saved])
    assert code == 0 and len(stderr.splitlines()) == 2
    assert "restoring" in stderr and "removing" in stderr
    assert sorted(os.listdir(saved)) == [".lock", "global_step2", "global_step3", "latest", "zero_to_fp32.py"]


def test_another_model_is_refused_with_every_differing_field(saved: Path, cli: Cli) -> None:
    other = ["--num-layers", 3, "--hidden-size", 64, "--num-attention-heads", 8, "--max-position-embeddings", 32,
             "--seq-length", 8, "--bf16"]
    check(cli([*RUN, *other, "--load", saved]), 4, "--num-layers 2 in the checkpoint, 3 here",
          "--hidden-size 32 in the checkpoint, 64 here",
          "--num-attention-heads 4 in the checkpoint, 8 here",
          "--max-position-embeddings 16 in the checkpoint, 32 here",
          "precision fp32 in the checkpoint, bf16 here", "--seq-length 16 in the checkpoint, 8 here")
    check(cli([*RUN, "--vocab-size", 300, "--load", saved]), 4, "--vocab-size 257 in the checkpoint, 300 here")
    check(cli([*RUN, *other, "--load", saved, "--finetune"]), 4, "--num-layers 2 in the checkpoint, 3 here")


# ---- what the flags of loading and saving mean ---------------------------------------------------------------------


def test_another_schedule_is_refused_with_its_differences_and_two_flags_say_who_wins(saved, cli, tmp_path):
    longer = [*TINY, "--mock-data", "--train-iters", 5, "--lr", 1e-3, "--load", saved, "--metrics-file", tmp_path / "m"]
    check(cli(longer), 2, "--lr 0.00015 in the checkpoint, 0.001 here", "--train-iters 3 in the checkpoint, 5 here",
          "--override-lr-scheduler", "--use-checkpoint-lr-scheduler")
    assert not (tmp_path / "m").exists()
    train([*longer, "--override-lr-scheduler"])
    train([*longer, "--use-checkpoint-lr-scheduler"])
    rates = [step["learning_rate"] for step in steps(tmp_path / "m")]
    assert rates[:2] == pytest.approx([1e-3 * (1 + np.cos(np.pi * k / 5)) / 2 for k in (3, 4)])
    assert rates[2:] == [0.0, 0.0], "the checkpoint's schedule has ended at step 3"


def test_finetune_takes_the_weights_alone_and_starts_at_iteration_0(saved: Path, tmp_path: Path) -> None:
    said = train([*TINY, "--mock-data", "--train-iters", 1, "--lr", 1e-3, "--lr-decay-style", "constant", "--bf16",
                  "--seq-length", 8,
                  "--load", saved, "--finetune", "--save", tmp_path / "tuned", "--metrics-file", tmp_path / "m"])
    assert "loaded weights of global_step3" in said
    (step,) = steps(tmp_path / "m")
    assert (step["iteration"], step["consumed_samples"], step["learning_rate"]) == (1, 4, 1e-3)
    # At learning rate 0 the weights pass through untouched, and the moments are those of a first step.
    train([*TINY, "--mock-data", "--train-iters", 1, "--lr", 0, "--load", saved, "--finetune", "--save",
           tmp_path / "still"])
    assert digests(tmp_path / "still")["weight"] == digests(saved)["weight"]
    assert digests(tmp_path / "still")["exp_avg"] != digests(saved)["exp_avg"]


def digests(folder: Path) -> dict[str, list[str]]:
    """Kind of state -> the digests of its tensors in the newest checkpoint."""
    found: dict[str, list[str]] = {}
    for line in list(digest_lines(open_checkpoint(folder)))[:-1]:
        value, kind, *_ = line.split()
        found.setdefault(kind, []).append(value)
    return found


def test_no_load_optim_keeps_the_position_and_starts_the_moments_anew(saved: Path, tmp_path: Path) -> None:
    said = train([*TINY, "--mock-data", "--train-iters", 4, "--override-lr-scheduler", "--warmup", 1, "--lr", 1e-3,
                  "--load", saved,
                  "--no-load-optim", "--save", tmp_path / "t", "--metrics-file", tmp_path / "m"])
    assert "without optimizer" in said
    (step,) = steps(tmp_path / "m")
    assert (step["iteration"], step["consumed_samples"], step["learning_rate"]) == (4, 16, pytest.approx(1e-3))
    # The moments are those of a first step: a tenth of the gradient, which was clipped to norm 1.
    checkpoint = open_checkpoint(tmp_path / "t")
    squares = sum(float(read_logical(checkpoint, "exp_avg", name, 0,
                                     math.prod(checkpoint.shape("exp_avg", name))).double().square().sum())
                  for name in checkpoint.names("exp_avg"))
    assert math.sqrt(squares) == pytest.approx(0.1 * min(1.0, step["grad_norm"]), rel=1e-5)


def test_a_checkpoint_without_optimizer_is_refused_unless_told_to_go_on_without(tmp_path: Path, cli: Cli) -> None:
    train([*RUN, "--save", tmp_path / "s", "--no-save-optim"])
    assert set(digests(tmp_path / "s")) == {"weight"}
    longer = [*TINY, "--mock-data", "--train-iters", 4, "--override-lr-scheduler", "--load", tmp_path / "s"]
    check(cli(longer), 4, "no optimizer state", "--no-load-optim", "--finetune")
    for flag in ("--no-load-optim", "--finetune"):
        assert cli([*longer, flag]) == (0, "")


def test_random_streams_carry_over_unless_they_are_not_saved_or_not_loaded(saved: Path, tmp_path: Path) -> None:
    """Step 3 again, from step 2: with the streams it is the same text, without them dropout draws other masks."""
    def third(*flags: object, load: Path = saved) -> dict[str, Any]:
        part = tmp_path / f"part{len(list(tmp_path.iterdir()))}"
        shutil.copytree(load / "global_step2", part / "global_step2")
        (part / "latest").write_text("global_step2\n")
        train([*RUN, "--load", part, *flags, "--metrics-file", tmp_path / "m"])
        return steps(tmp_path / "m")[-1]

    train([*RUN, "--metrics-file", tmp_path / "m"])
    whole = steps(tmp_path / "m")[-1]
    assert third() == whole
    other = third("--no-load-rng")
    assert other["lm_loss"] != whole["lm_loss"] and other["samples_digest"] == whole["samples_digest"]
    train([*RUN, "--save", tmp_path / "norng", "--save-interval", 2, "--no-save-rng"])
    assert third(load=tmp_path / "norng")["lm_loss"] != whole["lm_loss"]
    assert "random streams" in train([*RUN[:-1], 4, "--override-lr-scheduler", "--load", tmp_path / "norng"])


def test_another_corpus_is_a_warning_and_the_position_carries_over(saved: Path, tmp_path: Path) -> None:
    said = train([*TINY, "--train-data", write_corpus(tmp_path / "corpus"), "--train-iters", 4,
                  "--override-lr-scheduler", "--load", saved,
                  "--metrics-file", tmp_path / "m"])
    assert said.count("another corpus") == 1
    assert steps(tmp_path / "m")[0]["consumed_samples"] == 16
    said = train([*RUN[:-1], 4, "--seed", 5, "--override-lr-scheduler", "--load", saved])
    assert "--seed is 1234 in the checkpoint, 5 here: the order of the samples is another;" in said


# ---- storage: 7, numerics: 6 -------------------------------------------------------------------------------------


def test_numbers_that_explode_end_with_exit_6_and_the_last_lines_are_valid_json(tmp_path: Path, cli: Cli) -> None:
    result = cli([*RUN[:-1], 50, "--lr", 1e30, "--clip-grad", 0, "--metrics-file", tmp_path / "m"])
    check(result, 6, "step 2: first in wte.weight")
    for line in (tmp_path / "m").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
