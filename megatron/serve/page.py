"""The page to try a model in a browser: one file, which loads nothing and runs nothing but what is in it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import final


@final
class PlaygroundPage:
    def __init__(self) -> None:
        self.body = Path(__file__).with_name("page.html").read_bytes()
        text = self.body.decode()
        policy = (f"default-src 'none'; script-src {_csp_hash(text, 'script')}; style-src {_csp_hash(text, 'style')}; "
                  "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'")
        self.headers = (("Content-Security-Policy", policy), ("Referrer-Policy", "no-referrer"),
                        ("X-Frame-Options", "DENY"), ("Cross-Origin-Opener-Policy", "same-origin"),
                        ("Cross-Origin-Resource-Policy", "same-origin"))


def _csp_hash(text: str, tag: str) -> str:
    """Of what the tag encloses: nothing else is run, or drawn with."""
    match = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert match is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()}'"
