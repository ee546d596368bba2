"""JSONL to corpus: exact bytes for any number of workers, every malformed line named, no memory for what is no text."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import re
import subprocess
import sys
import threading
from fractions import Fraction
from pathlib import Path

import pytest

from data import text_files
from data.indexed import IndexedCorpus
from data.merge import merge_corpora
from data.preprocess import TextReadOptions, build_corpus, main as preprocess
from data.sampling import parse_split
from data.split_json import main as split_json_command, split_json
from data.storage import DataError, UsageError
from data.text_files import parse_lines, read_line_chunks
from data.verify import main as verify
from data.webtext import __main__ as webtext, dedup
from data.webtext.runner import GlobalStage, run_global_stage
from tests.covering import pairs
from tests.data.helpers import BYTE, documents_of, files_of, in_a_fork

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
    (tmp_path / "a").write_bytes(LINE * 9)
    last = list(read_line_chunks(tmp_path / "a", 10))[-1]
    os.unlink(tmp_path / "a")
    for read in (lambda: list(parse_lines(last, "text")),
                 *(lambda name=name: build_corpus([tmp_path / name], tmp_path / "c", BYTE) for name in ("a", "a.txt"))):
        with pytest.raises(DataError, match="a(.txt)?: cannot read: No such file"):
            read()


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
LIMIT = 1000


def put(path: Path, content: bytes) -> Path:
    """As the name says."""
    if path.suffix == ".pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_bytes, args=(content,), daemon=True).start()
    else:
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(content))
    return path


@pytest.mark.parametrize("kind, long, before", pairs(
    ("jsonl", "jsonl.gz", "pipe"), (LIMIT, LIMIT + 1, 1600, 1601, 100_000), (0, 34, 35), each=2))
def test_a_line_that_is_too_long_is_named_wherever_it_begins(tmp_path, monkeypatch, kind, long, before):
    """34 lines fill a chunk nearly, 35 more than that."""
    monkeypatch.setattr(text_files.read_line_chunks, "__defaults__", (600,))
    monkeypatch.setattr(text_files, "SKIP_BYTES", 64)
    content = LINE * before + b"\0" * (long - 1) + b"\n" + LINE * 40 + b"[]\n"
    path = put(tmp_path / f"a.{kind}", content)
    held, found = 0, []
    for chunk in read_line_chunks(path, limit=LIMIT):
        held = max(held, len(chunk.data or b""))
        found += [str(text.to_error()) for _, text in parse_lines(chunk, "text", LIMIT) if not isinstance(text, str)]
    assert held <= LIMIT + 601
    reason = "not JSON" if long <= LIMIT else f"more than {LIMIT} bytes in this line"
    assert found[0].startswith(f"{path}:{before + 1} {reason}"), found
    assert found[0].endswith(f"(the line begins at byte {len(LINE) * before})")
    assert len(found) == 2 and found[1].startswith(f"{path}:{before + 42} expected a JSON object"), found


def test_it_ends_the_run_or_is_skipped_by_preprocessing_and_splitting_alike(tmp_path: Path) -> None:
    path = put(tmp_path / "a.jsonl", LINE * 3 + b'{"text": "' + b"y" * LIMIT + b'"}\n' + LINE)
    reading, shares = TextReadOptions(max_document_bytes=LIMIT), [Fraction(1, 2), Fraction(1, 2), Fraction(0)]
    for program in (lambda: build_corpus([path], tmp_path / "c", BYTE, reading),
                    lambda: split_json([str(path)], str(tmp_path / "s"), shares, max_bytes=LIMIT)):
        with pytest.raises(DataError, match=r"a.jsonl:4 more than 1000 bytes .*--max-document-bytes of data"):
            program()
    progress, skipped = build_corpus([path], tmp_path / "c", BYTE, reading, skip_malformed=True)
    counts, left_out = split_json([str(path)], str(tmp_path / "s"), shares, max_bytes=LIMIT, skip_malformed=True)
    assert (progress.documents, skipped) == (sum(counts.values()), left_out) == (4, 1)
    assert progress.bytes == path.stat().st_size
    assert build_corpus([path], tmp_path / "c", BYTE, TextReadOptions(max_document_bytes=2 * LIMIT))[0].documents == 5


def peak_of(tmp_path: Path, megabytes: int | None, name: str, *flags: str) -> tuple[int, str]:
    """Megabytes of the largest process, times how many there are; and what was said. Of some lines and so many zeros,
    or, None, of the file as it is."""
    if megabytes is not None:
        block = gzip.compress(bytes(1 << 24))
        (tmp_path / name).write_bytes(gzip.compress(LINE * 9) + block * (megabytes >> 4))
    code = """
import resource
from data.preprocess import main
from megatron.host_memory import peak_resident_bytes
try:
    main()
except Exception as error:
    print(error)
worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # begins at its parent's
print(peak_resident_bytes() >> 20, worker >> 10)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "c"),
         "--tokenizer-type", "byte", "--workers", "2", *flags], cwd=REPOSITORY, capture_output=True, text=True)
    *said, peaks = done.stdout.splitlines()
    own, worker = map(int, peaks.split())
    return own + 2 * worker, "\n".join(said)


def test_zeros_do_not_cost_their_size_in_memory(tmp_path: Path) -> None:
    name = "a.jsonl.gz"
    flags = ("--max-document-bytes", "4M", "--workers", "1")
    peak, said = peak_of(tmp_path, 192, name, *flags)
    base, _ = peak_of(tmp_path, 0, name, *flags)
    assert peak < base + 100 and re.search(rf"{name}:(9|10) more than 4194304 bytes", said), (peak, base, said)


@pytest.mark.parametrize("end", [b"", b"\xff"], ids=["good", "bad"])
def test_a_long_document_costs_no_memory_whether_it_is_skipped_or_not(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some words " * (1 << 22), compresslevel=1) + gzip.compress(end))
    (tmp_path / "b.txt").write_text("words")
    flags = ("--max-document-bytes", "4M", "--on-error", "skip", "--workers", "1", "--append-eod")
    peak, _ = peak_of(tmp_path, None, "a.txt.gz", "--input", *(str(tmp_path / name) for name in ("a.txt.gz", "b.txt")),
                      *flags)
    assert IndexedCorpus(tmp_path / "c").sizes.tolist() == [11 << 22 | 1] * (end == b"") + [6]
    base, _ = peak_of(tmp_path, 0, "c.txt.gz", *flags)
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
    (tmp_path / "a.json").write_text(f"{OBJECT}\n{content}")
    with pytest.raises(DataError, match=r"a.json not JSON: Extra data.*`jq -c \.` makes a line of each"):
        webtext.main(["read", str(tmp_path / "a.json"), "--output", str(tmp_path / "other")])


def test_utf_16_is_named(tmp_path: Path) -> None:
    for name, encoding in (("a.jsonl", "utf-16-le"), ("a.txt", "utf-16-be")):
        (tmp_path / name).write_bytes(("\ufeff" + LINE.decode() * 3).encode(encoding))
        with pytest.raises(DataError, match=f"{name}:1 not UTF-8 but UTF-16, by its first bytes; convert"):
            build_corpus([tmp_path / name], tmp_path / "c", BYTE)
        with pytest.raises(DataError, match=f"{name}.* not UTF-8 but UTF-16, by its first bytes; convert"):
            webtext.main(["read", str(tmp_path / name), "--output", str(tmp_path / "out")])
    for name in ("a.jsonl", "a.txt"):
        (tmp_path / name).write_bytes(b"\xff\xff words\n")
        with pytest.raises(DataError, match=f"{name}.* not UTF-8: byte 0xff"):
            webtext.main(["read", str(tmp_path / name), "--output", str(tmp_path / "out")])


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
