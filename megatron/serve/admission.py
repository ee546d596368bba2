"""Which requests the server accepts: size and time limits, API key, Host check, and the HTTP error of a refusal.

On the loopback only requests for loopback names, and for those of --allowed-host, are accepted: this stops DNS
rebinding by a page of another site. Does not import torch: the limits are flags.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, final

from megatron.config.tree import require


def _limit(default: float | None, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Each field is a flag. None: the positions of the model."""

    max_body_bytes: int = _limit(1 << 20, "largest body of a request (1 MiB)")
    max_header_bytes: int = _limit(16 << 10, "largest head of a request (16 KiB)")
    max_prompt_tokens: int | None = _limit(None, "longest prompt (the model's positions)")
    max_new_tokens: int | None = _limit(None, "most new tokens of a text (the model's positions)")
    max_texts: int = _limit(128, "most texts of a request, prompts times samples (128, or as many as may wait)")
    max_waiting: int = _limit(256, "most texts that wait for their turn; beyond, requests are answered with 503 (256)")
    max_connections: int = _limit(256, "most connections at a time (256)")
    request_seconds: float = _limit(20.0, "time for a request to arrive whole (20)")
    write_seconds: float = _limit(30.0, "time for a client to take what it is sent (30)")
    grace: float = _limit(30.0, "seconds for what is under way once the server is asked to stop (30)")


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for limit in fields(ServerLimits):
        is_seconds = isinstance(limit.default, float)
        group.add_argument(f"--{limit.name.replace('_', '-')}", type=float if is_seconds else int,
                           default=None if limit.name == "max_texts" else limit.default,
                           metavar="S" if is_seconds else "N", help=limit.metadata["help"])


def limits_from_args(args: argparse.Namespace) -> ServerLimits:
    limits = {field.name: getattr(args, field.name) for field in fields(ServerLimits)}
    for name, value in limits.items():
        least = 0 if name in ("max_waiting", "grace") else 1e-3 if isinstance(value, float) else 1
        require(value is None or least <= value < float("inf"), f"--{name.replace('_', '-')} is {value}: expected "
                f"{'0 or more' if not least else 'more than 0'}")
    capacity = args.max_waiting + args.batch_size
    if args.max_texts is None:
        limits["max_texts"] = min(ServerLimits.max_texts, capacity)
    require(limits["max_texts"] <= capacity, f"--max-texts {args.max_texts} is more than --max-waiting and "
            f"--batch-size have room for together, {capacity}: such a request could never be taken")
    return ServerLimits(**limits)


@final
class HttpError(Exception):
    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: tuple[tuple[str, str], ...] = ()) -> None:
        """`param`: the key that is wrong; `code`: OpenAI's error code; `headers`: of the response."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def invalid_field(name: str, message: str) -> HttpError:
    return HttpError(400, f"{name}: {message}", param=name)


LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


def is_loopback(host: str) -> bool:
    if host.lower().rstrip(".") in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@final
class AuthPolicy:
    def __init__(self, host: str, key: str | None, allowed: Iterable[str] = ()) -> None:
        self._key = None if key is None else key.encode()
        self._any_host = not is_loopback(host)
        self._allowed_hosts = {host.lower(), *LOOPBACK_NAMES, *(name.lower() for name in allowed)}

    def check(self, headers: Mapping[str, str], needs_key: bool) -> None:
        """Refuses a Host header that is not one of our names, and a request without the key."""
        host = headers.get("host")
        if not self._any_host and host is not None:
            match = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](:\d*)?|([^:\[\]]+)(:\d*)?", host)
            name = (match[1] or match[3]).lower() if match else ""
            if name not in self._allowed_hosts and not is_loopback(name):
                raise HttpError(403, "this server answers on its own machine only, to requests for localhost; "
                                "--allowed-host admits another name")
        if needs_key and self._key is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            good = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key)
            if scheme.lower() != "bearer" or not good:
                raise HttpError(401, "this server wants a key: send it as Authorization: Bearer KEY",
                                code="invalid_api_key", headers=(("WWW-Authenticate", "Bearer"),))
