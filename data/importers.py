"""Import token files of nanoGPT and llm.c: `python -m data.importers --input FILE.bin... --output-prefix P`.

nanoGPT's `.bin` holds only uint16 ids; llm.c's has a header of 256 int32 (magic, version 1, number of tokens) before
them. Neither records document boundaries or the tokenizer: documents are cut at the end-of-document id of the given
tokenizer, whose vocabulary must contain every id. nanoGPT writes that id after each document, llm.c before it; the
first file shows which, and no token moves. The files are one stream, as llm.c's shards end anywhere: give them in
order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.cli import StrictArgumentParser, run_command
from data.compressed import is_compressed, read_errors_for
from data.indexed import BLOCK_ENTRIES, StableFile
from data.input_files import kind_of
from data.preprocess import OTHER_PREFIX_HINT, add_tokenizer_arguments, build_tokenizer
from data.storage import DataError, change_detector, check_is_file, check_outputs_are_not_inputs, make_folder
from data.tokenizer import Tokenizer
from data.writer import MAX_DOCUMENT_TOKENS, CorpusWriter, corpus_files

# No GPT-2 file of nanoGPT begins like this: 55448, the lower half of the magic, is not a GPT-2 id.
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 256

TOKEN_DTYPE = np.dtype("<u2")
OTHER_TOKENIZER_HINT = "was it made with another tokenizer? (--tokenizer-type)"


@dataclass(frozen=True)
class TokenFile:
    """A token file, by its size and header."""

    path: str
    tokens_offset: int  # offset of the first token: after llm.c's header, or 0 without one
    num_tokens: int
    first_token: int


def import_tokens(inputs: Sequence[str | os.PathLike[str]], prefix: str | os.PathLike[str],
                  tokenizer: Tokenizer) -> str:
    """Write the corpus of token files, in order; returns a summary."""
    check_outputs_are_not_inputs(inputs, corpus_files(prefix), OTHER_PREFIX_HINT)
    check_unchanged = change_detector(inputs)
    files = [inspect_token_file(path) for path in inputs]  # check every file before anything is written
    make_folder(Path(prefix).parent)
    with CorpusWriter(prefix, tokenizer=tokenizer.facts) as writer:
        _copy_tokens(files, writer, tokenizer)
        check_unchanged()
    return f"{os.fspath(prefix)}: {writer.documents} documents, {writer.tokens} tokens"


def inspect_token_file(path: str | os.PathLike[str]) -> TokenFile:
    """Size and header of a token file; DataError if it cannot be one."""
    name = os.fspath(path)
    check_is_file(name)
    if kind_of(name) or is_compressed(name):
        raise DataError(f"{name}: expected a file of tokens, found " + (
            "text by its name; python -m data.preprocess tokenizes text" if kind_of(name) else
            "a compressed one; decompress it first"))
    with read_errors_for(name):
        size, head = os.path.getsize(name), np.fromfile(name, "<i4", LLMC_HEADER)
        if len(head) and head[0] == LLMC_MAGIC:
            what, start = f"{name}: a header of llm.c", 4 * LLMC_HEADER
            if len(head) < LLMC_HEADER:
                raise DataError(f"{what} that is cut off: expected {start} bytes, found {size}")
            if head[1] != LLMC_VERSION:
                raise DataError(f"{what}: version: expected {LLMC_VERSION}, found {head[1]}; only uint16 tokens, as "
                                "llm.c writes them of GPT-2's vocabulary, can be read")
            expected = start + TOKEN_DTYPE.itemsize * int(head[2])
            if size != expected or head[2] < 1:
                raise DataError(f"{what} for {head[2]} tokens: size: expected {expected} bytes, found {size}"
                                if head[2] else f"{what} for 0 tokens: expected at least 1")
        else:
            start = 0
            if size == 0 or size % TOKEN_DTYPE.itemsize:
                raise DataError(f"{name}: size: expected uint16 tokens, found {size} bytes")
        first = int(np.fromfile(name, TOKEN_DTYPE, 1, offset=start)[0])
    return TokenFile(name, start, (size - start) // TOKEN_DTYPE.itemsize, first)


def _copy_tokens(files: Sequence[TokenFile], writer: CorpusWriter, tokenizer: Tokenizer) -> None:
    """Copy the tokens of all files as one stream, in which documents may cross files, and the documents' sizes.
    Raises for an id outside the vocabulary, with its position."""
    read = document_start = 0  # tokens read; start of the current document
    after = 0 if files[0].first_token == tokenizer.eod else 1  # 1: cut after the end-of-document id; 0: before it
    for file in files:
        with read_errors_for(file.path):
            source = StableFile(file.path)
        for at in range(0, file.num_tokens, BLOCK_ENTRIES):
            ids = source.read(file.tokens_offset + at * TOKEN_DTYPE.itemsize, min(BLOCK_ENTRIES, file.num_tokens - at),
                              TOKEN_DTYPE)
            if int(ids.max()) >= tokenizer.vocab_size:
                bad = int((ids >= tokenizer.vocab_size).argmax())
                raise DataError(f"{file.path}: token {at + bad} (of {file.num_tokens}, from 0): expected an id from 0 "
                                f"to {tokenizer.vocab_size - 1}, found {ids[bad]}; {OTHER_TOKENIZER_HINT}")
            cuts = read + after + np.flatnonzero(ids == tokenizer.eod)
            cuts = cuts[cuts > document_start]
            sizes = np.diff(cuts, prepend=document_start)
            read += len(ids)
            document_start = int(cuts[-1]) if len(cuts) else document_start
            if max(sizes.max(initial=0), read - document_start) > MAX_DOCUMENT_TOKENS:
                raise DataError(f"{file.path}: a document that ends here, or goes on, has more than "
                                f"{MAX_DOCUMENT_TOKENS} tokens: expected the end-of-document id {tokenizer.eod} "
                                f"between documents; {OTHER_TOKENIZER_HINT}")
            writer.add_documents(ids, sizes)
    writer.add_sizes([read - document_start] if read > document_start else [])


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.importers", "Make a corpus of the .bin files of nanoGPT or llm.c.")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="token files, one after the other")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    add_tokenizer_arguments(parser)
    args = parser.parse_args(argv)
    print(import_tokens(args.input, args.output_prefix, build_tokenizer(args)))


if __name__ == "__main__":
    run_command(main)
