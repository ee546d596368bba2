"""The whole chain: from raw files to tokens and a report, the same whatever was killed and however often it is run."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from data.indexed import IndexedCorpus
from data.storage import DataError, UsageError
from data.tokenizer import ByteLevelTokenizer
from data.webtext import split
from data.webtext.__main__ import GLOBAL_STAGES, main
from data.webtext.documents import NUM_SAMPLES, SAMPLE_CHARACTERS, Document, DocumentCounts, shard_name
from data.webtext.engines import LocalEngine
from tests.data.helpers import in_a_fork
from tests.data.webtext.test_filters import TEXTS
from tests.data.webtext.test_runner import contents

pytest.importorskip("ftfy")
pytest.importorskip("py3langid")

WORDS = ("river stone window garden letter morning silver quiet kitchen market winter paper yellow station mountain "
         "teacher summer bridge corner travel music evening forest island village harbor engine pocket").split()


def article(seed: int) -> str:
    """English enough for a language model, unlike any other."""
    rng = random.Random(seed)
    return " ".join(f"The {rng.choice(WORDS)} by the {rng.choice(WORDS)} was {rng.choice(WORDS)} and the "
                    f"{rng.choice(WORDS)} of the {rng.choice(WORDS)} {rng.randrange(10**6)} came later."
                    for _ in range(12))


def write_raw(folder: Path) -> Path:
    folder.mkdir()
    documents: list[dict[str, object]] = [{"text": article(k), "url": f"http://example.org/{k}"} for k in range(40)]
    documents += [{"text": article(0), "url": "http://example.net/copy"},
                  {"text": article(50), "url": "http://imgur.com/a"},
                  {"text": article(51), "url": "http://example.org/1"},
                  {"text": TEXTS["de"] * 4}, {"text": "short"},
                  {"text": f"<html><body><p>{article(60)}</p></body></html>"}]
    lines = [json.dumps(document).encode() + b"\n" for document in documents]
    (folder / "a.jsonl").write_bytes(b"".join(lines[:25]) + b'{"text": 1}\n')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[25:])))
    (folder / "c.txt").write_bytes(article(70).encode())
    return folder


def arguments(raw: Path, output: Path, *more: str) -> list[str]:
    return ["run", str(raw), "--output", str(output), "--on-error", "skip", "--shard-bytes", "8K", "--workers", "1",
            "--tokenizer-type", "byte", "--split", "80,20,0", "--memory", "16M", "--detector", "py3langid",
            "--extractor", "markup", *more]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_raw(tmp_path_factory.mktemp("webtext") / "raw")


@pytest.fixture(scope="module")
def whole(raw: Path) -> Path:
    """The result of a run that nothing disturbed."""
    main(arguments(raw, raw.parent / "whole"))
    return raw.parent / "whole"


def test_what_comes_out_is_what_should(whole: Path) -> None:
    report = json.loads((whole / "report.json").read_text())
    dropped = {stage["stage"]: {reason: tally["documents"] for reason, tally in stage["dropped"].items()}
               for stage in report["stages"]}
    assert dropped == {
        "urls": {"wrong type": 1, "blacklisted domain": 1, "duplicate URL": 1}, "extract": {},
        "clean": {"too short": 1}, "language": {"language de": 1}, "dedup": {"exact copy": 1}, "shuffle": {},
        "split": {}}
    texts = []
    for part in ("corpus", "corpus_valid"):
        corpus = IndexedCorpus(whole / part)
        texts += [ByteLevelTokenizer().decode(corpus.document(i)[:-1].tolist()) for i in range(corpus.num_documents)]
    assert sorted(texts) == sorted(article(k) for k in [*range(40), 60, 70])
    assert [corpus["name"] for corpus in report["corpora"]] == ["corpus", "corpus_valid"]
    assert sum(corpus["documents"] for corpus in report["corpora"]) == 42


def dropped_in(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for path in sorted(folder.glob("dropped-*.gz"))
            for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_every_dropped_text_can_be_read_with_its_reason(raw: Path, whole: Path, tmp_path: Path) -> None:
    report = json.loads((whole / "report.json").read_text())
    previous = whole
    for number, stage in enumerate(report["stages"]):
        before = {} if not number else {json.loads(line)["text"]: line for path in previous.glob("part-*.jsonl")
                                        for line in path.read_text().splitlines()}
        previous = next(whole.glob(f"*-{stage['stage']}"))
        found = dropped_in(previous)
        assert Counter(text["reason"] for text in found) == {
            reason: tally["documents"] for reason, tally in stage["dropped"].items()}
        assert all(not number or text["text"] in before for text in found)
    shares = [tmp_path / f"{k}" for k in (0, 1)]
    for k, share in enumerate(shares):
        main(["urls", str(raw), "--output", str(share), "--on-error", "skip", "--shard-bytes", "8K",
              "--shard", f"{k}/2"])
    main(["merge", *map(str, shares), "--output", str(tmp_path / "merged")])
    merged, of_shares = dropped_in(tmp_path / "merged"), [text for share in shares for text in dropped_in(share)]
    assert merged == of_shares != []
    (tmp_path / "copy").mkdir()
    for path in (tmp_path / "merged").iterdir():
        if path.name.startswith(("part", "dropped")):
            (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
    main(["read", str(tmp_path / "copy"), "--output", str(tmp_path / "again")])
    counts = json.loads((tmp_path / "again/stage.json").read_text())["counts"]
    merged_counts = json.loads((tmp_path / "merged/stage.json").read_text())["counts"]
    assert counts["in"]["documents"] == merged_counts["kept"]["documents"], "no reader takes the dropped ones for text"
    main(["clean", str(tmp_path / "merged"), "--output", str(shares[0]), "--min-tokens", "1"])
    assert not dropped_in(shares[0]), "those of the earlier stage are gone"


def test_the_report_says_the_same_as_text_and_as_a_page(whole: Path) -> None:
    text, page = (whole / "report.txt").read_text(), (whole / "report.html").read_text()
    assert re.search(r"urls +48 +45 +93.8 %", text) and re.search(r"exact copy +-1", text)
    assert page.count('<div class="bars">') == 3 and "dedup: exact copy" in page
    assert "48 documents in, 42 kept" in page
    for sample in ("http://imgur.com/a The", f"http://example.net/copy {article(0)[:100]}", TEXTS["de"][:100],
                   "<blockquote>short</blockquote>", "expected text, found a number"):
        assert sample in page, "of each reason"
    assert str(whole.parent) not in text + page + (whole / "report.json").read_text()


def test_workers_and_a_second_run_change_nothing(raw, whole, tmp_path, capsys):
    main(arguments(raw, tmp_path / "out", "--workers", "2"))
    first = contents(tmp_path / "out")
    assert first == contents(whole)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("part-*")}
    main(arguments(raw, tmp_path / "out"))
    assert contents(tmp_path / "out") == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("part-*")} == times
    assert capsys.readouterr().out == 2 * (whole / "report.txt").read_text()


def test_a_change_is_carried_to_the_end(raw: Path, whole: Path, tmp_path: Path) -> None:
    main(arguments(raw, tmp_path / "out", "--keep", "en", "de", "--split", "60,20,20"))
    assert contents(tmp_path / "out") != contents(whole) and (tmp_path / "out" / "corpus_test.idx").exists()
    main(arguments(raw, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(whole)


def test_stages_by_hand_on_two_machines_end_in_the_same_documents(raw: Path, whole: Path, tmp_path: Path) -> None:
    flags = ["--on-error", "skip", "--shard-bytes", "8K", "--workers", "1", "--memory", "16M"]
    for k in (0, 1):
        main(["urls", str(raw), "--output", str(tmp_path / f"u{k}"), "--shard", f"{k}/2", *flags])
    main(["merge", str(tmp_path / "u0"), str(tmp_path / "u1"), "--output", str(tmp_path / "u")])
    main(["unique", str(tmp_path / "u"), "--output", str(tmp_path / "q"), *flags])
    by_hand = [json.loads(line)["text"] for path in sorted((tmp_path / "q").glob("part-*"))
               for line in path.read_bytes().splitlines()]
    at_once = [json.loads(line)["text"] for path in sorted((whole / "1-urls").glob("part-*"))
               for line in path.read_bytes().splitlines()]
    assert by_hand == at_once
    for stage in GLOBAL_STAGES:
        with pytest.raises(UsageError, match="unknown flag --shard"):
            main([stage, str(tmp_path / "q"), "--output", str(tmp_path / "d"), "--shard", "0/2", *flags])


def test_a_corpus_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(DataError, match="3-clean: no document is left"):
        main(arguments(tmp_path / "a.jsonl", tmp_path / "out"))


def test_a_run_killed_at_any_point_leaves_nothing_half_made_and_goes_on(raw: Path, whole: Path, tmp_path: Path) -> None:
    """At five points from the beginning to the end."""
    finished = contents(whole)
    events = in_a_fork(lambda: main(arguments(raw, tmp_path / "count")))
    assert events > 300 and contents(tmp_path / "count") == finished
    for point in range(5):
        stop, out = 1 + (2 * point + 1) * events // 10, tmp_path / str(point)
        assert in_a_fork(lambda: main(arguments(raw, out)), stop) == -1
        left = contents(out) if out.exists() else {}
        assert left == {name: finished[name] for name in left}, f"after a kill at event {stop}"
        in_a_fork(lambda: main(arguments(raw, out)))
        assert contents(out) == finished, f"kill at event {stop} of {events}"


def test_samples_depend_on_the_documents_and_not_on_their_order_or_the_shards() -> None:
    """A few of each reason, of the whole corpus and not of its beginning."""
    rng = random.Random(0)
    documents = [(rng.choice(("", "a", "b")), Document(f"{n} <b>\n\ttext " * 30).to_line()) for n in range(300)]

    def sampled() -> dict[str, dict[str, str]]:
        total = DocumentCounts()
        for shard in range(0, 300, size := rng.randrange(1, 40)):
            part = DocumentCounts()
            for reason, line in documents[shard:shard + size]:
                part.add_dropped(reason, 1, line) if reason else part.add_kept(1, line)
            total += DocumentCounts.from_json(json.loads(json.dumps(part.to_json())))
        return total.samples

    first = sampled()
    assert {reason: len(found) for reason, found in first.items()} == dict.fromkeys(("kept", "a", "b"), NUM_SAMPLES)
    texts = [text for found in first.values() for text in found.values()]
    assert all(len(text) == SAMPLE_CHARACTERS + 1 and "<b> text" in text and "\n" not in text for text in texts)
    assert max(int(text.split()[0]) for text in texts) > 100, "not only those at the beginning"
    for _ in range(5):
        rng.shuffle(documents)
        assert sampled() == first


# --------------------------------------------------------------------------------------------------- shuffle and split

def write_shards(folder: Path, sizes: Sequence[int]) -> list[Path]:
    """Documents that hold their numbers."""
    folder.mkdir()
    number, paths = 0, []
    for shard, size in enumerate(sizes):
        paths.append(folder / shard_name(shard))
        documents = (Document(f"{n} " + "x" * (n % 90)) for n in range(number, number + size))
        paths[-1].write_bytes(b"".join(document.to_line() for document in documents))
        number += size
    return paths


def numbers_of(folder: Path) -> list[int]:
    return [int(json.loads(line)["text"].split()[0]) for path in sorted(folder.glob("part-*"))
            for line in path.read_bytes().splitlines()]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("part-*")}


def shuffle(paths: list[Path], out: Path, workers: int = 1, **options: int) -> DocumentCounts:
    return sum(split.run_shuffle(paths, out, LocalEngine(workers), **options), DocumentCounts())


def test_the_order_is_that_of_the_keys_whatever_memory_and_shards(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "in", [100, 0, 333, 67])
    counts = shuffle(shards, tmp_path / "a", seed=5)
    keys = list(islice(split.shuffle_keys(5), 500))
    assert len(set(keys)) == 500
    assert numbers_of(tmp_path / "a") == sorted(range(500), key=keys.__getitem__) != list(range(500))
    assert counts.documents_kept == counts.documents_in == 500
    assert sorted(os.listdir(tmp_path / "a")) == [shard_name(k) for k in range(4)]
    shuffle(shards, tmp_path / "b", 2, seed=5, memory=1000)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    shuffle(shards, tmp_path / "c", seed=5, shards=7)
    assert numbers_of(tmp_path / "a") == numbers_of(tmp_path / "c")
    shuffle([], tmp_path / "none")
    assert files_of(tmp_path / "none") == {shard_name(0): b""}


def test_every_document_is_in_one_part_in_order_for_any_workers(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "in", [500, 0, 700])
    for name, workers in (("out", 1), ("two", 2)):
        counts = sum(split.run_split(shards, tmp_path / name, LocalEngine(workers), shares="80,15,5"), DocumentCounts())
        assert counts.documents_kept == 1200
    found = [numbers_of(tmp_path / "out" / part) for part in split.PARTS]
    assert sorted(sum(found, [])) == list(range(1200)) and all(part == sorted(part) for part in found)
    for part, share in zip(found, (0.80, 0.15, 0.05)):
        assert abs(len(part) - 1200 * share) < 4 * (1200 * share * (1 - share)) ** 0.5
    assert files_of(tmp_path / "out") == files_of(tmp_path / "two")
