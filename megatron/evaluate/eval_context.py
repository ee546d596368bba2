"""What an evaluation runs on: the opened model and the process groups, and the scorer, text generator and tasks over
them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from data.plain_text import Separator
from data.preprocess import TextReadOptions
from data.tokenizer_base import Tokenizer
from megatron.config.model_config import ModelConfig
from megatron.config.tree import require
from megatron.distributed import process_group
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.evaluate import hellaswag, lambada, perplexity, wikitext
from megatron.evaluate.eval_args import EvalRequest
from megatron.evaluate.scoring import Scorer
from megatron.evaluate.task import EvalModelInfo, EvalTask
from megatron.inference import load
from megatron.inference.decoder import Decoder
from megatron.inference.detokenizer import SequenceDetokenizer
from megatron.inference.generation import Generator
from megatron.inference.model_args import ModelSource
from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from mpu import groups as mpu_groups
from mpu.collectives import all_gather_json
from mpu.groups import Groups

SEED = 1234
DEFAULT_MAX_NEW_TOKENS = 256
"""New tokens, where a task does not say."""

MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN_KWARGS = frozenset({"do_sample", "temperature", "top_k", "top_p", "until", *MAX_TOKENS_KEYS})


@dataclass(frozen=True)
class GenerateUntilRequest:
    context: str
    until: tuple[str, ...]
    """A text ends before the first of these."""
    max_new_tokens: int
    sampling: Sampling

    @classmethod
    def from_kwargs(cls, context: str, kwargs: Mapping[str, Any]) -> GenerateUntilRequest:
        """As lm-eval's tasks say it in `generation_kwargs`: greedy, unless they give a temperature."""
        for name in kwargs:
            require(name in KNOWN_KWARGS,
                    f"generation_kwargs: {name} is not known here; known: {', '.join(sorted(KNOWN_KWARGS))}")
        until = kwargs.get("until") or []
        ends = tuple(end for end in ([until] if isinstance(until, str) else until) if end)
        most = next((kwargs[name] for name in MAX_TOKENS_KEYS if kwargs.get(name) is not None), DEFAULT_MAX_NEW_TOKENS)
        temperature = float(kwargs.get("temperature") or 0.0)
        sampling = Sampling(temperature=temperature, top_k=int(kwargs.get("top_k") or 0),
                            top_p=float(kwargs.get("top_p") or 1.0)
                            ) if kwargs.get("do_sample", True) and temperature > 0 else Sampling(greedy=True)
        return cls(context, ends, int(most), sampling)


@final
class TextCompleter:
    def __init__(self, model: GPT2, tokenizer: Tokenizer, groups: Groups, rows: int) -> None:
        self._tokenizer, self._groups, self._length = tokenizer, groups, model.config.max_position_embeddings
        self._detokenizer = SequenceDetokenizer(tokenizer)
        self._generator = Generator(Decoder(model, rows), vocabulary=tokenizer.vocab_size, eod=tokenizer.eod,
                                    should_stop=self._detokenizer.has_stop_string)

    def __call__(self, wanted_texts: Sequence[GenerateUntilRequest]) -> list[str]:
        """On every rank. Collective."""
        requests, dp = [self._request(number, one) for number, one in enumerate(wanted_texts)], self._groups.dp
        mine = self._generator.generate(requests[dp.rank :: dp.size])
        found = {str(text.request.number): self._detokenizer.decode(text) for text in mine}
        everywhere = {int(number): text for part in all_gather_json(found, dp) for number, text in part.items()}
        return [everywhere[number] for number in range(len(wanted_texts))]

    def _request(self, number: int, wanted: GenerateUntilRequest) -> Request:
        """With the end of the context, so that there is room for what comes."""
        room = self._length - wanted.max_new_tokens
        require(room > 0, f"{wanted.max_new_tokens} new tokens are asked for, and the model has {self._length} "
                "positions: a task's generation_kwargs say how many (max_gen_toks)")
        prompt = tuple(self._tokenizer.encode(wanted.context)[-room:]) or (self._tokenizer.eod,)
        return Request(number, prompt, wanted.max_new_tokens, wanted.sampling, f"{SEED}/{number}", wanted.until)


def prepare_task(request: EvalRequest, model_info: EvalModelInfo) -> EvalTask:
    """Read and tokenize what is asked for."""
    task: EvalTask
    match request.task:
        case "wikitext":
            task = wikitext.prepare(request, model_info)
        case "lambada":
            task = lambada.prepare(request, model_info)
        case "hellaswag":
            task = hellaswag.prepare(request, model_info)
        case _:
            task = perplexity.prepare(request, model_info)
    return task


ERASE_LINE = "\r\x1b[K"


@final
class EvalProgress:
    """Batches done, on standard error: a line that is written over on a terminal, now and then a line elsewhere."""

    def __init__(self, is_enabled: bool, min_interval: float = 10.0) -> None:
        """`min_interval`: seconds between lines that stay."""
        self._is_enabled, self._is_terminal = is_enabled, sys.stderr.isatty()
        self._min_interval = 0.1 if self._is_terminal else min_interval
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_enabled or now - self._last < self._min_interval and not (self._is_terminal and done == total):
            return
        self._last = now
        if done == total:
            self._write(ERASE_LINE if self._is_terminal else "")
            return
        left = (now - self._began) / done * (total - done)
        line = f"{done:,} of {total:,} batches, {left:.0f} s left"
        self._write(f"{ERASE_LINE}{line}" if self._is_terminal else f"{line}\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


@final
@dataclass(frozen=True)
class EvalContext:
    opened: load.OpenedModel
    model_info: EvalModelInfo
    groups: Groups
    dtype: str
    device: torch.device
    batch_size: int

    @classmethod
    def open(cls, source: ModelSource, batch_size: int,
             compared_flags: Mapping[str, object] | None = None) -> EvalContext:
        """The weights are not read yet. Collective, of ranks whose `compared_flags` are equal."""
        env, size = process_group.init(must_match=compared_flags), source.model_parallel_size
        require(env.world_size % size == 0, f"--model-parallel-size {size} does not divide the number of ranks, "
                f"{env.world_size}: start a multiple of {size} with python -m megatron.launch --nproc-per-node")
        groups = mpu_groups.build(size)
        found = load.open_model(source, groups)
        _check_shape_flags(found, source.shape)
        tokenizer = all_succeed_or_raise(lambda: load.build_tokenizer(found, source.tokenizer), groups.world)
        require(tokenizer.eod < found.shape.known_vocab_size, f"{found.name} has no token for the end of a document")
        subject = _model_info(tokenizer, found)
        return cls(found, subject, groups, source.dtype or found.precision, process_group.device_for(env, None),
                   batch_size)

    @property
    def rank(self) -> int:
        return self.groups.world.rank

    @property
    def name(self) -> str:
        return self.opened.name

    @property
    def shape(self) -> ModelConfig:
        return self.opened.shape

    @property
    def description(self) -> str:
        return load.describe(self.opened, self.dtype, self.model_info.tokenizer)

    def load_model(self) -> GPT2:
        """Its weights. Collective."""
        return load.build_model(self.opened, self.groups, load.DTYPES[self.dtype], self.device)

    def build_scorer(self, model: GPT2) -> Scorer:
        return Scorer(model, self.groups, self.batch_size)

    def build_completer(self, model: GPT2) -> TextCompleter:
        return TextCompleter(model, self.model_info.tokenizer, self.groups, self.batch_size)

    def new_progress(self) -> EvalProgress:
        return EvalProgress(self.rank == 0)


def _check_shape_flags(opened: load.OpenedModel, expected: Mapping[str, float]) -> None:
    """`seq_length` is the window, which is as long as the model's position table."""
    load.check_model_shape(opened, {name: value for name, value in expected.items() if name != "seq_length"})
    window = opened.shape.max_position_embeddings
    require(expected.get("seq_length", window) == window, f"--seq-length {expected.get('seq_length')}: windows are the "
            f"{window} positions of {opened.name}; leave it out")


def _model_info(tokenizer: Tokenizer, opened: load.OpenedModel) -> EvalModelInfo:
    """With what its run says of the data that it was trained with; a Hugging Face folder says nothing."""
    said = opened.data
    reading = TextReadOptions(said.get("text_key", TextReadOptions.json_key),
                              Separator.parse(said.get("document_separator")))
    apart = {part: said[f"{part}_data"] for part in ("valid", "test") if said.get(f"{part}_data")}
    return EvalModelInfo(tokenizer, opened.shape.max_position_embeddings, said.get("split"), apart, reading,
                         said.get("data_cache_path"))
