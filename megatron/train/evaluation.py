"""Loss on held-out text, and a text sample at the end of training. Neither draws from training's random streams.

Every evaluation reads the same first samples of its dataset, so numbers of one run compare and resuming needs no state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from data.tokenizer import Tokenizer
from megatron.config.tree import Config
from megatron.inference.generation import Generator
from megatron.inference.live import engine_decoder
from megatron.inference.request import GenerationConfig, Sampling
from megatron.train.batches import Batch, MicroBatchSampler, Samples
from megatron.zero.api.engine import Engine
from mpu.collectives import all_reduce

STOP_CHECK_SECONDS = 0.5
"""How long an evaluation goes on without asking whether it shall, about."""


StopCheck = Callable[[float], float]
"""All ranks ask it after the same round, with the seconds that one takes on theirs; it says how many it takes on the
slowest, the same on all. Infinitely many: the evaluation shall end here."""


class SizedSamples(Samples, Protocol):
    """A dataset that knows how many different samples it has."""

    @property
    def distinct_samples(self) -> int | None: ...


class EvaluationLoss(NamedTuple):
    loss: float
    """The mean of the micro-batches, in nats a token."""
    bits_per_byte: float | None = None
    """Of the text that the targets stand for; None where that is not known."""


@torch.no_grad()
def evaluate(
    engine: Engine, samples: SizedSamples, sampler: MicroBatchSampler, global_batches: int, device: torch.device,
    token_bytes: torch.Tensor | None = None, stop_check: StopCheck = float,
) -> EvaluationLoss | None:
    """Over `global_batches`, or over as many whole rounds of all ranks as the dataset has samples for. `token_bytes`:
    of each id, the bytes of the text that it stands for. None: `goes_on` ended it early."""
    round_size = sampler.micro_batch * sampler.dp_size
    rounds = global_batches * sampler.accumulation
    if samples.distinct_samples is not None:
        rounds = max(1, min(rounds, samples.distinct_samples // round_size))
    total, nats = torch.zeros((2,), dtype=torch.float64, device=device)
    text = 0.0
    done = 0
    engine.train(False)
    try:
        for index in _iterate_rounds(rounds, stop_check, total.item):
            first = index * round_size + sampler.dp_rank * sampler.micro_batch
            batch = sampler.load_batch(samples, range(first, first + sampler.micro_batch))
            loss = forward_loss(engine, batch.to(device)).double()
            total += loss
            if token_bytes is not None:
                nats += loss * batch.loss_token_count
                text += batch.sum_over_loss_tokens(token_bytes)
            done += 1
        engine.conclude()  # no rank has received another's blocks
    finally:
        engine.train(True)
    if done < rounds:
        return None
    sums = all_reduce(torch.stack([total, nats, torch.full_like(total, text)]), engine.groups.dp).tolist()
    return EvaluationLoss(sums[0] / (rounds * sampler.dp_size), sums[1] / (math.log(2) * sums[2]) if sums[2] else None)


def _iterate_rounds(rounds: int, stop_check: StopCheck, wait: Callable[[], object]) -> Iterator[int]:
    """Their numbers; fewer, where the evaluation shall end. `wait` returns when an accelerator has done what it was
    given: only then is it known how long that takes."""
    asked_at, ask_next, began = 0, 1, time.monotonic()
    for index in range(rounds):
        if index == ask_next:
            wait()
            seconds = stop_check((time.monotonic() - began) / (index - asked_at))
            if seconds == math.inf:
                return
            asked_at, ask_next, began = index, index + max(1, int(STOP_CHECK_SECONDS / seconds)), time.monotonic()
        yield index


def forward_loss(engine: Engine, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = engine(batch.tokens, batch.targets, batch.loss_weight, batch.positions, batch.segments,
                                grad_scale=engine.backward_scale)
    return loss


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 20.0))  # nan stays nan


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
