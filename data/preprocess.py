"""JSONL text to a corpus of token ids: `python -m data.preprocess`.

Chunks of lines are tokenised by worker processes and written in the order of the input, so the files are the same, byte
for byte, for any number of workers.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data import tokenizer as tokenizers
from data.cli import Parser, Progress, positive, run
from data.format import token_dtype
from data.indexed import CorpusWriter
from data.jsonl import Chunk, Malformed, count_lines, find_files, lines_of, read_chunks
from data.parallel import ordered_map
from data.storage import DataError, make_folder
from data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """The documents of one chunk."""

    tokens: NDArray[np.integer]
    sizes: NDArray[np.int32]
    chunk: Chunk
    lines: int
    refused: list[Malformed]


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, key: str, append_eod: bool) -> Encoded:
    """Tokenise the lines of a chunk; what is malformed is left out and named."""
    end = np.array([tokenizer.eod] if append_eod else [], np.uint32)
    pieces: list[NDArray[np.uint32]] = [end[:0]]  # so that there is one
    sizes, refused = [], []
    data = chunk.read()
    for _, text in lines_of(chunk, data, key):
        if isinstance(text, Malformed):
            refused.append(text)
        else:
            ids = tokenizer.encode_array(text)
            pieces += (ids, end)
            sizes.append(len(ids) + len(end))
    tokens: NDArray[np.integer] = np.concatenate(pieces, dtype=token_dtype(tokenizer.vocab_size))
    return Encoded(tokens, np.array(sizes, np.int32), replace(chunk, data=None), count_lines(data), refused)


def build_corpus(inputs: Iterable[str | Path], prefix: str | Path, tokenizer: Tokenizer, *, append_eod: bool = True,
                 key: str = "text", workers: int = 1, skip_malformed: bool = False, log_interval: int = 0
                 ) -> tuple[Progress, int]:
    """Write the corpus of some JSONL files. Returns the progress made and how many lines were skipped.

    A malformed line is an error that names it, unless `skip_malformed`.
    """
    make_folder(Path(prefix).parent)
    encode = partial(encode_chunk, tokenizer=tokenizer, key=key, append_eod=append_eod)
    progress, skipped, lines = Progress(log_interval), 0, 0
    chunks = (chunk for path in inputs for chunk in read_chunks(path))
    with CorpusWriter(prefix, tokenizer=tokenizer.facts) as writer:
        for encoded in ordered_map(encode, chunks, workers):
            lines *= encoded.chunk.offset > 0  # lines of its file before this chunk
            if encoded.refused and not skip_malformed:
                raise encoded.refused[0].error(lines)
            lines += encoded.lines
            skipped += len(encoded.refused)
            writer.add_documents(encoded.tokens, encoded.sizes)
            progress.add(len(encoded.sizes), encoded.chunk.size)
    return progress, skipped


@dataclass(frozen=True)
class Shard:
    """`3/8`: the share of one machine of eight, numbered from 0, of a list of files."""

    index: int = 0
    count: int = 1

    @staticmethod
    def parse(text: str) -> Shard:
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ArgumentTypeError(f"{text}: expected I/N with I from 0 to N - 1")
        return Shard(int(index), int(count))

    def of(self, files: Sequence[str]) -> Sequence[str]:
        """Neighbouring files: the shards in order are the whole list."""
        if len(files) < self.count:
            raise DataError(f"--shard {self.index}/{self.count}: there are only {len(files)} input files, and a file "
                            f"is not cut; use {len(files)} shards at most, or smaller files")
        return files[len(files) * self.index // self.count:len(files) * (self.index + 1) // self.count]


def add_tokenizer_arguments(parser: Parser) -> None:
    parser.add_argument("--tokenizer-type", default="GPT2BPETokenizer", help=f"one of {', '.join(tokenizers.KINDS)}")
    parser.add_argument("--vocab-file", help="GPT-2's vocab.json, or the text of a character vocabulary")
    parser.add_argument("--merge-file", help="GPT-2's merges; without it the packaged vocabulary is used")
    parser.add_argument("--tokenizer-path", help="a SentencePiece model")


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("data.preprocess", "Tokenise JSONL files into PREFIX.bin, PREFIX.idx and PREFIX.json.")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE",
                        help="JSONL files, plain or .gz, or folders of them")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument("--json-key", default="text", help="which key holds the text (default: text)")
    add_tokenizer_arguments(parser)
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes; same output")
    parser.add_argument("--shard", type=Shard.parse, default=Shard(), metavar="I/N",
                        help="take the I-th of N parts of the files, from 0; join the corpora with data.merge")
    parser.add_argument("--on-error", choices=("strict", "skip"), default="strict", help="what a malformed line does")
    parser.add_argument("--log-interval", type=int, default=10_000, metavar="N", help="documents per progress line")
    args = parser.parse_args(argv)
    tokenizer = tokenizers.build(args.tokenizer_type, args.vocab_file, args.merge_file, args.tokenizer_path)
    progress, skipped = build_corpus(
        args.shard.of(find_files(args.input)), args.output_prefix, tokenizer, append_eod=args.append_eod,
        key=args.json_key, workers=args.workers, skip_malformed=args.on_error == "skip",
        log_interval=args.log_interval)
    print(f"{args.output_prefix}: {progress}; {skipped} malformed lines skipped", file=sys.stderr)


if __name__ == "__main__":
    run(main)
