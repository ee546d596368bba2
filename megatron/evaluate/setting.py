"""The model that flags name, among the ranks that there are: what tasks and lm-eval's bridge are run on."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from data.plain_text import Separator
from data.preprocess import TextReadOptions
from data.tokenizer_base import Tokenizer
from megatron.checkpoint.agree import all_succeed_or_raise
from megatron.config.model import ModelConfig
from megatron.config.tree import require
from megatron.evaluate.scorer import Scorer
from megatron.evaluate.task import EvalModelInfo
from megatron.evaluate.writer import TextCompleter
from megatron.inference import loading
from megatron.inference.source import ModelSource
from megatron.launch import distributed
from megatron.model.gpt2 import GPT2
from mpu import groups as mpu_groups
from mpu.groups import Groups

ERASE_LINE = "\r\x1b[K"


@final
class EvalProgress:
    """Batches done, on standard error: a line that is written over on a terminal, now and then a line elsewhere."""

    def __init__(self, is_enabled: bool, min_interval: float = 10.0) -> None:
        """`pause`: seconds between lines that stay."""
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
    opened: loading.OpenedModel
    model_info: EvalModelInfo
    groups: Groups
    dtype: str
    device: torch.device
    batch_size: int

    @classmethod
    def open(cls,
             source: ModelSource,
             batch_size: int,
             compared_flags: Mapping[str, object] | None = None) -> EvalContext:
        """The weights are not read yet. Collective, of ranks that were `told` the same."""
        env, size = distributed.init(must_match=compared_flags), source.model_parallel_size
        require(env.world_size % size == 0, f"--model-parallel-size {size} does not divide the number of ranks, "
                f"{env.world_size}: start a multiple of {size} with python -m megatron.launch --nproc-per-node")
        groups = mpu_groups.build(size)
        found = loading.open_model(source, groups)
        _check_shape_flags(found, source.shape)
        tokenizer = all_succeed_or_raise(lambda: loading.build_tokenizer(found, source.tokenizer), groups.world)
        require(tokenizer.eod < found.shape.known_vocab_size, f"{found.name} has no token for the end of a document")
        subject = _model_info(tokenizer, found)
        return cls(found, subject, groups, source.dtype or found.precision, distributed.device_for(env, None),
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
        return loading.describe(self.opened, self.dtype, self.model_info.tokenizer)

    def load_model(self) -> GPT2:
        """Its weights. Collective."""
        return loading.build_model(self.opened, self.groups, loading.DTYPES[self.dtype], self.device)

    def build_scorer(self, model: GPT2) -> Scorer:
        return Scorer(model, self.groups, self.batch_size)

    def build_completer(self, model: GPT2) -> TextCompleter:
        return TextCompleter(model, self.model_info.tokenizer, self.groups, self.batch_size)

    def new_progress(self) -> EvalProgress:
        return EvalProgress(self.rank == 0)


def _check_shape_flags(opened: loading.OpenedModel, expected: Mapping[str, float]) -> None:
    """`seq_length` is the window, which is as long as the model's position table."""
    loading.check_model_shape(opened, {name: value for name, value in expected.items() if name != "seq_length"})
    window = opened.shape.max_position_embeddings
    require(expected.get("seq_length", window) == window, f"--seq-length {expected.get('seq_length')}: windows are the "
            f"{window} positions of {opened.name}; leave it out")


def _model_info(tokenizer: Tokenizer, opened: loading.OpenedModel) -> EvalModelInfo:
    """With what its run says of the data that it was trained with; a Hugging Face folder says nothing."""
    said = opened.data
    reading = TextReadOptions(said.get("text_key", TextReadOptions.json_key),
                              Separator.parse(said.get("document_separator")))
    apart = {part: said[f"{part}_data"] for part in ("valid", "test") if said.get(f"{part}_data")}
    return EvalModelInfo(tokenizer, opened.shape.max_position_embeddings, said.get("split"), apart, reading,
                         said.get("data_cache_path"))
