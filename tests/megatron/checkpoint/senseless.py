"""Checkpoints whose files are whole and mean nothing: any value of any record replaced, and all checksums, origins and
digests made to fit."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import MANIFEST
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.made import rejoin, reseal, rewrite, set_header

Where = tuple[str | int, ...]

WORDS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 10**30, -10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "x", "F32", "U8", "global_step1", "../../x", "\u0000", "é" * 300, [], {}, [[]], [0], [1, 2, 3], [None], {"": {}},
    {"$tensor": "x"}, {"$tuple": 1}, {"$set": [[]]}, {"$bytes": "*"}, {"$array": ["<f4", [10**12], ""]},
    {"$numpy": ["O", ""]},
    {"$dict": [[{}, 1]]}, {"$default": ["eval", []]}, {"$unknown": 1}, {"$parameter": [1, 2]}, {"$size": ["x"]},
    {"$path": 3}, {"$namespace": [1]}, {"$counter": 5}, {"$torch_version": [1]})


def places(value: Any, where: Where = ()) -> Iterator[Where]:
    """Of every value inside."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*where, key)
        yield from places(child, (*where, key))


def mutate(value: Any, random_: random.Random) -> str:
    """Change something in a record; what it was."""
    found = list(places(value))
    where = random_.choice(found)
    parent = value
    for step in where[:-1]:
        parent = parent[step]
    how = random_.randrange(8)
    if how == 0:
        del parent[where[-1]]
        return f"{where} deleted"
    if how == 1 and isinstance(parent, dict):
        parent[f"{where[-1]}x"] = parent.pop(where[-1])
        return f"{where} renamed"
    if how == 2 and isinstance(parent, list):
        parent.append(parent[where[-1]])
        return f"{where} repeated"
    if how == 3 and len(found) > 1:
        other = value
        for step in random_.choice(found):
            other = other[step]
        parent[where[-1]] = json.loads(json.dumps(other))
        return f"{where} copied from elsewhere"
    if how == 4 and isinstance(parent[where[-1]], int):
        parent[where[-1]] += random_.choice([-1, 1, 8, 2**40])
        return f"{where} is {parent[where[-1]]}"
    parent[where[-1]] = random_.choice(WORDS)
    return f"{where} is {parent[where[-1]]!r:.60}"


def make_senseless(folder: Path, random_: random.Random) -> str:
    """Change one file of a tag; what was done."""
    path = random_.choice(sorted(folder.iterdir()))
    said = ""

    def change(value: Any) -> Any:
        nonlocal said
        if random_.randrange(40) == 0:
            said = "all of it"
            return random_.choice([word for word in WORDS if word is not None])
        said = mutate(value, random_)
        return None

    if path.suffix == ".safetensors":
        set_header(path, change)
    else:
        rewrite(path, change)
    try:
        (rejoin if path.name == MANIFEST else reseal)(folder)
    except (AttributeError, CheckpointError, KeyError, OSError, TypeError, ValueError):
        pass  # it makes too little sense for that: it is as it is
    return f"{path.name}: {said}"


def copies(tag: Path, root: Path, seeds: range) -> Iterator[tuple[int, str]]:
    """One after the other at `root`/<name of the tag>, what was done to each."""
    for seed in seeds:
        shutil.copytree(tag, root / tag.name)
        yield seed, make_senseless(root / tag.name, random.Random(seed))
        shutil.rmtree(root / tag.name)
