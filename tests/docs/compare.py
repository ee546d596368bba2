"""Whether a program printed what its page shows.

Text is compared line by line; blank lines and the width of spaces do not count. What may differ:

- `...` alone on a line stands for any number of lines, inside a line for any text, and `.../` for no
  folder or any;
- times, rates, memory and process numbers (`VARIES`) may be any number;
- other numbers with a point or an exponent may differ by 1%, sizes in bytes too: processors round differently;
- a checksum (64 hexadecimal digits, or at least 8 of them and `...`) may be another one, but the same on the page
  must be the same in what is printed.

Whole numbers are compared as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

VARIES = re.compile(
    r"(?:\(ms\): |tokens/s |TFLOP/s |MFU |memory |pid )$"
    r"|^ (?:s|ms|seconds|documents/s|MB/s|GB/s)\b"
)
"""Before or after such words a number may be any."""

TOLERANCE = 0.01

_TOKEN = re.compile(r"""
    (?P<checksum> \b[0-9a-f]{64}\b | \b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,63}(?=\.\.\.) )
  | (?P<gap> \.\.\./? )
  | (?P<number> (?<![\w.]) -?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d+)? (?![\w]) )
""", re.X)
_ANY_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?|nan|inf)"


class Comparison:
    """Compares the outputs of one page; remembers which checksum stands for which."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, str]] = []

    def difference(self, shown: str, printed: str) -> str | None:
        """None where `printed` is what `shown` promises; otherwise both, for a person."""
        expected, actual = _lines(shown), _lines(printed)
        pairs, lost = _align(expected, actual)
        if pairs is None:
            return (f"{'not printed: ' + lost if lost else 'more was printed'}\nthe page shows\n{_indented(expected)}\n"
                    f"and the command printed\n{_indented(actual)}")
        for mine, theirs in pairs:
            for shown_before, printed_before in self._pairs:
                if _begin_alike(mine, shown_before) != _begin_alike(theirs, printed_before):
                    return f"the page shows {mine} and {shown_before}; printed were {theirs} and {printed_before}"
            self._pairs.append((mine, theirs))
        return None


def _begin_alike(one: str, other: str) -> bool:
    """Whether two checksums, one of them perhaps cut short, can be the same."""
    return one.startswith(other) or other.startswith(one)


def _lines(text: str) -> list[str]:
    counted = re.sub(r"\b\d+ threads?\b", "N threads", text)
    return [" ".join(line.split()) for line in counted.splitlines() if line.strip()]


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


def _align(shown: Sequence[str], printed: Sequence[str]) -> tuple[list[tuple[str, str]] | None, str]:
    """The checksums of both sides, in pairs, where every line finds its line; else None and the first that does not."""
    reached: dict[int, list[tuple[str, str]]] = {0: []}  # lines of `printed` used so far -> the pairs on the way there
    for line in shown:
        if line == "...":
            first = min(reached)
            reached = {n: reached.get(n, reached[max(m for m in reached if m <= n)])
                       for n in range(first, len(printed) + 1)}
            continue
        following = {}
        for at, pairs in reached.items():
            found = match_line(line, printed[at]) if at < len(printed) else None
            if found is not None:
                following[at + 1] = pairs + found
        reached = following
        if not reached:
            return None, line
    return reached.get(len(printed)), ""


def match_line(shown: str, printed: str) -> list[tuple[str, str]] | None:
    """The pairs of checksums of a line that matches; None for one that does not."""
    pattern, tokens, at = "", [], 0
    for token in _TOKEN.finditer(shown):
        pattern += re.escape(shown[at:token.start()])
        at = token.end()
        if token["gap"]:
            pattern += "(?:.*?/)?" if token["gap"].endswith("/") else ".*?"
        else:
            tokens.append(token)
            pattern += r"\b([0-9a-f]{8,64})" if token["checksum"] else _ANY_NUMBER
    match = re.fullmatch(pattern + re.escape(shown[at:]), printed)
    if match is None:
        return None
    pairs = []
    for token, group in zip(tokens, match.groups()):
        if token["checksum"]:
            if len(group) < len(token["checksum"]):
                return None
            pairs.append((token["checksum"], group))
        elif not _same_number(token["number"], group, shown[:token.start()], shown[token.end():]):
            return None
    return pairs


def _same_number(shown: str, printed: str, before: str, after: str) -> bool:
    if shown == printed or any(VARIES.search(side) for side in (before, after)):
        return True
    whole = not re.search(r"[.eE]", shown)
    if printed in ("nan", "inf") or (whole and not after.startswith(" bytes")):
        return False
    mine, theirs = float(shown.replace(",", "")), float(printed.replace(",", ""))
    decimals = shown.lower().partition("e")[0].partition(".")[2]
    last_digit = 10.0 ** -len(decimals) * 10.0 ** int(shown.lower().partition("e")[2] or 0)
    return abs(mine - theirs) <= max(TOLERANCE * abs(mine), 0 if whole else 1.5 * last_digit)
