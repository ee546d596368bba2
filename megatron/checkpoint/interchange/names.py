"""What other programs call the parameters of a GPT-2: one table for each program, and the functions that walk it.

A name of theirs is `<prefixes><outside>.weight` or `<prefixes><layers>.<i>.<module>.weight` (or `.bias`). Ours are
those of megatron/model/: `wte`, `wpe`, `blocks.<i>.<module>`, `ln_f`, with matrices as [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.errors import CheckpointError


@dataclass(frozen=True)
class NameTable:
    """The names of one program. Where two of theirs are one of ours, the first is the one that is written."""

    title: str
    prefixes: tuple[str, ...]
    """What releases and wrappers put before the names, in any order and number."""
    layers: str
    modules: Mapping[str, str]
    """In a layer: theirs -> ours."""
    top_level: Mapping[str, str]
    """Outside of the layers: theirs -> ours."""
    skipped: str
    """Pattern of what holds no weight of its own: masks, and output layers that are the token table."""
    transposes_matrices: bool = False
    """Matrices in layers are [in, out]."""

    def to_our_name(self, name: str) -> str | None:
        """Our name; None for what is skipped."""
        bare = re.sub(f"^({'|'.join(map(re.escape, self.prefixes))})+", "", name)
        module, _, kind = bare.rpartition(".")
        layer = re.fullmatch(rf"{self.layers}\.(\d+)\.(.+)", module)
        known = self.modules.get(layer[2]) if layer else self.top_level.get(module)
        if known is None or kind not in ("weight", "bias"):
            if re.fullmatch(self.skipped, bare):
                return None
            raise CheckpointError(f"{name} belongs to no GPT-2 of {self.title} that this program knows")
        return f"blocks.{layer[1]}.{known}.{kind}" if layer else f"{known}.{kind}"

    def to_their_name(self, ours: str, prefix: str) -> str:
        module, _, kind = ours.rpartition(".")
        layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        table = self.modules if layer else self.top_level
        found = next(their for their, our in table.items() if our == (layer[2] if layer else module))
        return f"{prefix}{self.layers}.{layer[1]}.{found}.{kind}" if layer else f"{prefix}{found}.{kind}"

    def is_transposed(self, ours: str) -> bool:
        """Whether they keep this one as the transpose of ours."""
        return self.transposes_matrices and re.fullmatch(r"blocks\.\d+\.(attn|mlp)\.\w+\.weight", ours) is not None

    def rename_tensors(self, tensors: Iterable[tuple[str, Tensor]], where: str) -> dict[str, Tensor]:
        """Tensors by our names; one that is unknown or there twice is an error."""
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors:
            try:
                ours = self.to_our_name(name)
            except CheckpointError as error:
                raise CheckpointError(f"{where}: {error}") from error
            if ours in renamed:
                raise CheckpointError(f"{where}: {name} is there twice, with and without a prefix")
            if ours is not None:
                renamed[ours] = tensor
        return renamed


HUGGING_FACE = NameTable(
    "Hugging Face", prefixes=("_orig_mod.", "module.", "transformer."), layers="h", transposes_matrices=True,
    modules={"ln_1": "ln_1", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj", "ln_2": "ln_2",
             "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj"},
    top_level={"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"},
    skipped=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias")

NANOGPT = replace(HUGGING_FACE, title="nanoGPT", transposes_matrices=False)

MEGATRON_LM = NameTable(
    "Megatron-LM", prefixes=("module.", "model.", "language_model.", "embedding.", "transformer.", "encoder."),
    layers="layers",
    modules={"input_layernorm": "ln_1", "attention.query_key_value": "attn.qkv", "attention.dense": "attn.proj",
             "self_attention.query_key_value": "attn.qkv", "self_attention.dense": "attn.proj",
             "post_attention_layernorm": "ln_2", "mlp.dense_h_to_4h": "mlp.fc", "mlp.dense_4h_to_h": "mlp.proj"},
    top_level={"word_embeddings": "wte", "position_embeddings": "wpe", "final_layernorm": "ln_f"},
    skipped=r"word_embeddings_for_head\..*|.*\._extra_state|layers\.\d+\..*\.(masked_)?bias")
