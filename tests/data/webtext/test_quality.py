"""The rules of `quality`: each against a slow definition on random texts, and a planted text that only it drops."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from data.webtext.documents import Document, DroppedDocument
from data.webtext.quality import (ALL_RULES, EMAIL_MARK, IP_MARK, PHONE_MARK, RULES, TextStatistics, make_quality, mask,
                                  parse_rules, repeated_ngram_share, top_ngram_share)
from tests.data.webtext.planted import babble

PROSE = ("The people of the village have a river that runs to the sea, and they walk with it to the end.\n"
         "In spring the water rises over the meadows; children build small boats of bark and leaves.\n\n"
         "When autumn comes, the boats are found again by those who gather wood along the banks.\n"
         "Nobody knows who made which one. They keep them on the shelf above the stove, all the same!\n")


def texts() -> list[str]:
    rng, found = random.Random(5), []
    for number in range(200):
        text = babble(rng, rng.randint(5, 300))
        words = text.split(" ")
        for _ in range(rng.randint(0, 3)):  # passages that come again, in another case
            start, length = rng.randrange(len(words)), rng.randint(1, 30)
            at = rng.randrange(len(words))
            words[at:at] = [word.upper() for word in words[start : start + length]]
        found.append(" ".join(words))
    return found + ["", "one", "a a a a a a a a", "\u00e4\u00f6 \u00fc. \u00c4\u00f6 \u00fc", PROSE * 3]


def slow_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower().replace("_", " "))


def test_ngram_shares_are_those_of_a_slow_count() -> None:
    for text in texts():
        words, statistics = slow_words(text), TextStatistics(text)
        total = max(1, sum(map(len, words)))
        for n in range(2, 11):
            grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
            covered, seen = set[int](), set[tuple[str, ...]]()
            for at, gram in enumerate(grams):
                if gram in seen:
                    covered |= {*range(at, at + n)}
                seen.add(gram)
            assert repeated_ngram_share(n, statistics) == pytest.approx(sum(len(words[at]) for at in covered) / total)
            counts = Counter(grams)
            most = max(counts.values(), default=0)
            allowed = {min(1.0, most * len("".join(gram)) / total) for gram, count in counts.items() if count == most}
            assert top_ngram_share(n, statistics) == pytest.approx(0) if most < 2 else any(
                top_ngram_share(n, statistics) == pytest.approx(one) for one in allowed)


DROPPED = {
    "min-words": "The cat and the dog.", "max-words": "the and " * 51_000,
    "min-word-length": "to be or at of an " * 20,
    "max-word-length": "the and incomprehensibility institutionalisation " * 30,
    "hashes": PROSE + "# " * 20, "ellipses": PROSE + "so ... " * 30,
    "bullet-lines": "\n".join(f"- the item {number} and more" for number in range(20)),
    "ellipsis-lines": "\n".join(f"the item {number} and more..." for number in range(20)),
    "words-with-letters": PROSE + "123 4567 " * 20, "stop-words": "colourless green ideas sleep furiously " * 15,
    "repeated-lines": PROSE + "the same line\n" * 5, "repeated-paragraphs": PROSE + "the same\n\n" * 5,
    "repeated-line-characters": PROSE + PROSE.split("\n")[0] + "\n" + PROSE.split("\n")[1],
    "repeated-paragraph-characters": PROSE + "\n" + PROSE,
    "top-2-gram": "of the " * 30 + PROSE, "top-3-gram": "all of the " * 15 + PROSE,
    "top-4-gram": "all of the old " * 9 + PROSE,
    **{f"repeated-{n}-grams": PROSE.replace("\n", " ") * 2 for n in range(5, 11)},
    "finished-lines": PROSE.replace(".", "").replace("!", ""), "short-lines": "\n".join(PROSE.split(" ")),
    "fineweb-repeated-line-characters": PROSE + PROSE.split("\n")[0],
    "sentences": "one sentence of the text. and another", "lorem-ipsum": PROSE + "Lorem ipsum dolor.",
    "curly-brackets": PROSE + "if (x) { }"}


def test_every_rule_drops_the_text_that_was_planted_for_it_and_no_rule_drops_prose() -> None:
    assert DROPPED.keys() == ALL_RULES.keys()
    for name, text in DROPPED.items():
        found = make_quality({name: ALL_RULES[name].limit})(Document(text))
        assert found == DroppedDocument(name.replace("-", " ")), name
    everything = make_quality(parse_rules([*RULES]), drop_lines=True)
    document = Document(PROSE + "They sing of it. The song is long, and it has no end.\n", "u", {"a": 1})
    assert everything(document) == document


def test_limits_and_switches_of_rules() -> None:
    assert parse_rules(["max-words=7", "gopher", "stop-words=off"]) == {
        **{name: rule.limit for name, rule in RULES["gopher"].items() if name != "stop-words"}, "max-words": 7}
    assert parse_rules(["sentences=3"]) == {"sentences": 3}
    for words in (["gofer"], ["max-words"], ["max-words=many"], ["top-9-gram=0.1"], ["max-words=nan"]):
        with pytest.raises(ValueError):
            parse_rules(words)


def test_lines_of_notices_code_and_two_words_are_left_out() -> None:
    text = "Menu here\n" + PROSE + "\nPlease enable JavaScript to see this page.\nWe make use of cookies here.\n"
    assert make_quality({}, drop_lines=True)(Document(text)) == Document(PROSE + "\n")


@pytest.mark.parametrize("text, masked", [
    ("write to a.b+c@mail.example.co.uk, please", f"write to {EMAIL_MARK}, please"),
    ("at 8.8.8.8 and 8.8.4.4.", f"at {IP_MARK} and {IP_MARK}."), ("10.0.0.1 and 127.0.0.1 are private", None),
    ("version 1.2.3.4.5, 300.1.1.1, v1.1.1.1x", None), ("an @name, a@b, me at home", None),
    *((f"Call {number}, please.", f"Call {PHONE_MARK}, please.") for number in (
        "+1 (415) 555-2671", "415-555-2671", "(212) 555-0199", "+49 30 901820", "+442079460958", "1-800-555-0199",
        "+33 1 23 45 67 89", "+1\u00a0415\u00a0555\u00a02671")),
    ("call 212-555-0100x12", f"call {PHONE_MARK}x12"), ("Tel.+44 20 7946 0018", f"Tel.{PHONE_MARK}"),
    *((text, None) for text in ("2019-11-29", "ISBN 978-0-306-40615-7", "4111 1111 1111 1111", "3.141-592-6535", "+12",
                                "10.000-20.000", "+3.14159265", "+40.7127753", "+100 000 000 euros",
                                "x415-555-2671", "1914-1918", "+1 2 3 4 5")),
])
def test_addresses_of_people_are_masked(text: str, masked: str | None) -> None:
    assert mask(text) == (text if masked is None else masked)
