"""All stages in order, from raw files to a corpus of tokens: `python -m data.webtext run`.

Each stage has its folder, `1-urls`, `2-extract`, ...; a stage that is done is skipped, so a run goes on where it
stopped, and after a change of flags from the first stage they concern. Then each part of the split is tokenised:
PREFIX (training), PREFIX_valid and PREFIX_test, and the report is written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.draft import corpus_files
from data.facts import read_corpus_facts
from data.lock import hold_writer_lock
from data.preprocess import build_corpus
from data.storage import DataError, check_outputs_are_not_inputs, make_folder, write_errors_for, write_json_atomic
from data.tokenizer import Tokenizer
from data.webtext.flags import STAGE_ORDER
from data.webtext.folder import check_output_is_apart
from data.webtext.inputs import find_source_files, shards_of_stage
from data.webtext.reading import WebReadOptions
from data.webtext.record import StageRecord, read_json_or_none, stage_key
from data.webtext.report import REPORTS, summary_line, write_report
from data.webtext.runner import GlobalStage, MapStage, StageRunOptions, run_global_stage, run_map_stage

SUFFIX_OF_PART = {"train": "", "valid": "_valid", "test": "_test"}
"""Folder of the split to what the prefix gets."""


@dataclass(frozen=True)
class PipelinePlan:
    """What `run` is to do."""

    stages: tuple[MapStage | GlobalStage, ...]
    tokenizer: Tokenizer
    prefix: Path


def check_outputs(files: Iterable[str], output: Path, prefix: Path) -> None:
    """None of these files is one that a run writes, beside its folders of stages."""
    corpora = [prefix.with_name(prefix.name + suffix) for suffix in SUFFIX_OF_PART.values()]
    outputs = [os.fspath(output / name) for name in REPORTS]
    for corpus in corpora:
        outputs += [*corpus_files(corpus), os.fspath(origin_file_of(corpus))]
    check_outputs_are_not_inputs(files, outputs, "choose another --output and --output-prefix")


def run_pipeline(raw: Sequence[str], output: Path, plan: PipelinePlan, read_options: WebReadOptions,
                 run_options: StageRunOptions) -> list[StageRecord]:
    """Bring every stage to its end; the records of all."""
    sources, _ = find_source_files(raw, read_options.format)
    others = [path for stage in plan.stages if isinstance(stage, MapStage) for path in stage.files]
    check_outputs([*(source.path for source in sources), *others], output, plan.prefix)
    for stage in plan.stages:
        check_output_is_apart([*raw, *(source.path for source in sources), *others], stage_folder_path(stage, output))
    records: list[StageRecord] = []
    inputs: list[str | Path] = list(raw)
    # Later stages read what we wrote; a line of it is longer than its text, by its escapes.
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
    """Either kind of stage."""
    if isinstance(stage, MapStage):
        return run_map_stage(stage, inputs, folder, read_options, run_options)
    return run_global_stage(stage, inputs, folder, run_options)


def tokenize_part(stage: Path, part: str, prefix: Path, tokenizer: Tokenizer, workers: int) -> dict[str, Any] | None:
    """Make the corpus of one part, unless it is there; what it holds. None: the part has no documents.

    Without a split, everything is for training.
    """
    every = shards_of_stage(stage)
    named = [shard for shard in every if shard.name.startswith(f"{part}/")]
    shards = every if part == "train" and not any("/" in shard.name for shard in every) else named
    if not shards:
        remove_corpus(prefix)
        return None
    made_from = origin_file_of(prefix)
    key = stage_key("tokens", {"tokenizer": tokenizer.fingerprint}, [{"sha256": shard.sha256} for shard in shards])
    facts, recorded = read_corpus_facts(f"{prefix}.json"), read_json_or_none(made_from)
    if facts is None or recorded not in (key | {"identity": facts.identity},
                                         key):  # an earlier version wrote the key alone
        remove_corpus(prefix)
        build_corpus([shard.path for shard in shards], prefix, tokenizer, workers=workers)
        facts = read_corpus_facts(f"{prefix}.json")
        if facts is None:
            raise DataError(f"{prefix}.json: is gone as soon as it was written; give every run a prefix of its own")
        write_json_atomic(made_from, key | {"identity": facts.identity})
    return {"name": prefix.name, "documents": facts.documents, "tokens": facts.tokens, "tokenizer": tokenizer.name}


def origin_file_of(prefix: Path) -> Path:
    """What a corpus of ours was made from, and which one that was; written after it."""
    return prefix.with_name(f"{prefix.name}.made_from.json")


def remove_corpus(prefix: Path) -> None:
    """If it is one that an earlier run made."""
    if origin_file_of(prefix).exists():
        with hold_writer_lock(prefix), write_errors_for(prefix):
            for ending in (".idx", ".json", ".bin"):
                prefix.with_name(prefix.name + ending).unlink(missing_ok=True)
            origin_file_of(prefix).unlink()
