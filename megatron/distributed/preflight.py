"""Before the ranks connect: check that all are there, were given the same settings and run the same code.

Each rank writes its settings, WORLD_SIZE among them, and their checksum to the rendezvous store. Settings are read only
where checksums differ, of one rank per checksum. Rank 0 compares; every other rank waits for its one result.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.distributed.rank_text import describe_differences, format_ranks
from megatron.errors import EXIT_CONFIG, ConfigError, PeerError

if TYPE_CHECKING:
    from torch.distributed import Store

COMPARED_PACKAGES = ("megatron", "mpu", "data")
MAX_VARIANTS = 16  # different sets of settings that are read and shown
STARTED_DIFFERENTLY_MESSAGE = "the ranks were started differently"
REPORT_SLACK = timedelta(seconds=10)  # extra seconds for rank 0 to report which ranks are missing
WORLD_SIZE_SECONDS = 0.5  # seconds to collect more WORLD_SIZEs once two are known to differ
LINGER_SECONDS = 5.0  # seconds for every rank to read the error before the rank that hosts the store exits


def code_digest() -> str:
    """Digest of all our modules, if they are installed side by side: hundreds of files, read in milliseconds."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in (path for package in COMPARED_PACKAGES for path in sorted((root / package).rglob("*.py"))):
        if not path.stem.isidentifier():  # a file that an editor or a user has left there
            continue
        try:
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); the ranks compare their code before they "
                              "begin") from error
    return digest.hexdigest()[:12]


def check_ranks_match(store: Store, rank: int, ranks: int, settings: Mapping[str, Any], timeout: timedelta) -> None:
    """Raise the same ConfigError on every rank if ranks or `settings` differ; PeerError if a rank does not arrive in
    time. Every rank of the job calls it, with a `store` whose keys nothing else uses. Nothing is compared pairwise:
    rank 0 reads all digests and writes one result."""
    text = json.dumps({"WORLD_SIZE": ranks, **settings}, sort_keys=True, default=str)
    this_process = f"process {os.getpid()} on {socket.gethostname()}"
    if store.add(f"claims/{rank}", 1) > 1:
        raise ConfigError(f"rank {rank} was given twice: to {store.get(f'process/{rank}').decode()}, which came first, "
                          f"and to {this_process}; each process needs a RANK of its own (docs/launch.md)")
    store.set(f"process/{rank}", this_process)
    store.set(f"settings/{rank}", text)
    store.set(f"digest/{rank}", hashlib.sha256(text.encode()).hexdigest())
    size_error = _register_rank(store, rank, ranks)
    if rank == 0:
        result = _compare_ranks(store, ranks, timeout)
        store.set("result", json.dumps(result))
    else:
        until = time.monotonic() + timeout.total_seconds()
        try:
            store.wait(["result"], timeout + REPORT_SLACK)
            result = json.loads(store.get("result"))
        except RuntimeError as error:
            when = f"within {timeout.total_seconds():g} s" if time.monotonic() >= until else "before it left"
            raise PeerError(f"rank 0 did not say {when} that the job may begin: look for its error, then start the "
                            "same command again") from error
    store.add("acknowledged", 1)
    if result is None and size_error is not None:
        result = {"error": size_error, "code": EXIT_CONFIG}  # the other ranks agreed and proceed without this one
    if result is None:
        return
    if rank == 0:  # the store may end with this process
        readers = ranks if result["code"] == EXIT_CONFIG else store.add("arrived", 0)
        until = time.monotonic() + LINGER_SECONDS
        while store.add("acknowledged", 0) < readers and time.monotonic() < until:
            time.sleep(0.05)
    raise (ConfigError if result["code"] == EXIT_CONFIG else PeerError)(result["error"])


def _register_rank(store: Store, rank: int, ranks: int) -> str | None:
    """Note that this rank has come; returns an error text if its WORLD_SIZE is not that of the first to come."""
    size, first = map(int, store.compare_set("world_size", "", f"{ranks} {rank}").split())
    if size != ranks:
        store.set("mismatch", f"{max(ranks, size, rank + 1)}")  # the number of ranks whose settings are to be read
    if store.add("arrived", 1) == ranks or size != ranks:
        store.set("comparable", "")
    return None if size == ranks else mismatch_message([({"WORLD_SIZE": size}, [first]),
                                                        ({"WORLD_SIZE": ranks}, [rank])])


def _compare_ranks(store: Store, ranks: int, timeout: timedelta) -> dict[str, Any] | None:
    """On rank 0: the error for all ranks, or None if all match."""
    with suppress(RuntimeError):  # missing ranks are reported below
        store.wait(["comparable"], timeout)
    keys = [f"digest/{rank}" for rank in range(ranks)]
    if store.check(["mismatch"]):
        time.sleep(WORLD_SIZE_SECONDS)
        keys = [f"digest/{rank}" for rank in range(int(store.get("mismatch")))]
        here = [rank for rank, key in enumerate(keys) if store.check([key])]
    elif store.check(["comparable"]):
        here = list(range(ranks))
    else:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        error = PeerError(f"{format_ranks(missing)} of {ranks} did not come within {timeout.total_seconds():g} s: look "
                          "for the first error among the ranks, and whether all were started with the same WORLD_SIZE")
        return {"error": str(error), "code": error.code}
    digests = dict(zip(here, store.multi_get([keys[rank] for rank in here]), strict=True))
    variants = [[rank for rank in here if digests[rank] == digest] for digest in dict.fromkeys(digests.values())]
    if len(variants) == 1:
        return None
    values_by_ranks = [(json.loads(store.get(f"settings/{having[0]}")), having) for having in variants[:MAX_VARIANTS]]
    unread = sum(map(len, variants[MAX_VARIANTS:]))
    more = f" ({unread} more ranks have other values again)" if unread else ""
    return {"error": mismatch_message(values_by_ranks, f"{STARTED_DIFFERENTLY_MESSAGE}{more}"), "code": EXIT_CONFIG}


def mismatch_message(values_by_ranks: Sequence[tuple[Mapping[str, Any], Sequence[int]]],
                     what: str = STARTED_DIFFERENTLY_MESSAGE) -> str:
    """The error text for settings that differ between ranks."""
    return (f"{what}: {describe_differences(values_by_ranks)}. Start all with the same command, the same code and the "
            "same files (docs/launch.md)")
