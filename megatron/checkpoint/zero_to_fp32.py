#!/usr/bin/env python3
"""The fp32 weights of a checkpoint as one state dict, whatever ZeRO stage and tensor parallel size it was saved with.

    python zero_to_fp32.py . pytorch_model.bin [-t TAG] [--max_shard_size 5GB] [--safe_serialization]
                                               [--exclude_frozen_parameters] [-d]

The first argument is the folder of the tags, or one tag's; the second a file, or a folder that gets a
`pytorch_model.bin` (`model.safetensors` with --safe_serialization). Larger than --max_shard_size, the output is several
files and an index, as Hugging Face's loaders expect them. Exit codes: 0 good, 2 usage, 4 damaged, 7 not writable.

This file is complete in itself: a copy of it is in every save root, and needs Python and numpy, and torch only to
write a `.bin`. Every byte of the files it reads is checked first; no more than one output file is in memory at a time,
for `.safetensors` no more than one tensor.

A *piece* is a number of consecutive elements of one tensor parallel rank's flattened part of a tensor. The manifest
says how each tensor is cut: from that follows who holds which piece. `rank<k>.json` lists that rank's files. (Formats 1
and 2: the manifest lists all.) Each file says which checkpoint it is of.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
          "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}
DTYPE_NAMES = {"<f4": "F32", "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8", "|u1": "U8", "|b1": "BOOL"}
BLOCK = 1 << 18
"""Bytes or elements read at a time."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
FORMATS = (1, 2, 3, 4, 5)
MAX_JSON_BYTES = 256 << 20
"""Bytes of a file of JSON."""
PROVENANCE_FIELDS = ("save_id", "rank", "run_id", "tag", "iteration")
"""What a file says of the checkpoint that it is of."""


class DamagedCheckpoint(Exception):
    """A checkpoint that is missing, damaged or not of this format."""


class InvalidArguments(Exception):
    """Arguments that cannot be honoured."""


@contextmanager
def reraise_as_damaged(path: Path) -> Iterator[None]:
    """What is whole and yet senseless is damage, however it shows: a field missing, of another type, too big."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: not a checkpoint of this format ({type(error).__name__}: {error})") from error


class OutputTensor(NamedTuple):
    """One tensor of the output: its size is known now, its data is fetched when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Array]
    saved_as: str
    """The name that it has in the checkpoint; a tied tensor has several in the output."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


# ---- reading --------------------------------------------------------------------------------------------------------

class TagReader:
    """One checkpoint, its manifest read and checked."""

    def __init__(self, folder: Path) -> None:
        with reraise_as_damaged(folder):
            self.folder, self.manifest = folder, read_manifest(folder)
        self.files: dict[str, Any] = self.manifest.get("files", {})
        self._rank_files: dict[int, list[str]] = {}
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}

    def output_tensors(self, exclude_frozen: bool = False) -> list[OutputTensor]:
        """The weights and the model's buffers, by name; every file they are in is verified."""
        with reraise_as_damaged(self.folder):
            return self._output_tensors(exclude_frozen)

    def _output_tensors(self, exclude_frozen: bool) -> list[OutputTensor]:
        if any(tensor["kind"] == "int8" for tensor in self.manifest["tensors"]):
            raise InvalidArguments(f"{self.folder.name} holds int8 weights; give the checkpoint they were made from")
        tensors = [tensor for tensor in self.manifest["tensors"] if tensor["kind"] == "weight"]
        if exclude_frozen:
            learnt = {tensor["name"] for tensor in self.manifest["tensors"] if tensor["kind"] != "weight"}
            if not learnt:
                raise InvalidArguments(f"--exclude_frozen_parameters: {self.folder.name} holds no optimizer state, "
                                       "which would show what is frozen; leave the flag out")
            tensors = [tensor for tensor in tensors if tensor["name"] in learnt]
        if self.manifest["format"] >= 3:
            layout = self.manifest["layout"]
            for rank in range(layout["tp"] * layout["dp"]):
                for name in self._files_of(rank):
                    self.verify(name)
        else:
            for name in sorted({piece["file"] for tensor in tensors for piece in tensor["pieces"]}):
                self.verify(name)
        shared = self._shared_state()
        found = [OutputTensor(tensor["name"], logical_shape(tensor["sharding"]), "<f4", partial(self.weight, tensor),
                              tensor["name"]) for tensor in tensors]
        found += self._buffers(shared.get("buffers", {}))
        by_name = {entry.name: entry for entry in found}
        found += [by_name[saved]._replace(name=name) for name, saved in shared.get("tied", {}).items()
                  if saved in by_name]
        return sorted(found, key=lambda entry: (entry.saved_as, entry.name))

    def weight(self, tensor: Mapping[str, Any]) -> Array:
        """The whole tensor as fp32, put together from its pieces a block at a time."""
        with reraise_as_damaged(self.folder):
            return self._weight(tensor)

    def _weight(self, tensor: Mapping[str, Any]) -> Array:
        cut, shape = tensor["sharding"], logical_shape(tensor["sharding"])
        out, filled = np.empty(prod(shape), "<f4"), 0
        for piece in self._pieces(tensor):
            for done in range(0, piece["count"], BLOCK):
                start = piece["offset"] + done
                data = as_fp32(*self._read(piece["file"], piece["key"], done, min(BLOCK, piece["count"] - done)))
                for local, logical, count in segments(cut, piece["tp_rank"], start, start + len(data)):
                    out[logical:logical + count] = data[local - start:local - start + count]
                    filled += count
        if filled != out.size:
            raise DamagedCheckpoint(f"{self.folder}: weight {tensor['name']!r}: {filled} of {out.size} elements found")
        return out.reshape(shape)

    def _pieces(self, tensor: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """tp_rank, offset, count, file and key of each."""
        return tensor["pieces"] if "pieces" in tensor else self._pieces_by_arithmetic(tensor)

    def _pieces_by_arithmetic(self, tensor: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The flattened tensor of a tensor parallel rank begins at `start` of a row of shards of `each` elements; shard
        d is in the files of rank d * tp + the tensor parallel rank."""
        layout, cut, start, each = self.manifest["layout"], tensor["sharding"], tensor["start"], tensor["each"]
        numel = prod(cut["local_shape"])
        for tp_rank in range(cut["tp_size"]):
            for shard in range(layout["dp"]):
                low, high = max(shard * each - start, 0), min((shard + 1) * each - start, numel)
                if low < high:
                    key = f"{tensor['kind']}/{tensor['name']}/{tp_rank}/{low}"
                    file = self._file_holding(key, shard * layout["tp"] + tp_rank)
                    yield {"tp_rank": tp_rank, "offset": low, "count": high - low, "file": file, "key": key}

    def _file_holding(self, key: str, rank: int) -> str:
        names = self._files_of(rank)
        name = next((name for name in names if key in self._header(name)[1]), None)
        if name is None:
            raise DamagedCheckpoint(f"{self.folder}: {key!r} is in none of {names}")
        return name

    def _files_of(self, rank: int) -> list[str]:
        """The files of tensors of one rank; what its part of the manifest says becomes known."""
        if rank not in self._rank_files:
            path = self.folder / f"rank{rank}.json"
            part = read_sealed(path)
            if self.manifest["format"] > 3:
                self._check_provenance(path, part["origin"], rank)
            elif (part["save_id"], part["rank"]) != (self.manifest["save_id"], rank):
                raise DamagedCheckpoint(f"{path}: is of another checkpoint; choose another tag with -t")
            if any(not re.fullmatch(r"rank%d(-\d+)?\.safetensors" % rank, name) for name in part["files"]
                   if rank or name not in ("shared.json", "config.json")):
                raise DamagedCheckpoint(f"{path}: lists files that rank {rank} does not write")
            self.files |= part["files"]
            self._rank_files[rank] = sorted(name for name in part["files"] if name.endswith(".safetensors"))
        return self._rank_files[rank]

    def _check_provenance(self, path: Path, found: Mapping[str, Any], rank: int) -> None:
        for name in PROVENANCE_FIELDS:
            expected = rank if name == "rank" else self.manifest[name]
            if str(found.get(name)) != str(expected):
                raise DamagedCheckpoint(f"{path}: is of another checkpoint: {name} expected {expected}, found "
                                        f"{str(found.get(name)):.80}; choose another tag with -t")

    def _shared_state(self) -> dict[str, Any]:
        """The state that all ranks share."""
        if self.manifest["format"] >= 3:
            self._files_of(0)
        self.verify("shared.json")
        shared: dict[str, Any] = json.loads(read_json_bytes(self.folder / "shared.json"))
        if self.manifest["format"] > 3:
            self._check_provenance(self.folder / "shared.json", shared["origin"], 0)
            shared = shared["state"]
        return shared

    def _buffers(self, buffers: Mapping[str, Any]) -> Iterator[OutputTensor]:
        """What the model registers besides parameters; whole numbers stay what they are."""
        files = sorted(name for name in self.files if re.fullmatch(r"rank0(-\d+)?\.safetensors", name))
        for name in files if buffers else ():
            self.verify(name)
        for name, value in buffers.items():
            file = next((file for file in files if value["$tensor"] in self._header(file)[1]), None)
            if file is None:
                raise DamagedCheckpoint(f"{self.folder}: buffer {name!r} is in none of {files}")
            yield self._buffer(name, file, value["$tensor"])

    def _buffer(self, name: str, file: str, key: str) -> OutputTensor:
        said = self._header(file)[1][key]
        shape, floats = tuple(said["shape"]), said["dtype"] in ("F64", "F32", "F16", "BF16")

        def load() -> Array:
            data, dtype = self._read(file, key, 0, prod(shape))
            return (as_fp32(data, dtype) if floats else data).reshape(shape)

        return OutputTensor(name, shape, "<f4" if floats else DTYPES[said["dtype"]], load, name)

    def verify(self, name: str) -> None:
        """Size and checksum of one file."""
        said, path = self.files.get(name), self.folder / name
        if said is None or not SAFE_NAME.fullmatch(name):
            raise DamagedCheckpoint(f"{self.folder}: file {name!r:.80} is not listed in the manifest")
        size, crc = 0, 0
        with explain_read_errors(path), open(path, "rb") as file:
            while data := file.read(BLOCK):
                size, crc = size + len(data), crc32(data, crc)
        if (size, f"{crc:08x}") != (said["size"], said["crc32"]):
            raise DamagedCheckpoint(f"{path}: damaged: expected {said['size']} bytes of crc32 {said['crc32']}, found "
                                    f"{size} of {crc:08x}; choose another tag with -t")
        if self.manifest["format"] > 3 and path.suffix == ".safetensors":
            rank = re.match(r"rank(\d+)", name)
            self._check_provenance(path, read_header(path)[2], int(rank[1]) if rank else 0)

    def _header(self, name: str) -> tuple[int, dict[str, Any]]:
        """(first byte of the data, key -> dtype, shape, data_offsets) of a safetensors file."""
        if name not in self._headers:
            self._headers[name] = read_header(self.folder / name)[:2]
        return self._headers[name]

    def _read(self, name: str, key: str, start: int, count: int) -> tuple[Array, str]:
        """Elements of one stored tensor, and what type the file says they are."""
        base, header = self._header(name)
        said = header[key]
        dtype = np.dtype(DTYPES[said["dtype"]])
        with explain_read_errors(self.folder / name):
            offset = base + said["data_offsets"][0] + start * dtype.itemsize
            data = np.fromfile(self.folder / name, dtype, count, offset=offset)
        if len(data) != count:
            raise DamagedCheckpoint(f"{self.folder / name}: {key!r}: {count} elements expected, found {len(data)}")
        return data, said["dtype"]


def open_tag(folder: Path, tag: str | None = None) -> TagReader:
    """`folder` is one tag's own, or the root of the tags: there the one that `latest` names is taken, otherwise the one
    saved last."""
    if tag is None and (folder / "manifest.json").exists():
        return TagReader(folder)
    found = tags_under(folder)
    if tag is not None:
        if tag not in found:
            raise DamagedCheckpoint(f"no tag {tag!r:.80} under {folder}, found {', '.join(found) or 'none'}")
        return open_named_tag(folder, found, tag)
    latest = latest_tag(folder, found)
    if latest is not None:
        return open_named_tag(folder, found, latest)
    tags = [open_named_tag(folder, found, name) for name, path in found.items() if (path / "manifest.json").exists()
            or re.fullmatch(r"global_step\d{1,18}", name) and any(path.iterdir())]
    if not tags:
        raise DamagedCheckpoint(f"no committed checkpoint under {folder}")
    return max(tags, key=lambda other: commit_order(other.manifest))


def commit_order(manifest: Mapping[str, Any]) -> tuple[int, int, int, str]:
    """By number; before format 5, which has it, by time."""
    number = int(manifest.get("commit", 0))
    return number, 0 if number else int(manifest.get("saved_at", 0)), int(manifest["iteration"]), str(manifest["tag"])


def open_named_tag(folder: Path, tag_folders: Mapping[str, Path], name: str) -> TagReader:
    """The tag, which is in this folder, and whose manifest is that of this name."""
    check_link_inside(tag_folders[name], folder)
    tag = TagReader(tag_folders[name])
    if tag.manifest["tag"] != name:
        raise DamagedCheckpoint(f"{tag.folder}: its manifest is of tag {tag.manifest['tag']!r:.80}")
    return tag


def check_link_inside(path: Path, folder: Path) -> None:
    """No link that leads out of the folder."""
    target, folder_path = os.path.realpath(path), os.path.realpath(folder)
    if path.is_symlink() and os.path.commonpath([target, folder_path]) != folder_path:
        raise DamagedCheckpoint(f"{path} is a link to {target}, outside {folder}, and is not followed")


def latest_tag(folder: Path, tag_folders: Mapping[str, Path]) -> str | None:
    """The tag that `latest` names, or was about to name when the save was interrupted after its commit."""
    path = folder / "latest"
    check_link_inside(path, folder)
    said = None
    if path.is_file():
        with explain_read_errors(path), open(path, "rb") as file:
            said = file.read(256).decode("utf-8", "replace").strip()
    with suppress(OSError, DamagedCheckpoint, ValueError, KeyError, TypeError):
        pending = json.loads(read_json_bytes(folder / ".latest-pending"))
        if pending["was"] == said and (tag_folders[pending["tag"]] / "manifest.json").read_bytes().endswith(
                b'%s"}\n' % pending["seal"].encode()):
            return str(pending["tag"])
    return said if said is not None and said in tag_folders and any(tag_folders[said].iterdir()) else None


def tags_under(folder: Path) -> dict[str, Path]:
    """Tag -> its folder: aside, if a kill fell between the two renames of its replacement."""
    with explain_read_errors(folder):
        names = sorted(os.listdir(folder), key=lambda name: not name.startswith(".aside-"))  # its own folder wins
    return {tag: folder / name for name in names if (folder / name).is_dir()
            and SAFE_NAME.fullmatch(tag := name.removeprefix(".aside-"))}


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    manifest = read_sealed(path)
    if manifest["format"] not in FORMATS:
        raise DamagedCheckpoint(f"{path}: format {manifest['format']!r:.20}, this script reads formats {FORMATS[0]} to "
                                f"{FORMATS[-1]}")
    if ("-" in manifest.get("save_id", "")) != (manifest["format"] > 3) or manifest["format"] > 3 and (
            manifest["save_id"].partition("-")[2] != digest(manifest)):
        raise DamagedCheckpoint(f"{path}: is of another checkpoint, or was changed; choose another tag with -t")
    return manifest


def digest(manifest: Mapping[str, Any]) -> str:
    """Of what the manifest says; its save_id ends with it."""
    said = {name: manifest[name] for name in ("run_id", "tag", "iteration", "layout", "config", "tensors")}
    return sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()[:32]


def read_sealed(path: Path) -> dict[str, Any]:
    """A JSON file that ends with the checksum of what is before."""
    data = read_json_bytes(path)
    text, mark, rest = data.rpartition(b',"crc32":"')
    if not mark or rest != b'%08x"}\n' % crc32(text):
        raise DamagedCheckpoint(
            f"{path}: damaged: its {len(data)} bytes do not match its checksum; choose another tag with -t")
    record: dict[str, Any] = json.loads(text + b"}")
    return record


def read_json_bytes(path: Path) -> bytes:
    """Of a file of JSON."""
    with explain_read_errors(path):
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise DamagedCheckpoint(f"{path}: has {size} bytes, and no file of its kind more than {MAX_JSON_BYTES}")
        return path.read_bytes()


def read_header(path: Path) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(first byte of the data, key -> dtype, shape, data_offsets, metadata) of a safetensors file, whose tensors follow
    one another to its end."""
    with explain_read_errors(path), open(path, "rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length <= min(size - 8, MAX_JSON_BYTES) else None
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{path}: its header is damaged; choose another tag with -t")
    metadata, end = header.pop("__metadata__", {}), 0
    for key, said in sorted(header.items(), key=lambda entry: tuple(entry[1]["data_offsets"])):
        start, stop = said["data_offsets"]
        if start != end or stop - start != prod(said["shape"]) * np.dtype(DTYPES[said["dtype"]]).itemsize:
            raise DamagedCheckpoint(f"{path}: {key!r:.80} is not where its header says; choose another tag with -t")
        end = stop
    if 8 + length + end != size:
        raise DamagedCheckpoint(f"{path}: holds more or less than its header says; choose another tag with -t")
    return 8 + length, header, metadata


def logical_shape(cut: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape without tensor parallelism and padding."""
    shape, dim = list(cut["local_shape"]), cut["dim"]
    if dim is not None:
        shape[dim] = shape[dim] * cut["tp_size"] if cut["size"] is None else cut["size"]
    return tuple(shape)


def segments(cut: Mapping[str, Any], tp_rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(local, logical, count) of what is consecutive in both in [start, stop) of a rank's part; no padding.

    Flattened, a rank holds the same part of every block: of each index before `dim`, of each of the `stride` parts.
    """
    if cut["dim"] is None:
        yield start, start, stop - start
        return
    inner = prod(cut["local_shape"][cut["dim"] + 1:])
    mine = cut["local_shape"][cut["dim"]] // cut["stride"] * inner
    whole = mine * cut["tp_size"] if cut["size"] is None else cut["size"] * inner
    for block in range(start // mine, -(-stop // mine)):
        low, high = max(start, block * mine), min(stop, (block + 1) * mine)
        shift = (tp_rank - block) * mine
        first, last = low + shift, min(high + shift, whole)
        if first < last:
            yield low, block * whole + first, last - first


def as_fp32(data: Array, dtype: str) -> Array:
    if dtype == "BF16":  # the upper half of an fp32
        return (data.astype("<u4") << 16).view("<f4")
    return data.astype("<f4", copy=False)


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read ({error.strerror or error})") from error


# ---- writing --------------------------------------------------------------------------------------------------------

def write_output(entries: Iterable[OutputTensor], output: Path, max_shard_size: int) -> list[Path]:
    """The tensors in one file, safetensors or torch's by its suffix, or in several with an index; what was written."""
    shards = list(split_into_files(entries, max_shard_size))
    index = output.with_name(f"{output.name}.index.json")
    if len(shards) == 1:
        with staged_file(output) as file:
            write_shard(file, shards[0], output.suffix)
        index.unlink(missing_ok=True)  # of an earlier output: it would name other files
        return [output]
    files, weight_map = [], {}
    for number, shard in enumerate(shards, 1):
        path = output.with_name(f"{output.stem}-{number:05d}-of-{len(shards):05d}{output.suffix}")
        with staged_file(path) as file:
            write_shard(file, shard, output.suffix)
        files.append(path)
        weight_map.update({entry.name: path.name for entry in shard})
    total = sum(entry.nbytes for shard in shards for entry in shard)
    with staged_file(index) as file:
        file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n")
    output.unlink(missing_ok=True)  # likewise: loaders would take it first
    return [*files, index]


def split_into_files(entries: Iterable[OutputTensor], limit: int) -> Iterator[list[OutputTensor]]:
    """The entries of each file, in order; at least one."""
    shard: list[OutputTensor] = []
    for entry in entries:
        is_tied = bool(shard) and shard[-1].saved_as == entry.saved_as
        if shard and not is_tied and sum(other.nbytes for other in shard) + entry.nbytes > limit:
            yield shard
            shard = []
        shard.append(entry)
    yield shard


def write_shard(file: IO[bytes], entries: list[OutputTensor], suffix: str) -> None:
    if suffix != ".safetensors":
        import torch

        loaded = {entry.name: torch.from_numpy(entry.load()) for entry in entries if entry.name == entry.saved_as}
        torch.save({entry.name: loaded[entry.saved_as] for entry in entries}, file)  # which writes each tensor once
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    entries = sorted(entries, key=lambda entry: -np.dtype(entry.dtype).itemsize)  # each aligned to its width
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in entries:
        file.write(np.ascontiguousarray(entry.load()).reshape(-1).view(np.uint8).data)


@contextmanager
def staged_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def output_path(output: Path, safe: bool) -> Path:
    """The file to write: a folder gets the name that Hugging Face looks for in it."""
    if output.is_dir() or not output.suffix:
        output.mkdir(parents=True, exist_ok=True)
        return output / ("model.safetensors" if safe else "pytorch_model.bin")
    return output.with_suffix(".safetensors") if safe else output


def parse_byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS or (size := int(float(match[1]) * UNITS[match[2].upper()])) < 1:
        raise InvalidArguments(f"--max_shard_size {text}: expected a size such as 5GB or 500MiB")
    return size


# ---- the command ----------------------------------------------------------------------------------------------------

class Fp32ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArguments(f"{message}; see --help")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Fp32ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", type=Path, help="folder of the tags, or of one")
    parser.add_argument("output", type=Path, help="file, or folder")
    parser.add_argument("-t", "--tag", help="the checkpoint to use (default: what `latest` names)")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what was trained")
    parser.add_argument("-d", "--debug", action="store_true", help="name every tensor; traceback at an error")
    return parser.parse_args(arguments)


def convert(options: argparse.Namespace) -> None:
    limit = parse_byte_count(options.max_shard_size)
    if options.output.name in ("latest", "zero_to_fp32.py") or any(
            (folder / "manifest.json").exists() for folder in (options.output / "_").resolve().parents):
        raise InvalidArguments(f"{options.output}: is a place of a checkpoint's own files; choose another")
    tag = open_tag(options.checkpoint_dir, options.tag)
    layout = tag.manifest["layout"]
    world = layout.get("tp", 1) * layout.get("dp", 1)
    print(f"{tag.folder}: iteration {tag.manifest['iteration']}, ZeRO stage {layout.get('zero_stage', 'unknown')}, "
          f"world size {world} (tp {layout.get('tp', 1)}, dp {layout.get('dp', 1)})", flush=True)
    entries = tag.output_tensors(options.exclude_frozen_parameters)
    for entry in entries if options.debug else ():
        print(f"  {entry.name} {list(entry.shape)} {DTYPE_NAMES[entry.dtype]}")
    for path in write_output(entries, output_path(options.output, options.safe_serialization), limit):
        print(f"wrote {path} ({path.stat().st_size} bytes)", flush=True)
    print(f"{len(entries)} tensors, {sum(prod(entry.shape) for entry in entries)} elements in fp32")


def main(arguments: list[str]) -> int:
    try:
        convert(parse_arguments(arguments))
        return 0
    except (InvalidArguments, DamagedCheckpoint, OSError) as error:
        if {"-d", "--debug"} & set(arguments):
            raise
        print(f"error: {error}", file=sys.stderr)
        return {InvalidArguments: 2, DamagedCheckpoint: 4}.get(type(error), 7)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
