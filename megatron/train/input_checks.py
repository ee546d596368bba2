"""Check that the text and tokenizer files named by flags exist, before torch is imported."""

from __future__ import annotations

import data.tokenizer
from data.default_corpus import DEFAULT_FOLDER
from data.sampling import parse_split
from data.sources import check_sources
from megatron.config.tree import DataConfig
from megatron.errors import ConfigError

DEFAULT_TOKENIZER = "GPT2BPETokenizer"


def check_inputs(section: DataConfig) -> None:
    """Raise if text or tokenizer files do not exist, or no text is given."""
    if not section.mock_data and not section.train_data:
        raise ConfigError("no training text: give --train-data PREFIX, a text file or a folder, or --mock-data")
    for flag, words in (("--train-data", section.train_data), ("--valid-data", section.valid_data),
                        ("--test-data", section.test_data)):
        check_sources(words, flag)
    kind = data.tokenizer.canonical_kind(section.tokenizer_type or DEFAULT_TOKENIZER)
    data.tokenizer.check_tokenizer_files(kind, section.vocab_file, section.merge_file, tokenizer_path(section))
    parse_split(section.split)


def tokenizer_path(section: DataConfig) -> str | None:
    """--tokenizer-path; for the default corpus, the tokenizer trained on it."""
    if (section.tokenizer_path is None and "default" in section.train_data
            and section.tokenizer_type == "SentencePieceTokenizer"):
        return str(DEFAULT_FOLDER / "tokenizer.model")
    return section.tokenizer_path
