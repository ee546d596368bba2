"""SentencePiece models: use one, or train a lossless one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from data.storage import DataError, staged_file
from data.tokenizer_base import END_OF_TEXT, REPLACEMENT_CHARACTER, Tokenizer, read_flag_file, tokenizer_fingerprint

LOSSLESS_PROBES = ("a", " a  b \n", "\ufb01\u2460\u2581")
"""Texts that a lossy model changes: start of text, white space, characters with a plain form."""


@final
class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. Models of `train_sentencepiece` are lossless."""

    name = "SentencePieceTokenizer"

    SPACE = "\u2581"
    """Stands for a space inside the model, which also reads this character as a space unless it is encoded as bytes."""

    def __init__(self, model_file: str, flag: str = "--tokenizer-path") -> None:
        import sentencepiece

        model = read_flag_file(model_file, flag)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"{flag} {model_file}: not a SentencePiece model") from error
        self._num_pieces = int(self._model.vocab_size())
        end = int(self._model.eos_id())
        self.eod = end if end >= 0 else self._num_pieces
        self.vocab_size = max(self._num_pieces, self.eod + 1)
        spelled = [int(self._model.piece_to_id(f"<0x{byte:02X}>")) for byte in self.SPACE.encode()]
        self._space_symbol_ids = spelled if self._model.unk_id() not in spelled else None
        self.fingerprint = tokenizer_fingerprint(self.name, model)
        # Spaces are safe to split at if no piece spans the start of a run of them, and no prefix is added to a text.
        pieces = map(self._model.id_to_piece, range(self._num_pieces))
        is_safe = not any(self.SPACE in piece.lstrip(self.SPACE) for piece in pieces) and all(
            self.encode(f"a{rest}") == self.encode("a") + self.encode(rest) for rest in (" b", "  b", " \n", " "))
        self.safe_split_characters = " " if is_safe else ""

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode("utf-8")
        if self._space_symbol_ids is None or self.SPACE not in text:
            return list(self._model.encode(text))
        first, *rest = text.split(self.SPACE)
        ids = list(self._model.encode(first))
        for part in rest:
            ids += self._space_symbol_ids + self._model.encode(part)
        return ids

    def byte_lengths(self) -> NDArray[np.int64] | None:
        """None for a lossy model: changes to the text are not in the ids."""
        model, found = self._model, np.zeros(self.vocab_size, np.int64)
        for token in range(self._num_pieces):
            if model.is_byte(token):
                found[token] = 1
            elif not (model.is_control(token) or model.is_unknown(token) or model.is_unused(token)):
                found[token] = len(model.id_to_piece(token).replace(self.SPACE, " ").encode())
        return found if all(found[self.encode(text)].sum() == len(text.encode()) for text in LOSSLESS_PROBES) else None

    def decode(self, ids: Iterable[int]) -> str:
        def kind_of(token: int) -> str:
            if token == self.eod:
                return END_OF_TEXT
            return "piece" if 0 <= token < self._num_pieces else REPLACEMENT_CHARACTER

        groups = ((kind, list(tokens)) for kind, tokens in groupby(map(int, ids), kind_of))
        return "".join(str(self._model.decode(tokens)) if kind == "piece" else kind * len(tokens)
                       for kind, tokens in groups)


def train_sentencepiece(texts: Iterable[str], model_path: str | Path, vocab_size: int) -> None:
    """Train a lossless model of exactly `vocab_size` ids, end of document included. Equal texts give equal files: BPE
    training counts integers, so threads do not matter."""
    import sentencepiece

    with staged_file(model_path) as file:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=file, model_type="bpe", vocab_size=vocab_size,
                byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
                remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True,
                character_coverage=0.9999, max_sentence_length=1 << 20, num_threads=2, minloglevel=2,
                unk_id=0, eos_id=1, bos_id=-1, pad_id=-1, eos_piece=END_OF_TEXT, unk_surface=REPLACEMENT_CHARACTER)
        except RuntimeError as error:
            raise DataError(f"{model_path}: cannot train a SentencePiece model of {vocab_size} ids: {error}") from error
