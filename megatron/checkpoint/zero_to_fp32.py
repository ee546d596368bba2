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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np

DTYPES = {name: np.dtype(code) for name, code in {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U8": "|u1", "BOOL": "|b1"}.items()}
FORMAT = 5
BLOCK = 1 << 18  # bytes or elements read at a time


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
        raise DamagedCheckpoint(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: not a checkpoint of this format ({type(error).__name__}: {error})") from error


def require(is_good: object, path: Path, problem: str) -> None:
    if not is_good:
        raise DamagedCheckpoint(f"{path}: {problem}; choose another tag with -t")


def open_tag(root: Path, tag: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Folder and manifest of `tag`, or of the one that `latest` names; `root` may also be one tag's own folder."""
    with explain_damage(root):
        folder, chosen = root, tag
        if tag is not None or not (root / "manifest.json").exists():
            tags = sorted({path.parent.name.removeprefix(".aside-") for path in root.glob("*/manifest.json")})
            chosen = tag or latest_tag(root)
            require(tags, root, "holds no checkpoint" if root.is_dir() else "there is no such folder")
            problem = "has no usable `latest`" if chosen is None else f"holds no tag {chosen!r:.80}"
            require(chosen in tags, root, f"{problem}; it holds {', '.join(tags)}")
            folder = root / str(chosen)
            if not folder.exists():  # a kill while it was replaced
                folder = root / f".aside-{chosen}"
            check_link_inside(folder, root)
        path = folder / "manifest.json"
        manifest = read_sealed(path)
        require(manifest["format"] == FORMAT, path,
                f"format {manifest['format']!r:.20}, this script reads format {FORMAT}")
        content = {name: manifest[name] for name in ("run_id", "tag", "iteration", "layout", "config", "tensors")}
        digest = sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()[:32]
        require(manifest["save_id"].partition("-")[2] == digest, path, "is of another checkpoint, or was changed")
        require(chosen in (None, manifest["tag"]), folder, f"its manifest is of tag {manifest['tag']!r:.80}")
        return folder, manifest


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


def check_link_inside(path: Path, root: Path) -> None:
    require(path.resolve().is_relative_to(root.resolve()), path,
            f"is a link to {path.resolve()}, outside {root}, and is not followed")


def read_sealed(path: Path) -> dict[str, Any]:
    """A JSON file that ends with the checksum of what is before."""
    data = path.read_bytes()
    text, _, end = data.rpartition(b',"crc32":"')
    require(end == b'%08x"}\n' % crc32(text), path, f"damaged: its {len(data)} bytes do not match its checksum")
    record: dict[str, Any] = json.loads(text + b"}")
    return record


class OutputTensor(NamedTuple):
    """One tensor of the output, or stored in a file: its size is known now, its data is loaded when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[..., Any]
    saved_as: str  # its name in the checkpoint; a tied tensor has several in the output

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def output_tensors(folder: Path, manifest: dict[str, Any], exclude_frozen: bool = False) -> list[OutputTensor]:
    """The weights and the model's buffers, by name, after checking every byte of the tag."""
    with explain_damage(folder):
        tensors, layout = manifest["tensors"], manifest["layout"]
        trained = {tensor["name"] for tensor in tensors if tensor["kind"] != "weight"}
        if any(tensor["kind"] == "int8" for tensor in tensors):
            raise InvalidArguments(f"{folder} holds int8 weights; give the checkpoint they were made from")
        if exclude_frozen and not trained:
            raise InvalidArguments(f"--exclude_frozen_parameters: {folder.name} holds no optimizer state, "
                                   "which would show what is frozen; leave the flag out")
        stored = dict[str, OutputTensor]()
        for rank in range(layout["tp"] * layout["dp"]):
            stored |= verify_rank(folder, manifest, rank)
        # weight/NAME/TP_RANK/OFFSET: consecutive elements of the flattened tensor that a tensor parallel rank holds
        pieces: dict[str, list[tuple[int, int, OutputTensor]]] = {}
        for key in stored:
            if key.startswith("weight/"):
                name, tp_rank, offset = key.removeprefix("weight/").rsplit("/", 2)
                pieces.setdefault(name, []).append((int(tp_rank), int(offset), stored[key]))
        found = {}
        for tensor in tensors:
            name, cut = tensor["name"], tensor["sharding"]
            if tensor["kind"] == "weight" and (name in trained or not exclude_frozen):
                shape, dim = cut["local_shape"].copy(), cut["dim"]
                if dim is not None:  # without tensor parallelism and padding
                    shape[dim] = shape[dim] * cut["tp_size"] if cut["size"] is None else cut["size"]
                load = partial(join_pieces, folder / name, cut, tuple(shape), sorted(pieces.get(name, ())))
                found[name] = OutputTensor(name, tuple(shape), "F32", load, name)
        shared = json.loads((folder / "shared.json").read_bytes())["state"]
        for name, value in shared.get("buffers", {}).items():
            buffer = stored[value["$tensor"]]
            dtype = "F32" if "F" in buffer.dtype else buffer.dtype
            found[name] = buffer._replace(name=name, dtype=dtype, saved_as=name)
        tied = [found[saved]._replace(name=name) for name, saved in shared.get("tied", {}).items() if saved in found]
        return sorted([*found.values(), *tied], key=lambda entry: (entry.saved_as, entry.name))


def verify_rank(folder: Path, manifest: dict[str, Any], rank: int) -> dict[str, OutputTensor]:
    """Check origin, size and checksum of each file that `rank<k>.json` lists; returns the tensors in them, by key."""
    def check_origin(path: Path, stated: dict[str, Any]) -> None:
        for name, right in {**manifest, "rank": rank}.items():
            if name in ("save_id", "rank", "run_id", "tag", "iteration"):
                found = str(stated.get(name))
                require(found == str(right), path, f"is of another checkpoint: {name} expected {right}, "
                        f"found {found:.80}")

    stored, list_path = dict[str, OutputTensor](), folder / f"rank{rank}.json"
    part = read_sealed(list_path)
    check_origin(list_path, part["origin"])
    require(rank or "shared.json" in part["files"], list_path, "does not list shared.json")
    for name, entry in part["files"].items():
        path, size, crc = folder / Path(name).name, 0, 0
        with explain_damage(path), open(path, "rb") as file:
            while data := file.read(BLOCK):
                size, crc = size + len(data), crc32(data, crc)
            require((size, f"{crc:08x}") == (entry["size"], entry["crc32"]), path, f"damaged: expected {entry['size']} "
                    f"bytes of crc32 {entry['crc32']}, found {size} of {crc:08x}")
            file.seek(0)
            if name == "shared.json":
                check_origin(path, json.load(file)["origin"])
            elif path.suffix == ".safetensors":
                begin = 8 + int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(begin - 8))
                check_origin(path, header.pop("__metadata__", {}))
                for key, at in header.items():
                    first, end = at["data_offsets"]
                    nbytes = prod(at["shape"]) * DTYPES[at["dtype"]].itemsize
                    require(0 <= first == end - nbytes <= size - begin - nbytes, path,
                            f"{key!r:.80} is not where its header says")
                    require(key not in stored, path, f"{key!r:.80} is in another file of the rank too")
                    load = partial(read_tensor, path, at["dtype"], tuple(at["shape"]), begin + first)
                    stored[key] = OutputTensor(key, tuple(at["shape"]), at["dtype"], load, key)
    return stored


def read_tensor(path: Path, dtype: str, shape: tuple[int, ...], offset: int, start: int = 0,
                count: int | None = None) -> Any:
    """`count` elements from `start` on of the flattened tensor, or all in its shape; floating point as fp32."""
    with explain_damage(path):
        offset += start * DTYPES[dtype].itemsize
        data = np.fromfile(path, DTYPES[dtype], prod(shape) if count is None else count, offset=offset)
        if dtype == "BF16":  # the upper half of an fp32
            data = (data.astype("<u4") << 16).view("<f4")
        return (data.astype("<f4") if "F" in dtype else data).reshape(shape if count is None else count)


def join_pieces(path: Path, cut: dict[str, Any], shape: tuple[int, ...],
                pieces: list[tuple[int, int, OutputTensor]]) -> Any:
    """A whole weight as fp32, put together from its pieces (tensor parallel rank, offset, data), a block at a time."""
    with explain_damage(path):
        local_shape, dim, stride, tp = (cut[key] for key in ("local_shape", "dim", "stride", "tp_size"))
        # For each index before `dim` and each of its `stride` parts, every rank holds one equal block.
        blocks = prod(local_shape[:dim or 0]) * stride
        out, end = np.empty((blocks, tp, prod(local_shape) // max(blocks, 1)), "<f4"), (0, 0)
        for tp_rank, offset, stored in pieces:
            local, count = out[:, tp_rank], prod(stored.shape)
            require((tp_rank, offset) == end and offset + count <= local.size, path,
                    "one of its pieces is not where the one before it ends")
            for start in range(0, count, BLOCK):
                data = stored.load(start, min(BLOCK, count - start))
                local.flat[offset + start:offset + start + len(data)] = data
            end = divmod(tp_rank * local.size + offset + count, local.size)
        require(end == (tp, 0) or out.size == 0, path, "is not complete")
        padded = local_shape if dim is None else [*local_shape[:dim], local_shape[dim] * tp, *local_shape[dim + 1:]]
        return out.reshape(padded)[tuple(map(slice, shape))]


def output_path(output: Path, safe: bool) -> Path:
    """The file to write: a folder gets the name that Hugging Face looks for in it."""
    if output.is_dir() or not output.suffix:
        output.mkdir(parents=True, exist_ok=True)
        return output / ("model.safetensors" if safe else "pytorch_model.bin")
    return output.with_suffix(".safetensors") if safe else output


def write_output(entries: list[OutputTensor], output: Path, max_shard_size: int) -> list[Path]:
    """Write the tensors into one file, or into several with an index; returns the files."""
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
        write_tensors(shard, path)
    # The file of an earlier output would be loaded in place of this one, or name other files.
    if len(shards) == 1:
        index.unlink(missing_ok=True)
        return files
    with staged_file(index) as file:
        weight_map = {entry.name: path.name for path, shard in zip(files, shards) for entry in shard}
        total = sum(entry.nbytes for entry in entries)
        file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n")
    output.unlink(missing_ok=True)
    return [*files, index]


def write_tensors(entries: list[OutputTensor], path: Path) -> None:
    """Write one file: safetensors by its suffix, a tensor in memory at a time, or torch's."""
    with staged_file(path) as file:
        if path.suffix != ".safetensors":
            import torch
            loaded = {entry.name: torch.from_numpy(entry.load()) for entry in entries if entry.name == entry.saved_as}
            torch.save({entry.name: loaded[entry.saved_as] for entry in entries}, file)  # writes each tensor once
            return
        header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
        entries = sorted(entries, key=lambda entry: -DTYPES[entry.dtype].itemsize)  # each aligned to its width
        for entry in entries:
            offsets = [end, end := end + entry.nbytes]
            header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            file.write(np.ascontiguousarray(entry.load()).reshape(-1).view(np.uint8).data)


@contextmanager
def staged_file(path: Path) -> Iterator[Any]:
    """The file appears complete or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def parse_byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(I?)B)?", text.strip().upper())
    size = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
    if size < 1:
        raise InvalidArguments(f"--max_shard_size {text}: expected a size such as 5GB or 500MiB")
    return size


class Fp32ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidArguments(f"{message}; see --help")


def main(arguments: list[str]) -> int:
    parser = Fp32ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint_dir", type=Path, help="folder of the tags, or of one")
    parser.add_argument("output", type=Path, help="file, or folder")
    parser.add_argument("-t", "--tag", help="the checkpoint to use (default: what `latest` names)")
    parser.add_argument("--max_shard_size", default="5GB", help="of one file (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="only what was trained")
    parser.add_argument("-d", "--debug", action="store_true", help="name every tensor; traceback at an error")
    try:
        options = parser.parse_args(arguments)
        limit = parse_byte_count(options.max_shard_size)
        if options.output.name in ("latest", "zero_to_fp32.py") or any(
                (folder / "manifest.json").exists() for folder in (options.output / "_").resolve().parents):
            raise InvalidArguments(f"{options.output}: is a place of a checkpoint's own files; choose another")
        folder, manifest = open_tag(options.checkpoint_dir, options.tag)
        layout = manifest["layout"]
        tp, dp = layout.get("tp", 1), layout.get("dp", 1)
        print(f"{folder}: iteration {manifest['iteration']}, ZeRO stage {layout.get('zero_stage', 'unknown')}, "
              f"world size {tp * dp} (tp {tp}, dp {dp})", flush=True)
        entries = output_tensors(folder, manifest, options.exclude_frozen_parameters)
        for entry in entries if options.debug else ():
            print(f"  {entry.name} {list(entry.shape)} {entry.dtype}")
        for path in write_output(entries, output_path(options.output, options.safe_serialization), limit):
            print(f"wrote {path} ({path.stat().st_size} bytes)", flush=True)
        print(f"{len(entries)} tensors, {sum(prod(entry.shape) for entry in entries)} elements in fp32")
        return 0
    except (InvalidArguments, DamagedCheckpoint, OSError) as error:
        if {"-d", "--debug"} & set(arguments):
            raise
        print(f"error: {error}", file=sys.stderr)
        return {InvalidArguments: 2, DamagedCheckpoint: 4}.get(type(error), 7)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
