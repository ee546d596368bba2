"""The default corpus, built from numpy alone to be quick."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import pytest

from data import default_corpus
from data.default_corpus import build_default_corpus, documents_in, paragraphs, source_files
from data.indexed import IndexedCorpus
from data.tokenizer import SentencePieceTokenizer

SETTINGS = {"vocab_size": 600, "packages": ("numpy",)}


def test_it_is_deterministic_complete_and_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quarter = source_files("numpy")[::4]
    monkeypatch.setattr(default_corpus, "source_files", lambda package: quarter)
    prefix = build_default_corpus(tmp_path / "a", workers=2, **SETTINGS)  # type: ignore[arg-type]
    build_default_corpus(tmp_path / "b", workers=1, **SETTINGS)  # type: ignore[arg-type]
    names = ["corpus.jsonl", "tokenizer.model", "corpus.bin", "corpus.idx", "corpus.json", "source.json"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name

    corpus, tokenizer = IndexedCorpus(prefix), SentencePieceTokenizer(str(tmp_path / "a" / "tokenizer.model"))
    texts = [json.loads(line)["text"] for line in (tmp_path / "a" / "corpus.jsonl").read_text().splitlines()]
    assert tokenizer.vocab_size == 600 and corpus.num_documents == len(texts) == len(set(texts)) > 50
    assert texts == sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    for number in (0, len(texts) - 1):
        *ids, end = corpus.document(number).tolist()
        assert tokenizer.decode(ids) == texts[number] and end == tokenizer.eod

    monkeypatch.setattr(default_corpus, "collect_documents", lambda *_: pytest.fail("built again"))
    build_default_corpus(tmp_path / "a", **SETTINGS)  # type: ignore[arg-type]
    (tmp_path / "a" / "corpus.bin").unlink()
    with pytest.raises(pytest.fail.Exception):
        build_default_corpus(tmp_path / "a", **SETTINGS)  # type: ignore[arg-type]


def test_documents_are_docstrings_with_methods_under_their_class(tmp_path: Path) -> None:
    long = "word " * 30
    path = tmp_path / "m.py"
    path.write_text(f'"""{long}module"""\nclass A:\n  """{long}A"""\n  def f(self):\n    """{long}f"""\n'
                    '  def g(self):\n    """Short."""\n' f'def h():\n  """{long}h"""\ndef i(): pass\n')
    assert documents_in(("p.m", path)) == [
        f"p.m\n\n{long}module", f"p.m.A\n\n{long}A\n\np.m.A.f\n\n{long}f", f"p.m.h\n\n{long}h"]
    path.write_text("not python at all")
    assert documents_in(("p.m", path)) == []


def test_the_language_reference_is_among_the_sources() -> None:
    modules = dict(source_files("python"))
    topics = documents_in(("pydoc_data.topics", modules["pydoc_data.topics"]))
    assert len(topics) > 50 and all(isinstance(topic, str) for topic in topics)
    assert "os.path" not in modules and "posixpath" in modules and "test.support" not in modules
    assert isinstance(ast.parse(modules["ast"].read_text()), ast.Module)


def test_paragraphs_keep_every_word() -> None:
    assert "".join(paragraphs(["a\nb\n\nc", "d"])) == "a\nb\n\nc\n\nd\n\n"
