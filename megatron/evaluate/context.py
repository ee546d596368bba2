"""What an evaluation runs on: the opened model, the process groups and the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch

from data.text_files import Separator
from data.preprocess import TextReadOptions
from megatron.config.tree import require
from megatron.distributed import process_group
from megatron.distributed.consistency import all_succeed_or_raise
from megatron.evaluate.scoring import Scorer
from megatron.evaluate.tasks import EvalModelInfo
from megatron.inference import load
from megatron.inference.model_args import ModelSource
from megatron.model.gpt2 import GPT2
from mpu import groups as mpu_groups
from mpu.groups import Groups


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
        model_info = EvalModelInfo(tokenizer, window, reading, settings.get("split"), part_files,
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
        return Scorer(model, self.groups, self.batch_size, shows_progress=self.rank == 0)
