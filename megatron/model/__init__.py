"""GPT-2 as tensor-parallel modules; knows mpu and its config section, not the engine.

Begin with gpt2.py (embeddings, blocks, logits), then transformer.py (one block, initial weights).
"""

from megatron.config.tree import ModelConfig
from megatron.model.gpt2 import GPT2, count_parameters

__all__ = ["GPT2", "ModelConfig", "count_parameters"]
