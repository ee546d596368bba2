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

from data.draft import files_of
from data.facts import read_facts
from data.lock import alone
from data.preprocess import build_corpus
from data.storage import DataError, check_not_over, make_folder, write_json_atomic, writing
from data.tokenizer import Tokenizer
from data.webtext.flags import ORDER
from data.webtext.folder import check_apart
from data.webtext.inputs import find, shards_of
from data.webtext.reading import Reading
from data.webtext.record import Record, make_key, read_json
from data.webtext.report import REPORTS, line, write_report
from data.webtext.runner import GlobalStage, MapStage, Work, run_global, run_map

PARTS = {"train": "", "valid": "_valid", "test": "_test"}
"""Folder of the split to what the prefix gets."""


@dataclass(frozen=True)
class Plan:
    """What `run` is to do."""

    stages: tuple[MapStage | GlobalStage, ...]
    tokenizer: Tokenizer
    prefix: Path


def check_outputs(files: Iterable[str], output: Path, prefix: Path) -> None:
    """None of these files is one that a run writes, beside its folders of stages."""
    corpora = [prefix.with_name(prefix.name + suffix) for suffix in PARTS.values()]
    outputs = [os.fspath(output / name) for name in REPORTS]
    for corpus in corpora:
        outputs += [*files_of(corpus), os.fspath(marker_of(corpus))]
    check_not_over(files, outputs, "choose another --output and --output-prefix")


def run(raw: Sequence[str], output: Path, plan: Plan, reading: Reading, work: Work) -> list[Record]:
    """Bring every stage to its end; the records of all."""
    sources, _ = find(raw, reading.format)
    others = [path for stage in plan.stages if isinstance(stage, MapStage) for path in stage.files]
    check_outputs([*(source.path for source in sources), *others], output, plan.prefix)
    for stage in plan.stages:
        check_apart([*raw, *(source.path for source in sources), *others], folder_of(stage, output))
    records: list[Record] = []
    inputs: list[str | Path] = list(raw)
    # Later stages read what we wrote; a line of it is longer than its text, by its escapes.
    later = Reading(on_error=reading.on_error, max_bytes=8 * reading.max_bytes)
    for stage in plan.stages:
        folder = folder_of(stage, make_folder(output))
        record = run_stage(stage, inputs, folder, later if records else reading, work)
        assert record, "a whole run is not a share"
        print(line(record), file=sys.stderr, flush=True)
        records.append(record)
        if not record.counts.documents_kept:
            raise DataError(f"{folder}: no document is left, see above")
        inputs = [folder]
    last = Path(inputs[0])
    corpora = [tokens for part, suffix in PARTS.items()
               if (tokens := tokenise(last, part, plan.prefix.with_name(plan.prefix.name + suffix), plan.tokenizer,
                                      work.workers))]
    write_report(output, records, corpora)
    return records


def folder_of(stage: MapStage | GlobalStage, output: Path) -> Path:
    return output / f"{ORDER.index(stage.name) + 1}-{stage.name}"


def run_stage(stage: MapStage | GlobalStage, inputs: Sequence[str | Path], folder: Path, reading: Reading, work: Work
              ) -> Record | None:
    """Either kind of stage."""
    if isinstance(stage, MapStage):
        return run_map(stage, inputs, folder, reading, work)
    return run_global(stage, inputs, folder, work)


def tokenise(stage: Path, part: str, prefix: Path, tokenizer: Tokenizer, workers: int) -> dict[str, Any] | None:
    """Make the corpus of one part, unless it is there; what it holds. None: the part has no documents.

    Without a split, everything is for training.
    """
    every = shards_of(stage)
    named = [shard for shard in every if shard.name.startswith(f"{part}/")]
    shards = every if part == "train" and not any("/" in shard.name for shard in every) else named
    if not shards:
        remove_corpus(prefix)
        return None
    made_from = marker_of(prefix)
    key = make_key("tokens", {"tokenizer": tokenizer.fingerprint}, [{"sha256": shard.sha256} for shard in shards])
    facts, said = read_facts(f"{prefix}.json"), read_json(made_from)
    if facts is None or said not in (key | {"identity": facts.identity}, key):  # an earlier version wrote the key alone
        remove_corpus(prefix)
        build_corpus([shard.path for shard in shards], prefix, tokenizer, workers=workers)
        facts = read_facts(f"{prefix}.json")
        if facts is None:
            raise DataError(f"{prefix}.json: is gone as soon as it was written; give every run a prefix of its own")
        write_json_atomic(made_from, key | {"identity": facts.identity})
    return {"name": prefix.name, "documents": facts.documents, "tokens": facts.tokens, "tokenizer": tokenizer.name}


def marker_of(prefix: Path) -> Path:
    """What a corpus of ours was made from, and which one that was; written after it."""
    return prefix.with_name(f"{prefix.name}.made_from.json")


def remove_corpus(prefix: Path) -> None:
    """If it is one that an earlier run made."""
    if marker_of(prefix).exists():
        with alone(prefix), writing(prefix):
            for ending in (".idx", ".json", ".bin"):
                prefix.with_name(prefix.name + ending).unlink(missing_ok=True)
            marker_of(prefix).unlink()
