"""What a checkpoint records of the GPT-2 it holds: its shape, its precision and its tokenizer.

The engine saves the `ModelConfig` that its module has as `config`, in the trainer and in a loop of a user's own alike.
A checkpoint of a module without one has no vocabulary size, and so has one that a loop of a user's own saved in former
versions. The tokenizer is what `client_state["tokenizer"]` says (`asdict(tokenizer.facts)`), and where the trainer
found its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.facts import TokenizerFacts, tokenizer_facts_of_state
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.part import SHARED_STATE_FILE
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.strict import StrictRecord, reraise_as_corrupt
from megatron.config.tree import ModelConfig
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class RecordedModel:
    shape: ModelConfig
    precision: str
    """fp32, fp16 or bf16: of the weights in training."""
    data: Mapping[str, Any]
    """The section `data` of the configuration, with the type of the recorded tokenizer where it names none."""
    tokenizer: TokenizerFacts | None


def read_recorded_model(checkpoint: Checkpoint) -> RecordedModel:
    with reraise_as_corrupt(f"tag {checkpoint.tag}: {MANIFEST}: config"):
        shape, data = ModelConfig(**checkpoint.config["model"]), dict(checkpoint.config["data"])
        precision = next((name for name in ("bf16", "fp16") if checkpoint.config["precision"][name]), "fp32")
    if shape.vocab_size is None:
        raise CheckpointError(
            f"{checkpoint.tag} of {checkpoint.folder.parent} does not record the shape of its model: expected "
            "a GPT2 of megatron.model; load_checkpoint into the model it was saved from, and "
            "save_checkpoint, record it")
    state = StrictRecord(checkpoint.shared_state,
                         f"tag {checkpoint.tag}: file {SHARED_STATE_FILE}").take_field("client_state", dict)
    tokenizer = tokenizer_facts_of_state(state)
    if tokenizer is not None and data.get("tokenizer_type") is None:
        data["tokenizer_type"] = tokenizer.name
    return RecordedModel(shape, precision, data, tokenizer)
