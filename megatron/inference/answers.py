"""Answers to prompts: tokens in, text out, in the order of the prompts."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, final

import torch

from data.tokenizer_base import REPLACEMENT, Tokenizer
from megatron.config.tree import require
from megatron.inference import loading
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator, Request, Text
from megatron.inference.sampling import Sampling
from mpu.collectives import broadcast_json
from mpu.groups import Groups


@final
class Answers:
    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, groups: Groups, settings: Sampling,
                 asked: argparse.Namespace, described: str) -> None:
        self._decoder, self._tokenizer, self._groups, self._asked = decoder, tokenizer, groups, asked
        self.described = described
        eod = tokenizer.eod if tokenizer.eod < decoder.model.config.tokens else None
        self._generator = Generator(decoder, settings, seed=asked.seed, vocabulary=tokenizer.vocab_size, eod=eod,
                                    slides=asked.past_the_end == "slide", stops=self._is_over)
        self._tokens, self._seconds = 0, 0.0
        self._printer: _Stream | None = None

    @classmethod
    def of(cls, asked: argparse.Namespace, settings: Sampling, groups: Groups, device: torch.device) -> Answers:
        """With the model and the tokenizer that are asked for. Collective."""
        found = loading.open_hf(asked.load_hf, groups) if asked.load_hf else loading.open_trained(asked.load, groups)
        tokenizer = loading.tokenizer_of(found, tokenizer_type=asked.tokenizer_type, vocab_file=asked.vocab_file,
                                         merge_file=asked.merge_file, tokenizer_path=asked.tokenizer_path)
        dtype = asked.dtype or found.precision
        model = loading.build(found, groups, loading.DTYPES[dtype], device)
        described = f"{found.name}: {found.shape.parameters():,} parameters in {dtype}, {tokenizer.name}"
        return cls(Decoder(model, asked.batch_size), tokenizer, groups, settings, asked, described)

    def write(self, prompts: Iterable[str], out: TextIO | None) -> None:
        """`prompts` and `out` are rank 0's. Answers that are ready before earlier ones wait for them."""
        ready: dict[int, Text] = {}
        words: dict[int, str] = {}
        begin, shown = time.monotonic(), 0
        streams = not self._asked.jsonl and self._decoder.rows == 1
        printer = self._printer = _Stream(out, self, self._asked.stop) if streams and out is not None else None
        for text in self._generator.run(self._requests(prompts, words), printer or (lambda text: None)):
            self._tokens += len(text.tokens)
            ready[text.request.number] = text
            while shown in ready:
                text = ready.pop(shown)
                if printer is not None:
                    printer.end(text)
                elif out is not None:
                    print(self._line(words[shown], text), file=out, flush=True)
                words.pop(shown, None)
                shown += 1
        self._seconds = time.monotonic() - begin

    def _requests(self, prompts: Iterable[str], words: dict[int, str]) -> Iterator[Request]:
        """The same on every rank."""
        number, mine = 0, iter(prompts)
        world = self._groups.world
        while (prompt := broadcast_json(next(mine, None) if world.rank == 0 else None, world, 0)) is not None:
            ids = tuple(int(token) for token in self._tokenizer.encode(prompt)) or (self._tokenizer.eod,)
            length = self._decoder.length
            require(len(ids) <= length or self._asked.past_the_end == "slide",
                    f"a prompt of {len(ids)} tokens, and the model has {length} positions: shorten it, or give "
                    "--past-the-end slide, which reads the last ones")
            for _ in range(self._asked.num_samples):
                words[number] = prompt
                if self._printer is not None:
                    self._printer.begin(prompt)
                yield Request(number, ids, self._asked.max_new_tokens)
                number += 1

    def _is_over(self, text: Text) -> bool:
        return any(stop in self._tokenizer.decode(text.tokens) for stop in self._asked.stop)

    def text_of(self, text: Text) -> str:
        """Without what stopped it, and what came with that in one token."""
        found = self._tokenizer.decode(text.tokens)
        ends = [place for stop in self._asked.stop if (place := found.find(stop)) >= 0]
        return found[: min(ends)] if ends else found

    def _line(self, prompt: str, text: Text) -> str:
        if not self._asked.jsonl:
            return prompt + self.text_of(text)
        return json.dumps({"prompt": prompt, "text": self.text_of(text), "tokens": text.tokens,
                           "logprobs": [round(value, 6) for value in text.logprobs], "ended": text.ended},
                          ensure_ascii=False)

    def speed(self) -> str:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return f"{self._tokens} tokens in {self._seconds:.1f} s, {rate:.1f} a second"


class _Stream:
    """Prints a text as it comes: what can no longer change. Its last characters may be the beginning of a stop."""

    def __init__(self, out: TextIO, answers: Answers, stops: Sequence[str]) -> None:
        self._out, self._answers, self._printed = out, answers, ""
        self._held = max(map(len, stops), default=1) - 1

    def begin(self, prompt: str) -> None:
        self._out.write(prompt)

    def __call__(self, text: Text) -> None:
        found = self._answers.text_of(text)
        if not found.endswith(REPLACEMENT):
            self._print(found[: max(len(self._printed), len(found) - self._held)])

    def _print(self, found: str) -> None:
        self._out.write(found[len(self._printed):])
        self._out.flush()
        self._printed = found

    def end(self, text: Text) -> None:
        self._print(self._answers.text_of(text))
        self._out.write("\n")
        self._out.flush()
        self._printed = ""
