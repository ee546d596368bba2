"""Answers to prompts: tokens in, text out, in the order of the prompts."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import starmap
from typing import IO, final

from data.storage import escape_to_one_line
from data.tokenizer_base import Tokenizer
from megatron.checkpoint.agree import on_rank_0
from megatron.config.tree import require
from megatron.errors import NumericsError
from megatron.inference.decoder import Decoder
from megatron.inference.generation import GeneratedSequence, Generator
from megatron.inference.loading import LoadedModel
from megatron.inference.prompts import Prompt, PromptSource
from megatron.inference.request import GenerationConfig, Request
from megatron.inference.wording import SequenceDetokenizer
from mpu.collectives import broadcast_json
from mpu.groups import Groups, set_timeout

ANSWER_SEPARATOR = "-" * 15 + "\n"
"""Answers, each of any number of lines."""

INPUT_TIMEOUT = timedelta(days=365)
"""With who types, or writes into a pipe."""


@final
class PromptBatchRunner:
    def __init__(self, loaded: LoadedModel, groups: Groups, config: GenerationConfig, rows: int) -> None:
        """`rows` texts at a time. Every rank of the model has the same."""
        self._tokenizer, self._groups, self._config = loaded.tokenizer, groups, config
        self._decoder = Decoder(loaded.model, rows)
        self._detokenizer = SequenceDetokenizer(loaded.tokenizer)
        self._generator = build_generator(loaded, self._decoder, self._detokenizer, config.sliding_window)
        self._tokens, self._seconds = 0, 0.0

    def write_answers(self, prompts: PromptSource, out: IO[str] | None, *, jsonl: bool) -> None:
        """`prompts` and `out` are rank 0's. Answers that are ready before earlier ones wait for them; the one whose
        turn it is is printed as it comes."""
        on_rank_0(lambda: self._check_prompts(prompts.known_prompts), self._groups.world)
        begin, writer = time.monotonic(), _AnswerWriter(self._detokenizer, out, jsonl)
        for text in self._generate(prompts, writer):
            if text.finish_reason == "not finite":
                raise NumericsError("the model gives logits that are no numbers, or infinite, after "
                                    f"{len(text.ids)} tokens: ask for --dtype fp32 or bf16")
            writer.write_ready(text)
            self._tokens += text.finish_reason is not None and len(text.tokens)
        self._seconds += time.monotonic() - begin

    def _check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse now what could not be answered in hours."""
        for prompt in prompts:
            self._encode(prompt)

    def _generate(self, prompts: PromptSource, writer: _AnswerWriter) -> Iterator[GeneratedSequence]:
        """Those that got a token or ended, after each step. The same on every rank."""
        generator, world = self._generator, self._groups.world
        waiting, more, number = deque[Request](), True, 0
        if broadcast_json(prompts.is_stream if world.rank == 0 else None, world, 0):
            set_timeout(self._groups, INPUT_TIMEOUT)
        while more or waiting or generator.num_running:
            if more and len(waiting) < generator.free_slots:
                most, wait = generator.free_slots - len(waiting), not (waiting or generator.num_running)
                found = on_rank_0(lambda: prompts.take(most, wait), world)
                more = found is not None
                for prompt in starmap(Prompt, found or ()):
                    requests = self._config.make_requests(self._encode(prompt), number)
                    writer.add_prompt(number, prompt.text, len(requests))
                    waiting.extend(requests)
                    number += len(requests)
            beginning = [waiting.popleft() for _ in range(min(generator.free_slots, len(waiting)))]
            yield from generator.start(beginning) if beginning else []
            yield from generator.step()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        ids = encode_prompt(self._tokenizer, prompt.text)
        refusal = self._config.why_rejected(ids, self._decoder.max_positions)
        require(not refusal, f"{prompt.location}: {refusal}")
        return ids

    def describe_speed(self) -> str:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return f"{self._tokens} tokens in {self._seconds:.1f} s, {rate:.1f} a second"


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """Of nothing, a text goes on from the end of the document before it."""
    return tuple(int(token) for token in tokenizer.encode(prompt)) or (tokenizer.eod,)


def build_generator(loaded: LoadedModel, decoder: Decoder, detokenizer: SequenceDetokenizer,
                    sliding_window: bool) -> Generator:
    tokenizer, model = loaded.tokenizer, loaded.model
    return Generator(decoder,
                     vocabulary=tokenizer.vocab_size,
                     sliding_window=sliding_window,
                     should_stop=detokenizer.has_stop_string,
                     eod=tokenizer.eod if tokenizer.eod < model.config.known_vocab_size else None)


@final
class _AnswerWriter:
    """What is printed: answer after answer, as a line of JSON or as plain text behind its prompt, with a line
    between them."""

    def __init__(self, detokenizer: SequenceDetokenizer, out: IO[str] | None, jsonl: bool) -> None:
        self._detokenizer, self._out, self._jsonl = detokenizer, out, jsonl
        self._prompts: dict[int, str] = {}
        self._ready: dict[int, GeneratedSequence] = {}
        self._current, self._separated, self._written = 0, 0, ""

    def add_prompt(self, first: int, prompt: str, count: int) -> None:
        if self._out is not None:
            self._prompts.update(dict.fromkeys(range(first, first + count), prompt))

    def write_ready(self, sequence: GeneratedSequence) -> None:
        """A text has a token more, or has ended."""
        if self._out is None:
            return
        self._ready[sequence.request.number] = sequence
        while (text_now := self._ready.get(self._current)) is not None:
            self._write_sequence(text_now, self._out)
            if text_now.finish_reason is None:
                break
            del self._ready[self._current], self._prompts[self._current]
            self._current += 1
        self._out.flush()

    def _write_sequence(self, sequence: GeneratedSequence, out: IO[str]) -> None:
        prompt = self._prompts[self._current]
        if self._jsonl:
            if sequence.finish_reason is not None:
                line = self._json_record(prompt, sequence)
                out.write((escape_to_one_line(line) if out.isatty() else line) + "\n")
            return
        if self._separated < self._current:
            out.write(ANSWER_SEPARATOR)
            self._separated = self._current
        found = prompt + self._detokenizer.stable_text(sequence)
        new = found[len(self._written):]
        out.write(escape_to_one_line(new, allowed="\n") if out.isatty() else new)
        self._written = found
        if sequence.finish_reason is not None:
            out.write("\n")
            self._written = ""

    def _json_record(self, prompt: str, sequence: GeneratedSequence) -> str:
        return json.dumps(
            {
                "prompt": prompt, "text": self._detokenizer.decode(sequence), "tokens": sequence.tokens,
                "logprobs": [round(value, 6) for value in sequence.logprobs], "ended": sequence.finish_reason
            },
            ensure_ascii=False)
