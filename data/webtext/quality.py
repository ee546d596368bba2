"""`quality`: published rules that drop texts which are not prose, and marks in place of personal addresses.

    gopher       lengths, symbols, bullets and stop words     Rae et al. 2021, section A.1.1
    repetition   repeated lines, paragraphs and n-grams       the same, table A1
    fineweb      short, repeated and unfinished lines         Penedo et al. 2024, section 3.6
    c4           placeholders, code and notices               Raffel et al. 2020, section 2.2

A rule is one number of a text and its limit; a text is dropped by the first rule that it breaks. `c4` also leaves out
single lines, before the other rules see the text. Fractions are of lines (paragraphs) or of characters. Words are what
stands between white space; for n-grams, runs of letters and digits whatever their case (minhash.py), so that
punctuation does not hide a repetition. A repeated line, paragraph or n-gram counts from its second time on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from ipaddress import IPv4Address

import numpy as np

from data.webtext.documents import Document, DocumentFunction, DroppedDocument
from data.webtext.minhash import HashedWords, hash_words, ngram_hashes

STOP_WORDS = frozenset("the be to of and that have with".split())
BULLETS = ("\u2022", "\u2023", "\u25cf", "-", "*")
ELLIPSES = ("...", "\u2026")
LINE_ENDS = (*".!?\"'", "\u201d", "\u2019", "\u2026", "\u3002")  # what ends a sentence, and quotes around one
SHORT_LINE = 30  # characters
NOTICES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
SENTENCE = re.compile(r"[.!?\u3002]+(?=[\s\"'\u201d)]|$)")
C4_LINE_WORDS = 3

EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[a-zA-Z0-9-]{1,63}(?:\.[a-zA-Z0-9-]{1,63})+\b")
IP_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
# International numbers with +, and those of North America: (212) 555-0100, 212-555-0100.
PHONE_NUMBER = re.compile(r"(?:(?<![\w+])\+(?:[1-9]\d{9,13}|(?:1|[2-9]\d{1,2})[ \xa0-](?:\(\d{1,4}\)[ \xa0-]?)?"
                          r"\d{1,8}(?:[ \xa0-]\d{2,8}){1,4})|"
                          r"(?<![\w+.-])(?:\+?1[ .\xa0-])?(?:\(\d{3}\)[ \xa0]?|\d{3}[.\xa0-])\d{3}[.\xa0-]\d{4})"
                          r"(?!\d|[.-]\d)")
MIN_PHONE_DIGITS = 8
EMAIL_MARK, IP_MARK = "email@example.com", "192.0.2.1"  # names and numbers that are reserved for examples
PHONE_MARK = "555-0100"


class TextStatistics:
    """A text, and its words, lines and paragraphs, each computed when a rule first asks for it."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip()]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part.strip() for part in re.split(r"\n\s*\n", self.text) if part.strip()]

    @cached_property
    def hashed(self) -> HashedWords:
        return hash_words(self.text)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Characters of each word of `hashed`."""
        return self.hashed.stops - self.hashed.starts


def share(values: Iterable[bool]) -> float:
    """The fraction of true values; 0 of none."""
    found = [*values]
    return sum(found) / max(1, len(found))


def mean_word_length(text: TextStatistics) -> float:
    return sum(map(len, text.words)) / max(1, len(text.words))


def repeated_share(parts: Sequence[str], by_characters: bool) -> float:
    """The share of parts that have come before."""
    seen, repeated, total = set[str](), 0, 0
    for part in parts:
        size = len(part) if by_characters else 1
        repeated, total = repeated + size * (part in seen), total + size
        seen.add(part)
    return repeated / max(1, total)


def top_ngram_share(n: int, text: TextStatistics) -> float:
    """The share of characters, of all words, that are in the most frequent n-gram."""
    hashes = ngram_hashes(text.hashed.hashes, n)
    if not len(hashes):
        return 0.0
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    most = int(counts.argmax())
    start = int(first[most])
    covered = int(counts[most]) * text.lengths[start : start + n].sum() if counts[most] > 1 else 0
    return min(1.0, float(covered / text.lengths.sum()))


def repeated_ngram_share(n: int, text: TextStatistics) -> float:
    """The share of characters in n-grams that have come before, each counted once."""
    hashes = ngram_hashes(text.hashed.hashes, n)
    repeated = np.ones(len(hashes), bool)
    repeated[np.unique(hashes, return_index=True)[1]] = False
    edges = np.zeros(len(text.lengths) + 1, np.int64)  # + 1 where a repeated n-gram begins, - 1 behind its end
    at = np.flatnonzero(repeated)
    np.add.at(edges, at, 1)
    np.add.at(edges, at + n, -1)
    covered = edges.cumsum()[:-1] > 0
    return float(text.lengths[covered].sum() / max(1, text.lengths.sum()))


@dataclass(frozen=True)
class Rule:
    measure: Callable[[TextStatistics], float]
    limit: float
    is_least: bool = False  # the smallest allowed value, and not the largest


RULES: dict[str, dict[str, Rule]] = {
    "gopher": {
        "min-words": Rule(lambda text: len(text.words), 50, True),
        "max-words": Rule(lambda text: len(text.words), 100_000),
        "min-word-length": Rule(mean_word_length, 3, True),
        "max-word-length": Rule(mean_word_length, 10),
        "hashes": Rule(lambda text: text.text.count("#") / max(1, len(text.words)), 0.1),
        "ellipses": Rule(lambda text: sum(map(text.text.count, ELLIPSES)) / max(1, len(text.words)), 0.1),
        "bullet-lines": Rule(lambda text: share(line.startswith(BULLETS) for line in text.lines), 0.9),
        "ellipsis-lines": Rule(lambda text: share(line.endswith(ELLIPSES) for line in text.lines), 0.3),
        "words-with-letters": Rule(lambda text: share(any(map(str.isalpha, word)) for word in text.words), 0.8, True),
        "stop-words": Rule(lambda text: len(STOP_WORDS.intersection(map(str.lower, text.words))), 2, True)},
    "repetition": {
        "repeated-lines": Rule(lambda text: repeated_share(text.lines, False), 0.3),
        "repeated-paragraphs": Rule(lambda text: repeated_share(text.paragraphs, False), 0.3),
        "repeated-line-characters": Rule(lambda text: repeated_share(text.lines, True), 0.2),
        "repeated-paragraph-characters": Rule(lambda text: repeated_share(text.paragraphs, True), 0.2),
        **{f"top-{n}-gram": Rule(partial(top_ngram_share, n), limit) for n, limit in ((2, 0.2), (3, 0.18), (4, 0.16))},
        **{f"repeated-{n}-grams": Rule(partial(repeated_ngram_share, n), (20 - n) / 100) for n in range(5, 11)}},
    "fineweb": {
        "finished-lines": Rule(lambda text: share(line.endswith(LINE_ENDS) for line in text.lines), 0.12, True),
        "short-lines": Rule(lambda text: share(len(line) < SHORT_LINE for line in text.lines), 0.67),
        "fineweb-repeated-line-characters": Rule(lambda text: repeated_share(text.lines, True), 0.1)},
    "c4": {
        "sentences": Rule(lambda text: len(SENTENCE.findall(text.text)), 5, True),
        "lorem-ipsum": Rule(lambda text: text.text.lower().count("lorem ipsum"), 0),
        "curly-brackets": Rule(lambda text: text.text.count("{"), 0)}}
ALL_RULES = {name: rule for rules in RULES.values() for name, rule in rules.items()}


def parse_rules(words: Sequence[str]) -> dict[str, float]:
    """Limits by rule of words such as `gopher`, `max-words=5000` and `stop-words=off`; ValueError for another word."""
    limits = {name: rule.limit for word in words if word in RULES for name, rule in RULES[word].items()}
    for word in words:  # single rules change those of a group, whichever comes first
        name, _, value = word.partition("=")
        if word in RULES:
            continue
        if name not in ALL_RULES or not value:
            raise ValueError(f"expected {', '.join(RULES)}, or RULE=LIMIT or RULE=off with RULE one of "
                             f"{', '.join(ALL_RULES)}; found {word!r}")
        if value == "off":
            limits.pop(name, None)
        elif not (limit := float(value)) >= 0:
            raise ValueError(f"{word}: expected a limit of 0 or more")
        else:
            limits[name] = limit
    return limits


def make_quality(limits: Mapping[str, float], drop_lines: bool = False, mask_addresses: bool = False
                 ) -> DocumentFunction:
    """`drop_lines` leaves out the lines that C4 does."""
    def quality(document: Document) -> Document | DroppedDocument:
        kept = "\n".join(filter(is_c4_line, document.text.split("\n"))) if drop_lines else document.text
        text = TextStatistics(kept)
        for name, limit in limits.items():
            value = ALL_RULES[name].measure(text)
            if value < limit if ALL_RULES[name].is_least else value > limit:
                return DroppedDocument(name.replace("-", " "))
        return replace(document, text=mask(kept) if mask_addresses else kept)

    return quality


def is_c4_line(line: str) -> bool:
    """Blank lines stay, since they separate paragraphs."""
    lower = line.lower()
    return not line.strip() or (len(line.split()) >= C4_LINE_WORDS and "javascript" not in lower
                                and not any(notice in lower for notice in NOTICES))


def mask(text: str) -> str:
    """Mail addresses, public IP addresses and phone numbers become those of examples."""
    if "@" in text:
        text = EMAIL.sub(EMAIL_MARK, text)
    text = PHONE_NUMBER.sub(lambda found: PHONE_MARK if sum(map(str.isdigit, found[0])) >= MIN_PHONE_DIGITS
                            else found[0], text)
    return IP_ADDRESS.sub(lambda found: IP_MARK if _is_public(found[0]) else found[0], text)


def _is_public(address: str) -> bool:
    try:
        return IPv4Address(address).is_global
    except ValueError:  # a number above 255
        return False
