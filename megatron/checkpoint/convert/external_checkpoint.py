"""A GPT-2 that another program saved, with our parameter names: whole, unpadded tensors as [out, in].

`ExternalCheckpoint` reads like a checkpoint of ours (reader.py), so an engine of any layout loads from it. A
`NameTable` per program maps `<prefixes><layers>.<i>.<module>.weight` to `blocks.<i>.<module>.weight`. Torch files are
read with the restricted loader; anything but tensors and plain values becomes an `InertObject`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final
from zlib import crc32

import torch
from torch import Tensor

from megatron.checkpoint.pieces import tp_sharding_of
from megatron.config.tree import ModelConfig
from megatron.distributed.consistency import all_succeed_or_raise, assert_equal_across_ranks
from megatron.errors import CheckpointError, ConfigError
from mpu.groups import Group
from mpu.split import Partition


@dataclass(frozen=True)
class NameTable:
    """Parameter names of one program. If several of its names map to one of ours, the first is used for writing."""

    title: str
    prefixes: tuple[str, ...]
    """Prefixes added by releases and wrappers, in any order and number."""
    layers: str
    modules: Mapping[str, str]
    """Module names inside a layer: theirs -> ours."""
    top_level: Mapping[str, str]
    """Module names outside layers: theirs -> ours."""
    skipped: str
    """Pattern of names to skip: masks, and output layers tied to the token table."""
    transposes_matrices: bool = False
    """Matrices in layers are stored [in, out]."""

    def to_their_name(self, ours: str, prefix: str) -> str:
        module, _, kind = ours.rpartition(".")
        layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", module)
        table = self.modules if layer else self.top_level
        found = next(their for their, our in table.items() if our == (layer[2] if layer else module))
        return f"{prefix}{self.layers}.{layer[1]}.{found}.{kind}" if layer else f"{prefix}{found}.{kind}"

    def is_transposed(self, ours: str) -> bool:
        """Whether their tensor is the transpose of ours."""
        return self.transposes_matrices and re.fullmatch(r"blocks\.\d+\.(attn|mlp)\.\w+\.weight", ours) is not None

    def rename_tensors(self, tensors: Iterable[tuple[str, Tensor]], where: str) -> dict[str, Tensor]:
        """Tensors by our names; CheckpointError for an unknown or duplicate name."""
        renamed: dict[str, Tensor] = {}
        for name, tensor in tensors:
            bare = re.sub(f"^({'|'.join(map(re.escape, self.prefixes))})+", "", name)
            module, _, kind = bare.rpartition(".")
            layer = re.fullmatch(rf"{self.layers}\.(\d+)\.(.+)", module)
            known = self.modules.get(layer[2]) if layer else self.top_level.get(module)
            if known is None or kind not in ("weight", "bias"):
                if re.fullmatch(self.skipped, bare):
                    continue
                raise CheckpointError(f"{where}: {name} belongs to no GPT-2 of {self.title} that this program knows")
            ours = f"blocks.{layer[1]}.{known}.{kind}" if layer else f"{known}.{kind}"
            if ours in renamed:
                raise CheckpointError(f"{where}: {name} is there twice, with and without a prefix")
            renamed[ours] = tensor
        return renamed


HUGGING_FACE = NameTable(
    "Hugging Face", prefixes=("_orig_mod.", "module.", "transformer."), layers="h", transposes_matrices=True,
    modules={"ln_1": "ln_1", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj", "ln_2": "ln_2",
             "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj"}, top_level={"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"},
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


LoadTensor = Callable[[], Tensor]

SAMPLES_PER_TENSOR = 32
"""Elements of each tensor that ranks compare; each reads one page of a mapped file."""


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameter name -> logical shape, for the whole model (megatron/model/)."""
    h, ffn = model.hidden_size, model.ffn_size
    block = {"ln_1.weight": (h,), "ln_1.bias": (h,), "attn.qkv.weight": (3 * h, h), "attn.qkv.bias": (3 * h,),
             "attn.proj.weight": (h, h), "attn.proj.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,),
             "mlp.fc.weight": (ffn, h), "mlp.fc.bias": (ffn,), "mlp.proj.weight": (h, ffn), "mlp.proj.bias": (h,)}
    return {"wte.weight": (model.known_vocab_size, h), "wpe.weight": (model.max_position_embeddings, h),
            **{f"blocks.{i}.{name}": shape for i in range(model.num_layers) for name, shape in block.items()},
            "ln_f.weight": (h,), "ln_f.bias": (h,)}


@final
class ExternalCheckpoint:
    """The weights of another program's model. Each is loaded on request; the last one is cached."""

    def __init__(self, where: str, model: ModelConfig, loads: Mapping[str, LoadTensor],
                 notes: tuple[str, ...] = ()) -> None:
        self.where, self.model, self.notes = where, model, notes
        self.shapes, self._loads = parameter_shapes(model), loads
        for what, names in (("missing", self.shapes.keys() - loads), ("unknown", loads.keys() - self.shapes.keys())):
            if names:
                raise CheckpointError(f"{where}: {len(names)} tensors {what} for a GPT-2 of {model.num_layers} layers, "
                                      f"{min(names)} (by our name) first")
        self._last: tuple[str, Tensor] = "", torch.empty(0)

    def check(self) -> None:
        """Load every tensor once to check its shape, before any parameter is changed."""
        for name in self.shapes:
            self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise CheckpointError(f"{self.where}: holds no {name!r}")
        found, shape = self._loads[name](), self.shapes[name]
        if tuple(found.shape) != shape or not found.is_floating_point():
            raise CheckpointError(f"{self.where}: {name}: expected {list(shape)} floating point numbers, found "
                                  f"{list(found.shape)} of {found.dtype}; the file does not match its own description")
        return found

    def read(self, kind: str, name: str, *, shape: tuple[int, ...], partition: Partition | None, tp_rank: int,
             tp_size: int, offset: int, out: Tensor) -> None:
        """Fill the 1-D `out` with elements from `offset` of the flattened local tensor of `shape` on rank `tp_rank`."""
        assert kind == "weight", kind
        if self._last[0] != name:
            self._last = name, self.tensor(name).contiguous().view(-1)
        flat, sharding = self._last[1], tp_sharding_of(shape, partition, tp_size)
        if sharding.logical_shape != self.shapes[name]:
            raise CheckpointError(f"{self.where}: {name}: shape expected {list(sharding.logical_shape)}, "
                                  f"found {list(self.shapes[name])}")
        out.zero_()
        tp_rank = 0 if partition is None else tp_rank
        for segment in sharding.to_logical(tp_rank, offset, offset + out.numel()):
            source = flat[segment.logical_start:segment.logical_start + segment.count]
            out[segment.local_start - offset:][:segment.count].copy_(source)

    def sampled_checksums(self) -> dict[str, str]:
        """Name -> dtype, shape and a checksum of evenly spaced elements. Detects files of another training run or
        mixed-up files, not every changed byte."""
        found = {}
        for name in self.shapes:
            tensor = self.tensor(name)
            places = torch.linspace(0, tensor.numel() - 1, min(SAMPLES_PER_TENSOR, tensor.numel()), dtype=torch.float64)
            sampled = tensor[torch.unravel_index(places.round().long(), tensor.shape)].double()
            kind = str(tensor.dtype).removeprefix("torch.")
            found[name] = f"{kind} {list(tensor.shape)} ({crc32(sampled.numpy().tobytes()):08x})"
        return found


def assert_same_weights(source: ExternalCheckpoint, world: Group) -> None:
    """Raise unless all ranks read the same weights, by `sampled_checksums`; each may read its own copy. Collective."""
    if not world.is_solo:
        assert_equal_across_ranks(all_succeed_or_raise(source.sampled_checksums, world), world,
                                  "the ranks find different weights, each at the path that it was given")


def build_model_config(where: str, **fields: Any) -> ModelConfig:
    """The ModelConfig that a file declares; invalid values raise a CheckpointError."""
    try:
        return ModelConfig(**fields)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{where}: {error}") from error


LEGACY_GLOBALS = ("argparse.Namespace", "numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")
"""Globals in Megatron files written before torch 1.6, whose format does not list them."""


@final
class InertObject:
    """Stands for any non-tensor object in a torch file: holds attributes and runs no code."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def load_torch_file(path: Path) -> Any:
    """Load a `torch.save` file with torch's restricted loader, memory-mapped if its format allows. Old training
    programs also saved their arguments and numpy's random state; such classes are not imported, an `InertObject`
    replaces them. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"PK"
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else LEGACY_GLOBALS
        with torch.serialization.safe_globals([(InertObject, name) for name in names]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # a damaged file can raise anything
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: cannot be read as a torch file of tensors: {reason:.300}") from error
