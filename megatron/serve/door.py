"""Who may ask.

A page of another site can make a browser send requests to this machine. It cannot read the answers, as no response
allows it to; it cannot send what we take, as only JSON is taken and a browser asks first before it sends that for
another site. What is left is a name of the attacker's that leads to 127.0.0.1, for which the browser takes us for the
attacker's own site: on the loopback, only names of the loopback are answered, and those that `--allowed-host` adds.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterable
from typing import final

from megatron.serve.limits import HttpError

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
        self._allowed_hosts = {host.lower(), *(name.lower() for name in allowed)}

    def check_host(self, header: str | None) -> None:
        """That the name the client used is one of ours."""
        if self._any_host or header is None:
            return
        match = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](:\d*)?|([^:\[\]]+)(:\d*)?", header)
        name = (match[1] or match[3]).lower() if match else ""
        if not is_loopback(name) and name not in self._allowed_hosts:
            raise HttpError(
                403, "this server answers on its own machine only, to requests for localhost; --allowed-host "
                "admits another name")

    def check_key(self, header: str | None) -> None:
        if self._key is None:
            return
        scheme, _, given = (header or "").partition(" ")
        good = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key)
        if scheme.lower() != "bearer" or not good:
            raise HttpError(401,
                            "this server wants a key: send it as Authorization: Bearer KEY",
                            code="invalid_api_key",
                            headers=(("WWW-Authenticate", "Bearer"), ))
