"""The manifest is strict: what it does not know, lacks or cannot be is an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.cut import Sharding
from megatron.checkpoint.manifest import (
    FileEntry, Manifest, PieceEntry, TensorEntry, _seal, from_bytes, gather_tensors, safe_name, saved_at_of,
    step_of)
from megatron.errors import CheckpointError


def tensor(*pieces: PieceEntry, name: str = "w", dim: int | None = 0) -> TensorEntry:
    return TensorEntry("weight", name, "F32", Sharding((4, 2), dim, 1, None, 1 if dim is None else 2), pieces)


def piece(tp_rank: int, offset: int, count: int) -> PieceEntry:
    return PieceEntry(tp_rank, offset, count, "rank0.safetensors", f"weight/w/{tp_rank}/{offset}")


WHOLE = (piece(0, 0, 8), piece(1, 0, 3), piece(1, 3, 5))
MANIFEST = Manifest("run", "global_step7", 7, {"tp": 2, "dp": 1}, {"a": [1, None, "x"]},
                    {"rank0.safetensors": FileEntry(100, "0123abcd")}, (tensor(*WHOLE),), 1_800_000_000_000_000)


def test_it_comes_back_as_it_went() -> None:
    assert from_bytes(MANIFEST.to_bytes()) == MANIFEST


def test_a_manifest_of_format_1_is_read_and_has_no_time() -> None:
    assert from_bytes(sealed(lambda m: m.update(format=1) or m.pop("saved_at"))) == replace(MANIFEST, saved_at=0)


def test_the_time_of_a_commit_is_found_at_the_end_of_the_file(tmp_path: Path) -> None:
    assert saved_at_of(tmp_path) == 0
    for data, time in ((MANIFEST.to_bytes(), MANIFEST.saved_at), (b"{}", 0),
                       (sealed(lambda m: m.update(format=1) or m.pop("saved_at")), 0)):
        (tmp_path / "manifest.json").write_bytes(data)
        assert saved_at_of(tmp_path) == time


def test_every_flipped_bit_is_found() -> None:
    data = MANIFEST.to_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            from_bytes(bytes(flipped))


def test_every_truncation_is_found() -> None:
    data = MANIFEST.to_bytes()
    for size in range(len(data)):
        with pytest.raises(CheckpointError):
            from_bytes(data[:size])


def sealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest with a change and a good checksum."""
    value = json.loads(MANIFEST.to_bytes())
    del value["crc32"]
    change(value)
    text = json.dumps(value).encode()[:-1]
    return text + _seal(text)


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("'run_id' is missing", lambda m: m.pop("run_id")),
    ("unknown field 'extra'", lambda m: m.update(extra=1)),
    ("'iteration' must be int, found 'x'", lambda m: m.update(iteration="x")),
    ("'iteration' must be int, found True", lambda m: m.update(iteration=True)),
    ("'iteration' must not be negative, found -1", lambda m: m.update(iteration=-1)),
    ("format 3, this program reads formats 1 and 2", lambda m: m.update(format=3)),
    ("'saved_at' is missing", lambda m: m.pop("saved_at")),
    ("unknown field 'saved_at'", lambda m: m.update(format=1)),
    ("files.rank0.safetensors.: field 'size' is missing", lambda m: m["files"]["rank0.safetensors"].pop("size")),
    ("file '../rank0' is not a plain name", lambda m: m["files"].update({"../rank0": {}})),
    ("tag '/tmp' is not a plain name", lambda m: m.update(tag="/tmp")),
    ("weight 'w': pieces..: field 'key' is missing", lambda m: m["tensors"][0]["pieces"][0].pop("key")),
    ("weight 'w': sharding: unknown field 'x'", lambda m: m["tensors"][0]["sharding"].update(x=1)),
    ("is in 'rank9.json', which is not", lambda m: m["tensors"][0]["pieces"][0].update(file="rank9.json")),
    ("weight 'w' is listed twice", lambda m: m["tensors"].append(m["tensors"][0])),
    ("there is nothing at element 3 of 8 of tensor-parallel rank 1 of 2", lambda m: m["tensors"][0]["pieces"].pop()),
    ("expected a piece at element 0 of 8 of tensor-parallel rank 1 of 2", lambda m: m["tensors"][0]["pieces"].pop(1)),
    ("expected a piece at element 0 of 8 of tensor-parallel rank 0 of 2", lambda m: m["tensors"][0]["pieces"].pop(0)),
    ("expected a piece at element 3", lambda m: m["tensors"][0]["pieces"][2].update(count=6)),
    ("no such cut", lambda m: m["tensors"][0]["sharding"].update(stride=3)),
    ("there is nothing at element 0 of 8 of tensor-parallel rank 2",
     lambda m: m["tensors"][0]["sharding"].update(tp_size=10**18)),
]


@pytest.mark.parametrize(("message", "change"), CHANGES, ids=[message for message, _ in CHANGES])
def test_a_wrong_field_is_named(message: str, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_bytes(sealed(change))


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"[" * 100_000, b"\x80\x04\x95", b'{"a":1,"a":2}'], ids=repr)
def test_anything_else_is_an_error_too(data: bytes) -> None:
    for text in (data, data + _seal(data)):
        with pytest.raises(CheckpointError):
            from_bytes(text)


def test_ranks_must_agree_on_a_tensor() -> None:
    gathered = gather_tensors([tensor(WHOLE[2], WHOLE[0]), tensor(WHOLE[1])])
    assert gathered == (tensor(*WHOLE),)
    with pytest.raises(CheckpointError, match="weight 'w': ranks disagree"):
        gather_tensors([tensor(WHOLE[0]), tensor(WHOLE[1], dim=None)])


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "$(touch x)",
                                  "a\0b", "x" * 201, "latest", "manifest.json", "global_stepé"])
def test_names_that_are_more_than_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a plain name"):
        safe_name(name, "tag")


def test_the_step_of_a_tag() -> None:
    assert [step_of(tag) for tag in ("global_step10", "global_step007", "global_step", "best", "global_step1x",
                                     "global_step" + "9" * 5000)] == [10, 7, None, None, None, None]
