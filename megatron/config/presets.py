"""The shapes that `--preset` names."""

from __future__ import annotations

from typing import Any


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "max_position_embeddings": 1024,
            "tokenizer_type": "GPT2BPETokenizer"}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32,
             "tokenizer_type": "ByteLevelTokenizer"},
    "small": {"num_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "max_position_embeddings": 256,
              "tokenizer_type": "SentencePieceTokenizer"},
    "124M": _gpt2(12, 768, 12),
    "345M": _gpt2(24, 1024, 16),
    "774M": _gpt2(36, 1280, 20),
    "1.5B": _gpt2(48, 1600, 25),
    "8.3B": _gpt2(72, 3072, 24),
    "10B": _gpt2(50, 4096, 32),
    "20B": _gpt2(98, 4096, 32),
    "40B": _gpt2(88, 6144, 48),
    "100B": _gpt2(125, 8192, 64),
    "175B": {**_gpt2(96, 12288, 96), "max_position_embeddings": 2048},
    "1T": _gpt2(128, 25600, 160),
}
"""`--preset` -> the fields it fills in; a flag that is given wins. From 20B on they are shapes of the ZeRO papers, and
175B is GPT-3's: of interest to the planner above all."""
