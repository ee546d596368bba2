"""The section `model`: the shape of the GPT-2, its dropout and its initial weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.problems import ErrorList
from megatron.config.setting import setting
from megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the GPT-2. `--preset` fills it in; flags that are given win."""

    num_layers: int = setting(24, "transformer blocks", "n-layer", in_short_help=True)
    hidden_size: int = setting(1024, "width of the residual stream", "n-embd", in_short_help=True)
    num_attention_heads: int = setting(16, "attention heads; must divide the hidden size", "n-head", in_short_help=True)
    intermediate_size: int | None = setting(None, "width of the MLP (default: 4 x hidden size)", "ffn-hidden-size")
    max_position_embeddings: int = setting(1024, "size of the position table: the longest sequence", "block-size")
    vocab_size: int | None = setting(None, "tokens in the vocabulary, before padding (default: the tokenizer's)")
    make_vocab_size_divisible_by: int = setting(
        128, "pad the vocabulary to a multiple of this times the tensor parallel size")
    attention_dropout: float = setting(0.1, "dropout on attention weights")
    hidden_dropout: float = setting(0.1, "dropout on embeddings and block outputs")
    layernorm_epsilon: float = setting(1e-5, "epsilon of every LayerNorm")
    init_method_std: float = setting(0.02, "standard deviation of the initial weights")
    memory_centric_tiled_linear: bool = setting(False, "cut each weight matrix of a block into tiles, so that stage 3 "
                                                       "gathers one tile at a time")
    tile_factor: int = setting(1, "a tile has about (hidden size / this) squared elements")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "num_layers hidden_size num_attention_heads intermediate_size", 1)
        problems.require_range(self, "max_position_embeddings vocab_size make_vocab_size_divisible_by", 1)
        problems.require_range(self, "attention_dropout hidden_dropout", 0, 0.999)
        problems.require_range(self, "layernorm_epsilon init_method_std", 0, open_low=True)
        problems.raise_if_any()
        problems.require_range(self, "tile_factor", 1, self.hidden_size)
        problems.require(
            self.hidden_size % self.num_attention_heads == 0,
            f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}",
        )
        problems.raise_if_any()

    @property
    def ffn_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def known_vocab_size(self) -> int:
        """The vocabulary size, which has to be known: the trainer fills it in from its tokenizer."""
        if self.vocab_size is None:
            raise ConfigError("ModelConfig has no vocab_size; give ModelConfig(vocab_size=tokenizer.vocab_size)")
        return self.vocab_size

    def parameters(self, vocab_size: int | None = None) -> int:
        """Exact parameter count (tied embeddings once), without vocabulary padding."""
        h, blocks = self.hidden_size, self.num_layers * self.block_parameters
        return (vocab_size or self.known_vocab_size) * h + self.max_position_embeddings * h + blocks + 2 * h

    @property
    def block_parameters(self) -> int:
        """Those of one transformer block."""
        h, ffn = self.hidden_size, self.ffn_size
        return (4 * h + 2 * h * ffn) + 4 * h * h + (5 * h + ffn)
