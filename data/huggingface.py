"""Datasets of the Hugging Face `datasets` library as text: the source `hf:NAME:CONFIG/SPLIT`.

NAME is a folder that `save_to_disk` wrote, a folder of Parquet, JSONL or other files that `load_dataset` reads, or a
dataset of the hub. Rows are streamed, and become lines of JSON with the text column alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from data.input_files import DATASET_PREFIX
from data.storage import DataError, ResumableError
from data.text_files import Chunk

BATCH_ROWS = 100


def check_datasets_package(source: str) -> None:
    if find_spec("datasets") is None:
        raise DataError(f"{source}: needs the package datasets: pip install datasets (the extra [datasets])")


class HuggingFaceDataset(os.PathLike[str]):
    """One split of a dataset; its path is the source. `fingerprint` changes with the content; the cache is beside
    `local_name`."""

    def __init__(self, source: str) -> None:
        check_datasets_package(source)
        import datasets

        self._source = source
        name, _, part = source.removeprefix(DATASET_PREFIX).partition(":")
        name = os.path.abspath(name) if os.path.isdir(name) else name  # a folder `json` is not the reader `json`
        self.local_name = os.path.abspath(name if os.path.isdir(name) else os.path.basename(name))
        config, _, split = part.partition("/")
        split = split or "train"
        is_saved = os.path.exists(f"{name}/state.json") or os.path.exists(f"{name}/dataset_dict.json")
        try:
            builder = None if is_saved else datasets.load_dataset_builder(name, config or None)
            # load_dataset(streaming=True) returns the same rows, but no fingerprint. Saved rows are memory-mapped.
            splits = builder.as_streaming_dataset() if builder else datasets.load_from_disk(name)
            splits = splits if isinstance(splits, dict) else {"train": splits}
            if split not in splits or (is_saved and config):
                found = ", ".join(f":{config if builder else ''}/{one}" for one in splits)
                raise ValueError(f"expected {found}, found :{part or f'/{split}'} (:CONFIG/SPLIT)")
            self._rows: Any = splits[split]
            self.fingerprint = str(builder.hash if builder else self._rows._fingerprint)
        except Exception as error:  # of many kinds: of the hub, of files, of metadata
            raise DataError(f"{source}: cannot load the dataset: {error or type(error).__name__}") from error

    def __fspath__(self) -> str:
        return self._source

    def read_chunks(self, key: str) -> Iterator[Chunk]:
        """The text column, a line of JSON per row, `BATCH_ROWS` in a chunk."""
        columns = self._rows.column_names
        if columns and key not in columns:
            raise DataError(f"{self._source}: no column {key!r}; found {', '.join(columns)} (see --json-key)")
        offset = lines = 0
        try:
            for batch in self._rows.select_columns([key]).iter(batch_size=BATCH_ROWS):
                data = "".join(json.dumps({key: text}, ensure_ascii=False) + "\n" for text in batch[key]).encode()
                yield Chunk(self._source, offset, len(data), data, lines)
                offset, lines = offset + len(data), lines + len(batch[key])
        except Exception as error:
            raise ResumableError(f"{self._source}: cannot read the dataset: {error or type(error).__name__}") from error
