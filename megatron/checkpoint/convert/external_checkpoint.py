"""A GPT-2 that another program saved, with our parameter names: whole, unpadded tensors as [out, in]; and saving one as
a checkpoint of ours.

`ExternalCheckpoint` reads like a checkpoint of ours (reader.py), so an engine of any layout loads from it. Torch files
are read with the restricted loader; anything but tensors and plain values becomes an `InertObject`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from megatron.checkpoint.commit import check_save_root_is_writable, lock_save_root
from megatron.checkpoint.int8_weights import (INT8_KIND, SCALE_KIND, is_quantised, quantise_into, row_maxima,
                                              scales_from_maxima)
from megatron.checkpoint.manifest import tag_of_iteration
from megatron.checkpoint.reader import Checkpoint, read_recorded_model
from megatron.checkpoint.reshard import TPSlice
from megatron.checkpoint.tags import tag_names
from megatron.checkpoint.writer import SaveReport, TensorSource, save
from megatron.config.tree import Config, ModelConfig
from megatron.distributed.consistency import all_succeed_or_raise, assert_equal_across_ranks
from megatron.errors import CheckpointError, ConfigError
from megatron.model import GPT2
from mpu.groups import SOLO, Group
from mpu.partition import partition_of
from mpu.split import Partition

LoadTensor = Callable[[], Tensor]

SAMPLES_PER_TENSOR = 32  # elements of each tensor that ranks compare; each reads one page of a mapped file


@lru_cache(1)
def parameter_partitions(model: ModelConfig) -> dict[str, tuple[tuple[int, ...], Partition | None]]:
    """Parameter name -> logical shape and how tensor parallelism splits it, in the order of the model."""
    parameters = GPT2(model, deferred=True).named_parameters()
    return {name: (TPSlice(tuple(value.shape), partition_of(value)).sharding.logical_shape, partition_of(value))
            for name, value in parameters}


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameter name -> logical shape, for the whole model."""
    return {name: shape for name, (shape, _) in parameter_partitions(model).items()}


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

    def tensor(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise CheckpointError(f"{self.where}: holds no {name!r}")
        found, shape = self._loads[name](), self.shapes[name]
        if tuple(found.shape) != shape or not found.is_floating_point():
            raise CheckpointError(f"{self.where}: {name}: expected {list(shape)} floating point numbers, found "
                                  f"{list(found.shape)} of {found.dtype}; the file does not match its own description")
        return found

    def read_slice(self, kind: str, name: str, local: TPSlice, offset: int, out: Tensor) -> None:
        """Fill the 1-D `out` with elements from `offset` of the flattened local tensor."""
        assert kind == "weight", kind
        if self._last[0] != name:
            self._last = name, self.tensor(name).contiguous().view(-1)
        flat, sharding = self._last[1], local.sharding
        if sharding.logical_shape != self.shapes[name]:
            raise CheckpointError(f"{self.where}: {name}: shape expected {list(sharding.logical_shape)}, "
                                  f"found {list(self.shapes[name])}")
        out.zero_()
        for segment in sharding.to_logical(local.stored_rank, offset, offset + out.numel()):
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


# Globals in Megatron files written before torch 1.6, whose format does not list them.
LEGACY_GLOBALS = ("argparse.Namespace", "numpy.core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")


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


# ---- saving weights as a checkpoint of ours ------------------------------------------------------------------------

def save_weights(source: Checkpoint | ExternalCheckpoint, root: Path, quantise: bool = False) -> SaveReport:
    """Save weights with one tensor in memory at a time: those of another program as tag `global_step0`, those of a
    run's tag under its name. `quantise` makes int8 matrices (int8_weights.py)."""
    if isinstance(source, ExternalCheckpoint):
        shapes, tag, iteration, client_state = source.shapes, tag_of_iteration(0), 0, {}
        config: Mapping[str, Any] = Config(model=source.model).as_dict()
    else:
        read_recorded_model(source)  # raises if it is no GPT-2
        shapes = {name: source.shape("weight", name) for name in source.names("weight")}
        if "wte.weight" not in shapes:
            raise CheckpointError(f"tag {source.tag} is not of this program's GPT-2, which is what int8 is for")
        tag, iteration, config = source.tag, source.iteration, source.config
        saved = source.shared_state["client_state"]
        client_state = {name: value for name, value in saved.items() if name == "tokenizer"}
    if tag_names(root):
        raise ConfigError(f"--output {root}: holds checkpoints already; choose another folder")
    run_id = secrets.token_hex(8)
    shared: dict[str, Any] = {"run_id": run_id, "engine": {}, "optimizer": None, "lr_scheduler": None, "buffers": {},
                              "client_state": client_state}
    tensors = [tensor for name, shape in shapes.items() for tensor in _tensor_sources(source, name, shape, quantise)]
    check_save_root_is_writable(root, "--output")
    with lock_save_root(root):
        return save(root, tag, tensors=tensors, rank_state={}, shared_state=shared, config=config,
                    layout={"tp": 1, "dp": 1, "zero_stage": 0}, world=SOLO, run_id=run_id, iteration=iteration)


def _tensor_sources(source: Checkpoint | ExternalCheckpoint, name: str, shape: tuple[int, ...],
                    quantise: bool) -> list[TensorSource]:
    """One weight as fp32, or as int8 levels and scales. The matrix is then read twice, since the two are written to
    different places of the file."""
    read, where = partial(source.read_slice, "weight", name, TPSlice(shape)), f"weight {name!r}"

    # One rank writes the whole tensor: the offset is 0, and the count that of the tensor.
    def load_whole(offset: int, count: int) -> Tensor:
        read(0, whole := torch.empty(count))
        return whole

    def load_levels(offset: int, count: int) -> Tensor:
        quantise_into(levels := torch.empty(shape, dtype=torch.int8), read, where)
        return levels.view(-1)

    def load_scales(offset: int, count: int) -> Tensor:
        return scales_from_maxima(row_maxima(read, shape), where)

    if not quantise or not is_quantised(name, shape):
        return [TensorSource.of("weight", name, torch.float32, TPSlice(shape), load_whole)]
    return [TensorSource.of(INT8_KIND, name, torch.int8, TPSlice(shape), load_levels),
            TensorSource.of(SCALE_KIND, name, torch.float32, TPSlice(shape[:1]), load_scales)]
