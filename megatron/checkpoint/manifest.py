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
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from data.storage import crc32
from megatron.checkpoint.file_formats import StrictRecord, read_bytes, seal_record, unseal_record
from megatron.checkpoint.reshard import DPSharding, TPSharding
from megatron.errors import CheckpointError


class Ancestor(NamedTuple):
    """An earlier save in a later one's history."""

    branch: str
    commit: int
    tag: str


History = tuple[Ancestor, ...]


@dataclass(frozen=True)
class CommitRecord:
    """Identifies a save: its order within the root and its ancestors."""

    tag: str
    iteration: int
    run_id: str
    branch: str = ""
    commit: int = 0  # commit number
    history: History = ()

    @property
    def as_ancestor(self) -> Ancestor:
        return Ancestor(self.branch, self.commit, self.tag)

    @property
    def commit_order(self) -> tuple[int, int, str]:
        """Sort key: saves in order of commit."""
        return self.commit, self.iteration, self.tag

    def descends_from(self, other: CommitRecord) -> bool:
        """Whether `other` is an ancestor of this save, or this save itself."""
        branch, commit, _ = other.as_ancestor
        return other.iteration <= self.iteration and any(
            branch == known.branch and commit <= known.commit for known in (*self.history, self.as_ancestor))


class Lineage:
    """What an engine's next save continues from. The lineage of rank 0 is recorded."""

    def __init__(self, parent: CommitRecord | None = None) -> None:
        """`parent` is the checkpoint that was loaded; None at the start of a run."""
        self.branch = secrets.token_hex(8)
        self.history: History = ()
        if parent is not None:
            self.set_parent(parent)

    def set_parent(self, parent: CommitRecord) -> None:
        """Let the next save continue from `parent`."""
        earlier = (known for known in parent.history if known.branch != parent.branch)
        self.history = *earlier, parent.as_ancestor


def parse_lineage(record: StrictRecord) -> tuple[str, History]:
    """(branch, history) of a manifest or of the rank 0 manifest."""
    branch, history = record.take_field("branch", str), []
    for value in record.take_field("history", list):
        entry = StrictRecord(value, f"{record.where}: history[]")
        history.append(
            Ancestor(entry.take_field("branch", str), entry.take_count("commit", 10**18), entry.take_field("tag", str)))
        entry.check_all_taken()
    return branch, tuple(history)


def lineage_to_json(branch: str, history: History) -> dict[str, Any]:
    return {"history": [known._asdict() for known in history], "branch": branch}


FORMAT = 5
MANIFEST = "manifest.json"
LATEST = "latest"
_END_PATTERN = re.compile(rb'"commit":([0-9]{1,15}),"saved_at":[0-9]{1,18},"crc32":"([0-9a-f]{8})"}\n\Z')
_END_BYTES = 250  # bytes read from the end of a manifest
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_STEP_TAG = re.compile(r"global_step([0-9]{1,18})")


def check_safe_name(name: str, what: str) -> str:
    """Return `name` if it is safe as a path: no separator, no leading dot, nothing special to a file system."""
    if not is_safe_name(name):
        raise CheckpointError(f"{what} {name!r:.80} is not a plain name: letters, digits, '_', '-' and inner '.' only")
    return name


def is_safe_name(name: str) -> bool:
    return _SAFE_NAME.fullmatch(name) is not None and name not in (LATEST, MANIFEST)


def tag_of_iteration(iteration: int) -> str:
    return f"global_step{iteration}"


def iteration_of_tag(tag: str) -> int | None:
    """N of `global_step<N>`; None for a user-chosen tag name."""
    match = _STEP_TAG.fullmatch(tag)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum that a file of the tag must have."""

    size: int
    crc32: str  # 8 hexadecimal digits, as data.storage.crc32_file writes them


@dataclass(frozen=True)
class TensorEntry:
    """One logical tensor: how it is sharded, and where its elements are."""

    kind: str
    name: str
    dtype: str
    sharding: TPSharding
    dp_sharding: DPSharding

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name!r}"

    @property
    def numel(self) -> int:
        """Elements of the local tensor of one tensor-parallel rank."""
        return prod(self.sharding.local_shape)


def piece_key(kind: str, name: str, tp_rank: int, offset: int) -> str:
    """The key of a piece, unique in a checkpoint."""
    return f"{kind}/{name}/{tp_rank}/{offset}"


@dataclass(frozen=True, kw_only=True)
class Manifest(CommitRecord):
    """One checkpoint: its run, configuration, layout and tensors."""

    layout: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    saved_at: int = 0  # time of the commit in microseconds since 1970, for display only
    save_id: str = ""  # written into each file of this save
    nbytes: int = 0  # size of all other files of the tag

    @property
    def tp_dp_sizes(self) -> tuple[int, int]:
        """(tensor-parallel size, data-parallel size) of the ranks that wrote it. Rank k has tensor-parallel rank k % tp
        and data-parallel shard k // tp."""
        tp, dp = (self.layout.get(axis) for axis in ("tp", "dp"))
        if not (isinstance(tp, int) and isinstance(dp, int) and tp > 0 and dp > 0):
            raise CheckpointError(f"tag {self.tag}: {MANIFEST}: layout expected with sizes tp and dp, found "
                                  f"{dict(self.layout)!r:.80}")
        return tp, dp

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote it."""
        tp, dp = self.tp_dp_sizes
        return tp * dp

    def piece_of_rank(self, tensor: TensorEntry, rank: int) -> tuple[int, int] | None:
        """(offset, count) of the tensor's elements that `rank` writes; None if there are none."""
        shard, tp_rank = divmod(rank, self.tp_dp_sizes[0])
        return tensor.dp_sharding.piece_in_shard(shard, tensor.numel) if tp_rank < tensor.sharding.tp_size else None

    def tensors_as_json(self) -> list[dict[str, Any]]:
        return [{"kind": tensor.kind, "name": tensor.name, "dtype": tensor.dtype, "sharding": asdict(tensor.sharding),
                 "start": tensor.dp_sharding.start, "each": tensor.dp_sharding.shard_size} for tensor in self.tensors]

    def digest(self) -> str:
        """Digest of run, tag, iteration, layout, configuration and tensors; `save_id` ends with it."""
        content = {name: getattr(self, name) for name in ("run_id", "tag", "iteration", "layout", "config")}
        content["tensors"] = self.tensors_as_json()
        return sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """The file's content. `read_manifest_end` needs the last fields at the end."""
        body = {"format": FORMAT, **{name: getattr(self, name) for name in
                ("run_id", "tag", "iteration", "layout", "config", "save_id", "nbytes")}}
        body["tensors"] = self.tensors_as_json()
        body |= lineage_to_json(self.branch, self.history) | {"commit": self.commit, "saved_at": self.saved_at}
        return seal_record(body)

    def check(self) -> None:
        """Check across fields: tensors are named once, and each local tensor lies inside the flat buffer of all shards.
        """
        tp, shards = self.tp_dp_sizes
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
                raise CheckpointError(f"tag {self.tag}: {MANIFEST}: {tensor.label}{problem}")
            seen.add((tensor.kind, tensor.name))


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


def parse_manifest(data: bytes, where: str = MANIFEST) -> Manifest:
    """Parse and check a manifest; CheckpointError names what is wrong."""
    record = StrictRecord(unseal_record(data, where), where)
    if (version := record.take_count("format")) != FORMAT:
        raise CheckpointError(f"{where}: format {version}, this program reads format {FORMAT}; load it with the "
                              "version that saved it")
    branch, history = parse_lineage(record)
    manifest = Manifest(
        run_id=record.take_field("run_id", str), tag=check_safe_name(record.take_field("tag", str), f"{where}: tag"),
        iteration=record.take_count("iteration"), layout=record.take_field("layout", dict),
        config=record.take_field("config", dict),
        tensors=tuple(_parse_tensor_entry(value, where) for value in record.take_field("tensors", list)),
        saved_at=record.take_count("saved_at", 10**18), branch=branch, history=history,
        commit=record.take_count("commit"), save_id=record.take_field("save_id", str),
        nbytes=record.take_count("nbytes"))
    record.check_all_taken()
    manifest.check()
    random, _, digest = manifest.save_id.partition("-")
    if not random or digest != manifest.digest():
        raise CheckpointError(f"{where}: is of another checkpoint, or was changed: its save_id {manifest.save_id!r:.80}"
                              " was given for other content")
    return manifest


def _parse_tensor_entry(value: object, where: str) -> TensorEntry:
    record = StrictRecord(value, f"{where}: tensors[]")
    kind, name = record.take_field("kind", str), record.take_field("name", str)
    record.where = f"{where}: {kind} {name!r}"
    sharding = StrictRecord(record.take_field("sharding", dict), f"{record.where}: sharding").take_all(TPSharding)
    dp_sharding = DPSharding(record.take_count("start"), record.take_count("each"))
    entry = TensorEntry(kind, name, record.take_field("dtype", str), sharding, dp_sharding)
    record.check_all_taken()
    return entry


# ---- the manifest of one rank ---------------------------------------------------------------------------------------

CONFIG_FILE = "config.json"
SHARED_STATE_FILE = "shared.json"
RANK_0_FILES = (SHARED_STATE_FILE, CONFIG_FILE)  # files that rank 0 writes in addition to its own


def provenance_of(manifest: Manifest, rank: int) -> dict[str, str | int]:
    """What each file that `rank` writes says of itself. `save_id` ends with the manifest's digest; run, tag and
    iteration are for people."""
    return {"save_id": manifest.save_id, "rank": rank, "run_id": manifest.run_id, "tag": manifest.tag,
            "iteration": manifest.iteration}


def check_provenance(stated: object, expected: Mapping[str, str | int], where: str) -> None:
    """Raise unless `stated`, a file's provenance as JSON or as safetensors metadata (strings), equals `expected`."""
    if not isinstance(stated, Mapping):
        raise CheckpointError(f"{where}: does not say which checkpoint it is of")
    for name, right in expected.items():
        value = stated.get(name)
        if type(value) not in (str, type(right)) or str(value) != str(right):
            raise CheckpointError(
                f"{where}: is of another checkpoint: {name} expected {right}, found {str(value):.80}")
    if unknown := set(stated) - expected.keys():
        raise CheckpointError(f"{where}: unknown field {min(map(str, unknown))!r} in its origin")


@dataclass(frozen=True)
class RankManifest:
    """The files and state that one rank wrote."""

    files: Mapping[str, FileEntry]  # all files but this one, which ends with its own checksum
    state: Any  # the rank's own state, encoded (json_state.py)
    own_entry: FileEntry  # size and checksum of this file


def rank_manifest_name(rank: int) -> str:
    return f"rank{rank}.json"


def tensor_file_name(rank: int, index: int) -> str:
    return f"rank{rank}-{index}.safetensors" if index else f"rank{rank}.safetensors"


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
    data = read_bytes(folder / name, where)
    record = StrictRecord(unseal_record(data, where), where)
    if (version := record.take_count("format")) != FORMAT:
        raise CheckpointError(f"{where}: format {version}, expected {FORMAT}")
    check_provenance(record.take_field("origin", dict), provenance_of(manifest, rank), where)
    lineage = record.take_field("lineage", dict) if rank == 0 else None
    if lineage not in (None, lineage_to_json(manifest.branch, manifest.history)):
        raise CheckpointError(f"{where}: its lineage is not the one that {MANIFEST} states")
    files: dict[str, FileEntry] = {}
    for file, value in record.take_field("files", dict).items():
        entry = StrictRecord(value, f"{where}: files[{check_safe_name(file, f'{where}: file')}]")
        files[file] = entry.take_all(FileEntry)
        if file == name or rank_of_file(file) != rank:
            raise CheckpointError(f"{where}: lists {file!r}, which rank {rank} does not write")
    state = record.fields.pop("state", None)
    record.check_all_taken()
    return RankManifest(files, state, FileEntry(len(data), f"{crc32(data):08x}"))
