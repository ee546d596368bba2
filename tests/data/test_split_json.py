"""Splitting JSONL: every line in one part, chosen by its text alone."""

from __future__ import annotations

import gzip
import json
import os
import random
from fractions import Fraction
from pathlib import Path

import pytest

from data.sampling import parse_split
from data.split_json import main, split_json
from data.storage import DataError, UsageError
from tests.data.killing import in_a_fork

SHARES = parse_split("90,9,1")


def lines(count: int) -> list[bytes]:
    return [json.dumps({"url": f"u{i}", "text": f"document {i}"}).encode() + b"\n" for i in range(count)]


def split(folder: Path, content: list[bytes], name: str = "p", shares: tuple[Fraction, ...] = SHARES, seed: int = 0
          ) -> dict[str, list[bytes]]:
    (folder / "in.jsonl").write_bytes(b"".join(content))
    split_json([str(folder / "in.jsonl")], str(folder / name), shares, seed=seed)
    return {part: path.read_bytes().splitlines(keepends=True) for part in ("train", "valid", "test")
            if (path := folder / f"{name}.{part}.jsonl").exists()}


def test_every_line_is_in_one_part_unchanged_and_in_order(tmp_path: Path) -> None:
    content = lines(2000)
    parts = split(tmp_path, content)
    place = {line: i for i, line in enumerate(content)}
    assert sorted(sum(parts.values(), [])) == sorted(content)
    for part in parts.values():
        assert [place[line] for line in part] == sorted(place[line] for line in part)


def test_shares_are_met_as_drawing_lots_would(tmp_path: Path) -> None:
    parts = split(tmp_path, lines(20_000))
    for name, share in zip(("train", "valid", "test"), SHARES):
        deviation = float(20_000 * share * (1 - share)) ** 0.5
        assert abs(len(parts[name]) - 20_000 * share) < 4 * deviation  # one split in 16,000 is further off; this is not


def test_the_part_depends_on_the_text_alone(tmp_path: Path) -> None:
    content = lines(1000)
    first = split(tmp_path, content)
    shuffled = random.Random(0).sample(content, 700)
    again = split(tmp_path, [*shuffled, *(line.replace(b'"u', b'"other') for line in content)])
    of_text = {json.loads(line)["text"]: part for part, found in first.items() for line in found}
    for part, found in again.items():
        assert {of_text[json.loads(line)["text"]] for line in found} == {part}


def test_another_seed_draws_other_lots(tmp_path: Path) -> None:
    training = split(tmp_path, lines(2000))["train"]
    assert split(tmp_path, training)["train"] == training  # the trap: what was drawn is drawn again
    parts = split(tmp_path, training, seed=1)
    assert 0.85 < len(parts["train"]) / len(training) < 0.95 and parts["valid"]


def test_a_share_of_nothing_makes_no_file(tmp_path: Path) -> None:
    content = lines(100)
    assert split(tmp_path, content, shares=parse_split("100,0,0")) == {"train": content}
    assert split(tmp_path, content, "q", shares=parse_split("0,1,0")) == {"valid": content}


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


def test_the_command_reads_folders_and_names_what_is_malformed(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    folder, prefix = tmp_path / "in", str(tmp_path / "out" / "p")
    folder.mkdir()
    (folder / "b.jsonl").write_bytes(b'{"text": "a"}\n[]\n')
    (folder / "stage.json").write_text("{}")
    with gzip.open(folder / "a.jsonl.gz", "wb") as file:
        file.write(b"".join(lines(50)))
    with pytest.raises(DataError, match=r"b.jsonl:2 expected a JSON object, found an array .* byte 14\)"):
        main([str(folder), "--output-prefix", prefix])
    assert os.listdir(tmp_path / "out") == []
    main([str(folder), "--output-prefix", prefix, "--on-error", "skip", "--split", "1,1"])
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
