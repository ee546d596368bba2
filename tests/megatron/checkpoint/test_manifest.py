"""The manifest is strict: what it does not know, lacks or cannot be is an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.file_formats import checksum_ending
from megatron.checkpoint.manifest import (Ancestor, Manifest, TensorEntry,
                                          check_safe_name, iteration_of_tag, parse_manifest, read_manifest_end)
from megatron.checkpoint.reshard import DPSharding, TPSharding
from megatron.errors import CheckpointError

CUT = TPSharding((4, 2), 0, 1, None, 2)


MANIFEST = Manifest("global_step7", 7, "run", "0d", 12, (Ancestor("0c", 9, "global_step5"),),
                    layout={"tp": 2, "dp": 3}, config={"a": [1, None, "x"]},
                    tensors=(TensorEntry("weight", "w", "F32", CUT, DPSharding(3, 5)),),
                    saved_at=1_800_000_000_000_000, nbytes=100)
MANIFEST = replace(MANIFEST, save_id=f"0123-{MANIFEST.digest()}")


def test_it_comes_back_as_it_went() -> None:
    assert parse_manifest(MANIFEST.to_bytes()) == MANIFEST


def test_the_commit_number_is_found_without_parsing(tmp_path: Path) -> None:
    assert read_manifest_end(tmp_path) == (0, None)
    for data, commit in ((MANIFEST.to_bytes(), MANIFEST.commit), (b"{}", 0)):
        (tmp_path / "manifest.json").write_bytes(data)
        assert read_manifest_end(tmp_path)[0] == commit


def test_its_length_does_not_depend_on_the_number_of_ranks() -> None:
    sizes = [len(replace(MANIFEST, layout={"tp": 2, "dp": dp}).to_bytes()) for dp in (3, 9, 5)]
    assert len(set(sizes)) == 1


def test_every_flipped_bit_and_every_truncation_is_found() -> None:
    data = MANIFEST.to_bytes()
    damaged = [data[:size] for size in range(len(data))]
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for found in damaged:
        with pytest.raises(CheckpointError):
            parse_manifest(found)


def sealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The manifest with a change and a good checksum."""
    value = json.loads(MANIFEST.to_bytes())
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
    ("format 6, this program reads format 5; load it with the version", lambda m: m.update(format=6)),
    ("format 4, this program reads format 5", lambda m: m.update(format=4)),
    ("'saved_at' is missing", lambda m: m.pop("saved_at")),
    ("tag '/tmp' is not a plain name", lambda m: m.update(tag="/tmp")),
    ("weight 'w': sharding: unknown field 'x'", lambda m: m["tensors"][0]["sharding"].update(x=1)),
    ("weight 'w' is listed twice", lambda m: m["tensors"].append(m["tensors"][0])),
    ("no such cut", lambda m: m["tensors"][0]["sharding"].update(stride=3)),
    ("its save_id '' was given for other content", lambda m: m.update(save_id="")),
    ("unknown field 'files'", lambda m: m.update(files={})),
    ("weight 'w': field 'start' is missing", lambda m: m["tensors"][0].pop("start")),
    ("weight 'w': field 'each' must not be negative", lambda m: m["tensors"][0].update(each=-1)),
    ("8 elements from 8 on are not in 3 shards of 5", lambda m: m["tensors"][0].update(start=8)),
    ("8 elements from 3 on are not in 2 shards of 5", lambda m: m["layout"].update(dp=2)),
    ("cut over 2 tensor-parallel ranks of 4", lambda m: m["layout"].update(tp=4)),
    ("layout expected with sizes tp and dp", lambda m: m["layout"].update(tp="2")),
]


def test_a_wrong_field_is_named() -> None:
    for message, change in CHANGES:
        with pytest.raises(CheckpointError, match=message):
            parse_manifest(sealed(change))


def test_anything_else_is_an_error_too() -> None:
    for data in (b"", b"{}", b"[1]", b"[" * 100_000, b"\x80\x04\x95", b'{"a":1,"a":2}'):
        for text in (data, data + checksum_ending(data)):
            with pytest.raises(CheckpointError):
                parse_manifest(text)


def test_names_that_are_more_than_names_are_refused() -> None:
    for name in ("", ".", "..", ".hidden", "a/b", "../a", "/a", "a\\b", "a b", "a\n", "$(touch x)", "a\0b", "x" * 201,
                 "latest", "manifest.json", "global_stepé"):
        with pytest.raises(CheckpointError, match="not a plain name"):
            check_safe_name(name, "tag")
    assert check_safe_name("x" * 200, "tag") == "x" * 200


def test_the_step_of_a_tag() -> None:
    assert [iteration_of_tag(tag) for tag in ("global_step10", "global_step007", "global_step", "best", "global_step1x",
                                              "global_step" + "9" * 5000)] == [10, 7, None, None, None, None]
