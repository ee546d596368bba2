"""A text sample at the end of training: the text that `python -m megatron.generate` makes of its checkpoint."""

from __future__ import annotations

from data.tokenizer import Tokenizer
from megatron.config.tree import Config
from megatron.inference.generation import Generator
from megatron.inference.live import engine_decoder
from megatron.inference.request import GenerationConfig, Sampling
from megatron.zero.api.engine import Engine

SAMPLE_SETTINGS = Sampling(temperature=0.8, top_k=40)
"""As by default there."""


def generate_sample(engine: Engine, tokenizer: Tokenizer, config: Config) -> str:
    """The configured prompt continued; the same text on every rank, and for every layout. No random stream of training
    is touched. Collective."""
    typed = config.log.sample_prompt.encode("utf-8", "surrogateescape")  # bytes that the locale cannot read
    prompt = tuple(int(i) for i in tokenizer.encode(typed.decode("utf-8", "replace"))) or (tokenizer.eod,)
    defaults = GenerationConfig(config.log.sample_tokens, SAMPLE_SETTINGS, sliding_window=True)
    with engine_decoder(engine, rows=1) as reader:
        generator = Generator(reader, vocabulary=tokenizer.vocab_size, eod=tokenizer.eod, sliding_window=True)
        (text,) = generator.generate(defaults.make_requests(prompt, 0))
    return tokenizer.decode(text.ids)


def printable(text: str) -> str:
    """One line for a console, as a Python literal of the text. Bytes that are not UTF-8, which a young byte-level model
    makes, have become U+FFFD: that is escaped like a control character, with a word on what it is."""
    lost = "\ufffd" in text
    return repr(text).replace("\ufffd", r"\ufffd") + (r" (\ufffd: bytes that are not UTF-8)" if lost else "")
