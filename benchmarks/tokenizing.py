"""Speed of GPT-2 tokenisation on one core: `python benchmarks/tokenizing.py FILE.jsonl [--rounds 5]`.

Each contender turns the texts of the file into ids: the bare tokenizers (tiktoken, gigatoken, HF tokenizers), from
texts that are in memory, and `data.preprocess`, from the file to a corpus on the disk. They work in turn (A B C A B C
...), each round with a new encoder, so that caches start cold and drift of the machine hits all alike. Reported are
medians of processor time, in MB of the file a second, and the ratio to the bare tokenizer underneath; then what
`data.preprocess --workers 2` takes by the clock. All must give the same ids.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np  # noqa: E402

from data.gpt2_bpe import (GigatokenEngine, TiktokenEngine, byte_alphabet,  # noqa: E402
                           fastest_engine, packaged_merges, parse_merges)
from data.indexed import IndexedCorpus  # noqa: E402
from data.preprocess import TextReadOptions, build_corpus  # noqa: E402
from data.text_files import parse_lines, read_line_chunks  # noqa: E402
from data.tokenizer import GPT2BPETokenizer  # noqa: E402

WORKERS_BYTES = 3e9
"""Text for the workers: enough that starting them does not count."""

Work = Callable[[], np.ndarray]
"""Returns all ids, joined."""


def spelling() -> list[bytes]:
    alphabet = byte_alphabet()
    return [bytes(alphabet[character] for character in token) for token in parse_merges(packaged_merges(), "packaged")]


def join(pieces: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.uint16), *pieces], dtype=np.uint16, casting="unsafe")


def bare(engine: TiktokenEngine, texts: list[str]) -> Work:
    engine.encode_to_ranks("built before the clock starts")
    return lambda: join(map(engine.encode_to_ranks, texts))


def hugging_face(texts: list[str]) -> Work:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = packaged_merges()
    pairs = [tuple(line.split(" ")) for line in merges.splitlines()[1:] if line]
    model = models.BPE({token: rank for rank, token in enumerate(parse_merges(merges, "packaged"))}, pairs)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return lambda: join(np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch_fast(texts))


def preprocess(paths: list[str], engine: TiktokenEngine, folder: str, workers: int = 1) -> Work:
    engine.encode_to_ranks("built before the clock starts")
    tokenizer = GPT2BPETokenizer(engine=lambda _: engine)

    def work() -> np.ndarray:
        build_corpus(paths, Path(folder, "corpus"), tokenizer, TextReadOptions(append_eod=False), workers=workers)
        corpus = IndexedCorpus(Path(folder, "corpus"))
        return np.concatenate([block for _, block in corpus.token_blocks()])

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenisation speed, side by side.")
    parser.add_argument("file", metavar="FILE.jsonl")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    texts = [str(text) for chunk in read_line_chunks(args.file) for _, text in parse_lines(chunk, "text")]
    size, tokens = os.path.getsize(args.file) / 1e6, spelling()
    with tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, tuple[str, Callable[[], Work]]] = {  # name: (yardstick, what builds it)
            "tiktoken": ("tiktoken", lambda: bare(TiktokenEngine(tokens), texts)),
            "preprocess, tiktoken": ("tiktoken", lambda: preprocess([args.file], TiktokenEngine(tokens), folder)),
            "HF tokenizers": ("tiktoken", lambda: hugging_face(texts)),
        }
        if isinstance(fastest_engine(tokens, is_gpt2=True), GigatokenEngine):
            contenders |= {"gigatoken": ("gigatoken", lambda: bare(GigatokenEngine(tokens), texts)),
                           "json.loads alone": ("gigatoken", lambda: lambda: parse(args.file)),
                           "preprocess, gigatoken": ("gigatoken",
                                                     lambda: preprocess([args.file], GigatokenEngine(tokens), folder))}
        seconds = rounds(contenders, args.rounds)
        print(f"{args.file}: {size:.1f} MB, {len(texts)} documents; medians of {args.rounds} rounds on one core")
        for name, (yardstick, _) in contenders.items():
            print(f"{name:24} {size / seconds[name]:8.1f} MB/s {seconds[yardstick] / seconds[name]:6.2f} x {yardstick}")
        print(two_workers(args.file, fastest_engine(tokens, is_gpt2=True), folder))


def parse(path: str) -> np.ndarray:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)
    return np.empty(0, np.uint16)


def rounds(contenders: dict[str, tuple[str, Callable[[], Work]]], count: int) -> dict[str, float]:
    """Median processor seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    expected: np.ndarray | None = None
    for _ in range(count):
        for name, (_, build) in contenders.items():
            work = build()
            begin = time.process_time()
            ids = work()
            seconds[name].append(time.process_time() - begin)
            if len(ids):
                expected = ids.copy() if expected is None else expected
                assert np.array_equal(ids, expected), f"{name} gives other ids"
    return {name: statistics.median(found) for name, found in seconds.items()}


def two_workers(path: str, engine: TiktokenEngine, folder: str) -> str:
    times = []
    paths = [path] * max(1, round(WORKERS_BYTES / os.path.getsize(path)))
    for workers in (1, 2):
        work = preprocess(paths, engine, folder, workers)
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return f"--workers 2: {times[0] / times[1]:.2f} x one, by the clock, the file {len(paths)} times"


if __name__ == "__main__":
    main()
