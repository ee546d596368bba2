"""Prompts of a program and of a person: what is typed at a real terminal, seen, and interrupted."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from data.tokenizer import ByteLevelTokenizer
from megatron.inference.frontends import run_session
from megatron.inference.load import LoadedModel
from megatron.inference.prompts import Terminal
from megatron.inference.request import GenerationConfig, Sampling
from megatron.model.gpt2 import GPT2
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.helpers import ROOT, tiny_model, train
from tests.megatron.inference.test_command import said
from tests.terminal import AtTerminal


def test_a_program_that_waits_for_an_answer_before_it_asks_again_gets_it(tmp_path: Path) -> None:
    train([*("--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --mock-data "
             "--tokenizer-type ByteLevelTokenizer --train-iters 1 --eval-interval 0").split(), "--save", tmp_path])
    command = [sys.executable, "-m", "megatron.generate", "--load", str(tmp_path), "--max-new-tokens", "3", "--top-k",
               "3", "--jsonl"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        assert asked.stdin is not None and asked.stdout is not None
        for prompt in (b"hello", b"you", b"bye"):
            asked.stdin.write(prompt + b"\n")
            asked.stdin.flush()
            answer = b""
            while prompt not in answer:  # a text may have ends of lines in it
                answer = asked.stdout.readline()
                assert answer, "the program ended"
        asked.stdin.close()
        assert asked.wait(60) == 0


FLAGS = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
         "--tokenizer-type CharacterLevelTokenizer --mock-data --train-iters 2 --eval-interval 0 --batch-size 2")
ENDLESS = ["--greedy", "--max-new-tokens", "1000000", "--past-the-end", "slide"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of letters, so that whatever it says can be shown."""
    made = tmp_path_factory.mktemp("run")
    (made / "letters.txt").write_text("abcdefghijklmnopqrstuvwxyz ")
    train([*FLAGS.split(), "--vocab-file", made / "letters.txt", "--save", made])
    yield made


def session(folder: Path, *flags: object, state: Path | None = None, ranks: int = 1) -> AtTerminal:
    module = ["-m", "megatron.generate", "--load", str(folder), "--model-parallel-size", str(ranks), *map(str, flags)]
    if ranks > 1:
        module = ["-m", "megatron.launch", "--nproc-per-node", str(ranks), *module]
    unset = {"RANK", "WORLD_SIZE", "MEGATRON_LAUNCHER"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"PYTHONPATH": str(ROOT), "TERM": "dumb", "XDG_STATE_HOME": str(state or folder / "state")}
    return AtTerminal([sys.executable, *module], environ)


def test_each_line_is_answered_as_the_command_answers_it(folder: Path) -> None:
    flags = ["--greedy", "--max-new-tokens", 9]
    with session(folder, *flags) as person:
        assert "Ctrl-C ends an answer, Ctrl-D or `stop` leaves\n" in person.sees("> ")
        for prompt in ("hello", " the   end ", "stop here"):
            person.types(prompt + "\n")
            assert person.sees("> ") == prompt + "\n" + said("--load", folder, *flags, prompt)[0][len(prompt):] + "> "
        person.types("\n")
        assert person.sees("> ") == "\n> "
        person.types("stop\n")
        assert person.ends() == (0, "stop\n")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interruption_ends_the_answer_and_not_the_session(folder: Path, ranks: int) -> None:
    with session(folder, *ENDLESS, ranks=ranks) as person:
        person.sees("> ")
        for _ in range(3):
            person.types("go on\n")
            person.sees("go on\n")
            assert "> " not in person.sees_more(50), "it comes as it is made, long before it ends"
            person.presses("C")
            assert person.sees("> ").endswith("\n> ")
        time.sleep(0.5)  # Python notices no signal between the prompt and its wait for a key, until the next key
        person.presses("C")
        person.sees("Ctrl-D or `stop` leaves\n> ")
        person.presses("D")
        assert person.ends()[0] == 0


def test_a_prompt_that_is_too_long_is_said_and_the_session_goes_on(folder: Path) -> None:
    with session(folder, "--max-new-tokens", 2, "--num-samples", 2, "--interactive") as person:
        person.sees("> ")
        person.types("x" * 33 + "\n")
        assert "a prompt of 33 tokens, and the model has 32 positions" in person.sees("> ")
        person.types("x" * 30 + "\n")
        assert person.sees("> ").count("\n") == 3, "the line itself and two answers"
        person.presses("D")
        assert person.ends()[0] == 0


class Slow(io.StringIO):
    """A person who thinks for longer than ranks wait for each other."""

    def readline(self, size: int | None = -1, /) -> str:
        time.sleep(2)
        return super().readline()


def thinks(rank: int, world: int) -> str:
    made, out = groups.build(world), io.StringIO()
    groups.set_timeout(made, timedelta(seconds=1))
    tokenizer = ByteLevelTokenizer()
    model = GPT2(tiny_model(vocab_size=tokenizer.vocab_size), made.tp)
    with redirect_stdout(out), redirect_stderr(io.StringIO()), patch.object(sys, "stdin", Slow("hello\n")):
        wish = GenerationConfig(4, Sampling(greedy=True))
        run_session(LoadedModel(model, tokenizer, ""), made, wish, Terminal() if rank == 0 else None)
    return out.getvalue()


def test_the_ranks_wait_for_as_long_as_a_person_thinks() -> None:
    first, second = run_ranks(thinks, 2)
    assert len(first) > 1 and second == ""
