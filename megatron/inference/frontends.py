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
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from itertools import starmap
from typing import IO, final

from data.storage import escape_to_one_line
from megatron.distributed.consistency import on_rank_0
from megatron.errors import ConfigError, NumericsError
from megatron.inference.decoder import Decoder
from megatron.inference.generation import GeneratedSequence, Generator, SequenceDetokenizer
from megatron.inference.load import LoadedModel
from megatron.inference.prompts import EXIT_HINT, Prompt, PromptSource, Terminal
from megatron.inference.request import GenerationConfig, Request
from mpu.collectives import broadcast_json
from mpu.groups import Groups, set_timeout

ANSWER_SEPARATOR = "-" * 15 + "\n"
"""Between answers, which may have any number of lines."""

INPUT_TIMEOUT = timedelta(days=365)
"""While ranks wait for rank 0 to read a prompt."""

NOT_FINITE_MESSAGE = "the model produced non-finite logits: ask for --dtype fp32 or bf16"


def build_generator(loaded: LoadedModel, decoder: Decoder, detokenizer: SequenceDetokenizer,
                    sliding_window: bool) -> Generator:
    tokenizer, model = loaded.tokenizer, loaded.model
    return Generator(decoder, vocabulary=tokenizer.vocab_size,
                     sliding_window=sliding_window, should_stop=detokenizer.has_stop_string,
                     eod=tokenizer.eod if tokenizer.eod < model.config.known_vocab_size else None)


class _Frontend:
    def __init__(self, loaded: LoadedModel, groups: Groups, config: GenerationConfig, rows: int) -> None:
        self._tokenizer, self._groups, self._config = loaded.tokenizer, groups, config
        self._decoder, self._detokenizer = Decoder(loaded.model, rows), SequenceDetokenizer(loaded.tokenizer)
        self._generator = build_generator(loaded, self._decoder, self._detokenizer, config.sliding_window)

    def _encode(self, prompt: str, location: str = "") -> tuple[int, ...]:
        """Tokens; of an empty prompt the end-of-document token. Raises ConfigError if the model cannot answer them."""
        ids = tuple(int(token) for token in self._tokenizer.encode(prompt)) or (self._tokenizer.eod,)
        self._config.check_prompt(ids, self._decoder.max_positions, location)
        return ids


@final
class PromptBatchRunner(_Frontend):
    def write_answers(self, prompts: PromptSource, out: IO[str] | None, *, jsonl: bool) -> str:
        """`prompts` and `out` are rank 0's. Answers are written in the order of the prompts: the first unfinished one
        token by token, later ones after it. Returns a line about the speed."""
        # an error in any prompt that is known now is raised before the first answer
        on_rank_0(lambda: sum(len(self._tokens_of(prompt)) for prompt in prompts.known_prompts), self._groups.world)
        writer = None if out is None else AnswerWriter(self._detokenizer, out, jsonl)
        begin, count = time.monotonic(), 0
        for text in self._generate(prompts, writer):
            if text.finish_reason == "not finite":
                raise NumericsError(NOT_FINITE_MESSAGE)
            if writer is not None:
                writer.write_ready(text)
            count += len(text.tokens) if text.finish_reason is not None else 0
        seconds = time.monotonic() - begin
        return f"{count} tokens in {seconds:.1f} s, {count / seconds if seconds else 0.0:.1f} a second"

    def _generate(self, prompts: PromptSource, writer: AnswerWriter | None) -> Iterator[GeneratedSequence]:
        """The texts that got a token or ended, after each step. The same on every rank."""
        generator, world = self._generator, self._groups.world
        waiting, more, number = deque[Request](), True, 0
        if broadcast_json(prompts.is_stream if world.rank == 0 else None, world, 0):
            set_timeout(self._groups, INPUT_TIMEOUT)
        while more or waiting or generator.num_running:
            if more and len(waiting) < generator.free_slots:
                most, wait = generator.free_slots - len(waiting), not (waiting or generator.num_running)
                taken = on_rank_0(lambda: prompts.take(most, wait), world)
                more = taken is not None
                for prompt in starmap(Prompt, taken or ()):
                    requests = self._config.make_requests(self._tokens_of(prompt), number)
                    if writer is not None:
                        writer.prompts.extend([prompt.text] * len(requests))
                    waiting.extend(requests)
                    number += len(requests)
            starting = [waiting.popleft() for _ in range(min(generator.free_slots, len(waiting)))]
            yield from generator.start(starting) if starting else []
            yield from generator.step()

    def _tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        return self._encode(prompt.text, f"{prompt.location}: ")


@final
class AnswerWriter:
    """Writes answers in order: a JSON line each, or plain text behind its prompt with a separator between answers."""

    def __init__(self, detokenizer: SequenceDetokenizer, out: IO[str], jsonl: bool) -> None:
        self._detokenizer, self._out, self._jsonl = detokenizer, out, jsonl
        self.prompts = deque[str]()
        """Of the answers that are not complete, in order."""
        self._ready: dict[int, GeneratedSequence] = {}
        self._current, self._has_begun = 0, False

    def write_ready(self, sequence: GeneratedSequence) -> None:
        """Called when a text got a token or ended."""
        self._ready[sequence.request.number] = sequence
        while (current := self._ready.get(self._current)) is not None:
            has_ended = current.finish_reason is not None
            if not self._jsonl:
                self._write_text(current)
            elif has_ended:
                line = json.dumps({"prompt": self.prompts[0], "text": self._detokenizer.decode(current),
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

    def _write_text(self, sequence: GeneratedSequence) -> None:
        text = self._detokenizer.new_text(sequence)
        if not self._has_begun:
            self._out.write(ANSWER_SEPARATOR if self._current else "")
            text, self._has_begun = self.prompts[0] + text, True
        self._out.write(escape_to_one_line(text, allowed="\n") if self._out.isatty() else text)
        if sequence.finish_reason is not None:
            self._out.write("\n")


@final
class InteractiveSession(_Frontend):
    def __init__(self, loaded: LoadedModel, groups: Groups, config: GenerationConfig,
                 terminal: Terminal | None) -> None:
        """`terminal` is rank 0's."""
        super().__init__(loaded, groups, config, rows=1)
        self._terminal = terminal
        set_timeout(groups, INPUT_TIMEOUT)

    def run(self) -> None:
        """Returns when the user leaves. Collective."""
        number, world = 0, self._groups.world
        if self._terminal is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
        with self._terminal or nullcontext():
            self._print_message(f"each line is a prompt; Ctrl-C ends an answer, {EXIT_HINT}")
            while (prompt := broadcast_json(self._terminal and self._terminal.read_prompt(), world, 0)) is not None:
                try:
                    requests = self._config.make_requests(self._encode(prompt), number)
                except ConfigError as error:
                    self._print_message(str(error))
                    continue
                number += len(requests)
                for request in requests:
                    if self._answer(request) == "dropped":
                        break

    def _answer(self, request: Request) -> str | None:
        """Returns why the answer ended; dropped: by Ctrl-C."""
        (text,) = self._generator.start([request])
        self._write_new(text)
        while text.finish_reason is None:
            if broadcast_json(self._terminal and self._terminal.interrupted, self._groups.world, 0):
                self._generator.cancel(request.number)
            else:
                self._generator.step()
            self._write_new(text)
        if self._terminal is not None:
            self._terminal.write_answer("\n")
        if text.finish_reason == "not finite":
            self._print_message(NOT_FINITE_MESSAGE)
        return text.finish_reason

    def _write_new(self, text: GeneratedSequence) -> None:
        if self._terminal is not None:
            self._terminal.write_answer(self._detokenizer.new_text(text))

    def _print_message(self, line: str) -> None:
        if self._terminal is not None:
            self._terminal.print_message(line)
