"""No command writes over what it reads, under whatever name: a line, exit code 2, and every byte as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data import importers, merge, preprocess, split_json
from data.storage import UsageError, check_outputs_are_not_inputs
from data.webtext import __main__ as webtext
from data.writer import CorpusWriter
from megatron.inference import cli as generate

ROOT = Path(__file__).resolve().parents[2]
LINES = "".join(json.dumps({"text": f"document {number} of some words"}) + "\n" for number in range(60))
BYTE = ["--tokenizer-type", "ByteLevelTokenizer"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("corpus.json", "corpus.bin.jsonl", "s.train.jsonl", "s.valid.jsonl", "s.test.jsonl", "pr.txt"):
        Path(name).write_text(LINES)
    Path("train.bin").write_bytes(b"\1\0\2\0" * 50)
    Path("K").mkdir()
    for prefix in ("ma", "mb"):
        with CorpusWriter(prefix, vocab_size=300) as writer:
            writer.add_documents([1, 2, 3], [1, 2])
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


COMMANDS: dict[str, tuple[Callable[[list[str]], object], list[str], str, str]] = {
    "preprocess, the facts": (preprocess.main, ["--input", "corpus.json", "--output-prefix", "corpus", *BYTE],
                              "corpus.json", "corpus.json"),
    "preprocess, of a folder": (preprocess.main, ["--input", "corpus.json", "mb.json", "--output-prefix",
                                                  "../{here}/corpus", *BYTE], "../{here}/corpus.json", "corpus.json"),
    "preprocess, a vocabulary": (preprocess.main, [
        "--input", "pr.txt", "--output-prefix", "corpus", "--tokenizer-type", "CharacterLevelTokenizer",
        "--vocab-file", "corpus.json"], "corpus.json", "corpus.json"),
    "split_json": (split_json.main, ["s.train.jsonl", "--split", "1,1,0", "--output-prefix", "s", "--seed", "1"],
                   "s.train.jsonl", "s.train.jsonl"),
    "split_json, one of a share of 0": (split_json.main, ["corpus.json", "s.test.jsonl", "--split", "1,1,0",
                                                          "--output-prefix", "s"], "s.test.jsonl", "s.test.jsonl"),
    "importers": (importers.main, ["--input", "train.bin", "--output-prefix", "train"], "train.bin", "train.bin"),
    "importers, a vocabulary": (importers.main, [
        "--input", "train.bin", "--output-prefix", "corpus", "--tokenizer-type", "CharacterLevelTokenizer",
        "--vocab-file", "corpus.json"], "corpus.json", "corpus.json"),
    "merge, the first": (merge.main, ["ma", "ma", "mb"], "ma.bin", "ma.bin"),
    "merge, the last": (merge.main, ["./mb", "ma", "mb"], "./mb.bin", "mb.bin"),
    "generate": (generate.main, ["--load", "K", "--file", "pr.txt", "--output", "pr.txt"], "pr.txt", "pr.txt"),
    "webtext run, its report": (webtext.main, ["run", "report.txt", "--output", "."], "report.txt", "report.txt"),
    "webtext run, its corpus": (webtext.main, ["run", "corpus.json", "--output", "w", "--output-prefix", "corpus"],
                                "corpus.json", "corpus.json"),
    "webtext run, a vocabulary": (webtext.main, [
        "run", "pr.txt", "--output", "w", "--output-prefix", "corpus", "--tokenizer-type", "CharacterLevelTokenizer",
        "--vocab-file", "corpus.json"], "corpus.json", "corpus.json"),
    "webtext run, evaluation text": (webtext.main, ["run", "pr.txt", "--output", ".", "--evaluation", "report.txt"],
                                     "report.txt", "report.txt"),
    "webtext run, the part for validation": (
        webtext.main, ["run", "c_valid.json", "--output", "w", "--output-prefix", "c"], "c_valid.json",
        "c_valid.json")}


@pytest.mark.parametrize("main, argv, output, source", COMMANDS.values(), ids=COMMANDS)
def test_a_command_that_would_write_over_its_input_is_refused(
        here: Path, main: Callable[[list[str]], object], argv: list[str], output: str, source: str) -> None:
    for name in ("report.txt", "c_valid.json"):
        Path(name).write_text(LINES)
    before = contents(here)
    argv, output = [word.format(here=here.name) for word in argv], output.format(here=here.name)
    with pytest.raises(UsageError) as caught:
        main(argv)
    also = "" if output == source else f", which is {source}"
    assert f"{output}{also}: is read by this command, which would write over it; " in str(caught.value)
    assert "choose another" in str(caught.value)
    assert contents(here) == before and not Path("w").exists()


LINKS: dict[str, Callable[[str, str], None]] = {
    "symbolic": os.symlink, "hard": os.link, "of a folder": lambda path, link: None}


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_to_an_input_is_no_other_name(here: Path, kind: str) -> None:
    LINKS[kind]("pr.txt", "link.json")
    os.symlink(".", "same")
    argv = ["--input", "pr.txt", "--output-prefix", "link", *BYTE]
    if kind == "of a folder":
        argv = ["--input", "same/corpus.json", "--output-prefix", "corpus", *BYTE]
    before = contents(here)
    with pytest.raises(UsageError, match="json, which is .*: is read by this command, which would write over it"):
        preprocess.main(argv)
    assert contents(here) == before


def test_files_beside_the_input_and_terminals_are_no_input(here: Path) -> None:
    check_outputs_are_not_inputs(["/dev/null", "pr.txt", "absent"], ["/dev/null", "corpus.json", "other"])
    with pytest.raises(UsageError, match="^sub/../absent, which is absent: "):
        check_outputs_are_not_inputs(["absent"], ["sub/../absent"])
    preprocess.main(["--input", "corpus.json", "--output-prefix", "corpus2", *BYTE])
    preprocess.main(["--input", "pr.txt", "--output-prefix", "corpus2", "--json-key", "text", *BYTE])


def test_the_exit_code_is_2_and_the_line_says_what_to_do(here: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "data.preprocess", "--input", "corpus.json", "--output-prefix",
                           "corpus", *BYTE], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2
    assert done.stderr == ("error: corpus.json: is read by this command, which would write over it; a corpus is "
                           "PREFIX.bin, PREFIX.idx and PREFIX.json: choose another --output-prefix\n")


MODELS: dict[str, list[str]] = {
    "K/tag/rank.safetensors": ["--load", "K"], "K/latest": ["--load", "K"], "hub/config.json": ["--load-hf", "hub"],
    "hub/tokenizer.model": ["--load-hf", "hub"]}


@pytest.mark.parametrize("output", MODELS)
def test_answers_are_not_written_over_the_model(here: Path, output: str) -> None:
    for name in (*MODELS, "K/tag/manifest.json", "K/answers.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    before = contents(here)
    with pytest.raises(UsageError, match=f"^--output: {output}.*: is read by this command"):
        generate.main([*MODELS[output], "--output", output, "once"])
    assert contents(here) == before
    asked = generate.build_parser().parse_args(["--load", "K", "--output", "K/answers.txt", "once"])
    generate.check_args(asked)
