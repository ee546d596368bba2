"""The GPT-2 of this project in a loop of your own (docs/library.md): train to an epoch, evaluate, save; again: resume.

    PYTHONPATH=. python examples/own_loop_gpt2.py 2
    PYTHONPATH=. python -m megatron.launch --nproc-per-node 2 examples/own_loop_gpt2.py 3       # or torchrun
"""

import sys
from dataclasses import asdict

import torch

from data.tokenizer import ByteLevelTokenizer
from megatron import zero
from megatron.model import GPT2, ModelConfig

tokenizer = ByteLevelTokenizer()
ids = torch.tensor(tokenizer.encode("The cat sat on the mat. The dog lay on the rug. " * 60))
windows = [(ids[at:at + 64], ids[at + 1:at + 65]) for at in range(len(ids) - 64)]  # tokens, and the target of each
shape = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=64,
                    vocab_size=tokenizer.vocab_size, attention_dropout=0.0, hidden_dropout=0.0)
config = {"train_batch_size": 16, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
          "zero_optimization": {"stage": 2}}

engine, _, loader, _ = zero.initialize(model=GPT2(shape), training_data=windows[:-64], config=config)
valid_loader = engine.deepspeed_io(windows[-64:], route="eval")
path, state = engine.load_checkpoint("own_loop")  # (None, None) where nothing was saved yet
for epoch in range(state["epoch"] if path else 0, int(sys.argv[1])):
    for tokens, targets in loader:
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
    engine.eval()
    with torch.no_grad():
        losses = [engine(*(tensor.to(engine.device) for tensor in batch)) for batch in valid_loader]
    engine.train()
    if engine.global_rank == 0:
        print(f"epoch {epoch + 1}: validation loss {torch.stack(losses).mean():.3f}")
    engine.save_checkpoint("own_loop", client_state={"epoch": epoch + 1, "tokenizer": asdict(tokenizer.facts)})
