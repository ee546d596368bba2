"""The manifest of a checkpoint: one JSON file, written last, that says which tensors it holds and how they are cut.

    tag     the name of a checkpoint: a folder under the save root, `global_step<N>` or a name of the user's choice
    tensor  one logical tensor, named by kind ("weight", "exp_avg", ...) and parameter name
    piece   consecutive elements of one tensor-parallel rank's flattened local tensor, stored under a key in a file
    lineage branch, commit number and history: from which saves a save continues; no clock takes part

Which rank holds which elements follows by arithmetic (reshard.py), so the manifest does not grow with the number of
ranks. The manifest of a rank, `rank<k>.json`, lists its files with size and crc32, and holds the rank's own state. A
checksum says that a file is intact, not that it belongs here: every file also states its provenance. No torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.file_formats import (check_field, check_record, parse_json, read_bytes, seal_record,
                                              unseal_record)
from megatron.checkpoint.reshard import DPSharding, TPSharding
from megatron.errors import CheckpointError

FORMAT = 5
MANIFEST = "manifest.json"
LATEST = "latest"
SHARED_STATE_FILE = "shared.json"
# Files that rank 0 has in addition to its own. Older tags hold a copy of the manifest's configuration, which nothing
# reads.
RANK_0_FILES = (SHARED_STATE_FILE, "config.json")
_END_PATTERN = re.compile(rb'"commit":([0-9]{1,18}),"saved_at":[0-9]{1,18},"crc32":"([0-9a-f]{8})"}\n\Z')
_END_BYTES = 250  # bytes read from the end of a manifest
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_STEP_TAG = re.compile(r"global_step([0-9]{1,18})")


def is_safe_name(name: str) -> bool:
    """Whether it is safe as a path: no separator, no leading dot, nothing special to a file system."""
    return _SAFE_NAME.fullmatch(name) is not None and name not in (LATEST, MANIFEST)


def check_safe_name(name: str, what: str) -> str:
    if not is_safe_name(name):
        raise CheckpointError(f"{what} {name!r:.80} is not a plain name: letters, digits, '_', '-' and inner '.' only")
    return name


def tag_of_iteration(iteration: int) -> str:
    return f"global_step{iteration}"


def iteration_of_tag(tag: str) -> int | None:
    """N of `global_step<N>`; None for a user-chosen tag name."""
    match = _STEP_TAG.fullmatch(tag)
    return int(match[1]) if match else None


# ---- lineage --------------------------------------------------------------------------------------------------------

class Ancestor(NamedTuple):
    """An earlier save in a later one's history."""

    branch: str
    commit: int
    tag: str


@dataclass(frozen=True)
class CommitRecord:
    """Identifies a save: its order within the root and its ancestors."""

    tag: str
    iteration: int
    run_id: str
    branch: str = ""
    commit: int = 0  # commit number
    history: tuple[Ancestor, ...] = ()

    @property
    def commit_order(self) -> tuple[int, int, str]:
        """Sort key: saves in order of commit."""
        return self.commit, self.iteration, self.tag

    def descends_from(self, other: CommitRecord) -> bool:
        """Whether `other` is an ancestor of this save, or this save itself."""
        # A later save of a branch continues from all earlier ones of it.
        reached = [*self.history, Ancestor(self.branch, self.commit, self.tag)]
        return other.iteration <= self.iteration and any(
            other.branch == known.branch and other.commit <= known.commit for known in reached)


@dataclass
class Lineage:
    """What an engine's next save continues from. The lineage of rank 0 is recorded."""

    parent: CommitRecord | None = None  # the last save, or the checkpoint that was loaded; None at the start of a run
    branch: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def history(self) -> tuple[Ancestor, ...]:
        """The last save of each branch that the next save continues from, oldest branch first."""
        if self.parent is None:
            return ()
        branch, commit, tag = self.parent.branch, self.parent.commit, self.parent.tag
        return *(known for known in self.parent.history if known.branch != branch), Ancestor(branch, commit, tag)


def lineage_to_json(save: CommitRecord) -> dict[str, Any]:
    return {"history": [known._asdict() for known in save.history], "branch": save.branch}


def parse_history(entries: list[Any], where: str) -> tuple[Ancestor, ...]:
    kinds = {"branch": str, "commit": int, "tag": str}
    return tuple(Ancestor(**check_record(entry, f"{where}: history[]", kinds)) for entry in entries)


# ---- the manifest of a checkpoint -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor: how it is sharded, and where its elements are."""

    kind: str
    name: str
    dtype: str
    sharding: TPSharding
    dp_sharding: DPSharding

    @property
    def numel(self) -> int:
        """Elements of the local tensor of one tensor-parallel rank."""
        return prod(self.sharding.local_shape)


def piece_key(kind: str, name: str, tp_rank: int, offset: int) -> str:
    """The key of a piece, unique in a checkpoint."""
    return f"{kind}/{name}/{tp_rank}/{offset}"


@dataclass(frozen=True, kw_only=True)
class Manifest(CommitRecord):
    """One checkpoint: its run, configuration, layout and tensors.

    Rank k of the `layout["tp"] * layout["dp"]` ranks that wrote it has tensor-parallel rank k % tp and data-parallel
    shard k // tp."""

    layout: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    saved_at: int = 0  # time of the commit in microseconds since 1970, for display only
    save_id: str = ""  # written into each file of this save
    nbytes: int = 0  # size of all other files of the tag

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        return int(self.layout["tp"] * self.layout["dp"])

    def piece_of_rank(self, tensor: TensorEntry, rank: int) -> tuple[str, int, int] | None:
        """(key, offset, count) of the tensor's elements that `rank` writes; None if there are none."""
        shard, tp_rank = divmod(rank, self.layout["tp"])
        start, shard_size = tensor.dp_sharding.start, tensor.dp_sharding.shard_size
        low, high = max(shard * shard_size - start, 0), min((shard + 1) * shard_size - start, tensor.numel)
        # A replicated tensor is stored once, under tensor-parallel rank 0: its tp_size is 1.
        if low >= high or tp_rank >= tensor.sharding.tp_size:
            return None
        return piece_key(tensor.kind, tensor.name, tp_rank, low), low, high - low

    def tensors_as_json(self) -> list[dict[str, Any]]:
        return [{"kind": tensor.kind, "name": tensor.name, "dtype": tensor.dtype, "sharding": asdict(tensor.sharding),
                 "start": tensor.dp_sharding.start, "each": tensor.dp_sharding.shard_size} for tensor in self.tensors]

    def digest(self) -> str:
        """Digest of run, tag, iteration, layout, configuration and tensors; `save_id` ends with it."""
        content = {name: getattr(self, name) for name in ("run_id", "tag", "iteration", "layout", "config")}
        content["tensors"] = self.tensors_as_json()
        return sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """The file's content."""
        body = {"format": FORMAT, **{name: getattr(self, name) for name in
                ("run_id", "tag", "iteration", "layout", "config", "save_id", "nbytes")}}
        body["tensors"] = self.tensors_as_json()
        # `read_manifest_end` needs commit number and checksum at the end.
        return seal_record(body | lineage_to_json(self) | {"commit": self.commit, "saved_at": self.saved_at})

    def check(self) -> None:
        """Check across fields: the layout has its sizes, tensors are named once, and each local tensor lies inside the
        flat buffer of all shards."""
        where = f"tag {self.tag}: {MANIFEST}"
        tp, shards = (self.layout.get(axis) for axis in ("tp", "dp"))
        if not (isinstance(tp, int) and isinstance(shards, int) and tp > 0 and shards > 0):
            raise CheckpointError(f"{where}: layout expected with sizes tp and dp, found {dict(self.layout)!r:.80}")
        seen: set[tuple[str, str]] = set()
        for tensor in self.tensors:
            cut, dp_cut, problem = tensor.sharding, tensor.dp_sharding, ""
            if (tensor.kind, tensor.name) in seen:
                problem = " is listed twice"
            elif not cut.can_exist:
                problem = f": no such cut: {cut}"
            elif cut.dim is not None and cut.tp_size != tp:
                problem = f": cut over {cut.tp_size} tensor-parallel ranks of {tp}"
            elif tensor.numel and dp_cut.start + tensor.numel > dp_cut.shard_size * shards:
                problem = (f": {tensor.numel} elements from {dp_cut.start} on are not in {shards} shards of "
                           f"{dp_cut.shard_size}")
            if problem:
                raise CheckpointError(f"{where}: {tensor.kind} {tensor.name!r}{problem}")
            seen.add((tensor.kind, tensor.name))


MANIFEST_FIELDS = {"run_id": str, "tag": str, "iteration": int, "layout": dict, "config": dict, "tensors": list,
                   "saved_at": int, "branch": str, "commit": int, "history": list, "save_id": str, "nbytes": int}
TENSOR_FIELDS = {"kind": str, "name": str, "dtype": str, "sharding": dict, "start": int, "each": int}
SHARDING_FIELDS = {"local_shape": list[int], "dim": int | None, "stride": int, "size": int | None, "tp_size": int}


def parse_manifest(data: bytes, where: str = MANIFEST) -> Manifest:
    """Parse and check a manifest; CheckpointError names what is wrong."""
    record = unseal_record(data, where)
    check_field(f"{where}: field 'format'", version := record.pop("format", None), int)
    if version != FORMAT:  # first: another format has other fields
        raise CheckpointError(f"{where}: format {version}, this program reads format {FORMAT}; load it with the "
                              "version that saved it")
    check_record(record, where, MANIFEST_FIELDS)
    check_safe_name(record["tag"], f"{where}: tag")
    tensors = []
    for value in record.pop("tensors"):
        check_field(f"{where}: tensors[]", value, dict)
        of_tensor = f"{where}: {value.get('kind')!s:.40} {value.get('name')!r:.120}"
        check_record(value, of_tensor, TENSOR_FIELDS)
        cut = check_record(value["sharding"], f"{of_tensor}: sharding", SHARDING_FIELDS)
        sharding = TPSharding(**{**cut, "local_shape": tuple(cut["local_shape"])})
        tensors.append(TensorEntry(value["kind"], value["name"], value["dtype"], sharding,
                                   DPSharding(value["start"], value["each"])))
    record["history"] = parse_history(record["history"], where)
    manifest = Manifest(**record, tensors=tuple(tensors))
    manifest.check()
    random, _, digest = manifest.save_id.partition("-")
    if not random or digest != manifest.digest():
        raise CheckpointError(f"{where}: is of another checkpoint, or was changed: its save_id {manifest.save_id!r:.80}"
                              " was given for other content")
    return manifest


def read_manifest_end(folder: Path) -> tuple[int, str | None]:
    """(commit number, checksum) from the last bytes of a manifest, without parsing it; the checksum identifies a save.
    (0, None) without a whole manifest."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
            end = _END_PATTERN.search(file.read(_END_BYTES))
    except OSError:
        end = None
    return (0, None) if end is None else (int(end[1]), end[2].decode())


# ---- the files of one rank ------------------------------------------------------------------------------------------

def provenance_of(manifest: Manifest, rank: int) -> dict[str, str | int]:
    """What each file that `rank` writes says of itself. `save_id` ends with the manifest's digest; run, tag and
    iteration are for people."""
    return {"save_id": manifest.save_id, "rank": rank, "run_id": manifest.run_id, "tag": manifest.tag,
            "iteration": manifest.iteration}


def check_provenance(stated: Mapping[str, Any], manifest: Manifest, rank: int, where: str) -> None:
    """Raise unless `stated`, a file's provenance as JSON or as safetensors metadata (strings), is that of `rank`."""
    expected = provenance_of(manifest, rank)
    for name, right in expected.items():
        value = stated.get(name)
        # A safetensors header holds strings only.
        if type(value) not in (str, type(right)) or str(value) != str(right):
            raise CheckpointError(
                f"{where}: is of another checkpoint: {name} expected {right}, found {str(value):.80}")
    if unknown := stated.keys() - expected.keys():
        raise CheckpointError(f"{where}: unknown field {min(unknown)!r} in its origin")


@dataclass(frozen=True)
class FileEntry:
    """What a file of the tag must have."""

    size: int
    crc32: str  # 8 hexadecimal digits, as data.storage.crc32_file writes them


@dataclass(frozen=True)
class RankManifest:
    """The files and state that one rank wrote."""

    files: Mapping[str, FileEntry]  # all files but this one, which ends with its own checksum
    state: Any  # the rank's own state, encoded (json_state.py)


def rank_manifest_name(rank: int) -> str:
    return f"rank{rank}.json"


def rank_of_file(name: str) -> int | None:
    """The rank that writes a file of this name; None for a foreign name."""
    match = re.fullmatch(r"rank(0|[1-9][0-9]{0,8})(\.json|(-[1-9][0-9]{0,8})?\.safetensors)", name)
    return int(match[1]) if match else 0 if name in RANK_0_FILES else None


def read_rank_manifest(folder: Path, manifest: Manifest, rank: int) -> RankManifest:
    """The manifest of one rank, checked against `manifest`."""
    name = rank_manifest_name(rank)
    where = f"tag {manifest.tag}: file {name}"
    if not (folder / name).is_file():
        raise CheckpointError(f"tag {manifest.tag}: shard file {name} (rank {rank} of {manifest.world_size}) missing")
    kinds = {"format": int, "origin": dict, "files": dict} | ({"lineage": dict} if rank == 0 else {})
    record = check_record(unseal_record(read_bytes(folder / name, where), where), where, kinds, {"state": object})
    if record["format"] != FORMAT:
        raise CheckpointError(f"{where}: format {record['format']}, expected {FORMAT}")
    check_provenance(record["origin"], manifest, rank, where)
    if rank == 0 and record["lineage"] != lineage_to_json(manifest):
        raise CheckpointError(f"{where}: its lineage is not the one that {MANIFEST} states")
    files: dict[str, FileEntry] = {}
    for file, value in record["files"].items():
        files[file] = FileEntry(**check_record(value, f"{where}: files[{file!r:.80}]", {"size": int, "crc32": str}))
        if file == name or rank_of_file(file) != rank:
            raise CheckpointError(f"{where}: lists {file!r:.80}, which rank {rank} does not write")
    return RankManifest(files, record.get("state"))


def read_shared_state(folder: Path, manifest: Manifest, where: str) -> dict[str, Any]:
    """The state, still encoded (json_state.py), in `shared.json`, after checking its provenance."""
    record = check_record(parse_json(read_bytes(folder / SHARED_STATE_FILE, where), where), where,
                          {"origin": dict, "state": dict})
    check_provenance(record["origin"], manifest, 0, where)
    state: dict[str, Any] = record["state"]
    return state
