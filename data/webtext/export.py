"""`export`: the documents of a stage in a format for others, one file a shard, in a folder or an object store."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from data.compressed import ZSTD
from data.input_files import check_sha256
from data.parallel import ordered_map
from data.storage import DataError, UsageError, file_system_of, is_url, make_folder, staged_file
from data.webtext.documents import parse_shard_line
from data.webtext.readers import shards_of_stage
from data.webtext.runner import check_output_is_apart

FORMATS = ("parquet", "jsonl.zst", "jsonl.gz")
PARQUET_ROWS = 1000  # in a row group, which is in memory
COPY_BYTES = 1 << 20


def export_stage(folder: Path, output: str, to: str, workers: int) -> str:
    """Write `output`/part-00000.parquet and so on; returns a line of what was written. Names of parts (train) stay."""
    shards = shards_of_stage(folder)
    check_sha256({shard.path: shard.sha256 for shard in shards})
    if not is_url(output):
        check_output_is_apart([folder], Path(output))
        if [*Path(output).glob(f"**/part-*.{to}")]:
            raise UsageError(f"--output {output}: it has files of an export already; remove it, or choose another")
    tasks = [(shard.path, f"{output.rstrip('/')}/{shard.name.removesuffix('jsonl')}{to}") for shard in shards]
    for _ in ordered_map(partial(export_shard, to=to), tasks, min(workers, len(tasks))):
        pass
    return f"export: {len(shards)} files in {output}"


def export_shard(task: tuple[str, str], to: str) -> None:
    path, target = task
    with open_output(target) as file:
        if to == "parquet":
            _write_parquet(path, file)
            return
        if to == "jsonl.zst" and ZSTD is None:
            raise DataError("export: writing .zst needs a package: pip install backports.zstd")
        # a gzip member holds its time otherwise, and the same documents would be other bytes
        compressed = ZSTD.open(file, "wb") if to == "jsonl.zst" else gzip.GzipFile("", "wb", 6, file, mtime=0)
        with compressed, open(path, "rb") as lines:
            while block := lines.read(COPY_BYTES):
                compressed.write(block)


@contextmanager
def open_output(target: str) -> Iterator[Any]:
    """A file that appears when it is complete, and not after an error."""
    if not is_url(target):
        make_folder(Path(target).parent)
        with staged_file(target) as file:
            yield file
        return
    system, path = file_system_of(target)
    with system.transaction, system.open(path, "wb") as file:
        yield file


def _write_parquet(path: str, file: Any) -> None:
    """Columns text, url and meta; the last is JSON, since documents have different keys."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("export: writing Parquet needs a package: pip install pyarrow") from error
    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("text", "url", "meta")])
    with parquet.ParquetWriter(file, schema) as writer:
        for rows in _rows(path):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _rows(path: str) -> Iterator[list[dict[str, str | None]]]:
    rows: list[dict[str, str | None]] = []
    with open(path, "rb") as lines:
        for line in lines:
            document = parse_shard_line(line, path)
            meta = json.dumps(document.meta, ensure_ascii=False) if document.meta else None
            rows.append({"text": document.text, "url": document.url, "meta": meta})
            if len(rows) == PARQUET_ROWS:
                yield rows
                rows = []
    yield rows
