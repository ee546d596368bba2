"""Prompts that are at hand, and prompts that somebody writes while answers are made."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatron.inference.prompts import Prompt, PromptSource, StreamingPrompts
from tests.megatron.helpers import train


def lines_of(source: queue.Queue[str | None]) -> Iterator[Prompt]:
    while (line := source.get()) is not None:
        yield Prompt(line, "")


def given(texts: Iterable[str]) -> list[Prompt]:
    return [Prompt(text, "") for text in texts]


def test_what_is_at_hand_is_taken_in_order_and_then_ends() -> None:
    prompts = PromptSource(given("01234"))
    assert [prompts.take(2, True) for _ in range(4)] == [given("01"), given("23"), given("4"), None]


def test_what_arrives_is_taken_as_it_comes() -> None:
    source = queue.Queue[str | None]()
    prompts = StreamingPrompts(lines_of(source))
    assert prompts.take(4, False) == []  # nothing yet, and nobody waits
    for line in ("a", "b", "c"):
        source.put(line)
    assert prompts.take(2, True) == given("ab") and prompts.take(2, True) == given("c")
    source.put("d")
    source.put(None)
    assert prompts.take(2, True) == given("d") and prompts.take(2, True) is None and prompts.take(2, False) is None


def test_what_arrives_together_is_taken_together() -> None:
    """As many as there is room for: so that texts which come at once are computed alike every time."""
    assert StreamingPrompts(iter(given("abcdefghij"))).take(8, True) == given("abcdefgh")


def test_an_error_of_who_reads_them_is_that_of_who_takes_them() -> None:
    def lines() -> Iterator[Prompt]:
        yield Prompt("a", "")
        raise OSError("gone")
    prompts = StreamingPrompts(lines())
    with pytest.raises(OSError, match="gone"):
        while True:
            prompts.take(1, True)


@pytest.mark.parametrize("jsonl", [False, True])
def test_a_program_that_waits_for_an_answer_before_it_asks_again_gets_it(tmp_path: Path, jsonl: bool) -> None:
    train([*("--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 16 --mock-data "
             "--tokenizer-type ByteLevelTokenizer --train-iters 1 --eval-interval 0").split(), "--save", tmp_path])
    command = [sys.executable, "-m", "megatron.generate", "--load", str(tmp_path), "--max-new-tokens", "3", "--top-k",
               "3", *["--jsonl"] * jsonl]
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
