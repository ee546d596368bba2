"""A text sample at the end of training: temperature and top-k sampling with a random generator of its own."""

from __future__ import annotations

import torch

from data.tokenizer import Tokenizer
from megatron.config.tree import Config
from megatron.zero.api.engine import Engine

TEMPERATURE, TOP_K = 0.8, 40


@torch.no_grad()
def generate(engine: Engine, tokenizer: Tokenizer, config: Config, device: torch.device, seed: int = 0) -> str:
    """The configured prompt continued; the same text on every rank, and for every tensor parallel size."""
    ids = [int(i) for i in tokenizer.encode(config.log.sample_prompt)] or [tokenizer.eod]
    generator = torch.Generator().manual_seed(seed)
    engine.train(False)
    for _ in range(config.log.sample_tokens):
        window = torch.tensor([ids[-config.model.max_position_embeddings :]], device=device)
        token = _draw(engine(window)[0].float().cpu(), generator)
        if token == tokenizer.eod:
            break
        ids.append(token)
    engine.train(True)
    return tokenizer.decode(ids)


def _draw(logits: torch.Tensor, generator: torch.Generator) -> int:
    values, choices = (logits / TEMPERATURE).topk(min(TOP_K, logits.numel()))
    return int(choices[torch.multinomial(values.softmax(-1), 1, generator=generator)])


def printable(text: str) -> str:
    """One line for a console, as a Python literal of the text. Bytes that are not UTF-8, which a young byte-level model
    makes, have become U+FFFD: that is escaped like a control character, with a word on what it is."""
    lost = "\ufffd" in text
    return repr(text).replace("\ufffd", r"\ufffd") + (r" (\ufffd: bytes that are not UTF-8)" if lost else "")
