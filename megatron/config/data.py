"""The section `data`: which text a run trains on, and how it is tokenized and cut into samples."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.problems import ErrorList
from megatron.config.setting import require, setting


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpora, their tokenizer, and how samples are cut from them."""

    train_data: tuple[str, ...] = setting(
        (), "corpus prefix, .jsonl or .txt file, folder of them, `webtext`, `default`; or weights and names in turn",
        "data-path", "train-data-path", "train-file", in_short_help=True, is_location=True)
    valid_data: tuple[str, ...] = setting(
        (), "validation corpus (default: the second part of --split)", "val-data-path", "validation-file",
        is_location=True)
    test_data: tuple[str, ...] = setting(
        (), "test corpus (default: the third part of --split)", "test-data-path", is_location=True)
    split: str = setting("949,50,1", "shares of --train-data for training, validation and test, by document",
                         metavar="SHARES")
    seq_length: int | None = setting(None, "tokens per sample (default: --max-position-embeddings)", in_short_help=True)
    tokenizer_type: str | None = setting(
        None, "GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer or CharacterLevelTokenizer", metavar="NAME",
        in_short_help=True)
    vocab_file: str | None = setting(None, "GPT-2 encoder.json (default: the packaged one)", is_location=True)
    merge_file: str | None = setting(None, "GPT-2 vocab.bpe (default: the packaged one)", is_location=True)
    tokenizer_path: str | None = setting(None, "SentencePiece model or character vocabulary", in_short_help=True,
                                         is_location=True)
    mock_data: bool = setting(False, "random tokens instead of a corpus, for benchmarks")
    data_cache_path: str | None = setting(None, "folder for sample indices and for the corpora made of text files",
                                          is_location=True)
    text_key: str = setting("text", "key of the text in .jsonl files", "json-key", metavar="KEY")
    document_separator: str | None = setting(
        None, "what ends a document inside a .txt file: blank-line, or a text such as '<|endoftext|>' "
        "(default: the end of the file)", metavar="TEXT")
    num_workers: int = setting(2, "data loading workers; 0 loads in the training thread",
                               "dataloader-num-workers")
    lazy_loader: bool = setting(False, "accepted for old scripts: corpora are always read where they are")
    reset_position_ids: bool = setting(False, "restart position numbers at each document")
    reset_attention_mask: bool = setting(False, "attend only within a document")
    eod_mask_loss: bool = setting(False, "ignore the loss of the token after an end-of-document token")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "num_workers", 0)
        problems.require_range(self, "seq_length", 1)
        problems.raise_if_any()
        require(
            not (self.mock_data and self.train_data),
            "--mock-data and --train-data exclude each other: give one of them",
        )
