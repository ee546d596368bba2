"""Signatures: whoever has no key cannot make a checkpoint, or change one, that a reader with the key accepts. No torch.

With a key, every record that is sealed (strict.py) is signed as well, and parts list a sha256 of each file beside its
crc32: manifest -> parts -> files, nothing is left that could be exchanged. The digest at the end of `save_id` ties each
part to its manifest (manifest.py). A reader without a key reads signed checkpoints like any others.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from megatron.errors import CheckpointError, ConfigError

SHORTEST = 16
"""Bytes of a key: fewer could be guessed."""
LONGEST = 1 << 16
FLAG = "--checkpoint-key"

_SIGNED = re.compile(rb',"hmac":"([0-9a-f]{64})"\Z')


@dataclass(frozen=True)
class Key:
    """The secret of those who may write checkpoints."""

    secret: bytes = field(repr=False)

    def sign(self, text: bytes | memoryview) -> bytes:
        """What follows `text` in a signed record."""
        return b',"hmac":"%s"' % self._sum(text)

    def check(self, text: memoryview, where: str) -> None:
        """`text` is a record up to its checksum: it must end with its signature."""
        signed = _SIGNED.search(bytes(text[-80:]))
        if signed is None:
            raise CheckpointError(f"{where}: is not signed, and {FLAG} takes only what is; leave the flag out if you "
                                  "trust it")
        if not hmac.compare_digest(signed[1], self._sum(text[:-len(signed[0])])):
            raise CheckpointError(f"{where}: its signature is not of the key of {FLAG}: it is of somebody else, or was "
                                  "changed")

    @property
    def mark(self) -> str:
        """What two keys differ in, and what says nothing about either."""
        return self._sum(b"the mark of a key")[:16].decode()

    def _sum(self, text: bytes | memoryview) -> bytes:
        return hmac.new(self.secret, text, sha256).hexdigest().encode()


def is_signed(text: bytes | memoryview) -> bool:
    """A record up to its checksum ends with a signature, whosever it is."""
    return _SIGNED.search(bytes(text[-80:])) is not None


def read_key(path: str | Path | None, flag: str = FLAG) -> Key | None:
    """The key in a file, whose line ends do not count; None without a file."""
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            secret = file.read(LONGEST + 1).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be read ({error.strerror})") from error
    if not SHORTEST <= len(secret) <= LONGEST:
        raise ConfigError(f"{flag} {path}: a key has {SHORTEST} to {LONGEST} bytes, this file has {len(secret)}; make "
                          "one with `openssl rand -hex 32`")
    return Key(secret)
