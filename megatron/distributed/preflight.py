"""Before the ranks connect: check that all are there, were given the same settings and run the same code.

Each rank writes its WORLD_SIZE and a checksum of its settings to the rendezvous store. Settings themselves are read
only where checksums differ, of one rank per checksum. Rank 0 compares; every other rank waits for its one result.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.distributed.rank_text import describe_differences, format_ranks
from megatron.errors import EXIT_CONFIG, ConfigError, PeerError
from megatron.package import __version__

if TYPE_CHECKING:
    from torch.distributed import Store

COMPARED_PACKAGES = ("megatron", "mpu", "data")
MAX_VARIANTS = 16
"""Different settings that are read and shown."""
STARTED_DIFFERENTLY_MESSAGE = "the ranks were started differently"
REPORT_SLACK = timedelta(seconds=10)
"""Extra seconds for rank 0 to report which ranks are missing."""
WORLD_SIZE_SECONDS = 0.5
"""Seconds to collect more WORLD_SIZEs once two are known to differ."""
LINGER_SECONDS = 5.0
"""Seconds for every rank to read the error before the rank that hosts the store exits."""


def code_identity(torch_version: str) -> dict[str, str]:
    return {"version": __version__, "code": code_digest(), "torch": torch_version}


def code_digest() -> str:
    """Digest of all our modules, if they are installed side by side: a few hundred small files, read in milliseconds.
    """
    root, found = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in (path for package in COMPARED_PACKAGES for path in _modules(root / package)):
        try:
            found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); the ranks compare their code before they "
                              "begin") from error
    return found.hexdigest()[:12]


def _modules(package: Path) -> Iterator[Path]:
    """Importable modules only, not the files that users, editors and version control leave in a package folder."""
    for path in sorted(package.iterdir()):
        if path.suffix == ".py" and path.stem.isidentifier():
            yield path
        elif (path / "__init__.py").is_file():
            yield from _modules(path)


def check_ranks_match(store: Store, rank: int, ranks: int, settings: Mapping[str, Any], timeout: timedelta) -> None:
    """Raise the same ConfigError on every rank if ranks or `settings` differ; PeerError if a rank does not arrive in
    time. Every rank of the job calls it. Nothing is compared pairwise: rank 0 reads all digests and writes one result.
    """
    text, this_process = json.dumps(settings, sort_keys=True,
                                    default=str), f"process {os.getpid()} on {socket.gethostname()}"
    if store.add(_key("came", rank), 1) > 1:
        raise ConfigError(f"rank {rank} was given twice: to {store.get(_key('who', rank)).decode()}, which came first, "
                          f"and to {this_process}; each process needs a RANK of its own (docs/launch.md)")
    store.set(_key("who", rank), this_process)
    store.set(_key("facts", rank), text)
    store.set(_key("digest", rank), hashlib.sha256(text.encode()).hexdigest())
    size_error = _register_rank(store, rank, ranks)
    if rank == 0:
        found = _compare_ranks(store, ranks, timeout)
        store.set(_key("verdict"), json.dumps(found))
    else:
        found = _wait_for_result(store, timeout)
    store.add(_key("heard"), 1)
    if found is None and size_error is not None:
        found = {"error": size_error, "code": EXIT_CONFIG}  # the other ranks agreed and proceed without this one
    if found is None:
        return
    if rank == 0:
        _wait_until_all_have_read(store, ranks if found["code"] == EXIT_CONFIG else store.add(_key("count"), 0))
    raise (ConfigError if found["code"] == EXIT_CONFIG else PeerError)(found["error"])


def _register_rank(store: Store, rank: int, ranks: int) -> str | None:
    """Write this rank's WORLD_SIZE; returns an error text if it differs from that of the first rank to arrive."""
    store.set(_key("size", rank), str(ranks))
    size, first = map(int, store.compare_set(_key("size"), "", f"{ranks} {rank}").split())
    if size != ranks:
        store.set(_key("odd"), f"{max(ranks, size, rank + 1)}")
    if store.add(_key("count"), 1) == ranks or size != ranks:
        store.set(_key("all"), "")
    return None if size == ranks else mismatch_message([({"WORLD_SIZE": size}, [first]),
                                                        ({"WORLD_SIZE": ranks}, [rank])])


def _wait_for_result(store: Store, timeout: timedelta) -> Any:
    """Rank 0's result; PeerError if rank 0 does not write one."""
    until = time.monotonic() + timeout.total_seconds()
    try:
        store.wait([_key("verdict")], timeout + REPORT_SLACK)
        return json.loads(store.get(_key("verdict")))
    except RuntimeError as error:
        when = f"within {timeout.total_seconds():g} s" if time.monotonic() >= until else "before it left"
        raise PeerError(f"rank 0 did not say {when} that the job may begin: look for its error, then start the same "
                        "command again") from error


def _key(*words: object) -> str:
    return "/".join(map(str, ("alike", *words)))


def _compare_ranks(store: Store, ranks: int, timeout: timedelta) -> dict[str, Any] | None:
    """On rank 0: the error for all ranks, or None if all match."""
    keys = [_key("digest", rank) for rank in range(ranks)]
    with suppress(RuntimeError):  # missing ranks are reported below
        store.wait([_key("all")], timeout)
    if store.check([_key("odd")]):
        return {"error": _compare_world_sizes(store), "code": EXIT_CONFIG}
    if not store.check([_key("all")]):
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        error = PeerError(f"{format_ranks(missing)} of {ranks} did not come within {timeout.total_seconds():g} s: look "
                          "for the first error among the ranks, and whether all were started with the same WORLD_SIZE")
        return {"error": str(error), "code": error.code}
    digests = store.multi_get(keys)
    if len(set(digests)) == 1:
        return None
    variants = [[rank for rank in range(ranks) if digests[rank] == digest] for digest in dict.fromkeys(digests)]
    values_by_ranks = [(json.loads(store.get(_key("facts", kind[0]))), kind) for kind in variants[:MAX_VARIANTS]]
    unread = sum(map(len, variants[MAX_VARIANTS:]))
    more = f" ({unread} more ranks were told something else again)" if unread else ""
    return {"error": mismatch_message(values_by_ranks, f"{STARTED_DIFFERENTLY_MESSAGE}{more}"), "code": EXIT_CONFIG}


def _compare_world_sizes(store: Store) -> str:
    time.sleep(WORLD_SIZE_SECONDS)
    came = [rank for rank in range(int(store.get(_key("odd")))) if store.check([_key("size", rank)])]
    sizes = [int(store.get(_key("size", rank))) for rank in came]
    return mismatch_message([({"WORLD_SIZE": size}, [rank for rank, own in zip(came, sizes, strict=True)
                                                     if own == size]) for size in dict.fromkeys(sizes)])


def mismatch_message(values_by_ranks: Sequence[tuple[Mapping[str, Any], Sequence[int]]],
                     what: str = STARTED_DIFFERENTLY_MESSAGE) -> str:
    """The error text for settings that differ between ranks."""
    return (f"{what}: {describe_differences(values_by_ranks)}. Start all with the same command, the same code and the "
            "same files (docs/launch.md)")


def _wait_until_all_have_read(store: Store, ranks: int) -> None:
    until = time.monotonic() + LINGER_SECONDS
    while store.add(_key("heard"), 0) < ranks and time.monotonic() < until:
        time.sleep(0.05)
