"""Token files of other projects to a corpus: `python -m data.importers --input FILE.bin... --output-prefix P`.

nanoGPT's `.bin` is uint16 ids and nothing else; in llm.c's a header of 256 int32 (magic, version 1, number of tokens)
comes before them. Neither says where documents end or which tokenizer made them: documents are cut at the
end-of-document id of the tokenizer that is named, and its vocabulary must hold every id. nanoGPT writes that id after
each document and llm.c before it; whether the first file begins with it shows which it is, and no token moves. Files of
one import are one stream, as llm.c's shards are, which end wherever they are full: name them in their order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.cli import Parser, run
from data.compressed import is_compressed, reading
from data.draft import files_of
from data.indexed import BLOCK
from data.inputs import kind_of
from data.preprocess import OTHER_PREFIX, add_tokenizer_arguments, build_tokenizer
from data.storage import DataError, check_is_file, check_not_over, make_folder, watched
from data.tokenizer import Tokenizer
from data.writer import CorpusWriter

LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 256
"""No GPT-2 file of nanoGPT's begins like this: 55448, the lower half of the magic, is not an id of GPT-2's."""

DTYPE = np.dtype("<u2")


def import_tokens(inputs: Sequence[str | os.PathLike[str]], prefix: str | os.PathLike[str],
                  tokenizer: Tokenizer) -> str:
    """Write the corpus of some token files, one after the other; says what became of it."""
    check_not_over(inputs, files_of(prefix), OTHER_PREFIX)
    check_unchanged = watched(inputs)
    files = [(path, *tokens_at(path)) for path in inputs]  # every file is looked at before anything is written
    make_folder(Path(prefix).parent)
    with CorpusWriter(prefix, tokenizer=tokenizer.facts) as writer:
        _copy(files, writer, tokenizer.eod)
        check_unchanged()
    return f"{os.fspath(prefix)}: {writer.documents} documents, {writer.tokens} tokens"


def tokens_at(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Bytes before the first token of a file, a header's or none, and how many tokens there are. Refuses what cannot
    be a token file."""
    name = os.fspath(path)
    check_is_file(name)
    if kind_of(name) or is_compressed(name):
        raise DataError(f"{name}: expected a file of tokens, found " + (
            "text by its name; python -m data.preprocess tokenizes text" if kind_of(name) else
            "a compressed one; decompress it first"))
    try:
        size = os.path.getsize(name)
        head = np.fromfile(name, "<i4", LLMC_HEADER)
    except OSError as error:
        raise DataError(f"{name}: cannot read: {error.strerror or error}") from error
    if len(head) and head[0] == LLMC_MAGIC:
        expected = 4 * LLMC_HEADER + DTYPE.itemsize * int(head[2]) if len(head) == LLMC_HEADER else 4 * LLMC_HEADER
        if len(head) < LLMC_HEADER or head[1] != LLMC_VERSION or size != expected:
            raise DataError(f"{name}: a header of llm.c, but not a whole file of version {LLMC_VERSION}: version "
                            f"{head[1] if len(head) > 1 else 'missing'}, expected {expected} bytes, found {size}")
        return 4 * LLMC_HEADER, int(head[2])
    if size == 0 or size % DTYPE.itemsize:
        raise DataError(f"{name}: size: expected uint16 tokens, found {size} bytes")
    return 0, size // DTYPE.itemsize


def _copy(files: Sequence[tuple[str | os.PathLike[str], int, int]], writer: CorpusWriter, eod: int) -> None:
    """The tokens of all files, which are one stream: a document may go on in the next one. And the sizes of the
    documents, as they end."""
    read = begun = 0  # tokens read; where the document that is being read began
    after = 1  # tokens from an end-of-document id to the cut
    for ids in _blocks(files):
        if read == 0:
            after = 0 if ids[0] == eod else 1
        cuts = read + after + np.flatnonzero(ids == eod)
        cuts = cuts[cuts > begun]
        writer.add_tokens(ids)
        writer.add_sizes(np.diff(cuts, prepend=begun))
        read += len(ids)
        begun = int(cuts[-1]) if len(cuts) else begun
    writer.add_sizes([read - begun] if read > begun else [])


def _blocks(files: Sequence[tuple[str | os.PathLike[str], int, int]]) -> Iterator[NDArray[np.uint16]]:
    for path, start, left in files:
        with reading(os.fspath(path)), open(path, "rb") as file:
            file.seek(start)
            while len(ids := np.fromfile(file, DTYPE, min(BLOCK, left))):
                left -= len(ids)
                yield ids


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("data.importers", "Make a corpus of the .bin files of nanoGPT or llm.c.")
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="token files, one after the other")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    add_tokenizer_arguments(parser)
    args = parser.parse_args(argv)
    print(import_tokens(args.input, args.output_prefix, build_tokenizer(args)))


if __name__ == "__main__":
    run(main)
