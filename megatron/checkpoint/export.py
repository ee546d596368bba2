"""Layout-free views of a checkpoint: a digest of every logical tensor, and one fp32 weights file.

Both read unpadded logical tensors as fp32, a bounded part at a time (the digest a fixed block, the export one tensor),
and give the same bytes for every layout that holds the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path

import torch

from data.storage import staged_file
from megatron.checkpoint.commit import FP32_SCRIPT, check_parent_folder, explain_disk_errors
from megatron.checkpoint.manifest import LATEST, MANIFEST
from megatron.checkpoint.part import SHARED_STATE_FILE
from megatron.checkpoint.reader import Checkpoint
from megatron.checkpoint.strict import reraise_as_corrupt
from megatron.checkpoint.tensorfile import FileTensor, write_tensors
from megatron.errors import CheckpointError, ConfigError

DIGEST_BLOCK = 1 << 22
"""Elements of a tensor in memory at a time while it is digested."""


def digest_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """A line `<sha256> <kind> <shape> <name>` for each logical tensor, in order, then `total <sha256 of the lines>`."""
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
    shape = checkpoint.shape(kind, name)
    checkpoint.read(kind, name, shape=shape, partition=None, tp_rank=0, tp_size=1, offset=start, out=out)
    return out


def write_fp32_weights(checkpoint: Checkpoint, output: str | Path) -> int:
    """Write all weights as one fp32 safetensors file, which appears complete or not at all; its size in bytes."""
    if not checkpoint.has("weight"):
        raise CheckpointError(f"tag {checkpoint.tag}: expected weights, found only {checkpoint.kinds}")
    names = {name: name for name in checkpoint.names("weight")}
    with reraise_as_corrupt(f"tag {checkpoint.tag}: file {SHARED_STATE_FILE}: field 'tied'"):
        names |= {name: saved for name, saved in checkpoint.shared_state.get("tied", {}).items() if saved in names}
    items = []
    for name, saved in sorted(names.items()):  # one tensor under two names is stored twice: safetensors wants that
        shape = checkpoint.shape("weight", saved)
        items.append(
            FileTensor(name, torch.float32, shape, partial(read_logical, checkpoint, "weight", saved, 0, prod(shape))))
    path = Path(output)
    check_parent_folder(path, "--output")
    if path.name in (LATEST, FP32_SCRIPT) or any(
        (folder / MANIFEST).exists() for folder in (path / "_").resolve().parents):
        raise ConfigError(f"--output {path}: is a place of a checkpoint's own files; choose another")
    with explain_disk_errors(path, sum(item.nbytes for item in items), "--output"), staged_file(path) as file:
        return write_tensors(file, items).size
