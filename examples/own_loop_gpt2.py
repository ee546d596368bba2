"""The GPT-2 of this project in a loop of your own: trained by the engine, saved, and asked for text.

    PYTHONPATH=. python examples/own_loop_gpt2.py
    PYTHONPATH=. python -m megatron.launch --nproc-per-node 2 examples/own_loop_gpt2.py       # or torchrun
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch

from data.tokenizer import ByteLevelTokenizer
from megatron import zero
from megatron.distributed.process_group import read_environment
from megatron.inference import init_inference
from megatron.model import GPT2, ModelConfig

TEXT = "The cat sat on the mat. The dog lay on the rug. The fox ran up the hill. "
CONFIG = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2},
}


def main(folder: str) -> None:
    tokenizer = ByteLevelTokenizer()
    shape = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=64,
                        vocab_size=tokenizer.vocab_size, attention_dropout=0.0, hidden_dropout=0.0)
    ids = torch.tensor(tokenizer.encode(TEXT * 60))
    windows = [(ids[start:start + 64], ids[start + 1:start + 65]) for start in range(0, len(ids) - 64, 3)]
    engine, _, loader, _ = zero.initialize(model=GPT2(shape), training_data=windows, config=CONFIG)
    for tokens, targets in loader:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
    Path(folder).mkdir(parents=True, exist_ok=True)
    engine.save_checkpoint(folder, client_state={"tokenizer": asdict(tokenizer.facts)})

    trained = init_inference(checkpoint=folder)
    found = trained.generate(torch.tensor([tokenizer.encode("The cat")]), max_new_tokens=40, do_sample=False)
    if read_environment().rank == 0:
        print(f"loss {loss.item():.3f}\n{tokenizer.decode(found[0].tolist())}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own_loop_gpt2")
