"""Check a corpus completely: `python -m data.verify PREFIX`. Reads every byte, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from data.cli import StrictArgumentParser, positive, run_command
from data.compressed import read_errors_for
from data.indexed import IndexedCorpus
from data.storage import DataError, crc32_file


def verify_corpus(prefix: str, vocab_size: int | None = None) -> str:
    """Check everything that `IndexedCorpus` checks, the checksum and every id; returns a summary."""
    corpus = IndexedCorpus(prefix)
    facts = corpus.facts
    if facts:
        with read_errors_for(f"{prefix}.bin"):
            found = crc32_file(f"{prefix}.bin")
        if found != facts.crc32:
            raise DataError(f"{prefix}.bin: crc32: expected {facts.crc32} ({prefix}.json), found {found}; "
                            "preprocess the text again")
        if vocab_size is None and corpus.tokenizer:
            vocab_size = corpus.tokenizer.vocab_size
    lowest, highest = corpus.scan_id_range()
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        corpus.raise_for_invalid_token(highest + 1 if vocab_size is None else vocab_size)
    if facts and highest != facts.max_token:
        raise DataError(f"{prefix}.json: max_token: expected {highest} (the tokens), found {facts.max_token}")
    made_by = f"{corpus.tokenizer.name} {corpus.tokenizer.fingerprint}" if corpus.tokenizer else "unknown"
    return (f"{prefix}: {corpus.num_documents} documents, {corpus.num_tokens} tokens ({corpus.dtype.name}), "
            f"ids {lowest} to {highest} of {vocab_size or 'an unknown vocabulary'}, tokenizer {made_by}, "
            f"checksum {facts.crc32 if facts else 'unknown'}: good")


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.verify", "Check the index, the checksum and every token id of a corpus.")
    parser.add_argument("prefix")
    parser.add_argument("--vocab-size", type=positive, metavar="N", help="default: what the corpus says of itself")
    args = parser.parse_args(argv)
    print(verify_corpus(args.prefix, args.vocab_size))


if __name__ == "__main__":
    run_command(main)
