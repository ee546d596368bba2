"""Why something is not answered."""

from __future__ import annotations

from typing import final


@final
class Refusal(Exception):
    def __init__(self, status: int, message: str, *, name: str | None = None, code: str | None = None,
                 headers: tuple[tuple[str, str], ...] = ()) -> None:
        """`name` is that of the key that is wrong; `code` is a word for programs; `headers` go with the response."""
        super().__init__(message)
        self.status, self.message, self.name, self.code, self.headers = status, message, name, code, headers


def wrong(name: str, message: str) -> Refusal:
    """A key that cannot be honoured."""
    return Refusal(400, f"{name}: {message}", name=name)
