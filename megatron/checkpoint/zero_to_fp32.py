#!/usr/bin/env python3
"""The fp32 weights of a checkpoint as one state dict, whatever ZeRO stage and tensor parallel size it was saved with.

    python zero_to_fp32.py . pytorch_model.bin [-t TAG] [--max_shard_size 5GB] [--safe_serialization]
                                               [--exclude_frozen_parameters] [-d]

The first argument is the folder of the tags, or one tag's; the second a file, or a folder that gets a
`pytorch_model.bin` (`model.safetensors` with --safe_serialization). Larger than --max_shard_size, the output is several
files and an index, as Hugging Face's loaders expect them. Exit codes: 0 good, 2 usage, 4 damaged, 7 not writable.

A copy of this file is in every save root, and needs Python and numpy, and torch only to write a `.bin`. Every byte of
the tag is checked first. In memory is at most one output file, for `.safetensors` one tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
          "I8": "|i1", "U8": "|u1", "BOOL": "|b1"}
FORMAT = 5
BLOCK = 1 << 18
"""Bytes or elements read at a time."""
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


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


def require(is_good: object, path: Path, problem: str) -> None:
    if not is_good:
        raise DamagedCheckpoint(f"{path}: {problem}; choose another tag with -t")


class OutputTensor(NamedTuple):
    """One tensor of the output: its size is known now, its data is loaded when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Any]
    saved_as: str
    """The name that it has in the checkpoint; a tied tensor has several in the output."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


class StoredTensor(NamedTuple):
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Its first byte in the safetensors file."""

    def read(self, start: int, count: int) -> Any:
        """`count` elements from `start` on of the flattened tensor, floating point numbers as fp32."""
        dtype = np.dtype(DTYPES[self.dtype])
        with explain_damage(self.path):
            data = np.fromfile(self.path, dtype, count, offset=self.offset + start * dtype.itemsize)
        require(len(data) == count, self.path, "was cut off while it was read")
        if self.dtype == "BF16":  # the upper half of an fp32
            data = (data.astype("<u4") << 16).view("<f4")
        return data.astype("<f4") if "F" in self.dtype else data

    def load(self) -> Any:
        return self.read(0, prod(self.shape)).reshape(self.shape)


class TagReader:
    """One checkpoint, whose rank k wrote the files that `rank<k>.json` lists. A piece of a weight is stored under
    `weight/NAME/TP_RANK/OFFSET`: consecutive elements of the flattened tensor that a tensor parallel rank holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / "manifest.json"
        with explain_damage(path):
            self.manifest = read_sealed(path)
            version = self.manifest["format"]
            require(version == FORMAT, path, f"format {version!r:.20}, this script reads format {FORMAT}")
            stated = "run_id", "tag", "iteration", "layout", "config", "tensors"
            content = json.dumps({name: self.manifest[name] for name in stated}, separators=(",", ":"))
            is_own = self.manifest["save_id"].partition("-")[2] == sha256(content.encode()).hexdigest()[:32]
            require(is_own, path, "is of another checkpoint, or was changed")
        self._stored: dict[str, StoredTensor] = {}
        self._pieces: dict[str, list[tuple[int, int, StoredTensor]]] = defaultdict(list)

    def output_tensors(self, exclude_frozen: bool = False) -> list[OutputTensor]:
        """The weights and the model's buffers, by name, after checking every byte of the tag."""
        with explain_damage(self.folder):
            tensors, layout = self.manifest["tensors"], self.manifest["layout"]
            trained = {tensor["name"] for tensor in tensors if tensor["kind"] != "weight"}
            if any(tensor["kind"] == "int8" for tensor in tensors):
                raise InvalidArguments(f"{self.folder} holds int8 weights; give the checkpoint they were made from")
            if exclude_frozen and not trained:
                raise InvalidArguments(f"--exclude_frozen_parameters: {self.folder.name} holds no optimizer state, "
                                       "which would show what is frozen; leave the flag out")
            for rank in range(layout["tp"] * layout["dp"]):
                self._verify_rank(rank)
            path = self.folder / "shared.json"
            with explain_damage(path):
                shared = json.loads(path.read_bytes())
                self._check_origin(path, shared["origin"], 0)
                shared = shared["state"]
            found = {tensor["name"]: OutputTensor(tensor["name"], logical_shape(tensor["sharding"]), "F32",
                                                  partial(self._load_weight, tensor), tensor["name"])
                     for tensor in tensors if tensor["kind"] == "weight"
                     and (tensor["name"] in trained or not exclude_frozen)}
            for name, value in shared.get("buffers", {}).items():
                stored = self._stored[value["$tensor"]]
                dtype = "F32" if "F" in stored.dtype else stored.dtype
                found[name] = OutputTensor(name, stored.shape, dtype, stored.load, name)
            tied = [found[saved]._replace(name=name) for name, saved in shared.get("tied", {}).items()
                    if saved in found]
            return sorted([*found.values(), *tied], key=lambda entry: (entry.saved_as, entry.name))

    def _verify_rank(self, rank: int) -> None:
        """Check origin, size and checksum of each file of a rank; if it holds tensors, add them."""
        list_path = self.folder / f"rank{rank}.json"
        part = read_sealed(list_path)
        self._check_origin(list_path, part["origin"], rank)
        require(rank or "shared.json" in part["files"], list_path, "does not list shared.json")
        for name, entry in part["files"].items():
            path, size, crc = self.folder / Path(name).name, 0, 0
            with explain_damage(path), open(path, "rb") as file:
                while data := file.read(BLOCK):
                    size, crc = size + len(data), crc32(data, crc)
            require((size, f"{crc:08x}") == (entry["size"], entry["crc32"]), path, f"damaged: expected {entry['size']} "
                    f"bytes of crc32 {entry['crc32']}, found {size} of {crc:08x}")
            if path.suffix == ".safetensors":
                origin, stored = read_header(path)
                self._check_origin(path, origin, rank)
                self._stored |= stored
                for key, where in stored.items():
                    if key.startswith("weight/"):
                        weight, tp_rank, offset = key.removeprefix("weight/").rsplit("/", 2)
                        self._pieces[weight].append((int(tp_rank), int(offset), where))

    def _check_origin(self, path: Path, stated: dict[str, Any], rank: int) -> None:
        """Raise if a file is of another checkpoint."""
        for name in ("save_id", "rank", "run_id", "tag", "iteration"):
            expected, found = str(rank if name == "rank" else self.manifest[name]), str(stated.get(name))
            require(found == expected, path, f"is of another checkpoint: {name} expected {expected}, found {found:.80}")

    def _load_weight(self, tensor: dict[str, Any]) -> Any:
        """The whole tensor as fp32, put together from its pieces a block at a time."""
        name, sharding = tensor["name"], tensor["sharding"]
        with explain_damage(self.folder):
            shape, dim, stride, tp = (sharding[key] for key in ("local_shape", "dim", "stride", "tp_size"))
            # For each index before `dim` and each of its `stride` parts, every rank holds one equal block.
            blocks = prod(shape[:dim or 0]) * stride
            out, end = np.empty((blocks, tp, prod(shape) // max(blocks, 1)), "<f4"), (0, 0)
            for tp_rank, offset, stored in sorted(self._pieces[name]):
                local, count = out[:, tp_rank], prod(stored.shape)
                require((tp_rank, offset) == end and offset + count <= local.size, stored.path,
                        f"a piece of {name!r:.80} is not where the one before it ends")
                for start in range(0, count, BLOCK):
                    data = stored.read(start, min(BLOCK, count - start))
                    local.flat[offset + start:offset + start + len(data)] = data
                end = divmod(tp_rank * local.size + offset + count, local.size)
            require(end == (tp, 0) or out.size == 0, self.folder, f"weight {name!r:.80} is not complete")
            padded = shape if dim is None else [*shape[:dim], shape[dim] * tp, *shape[dim + 1:]]
            return out.reshape(padded)[tuple(map(slice, logical_shape(sharding)))]


def logical_shape(sharding: dict[str, Any]) -> tuple[int, ...]:
    """The shape without tensor parallelism and padding."""
    shape, dim = list(sharding["local_shape"]), sharding["dim"]
    if dim is not None:
        shape[dim] = shape[dim] * sharding["tp_size"] if sharding["size"] is None else sharding["size"]
    return tuple(shape)


def read_sealed(path: Path) -> dict[str, Any]:
    """A JSON file that ends with the checksum of what is before."""
    with explain_damage(path):
        data = path.read_bytes()
        text, mark, end = data.rpartition(b',"crc32":"')
        is_sealed = mark and end == b'%08x"}\n' % crc32(text)
        require(is_sealed, path, f"damaged: its {len(data)} bytes do not match its checksum")
        record: dict[str, Any] = json.loads(text + b"}")
        return record


def read_header(path: Path) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """(metadata, tensors by key) of a safetensors file, whose tensors must follow one another to its end."""
    with explain_damage(path), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        metadata, tensors, end = header.pop("__metadata__", {}), {}, 0
        for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
            nbytes = prod(entry["shape"]) * np.dtype(DTYPES[entry["dtype"]]).itemsize
            require(entry["data_offsets"] == [end, end + nbytes], path, f"{key!r:.80} is not where its header says")
            tensors[key] = StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + end)
            end += nbytes
        require(8 + length + end == path.stat().st_size, path, "holds more or less than its header says")
        return metadata, tensors


def open_tag(root: Path, tag: str | None = None) -> TagReader:
    """The checkpoint `tag`, or the one that `latest` names; `root` may also be one tag's own folder."""
    if tag is None and (root / "manifest.json").exists():
        return TagReader(root)
    with explain_damage(root):
        tags = sorted({path.parent.name.removeprefix(".aside-") for path in root.glob("*/manifest.json")})
        chosen = tag or latest_tag(root)
        require(bool(tags), root, "holds no checkpoint" if root.is_dir() else "there is no such folder")
        require(chosen in tags, root, ("has no usable `latest`" if chosen is None else f"holds no tag {chosen!r:.80}")
                + f"; it holds {', '.join(tags)}")
        folder = root / str(chosen)
        if not folder.exists():  # a kill while it was replaced
            folder = root / f".aside-{chosen}"
        check_link_inside(folder, root)
        reader = TagReader(folder)
        require(reader.manifest["tag"] == chosen, folder, f"its manifest is of tag {reader.manifest['tag']!r:.80}")
        return reader


def check_link_inside(path: Path, root: Path) -> None:
    """Refuse a link that leads out of the root."""
    require(path.resolve().is_relative_to(root.resolve()), path,
            f"is a link to {path.resolve()}, outside {root}, and is not followed")


def latest_tag(root: Path) -> str | None:
    """The tag that `latest` names, or was about to name when the save was interrupted after its commit."""
    check_link_inside(root / "latest", root)
    latest = (root / "latest").read_text("utf-8", "replace").strip() if (root / "latest").is_file() else None
    with suppress(OSError, LookupError, TypeError, ValueError):
        pending = json.loads((root / ".latest-pending").read_bytes())
        manifest = (root / pending["tag"] / "manifest.json").read_bytes()
        if pending["was"] == latest and manifest.endswith(b'%s"}\n' % pending["seal"].encode()):
            return str(pending["tag"])
    return latest


def write_output(entries: list[OutputTensor], output: Path, max_shard_size: int) -> list[Path]:
    """Write the tensors into one file, safetensors or torch's by its suffix, or into several with an index; returns the
    files."""
    shards: list[list[OutputTensor]] = [[]]
    for entry in entries:
        is_tied = bool(shards[-1]) and shards[-1][-1].saved_as == entry.saved_as
        if shards[-1] and not is_tied and sum(other.nbytes for other in shards[-1]) + entry.nbytes > max_shard_size:
            shards.append([])
        shards[-1].append(entry)
    files, index = [output], output.with_name(f"{output.name}.index.json")
    if len(shards) > 1:
        files = [output.with_name(f"{output.stem}-{number:05d}-of-{len(shards):05d}{output.suffix}")
                 for number in range(1, len(shards) + 1)]
    for path, shard in zip(files, shards):
        replace_file(path, partial(write_safetensors if path.suffix == ".safetensors" else write_bin, shard))
    if len(shards) == 1:
        index.unlink(missing_ok=True)  # of an earlier output: it would name other files
        return files
    content = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)},
               "weight_map": {entry.name: path.name for path, shard in zip(files, shards) for entry in shard}}
    replace_file(index, lambda file: file.write(json.dumps(content, indent=2).encode() + b"\n"))
    output.unlink(missing_ok=True)  # likewise: loaders would take it first
    return [*files, index]


def write_bin(entries: list[OutputTensor], file: Any) -> None:
    import torch

    loaded = {entry.name: torch.from_numpy(entry.load()) for entry in entries if entry.name == entry.saved_as}
    torch.save({entry.name: loaded[entry.saved_as] for entry in entries}, file)  # which writes each tensor once


def write_safetensors(entries: list[OutputTensor], file: Any) -> None:
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    entries = sorted(entries, key=lambda entry: -np.dtype(DTYPES[entry.dtype]).itemsize)  # each aligned to its width
    for entry in entries:
        offsets = [end, end := end + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for entry in entries:
        file.write(np.ascontiguousarray(entry.load()).reshape(-1).view(np.uint8).data)


def replace_file(path: Path, write: Callable[[Any], object]) -> None:
    """The file appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
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
        print(f"  {entry.name} {list(entry.shape)} {entry.dtype}")
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
