"""A session: a person types a prompt and sees the answer come, and the next.

Rank 0 has the person. The others wait for what was typed, however long that takes, and learn after each token whether
the answer was interrupted: all end it at the same one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from megatron.inference.answers import INPUT_TIMEOUT, build_generator, encode_prompt
from megatron.inference.decoder import Decoder
from megatron.inference.generation import GeneratedSequence
from megatron.inference.loading import LoadedModel
from megatron.inference.request import GenerationConfig, Request
from megatron.inference.terminal import EXIT_HINT, Terminal
from megatron.inference.wording import SequenceDetokenizer
from mpu.collectives import broadcast_json
from mpu.groups import Groups, set_timeout


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
        """Until the person leaves. Collective."""
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
        for request in requests:
            (text,), interrupted = self._generator.start([request]), False
            shown = self._write_new_text(text, 0)
            while text.finish_reason is None and not interrupted:
                if interrupted := self._is_interrupted():
                    self._generator.cancel(request.number)
                else:
                    self._generator.step()
                shown = self._write_new_text(text, shown)
            self._write("\n")
            if text.finish_reason == "not finite":
                self._print_message(
                    "the model gave logits that are no numbers, or infinite: ask for --dtype fp32 or bf16")
            if interrupted:
                return

    def _is_interrupted(self) -> bool:
        return bool(broadcast_json(self._terminal and self._terminal.interrupted, self._world, 0))

    def _write_new_text(self, sequence: GeneratedSequence, shown: int) -> int:
        """What is new of it since `shown` characters."""
        found = self._detokenizer.stable_text(sequence) if self._terminal is not None else ""
        self._write(found[shown:])
        return max(shown, len(found))

    def _write(self, words: str) -> None:
        if self._terminal is not None:
            self._terminal.write_answer(words)

    def _print_message(self, line: str) -> None:
        if self._terminal is not None:
            self._terminal.print_message(line)


@contextmanager
def _ignore_sigint() -> Iterator[None]:
    """Ctrl-C is rank 0's to hear."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
