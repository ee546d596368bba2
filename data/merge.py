"""Merge corpora: `python -m data.merge OUT PREFIX...`. The last step after several machines made a part each.

Documents follow in the order given, so corpora from `data.preprocess --shard` merge to the same bytes as one run over
all files. Tokens are copied in blocks and checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.cli import StrictArgumentParser, run_command
from data.indexed import BLOCK_ENTRIES, IndexedCorpus
from data.storage import DataError, check_outputs_are_not_inputs, crc32, make_folder
from data.writer import CorpusWriter, corpus_files


def merge_corpora(prefixes: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> str:
    """Write the corpus `out`; returns a summary. All corpora must have one token dtype and one tokenizer."""
    check_outputs_are_not_inputs([path for prefix in prefixes for path in corpus_files(prefix)], corpus_files(out),
                                 "a corpus cannot be merged into itself: choose another OUT")
    first = IndexedCorpus(prefixes[0])
    for other in map(IndexedCorpus, prefixes[1:]):  # opens, and so checks, everything before anything is written
        if other.dtype != first.dtype:
            raise DataError(f"cannot merge {first.prefix} ({first.dtype.name}) and {other.prefix} ({other.dtype.name})")
        if other.tokenizer != first.tokenizer:
            raise DataError(f"cannot merge {first.prefix} and {other.prefix}: different tokenizers "
                            f"({first.tokenizer} and {other.tokenizer})")
    make_folder(Path(out).parent)
    with CorpusWriter(out, tokenizer=first.tokenizer, dtype=first.dtype) as writer:
        del first
        for corpus in map(IndexedCorpus, prefixes):
            crc = 0
            for _, block in corpus.token_blocks():
                crc = crc32(block.data, crc)
                writer.add_tokens(block)
            if corpus.facts and f"{crc:08x}" != corpus.facts.crc32:
                raise DataError(f"{corpus.prefix}.bin: crc32: expected {corpus.facts.crc32} ({corpus.prefix}.json), "
                                f"found {crc:08x}; make this corpus again")
            for at in range(0, corpus.num_documents, BLOCK_ENTRIES):
                starts = corpus.first_tokens(at, min(at + BLOCK_ENTRIES, corpus.num_documents))
                writer.add_sizes(np.diff(starts))
    return f"{os.fspath(out)}: {writer.documents} documents, {writer.tokens} tokens of {len(prefixes)} corpora"


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.merge",
                                  "Join corpora of one tokenizer, in the order given, into OUT.bin, .idx and .json.")
    parser.add_argument("out", metavar="OUT", help="prefix of the corpus to write")
    parser.add_argument("prefixes", metavar="PREFIX", nargs="+", help="prefixes of the corpora to join")
    args = parser.parse_args(argv)
    print(merge_corpora(args.prefixes, args.out))


if __name__ == "__main__":
    run_command(main)
