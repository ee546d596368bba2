"""Open a checkpoint and read any elements of any tensor, whatever layout wrote it; layout-free digest and fp32 export.

The caller describes its own cut (local shape, partition, tensor-parallel rank) and a segment of its flattened local
tensor. If the writing cut is the same, one stored segment is read; otherwise local -> logical -> stored local
(reshard.py), with zeros for padding. A rank opens only the files that hold what it asks for. `read_recorded_model`
returns the shape, precision and tokenizer that a checkpoint records of its GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from functools import cache, cached_property, partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch

from data.indexed import TokenizerFacts, tokenizer_facts_of_state
from data.storage import staged_file
from megatron.checkpoint.commit import FP32_SCRIPT, explain_disk_errors
from megatron.checkpoint.file_formats import check_field, reraise_as_corrupt
from megatron.checkpoint.int8_weights import INT8_KIND
from megatron.checkpoint.json_state import decode_state
from megatron.checkpoint.manifest import (LATEST, MANIFEST, RANK_0_FILES, SHARED_STATE_FILE, Manifest, TensorEntry,
                                          piece_key, rank_manifest_name, read_manifest_end,
                                          read_rank_manifest, read_shared_state)
from megatron.checkpoint.reshard import TensorSegment, TPSlice
from megatron.checkpoint.safetensors_io import FileTensor, SafetensorsReader, file_parts, write_parts
from megatron.checkpoint.tags import TagChoice, choose_tag, print_to_stderr, tag_folder
from megatron.checkpoint.verify import verify_share, warn_of_unknown_files
from megatron.config.tree import ModelConfig
from megatron.distributed.consistency import all_succeed_or_raise, assert_equal_across_ranks, on_rank_0, sum_over_ranks
from megatron.errors import CheckpointError, ConfigError
from mpu.groups import SOLO, Group


def open_checkpoint(root: str | Path, tag: str | TagChoice | None = None, *, world: Group = SOLO,
                    fallback: bool = False, int8: bool = False) -> Checkpoint:
    """Open a tag after verifying every byte of it: `tag`, or what `choose_tag` chose before; None: the tag that
    `latest` names.

    Collective over `world`: the ranks share the verification, and all succeed or all raise the same error. With
    `fallback` a damaged tag is replaced by its newest intact ancestor, and a warning says why. `int8` accepts
    int8 weights, which are otherwise refused."""
    folder = Path(root)
    choice = tag if isinstance(tag, TagChoice) else TagChoice(
        *on_rank_0(lambda: astuple(choose_tag(folder, tag)), world))
    if choice.warning is not None and world.rank == 0:
        print_to_stderr(choice.warning)
    names, advice = [choice.first], ""
    if fallback and choice.fallbacks:
        names += choice.fallbacks
    elif fallback:
        advice = f"; {choice.no_fallback_reason}"
    elif choice.fallbacks and not choice.is_requested:
        advice = "; --resume-fallback takes the newest good one that it continues from"
    while True:
        try:
            manifest = _verify_together(folder, names.pop(0), world)
            break
        except CheckpointError as error:
            if not names:
                raise CheckpointError(f"{error}{advice}") from error
            if world.rank == 0:
                print_to_stderr(f"warning: {error}; falling back to an older tag, {names[0]}{choice.assumption}")
    found = Checkpoint(tag_folder(folder, manifest.tag), manifest)
    if INT8_KIND in found.kinds and not int8:
        raise CheckpointError(f"{found.tag} of {root} holds int8 weights, which are for inference alone (`python -m "
                              "megatron.generate`); give the checkpoint they were made from")
    return found


def _verify_together(root: Path, tag: str, world: Group) -> Manifest:
    """The manifest of a tag, after each rank has verified its share of the files, and rank 0 looked for others.
    Collective."""
    manifest, files = all_succeed_or_raise(lambda: verify_share(root, tag, world.rank, world.size), world)
    # Each node may have a disk of its own, with another copy of the tag.
    assert_equal_across_ranks({f"tag {tag}": read_manifest_end(tag_folder(root, tag))[1]}, world,
                              "the ranks find different checkpoints")
    count = sum_over_ranks(len(files), world)
    all_succeed_or_raise(lambda: None if world.rank > 0 else warn_of_unknown_files(
        tag_folder(root, tag), manifest, count), world)
    return manifest


class Checkpoint:
    """One open checkpoint. A tensor is named by a pair (kind, name)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest, self.tag, self.iteration = folder, manifest, manifest.tag, manifest.iteration
        self.config, self.layout = manifest.config, manifest.layout
        self.label = f"{self.tag} of {folder.parent}"
        self.shared_label = f"tag {self.tag}: file {SHARED_STATE_FILE}"
        self.tensors = {(tensor.kind, tensor.name): tensor for tensor in manifest.tensors}
        self.kinds = tuple(sorted({kind for kind, _ in self.tensors}))
        self._open_files: dict[str, SafetensorsReader] = {}
        self._rank_manifest = cache(partial(read_rank_manifest, folder, manifest))

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(sorted(name for other, name in self.tensors if other == kind))

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        return self._entry(kind, name).sharding.logical_shape

    @cached_property
    def shared_state(self) -> dict[str, Any]:
        encoded = read_shared_state(self.folder, self.manifest, self.shared_label)
        return self._decode_state(encoded, self.shared_label, 0)

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """State that `rank` saved; None if that run had no such rank."""
        if rank >= self.manifest.world_size:
            return None
        where = f"tag {self.tag}: file {rank_manifest_name(rank)}"
        return self._decode_state(self._rank_manifest(rank).state, where, rank)

    def read(self, kind: str, name: str, *, offset: int, out: torch.Tensor, **local: Any) -> None:
        """`read_slice` with the fields of a TPSlice as arguments of their own (docs/checkpoints.md)."""
        self.read_slice(kind, name, TPSlice(**local), offset, out)

    def read_slice(self, kind: str, name: str, local: TPSlice, offset: int, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with elements from `offset` of the flattened local tensor."""
        stored, wanted = self._entry(kind, name), local.sharding
        if wanted.logical_shape != stored.sharding.logical_shape:
            raise CheckpointError(f"tag {self.tag}: {kind} {name!r}: shape expected {list(wanted.logical_shape)}, "
                                  f"found {list(stored.sharding.logical_shape)}")
        if wanted == stored.sharding:
            self._copy_segment(stored, TensorSegment(local.stored_rank, offset, 0, out.numel()), out)
            return
        # Another tensor-parallel size: asked local -> logical -> stored local. What is in no segment is padding, zero.
        out.zero_()
        for run in wanted.to_logical(local.stored_rank, offset, offset + out.numel()):
            for part in stored.sharding.to_local(run.logical_start, run.logical_start + run.count):
                start = run.local_start - offset + part.logical_start - run.logical_start
                self._copy_segment(stored, part, out[start:start + part.count])

    def _copy_segment(self, entry: TensorEntry, segment: TensorSegment, out: torch.Tensor) -> None:
        """Copy a segment of one rank's stored local tensor, piece by piece."""
        start, done = segment.local_start, 0
        for shard, offset, within, count in entry.dp_sharding.locate(start, start + segment.count):
            rank = shard * self.layout["tp"] + segment.tp_rank
            key = piece_key(entry.kind, entry.name, segment.tp_rank, offset)
            file = self._file_holding(rank, key)
            if (dtype := file.tensors[key].dtype) != entry.dtype:
                raise CheckpointError(f"{file.where}: {key!r} is {dtype}, and the manifest says {entry.dtype}")
            file.read(key, within, out[done:done + count])
            done += count

    def _entry(self, kind: str, name: str) -> TensorEntry:
        if (kind, name) not in self.tensors:
            raise CheckpointError(f"tag {self.tag}: holds no {kind} {name!r}")
        return self.tensors[kind, name]

    def _file_holding(self, rank: int, key: str) -> SafetensorsReader:
        """The file of the rank that contains `key`."""
        names = [name for name in self._rank_manifest(rank).files if name not in RANK_0_FILES]
        for name in names:
            # A rank opens only the files that it needs, and each once.
            if name not in self._open_files:
                self._open_files[name] = SafetensorsReader(self.folder / name, f"tag {self.tag}: file {name}")
            if key in self._open_files[name].tensors:
                return self._open_files[name]
        raise CheckpointError(f"tag {self.tag}: tensor {key!r} is in none of {names}")

    def _decode_state(self, value: Any, where: str, writer: int) -> dict[str, Any]:
        with reraise_as_corrupt(where):
            state = decode_state(value, lambda key: self._file_holding(writer, key).tensor(key))
        if not isinstance(state, dict):
            raise CheckpointError(f"{where}: expected an object, found {type(state).__name__}")
        return state


DIGEST_BLOCK = 1 << 22  # elements in memory at a time while digesting


def digest_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """`<sha256> <kind> <shape> <name>` for each logical tensor in order, then `total <sha256 of the lines>`."""
    total = sha256()
    for kind in checkpoint.kinds:
        for name in checkpoint.names(kind):
            shape = "x".join(map(str, checkpoint.shape(kind, name)))
            numel, hashed = prod(checkpoint.shape(kind, name)), sha256()
            for start in range(0, numel, DIGEST_BLOCK):
                hashed.update(
                    read_logical(checkpoint, kind, name, start, min(DIGEST_BLOCK, numel - start)).numpy().data)
            line = f"{hashed.hexdigest()} {kind} {shape} {name}"
            total.update(f"{line}\n".encode())
            yield line
    yield f"total {total.hexdigest()}"


def read_logical(checkpoint: Checkpoint, kind: str, name: str, start: int, count: int) -> torch.Tensor:
    """`count` elements from `start` of the flattened logical tensor, as fp32."""
    out = torch.empty(count, dtype=torch.float32)
    checkpoint.read_slice(kind, name, TPSlice(checkpoint.shape(kind, name)), start, out)
    return out


def write_fp32_weights(checkpoint: Checkpoint, output: str | Path) -> int:
    """Write all weights as one fp32 safetensors file, atomically; returns its size in bytes."""
    names = {name: name for name in checkpoint.names("weight")}
    with reraise_as_corrupt(f"{checkpoint.shared_label}: field 'tied'"):
        names |= {name: saved for name, saved in checkpoint.shared_state.get("tied", {}).items() if saved in names}
    items = []
    for name, saved in sorted(names.items()):  # safetensors requires a tied tensor to be stored under each name
        shape = checkpoint.shape("weight", saved)
        items.append(
            FileTensor(name, torch.float32, shape, partial(read_logical, checkpoint, "weight", saved, 0, prod(shape))))
    path = Path(output)
    if path.name in (LATEST, FP32_SCRIPT) or any(
            (folder / MANIFEST).exists() for folder in (path / "_").resolve().parents):
        raise ConfigError(f"--output {path}: is a place of a checkpoint's own files; choose another")
    with explain_disk_errors(path, sum(item.nbytes for item in items), "--output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as file:
            return write_parts(file, file_parts(items)).size


@dataclass(frozen=True)
class RecordedModel:
    shape: ModelConfig
    precision: str  # precision of the weights in training: fp32, fp16 or bf16
    # The configuration's `data` section; tokenizer_type is filled in from the recorded tokenizer.
    data: Mapping[str, Any]
    tokenizer: TokenizerFacts | None


def recorded_precision(config: Mapping[str, Any]) -> str:
    """fp32, fp16 or bf16 in a saved configuration."""
    return next((name for name in ("bf16", "fp16") if config["precision"][name]), "fp32")


def read_recorded_model(checkpoint: Checkpoint) -> RecordedModel:
    with reraise_as_corrupt(f"tag {checkpoint.tag}: {MANIFEST}: config"):
        shape, data = ModelConfig(**checkpoint.config["model"]), dict(checkpoint.config["data"])
        precision = recorded_precision(checkpoint.config)
    if shape.vocab_size is None:
        raise CheckpointError(
            f"{checkpoint.label} does not record the shape of its model: expected a GPT2 "
            "of megatron.model; load_checkpoint into the model it was saved from, and save_checkpoint, record it")
    state: Any = checkpoint.shared_state.get("client_state")
    check_field(f"{checkpoint.shared_label}: field 'client_state'", state, dict)
    tokenizer = tokenizer_facts_of_state(state)
    if tokenizer is not None and data.get("tokenizer_type") is None:
        data["tokenizer_type"] = tokenizer.name
    return RecordedModel(shape, precision, data, tokenizer)
