"""Files of text to a corpus of token ids: `python -m data.preprocess`.

Chunks of the files are tokenized by worker processes and written in the order of the input, so the corpus is the same,
byte for byte, for any number of workers.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data import tokenizer as tokenizers
from data.cli import StrictArgumentParser, format_count, positive, run_command
from data.indexed import token_dtype
from data.input_files import PLAIN_TEXT, check_stage_shards, find_text_files, kind_of
from data.parallel import ordered_map
from data.storage import (DataError, change_detector, check_outputs_are_not_inputs, escape_to_one_line, make_folder)
from data.text_files import (DATASET_PREFIX, Chunk, HuggingFaceDataset, Separator,
                             parse_lines, parse_texts, read_line_chunks, read_text_chunks)
from data.tokenizer import Tokenizer
from data.writer import CorpusWriter, corpus_files

OTHER_PREFIX_HINT = "a corpus is PREFIX.bin, PREFIX.idx and PREFIX.json: choose another --output-prefix"


@dataclass(frozen=True)
class TextReadOptions:
    """How files become documents (command line flags)."""

    json_key: str = "text"  # key of the text in a JSON object
    separator: Separator | None = None  # separator of documents in a plain text file
    append_eod: bool = True

    @property
    def digest_parts(self) -> tuple[str, ...]:
        """The options as text, for digests."""
        separator = self.separator.pattern.pattern.hex() if self.separator else "none"
        return self.json_key, separator, str(self.append_eod)


@dataclass(frozen=True)
class EncodedChunk:
    tokens: NDArray[np.integer]
    # Tokens of each document that ends in this chunk; tokens of an unfinished document follow them.
    sizes: NDArray[np.int64]
    chunk: Chunk  # without its bytes
    size: int  # bytes of the chunk
    malformed: int  # documents that are left out, or the rest of a damaged file
    first_is_malformed: bool  # the continued part at its start is malformed, and so the whole document
    last_is_malformed: bool  # the unfinished part at its end is malformed


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, reading: TextReadOptions,
                 skip_malformed: bool = False) -> EncodedChunk:
    """Tokenize the documents of a chunk; malformed ones are errors, or left out."""
    end = np.array([tokenizer.eod] if reading.append_eod else [], np.uint32)
    pieces: list[NDArray[np.uint32]] = [end[:0]]  # concatenate needs at least one
    sizes, are_well_formed = [], []
    texts = (parse_texts(chunk, reading.separator) if kind_of(chunk.path) == PLAIN_TEXT else
             (text for _, text in parse_lines(chunk, reading.json_key)))
    for text in texts:
        are_well_formed.append(isinstance(text, str))
        if isinstance(text, str):
            ids = tokenizer.encode_array(text)
            pieces += (ids, end)
            sizes.append(len(ids) + len(end))
        elif not skip_malformed:
            raise text.to_error()
    if chunk.damage:
        if not skip_malformed:
            raise DataError(chunk.damage)
        are_well_formed.append(False)
    if chunk.ends_inside_document and sizes:
        pieces.pop()
        sizes.pop()
    tokens: NDArray[np.integer] = np.concatenate(pieces, dtype=token_dtype(tokenizer.vocab_size))
    return EncodedChunk(tokens, np.array(sizes, np.int64), replace(chunk, data=b""), len(chunk.data),
                        are_well_formed.count(False),
                        chunk.starts_inside_document and not are_well_formed[0],
                        chunk.ends_inside_document and are_well_formed[-1:] == [False])


def build_corpus(inputs: Iterable[str | os.PathLike[str]], prefix: str | Path, tokenizer: Tokenizer,
                 options: TextReadOptions = TextReadOptions(), *, workers: int = 1, skip_malformed: bool = False,
                 log_interval: int = 0) -> tuple[PreprocessProgress, int]:
    """Write the corpus of some files; returns (progress, number of skipped documents). A malformed document, or the
    rest of a damaged file, raises an error with its line, unless `skip_malformed`. A line is printed after every
    `log_interval` documents (0: never)."""
    inputs = [HuggingFaceDataset(path) if isinstance(path, str) and path.startswith(DATASET_PREFIX) else path
              for path in inputs]
    check_outputs_are_not_inputs(inputs, corpus_files(prefix), OTHER_PREFIX_HINT)
    make_folder(Path(prefix).parent)
    check_unchanged = change_detector(inputs)
    check_stage_shards(inputs)
    encode = partial(encode_chunk, tokenizer=tokenizer, reading=options, skip_malformed=skip_malformed)
    chunks = chain.from_iterable(
        path.read_chunks(options.json_key) if isinstance(path, HuggingFaceDataset) else
        read_text_chunks(path, options.separator, tokenizer.safe_split_characters)
        if kind_of(path) == PLAIN_TEXT else read_line_chunks(path) for path in inputs)
    progress = PreprocessProgress()
    with CorpusWriter(prefix, tokenizer=tokenizer.facts) as writer:
        for encoded in ordered_map(encode, chunks, workers):
            old_documents = progress.documents
            progress.write_chunk(encoded, writer)
            if log_interval and progress.documents // log_interval > old_documents // log_interval:
                print(progress.rate(), file=sys.stderr, flush=True)
        check_unchanged()
        if progress.skipped and not writer.tokens:
            raise DataError(f"{os.fspath(prefix)}: no tokens: {format_count(progress.skipped, 'malformed document')} "
                            "skipped, and no text beside; without --on-error skip the first is named")
    for damage in progress.damaged:
        print(f"skipped the rest of a file: {escape_to_one_line(damage)}", file=sys.stderr)
    return progress, progress.skipped


def build_shard_corpus(task: tuple[str, Path, str | None], tokenizer: Tokenizer) -> None:
    """Build the corpus of one shard, given as (path, prefix, sha256), where the last tells an engine what changed."""
    path, prefix, _ = task
    build_corpus([path], prefix, tokenizer)


@dataclass
class PreprocessProgress:
    """How far a corpus is."""

    start: float = field(default_factory=time.monotonic)
    documents: int = 0
    bytes: int = 0
    skipped: int = 0
    # A part of the unfinished document was malformed: its other parts are dropped, and it is already counted.
    is_refused: bool = False
    damaged: list[str] = field(default_factory=list)  # messages for the end: files whose rest was skipped

    def write_chunk(self, encoded: EncodedChunk, writer: CorpusWriter) -> None:
        """Write the documents of a chunk, or its part of one, without malformed ones."""
        chunk, tokens, sizes = encoded.chunk, encoded.tokens, encoded.sizes
        self.skipped += encoded.malformed - (encoded.first_is_malformed and self.is_refused)
        if encoded.first_is_malformed:
            writer.drop_unfinished_document()
        elif self.is_refused and chunk.starts_inside_document and not encoded.first_is_malformed:
            # a valid part of a malformed document
            first = int(sizes[0]) if len(sizes) else len(tokens)
            tokens, sizes = tokens[first:], sizes[1:]
        ended = int(sizes.sum())
        sizes[:1] += writer.tokens - writer.complete_tokens
        writer.add_documents(tokens[:ended], sizes)
        if not (chunk.starts_inside_document and chunk.ends_inside_document):
            self.is_refused = False
        self.is_refused |= encoded.last_is_malformed
        writer.add_tokens(tokens[ended:])
        if chunk.damage:
            self.damaged.append(chunk.damage)
        self.documents += len(sizes)
        self.bytes += encoded.size

    def rate(self) -> str:
        seconds = max(time.monotonic() - self.start, 1e-9)
        return (f"{self.documents} documents in {seconds:.1f} s: {self.documents / seconds:.0f} documents/s, "
                f"{self.bytes / seconds / 1e6:.2f} MB/s")


def parse_shard(text: str) -> tuple[int, int]:
    """(3, 8) of `3/8`: share 3, from 0, of 8 shares of a list of files."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ArgumentTypeError(f"{text}: expected I/N with I from 0 to N - 1")
    return int(index), int(count)


def add_tokenizer_arguments(parser: StrictArgumentParser) -> None:
    parser.add_argument("--tokenizer-type", default="GPT2BPETokenizer",
                        help=f"one of {', '.join(tokenizers.KINDS)} (default: %(default)s)")
    parser.add_argument("--vocab-file", help="GPT-2's vocab.json, or the text of a character vocabulary")
    parser.add_argument("--merge-file", help="GPT-2's merges; without it the packaged vocabulary is used")
    parser.add_argument("--tokenizer-path", help="a SentencePiece model")


def build_tokenizer(args: Namespace) -> Tokenizer:
    """The tokenizer of these flags; raises if the output would overwrite its files."""
    files = [path for path in (args.vocab_file, args.merge_file, args.tokenizer_path) if path]
    check_outputs_are_not_inputs(files, corpus_files(args.output_prefix), OTHER_PREFIX_HINT)
    return tokenizers.build(args.tokenizer_type, args.vocab_file, args.merge_file, args.tokenizer_path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.preprocess",
                                  "Tokenize JSONL and plain text files into PREFIX.bin, PREFIX.idx and PREFIX.json.")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE",
                        help="JSONL or .txt files, plain or compressed (.gz, .xz, .zst), folders of them, or hf:NAME")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    parser.add_argument("--json-key", default="text", help="which key of a JSON object holds the text (default: text)")
    parser.add_argument("--document-separator", metavar="TEXT",
                        help="what ends a document inside a .txt file: blank-line, or a text such as '<|endoftext|>', "
                        "in which \\n is a line end (default: a file is a document)")
    add_tokenizer_arguments(parser)
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="processes; same output")
    parser.add_argument("--shard", type=parse_shard, default=(0, 1), metavar="I/N",
                        help="process the I-th of N parts of the files, from 0; join the corpora with data.merge")
    parser.add_argument("--on-error", choices=("strict", "skip"), default="strict",
                        help="a malformed document ends the run, or is left out and counted")
    parser.add_argument("--log-interval", type=int, default=10_000, metavar="N", help="documents per progress line")
    args = parser.parse_args(argv)
    tokenizer = build_tokenizer(args)
    found, (index, count) = find_text_files(args.input), args.shard
    if len(found.files) < count:
        raise DataError(f"--shard {index}/{count}: there are only {len(found.files)} input files, and a file is not "
                        f"cut; use {len(found.files)} shards at most, or smaller files")
    # Consecutive files, so that the shares in order are the whole list.
    files = found.files[len(found.files) * index // count:len(found.files) * (index + 1) // count]
    if found.left_out:
        print(found.left_out, file=sys.stderr)
    options = TextReadOptions(args.json_key, Separator.parse(args.document_separator), args.append_eod)
    progress, skipped = build_corpus(files, args.output_prefix, tokenizer, options, workers=args.workers,
                                     skip_malformed=args.on_error == "skip", log_interval=args.log_interval)
    print(f"{args.output_prefix}: {format_count(len(files), 'file')}, {progress.rate()}; "
          f"{format_count(skipped, 'malformed document')} skipped", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
