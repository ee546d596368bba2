"""What a page declares is what the steps of the HTML standard find, for any bytes."""

from __future__ import annotations

import random

from data.webtext.encoding import declared_encoding
from tests.data.webtext.prescan_steps import prescan

FRAGMENTS = [
    b"<meta", b"<META ", b" charset", b"charset", b"=", b" = ", b'"', b"'", b">", b"/>", b" ", b"\n", b"/", b"<!--",
    b"-->", b"<!", b"</", b"<?", b"<p", b"</p>", b"utf-8", b"koi8-r>", b'utf-16">', b"koi8-r", b"bogus", b"http-equiv",
    b"content-type", b"content", b"text/html; charset=koi8-r", b";", b"<", b"<a href=", b"<1>", b"x-user-defined"]
OFTEN = [b"<meta charset=", b'<meta charset="', b"<meta http-equiv=content-type content='text/html; charset="]


def test_the_prescan_finds_what_the_steps_of_the_standard_find() -> None:
    rng, found = random.Random(5), 0
    for _ in range(20_000):
        page = b"".join(rng.choices([*FRAGMENTS, *OFTEN], [1] * len(FRAGMENTS) + [6, 4, 1], k=rng.randint(1, 10)))
        page = b"<p>" + page + b"<body>"  # not the declaration of XML; and no second search of the head
        expected, encoding = prescan(page), declared_encoding(page)
        assert (encoding and encoding.name) == expected, page
        found += expected is not None
    assert found > 100
