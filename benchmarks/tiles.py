"""Tiles beside plain system calls: `python benchmarks/tiles.py --folder /nvme`.

Both write, and then read, every tile of the same file, in turns, past the page cache where the file system lets them.
Plain is what a drive can do: 8 MB a system call, from as many threads, without a checksum, a queue or an order. Ours
has four requests under way, as many as a step has buffers by default. Reported are the medians over the rounds of the
rate in GB/s, and of the ratio of the two rates of a round; the aim is 0.9. With the package isal the checksum costs a
third.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from torch import Tensor  # noqa: E402

from megatron.zero.offload.direct_io import page_aligned_bytes  # noqa: E402
from megatron.zero.offload.swap_drive import AioSettings, AsyncSwapFile, SwapDrive  # noqa: E402

BLOCK = 8 << 20
Action = Callable[[], object]


def plain(call: Callable[..., int], file: AsyncSwapFile, buffers: list[Tensor], size: int, count: int,
          threads: int) -> None:
    """Thread t takes every threads-th block."""
    descriptor = os.open(f"/proc/self/fd/{file.file.descriptor}", os.O_RDWR | os.O_DIRECT)

    def work(thread: int) -> None:
        for start in range(thread * BLOCK, size * count, threads * BLOCK):
            at = start % size
            data = buffers[start // size % len(buffers)].numpy().data[at:at + min(BLOCK, size - at)]
            moved = call(descriptor, [data], start)
            assert moved == len(data), "a plain call is not repeated"

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    finally:
        os.close(descriptor)


def ours(kind: str, file: AsyncSwapFile, buffers: list[Tensor], count: int) -> None:
    under_way = []
    for tile in range(count):
        if len(under_way) == len(buffers):
            under_way.pop(0).wait()
        under_way.append(getattr(file, kind)(tile, buffers[tile % len(buffers)]))
    for pending in under_way:
        pending.wait()


def seconds(action: Action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def compare(folder: str, size: int, count: int, threads: int, rounds: int) -> None:
    drive = SwapDrive(folder, flag="--folder", aio=AioSettings(intra_op_parallelism=threads))
    file = AsyncSwapFile(drive, f"{size >> 20}MB-{threads}", [size] * count)
    buffers = [page_aligned_bytes(size, pinned=False) for _ in range(4)]
    for buffer in buffers:
        buffer.numpy().data[:] = os.urandom(size)
    ours("write", file, buffers, count)  # the first pass finds room
    for kind, call in (("write", os.pwritev), ("read", os.preadv)):
        pair = (partial(plain, call, file, buffers, size, count, threads), partial(ours, kind, file, buffers, count))
        times = []
        for number in range(rounds):
            order = pair if number % 2 else pair[::-1]  # neither is always first
            took = {action: seconds(action) for action in order}
            times.append((took[pair[0]], took[pair[1]]))
            if kind == "write":  # plain calls leave no checksum, and the same content only by luck
                ours("write", file, buffers, count)
        rates = [statistics.median(size * count / 1e9 / took for took in column) for column in zip(*times)]
        ratio = statistics.median(theirs / mine for theirs, mine in times)
        print(f"{size >> 20:4d} MB  {threads} thread{'s' * (threads > 1):1s}  {kind:5s}  plain {rates[0]:5.2f} GB/s  "
              f"tiles {rates[1]:5.2f} GB/s  ratio {ratio:.2f}", flush=True)
    file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="on the drive (default: here)")
    parser.add_argument("--tile-mb", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--file-mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for megabytes in args.tile_mb:
        for threads in args.threads:
            compare(args.folder, megabytes << 20, args.file_mb // megabytes, threads, args.rounds)


if __name__ == "__main__":
    main()
