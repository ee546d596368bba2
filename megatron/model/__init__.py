"""GPT-2 as tensor-parallel modules; knows mpu and its own config section, never the engine.

gpt2.py (embeddings, blocks, logits), block.py (one transformer block), attention.py and mlp.py (its halves), init.py
(initial weights).
"""

from megatron.config.tree import ModelConfig
from megatron.model.gpt2 import GPT2

__all__ = ["GPT2", "ModelConfig"]
