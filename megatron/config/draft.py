"""A configuration in the making: whatever finds something wrong with it notes that here, and all ends as one error.

Checks go from the keys of a file to the values of single settings, and on to settings together. One that an earlier
check has said something of is *in doubt*: what a later check says of it may follow from that, and is left out. So an
error is told once, and nothing is told that is gone when the errors before it are mended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from megatron.config.problems import ConfigErrors, sentences_of
from megatron.config.words import Words, flags_in
from megatron.errors import ConfigError


class Draft:
    """What is wrong so far, and with which settings."""

    def __init__(self) -> None:
        self.words = Words()
        """How what is noted from now on is said."""
        self.is_wrong = False
        self._sentences: list[str] = []
        self._doubtful: set[str] = set()
        self._file = ""

    def doubt(self, flags: Iterable[str]) -> None:
        self._doubtful.update(*map(flags_in, flags))

    def note(self, sentences: Iterable[str], file: str = "") -> None:
        """What one check has found, in the names of flags; `file`: in the words of this file."""
        told = [sentence for sentence in sentences if self._doubtful.isdisjoint(flags_in(sentence))]
        said = told if file else list(map(self.words.of, told))
        if file and told or said != told:
            self._file = file or self.words.file
        self._sentences += said
        self.doubt(told)
        self.is_wrong = bool(self._sentences)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A ConfigError of the block is noted, and what comes after the block goes on."""
        try:
            yield
        except ConfigError as error:
            self.note(sentences_of(error))

    def stop(self) -> None:
        """Raise what was noted, as one error."""
        if self._sentences:
            raise ConfigErrors(self._sentences, self._file)
