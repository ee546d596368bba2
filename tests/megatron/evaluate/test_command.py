"""`python -m megatron.evaluate` as it is typed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from megatron.errors import CheckpointError, ConfigError
from megatron.evaluate import harness
from megatron.evaluate.cli import Protocol, format_json, format_table, main
from megatron.evaluate.tasks import EvalTask, ScoringRequest, TargetScore
from tests.distributed import run_ranks
from tests.megatron.evaluate.models import WIKITEXT, write_lines
from tests.megatron.helpers import train, write_corpus
from tests.megatron.launch.processes import error_of, python

FLAGS = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32 "
         "--tokenizer-type ByteLevelTokenizer --train-iters 2 --eval-interval 2 --eval-iters 1000 --batch-size 1 "
         "--bf16 --split 8,1,1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run in `run`, its corpus, and data of each task."""
    made = tmp_path_factory.mktemp("evaluate")
    write_corpus(made / "corpus")
    train([*FLAGS.split(), "--train-data", made / "corpus", "--save", made / "run",
           "--metrics-file", made / "metrics.jsonl"])
    (made / "wiki.txt").write_text(WIKITEXT)
    write_lines(made / "lambada.jsonl", [{"text": f"one two three one two {word}"} for word in ("three", "four")])
    yield made


def said(*argv: object, program: Callable[[list[str]], int] = main) -> tuple[str, str]:
    """(standard output, standard error)"""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch("megatron.distributed.process_group.shutdown"):
        assert program([*map(str, argv)]) == 0
    return out.getvalue(), err.getvalue()


def values(*argv: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*argv, "--json")[0])
    return found


ALWAYS = {"task", "protocol", "data", "model", "window", "stride", "tokens", "original_words", "original_bytes", "loss",
          "perplexity", "adjusted_perplexity", "bits_per_byte", "seconds", "dtype", "tokenizer", "ranks",
          "model_parallel_size"}


@pytest.mark.parametrize(("task", "data", "protocols", "more"), [
    ("wikitext", "wiki.txt", ["megatron", "openai", "lm-eval"], set()),
    ("lambada", "lambada.jsonl", ["megatron", "openai", "lm-eval"], {"acc", "correct", "target", "truncated"}),
    ("perplexity", "corpus", ["megatron", "lm-eval"], set()),
])
def test_every_task_says_its_protocol_and_its_figures(folder, task, data, protocols, more):
    typed = ["--load", folder / "run", "--task", task, "--data", folder / data]
    assert values(*typed)["protocol"] == protocols[0]
    for protocol in protocols:
        found = values(*typed, "--protocol", protocol)
        if task == "lambada":
            assert found["target"] == ("last word" if protocol == "lm-eval" else "last token")
        assert ALWAYS | more <= set(found) and found["protocol"] == protocol
        assert 0 < found["loss"] < 8 and 0 < found["bits_per_byte"]
        text = said(*typed, "--protocol", protocol)[0]
        for name in ALWAYS - ({"adjusted_perplexity"} if task == "perplexity" else set()) | more:
            assert f"\n{name.replace('_', ' ')} " in f"\n{text}", name


def test_the_perplexity_of_the_held_out_part_is_what_training_found(folder: Path) -> None:
    """Training's samples are cut from the same row of documents, and it evaluated all whole ones there are."""
    with pytest.raises(ConfigError, match="--seq-length 16, and its own is 32"):
        said("--load", folder / "run", "--task", "perplexity", "--data", folder / "corpus", "--seq-length", 16)
    found = values("--load", folder / "run", "--task", "perplexity", "--data", folder / "corpus", "--part", "valid",
                   "--dtype", "fp32")
    (line,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if "ppl" in line][-1:]
    assert found["part"] == "valid"
    assert found["loss"] == pytest.approx(line["lm_loss"], rel=0.02)


SCRIPT = ("--num-layers 2 --hidden-size 32 --num_attention_heads 4 --seq-length 32 --max-position-embeddings 32 "
          "--log-interval 10 --no-load-optim --no-load-rng --activations-checkpoint-method uniform --num-workers 2 "
          "--micro-batch-size 3 --tensor-model-parallel-size 1")


def test_the_command_line_of_megatron_s_evaluation_works(folder: Path) -> None:
    typed = ["--load", folder / "run", "--task", "LAMBADA", "--valid-data", folder / "lambada.jsonl"]
    out, err = said(*typed, *SCRIPT.split(), "--fp16", "--json")
    assert ("\nnote: --log-interval, --no-load-optim, --no-load-rng, --activations-checkpoint-method, --num-workers: "
            "no effect here\n") in f"\n{err}"
    assert json.loads(out)["dtype"] == "fp16"
    assert without_time(json.loads(out)) == without_time(values(*typed, "--dtype", "fp16"))


def without_time(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "seconds"}


def ranks(rank: int, world: int, argv: list[str]) -> tuple[str, str]:
    return said(*argv)


def test_rank_0_alone_speaks_and_ranks_share_the_data_and_the_model(folder: Path) -> None:
    typed = ["--load", str(folder / "run"), "--task", "lambada", "--data", str(folder / "lambada.jsonl"), "--json",
             "--dtype", "fp32"]
    ((alone, _),) = run_ranks(ranks, 1, typed)
    for more in ([], ["--model-parallel-size", "2"]):
        (first, about), *others = run_ranks(ranks, 2, [*typed, *more])
        assert others == [("", "")] and "parameters in fp32, ByteLevelTokenizer" in about
        assert [json.loads(first)[name] for name in ("ranks", "model_parallel_size")] == [2, 2 if more else 1]
        for name, value in without_time(json.loads(alone)).items():
            if name in ("ranks", "model_parallel_size"):
                continue
            close = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
            assert json.loads(first)[name] == close, name


REFUSED = [
    (["--task", "wikitext", "--data", "x"], "give one of --load and --load-hf"),
    (["--load", "a", "--task", "arc", "--data", "x"], "invalid choice: 'arc'"),
    (["--load", "a", "--task", "lambada"], "--data"),
    (["--load", "a", "--task", "lambada", "--data", "missing"], "--data missing: no such file"),
    (["--load", "a", "--task", "lambada", "--data", "/"], "--data /: a folder"),
    (["--load", "a", "--task", "hellaswag", "--data", "x"], "megatron.evaluate.harness --tasks hellaswag"),
    (["--load", "a", "--task", "perplexity", "--data", "x", "--protocol", "openai"],
     "--protocol openai: --task perplexity has megatron, lm-eval"),
    (["--load", "a", "--task", "wikitext", "--data", "x", "--stride", "0"], "--stride is 0: expected 1 or more"),
    (["--load", "a", "--task", "lambada", "--data", "x", "--stride", "3"], "--stride: no windows overlap"),
    (["--load", "a", "--task", "wikitext", "--data", "x", "--protocol", "lm-eval", "--stride", "3"],
     "no windows overlap"),
    (["--load", "a", "--task", "wikitext", "--data", "x", "--strict"], "--strict belongs to --task lambada"),
    (["--load", "a", "--task", "lambada", "--data", "x", "--part", "valid"], "--part belongs to --task perplexity"),
    (["--load", "a", "--task", "wikitext", "--data", "x", "--batch-size", "0"], "--batch-size is 0"),
    (["--load", "a", "--task", "wikitext", "--data", __file__, "--model-parallel-size", "2"], "does not divide"),
]


def test_what_cannot_be_is_refused_in_words(folder: Path, tmp_path: Path) -> None:
    for argv, words in REFUSED:
        with pytest.raises(ConfigError, match=words):
            main(argv)
    typed = ["--task", "wikitext", "--data", folder / "wiki.txt"]
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        said("--load", tmp_path, *typed)
    with pytest.raises(ConfigError, match="the model has 32 positions"):
        said("--load", folder / "run", *typed, "--stride", 33)


def test_the_program_ends_with_its_code_and_one_line(folder: Path) -> None:
    done = python("-m", "megatron.evaluate", "--load", "run", "--task", "lambada", "--data", "wiki.txt", cwd=folder)
    assert "wiki.txt, line 2: not JSON" in error_of(done, 3) and done.stdout == ""


def refused(rank: int, world: int, data: list[str], more: list[str]) -> tuple[str, str]:
    """The error that a rank ends with, where each has data of its own."""
    with pytest.raises(Exception) as caught:
        said(*more, "--data", data[rank])
    return type(caught.value).__name__, str(caught.value)


def test_a_file_that_one_rank_cannot_use_is_the_same_error_on_all(folder: Path) -> None:
    data, more = [str(folder / name) for name in ("lambada.jsonl", "wiki.txt")], ["--load", str(folder / "run")]
    found = run_ranks(refused, 2, data, [*more, "--task", "lambada"])
    assert found == [found[0]] * 2 and found[0][0] == "DataError" and "wiki.txt, line 2: not JSON" in found[0][1]


def test_flags_are_checked_before_torch_is_imported() -> None:
    program = ("import sys; from megatron.evaluate.cli import parse; parse(['--load', 'a', '--task', 'wikitext', "
               f"'--data', {__file__!r}]); print(sorted({{'torch', 'numpy'}} & set(sys.modules)))")
    assert python("-c", program).stdout == "[]\n"


def test_the_harness_says_what_to_install_and_refuses_in_words() -> None:
    typed = ["--load", "a", "--tasks", "lambada_openai"]
    with patch("megatron.evaluate.harness.find_spec", lambda name: None if name == "lm_eval" else find_spec(name)), \
            pytest.raises(ConfigError, match="needs lm-eval: pip install lm_eval"):
        harness.main(typed)
    for more, words in ((["--include-path", "missing"], "--include-path missing: no such folder"),
                        (["--limit", "0"], "--limit is 0"), (["--batch-size", "0"], "--batch-size is 0"),
                        (["--load-hf", "b"], "give one of --load and --load-hf"), (["--nonsense"], "--nonsense")):
        with patch("megatron.evaluate.harness.find_spec", lambda name: name), pytest.raises(ConfigError, match=words):
            harness.main([*typed, *more])


TOKENIZER = {"tokenizer": {"name": "Bytes", "fingerprint": "0123", "ids": 257}, "seconds": 1.25}


def metrics(logprob: float, tokens: int, words: int, size: int) -> dict[str, object]:
    task = EvalTask(requests=[ScoringRequest(np.zeros(tokens + 1, np.uint8), 1)], rules=Protocol(), words=words,
                    bytes=size)
    return dict(task.metrics([TargetScore(logprob, False)]))


def test_what_is_too_large_for_a_number_is_null_in_json() -> None:
    found = metrics(-1e6, 100, 10, 50) | TOKENIZER
    values = json.loads(format_json(found), parse_constant=pytest.fail)
    assert (values["loss"], values["perplexity"], values["adjusted_perplexity"]) == (1e4, None, None)
    assert values["bits_per_byte"] == 1e6 / math.log(2) / 50
    table = format_table(found | {"task": "perplexity"})
    assert table.startswith("bits per byte ") and "\nperplexity           inf\n" in table and "adjusted" not in table
