"""A session: a person types a prompt and sees the answer come, and the next.

Rank 0 has the person. The others wait for what was typed, however long that takes, and learn after each token whether
the answer was interrupted: all end it at the same one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from megatron.inference.answers import PATIENCE, generator_of, ids_of
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Text
from megatron.inference.loading import Loaded
from megatron.inference.request import Request, Wish
from megatron.inference.terminal import HOW_TO_LEAVE, Terminal
from megatron.inference.wording import Wording
from mpu.collectives import broadcast_json
from mpu.groups import Groups, set_timeout


@final
class Session:
    def __init__(self, loaded: Loaded, groups: Groups, wish: Wish, terminal: Terminal | None) -> None:
        """`terminal` is rank 0's."""
        self._tokenizer, self._world, self._wish, self._terminal = loaded.tokenizer, groups.world, wish, terminal
        self._decoder, self._wording = Decoder(loaded.model, rows=1), Wording(loaded.tokenizer)
        self._generator = generator_of(loaded, self._decoder, self._wording, wish.slides)
        set_timeout(groups, PATIENCE)

    def run(self) -> None:
        """Until the person leaves. Collective."""
        number = 0
        with _deaf() if self._terminal is None else self._terminal:
            self._say(f"each line is a prompt; Ctrl-C ends an answer, {HOW_TO_LEAVE}")
            while (prompt := broadcast_json(self._terminal and self._terminal.ask(), self._world, 0)) is not None:
                ids = ids_of(self._tokenizer, prompt)
                if refusal := self._wish.refusal(ids, self._decoder.length):
                    self._say(refusal)
                    continue
                requests = self._wish.requests(ids, number)
                number += len(requests)
                self._answer(requests)

    def _answer(self, requests: list[Request]) -> None:
        for request in requests:
            (text,), interrupted = self._generator.begin([request]), False
            shown = self._show(text, 0)
            while text.ended is None and not interrupted:
                if interrupted := self._is_interrupted():
                    self._generator.drop(request.number)
                else:
                    self._generator.step()
                shown = self._show(text, shown)
            self._show_more("\n")
            if text.ended == "not finite":
                self._say("the model gave logits that are no numbers, or infinite: ask for --dtype fp32 or bf16")
            if interrupted:
                return

    def _is_interrupted(self) -> bool:
        return bool(broadcast_json(self._terminal and self._terminal.interrupted, self._world, 0))

    def _show(self, text: Text, shown: int) -> int:
        """What is new of it since `shown` characters."""
        found = self._wording.settled(text) if self._terminal is not None else ""
        self._show_more(found[shown:])
        return max(shown, len(found))

    def _show_more(self, words: str) -> None:
        if self._terminal is not None:
            self._terminal.show(words)

    def _say(self, line: str) -> None:
        if self._terminal is not None:
            self._terminal.say(line)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C is rank 0's to hear."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
