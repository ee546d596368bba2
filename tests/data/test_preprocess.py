"""JSONL to corpus: exact bytes for any number of workers, every malformed line named, no memory for what is no text."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from data.indexed import IndexedCorpus
from data.merge import merge_corpora
from data.preprocess import build_corpus, main as preprocess
from data.sampling import parse_split
from data.split_json import main as split_json_command, split_json
from data.storage import DataError, UsageError
from data.verify import main as verify
from data.webtext import __main__ as webtext, dedup
from data.webtext.runner import GlobalStage, run_global_stage
from tests.data.helpers import BYTE, documents_of, files_of, in_a_fork, sizes_of

REPOSITORY = Path(__file__).resolve().parents[2]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_the_corpus_holds_the_tokens_of_every_line(tmp_path: Path) -> None:
    texts = ["Hello", "", "w\u00f6rld \U0001f600", "a\nb"]
    (tmp_path / "b.jsonl").write_bytes(b'\n  \r\n{"text": "no line end"}')
    build_corpus([write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "b.jsonl"], tmp_path / "c", BYTE)
    assert documents_of(tmp_path / "c") == [[*text.encode(), 256] for text in [*texts, "no line end"]]
    facts = IndexedCorpus(tmp_path / "c").facts
    assert facts is not None and facts.tokenizer is not None and facts.tokenizer.fingerprint == BYTE.fingerprint


def test_shards_of_a_folder_merge_to_the_whole(tmp_path: Path) -> None:
    folder, whole = tmp_path / "in", tmp_path / "whole"
    folder.mkdir()
    for i in range(7):
        write_jsonl(folder / f"part-{i}.jsonl", [f"document {i}.{k}" for k in range(i + 1)])
    byte = ["--input", str(folder), "--tokenizer-type", "byte", "--append-eod", "--output-prefix"]
    preprocess([*byte, str(whole)])
    for count in (1, 3, 7):
        parts = [tmp_path / f"{count}-{i}" for i in range(count)]
        for i, part in enumerate(parts):
            preprocess([*byte, str(part), "--shard", f"{i}/{count}"])
        merge_corpora(parts, tmp_path / "merged")
        assert files_of(tmp_path / "merged") == files_of(whole)


def test_a_shard_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    arguments = ["--input", str(path), "--tokenizer-type", "byte", "--output-prefix", str(tmp_path / "c"), "--shard"]
    with pytest.raises(DataError, match="only 1 input files"):
        preprocess([*arguments, "0/2"])
    for wrong in ("2/2", "-1/2", "1", "0/0", "a/b", "1/2/3"):
        with pytest.raises(UsageError, match="expected one argument" if wrong == "-1/2" else
                           "expected I/N with I from 0 to N - 1"):
            preprocess([*arguments, wrong])
    with pytest.raises(DataError, match="holds no file of text"):
        (tmp_path / "empty").mkdir()
        preprocess(["--input", str(tmp_path / "empty"), "--output-prefix", str(tmp_path / "c")])


def test_a_file_that_is_gone_is_a_data_error(tmp_path: Path) -> None:
    for name in ("a", "a.txt"):
        with pytest.raises(DataError, match=f"{name}: cannot read: No such file"):
            build_corpus([tmp_path / name], tmp_path / "c", BYTE)


MALFORMED = [
    (b'{"text": "cut', "not JSON: "), (b"[]", "expected a JSON object, found an array"),
    (b'"text"', "expected a JSON object, found text"), (b"null", "expected a JSON object, found null"),
    (b'{"url": "u"}', "no key 'text'; found 'url'"), (b"{}", "no key 'text'; found no keys"),
    (b'{"text": 1}', "expected text, found a number"), (b'{"text": null}', "expected text, found null"),
    (b'{"text": ["a"]}', "expected text, found an array"), (b'{"text": true}', "expected text, found true or false"),
    (b'{"text": "a", "text": "b"}', "key 'text' appears twice"),
    (b'{"text": "a", "n": NaN}', "NaN is not a JSON number"),
    (b'{"text": "a", "n": -Infinity}', "-Infinity is not a JSON number"),
    (b'{"text": "\xff"}', "not UTF-8: byte 0xff at column 11"),
    (b'{"text": "a\\ud800"}', "lone surrogate U+D800 at character 2"),
    (b'\xef\xbb\xbf{"text": "a"}', "not JSON: "), (b'{"text": "a"} {}', "not JSON: Extra data at column 15"),
    (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "integer string"),
]


def test_a_malformed_line_is_named_or_skipped(tmp_path: Path) -> None:
    path, before = tmp_path / "b.jsonl", write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    for line, reason in MALFORMED:
        path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "also good"}\n[]\n')
        with pytest.raises(DataError) as caught:
            build_corpus([before, path], tmp_path / "c", BYTE)
        assert str(caught.value).startswith(f"{path}:3 ") and reason in str(caught.value)
        assert str(caught.value).endswith("(the line begins at byte 18)")
    path.write_bytes(b"[]\n" + line)
    with pytest.raises(DataError, match="c: no tokens: 2 malformed documents skipped, and no text beside; without"):
        build_corpus([path], tmp_path / "c", BYTE, skip_malformed=True)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "b.jsonl"]
    progress, skipped = build_corpus([before, path], tmp_path / "c", BYTE, skip_malformed=True)
    assert (progress.documents, skipped) == (2, 2)


def test_the_command_line_works_and_verify_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, prefix = write_jsonl(tmp_path / "a.jsonl", ["Hello world", "again"]), str(tmp_path / "new" / "c")
    preprocess(["--input", str(path), "--output-prefix", prefix, "--append-eod"])
    assert IndexedCorpus(prefix).document(0).tolist() == [15496, 995, 50256]
    assert "1 file, 2 documents in" in capsys.readouterr().err
    verify([prefix])
    assert "2 documents, 5 tokens (uint16)" in capsys.readouterr().out
    with pytest.raises(DataError, match="document 0, offset 0: token id 15496 is outside the vocabulary of 15000"):
        verify([prefix, "--vocab-size", "15000"])
    raw = bytearray(Path(f"{prefix}.bin").read_bytes())
    raw[2] ^= 1
    Path(f"{prefix}.bin").write_bytes(raw)
    with pytest.raises(DataError, match="c.bin: not the one that .*c.json was written with"):
        verify([prefix])


# ----------------------------------------------------------------------------------------------------- what is not text

LINE = b'{"text": "words"}\n'


def peak_of(tmp_path: Path, *flags: str) -> int:
    """Megabytes of the process."""
    code = "from data.preprocess import main\nfrom megatron.host_memory import peak_resident_bytes\nmain()\n" \
           "print(peak_resident_bytes() >> 20)"
    return int(subprocess.run(
        [sys.executable, "-c", code, "--output-prefix", str(tmp_path / "c"), "--tokenizer-type", "byte", *flags],
        cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("end", [b"", b"\xff"], ids=["good", "bad"])
def test_a_long_document_costs_no_memory_whether_it_is_skipped_or_not(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some words " * (1 << 22), compresslevel=1) + gzip.compress(end))
    (tmp_path / "b.txt").write_text("words")
    flags = ("--on-error", "skip", "--append-eod", "--input", str(tmp_path / "b.txt"))
    base = peak_of(tmp_path, *flags)
    peak = peak_of(tmp_path, *flags, str(tmp_path / "a.txt.gz"))
    assert sizes_of(IndexedCorpus(tmp_path / "c")) == [6] + [11 << 22 | 1] * (end == b"")
    assert peak < base + 40, (peak, base)


OBJECT = json.dumps({"text": "one"}, indent=1)
ARRAY = json.dumps([{"text": "one"}, {"text": "two"}], indent=1)


@pytest.mark.parametrize("content", [OBJECT, ARRAY, json.dumps([{"text": "one"}])])
def test_json_over_several_lines_is_refused_with_what_to_do_and_that_works(tmp_path: Path, content: str) -> None:
    mark = "\ufeff" * (content == ARRAY)
    (tmp_path / "a.json").write_text(mark + content)
    for program in (lambda: build_corpus([tmp_path / "a.json"], tmp_path / "c", BYTE),
                    lambda: split_json([str(tmp_path / "a.json")], str(tmp_path / "s"), [Fraction(1)] * 3)):
        with pytest.raises(DataError, match=r"a.json:1 .*python -m data.webtext read --format json FILE"):
            program()
    webtext.main(["read", "--format", "json", str(tmp_path / "a.json"), "--output", str(tmp_path / "out")])
    build_corpus([*(tmp_path / "out").glob("part-*.jsonl")], tmp_path / "c", BYTE)
    assert bytes(IndexedCorpus(tmp_path / "c").document(0)[:-1].astype("u1")) == b"one"


def test_a_stage_that_is_given_a_raw_folder_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.jsonl").write_bytes(LINE)
    stage = GlobalStage("dedup", dedup.run_dedup, {})
    for name, found in (("raw", "a folder without stage.json"), ("raw/a.jsonl", "a file"), ("none", "nothing")):
        with pytest.raises(DataError, match=rf"{name}: expected the folder of a stage, found {found}; make one of it "
                                            rf"first: python -m data.webtext read .*{name} --output DIR"):
            run_global_stage(stage, [tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------ data.split_json

SHARES = parse_split("90,9,1")


def lines(count: int) -> list[bytes]:
    return [json.dumps({"url": f"u{i}", "text": f"document {i}"}).encode() + b"\n" for i in range(count)]


def split(folder: Path, content: list[bytes], name: str = "p", shares: tuple[Fraction, ...] = SHARES, seed: int = 0
          ) -> dict[str, list[bytes]]:
    (folder / "in.jsonl").write_bytes(b"".join(content))
    split_json([str(folder / "in.jsonl")], str(folder / name), shares, seed=seed)
    return {part: path.read_bytes().splitlines(keepends=True) for part in ("train", "valid", "test")
            if (path := folder / f"{name}.{part}.jsonl").exists()}


def test_every_line_is_in_one_part_unchanged_and_in_order_and_shares_are_met_as_drawing_lots_would(tmp_path):
    content = lines(20_000)
    parts = split(tmp_path, content)
    place = {line: i for i, line in enumerate(content)}
    assert sorted(sum(parts.values(), [])) == sorted(content)
    for part, share in zip(("train", "valid", "test"), SHARES):
        assert [place[line] for line in parts[part]] == sorted(place[line] for line in parts[part])
        deviation = float(20_000 * share * (1 - share)) ** 0.5
        assert abs(len(parts[part]) - 20_000 * share) < 4 * deviation  # one split in 16,000 is further off; this is not


def test_the_part_depends_on_the_text_and_the_seed_alone(tmp_path: Path) -> None:
    content = lines(1000)
    first = split(tmp_path, content)
    shuffled = random.Random(0).sample(content, 700)
    again = split(tmp_path, [*shuffled, *(line.replace(b'"u', b'"other') for line in content)])
    of_text = {json.loads(line)["text"]: part for part, found in first.items() for line in found}
    for part, found in again.items():
        assert {of_text[json.loads(line)["text"]] for line in found} == {part}
    parts = split(tmp_path, first["train"], seed=1)  # without another seed, all of it would be training text again
    assert 0.85 < len(parts["train"]) / len(first["train"]) < 0.95 and parts["valid"]


def test_parts_of_another_split_are_not_left_beside(tmp_path: Path) -> None:
    """A text of the validation part would be one of training's as well."""
    before = split(tmp_path, lines(2000))
    for shares in ("1", "0,1", "1,1"):
        with pytest.raises(UsageError, match=r"--split has nothing for .*p\.(test|train)\.jsonl, left by"):
            split(tmp_path, lines(2000), shares=parse_split(shares))
    assert split(tmp_path, lines(2000)) == before
    assert list(split(tmp_path, lines(2000), "q", parse_split("1"))) == ["train"]


def test_odd_ends_of_lines_are_kept_and_blank_lines_are_not(tmp_path: Path) -> None:
    content = [b'{"text": "a"}\r\n', b"\n", b' {"text":"\xc3\xa9"} \n', b"  \n", b'{"text": "last"}']
    parts = split(tmp_path, content, shares=parse_split("1"))
    assert b"".join(parts["train"]) == b'{"text": "a"}\r\n {"text":"\xc3\xa9"} \n{"text": "last"}\n'


def test_the_command_reads_folders_and_names_what_is_malformed(tmp_path, capsys):
    folder, prefix = tmp_path / "in", str(tmp_path / "out" / "p")
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(b'{"text": "a"}\n[]\n')
    (folder / "stage.json").write_text("{}")
    with gzip.open(folder / "a.jsonl.gz", "wb") as file:
        file.write(b"".join(lines(50)))
    with pytest.raises(DataError, match=r"b.jsonl:2 expected a JSON object, found an array .* byte 14\)"):
        split_json_command([str(folder), "--output-prefix", prefix])
    assert os.listdir(tmp_path / "out") == []
    split_json_command([str(folder), "--output-prefix", prefix, "--on-error", "skip", "--split", "1,1"])
    out = capsys.readouterr().out
    assert out.startswith("51 documents: ") and out.endswith("1 malformed lines skipped\n")
    assert sorted(os.listdir(tmp_path / "out")) == ["p.train.jsonl", "p.valid.jsonl"]


def test_dying_at_any_step_leaves_no_parts_of_two_splits(tmp_path: Path) -> None:
    content, shares = lines(300), parse_split("1,1,1")
    events = in_a_fork(lambda: split(tmp_path, content, "count", shares, seed=1))
    assert events > 9
    for stop in range(1, events + 1):
        split(tmp_path, content, shares=shares)
        assert in_a_fork(lambda: split(tmp_path, content, shares=shares, seed=1), stop) == -1
        found = [line for path in tmp_path.glob("p.*.jsonl") for line in path.read_bytes().splitlines()]
        assert len(found) == len(set(found)), "a document is in two parts"
