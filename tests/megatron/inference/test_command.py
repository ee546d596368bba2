"""`python -m megatron.generate` as it is typed."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from data.storage import DataError
from data.tokenizer import ByteLevelTokenizer
from megatron.checkpoint.cli import main as convert
from megatron.errors import CheckpointError, ConfigError
from megatron.inference import load
from megatron.inference.cli import main
from tests.megatron.helpers import train

FLAGS = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
         "--tokenizer-type ByteLevelTokenizer --mock-data --train-iters 2 --eval-interval 0 --batch-size 2 --bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("run")
    train([*FLAGS.split(), "--save", made])
    yield made


def said(*argv: object, stdin: str = "") -> tuple[str, str]:
    """(standard output, standard error)"""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "stdin", io.StringIO(stdin)), \
            patch("megatron.distributed.process_group.shutdown"):
        assert main([*map(str, argv)]) == 0
    return out.getvalue(), err.getvalue()


def objects(*argv: object, **more: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(*argv, "--jsonl", **more)[0].splitlines()]


def test_answers_come_in_the_order_of_the_prompts_however_many_run_at_a_time(folder: Path) -> None:
    prompts = ["a", "bb bb", "ccc", "d" * 20]
    typed = ["--load", folder, *prompts, "--max-new-tokens", 7, "--num-samples", 2, "--dtype", "fp32"]
    found = [without_logprobs(objects(*typed, "--batch-size", size)) for size in (1, 3, 8)]
    assert found[0] == found[1] == found[2]
    assert [answer["prompt"] for answer in found[0]] == [prompt for prompt in prompts for _ in range(2)]
    for answer in found[0]:
        assert len(answer["tokens"]) == 7 or answer["ended"] == "eod"
        assert answer["text"] == bytes(answer["tokens"]).decode("utf-8", "replace")


def without_logprobs(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Their last digits are of the batch."""
    assert all(len(answer.pop("logprobs")) == len(answer["tokens"]) for answer in answers)
    return answers


def test_a_prompt_that_is_too_long_is_refused_before_the_first_answer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"one\n\n{'x' * 33}\n")
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(ConfigError, match=r"a\.txt, line 3: a prompt of 33 tokens"):
        main(["--load", str(folder), "--file", str(tmp_path / "a.txt"), "--batch-size", "1"])
    assert out.getvalue() == ""
    with pytest.raises(ConfigError, match="prompt 2 of the command line: a prompt of 33"):
        said("--load", folder, "x", "x" * 33)
    with pytest.raises(ConfigError, match="standard input, line 2: a prompt of 33"):
        said("--load", folder, stdin=f"\n{'x' * 33}\n")
    assert objects("--load", folder, "x" * 33, "--past-the-end", "slide", "--max-new-tokens", 2)


def test_prompts_come_from_a_file_or_standard_input_and_blank_lines_are_counted(folder: Path, tmp_path: Path) -> None:
    typed = ["--load", folder, "--greedy", "--max_new_tokens", 3]
    expected = objects(*typed, "one", "two")
    assert objects(*typed, stdin="one\n\ntwo") == expected
    for name, text in (("a.txt", "one\r\n\n  \ntwo"), ("a.jsonl", '{"prompt": "one"}\n\n \n{"text": "two"}\n')):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        out, err = said(*typed, "--jsonl", "--file", tmp_path / f"{name}.gz")
        assert [json.loads(line) for line in out.splitlines()] == expected
        assert err.count(f"note: {tmp_path}/{name}.gz: 2 blank lines skipped") == 1


def test_a_file_of_no_prompts_is_refused(folder: Path, tmp_path: Path) -> None:
    for name, content, words in (
            ("a.txt", b"one\n\xff\n", r"a\.txt, line 2: not UTF-8 text"), ("a.txt", b"", "the file is empty"),
            ("a.jsonl", b'{"text": "a"}\n[]', "line 2: expected a JSON object"),
            ("a.txt.gz", gzip.compress(b"one" * 99, mtime=0)[:-9], "cannot read")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=words):
            said("--load", folder, "--file", tmp_path / name)
    stdin = io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), "utf-8")
    with pytest.raises(DataError, match="input, line 2: not UTF-8 text .*0xff"), patch.object(sys, "stdin", stdin):
        main(["--load", str(folder), "--jsonl"])


def test_nothing_of_what_stops_an_answer_is_printed_before_it_is_known(folder: Path) -> None:
    typed = ["--load", folder, "--max-new-tokens", 30, "hello", "--batch-size", 1, "--dtype", "fp32"]
    for seed in range(20):
        (whole,) = objects(*typed, "--seed", seed)
        stop = next((whole["text"][place : place + 3] for place in range(3, len(whole["text"]) - 3)
                     if whole["text"][place : place + 3].isascii()), None)
        if stop is not None:
            before = whole["text"].split(stop)[0]
            assert said(*typed, "--seed", seed, f"--stop={stop}")[0] == f"hello{before}\n"
            (cut,) = objects(*typed, "--seed", seed, f"--stop={stop}")
            assert cut["text"] == before and cut["ended"] == "stop"
            return
    raise AssertionError("no text to stop at")


def test_what_runs_is_said_beside_the_text(folder: Path) -> None:
    assert re.search(r"in bf16, ByteLevelTokenizer \w+ \(257 ids\), loaded in",
                     said("--load", folder, "x", "--max-new-tokens", 1)[1])
    assert "global_step2 of" in said("--load", folder, "--ckpt-step", 2, "x", "--max-new-tokens", 1)[1]
    with pytest.raises(CheckpointError, match="no checkpoint of it"):
        said("--load", folder, "--ckpt-step", 3, "x")
    assert "in fp32" in said("--load", f"{folder}:global_step2", "x", "--max-new-tokens", 1, "--dtype", "fp32")[1]


REFUSED = [
    (["x"], "give one of --load and --load-hf"), (["--load", "a", "--load-hf", "b"], "give one of"),
    (["--load", "a", "x", "--file", "b"], "give one of them"), (["--load", "a", "--file", "b"], "no such file"),
    (["--load", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"), (["--load", "a", "--nonsense"], "--nonsense"),
    (["--load", "a", "--temperature", "0", "x"], "--greedy takes the likeliest"),
    (["--load", "a", "--model-parallel-size", "2"], "needs as many ranks"), (["--load", "a", "--stop", ""], "--stop"),
    (["--load-hf", "a", "--ckpt-step", "2"], "--ckpt-step goes with --load"),
    (["--load", "a", "--interactive", "x"], "prompts on the command line and --interactive"),
    (["--load", "a", "--interactive", "--jsonl"], "for a person"),
    (["--load", "a", "x", "--fp16", "--dtype", "fp32"], "--fp16 and --fp32: give one precision"),
    (["--load", "a", "--genfile", "x", "--file", "y"], "without a prompt: leave out --file"),
    (["--load", "a", "x", "--output", "/no/where"], "--output /no/where: /no is no folder"),
    (["--load", "a", "x", "--pipeline-model-parallel-size", "2"], "there is no pipeline parallelism"),
    (["--load", "a", "x", "--num-samples", "-1"], "--num-samples is -1"),
]


def test_what_cannot_be_is_refused_in_words() -> None:
    for argv, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            main(argv)


def test_a_hugging_face_folder_says_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    assert convert(["convert", str(folder), "--output", str(hf)]) == 0
    fast = json.loads((hf / "tokenizer.json").read_text())
    letters = [*fast["model"]["vocab"]]
    typed = ["--load-hf", hf, "x", "--max-new-tokens", 1]
    (hf / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="50257 of GPT2BPETokenizer"):
        said(*typed)
    assert "assumed" not in said(*typed, "--tokenizer-type", "ByteLevelTokenizer")[1]
    with patch.object(load, "build_tokenizer", lambda *_: ByteLevelTokenizer()):
        assert "(assumed: nothing beside the weights says which it is), loaded" in said(*typed)[1]
    fast["model"] = {**fast["model"], "type": "Unigram"}
    (hf / "tokenizer.json").write_text(json.dumps(fast))
    with pytest.raises(DataError, match="its model is Unigram.*; give the tokenizer of the model, --tokenizer-type"):
        said(*typed)
    (hf / "merges.txt").write_text("")
    (hf / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(["<|endoftext|>", *letters])}))
    (answer,) = objects(*typed, "--greedy")
    assert "GPT2BPETokenizer" in said(*typed)[1] and answer["tokens"]


def test_a_tokenizer_of_the_same_size_that_it_was_not_trained_with_is_refused(tmp_path: Path) -> None:
    own, other, made = tmp_path / "own.txt", tmp_path / "other.txt", tmp_path / "run"
    own.write_text("abcdef")
    other.write_text("uvwxyz")
    train([*FLAGS.replace("ByteLevel", "CharacterLevel").split(), "--vocab-file", own, "--save", made])
    typed = ["--load", made, "--max-new-tokens", 3, "a"]
    text, beside = said(*typed)
    assert text.startswith("a") and re.search(r", CharacterLevelTokenizer [0-9a-f]{16} \(8 ids\), loaded", beside)
    with pytest.raises(ConfigError, match=r"was trained with CharacterLevelTokenizer (\w+) \(8 ids\), and this is "
                                          r"CharacterLevelTokenizer (?!\1)\w+ \(8 ids\): give its own"):
        said(*typed, "--vocab-file", other)
    assert convert(["convert", str(made), "--dtype", "int8", "--output", str(tmp_path / "int8")]) == 0
    with pytest.raises(ConfigError, match="was trained with"):
        said("--load", tmp_path / "int8", "--vocab-file", other, "a")
    own.rename(tmp_path / "moved.txt")
    assert said(*typed, "--vocab-file", tmp_path / "moved.txt")[0] == text
    other.rename(own)
    with pytest.raises(ConfigError, match="was trained with"):
        said(*typed)


OLD = ("--model-parallel-size 1 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
       "--seq-length 12 --tokenizer-type ByteLevelTokenizer --bf16 --batch-size 2 --cache-dir cache --no-load-optim "
       "--out-seq-length 9 --temperature 1.0 --top_k 5 --top_p 0 --recompute --DDP-impl none").split()


def test_a_command_line_of_generate_samples_works(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("one\ntwo five\n")
    out, err = said("--load", folder, *OLD, "--sample_input_file", tmp_path / "in", "--sample_output_file",
                    tmp_path / "out", "--num-samples", 0)
    assert out == "" and err.startswith("note: --cache-dir, --no-load-optim, --recompute, --DDP-impl: no effect here\n")
    ours = objects("--load", folder, "--temperature", 1, "--top-k", 5, "--max-new-tokens", 9, "one", "two five")
    texts = [answer["prompt"] + bytes(answer["tokens"][: 12 - len(answer["prompt"])]).decode("utf-8", "replace")
             for answer in ours]
    found = (tmp_path / "out").read_text()
    assert found == f"{texts[0]}\n{'-' * 15}\n{texts[1]}\n", "with --seq-length for text and prompt"


def test_a_shape_or_a_tokenizer_that_is_not_the_models_is_refused(folder: Path) -> None:
    for flags, words in (
            (["--tokenizer-type", "GPT2BPETokenizer"], "give the tokenizer it was trained with"),
            (["--hidden_size=64", "--ffn-hidden-size", 128], "another model: --hidden-size 64, and its own is 32"),
            (["--vocab-size", 50257, "--num-layers", 1], "--num-layers 1, and its own is 2; --vocab-size 50257, and")):
        with pytest.raises(ConfigError, match=words):
            said("--load", folder, "x", *flags)


def test_answers_appear_in_a_file_when_all_are_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("before")
    with pytest.raises(ConfigError, match="33 tokens"):
        said("--load", folder, "x", "x" * 33, "--output", tmp_path / "out", "--max-new-tokens", 1)
    assert (tmp_path / "out").read_text() == "before" and len([*tmp_path.iterdir()]) == 1
    printed = said("--load", folder, "x", "y", "--max-new-tokens", 2)[0]
    assert said("--load", folder, "x", "y", "--max-new-tokens", 2, "--output", tmp_path / "out")[0] == ""
    assert (tmp_path / "out").read_text() == printed
