"""The manifest is strict: what it does not know, lacks or cannot be is an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.file_formats import checksum_ending
from megatron.checkpoint.manifest import (Ancestor, FileEntry, Manifest, PieceEntry, TensorEntry,
                                          check_safe_name, iteration_of_tag, parse_manifest, read_commit_number)
from megatron.checkpoint.reshard import DPSharding, TPSharding
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.made import format_2

CUT = TPSharding((4, 2), 0, 1, None, 2)


def piece(tp_rank: int, offset: int, count: int) -> PieceEntry:
    return PieceEntry(tp_rank, offset, count, "rank0.safetensors", f"weight/w/{tp_rank}/{offset}")


WHOLE = (piece(0, 0, 8), piece(1, 0, 3), piece(1, 3, 5))
MANIFEST = Manifest("run", "global_step7", 7, {"tp": 2, "dp": 3}, {"a": [1, None, "x"]},
                    (TensorEntry("weight", "w", "F32", CUT, DPSharding(3, 5)),), 1_800_000_000_000_000, "0d", 12,
                    (Ancestor("0c", 9, "global_step5"),), "0123", 100)
MANIFEST = replace(MANIFEST, save_id=f"0123-{MANIFEST.digest()}")
LISTED = replace(MANIFEST, format=2, branch="", commit=0, history=(), save_id="", nbytes=0,
                 files={"rank0.safetensors": FileEntry(100, "0123abcd")},
                 tensors=(TensorEntry("weight", "w", "F32", CUT, pieces=WHOLE),))
"""In format 2."""


def test_it_comes_back_as_it_went() -> None:
    assert parse_manifest(MANIFEST.to_bytes()) == MANIFEST
    assert parse_manifest(format_2(LISTED)) == LISTED


def test_a_manifest_of_format_1_is_read_and_has_no_time() -> None:
    assert parse_manifest(sealed(lambda m: m.update(format=1) or m.pop("saved_at"), LISTED)) == \
        replace(LISTED, saved_at=0, format=1)


def test_the_commit_number_is_found_without_parsing(tmp_path: Path) -> None:
    assert read_commit_number(tmp_path) == 0
    for data, commit in ((MANIFEST.to_bytes(), MANIFEST.commit), (format_2(LISTED), 0), (b"{}", 0)):
        (tmp_path / "manifest.json").write_bytes(data)
        assert read_commit_number(tmp_path) == commit


def test_its_length_does_not_depend_on_the_number_of_ranks() -> None:
    sizes = [len(replace(MANIFEST, layout={"tp": 2, "dp": dp}).to_bytes()) for dp in (3, 9, 5)]
    assert len(set(sizes)) == 1


def test_every_flipped_bit_is_found() -> None:
    data = MANIFEST.to_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            parse_manifest(bytes(flipped))


def test_every_truncation_is_found() -> None:
    data = MANIFEST.to_bytes()
    for size in range(len(data)):
        with pytest.raises(CheckpointError):
            parse_manifest(data[:size])


def sealed(change: Callable[[dict[str, Any]], object], manifest: Manifest = MANIFEST) -> bytes:
    """A manifest with a change and a good checksum."""
    value = json.loads(manifest.to_bytes() if manifest.has_rank_manifests else format_2(manifest))
    del value["crc32"]
    change(value)
    text = json.dumps(value).encode()[:-1]
    return text + checksum_ending(text)


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("'run_id' is missing", lambda m: m.pop("run_id")),
    ("unknown field 'extra'", lambda m: m.update(extra=1)),
    ("'iteration' must be int, found 'x'", lambda m: m.update(iteration="x")),
    ("'iteration' must be int, found True", lambda m: m.update(iteration=True)),
    ("'iteration' must not be negative, found -1", lambda m: m.update(iteration=-1)),
    ("format 6, this program reads formats 1 to 5", lambda m: m.update(format=6)),
    ("format 0, this program reads formats 1 to 5", lambda m: m.update(format=0)),
    ("'saved_at' is missing", lambda m: m.pop("saved_at")),
    ("tag '/tmp' is not a plain name", lambda m: m.update(tag="/tmp")),
    ("weight 'w': sharding: unknown field 'x'", lambda m: m["tensors"][0]["sharding"].update(x=1)),
    ("weight 'w' is listed twice", lambda m: m["tensors"].append(m["tensors"][0])),
    ("no such cut", lambda m: m["tensors"][0]["sharding"].update(stride=3)),
]
IN_PARTS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("field 'save_id' is empty", lambda m: m.update(save_id="")),
    ("unknown field 'files'", lambda m: m.update(files={})),
    ("weight 'w': field 'start' is missing", lambda m: m["tensors"][0].pop("start")),
    ("weight 'w': field 'each' must not be negative", lambda m: m["tensors"][0].update(each=-1)),
    ("8 elements from 8 on are not in 3 shards of 5", lambda m: m["tensors"][0].update(start=8)),
    ("8 elements from 3 on are not in 2 shards of 5", lambda m: m["layout"].update(dp=2)),
    ("cut over 2 tensor-parallel ranks of 4", lambda m: m["layout"].update(tp=4)),
    ("layout expected with sizes tp and dp", lambda m: m["layout"].update(tp="2")),
]
OF_LISTED: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("unknown field 'saved_at'", lambda m: m.update(format=1)),
    ("unknown field 'save_id'", lambda m: m.update(save_id="x")),
    ("files.rank0.safetensors.: field 'size' is missing", lambda m: m["files"]["rank0.safetensors"].pop("size")),
    ("file '../rank0' is not a plain name", lambda m: m["files"].update({"../rank0": {}})),
    ("weight 'w': pieces..: field 'key' is missing", lambda m: m["tensors"][0]["pieces"][0].pop("key")),
    ("is in 'rank9.json', which is not", lambda m: m["tensors"][0]["pieces"][0].update(file="rank9.json")),
    ("there is nothing at element 3 of 8 of tensor-parallel rank 1 of 2", lambda m: m["tensors"][0]["pieces"].pop()),
    ("expected a piece at element 0 of 8 of tensor-parallel rank 1 of 2", lambda m: m["tensors"][0]["pieces"].pop(1)),
    ("expected a piece at element 0 of 8 of tensor-parallel rank 0 of 2", lambda m: m["tensors"][0]["pieces"].pop(0)),
    ("expected a piece at element 3", lambda m: m["tensors"][0]["pieces"][2].update(count=6)),
    ("there is nothing at element 0 of 8 of tensor-parallel rank 2",
     lambda m: m["tensors"][0]["sharding"].update(tp_size=10**14)),
]
ALL = [*((message, change, manifest) for message, change in CHANGES for manifest in (MANIFEST, LISTED)),
       *((message, change, MANIFEST) for message, change in IN_PARTS),
       *((message, change, LISTED) for message, change in OF_LISTED)]


@pytest.mark.parametrize(("message", "change", "manifest"), ALL,
                         ids=[f"{message}-{'parts' if m.has_rank_manifests else 'listed'}" for message, _, m in ALL])
def test_a_wrong_field_is_named(message: str, change: Callable[[dict[str, Any]], object], manifest: Manifest) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_manifest(sealed(change, manifest))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"[" * 100_000, b"\x80\x04\x95", b'{"a":1,"a":2}'], ids=repr)
def test_anything_else_is_an_error_too(data: bytes) -> None:
    for text in (data, data + checksum_ending(data)):
        with pytest.raises(CheckpointError):
            parse_manifest(text)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "$(touch x)",
                                  "a\0b", "x" * 201, "latest", "manifest.json", "global_stepé"])
def test_names_that_are_more_than_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a plain name"):
        check_safe_name(name, "tag")


def test_the_step_of_a_tag() -> None:
    assert [iteration_of_tag(tag) for tag in ("global_step10", "global_step007", "global_step", "best", "global_step1x",
                                              "global_step" + "9" * 5000)] == [10, 7, None, None, None, None]
