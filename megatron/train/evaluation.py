"""Loss on held-out text, and a text sample at the end of training. Neither draws from training's random streams.

Every evaluation reads the same first samples of its dataset, so numbers of one run compare and resuming needs no state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from data.gpt2_dataset import Dataset
from data.tokenizer import Tokenizer
from megatron.config.tree import Config
from megatron.inference.generation import Generator
from megatron.inference.live import engine_decoder
from megatron.inference.request import GenerationConfig, Request, Sampling
from megatron.train.batches import MicroBatchSampler
from megatron.zero.api.engine import Engine
from mpu.collectives import all_reduce

STOP_CHECK_SECONDS = 0.5  # approximate seconds between two stop checks


class EvaluationLoss(NamedTuple):
    loss: float  # mean over micro-batches, in nats per token
    bits_per_byte: float | None = None  # None if the byte length of tokens is unknown


@torch.no_grad()
def evaluate(engine: Engine, samples: Dataset, sampler: MicroBatchSampler,
             global_batches: int, device: torch.device, token_bytes: torch.Tensor | None = None,
             stop_check: Callable[[float], float] = float) -> EvaluationLoss | None:
    """Mean loss over `global_batches`, or over as many full rounds of all ranks as the dataset has samples for.
    `token_bytes` [vocab_size] enables bits per byte. `stop_check`, which all ranks call after the same round, maps the
    seconds per round on this rank to those on the slowest, or to inf: the evaluation ends, with None. Collective."""
    round_size = sampler.micro_batch * sampler.dp_size
    rounds = global_batches * sampler.accumulation
    if samples.distinct_samples is not None:
        rounds = max(1, min(rounds, samples.distinct_samples // round_size))
    total, nats = torch.zeros((2,), dtype=torch.float64, device=device)
    text, done = 0.0, 0  # bytes of text, rounds
    engine.train(False)
    try:
        last_check, next_check, began = 0, 1, time.monotonic()
        for index in range(rounds):
            if index == next_check:
                total.item()  # wait for the device, so that the rounds can be timed
                seconds = stop_check((time.monotonic() - began) / (index - last_check))
                if seconds == math.inf:
                    break
                last_check, next_check = index, index + max(1, int(STOP_CHECK_SECONDS / seconds))
                began = time.monotonic()
            first = index * round_size + sampler.dp_rank * sampler.micro_batch
            batch = sampler.load_batch(samples, range(first, first + sampler.micro_batch))
            loss = engine(*batch.to(device), grad_scale=engine.backward_scale).double()
            total += loss
            if token_bytes is not None:
                weight = torch.ones_like(batch.targets) if batch.loss_weight is None else batch.loss_weight
                nats += loss * float(weight.sum())
                text += float((token_bytes[batch.targets] * weight).sum())
            done += 1
        engine.finish_step()  # finish pending communication: no rank has received the other ranks' blocks yet
    finally:
        engine.train(True)
    if done < rounds:
        return None
    sums = all_reduce(torch.stack([total, nats, torch.full_like(total, text)]), engine.groups.dp).tolist()
    return EvaluationLoss(sums[0] / (rounds * sampler.dp_size), sums[1] / (math.log(2) * sums[2]) if sums[2] else None)


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 20.0))  # nan stays nan


SAMPLE_SETTINGS = Sampling(temperature=0.8, top_k=40)  # the defaults of `megatron.generate`


def generate_samples(engine: Engine, tokenizer: Tokenizer, config: Config) -> list[str]:
    """Continue each configured prompt. The texts are equal on every rank and for every layout; training's random
    streams are not used. Collective."""
    defaults = GenerationConfig(config.log.sample_tokens, SAMPLE_SETTINGS, sliding_window=True)
    requests: list[Request] = []
    for typed in config.log.sample_prompt:
        raw = typed.encode("utf-8", "surrogateescape")  # keep bytes that the locale cannot decode
        prompt = tuple(int(i) for i in tokenizer.encode(raw.decode("utf-8", "replace"))) or (tokenizer.eod,)
        requests += defaults.make_requests(prompt, len(requests))
    with engine_decoder(engine, rows=len(requests)) as reader:
        generator = Generator(reader, vocabulary=tokenizer.vocab_size, eod=tokenizer.eod, sliding_window=True)
        texts = sorted(generator.generate(requests), key=lambda text: text.request.number)
    return [tokenizer.decode(text.ids) for text in texts]


def printable(text: str) -> str:
    """The text on one line, as a Python literal. Bytes that are not UTF-8, common early in training of byte-level
    models, were decoded to U+FFFD: it is escaped and explained."""
    lost = "\ufffd" in text
    return repr(text).replace("\ufffd", r"\ufffd") + (r" (\ufffd: bytes that are not UTF-8)" if lost else "")
