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
from contextlib import contextmanager
from datetime import timedelta
from itertools import starmap
from typing import IO, final

from data.storage import escape_to_one_line
from data.tokenizer_base import Tokenizer
from megatron.config.tree import require
from megatron.distributed.consistency import on_rank_0
from megatron.errors import NumericsError
from megatron.inference.decoder import Decoder
from megatron.inference.detokenizer import SequenceDetokenizer
from megatron.inference.generation import GeneratedSequence, Generator
from megatron.inference.load import LoadedModel
from megatron.inference.prompts import EXIT_HINT, Prompt, PromptSource, Terminal
from megatron.inference.request import GenerationConfig, Request
from mpu.collectives import broadcast_json
from mpu.groups import Groups, set_timeout

ANSWER_SEPARATOR = "-" * 15 + "\n"
"""Between answers, which may have any number of lines."""

INPUT_TIMEOUT = timedelta(days=365)
"""While ranks wait for rank 0 to read a prompt."""


@final
class PromptBatchRunner:
    def __init__(self, loaded: LoadedModel, groups: Groups, config: GenerationConfig, rows: int) -> None:
        self._tokenizer, self._groups, self._config = loaded.tokenizer, groups, config
        self._decoder = Decoder(loaded.model, rows)
        self._detokenizer = SequenceDetokenizer(loaded.tokenizer)
        self._generator = build_generator(loaded, self._decoder, self._detokenizer, config.sliding_window)
        self._tokens, self._seconds = 0, 0.0

    def write_answers(self, prompts: PromptSource, out: IO[str] | None, *, jsonl: bool) -> None:
        """`prompts` and `out` are rank 0's. Answers are written in the order of the prompts: the first unfinished one
        token by token, later ones after it."""
        # an error in any prompt that is known now is raised before the first answer
        on_rank_0(lambda: sum(len(self._encode(prompt)) for prompt in prompts.known_prompts), self._groups.world)
        begin, writer = time.monotonic(), _AnswerWriter(self._detokenizer, out, jsonl)
        for text in self._generate(prompts, writer):
            if text.finish_reason == "not finite":
                raise NumericsError(f"the model produced non-finite logits after {len(text.ids)} tokens: ask for "
                                    "--dtype fp32 or bf16")
            writer.write_ready(text)
            self._tokens += text.finish_reason is not None and len(text.tokens)
        self._seconds += time.monotonic() - begin

    def _generate(self, prompts: PromptSource, writer: _AnswerWriter) -> Iterator[GeneratedSequence]:
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
                    requests = self._config.make_requests(self._encode(prompt), number)
                    writer.add_prompt(number, prompt.text, len(requests))
                    waiting.extend(requests)
                    number += len(requests)
            starting = [waiting.popleft() for _ in range(min(generator.free_slots, len(waiting)))]
            yield from generator.start(starting) if starting else []
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
    """An empty prompt becomes the end-of-document token."""
    return tuple(int(token) for token in tokenizer.encode(prompt)) or (tokenizer.eod,)


def build_generator(loaded: LoadedModel, decoder: Decoder, detokenizer: SequenceDetokenizer,
                    sliding_window: bool) -> Generator:
    tokenizer, model = loaded.tokenizer, loaded.model
    return Generator(decoder, vocabulary=tokenizer.vocab_size,
                     sliding_window=sliding_window, should_stop=detokenizer.has_stop_string,
                     eod=tokenizer.eod if tokenizer.eod < model.config.known_vocab_size else None)


@final
class _AnswerWriter:
    """Writes answers in order: a JSON line each, or plain text behind its prompt with a separator between answers."""

    def __init__(self, detokenizer: SequenceDetokenizer, out: IO[str] | None, jsonl: bool) -> None:
        self._detokenizer, self._out, self._jsonl = detokenizer, out, jsonl
        self._prompts: dict[int, str] = {}
        self._ready: dict[int, GeneratedSequence] = {}
        self._current, self._separated, self._written = 0, 0, ""

    def add_prompt(self, first: int, prompt: str, count: int) -> None:
        if self._out is not None:
            self._prompts.update(dict.fromkeys(range(first, first + count), prompt))

    def write_ready(self, sequence: GeneratedSequence) -> None:
        """Called when a text got a token or ended."""
        if self._out is None:
            return
        self._ready[sequence.request.number] = sequence
        while (current := self._ready.get(self._current)) is not None:
            self._write_sequence(current, self._out)
            if current.finish_reason is None:
                break
            del self._ready[self._current], self._prompts[self._current]
            self._current += 1
        self._out.flush()

    def _write_sequence(self, sequence: GeneratedSequence, out: IO[str]) -> None:
        prompt = self._prompts[self._current]
        if self._jsonl:
            if sequence.finish_reason is not None:
                line = json.dumps({"prompt": prompt, "text": self._detokenizer.decode(sequence),
                                   "tokens": sequence.tokens,
                                   "logprobs": [round(value, 6) for value in sequence.logprobs],
                                   "ended": sequence.finish_reason}, ensure_ascii=False)
                out.write((escape_to_one_line(line) if out.isatty() else line) + "\n")
            return
        if self._separated < self._current:
            out.write(ANSWER_SEPARATOR)
            self._separated = self._current
        text = prompt + self._detokenizer.stable_text(sequence)
        new = text[len(self._written):]
        out.write(escape_to_one_line(new, allowed="\n") if out.isatty() else new)
        self._written = text
        if sequence.finish_reason is not None:
            out.write("\n")
            self._written = ""


@final
class InteractiveSession:
    def __init__(self, loaded: LoadedModel, groups: Groups, config: GenerationConfig,
                 terminal: Terminal | None) -> None:
        """`terminal` is rank 0's."""
        self._tokenizer, self._world, self._config, self._terminal = loaded.tokenizer, groups.world, config, terminal
        self._decoder, self._detokenizer = Decoder(loaded.model, rows=1), SequenceDetokenizer(loaded.tokenizer)
        self._generator = build_generator(loaded, self._decoder, self._detokenizer, config.sliding_window)
        set_timeout(groups, INPUT_TIMEOUT)

    def run(self) -> None:
        """Returns when the user leaves. Collective."""
        number = 0
        with _ignore_sigint() if self._terminal is None else self._terminal:
            self._print_message(f"each line is a prompt; Ctrl-C ends an answer, {EXIT_HINT}")
            while (prompt := broadcast_json(self._terminal and self._terminal.read_prompt(), self._world,
                                            0)) is not None:
                ids = encode_prompt(self._tokenizer, prompt)
                if refusal := self._config.why_rejected(ids, self._decoder.max_positions):
                    self._print_message(refusal)
                    continue
                requests = self._config.make_requests(ids, number)
                number += len(requests)
                self._answer(requests)

    def _answer(self, requests: list[Request]) -> None:
        """Ctrl-C ends the current answer and leaves out the remaining ones."""
        for request in requests:
            (text,), interrupted = self._generator.start([request]), False
            shown = self._write_new_text(text, 0)
            while text.finish_reason is None and not interrupted:
                if interrupted := bool(broadcast_json(self._terminal and self._terminal.interrupted, self._world, 0)):
                    self._generator.cancel(request.number)
                else:
                    self._generator.step()
                shown = self._write_new_text(text, shown)
            self._write("\n")
            if text.finish_reason == "not finite":
                self._print_message("the model produced non-finite logits: ask for --dtype fp32 or bf16")
            if interrupted:
                return

    def _write_new_text(self, sequence: GeneratedSequence, shown: int) -> int:
        """Writes what follows the first `shown` characters; returns the number of characters that are written now."""
        text = self._detokenizer.stable_text(sequence) if self._terminal is not None else ""
        self._write(text[shown:])
        return max(shown, len(text))

    def _write(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.write_answer(text)

    def _print_message(self, line: str) -> None:
        if self._terminal is not None:
            self._terminal.print_message(line)


@contextmanager
def _ignore_sigint() -> Iterator[None]:
    """On the ranks without the terminal: rank 0 handles Ctrl-C."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
