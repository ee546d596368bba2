"""The model that flags name, among the ranks that there are: what tasks and lm-eval's bridge are run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from data.plain_text import Separator
from data.preprocess import Reading
from data.tokenizer_base import Tokenizer
from megatron.checkpoint.agree import agree
from megatron.config.model import ModelConfig
from megatron.config.tree import require
from megatron.evaluate.progress import Progress
from megatron.evaluate.scorer import Scorer
from megatron.evaluate.task import Subject
from megatron.evaluate.writer import Writer
from megatron.inference import loading
from megatron.inference.source import Source
from megatron.launch import distributed
from megatron.model.gpt2 import GPT2
from mpu import groups as mpu_groups
from mpu.groups import Groups


@final
@dataclass(frozen=True)
class Setting:
    found: loading.Found
    subject: Subject
    groups: Groups
    dtype: str
    device: torch.device
    batch_size: int

    @classmethod
    def of(cls, source: Source, batch_size: int, told: Mapping[str, object] | None = None) -> Setting:
        """The weights are not read yet. Collective, of ranks that were `told` the same."""
        env, size = distributed.init(told=told), source.model_parallel_size
        require(env.world_size % size == 0, f"--model-parallel-size {size} does not divide the number of ranks, "
                f"{env.world_size}: start a multiple of {size} with python -m megatron.launch --nproc-per-node")
        groups = mpu_groups.build(size)
        found = loading.open_source(source, groups)
        _check_shape(found, source.shape)
        tokenizer = agree(lambda: loading.tokenizer_of(found, source.tokenizer), groups.world)
        require(tokenizer.eod < found.shape.tokens, f"{found.name} has no token for the end of a document")
        subject = _subject(tokenizer, found)
        return cls(found, subject, groups, source.dtype or found.precision, distributed.device_for(env, None),
                   batch_size)

    @property
    def rank(self) -> int:
        return self.groups.world.rank

    @property
    def name(self) -> str:
        return self.found.name

    @property
    def shape(self) -> ModelConfig:
        return self.found.shape

    @property
    def described(self) -> str:
        return loading.described(self.found, self.dtype, self.subject.tokenizer)

    def model(self) -> GPT2:
        """Its weights. Collective."""
        return loading.build(self.found, self.groups, loading.DTYPES[self.dtype], self.device)

    def scorer(self, model: GPT2) -> Scorer:
        return Scorer(model, self.groups, self.batch_size)

    def writer(self, model: GPT2) -> Writer:
        return Writer(model, self.subject.tokenizer, self.groups, self.batch_size)

    def progress(self) -> Progress:
        return Progress(self.rank == 0)


def _check_shape(found: loading.Found, said: Mapping[str, float]) -> None:
    """`seq_length` is the window, which is as long as the model's position table."""
    loading.check_shape(found, {name: value for name, value in said.items() if name != "seq_length"})
    window = found.shape.max_position_embeddings
    require(said.get("seq_length", window) == window, f"--seq-length {said.get('seq_length')}: windows are the "
            f"{window} positions of {found.name}; leave it out")


def _subject(tokenizer: Tokenizer, found: loading.Found) -> Subject:
    """With what its run says of the data that it was trained with; a Hugging Face folder says nothing."""
    said = found.data
    reading = Reading(said.get("text_key", Reading.key), Separator.parse(said.get("document_separator")))
    apart = {part: said[f"{part}_data"] for part in ("valid", "test") if said.get(f"{part}_data")}
    return Subject(tokenizer, found.shape.max_position_embeddings, said.get("split"), apart, reading,
                   said.get("data_cache_path"))
