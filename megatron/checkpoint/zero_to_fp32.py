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
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np

Array = np.ndarray[Any, Any]

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
          "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}
OUTPUT_DTYPES = {**DTYPES, "F64": "<f4", "F16": "<f4", "BF16": "<f4"}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 1 << 18
"""Bytes or elements read at a time."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
MAX_JSON_BYTES = 256 << 20
PROVENANCE_FIELDS = ("save_id", "rank", "run_id", "tag", "iteration")
"""What a file says of the checkpoint that it is of."""


class DamagedCheckpoint(Exception):
    """A checkpoint that is missing, damaged or not of this format."""


class InvalidArguments(Exception):
    """Arguments that cannot be honoured."""


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn read errors, and errors from fields that are missing or of another type, into DamagedCheckpoint."""
    try:
        yield
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: not a checkpoint of this format ({type(error).__name__}: {error})") from error


class OutputTensor(NamedTuple):
    """One tensor of the output: its size is known now, its data is loaded when it is written."""

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

class StoredTensor(NamedTuple):
    """Where a tensor is: `offset` is its first byte in the safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, start: int, count: int) -> Array:
        """`count` elements from `start` on of the flattened tensor, floating point numbers as fp32; fewer if the file
        was cut off since it was verified."""
        dtype = np.dtype(DTYPES[self.dtype])
        with explain_damage(self.path):
            data = np.fromfile(self.path, dtype, count, offset=self.offset + start * dtype.itemsize)
        if self.dtype == "BF16":  # the upper half of an fp32
            data = (data.astype("<u4") << 16).view("<f4")
        return data.astype(OUTPUT_DTYPES[self.dtype], copy=False)

    def load(self) -> Array:
        with explain_damage(self.path):
            return self.read(0, prod(self.shape)).reshape(self.shape)


class TagReader:
    """One checkpoint. Its manifest says how each tensor is cut, from which follows which rank holds which elements.
    `rank<k>.json` lists the files of rank k; before format 3 the manifest lists all."""

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / "manifest.json"
        with explain_damage(folder):
            manifest = self.manifest = read_sealed(path)
            self.version, save_id = manifest["format"], manifest.get("save_id", "")
            if self.version not in (1, 2, 3, 4, 5):
                raise DamagedCheckpoint(f"{path}: format {self.version!r:.20}, this script reads formats 1 to 5")
            digest = ""
            if self.version > 3:  # the save_id ends with a digest of what the manifest says
                stated = "run_id", "tag", "iteration", "layout", "config", "tensors"
                content = {name: manifest[name] for name in stated}
                digest = sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]
            if save_id.partition("-")[2] != digest:
                raise DamagedCheckpoint(f"{path}: is of another checkpoint, or was changed; choose another tag with -t")
            self.files: dict[str, Any] = manifest.get("files", {})
        self._stored: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
        """Rank -> key -> where in the files of the rank."""

    def output_tensors(self, exclude_frozen: bool = False) -> list[OutputTensor]:
        """The weights and the model's buffers, by name; every file they are in is verified."""
        with explain_damage(self.folder):
            if any(tensor["kind"] == "int8" for tensor in self.manifest["tensors"]):
                raise InvalidArguments(
                    f"{self.folder.name} holds int8 weights; give the checkpoint they were made from")
            weights = [tensor for tensor in self.manifest["tensors"] if tensor["kind"] == "weight"]
            if exclude_frozen:
                trained = {tensor["name"] for tensor in self.manifest["tensors"] if tensor["kind"] != "weight"}
                if not trained:
                    raise InvalidArguments(f"--exclude_frozen_parameters: {self.folder.name} holds no optimizer state, "
                                           "which would show what is frozen; leave the flag out")
                weights = [tensor for tensor in weights if tensor["name"] in trained]
            for rank in range(self.manifest["layout"]["tp"] * self.manifest["layout"]["dp"] if self.version > 2 else 0):
                self._read_rank_manifest(rank)
            for name in ("shared.json", *sorted(name for name in self.files if name.endswith(".safetensors"))):
                self._verify_file(name)
            shared = json.loads(read_json_bytes(self.folder / "shared.json"))
            if self.version > 3:
                self._check_provenance(self.folder / "shared.json", shared["origin"], 0)
                shared = shared["state"]
            outputs = [OutputTensor(tensor["name"], logical_shape(tensor["sharding"]), "<f4",
                                    partial(self._load_weight, tensor), tensor["name"]) for tensor in weights]
            for name, value in shared.get("buffers", {}).items():
                stored = self._stored[0][value["$tensor"]]
                outputs.append(OutputTensor(name, stored.shape, OUTPUT_DTYPES[stored.dtype], stored.load, name))
            by_name = {entry.name: entry for entry in outputs}
            outputs += [by_name[saved]._replace(name=name) for name, saved in shared.get("tied", {}).items()
                        if saved in by_name]
            return sorted(outputs, key=lambda entry: (entry.saved_as, entry.name))

    def _load_weight(self, tensor: Mapping[str, Any]) -> Array:
        """The whole tensor as fp32, put together from its pieces a block at a time."""
        with explain_damage(self.folder):
            sharding, shape = tensor["sharding"], logical_shape(tensor["sharding"])
            out, filled = np.empty(prod(shape), "<f4"), 0
            for tp_rank, offset, count, stored in self._pieces(tensor):
                for start in range(offset, offset + count, BLOCK):
                    data = stored.read(start - offset, min(BLOCK, offset + count - start))
                    for local, logical, length in segments(sharding, tp_rank, start, start + len(data)):
                        out[logical:logical + length] = data[local - start:local - start + length]
                        filled += length
            if filled != out.size:
                raise DamagedCheckpoint(
                    f"{self.folder}: weight {tensor['name']!r}: {filled} of {out.size} elements found")
            return out.reshape(shape)

    def _pieces(self, tensor: Mapping[str, Any]) -> Iterator[tuple[int, int, int, StoredTensor]]:
        """(tensor parallel rank, offset, count, where) of consecutive elements of a rank's flattened local tensor."""
        if "pieces" in tensor:  # formats 1 and 2
            for piece in tensor["pieces"]:
                stored = self._stored[rank_of_file(piece["file"])][piece["key"]]
                yield piece["tp_rank"], piece["offset"], piece["count"], stored
            return
        # The local tensor begins at `start` of a flat buffer that is cut into one shard of `each` elements for each
        # data parallel rank.
        layout, start, each = self.manifest["layout"], tensor["start"], tensor["each"]
        numel = prod(tensor["sharding"]["local_shape"])
        for tp_rank in range(tensor["sharding"]["tp_size"]):
            for shard in range(layout["dp"]):
                low, high = max(shard * each - start, 0), min((shard + 1) * each - start, numel)
                if low < high:
                    key = f"{tensor['kind']}/{tensor['name']}/{tp_rank}/{low}"
                    yield tp_rank, low, high - low, self._stored[shard * layout["tp"] + tp_rank][key]

    def _read_rank_manifest(self, rank: int) -> None:
        """Add the files that a rank's manifest lists."""
        path = self.folder / f"rank{rank}.json"
        part = read_sealed(path)
        self._check_provenance(path, part["origin"] if self.version > 3 else part, rank)
        if any(not re.fullmatch(r"rank%d(-\d+)?\.safetensors" % rank, name) for name in part["files"]
               if rank or name not in ("shared.json", "config.json")):
            raise DamagedCheckpoint(f"{path}: lists files that rank {rank} does not write")
        self.files |= part["files"]

    def _check_provenance(self, path: Path, stated: Mapping[str, Any], rank: int) -> None:
        """Raise if a file is of another checkpoint; format 3 states only save and rank, and only in `rank<k>.json`."""
        for name in PROVENANCE_FIELDS[:2 if self.version == 3 else None]:
            expected = rank if name == "rank" else self.manifest[name]
            if str(stated.get(name)) != str(expected):
                raise DamagedCheckpoint(f"{path}: is of another checkpoint: {name} expected {expected}, found "
                                        f"{str(stated.get(name)):.80}; choose another tag with -t")

    def _verify_file(self, name: str) -> None:
        """Check size and checksum of a file; if it holds tensors, also its origin, and add them."""
        entry, path = self.files.get(name), self.folder / name
        if entry is None or not SAFE_NAME.fullmatch(name):
            raise DamagedCheckpoint(f"{self.folder}: file {name!r:.80} is not listed in the manifest")
        size, crc = 0, 0
        with explain_damage(path), open(path, "rb") as file:
            while data := file.read(BLOCK):
                size, crc = size + len(data), crc32(data, crc)
        if (size, f"{crc:08x}") != (entry["size"], entry["crc32"]):
            raise DamagedCheckpoint(f"{path}: damaged: expected {entry['size']} bytes of crc32 {entry['crc32']}, found "
                                    f"{size} of {crc:08x}; choose another tag with -t")
        if path.suffix == ".safetensors":
            metadata, tensors = read_header(path)
            if self.version > 3:
                self._check_provenance(path, metadata, rank_of_file(name))
            self._stored[rank_of_file(name)].update(tensors)


def open_tag(folder: Path, tag: str | None = None) -> TagReader:
    """`folder` is one tag's own, or the root of the tags: there the one that `latest` names is taken, otherwise the one
    saved last."""
    if tag is None and (folder / "manifest.json").exists():
        return TagReader(folder)
    with explain_damage(folder):  # a tag's own folder wins over one set aside, from a kill during its replacement
        names = sorted(os.listdir(folder), key=lambda name: not name.startswith(".aside-"))
    folders = {tag_name: folder / name for name in names if (folder / name).is_dir()
               and SAFE_NAME.fullmatch(tag_name := name.removeprefix(".aside-"))}

    def open_named(name: str) -> TagReader:
        check_link_inside(folders[name], folder)
        reader = TagReader(folders[name])
        if reader.manifest["tag"] != name:
            raise DamagedCheckpoint(f"{reader.folder}: its manifest is of tag {reader.manifest['tag']!r:.80}")
        return reader

    def commit_order(reader: TagReader) -> tuple[int, int, int, str]:
        """By commit number; before format 5, which has it, by time."""
        manifest, number = reader.manifest, int(reader.manifest.get("commit", 0))
        saved_at = 0 if number else int(manifest.get("saved_at", 0))
        return number, saved_at, int(manifest["iteration"]), str(manifest["tag"])

    if tag is not None and tag not in folders:
        raise DamagedCheckpoint(f"no tag {tag!r:.80} under {folder}, found {', '.join(folders) or 'none'}")
    chosen = latest_tag(folder, folders) if tag is None else tag
    if chosen is not None:
        return open_named(chosen)
    tags = [open_named(name) for name, path in folders.items() if (path / "manifest.json").exists()
            or re.fullmatch(r"global_step\d{1,18}", name) and any(path.iterdir())]
    if not tags:
        raise DamagedCheckpoint(f"no committed checkpoint under {folder}")
    return max(tags, key=commit_order)


def check_link_inside(path: Path, folder: Path) -> None:
    """Refuse a link that leads out of the folder."""
    target, folder_path = os.path.realpath(path), os.path.realpath(folder)
    if path.is_symlink() and os.path.commonpath([target, folder_path]) != folder_path:
        raise DamagedCheckpoint(f"{path} is a link to {target}, outside {folder}, and is not followed")


def latest_tag(folder: Path, tag_folders: Mapping[str, Path]) -> str | None:
    """The tag that `latest` names, or was about to name when the save was interrupted after its commit."""
    path, latest = folder / "latest", None
    check_link_inside(path, folder)
    if path.is_file():
        with explain_damage(path), open(path, "rb") as file:
            latest = file.read(256).decode("utf-8", "replace").strip()
    with suppress(OSError, DamagedCheckpoint, AttributeError, KeyError, TypeError, ValueError):
        pending = json.loads(read_json_bytes(folder / ".latest-pending"))
        if pending["was"] == latest and (tag_folders[pending["tag"]] / "manifest.json").read_bytes().endswith(
                b'%s"}\n' % pending["seal"].encode()):
            return str(pending["tag"])
    return latest if latest is not None and latest in tag_folders and any(tag_folders[latest].iterdir()) else None


def read_json_bytes(path: Path) -> bytes:
    with explain_damage(path):
        if (size := path.stat().st_size) > MAX_JSON_BYTES:  # a sparse file, say: not read into memory
            raise DamagedCheckpoint(f"{path}: has {size} bytes, and no file of its kind more than {MAX_JSON_BYTES}")
        return path.read_bytes()


def read_sealed(path: Path) -> dict[str, Any]:
    """A JSON file that ends with the checksum of what is before."""
    data = read_json_bytes(path)
    text, mark, rest = data.rpartition(b',"crc32":"')
    if not mark or rest != b'%08x"}\n' % crc32(text):
        raise DamagedCheckpoint(
            f"{path}: damaged: its {len(data)} bytes do not match its checksum; choose another tag with -t")
    record: dict[str, Any] = json.loads(text + b"}")
    return record


def read_header(path: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """(metadata, tensors by key) of a safetensors file, whose tensors must follow one another to its end."""
    with explain_damage(path), open(path, "rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length)) if length <= min(size - 8, MAX_JSON_BYTES) else None
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{path}: its header is damaged; choose another tag with -t")
    metadata, tensors, end = header.pop("__metadata__", {}), {}, 0
    for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        start, stop = entry["data_offsets"]
        if start != end or stop - start != prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]]).itemsize:
            raise DamagedCheckpoint(f"{path}: {key!r:.80} is not where its header says; choose another tag with -t")
        tensors[key] = StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start)
        end = stop
    if 8 + length + end != size:
        raise DamagedCheckpoint(f"{path}: holds more or less than its header says; choose another tag with -t")
    return metadata, tensors


def rank_of_file(name: str) -> int:
    match = re.match(r"rank(\d+)", name)
    return int(match[1]) if match else 0


def logical_shape(sharding: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape without tensor parallelism and padding."""
    shape, dim = list(sharding["local_shape"]), sharding["dim"]
    if dim is not None:
        shape[dim] = shape[dim] * sharding["tp_size"] if sharding["size"] is None else sharding["size"]
    return tuple(shape)


def segments(sharding: Mapping[str, Any], tp_rank: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(local, logical, count) of what is consecutive in both in [start, stop) of a rank's part; no padding.

    Flattened, a rank holds the same part of every block: of each index before `dim`, of each of the `stride` parts.
    """
    if sharding["dim"] is None:
        yield start, start, stop - start
        return
    inner = prod(sharding["local_shape"][sharding["dim"] + 1:])
    mine = sharding["local_shape"][sharding["dim"]] // sharding["stride"] * inner
    whole = mine * sharding["tp_size"] if sharding["size"] is None else sharding["size"] * inner
    for block in range(start // mine, -(-stop // mine)):
        low, high = max(start, block * mine), min(stop, (block + 1) * mine)
        shift = (tp_rank - block) * mine
        first, last = low + shift, min(high + shift, whole)
        if first < last:
            yield low, block * whole + first, last - first


# ---- writing --------------------------------------------------------------------------------------------------------

def write_output(entries: Iterable[OutputTensor], output: Path, max_shard_size: int) -> list[Path]:
    """Write the tensors into one file, safetensors or torch's by its suffix, or into several with an index; returns the
    files."""
    shards: list[list[OutputTensor]] = [[]]
    for entry in entries:
        is_tied = bool(shards[-1]) and shards[-1][-1].saved_as == entry.saved_as
        if shards[-1] and not is_tied and sum(other.nbytes for other in shards[-1]) + entry.nbytes > max_shard_size:
            shards.append([])
        shards[-1].append(entry)
    files = [output] if len(shards) == 1 else [
        output.with_name(f"{output.stem}-{number:05d}-of-{len(shards):05d}{output.suffix}")
        for number in range(1, len(shards) + 1)]
    for path, shard in zip(files, shards):
        with staged_file(path) as file:
            write_shard(file, shard, output.suffix)
    index = output.with_name(f"{output.name}.index.json")
    if len(shards) == 1:
        index.unlink(missing_ok=True)  # of an earlier output: it would name other files
        return files
    content = {"metadata": {"total_size": sum(entry.nbytes for shard in shards for entry in shard)},
               "weight_map": {entry.name: path.name for path, shard in zip(files, shards) for entry in shard}}
    with staged_file(index) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
    output.unlink(missing_ok=True)  # likewise: loaders would take it first
    return [*files, index]


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


def convert(arguments: list[str]) -> None:
    parser = Fp32ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", type=Path, help="folder of the tags, or of one")
    parser.add_argument("output", type=Path, help="file, or folder")
    parser.add_argument("-t", "--tag", help="the checkpoint to use (default: what `latest` names)")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what was trained")
    parser.add_argument("-d", "--debug", action="store_true", help="name every tensor; traceback at an error")
    options = parser.parse_args(arguments)
    limit = parse_byte_count(options.max_shard_size)
    if options.output.name in ("latest", "zero_to_fp32.py") or any(
            (folder / "manifest.json").exists() for folder in (options.output / "_").resolve().parents):
        raise InvalidArguments(f"{options.output}: is a place of a checkpoint's own files; choose another")
    tag = open_tag(options.checkpoint_dir, options.tag)
    layout = tag.manifest["layout"]
    tp, dp = layout.get("tp", 1), layout.get("dp", 1)
    print(f"{tag.folder}: iteration {tag.manifest['iteration']}, ZeRO stage {layout.get('zero_stage', 'unknown')}, "
          f"world size {tp * dp} (tp {tp}, dp {dp})", flush=True)
    entries = tag.output_tensors(options.exclude_frozen_parameters)
    for entry in entries if options.debug else ():
        print(f"  {entry.name} {list(entry.shape)} {DTYPE_NAMES[entry.dtype]}")
    for path in write_output(entries, output_path(options.output, options.safe_serialization), limit):
        print(f"wrote {path} ({path.stat().st_size} bytes)", flush=True)
    print(f"{len(entries)} tensors, {sum(prod(entry.shape) for entry in entries)} elements in fp32")


def main(arguments: list[str]) -> int:
    try:
        convert(arguments)
        return 0
    except (InvalidArguments, DamagedCheckpoint, OSError) as error:
        if {"-d", "--debug"} & set(arguments):
            raise
        print(f"error: {error}", file=sys.stderr)
        return {InvalidArguments: 2, DamagedCheckpoint: 4}.get(type(error), 7)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
