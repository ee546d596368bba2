"""`hf:NAME:CONFIG/SPLIT` is the text of its rows: the calls, the cache and the refusals with a stub of the `datasets`
package, and the folders it writes and reads with the real one, where it is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from data import text_files
from data.preprocess import build_corpus, main as preprocess_command
from data.sources import Datasets, check_sources, open_datasets
from data.storage import DataError
from tests.data.helpers import BYTE, documents_of, files_of

TEXTS = [f"document {i} \u00e9\n\"quoted\"" * (i % 7) for i in range(60)]


class Rows(list[dict[str, Any]]):
    """The part of the interface of a streamed dataset that is used."""

    fails_after = sys.maxsize  # rows

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    def select_columns(self, names: list[str]) -> Rows:
        self.selected = names
        return self

    def iter(self, batch_size: int) -> Iterator[dict[str, list[Any]]]:
        for at in range(0, len(self), batch_size):
            if at >= self.fails_after:
                raise ConnectionError("the hub is gone")
            yield {name: [row[name] for row in self[at:at + batch_size]] for name in self.selected}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A stub of `datasets` with one dataset in two splits, and the calls it saw."""
    rows = Rows({"text": text, "body": text.upper(), "image": b"\0"} for text in TEXTS)
    state = SimpleNamespace(revision="1", rows=rows, calls=[])

    def load_dataset_builder(*names: object) -> SimpleNamespace:
        if names[0] != "org/name.v2":
            raise FileNotFoundError(f"Dataset '{names[0]}'\ndoesn't exist on the Hub")
        state.calls.append(names)
        return SimpleNamespace(hash=state.revision, as_streaming_dataset=lambda: {
            "train": state.rows, "validation": Rows(state.rows[:9])})

    stub = ModuleType("datasets")
    stub.__spec__ = ModuleSpec("datasets", None)
    stub.load_dataset_builder = load_dataset_builder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", stub)
    monkeypatch.setattr(text_files, "BATCH_ROWS", 4)
    monkeypatch.chdir(tmp_path)
    return state


def opened(source: str, **settings: Any) -> Datasets:
    defaults = dict(train_data=[source], split="1", seq_length=9, seed=1, tokenizer=BYTE)
    return open_datasets(**(defaults | settings))


def of_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return opened(str(path)).fingerprint


def test_a_dataset_is_its_rows_and_is_tokenized_again_only_when_it_changes(hub, tmp_path: Path) -> None:
    first = opened("hf:org/name.v2")
    assert first.fingerprint == of_jsonl(tmp_path / "all.jsonl", TEXTS) and hub.calls == [("org/name.v2", None)]
    assert first.notes[0].startswith("hf:org/name.v2: dataset, 60 documents, ") and hub.rows.selected == ["text"]
    assert f"tokenized in 0.0 s: {tmp_path}/name.v2.cache/name-" in first.notes[0].replace("0.1 s", "0.0 s")
    assert "found in the cache" in opened("hf:org/name.v2").notes[0]
    part = opened("hf:org/name.v2:cfg/validation", cache_path="cache")
    assert hub.calls[-1] == ("org/name.v2", "cfg") and list((tmp_path / "cache").glob("name-*.idx"))
    assert part.fingerprint == opened("hf:org/name.v2:/validation").fingerprint == of_jsonl(
        tmp_path / "part.jsonl", TEXTS[:9])
    assert opened("hf:org/name.v2", json_key="body").fingerprint == of_jsonl(
        tmp_path / "upper.jsonl", [text.upper() for text in TEXTS])
    hub.revision, hub.rows = "2", Rows(hub.rows[:30])
    assert opened("hf:org/name.v2").fingerprint == of_jsonl(tmp_path / "new.jsonl", TEXTS[:30])
    assert opened("0.5", valid_data=["hf:org/name.v2"], train_data=["0.5", "hf:org/name.v2", "0.5", "all.jsonl"]).valid


def test_preprocess_reads_datasets_among_files_with_any_workers(hub, tmp_path: Path) -> None:
    of_jsonl(tmp_path / "a.jsonl", TEXTS)
    for inputs, name, workers in ((["a.jsonl", "hf:org/name.v2"], "one", "1"), (["a.jsonl", "a.jsonl"], "two", "2"),
                                  (["hf:org/name.v2", "a.jsonl"], "three", "2")):
        preprocess_command(["--input", *inputs, "--tokenizer-type", "byte", "--output-prefix", name, "--workers",
                            workers])
    assert files_of("one") == files_of("two") == files_of("three")


def test_what_cannot_be_read_is_refused_in_one_line(hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, settings, message in (
            ("hf:org/nothing", {}, "--train-data: hf:org/nothing: cannot load the dataset: Dataset 'org/nothing'"),
            ("hf:org/name.v2:cfg/tset", {}, "expected :cfg/train, :cfg/validation, found :cfg/tset "),
            ("hf:org/name.v2", {"json_key": "texts"}, "no column 'texts'; found text, body, image .see --json-key.$")):
        with pytest.raises(DataError, match=message):
            opened(source, **settings)
    hub.rows[7]["text"] = None
    with pytest.raises(DataError, match="^--train-data: hf:org/name.v2:8 key 'text': expected text, found null"):
        opened("hf:org/name.v2")
    build_corpus(["hf:org/name.v2"], "c", BYTE, skip_malformed=True)
    assert documents_of("c") == [[*text.encode(), 256] for text in TEXTS[:7] + TEXTS[8:]]
    hub.rows.fails_after = 32
    with pytest.raises(DataError, match="hf:org/name.v2: cannot read the dataset: the hub is gone"):
        build_corpus(["hf:org/name.v2"], "d", BYTE, skip_malformed=True)
    monkeypatch.setattr(text_files, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"^--valid-data: hf:a: needs the package datasets: pip install datasets \(the"):
        check_sources(["hf:a"], "--valid-data")


# ------------------------------------------------------------------------------------------------- the real package

def test_folders_of_the_real_package_are_streamed_and_followed(tmp_path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "downloads")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    rows = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
    rows.save_to_disk("saved", num_shards=3)
    datasets.DatasetDict({"train": rows, "my_part": rows.select(range(9))}).save_to_disk("dict")
    rows.to_parquet("parquet/train-0.parquet")
    rows.select(range(9)).to_parquet("parquet/validation-0.parquet")
    rows.to_json("lines/a.jsonl")
    datasets.load_from_disk("saved").map(lambda row: row)  # which leaves a file of rows in the folder
    every, part = of_jsonl(tmp_path / "all.jsonl", TEXTS), of_jsonl(tmp_path / "part.jsonl", TEXTS[:9])
    for source, expected in (("saved", every), ("dict", every), ("dict:/my_part", part), ("dict/my_part", part),
                             ("parquet", every), ("parquet:default/validation", part), ("lines", every)):
        assert opened(f"hf:{source}").fingerprint == expected, source
        assert "found in the cache" in opened(f"hf:{source}").notes[0], source
    assert not list(tmp_path.glob("downloads/**/*.arrow")), "rows are not copied"
    rows.select(range(9)).save_to_disk("saved")
    rows.select(range(9)).to_parquet("parquet/train-0.parquet")
    assert opened("hf:saved").fingerprint == opened("hf:parquet").fingerprint == part
    for source, message in (("saved:cfg", "expected :/train, found :cfg "), ("parquet:cfg", "Config 'cfg' not found"),
                            ("org/name", "cannot load the dataset: Couldn't reach 'org/name' on the Hub")):
        with pytest.raises(DataError, match=f"hf:{source}: .*{message}"):
            opened(f"hf:{source}")
