"""The two frontends of `python -m megatron.generate`: a batch over a prompt source, and an interactive session.

The batch frontend writes answers in the order of the prompts, as plain text or JSON lines. In a session rank 0
reads the terminal and broadcasts each prompt; after every token all ranks learn whether the user interrupted the
answer.
"""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from itertools import starmap
from typing import IO

from data.storage import escape_to_one_line
from megatron.config.tree import require
from megatron.distributed.consistency import on_rank_0
from megatron.errors import ConfigError, NumericsError
from megatron.inference.generation import GeneratedSequence, Generator
from megatron.inference.load import LoadedModel
from megatron.inference.prompts import EXIT_HINT, Prompt, PromptSource, Terminal
from megatron.inference.request import GenerationConfig, Request
from mpu.collectives import broadcast_json
from mpu.groups import Group, Groups, set_timeout

ANSWER_SEPARATOR = "-" * 15 + "\n"  # between answers, which may have any number of lines

INPUT_TIMEOUT = timedelta(days=365)  # while ranks wait for rank 0 to read a prompt

NOT_FINITE_MESSAGE = "the model produced non-finite logits: ask for --dtype fp32 or bf16"


def encode_prompt(loaded: LoadedModel, config: GenerationConfig, prompt: str, location: str = "") -> tuple[int, ...]:
    """Tokens; of an empty prompt the end-of-document token. Raises ConfigError if the model cannot answer them."""
    ids, positions = tuple(loaded.tokenizer.encode(prompt)), loaded.model.config.max_position_embeddings
    ids = ids or (loaded.tokenizer.eod,)
    what = f"{location}a prompt of {len(ids)} tokens, and"
    require(len(ids) <= positions or config.sliding_window, f"{what} the model has {positions} positions: shorten it, "
            "or give --past-the-end slide, which reads the last ones")
    require(config.max_length is None or len(ids) < config.max_length,
            f"{what} --seq-length, a text with its prompt, is {config.max_length}")
    return ids


def write_answers(loaded: LoadedModel, groups: Groups, config: GenerationConfig, rows: int, prompts: PromptSource,
                  out: IO[str] | None, *, jsonl: bool) -> str:
    """`prompts` and `out` are rank 0's. Answers are written in the order of the prompts: the first unfinished one token
    by token, later ones after it. Returns a line about the speed."""
    world, generator = groups.world, loaded.generator(rows, config.sliding_window)

    def tokens_of(prompt: Prompt) -> tuple[int, ...]:
        return encode_prompt(loaded, config, prompt.text, f"{prompt.location}: ")

    # an error in any prompt that is known now is raised before the first answer
    on_rank_0(lambda: sum(len(tokens_of(prompt)) for prompt in prompts.known_prompts), world)
    writer = None if out is None else AnswerWriter(out, jsonl)
    if broadcast_json(prompts.is_stream if world.rank == 0 else None, world, 0):
        set_timeout(groups, INPUT_TIMEOUT)
    begin, count = time.monotonic(), 0
    waiting, more, number = deque[Request](), True, 0
    while more or waiting or not generator.is_idle:  # the same on every rank
        if more and len(waiting) < generator.free_slots:
            most, wait = generator.free_slots - len(waiting), not waiting and generator.is_idle
            taken = on_rank_0(lambda: prompts.take(most, wait), world)
            more = taken is not None
            for prompt in starmap(Prompt, taken or ()):
                requests = config.make_requests(tokens_of(prompt), number)
                if writer is not None:
                    writer.prompts.extend([prompt.text] * len(requests))
                waiting.extend(requests)
                number += len(requests)
        starting = [waiting.popleft() for _ in range(min(generator.free_slots, len(waiting)))]
        for sequence in generator.start(starting) if starting else generator.step():
            if sequence.finish_reason == "not finite":
                raise NumericsError(NOT_FINITE_MESSAGE)
            if writer is not None:
                writer.write_ready(sequence)
            count += len(sequence.tokens) if sequence.finish_reason is not None else 0
    seconds = time.monotonic() - begin
    return f"{count} tokens in {seconds:.1f} s, {count / seconds if seconds else 0.0:.1f} a second"


class AnswerWriter:
    """Writes answers in order: a JSON line each, or plain text behind its prompt with a separator between answers."""

    def __init__(self, out: IO[str], jsonl: bool) -> None:
        self._out, self._jsonl = out, jsonl
        self.prompts = deque[str]()  # of the answers that are not complete, in order
        self._ready: dict[int, GeneratedSequence] = {}
        self._current, self._has_begun = 0, False

    def write_ready(self, sequence: GeneratedSequence) -> None:
        """Called when a text got a token or ended."""
        self._ready[sequence.request.number] = sequence
        while (current := self._ready.get(self._current)) is not None:
            has_ended = current.finish_reason is not None
            if not self._jsonl:
                text = current.new_text()
                if not self._has_begun:
                    self._out.write(ANSWER_SEPARATOR if self._current else "")
                    text, self._has_begun = self.prompts[0] + text, True
                self._out.write(escape_to_one_line(text, allowed="\n") if self._out.isatty() else text)
                self._out.write("\n" * has_ended)
            elif has_ended:
                line = json.dumps({"prompt": self.prompts[0], "text": current.answer(),
                                   "tokens": current.tokens,
                                   "logprobs": [round(value, 6) for value in current.logprobs],
                                   "ended": current.finish_reason}, ensure_ascii=False)
                self._out.write((escape_to_one_line(line) if self._out.isatty() else line) + "\n")
            if not has_ended:
                break
            del self._ready[self._current]
            self.prompts.popleft()
            self._current, self._has_begun = self._current + 1, False
        self._out.flush()


def run_session(loaded: LoadedModel, groups: Groups, config: GenerationConfig, terminal: Terminal | None) -> None:
    """Answers what is typed at rank 0's `terminal`, until the user leaves. Collective."""
    world, generator, number = groups.world, loaded.generator(1, config.sliding_window), 0
    set_timeout(groups, INPUT_TIMEOUT)
    if terminal is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    with terminal or nullcontext():
        if terminal is not None:
            terminal.print_message(f"each line is a prompt; Ctrl-C ends an answer, {EXIT_HINT}")
        while (prompt := broadcast_json(terminal and terminal.read_prompt(), world, 0)) is not None:
            try:
                requests = config.make_requests(encode_prompt(loaded, config, prompt), number)
            except ConfigError as error:
                if terminal is not None:
                    terminal.print_message(str(error))
                continue
            number += len(requests)
            for request in requests:
                if _answer(request, generator, world, terminal) == "dropped":
                    break


def _answer(request: Request, generator: Generator, world: Group, terminal: Terminal | None) -> str | None:
    """Returns why the answer ended; dropped: by Ctrl-C."""
    (sequence,) = generator.start([request])
    while True:
        if terminal is not None:
            terminal.write_answer(sequence.new_text())
        if sequence.finish_reason is not None:
            break
        if broadcast_json(terminal and terminal.interrupted, world, 0):
            generator.cancel(request.number)
        else:
            generator.step()
    if terminal is not None:
        terminal.write_answer("\n")
        if sequence.finish_reason == "not finite":
            terminal.print_message(NOT_FINITE_MESSAGE)
    return sequence.finish_reason
