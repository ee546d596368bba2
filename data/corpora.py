"""From what the user names to datasets: `open_datasets`.

A *source* is one value of `--train-data`, `--valid-data` or `--test-data`: the prefix of a corpus; a file of text or a
folder of them (see `inputs`), or a `.bin` file of nanoGPT or llm.c, which are made into a corpus once (`cached`); or
one of the names `default` and `webtext`. Several sources are blended: with `weight source` pairs in those proportions,
without weights in proportion to their sizes. `--split` cuts every training source into three parts by documents;
`--valid-data` and `--test-data` replace a part, and then the training data keeps its share.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from data.cached import TOKENS_SUFFIX, cached_corpus
from data.cli import format_count
from data.gpt2_dataset import BlendedDataset, Dataset, GPT2Dataset, MockDataset
from data.indexed import IndexedCorpus
from data.inputs import KIND_OF_SUFFIX, kind_of
from data.plain_text import Separator
from data.preprocess import TextReadOptions
from data.sample_index import content_digest, count_samples
from data.sampling import parse_split, split_documents
from data.sources import NAMED_CORPORA, check_sources, parse_sources
from data.storage import DataError, prefix_data_errors, prefix_storage_errors
from data.tokenizer import Tokenizer

PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Datasets:
    """One dataset per part; None where there is no data for it."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...] = ()
    """What the user should know: what files of text were made into, why a part of the split is empty."""

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly when they will read the same samples."""
        return content_digest(
            (part.fingerprint if part else "none").encode() for part in (self.train, self.valid, self.test))


def open_datasets(*, train_data: Sequence[str], valid_data: Sequence[str] = (), test_data: Sequence[str] = (),
                  split: str = "949,50,1", seq_length: int, seed: int, tokenizer: Tokenizer,
                  cache_path: str | None = None, mock: bool = False, append_eod: bool = True,
                  json_key: str = "text", document_separator: str | None = None) -> Datasets:
    """Open, check and cut everything that training will read, before its first step."""
    if mock:
        train, valid, test = (MockDataset(tokenizer.vocab_size, seq_length, seed + k, part)
                              for k, part in enumerate(PARTS))
        return Datasets(train, valid, test)
    read_options = TextReadOptions(json_key, Separator.parse(document_separator), append_eod)
    builder = _DatasetBuilder(seq_length, seed, tokenizer, cache_path, read_options, split)
    for flag, words in (("--train-data", train_data), ("--valid-data", valid_data), ("--test-data", test_data)):
        check_sources(words, flag)  # all of them, before the first is made into a corpus
    shares = dict(zip(PARTS, parse_split(split)))
    replaced = {part: words for part, words in (("valid", valid_data), ("test", test_data)) if words}
    split_parts = [part for part in PARTS if part not in replaced and shares[part] > 0]
    ranges_of_part: dict[str, list[DocumentRange]] = {part: [] for part in PARTS}
    for source in parse_sources(train_data, "--train-data"):
        corpus = builder.open_corpus(source.name, "--train-data")
        ranges = split_documents([shares[part] for part in split_parts], corpus.num_documents)
        for part, documents in zip(split_parts, ranges):
            ranges_of_part[part].append(DocumentRange(source.name, corpus, documents, source.weight))
    for part, words in replaced.items():
        for source in parse_sources(words, f"--{part}-data"):
            corpus = builder.open_corpus(source.name, f"--{part}-data")
            ranges_of_part[part].append(DocumentRange(source.name, corpus, range(corpus.num_documents), source.weight,
                                                      f"--{part}-data"))
    # What the user named must be usable; a part that the split left too small is merely absent, with a note.
    datasets = {part: builder.build_dataset(part, ranges_of_part[part], required=part == "train" or part in replaced)
                for part in PARTS}
    return Datasets(datasets["train"], datasets["valid"], datasets["test"], tuple(builder.notes))


@dataclass(frozen=True)
class DocumentRange:
    """Some documents of a source."""

    source: str
    corpus: IndexedCorpus
    documents: range
    weight: Fraction | None
    flag: str = "--train-data"

    def count_tokens(self) -> int:
        return int(self.corpus.sizes[self.documents.start:self.documents.stop].sum(dtype="int64"))


@dataclass
class _DatasetBuilder:
    """What all sources of one run have in common."""

    seq_length: int
    seed: int
    tokenizer: Tokenizer
    cache_path: str | None
    read_options: TextReadOptions
    split: str
    notes: list[str] = field(default_factory=list)
    open_corpora: dict[str, IndexedCorpus] = field(default_factory=dict)

    def open_corpus(self, name: str, flag: str) -> IndexedCorpus:
        """The corpus of a source, checked against the tokenizer."""
        with prefix_data_errors(flag):
            return self._open_corpus(name)

    def _open_corpus(self, name: str) -> IndexedCorpus:
        if name not in self.open_corpora:
            corpus = IndexedCorpus(self.resolve_prefix(name))
            made_by = corpus.facts and corpus.facts.tokenizer
            if made_by and made_by.fingerprint != self.tokenizer.fingerprint:
                raise DataError(
                    f"{corpus.prefix}: made with {made_by.description}, but this run uses "
                    f"{self.tokenizer.facts.description}; change --tokenizer-type and its files, or preprocess the text "
                    "again")
            corpus.check_vocabulary(self.tokenizer.vocab_size)
            self.open_corpora[name] = corpus
        return self.open_corpora[name]

    def resolve_prefix(self, name: str) -> str:
        """The corpus that a name stands for."""
        if name in NAMED_CORPORA:
            return NAMED_CORPORA[name]()
        if name.endswith(TOKENS_SUFFIX) and os.path.exists(name.removesuffix(TOKENS_SUFFIX) + ".idx"):
            return name.removesuffix(TOKENS_SUFFIX)
        if os.path.exists(f"{name}.idx"):
            return name
        if os.path.isdir(name) or name.endswith(TOKENS_SUFFIX) or kind_of(name):
            with prefix_storage_errors(
                    "--data-cache-path" if self.cache_path else f"the cache beside {name}, which a folder given "
                    "with --data-cache-path replaces"):
                prefix, notes = cached_corpus(name, self.tokenizer, self.read_options, self.cache_path)
            self.notes += notes
            return prefix
        if os.path.isfile(name):
            raise DataError(f"{name}: its name does not say what it holds; expected the prefix of a corpus, a folder, "
                            f"or a file that ends in {' '.join(KIND_OF_SUFFIX)} or {TOKENS_SUFFIX}")
        return name

    def build_dataset(self, part: str, ranges: Sequence[DocumentRange], *, required: bool) -> Dataset | None:
        """The pieces of one part, blended."""
        if not required:
            ranges = [piece for piece in ranges if self.fills_a_sample(part, piece)]
        if not ranges:
            return None
        # Two corpora of equal sizes must not be shuffled alike, and evaluation must not follow training.
        seeds = [self.seed + PARTS.index(part) + len(PARTS) * k for k in range(len(ranges))]
        datasets = [GPT2Dataset(piece.corpus, piece.documents, self.seq_length, seed, part, self.cache_path,
                                self.tokenizer.vocab_size, piece.flag) for piece, seed in zip(ranges, seeds)]
        if len(datasets) == 1:
            return datasets[0]
        weights = [piece.weight or Fraction(dataset.samples_per_epoch) for piece, dataset in zip(ranges, datasets)]
        return BlendedDataset(datasets, weights, part)

    def fills_a_sample(self, part: str, documents: DocumentRange) -> bool:
        tokens = documents.count_tokens()
        enough = count_samples(tokens, self.seq_length) > 0
        if not enough:
            total, kept = documents.corpus.num_documents, len(documents.documents)
            why = (
                f"leaves {kept} of the {format_count(total, 'document')} of {documents.source}, {format_count(tokens, 'token')}, "
                f"and a sample needs {self.seq_length + 1}")
            remedy = "a larger share in --split"
            if total == 1 and not kept:
                why = f"cuts between documents, and {documents.source} is a single one"
                remedy = "a --document-separator"
            self.notes.append(f"{part}: --split {self.split} {why}: not used; give --{part}-data, or {remedy}")
        return enough
