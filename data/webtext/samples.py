"""Samples of a text for telling its language: words from its beginning to its end, without what is no language.

Markup, addresses, numbers and decoration (two signs or more in a row: `====`, `* * *`, arrows, box drawing, emoji) are
left out: to a detector they look like some language or other, and a page often begins with them.
"""

from __future__ import annotations

import re

SAMPLES = 5
WINDOW = 1000
"""Characters of a text from which a sample is taken."""
SAMPLE = 200
"""Characters of a sample: enough to tell languages apart. A text is cut into as many windows of this size at least."""
NEXT_SPACE = 80
"""Characters: no window begins or ends inside a word or an address that ends so soon."""

_MARKUP = re.compile(r"<[!/?a-zA-Z][^<>]{0,500}>|&#?\w{1,24};")
_ADDRESS = re.compile(r"\b(?:[a-zA-Z][a-zA-Z0-9+.-]{1,9}://|www\.)\S+|\b[a-zA-Z0-9._%+-]++@\S+")
_SIGN = (r"!-@\[-`{-~\xa1-\xa9\xab-\xb4\xb6-\xb9\xbb-\xbf\xd7\xf7\u2010-\u206f\u20a0-\u20cf\u2100-\u2bff\u3000-\u3004"
         r"\u3008-\u3030\ufe30-\ufe6f\uff01-\uff20\ufffd\ue000-\uf8ff\U0001f000-\U0001faff")
_DECORATION = re.compile(rf"[{_SIGN}](?:\s*[{_SIGN}])+")
_SPACE = re.compile(r"\s")
_LETTER = re.compile(r"[^\W\d_]")


def samples_of(text: str) -> list[str]:
    """At most `SAMPLES` of them, none without a letter; a short text is one."""
    return [sample for window in _windows(text) if _LETTER.search(sample := _words(window))]


def _windows(text: str) -> list[str]:
    """Parts of a text at equal distances: all of it where it is short."""
    count = max(1, min(SAMPLES, len(text) // SAMPLE))
    size = min(WINDOW, -(-len(text) // count))
    starts = [k * (len(text) - size) // max(1, count - 1) for k in range(count)]
    return [text[_space(text, start) if start else 0:_space(text, start + size)] for start in starts]


def _space(text: str, at: int) -> int:
    """Where a word or an address ends that is not too long."""
    space = _SPACE.search(text, at, at + NEXT_SPACE)
    return space.start() if space else at


def _words(window: str) -> str:
    if "<" in window or "&" in window:
        window = _MARKUP.sub(" ", window)
    if "://" in window or "www." in window or "@" in window:
        window = _ADDRESS.sub(" ", window)
    return " ".join(_DECORATION.sub(" ", window)[:2 * SAMPLE].split())[:SAMPLE]
