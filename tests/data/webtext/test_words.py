"""Words and runs of words as numbers, against words and runs as strings."""

from __future__ import annotations

import random
import unicodedata

import numpy as np
import pytest

from data.webtext import minhash as module
from data.webtext.minhash import UNSPACED_SCRIPTS, hash_words, ngram_hashes, word_hashes

AWKWARD = [
    "", " ", "...", "a", "Hello, WORLD!", "don’t stop", "e\u0301te\u0301", "日本語 and 한국어", "x\u2028y\u0000z\ufeffw",
    "İstanbul ŞIRNAK ﬁn", "\U0001f600 a\U0001f600b", "\U00020000\U00020001", "१२३ हिन्दी", "a_b-c/d", "สวัสดี",
    "\u3000。、"]


def slow_words(text: str) -> list[tuple[str, int, int]]:
    """Character by character."""
    found: list[tuple[str, int, int]] = []
    open_word = False
    for place, character in enumerate(text):
        inside = character.isalnum() or unicodedata.category(character)[0] == "M"
        alone = inside and any(first <= ord(character) <= last for first, last in UNSPACED_SCRIPTS)
        lower = character.lower() if len(character.lower()) == 1 else character
        if inside and open_word and not alone:
            word, start, _ = found[-1]
            found[-1] = word + lower, start, place + 1
        elif inside:
            found.append((lower, place, place + 1))
        open_word = inside and not alone
    return found


def random_text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice("aAbé ’.\n日本9\u0301\U0001f600") for _ in range(length))


@pytest.mark.parametrize("piece", [module.BLOCK_CHARACTERS, 64])
def test_words_are_those_found_character_by_character(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_CHARACTERS", piece)
    module._powers.cache_clear()
    rng = random.Random(0)
    numbers: dict[str, int] = {}
    for text in [*AWKWARD, *(random_text(rng, rng.randint(0, 300)) for _ in range(300))]:
        expected, found = slow_words(text), hash_words(text)
        assert (word_hashes(text) == found.hashes).all()
        assert list(zip(found.starts.tolist(), found.stops.tolist())) == [(a, b) for _, a, b in expected], repr(text)
        for (word, _, _), number in zip(expected, found.hashes.tolist(), strict=True):
            assert numbers.setdefault(word, number) == number
    assert len(set(numbers.values())) == len(numbers) > 1000
    module._powers.cache_clear()


def test_runs_are_equal_where_the_words_are() -> None:
    rng = random.Random(1)
    plain = rng.choices(["a", "b", "c"], k=2000)
    for n in (1, 2, 5, 13):
        found = ngram_hashes(hash_words(" ".join(plain)).hashes, n).tolist()
        expected = [tuple(plain[first:first + n]) for first in range(len(plain) - n + 1)]
        assert len(found) == len(expected)
        assert len(set(found)) == len(set(expected)) == len(set(zip(found, expected)))
    assert len(ngram_hashes(np.arange(4, dtype=np.uint64), 5)) == 0


def test_numbers_do_not_change_between_versions_of_this_code() -> None:
    # Signature files on disk hold them: raise minhash.SIGNATURE_VERSION together with these.
    assert hash_words("Hello, wörld 日本").hashes.tolist() == [
        14436853186599029085, 6754916799844202833, 3913650560111125320, 11557339308617255188]
    assert ngram_hashes(hash_words("a b c d e").hashes, 5).tolist() == [7462623408334267199]
