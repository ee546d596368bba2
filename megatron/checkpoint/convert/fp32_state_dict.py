"""DeepSpeed's functions for fp32 weights of a checkpoint (get_fp32_state_dict_from_zero_checkpoint and others).

They read through zero_to_fp32.py, the script copied beside the tags, so both give the same bytes. One tensor is in
memory at a time, besides the result. To resume a run use `load_checkpoint`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron.checkpoint.zero_to_fp32 import (DamagedCheckpoint, InvalidArguments, OutputTensor, open_tag, output_path,
                                              output_tensors, parse_byte_count, write_output)
from megatron.errors import CheckpointError, ConfigError, StorageError
from mpu.partition import partition_of

PathLike = str | os.PathLike[str]
M = TypeVar("M", bound=nn.Module)


@contextmanager
def _translate_script_errors() -> Iterator[None]:
    """Translate the stand-alone script's errors to ours."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise CheckpointError(str(error)) from error
    except InvalidArguments as error:
        raise ConfigError(str(error)) from error


@_translate_script_errors()
def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir: PathLike, tag: str | None = None,
                                             exclude_frozen_parameters: bool = False,
                                             lazy_mode: bool = False) -> Mapping[str, Tensor]:
    """Full, unpadded fp32 weights by name, from `tag` or the newest one; all names of a tied tensor share it. With
    `lazy_mode` each is read on access and not cached."""
    entries = output_tensors(*open_tag(Path(checkpoint_dir), tag), exclude_frozen_parameters)
    lazy = LazyStateDict(entries)
    if lazy_mode:
        return lazy
    loaded = {name: lazy[name] for name in {entry.saved_as: None for entry in entries}}
    return {entry.name: loaded[entry.saved_as] for entry in entries}


@_translate_script_errors()
def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir: PathLike, output_dir: PathLike,
                                               max_shard_size: str = "5GB", safe_serialization: bool = False,
                                               tag: str | None = None, exclude_frozen_parameters: bool = False) -> None:
    """Write the state dict as `pytorch_model.bin` or `model.safetensors` in a folder, or as a file of that name."""
    limit = parse_byte_count(max_shard_size)
    entries = output_tensors(*open_tag(Path(checkpoint_dir), tag), exclude_frozen_parameters)
    try:
        write_output(entries, output_path(Path(output_dir), safe_serialization), limit)
    except OSError as error:
        raise StorageError(f"{output_dir}: cannot write: {error.strerror or error}") from error


@_translate_script_errors()
def load_state_dict_from_zero_checkpoint(model: M, checkpoint_dir: PathLike, tag: str | None = None) -> M:
    """Load the weights into an unsharded model (no tensor parallelism, no engine) and return it on the CPU."""
    model = model.cpu()
    places = model.state_dict(keep_vars=True)
    entries = {entry.name: entry for entry in output_tensors(*open_tag(Path(checkpoint_dir), tag))
               if entry.name == entry.saved_as or entry.name in places}
    # The model may tie names that the checkpoint does not know.
    covered = {id(places[name]) for name in entries if name in places}
    unmatched = sorted(entries.keys() - places.keys())
    unmatched += sorted(name for name, place in places.items() if id(place) not in covered)
    if unmatched:
        raise CheckpointError(f"{checkpoint_dir}: {unmatched[0]!r} ({len(unmatched)} in all) is in only one of the "
                              "model and the checkpoint; give the model that was saved")
    for name, entry in entries.items():
        partition, target = partition_of(places[name]), places[name].detach()
        if partition is not None and partition.size is not None:  # rows that pad it for tensor parallelism
            target.zero_()
            target = target.narrow(partition.dim, 0, partition.size)
        if tuple(target.shape) != entry.shape:
            raise CheckpointError(f"{entry.name}: shape {list(entry.shape)} in the checkpoint, {list(target.shape)} in "
                                  "the model; give a whole model, not one that is split or held by an engine")
        target.copy_(torch.from_numpy(entry.load()))
    return model


class LazyStateDict(Mapping[str, Tensor]):
    """A state dict whose tensors are read on each access."""

    def __init__(self, entries: list[OutputTensor]) -> None:
        self._entries = {entry.name: entry for entry in entries}

    @_translate_script_errors()
    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._entries[name].load())

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
