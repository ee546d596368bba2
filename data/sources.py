"""`open_datasets`: from the values of `--train-data`, `--valid-data` and `--test-data` to blended datasets.

A source is the prefix of a corpus, a text file or folder, a `.bin` file of nanoGPT or llm.c, `hf:` and a dataset, or
`default` or `webtext`. Sources that are not a corpus are converted once and kept in `--data-cache-path` (or
`SOURCE.cache/`), under a digest of paths, sizes, times, tokenizer and read options; one process builds, the others
wait. Several sources are blended by weight or size; a mixture file lists them (`data.mix`). `--split` cuts every
training source by documents.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import NamedTuple

from data.cli import format_count
from data.default_corpus import DEFAULT_FOLDER
from data.gpt2_dataset import BlendedDataset, Dataset, GPT2Dataset, MockDataset, count_samples
from data.importers import import_tokens
from data.indexed import IndexedCorpus
from data.input_files import KIND_OF_SUFFIX, InputFiles, find_text_files, kind_of
from data.preprocess import TextReadOptions, build_corpus
from data.sampling import PARTS, integer_weights, parse_number, parse_split, split_documents
from data.storage import (DataError, UsageError, change_detector, check_is_file, check_is_rereadable, content_digest,
                          escape_to_one_line, file_stamp, make_folder, prefix_data_errors, prefix_storage_errors,
                          read_flag_text, wait_for_lock)
from data.text_files import DATASET_PREFIX, HuggingFaceDataset, Separator, check_datasets_package
from data.tokenizer import Tokenizer


class Source(NamedTuple):
    """A source of a blend."""

    name: str
    weight: Fraction | None = None  # None: in proportion to its size
    max_epochs: Fraction | None = None  # how often a run may read it; None: any number


MIXTURE_SUFFIXES = (".yaml", ".yml")


def parse_sources(words: Sequence[str], flag: str) -> list[Source]:
    """The sources in `weight name weight name ...`, in names only, or in a mixture file."""
    if len(words) == 1 and words[0].endswith(MIXTURE_SUFFIXES):
        return _read_mixture(words[0], flag)
    weights = [parse_number(word) for word in words[::2]]
    if len(words) < 2 or not any(weight is not None for weight in weights):
        return [Source(word) for word in words]
    for word, weight in zip(words[::2], weights):
        if weight is not None and _source_exists(word):
            raise DataError(f"{flag} {' '.join(words)}: {word} is a weight here, but something of this name is there; "
                            f"write ./{word} for what is there, or +{word} for the weight")
    if len(words) % 2 or not all(weight is not None and weight > 0 for weight in weights):
        raise DataError(f"{flag} {' '.join(words)}: expected weight and name in turn, every weight greater than 0")
    return list(map(Source, words[1::2], weights))


def _read_mixture(path: str, flag: str) -> list[Source]:
    import yaml  # here, since only this needs the package

    try:
        content = yaml.safe_load(read_flag_text(path, flag))
        rows = content.pop("sources")
        if content:
            raise ValueError(f"unknown: {', '.join(map(str, content))}")
        sources = [Source(str(row["name"]), **{key: positive_number(row[key]) for key in row.keys() - {"name"}})
                   for row in rows]
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{flag} {path}: expected `sources:` and a list of objects with a name and, if wanted, weight "
                        f"and max_epochs, numbers above 0: {' '.join(str(error).split())}") from error
    if len({source.weight is None for source in sources}) != 1:
        raise DataError(f"{flag} {path}: expected sources, of which all have a weight or none has")
    return sources


def positive_number(text: object) -> Fraction:
    """A number such as 0.5 or 1e9; raises ValueError."""
    value = parse_number(str(text))
    if value is None or value <= 0:
        raise ValueError(f"{text!r} is no number above 0")
    return value


def samples_per_source(sources: Sequence[Source], sizes: Sequence[int], samples: int) -> list[Fraction]:
    """How many of the first `samples` of a blend come from each source, to within one; `sizes` are in samples."""
    counts = integer_weights([source.weight or size for source, size in zip(sources, sizes, strict=True)])
    return [Fraction(samples * count, sum(counts)) for count in counts]


def check_epochs(sources: Sequence[Source], sizes: Sequence[int], samples: int, seq_length: int) -> None:
    """Raise if the first `samples` of a blend read a source more often than it allows."""
    for source, size, own in zip(sources, sizes, samples_per_source(sources, sizes, samples), strict=True):
        if source.max_epochs is not None and own > source.max_epochs * size:
            most = int(source.max_epochs * size * samples / own)
            raise DataError(f"{source.name}: {samples * seq_length:,} tokens of the blend read it "
                            f"{ceil(100 * own / size) / 100:.2f} times, max_epochs is {float(source.max_epochs):g}; "
                            f"read at most {most * seq_length:,} tokens ({most:,} samples), or change its weight or "
                            "max_epochs")


def check_sources(words: Sequence[str], flag: str) -> None:
    """Raise for a name that does not exist. Opens no file."""
    for name, *_ in parse_sources(words, flag):
        with prefix_data_errors(flag):
            if name in NAMED_CORPORA:
                named_corpus(name)
            elif name.startswith(DATASET_PREFIX):
                check_datasets_package(name)
            elif not _source_exists(name):
                raise DataError(f"{flag} {name}: no file or folder of this name; give a text file, a folder of "
                                "them, or the PREFIX of a corpus (PREFIX.bin and PREFIX.idx)")
            elif not os.path.lexists(f"{name}.idx"):
                check_is_rereadable(name)


def _source_exists(name: str) -> bool:
    return any(os.path.lexists(path) for path in (name, f"{name}.idx", f"{name}.bin"))


NAMED_CORPORA = ("default", "webtext")


def named_corpus(name: str) -> str:
    """The prefix of one of NAMED_CORPORA; raises DataError if it is not built."""
    if name == "default":
        title, prefix = "default corpus", str(DEFAULT_FOLDER / "corpus")
        remedy = "build it (5 seconds, no download): python -m data.default_corpus"
    else:
        title, built = name, Path(__file__).resolve().parent / "webtext" / "corpus"
        prefix = os.environ.get("WEBTEXT_PREFIX") or str(built)
        remedy = "set WEBTEXT_PREFIX, or build it: bash scripts/preprocess_webtext.sh"
    if not os.path.exists(f"{prefix}.idx"):
        raise DataError(f"{title}: {prefix}.idx is missing; {remedy}")
    return prefix


CACHE_SUFFIX = ".cache"  # of the folder beside a source that keeps its corpus
TOKENS_SUFFIX = ".bin"
ANNOUNCED_BYTES = 1 << 26  # bytes of a source from which a line announces the build


def cached_corpus(source: str, tokenizer: Tokenizer, options: TextReadOptions, cache_path: str | None
                  ) -> tuple[str, str]:
    """(prefix of the corpus of a source, summary). Builds it if it is not cached."""
    dataset = HuggingFaceDataset(source) if source.startswith(DATASET_PREFIX) else None
    found = InputFiles() if dataset else find_text_files([source])
    are_tokens = not dataset and found.files[0].endswith(TOKENS_SUFFIX)  # of nanoGPT or llm.c
    beside = dataset.local_name if dataset else os.path.abspath(source)
    folder = make_folder(cache_path or beside + CACHE_SUFFIX)
    check_unchanged = change_detector(found.files)
    for path in found.files:
        check_is_file(path)
    size = sum(map(os.path.getsize, found.files))
    contents = [source, dataset.fingerprint] if dataset else [
        f"{os.path.abspath(path)} {file_stamp(path)}" for path in found.files]
    key = content_digest(map(os.fsencode, (*contents, tokenizer.fingerprint, *options.digest_parts)))
    prefix = folder / f"{Path(beside).name.split('.')[0] or 'text'}-{key}"
    start, outcome = time.monotonic(), "found in the cache"
    with wait_for_lock(folder / f".{prefix.name}.lock"):
        if not prefix.with_name(prefix.name + ".idx").exists():
            if dataset or size >= ANNOUNCED_BYTES:
                what = f"{'copying' if are_tokens else 'tokenizing'}{f' {size / 1e9:.2f} GB' if size else ''}"
                print(escape_to_one_line(f"{source}: {what} into {prefix} (once)"), file=sys.stderr, flush=True)
            check_unchanged()  # since the key was made; each build checks the time from here on
            if are_tokens:
                import_tokens(found.files, prefix, tokenizer)
            else:
                build_corpus([dataset] if dataset else found.files, prefix, tokenizer, options)
            outcome = f"{'copied' if are_tokens else 'tokenized'} in {time.monotonic() - start:.1f} s"
    corpus, empty = IndexedCorpus(prefix), sum(os.path.getsize(path) == 0 for path in found.files)
    files = "dataset" if dataset else format_count(len(found.files), "file of tokens" if are_tokens else "file")
    summary = (f"{source}: {files}{f' ({empty} empty)' if empty else ''}, "
               f"{format_count(corpus.num_documents, 'document')}, {corpus.num_tokens:,} tokens, {outcome}: "
               f"{corpus.prefix}{f'; {found.left_out}' if found.left_out else ''}")
    return str(prefix), summary


@dataclass(frozen=True)
class Datasets:
    """One dataset per split; None if there is no data for it."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...] = ()  # notes for the user: what text files were converted to, why a split is empty

    @property
    def fingerprint(self) -> str:
        """Equal on two ranks exactly if they read the same samples."""
        return content_digest(
            (part.fingerprint if part else "none").encode() for part in (self.train, self.valid, self.test))


def open_datasets(*, train_data: Sequence[str], valid_data: Sequence[str] = (), test_data: Sequence[str] = (),
                  split: str = "949,50,1", seq_length: int, seed: int, tokenizer: Tokenizer,
                  cache_path: str | None = None, mock: bool = False, json_key: str = "text",
                  document_separator: str | None = None, train_samples: int = 0) -> Datasets:
    """Open and check everything that training reads, before its first step; `train_samples` is how many samples."""
    if mock:
        train, valid, test = (MockDataset(tokenizer.vocab_size, seq_length, seed + k, part)
                              for k, part in enumerate(PARTS))
        return Datasets(train, valid, test)
    read_options = TextReadOptions(json_key, Separator.parse(document_separator))
    words_of = dict(zip(PARTS, (train_data, valid_data, test_data)))
    for part, words in words_of.items():
        check_sources(words, f"--{part}-data")  # all of them, before the first conversion
    # --split cuts the sources of --train-data; a source of --valid-data or --test-data is of that part alone.
    shares = dict(zip(PARTS, parse_split(split)))
    split_parts = [part for part in PARTS if shares[part] and (part == "train" or not words_of[part])]
    if train_data and not split_parts:
        raise UsageError(f"--split {split}: the share for training is 0, and each other part has share 0 or data of "
                         "its own, so nothing reads --train-data: expected a first number above 0")
    notes: list[str] = []
    corpora: dict[str, IndexedCorpus] = {}
    datasets: dict[str, Dataset | None] = {}
    for place, part in enumerate(PARTS):
        is_cut = part == "train" or not words_of[part]
        words, flag = (train_data, "--train-data") if is_cut else (words_of[part], f"--{part}-data")
        pieces, weights = list[GPT2Dataset](), list[Fraction]()
        sources = parse_sources(words, flag) if not is_cut or part in split_parts else []
        for name, weight, _ in sources:
            if name not in corpora:
                corpora[name] = _open_source(name, flag, tokenizer, read_options, cache_path, notes)
            corpus = corpora[name]
            documents = range(corpus.num_documents)
            if is_cut:
                cuts = split_documents([shares[one] for one in split_parts], len(documents))
                documents = cuts[split_parts.index(part)]
                if part != "train" and (why := _too_small(corpus, documents, name, part, seq_length)):
                    notes.append(f"{part}: --split {split} {why}")
                    continue
            # Distinct seeds: corpora of equal sizes must not be shuffled alike, nor evaluation like training.
            dataset = GPT2Dataset(corpus, documents, seq_length, seed + place + len(PARTS) * len(pieces), part,
                                  tokenizer.vocab_size, flag)
            pieces.append(dataset)
            weights.append(weight or Fraction(dataset.samples_per_epoch))
        if pieces and part == "train":
            with prefix_data_errors(flag):
                check_epochs(sources, [piece.samples_per_epoch for piece in pieces], train_samples, seq_length)
        datasets[part] = BlendedDataset(pieces, weights, part) if len(pieces) > 1 else next(iter(pieces), None)
    return Datasets(**datasets, notes=tuple(notes))


def _open_source(name: str, flag: str, tokenizer: Tokenizer, read_options: TextReadOptions, cache_path: str | None,
                 notes: list[str]) -> IndexedCorpus:
    """The corpus that a name stands for, checked against the tokenizer; converts text and token files, with notes."""
    with prefix_data_errors(flag):
        prefix = named_corpus(name) if name in NAMED_CORPORA else name
        if prefix.endswith(TOKENS_SUFFIX) and os.path.exists(prefix.removesuffix(TOKENS_SUFFIX) + ".idx"):
            prefix = prefix.removesuffix(TOKENS_SUFFIX)
        if not os.path.exists(f"{prefix}.idx"):
            if os.path.isdir(name) or name.endswith(TOKENS_SUFFIX) or kind_of(name):
                with prefix_storage_errors("--data-cache-path" if cache_path else f"the cache beside {name}, which a "
                                           "folder given with --data-cache-path replaces"):
                    prefix, summary = cached_corpus(name, tokenizer, read_options, cache_path)
                notes.append(summary)
            elif os.path.isfile(name):
                raise DataError(f"{name}: its name does not say what it holds; expected the prefix of a corpus, a "
                                f"folder, or a file that ends in {' '.join(KIND_OF_SUFFIX)} or {TOKENS_SUFFIX}")
        corpus = IndexedCorpus(prefix)
        made_by = corpus.tokenizer
        if made_by and made_by.fingerprint != tokenizer.fingerprint:
            raise DataError(f"{corpus.prefix}: made with {made_by.description}, but this run uses "
                            f"{tokenizer.facts.description}; change --tokenizer-type and its files, or preprocess the "
                            "text again")
        corpus.check_vocabulary(tokenizer.vocab_size)
    return corpus


def _too_small(corpus: IndexedCorpus, documents: range, source: str, part: str, seq_length: int) -> str:
    """Why the documents that --split leaves for a part are not used, and what to do; "" if they fill a sample."""
    tokens = corpus.first_token(documents.stop) - corpus.first_token(documents.start)
    if count_samples(tokens, seq_length):
        return ""
    if corpus.num_documents == 1 and not documents:
        return (f"divides between documents, and {source} is a single one: not used; give --{part}-data FILE, or "
                "--document-separator blank-line, which makes a document of each paragraph")
    return (f"leaves {len(documents)} of the {format_count(corpus.num_documents, 'document')} of {source}, "
            f"{format_count(tokens, 'token')}, and a sample needs {seq_length + 1}: not used; give --{part}-data, or a "
            "larger share in --split")
