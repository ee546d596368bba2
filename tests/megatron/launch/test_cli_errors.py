"""A bad flag, corpus, checkpoint or folder: one line that begins `error:`, and the exit code that says which."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain_gpt2
from data.indexed import IndexedCorpus
from data.writer import CorpusWriter
from megatron.checkpoint.reader import digest_lines, open_checkpoint, read_logical
from megatron.distributed import exit_codes
from tests.megatron.helpers import ROOT, TINY, own_signals, steps, train, write_corpus
from tests.megatron.launch.processes import environment

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


def command(argv: Sequence[object], ranks: int = 1) -> tuple[int, str]:
    """The same through the real command line."""
    launch = ["-m", "megatron.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launch, "pretrain_gpt2.py", *map(str, argv)], cwd=ROOT,
                          capture_output=True, text=True,
                          timeout=120, env=environment())
    return done.returncode, done.stderr


def check(result: tuple[int, str], code: int, *words: object) -> None:
    """One line, the code, and each of the words in it."""
    found, stderr = result
    lines = stderr.splitlines()
    assert found == code, stderr
    assert [line.startswith("error: ") for line in lines] == [True], stderr
    for word in words:
        assert str(word) in lines[0]


# ---- config: 2 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "words"), [
    (["--model-parallel-size", 2], ["1 ranks", "--model-parallel-size 2"]),
    (["--batch-size", 4, "--global-batch-size", 6], ["--global-batch-size 6", "--batch-size 4"]),
    (["--vocab-size", 200], ["--vocab-size 200", "257"]),
    (["--distributed-backend", "mpi"], ["--distributed-backend", "mpi"]),
    (["--distributed-backend", "nccl"], ["nccl", "GPU"]),
], ids=lambda value: " ".join(map(str, value)))
def test_a_bad_config_is_one_line_and_exit_2(argv: list[object], words: list[str], cli: Cli) -> None:
    check(cli([*TINY, "--mock-data", *argv]), 2, *words)


def test_no_text_at_all_is_a_config_error(cli: Cli) -> None:
    check(cli(TINY), 2, "--train-data", "--mock-data")


def test_a_tokenizer_file_that_is_named_and_absent_is_a_config_error_before_torch(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text " * 99)
    program = (
        "import sys, pretrain_gpt2; from megatron.distributed import exit_codes; "
        "code = exit_codes.run(pretrain_gpt2.main); sys.exit('torch' if 'torch' in sys.modules else code)")
    for kind, flag in (("sentencepiece", "--tokenizer-path"), ("gpt2", "--merge-file"), ("character", "--vocab-file")):
        done = subprocess.run([sys.executable, "-c", program, *TINY, "--train-data", text, "--tokenizer-type", kind,
                               flag, f"{tmp_path}/x"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        check((done.returncode, done.stderr), 2, f"{flag} {tmp_path}/x: no such file")


def test_bad_configs_end_the_real_commands_alike() -> None:
    check(command([*TINY, "--mock-data", "--lr", "-1"]), 2, "--lr")
    check(command([*TINY, "--mock-data", "--zero-stage", "7"], ranks=2), 2, "--zero-stage is 7")


# ---- data: 3 -----------------------------------------------------------------------------------------------------


def test_a_missing_corpus_is_one_line_and_exit_3(tmp_path: Path, cli: Cli) -> None:
    check(cli([*TINY, "--train-data", tmp_path / "nothing"]), 3, tmp_path / "nothing", "no file or folder")
    check(cli([*TINY, "--train-data", tmp_path / "nothing.jsonl"]), 3, tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
def test_a_damaged_corpus_is_one_line_and_exit_3(suffix: str, damage: str, tmp_path: Path, cli: Cli) -> None:
    file = Path(write_corpus(tmp_path / "corpus") + suffix)
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-3] if damage == "cut" else b"")
    check(cli([*TINY, "--train-data", tmp_path / "corpus"]), 3, file)


def test_a_corpus_too_short_for_a_sample_is_exit_3(tmp_path: Path, cli: Cli) -> None:
    with CorpusWriter(tmp_path / "c", vocab_size=257) as writer:
        writer.add_document([1, 2, 3])
    check(cli([*TINY, "--train-data", tmp_path / "c"]), 3, "17", "--seq-length")


def test_a_jsonl_line_that_is_no_json_is_exit_3_and_named(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n{"text": \n')
    check(cli([*TINY, "--train-data", tmp_path / "x.jsonl", "--data-cache-path", tmp_path / "cache"]), 3, "x.jsonl")


def corpus_with_id(prefix: Path, bad: int, *, facts: bool) -> Path:
    """Three documents; the third holds `bad` at offset 4. Without facts it looks like one of Megatron-LM's."""
    with CorpusWriter(prefix, dtype=np.dtype(np.int32)) as writer:
        for number in range(3):
            writer.add_document([7] * 4 + [bad if number == 2 else 8] + [9] * 60)
    if not facts:
        Path(f"{prefix}.json").unlink()
    assert IndexedCorpus(prefix).num_documents == 3
    return prefix


@pytest.mark.parametrize("facts", [True, False])
@pytest.mark.parametrize("bad", [257, 383, 100_000])
def test_an_id_outside_the_vocabulary_names_document_and_offset(bad: int, facts: bool, tmp_path: Path,
                                                                cli: Cli) -> None:
    """257 and 383 have rows in the padded table (384): they would train quietly."""
    corpus = corpus_with_id(tmp_path / "c", bad, facts=facts)
    check(cli([*TINY, "--train-data", corpus, "--split", "1,0,0"]), 3, f"{corpus}.bin", "document 2", "offset 4", bad,
          "257")


# ---- checkpoints: 4 ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of three steps, saved after the second and the third."""
    train([*TINY, "--mock-data", "--train-iters", 3, "--save", tmp_path / "s", "--save-interval", 2])
    return tmp_path / "s"


RUN = [*TINY, "--mock-data", "--train-iters", "3"]


def test_a_load_that_is_not_there_is_exit_4_even_when_save_is_fresh(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "empty").mkdir()
    for load in ("missing", "empty"):
        check(cli([*RUN, "--load", tmp_path / load]), 4, tmp_path / load)
        check(cli([*RUN, "--load", tmp_path / load, "--save", tmp_path / "fresh"]), 4, tmp_path / load)


def test_the_real_command_refuses_a_misspelt_load_on_one_and_on_two_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2):
        check(command([*RUN, "--load", tmp_path / "mispelt"], ranks), 4, tmp_path / "mispelt")


@pytest.mark.parametrize("exists", [False, True])
def test_a_load_equal_to_an_empty_save_starts_fresh(exists: bool, tmp_path: Path) -> None:
    if exists:
        (tmp_path / "s").mkdir()
    said = train([*RUN, "--load", tmp_path / "s", "--save", f"{tmp_path}/./s/"])
    assert "loaded" not in said and "saved global_step3" in said


def test_a_save_folder_whose_only_checkpoint_is_damaged_is_not_taken_for_empty(saved: Path, cli: Cli) -> None:
    shutil.rmtree(saved / "global_step2")
    (saved / "global_step3" / "manifest.json").unlink()
    check(cli([*RUN, "--load", saved, "--save", saved]), 4, "global_step3", "manifest.json")


def test_one_flipped_byte_of_any_file_is_exit_4_naming_the_file(saved: Path, cli: Cli) -> None:
    for file in sorted((saved / "global_step3").iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        check(cli([*RUN, "--load", saved]), 4, "global_step3", file.name)
        file.write_bytes(whole)
    assert cli([*RUN, "--load", saved]) == (0, "")


def test_a_damaged_newest_tag_makes_way_when_asked_and_is_replaced_in_time(saved: Path, tmp_path: Path,
                                                                           cli: Cli) -> None:
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


def test_a_save_folder_with_later_steps_is_pointed_out(saved: Path) -> None:
    """A fresh run beside an old one: its saves replace tags of the old one."""
    assert "holds global_step2, global_step3, later than iteration 0" in train([*RUN, "--save", saved])
    assert "later than" not in train([*RUN, "--load", saved, "--save", saved])


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


def test_another_schedule_is_refused_with_its_differences_and_two_flags_say_who_wins(saved: Path, cli: Cli,
                                                                                     tmp_path: Path) -> None:
    longer = [*TINY, "--mock-data", "--train-iters", 5, "--lr", 1e-3, "--load", saved, "--metrics-file", tmp_path / "m"]
    check(cli(longer), 2, "--lr 0.00015 in the checkpoint, 0.001 here", "--lr-decay-iters 3 in the checkpoint, 5 here",
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


def test_a_save_that_cannot_be_written_is_exit_7_before_the_first_step(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "file").write_text("")
    check(cli([*RUN, "--save", tmp_path / "file", "--metrics-file", tmp_path / "m"]), 7, "--save", tmp_path / "file")
    check(cli([*RUN, "--save", tmp_path / "no" / "parent", "--metrics-file", tmp_path / "m"]), 7, "--save",
          tmp_path / "no")
    assert not (tmp_path / "m").exists()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs a folder in which nobody can write, root neither")
def test_a_read_only_save_is_exit_7(cli: Cli) -> None:
    check(cli([*RUN, "--save", "/proc/checkpoints"]), 7, "--save", "/proc/checkpoints")
    check(command([*RUN, "--save", "/proc/checkpoints"]), 7, "--save", "/proc/checkpoints")


def test_a_metrics_file_or_tensorboard_folder_that_cannot_be_written_is_exit_7(tmp_path: Path, cli: Cli) -> None:
    check(cli([*RUN, "--metrics-file", tmp_path / "no" / "m"]), 7, "--metrics-file", tmp_path / "no" / "m")
    (tmp_path / "file").write_text("")
    check(cli([*RUN, "--tensorboard-dir", tmp_path / "file"]), 7, "--tensorboard-dir", tmp_path / "file")


def test_numbers_that_explode_end_with_exit_6_and_the_last_lines_are_valid_json(tmp_path: Path, cli: Cli) -> None:
    result = cli([*RUN[:-1], 50, "--lr", 1e30, "--clip-grad", 0, "--metrics-file", tmp_path / "m"])
    check(result, 6, "step 2: first in wte.weight")
    for line in (tmp_path / "m").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_second_job_on_the_same_save_is_refused(tmp_path: Path, cli: Cli) -> None:
    from megatron.checkpoint.commit import lock_save_root

    (tmp_path / "s").mkdir()
    with lock_save_root(tmp_path / "s"):
        check(cli([*RUN, "--save", tmp_path / "s"]), 2, "--save", "locked by")
