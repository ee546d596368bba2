"""A made corpus of which everything is known: what is a copy of what, what is foreign or contaminated.

Original pages are babble: a chain of words in which each follows the one before as often as in Python's own English
documentation. So they look like English to every stage, there is any amount of them, and two of them share next to no
run of five words.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from data.webtext.documents import Document, shard_name

EVALUATION = ("The lighthouse keeper counted eleven grey ships before breakfast and wrote their names, as she had "
              "every morning since the war, into a ledger that nobody would ever ask her to produce.")
BOILERPLATE = ("Home About Contact Sign in. We use cookies to improve your experience on our site. By continuing you "
               "agree to our terms of service and to our privacy policy. All rights reserved. ")
FOREIGN = {
    "de": "Der alte Mann ging jeden Morgen durch den Wald und sprach dabei leise mit den Vögeln, die ihm folgten. ",
    "fr": "Chaque matin, le vieil homme traversait la forêt en parlant doucement aux oiseaux qui le suivaient. ",
    "es": "Cada mañana, el anciano cruzaba el bosque hablando en voz baja con los pájaros que lo seguían. ",
    "ru": "Каждое утро старик шёл через лес и тихо разговаривал с птицами, которые летели за ним. ",
    "zh": "每天早上，老人都会穿过森林，轻声地和跟着他的鸟儿说话。",
}


IS_PROSE = re.compile(r"""["'(]*[A-Za-z]+(['-][A-Za-z]+)?[.,;:!?'")]*""").fullmatch
"""No rulers, names with underscores or pieces of code: which there are differs between versions of Python."""


@dataclass(frozen=True)
class Page:
    """One document and what is true of it."""

    text: str
    kind: str
    """original, exact, near (edited), foreign, boilerplate, contaminated."""
    rate: float = 0.0
    """Share of the words that were changed."""


@cache
def _followers() -> dict[str, list[str]]:
    followers = defaultdict(list)
    for _, text in sorted(topics.items()):
        plain = text.split()
        for word, following in zip(plain, plain[1:]):
            if IS_PROSE(word) and IS_PROSE(following):
                followers[word].append(following)
    return dict(followers)


def babble(rng: random.Random, words: int) -> str:
    """English words in an order that is nearly English, in paragraphs."""
    followers = _followers()
    start = word = "The"
    found = []
    for number in range(words):
        found.append(word + ("\n\n" if number % 80 == 79 else " "))
        word = rng.choice(followers.get(word, [start]))
    return "".join(found).strip()


def edited(rng: random.Random, text: str, rate: float) -> str:
    """The text with that share of its words replaced, left out or doubled."""
    parts = text.split(" ")
    places = rng.sample(range(len(parts)), round(rate * len(parts)))
    for place in places:
        parts[place] = rng.choice(["replaced", "", f"{parts[place]} {parts[place]}"])
    return " ".join(part for part in parts if part)


def scrambled(rng: random.Random, sentence: str) -> str:
    """The words (or characters, where words are not spaced) of a sentence in a dozen orders."""
    space = " " if " " in sentence else ""
    parts = sentence.split() if space else list(sentence)
    return space.join(part for _ in range(12) for part in rng.sample(parts, len(parts)))


def plant(seed: int, originals: int, rates: Sequence[float] = (0.01, 0.05, 0.2), words: int = 400) -> list[Page]:
    """Originals of half to twice as many `words`, and as many each of exact copies, copies at every edit rate,
    boilerplate pages, contaminated pages; a tenth as many foreign ones. Copies come later, anywhere."""
    rng = random.Random(seed)
    pages = [Page(babble(rng, rng.randint(words // 2, 2 * words)), "original") for _ in range(originals)]
    made = []
    for page in pages:
        made.append(Page(page.text.replace("\n\n", "\n"), "exact"))
        made += [Page(edited(rng, page.text, rate), "near", rate) for rate in rates]
        made.append(Page(BOILERPLATE + babble(rng, words), "boilerplate"))
        made.append(Page(f"{babble(rng, words)} {EVALUATION.upper()} {babble(rng, words)}", "contaminated"))
    for _ in range(max(1, originals // 10)):
        made += [Page(scrambled(rng, sentence), "foreign") for sentence in FOREIGN.values()]
    rng.shuffle(made)
    return pages + made


def write(pages: Sequence[Page], folder: Path, shards: int = 3) -> list[Path]:
    """As shards of lines, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / shard_name(number) for number in range(shards)]
    for number, path in enumerate(paths):
        part = pages[len(pages) * number // shards:len(pages) * (number + 1) // shards]
        path.write_bytes(b"".join(Document(page.text).to_line() for page in part))
    return paths
