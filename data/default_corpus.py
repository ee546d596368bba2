"""The default corpus: Jane Austen's six novels, which are in the public domain, as 2,169 scenes.

`python -m data.default_corpus --output-dir DIR` needs no network. It leaves in DIR

    corpus.jsonl             one scene a line, about 1,900 characters, in the order of their hash
    tokenizer.model          SentencePiece trained on it
    corpus.bin, .idx, .json  the same documents as token ids
    source.json              what it was made from; written last, so its presence means complete

4 MB of plain English prose, enough for a small model to learn to write sentences in minutes. The text is Project
Gutenberg's as the R package janeaustenr has it; headings and marks of italics are removed, the lines of a paragraph
joined, and chapters cut between paragraphs.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

from data.cli import StrictArgumentParser, positive, run_command
from data.preprocess import build_corpus
from data.storage import DataError, make_folder, read_json_or_none, staged_file, wait_for_lock, write_json_atomic
from data.tokenizer import SentencePieceTokenizer, train_sentencepiece

_ROOT = Path(__file__).resolve().parent.parent
# In the repository; an installed package uses the current folder, as for its runs.
DEFAULT_FOLDER = (_ROOT if (_ROOT / "setup.cfg").exists() else Path()) / ".cache" / "default-corpus"

NOVELS = Path(__file__).with_name("austen.jsonl.xz")
SHA256 = "102daa47577613858292b0b367955af301180b4a883a5e54f742c6da32455153"  # of the text
VOCAB_SIZE = 8192


def read_novels() -> list[str]:
    raw = lzma.decompress(NOVELS.read_bytes())
    if hashlib.sha256(raw).hexdigest() != SHA256:
        raise DataError(f"{NOVELS}: the text is not the shipped one; install the program again")
    return [json.loads(line)["text"] for line in raw.splitlines()]


def build_default_corpus(folder: str | Path = DEFAULT_FOLDER, vocab_size: int = VOCAB_SIZE, workers: int = 2) -> Path:
    """Build the corpus unless it exists; returns its prefix."""
    folder = make_folder(folder)
    source = {"sha256": SHA256, "vocab_size": vocab_size}  # what the files depend on
    names = ("corpus.jsonl", "tokenizer.model", "corpus.bin", "corpus.idx", "corpus.json")
    with wait_for_lock(folder / ".lock"):
        is_complete = (read_json_or_none(folder / "source.json") == source
                       and all((folder / name).is_file() for name in names))
        if not is_complete:
            (folder / "source.json").unlink(missing_ok=True)
            texts = read_novels()
            print(f"default corpus: Jane Austen's novels, {len(texts)} scenes, {sum(map(len, texts)) / 1e6:.1f} MB",
                  file=sys.stderr)
            with staged_file(folder / "corpus.jsonl", "w") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            # Training sentences are paragraphs with their line ends, so that newline tokens are learnt.
            paragraphs = (f"{part}\n\n" for text in texts for part in text.split("\n\n"))
            train_sentencepiece(paragraphs, folder / "tokenizer.model", vocab_size)
            tokenizer = SentencePieceTokenizer(str(folder / "tokenizer.model"))
            build_corpus([folder / "corpus.jsonl"], folder / "corpus", tokenizer, workers=workers)
            write_json_atomic(folder / "source.json", source)
    return folder / "corpus"


def main(argv: Sequence[str] | None = None) -> None:
    parser = StrictArgumentParser("data.default_corpus", "Build the default corpus from Jane Austen's novels.")
    parser.add_argument("--output-dir", default=str(DEFAULT_FOLDER), metavar="DIR")
    parser.add_argument("--vocab-size", type=positive, default=VOCAB_SIZE, metavar="N")
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="processes; same output")
    args = parser.parse_args(argv)
    print(build_default_corpus(args.output_dir, args.vocab_size, workers=args.workers))


if __name__ == "__main__":
    run_command(main)
