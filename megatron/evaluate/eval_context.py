"""What an evaluation runs on: the opened model and the process groups, and the scorer, text generator and tasks over
them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from data.plain_text import Separator
from data.preprocess import TextReadOptions
from data.tokenizer_base import Tokenizer
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

MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
KNOWN_KWARGS = frozenset({"do_sample", "temperature", "top_k", "top_p", "until", *MAX_TOKENS_KEYS})


@dataclass(frozen=True)
class GenerateUntilRequest:
    context: str
    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    @classmethod
    def from_kwargs(cls, context: str, kwargs: Mapping[str, Any]) -> GenerateUntilRequest:
        """From the `generation_kwargs` of an lm-eval task; greedy unless they give a temperature."""
        for name in kwargs:
            require(name in KNOWN_KWARGS,
                    f"generation_kwargs: {name} is not known here; known: {', '.join(sorted(KNOWN_KWARGS))}")
        until = kwargs.get("until") or []
        ends = tuple(end for end in ([until] if isinstance(until, str) else until) if end)
        most = next((kwargs[name] for name in MAX_TOKENS_KEYS if kwargs.get(name) is not None), DEFAULT_MAX_NEW_TOKENS)
        temperature = float(kwargs.get("temperature") or 0.0)
        sampling = Sampling(greedy=True)
        if kwargs.get("do_sample", True) and temperature > 0:
            sampling = Sampling(temperature=temperature, top_k=int(kwargs.get("top_k") or 0),
                                top_p=float(kwargs.get("top_p") or 1.0))
        return cls(context, ends, int(most), sampling)


@final
class TextCompleter:
    def __init__(self, model: GPT2, tokenizer: Tokenizer, groups: Groups, rows: int) -> None:
        self._tokenizer, self._groups, self._length = tokenizer, groups, model.config.max_position_embeddings
        self._detokenizer = SequenceDetokenizer(tokenizer)
        self._generator = Generator(Decoder(model, rows), vocabulary=tokenizer.vocab_size, eod=tokenizer.eod,
                                    should_stop=self._detokenizer.has_stop_string)

    def __call__(self, wanted_texts: Sequence[GenerateUntilRequest]) -> list[str]:
        """The texts of all requests, on every rank; data parallel ranks share the work. Collective."""
        requests, dp = [], self._groups.dp
        for number, wanted in enumerate(wanted_texts):
            room = self._length - wanted.max_new_tokens  # the end of the context, so that the answer fits
            require(room > 0, f"{wanted.max_new_tokens} new tokens are asked for, and the model has {self._length} "
                    "positions: a task's generation_kwargs say how many (max_gen_toks)")
            prompt = tuple(self._tokenizer.encode(wanted.context)[-room:]) or (self._tokenizer.eod,)
            requests.append(Request(number, prompt, wanted.max_new_tokens, wanted.sampling, f"{SEED}/{number}",
                                    wanted.until))
        mine = self._generator.generate(requests[dp.rank :: dp.size])
        texts = {str(text.request.number): self._detokenizer.decode(text) for text in mine}
        everywhere = {int(number): text for part in all_gather_json(texts, dp) for number, text in part.items()}
        return [everywhere[number] for number in range(len(wanted_texts))]


def prepare_task(request: EvalRequest, model_info: EvalModelInfo) -> EvalTask:
    prepare: Mapping[str, Callable[[EvalRequest, EvalModelInfo], EvalTask]] = {
        "wikitext": wikitext.prepare, "lambada": lambada.prepare, "hellaswag": hellaswag.prepare,
        "perplexity": perplexity.prepare}
    return prepare[request.task](request, model_info)


ERASE_LINE = "\r\x1b[K"


@final
class EvalProgress:
    """Progress on standard error: one line that is overwritten on a terminal, elsewhere a line every 10 seconds."""

    def __init__(self, is_enabled: bool) -> None:
        self._is_enabled, self._is_terminal = is_enabled, sys.stderr.isatty()
        self._min_interval = 0.1 if self._is_terminal else 10.0
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_enabled or now - self._last < self._min_interval and not (self._is_terminal and done == total):
            return
        self._last = now
        left = (now - self._began) / done * (total - done)
        line = "" if done == total else f"{done:,} of {total:,} batches, {left:.0f} s left"
        if self._is_terminal:
            line = ERASE_LINE + line
        elif line:
            line += "\n"
        sys.stderr.write(line)
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
        """Does not read the weights yet. Collective, with equal `compared_flags` on all ranks."""
        env, size = process_group.init(must_match=compared_flags), source.model_parallel_size
        require(env.world_size % size == 0, f"--model-parallel-size {size} does not divide the number of ranks, "
                f"{env.world_size}: start a multiple of {size} with python -m megatron.launch --nproc-per-node")
        groups = mpu_groups.build(size)
        opened = load.open_model(source, groups)
        load.check_model_shape(opened, {name: value for name, value in source.shape.items() if name != "seq_length"})
        window = opened.shape.max_position_embeddings
        seq_length = source.shape.get("seq_length", window)
        require(seq_length == window,
                f"--seq-length {seq_length}: windows are the {window} positions of {opened.name}; leave it out")
        tokenizer = all_succeed_or_raise(lambda: load.build_tokenizer(opened, source.tokenizer), groups.world)
        require(tokenizer.eod < opened.shape.known_vocab_size,
                f"{opened.name} has no token for the end of a document")
        # how the training data of a run was read and split; a Hugging Face folder does not say
        settings = opened.data
        reading = TextReadOptions(settings.get("text_key", TextReadOptions.json_key),
                                  Separator.parse(settings.get("document_separator")))
        part_files = {part: settings[f"{part}_data"] for part in ("valid", "test") if settings.get(f"{part}_data")}
        model_info = EvalModelInfo(tokenizer, window, settings.get("split"), part_files, reading,
                                   settings.get("data_cache_path"))
        return cls(opened, model_info, groups, source.dtype or opened.precision,
                   process_group.device_for(env, None), batch_size)

    @property
    def rank(self) -> int:
        return self.groups.world.rank

    def load_model(self) -> GPT2:
        """Reads the weights. Collective."""
        return load.build_model(self.opened, self.groups, load.DTYPES[self.dtype], self.device)

    def build_scorer(self, model: GPT2) -> Scorer:
        return Scorer(model, self.groups, self.batch_size)

    def new_progress(self) -> EvalProgress:
        return EvalProgress(self.rank == 0)
