"""Decoding with int8, bf16 and fp32 weights: `OMP_NUM_THREADS=2 python benchmarks/int8_decode.py`.

The three models take turns, a token at a time, over a cache that a prompt has filled; printed are the tokens a second
of the quickest steps (the median of the best half), the bytes of the weights, and what share of a step's time reading
them once would take at the rate at which this machine sums up a table that no cache holds. Then reading the prompt, and
the time of each product alone. Weights are random: no time depends on them. With one thread
(OMP_NUM_THREADS=1) it is processor time, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron.checkpoint.reshard import TPSlice  # noqa: E402
from megatron.config.model_config import PRESETS  # noqa: E402
from megatron.config.tree import ModelConfig  # noqa: E402
from megatron.inference import load  # noqa: E402
from megatron.inference.decoder import Decoder  # noqa: E402
from megatron.inference.int8 import Int8  # noqa: E402
from megatron.model import GPT2  # noqa: E402
from mpu import groups  # noqa: E402

PRODUCTS = (("qkv", 3, 1), ("proj", 1, 1), ("fc", 4, 1), ("mlp.proj", 1, 4))
"""Name, outputs and inputs in hidden sizes."""


class Drawn:
    """Weights of a model that was never trained."""

    def __init__(self, shape: ModelConfig) -> None:
        self._flat = {name: parameter.detach().flatten() for name, parameter in GPT2(shape).named_parameters()}

    def read_slice(self, kind: str, name: str, local: TPSlice, offset: int, out: Tensor) -> None:
        out.copy_(self._flat[name][offset : offset + len(out)])


def quickest(times: list[float]) -> float:
    return median(sorted(times)[: max(1, len(times) // 2)])


def in_turns(work: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, one in work.items():
            begin = clock()
            one()
            if number:  # the first sets up kernels
                times[name].append(clock() - begin)
    return {name: quickest(found) for name, found in times.items()}


def bandwidth() -> float:
    """Bytes a second of reading."""
    table = torch.ones(1 << 27)
    return table.nbytes / in_turns({"": table.sum}, 5)[""]


def decode(models: dict[str, GPT2], batch: int, prompt: int, tokens: int, rate: float) -> None:
    decoders = {name: Decoder(model, batch) for name, model in models.items()}
    for decoder in decoders.values():
        decoder.prefill(range(batch), [[7] * prompt] * batch)
    found = in_turns({name: partial(decoder.decode_step, [7] * batch) for name, decoder in decoders.items()}, tokens)
    for name, seconds in found.items():
        weights = sum(parameter.nbytes for parameter in models[name].parameters())
        print(f"decode  batch {batch:2}  {name:5} {batch / seconds:8.1f} tokens/s  {found['bf16'] / seconds:5.2f} x "
              f"bf16  {weights / 1e6:6.1f} MB of weights, read in {weights / rate / seconds:4.0%} of the step",
              flush=True)


def read(models: dict[str, GPT2], prompt: int, rounds: int) -> None:
    decoders = {name: Decoder(model, 1) for name, model in models.items()}
    found = in_turns({name: partial(decoder.prefill, [0], [[7] * prompt])
                      for name, decoder in decoders.items()}, rounds)
    for name, seconds in found.items():
        print(f"read {prompt} tokens    {name:5} {1000 * seconds:8.1f} ms        {found['bf16'] / seconds:5.2f} x bf16")


def products(hidden: int, vocabulary: int, rows: int, rounds: int) -> None:
    shapes = [(name, hidden * out, hidden * of) for name, out, of in PRODUCTS] + [("logits", vocabulary, hidden)]
    for name, outputs, inputs in shapes:
        levels = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        scale = torch.rand(outputs)
        weights = {"fp32": levels.float(), "bf16": levels.bfloat16(), "int8": Int8(levels, scale.bfloat16()),
                   "int8, fp32": Int8(levels, scale)}
        x = {dtype: torch.randn(rows, inputs, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
        found = in_turns({kind: partial(F.linear, x[weight.dtype], weight) for kind, weight in weights.items()}, rounds)
        print(f"{name:8} {rows:3} rows  " + "  ".join(f"{kind} {1e6 * seconds:7.0f} us" for kind, seconds in
                                                      found.items()), flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="124M")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20, help="of products")
    asked = parser.parse_args()
    shape = ModelConfig(**{key: value for key, value in PRESETS[asked.preset].items() if key != "tokenizer_type"},
                        vocab_size=50257)
    grid, cpu = groups.build(), torch.device("cpu")
    found = load.OpenedModel(Drawn(shape).read_slice, shape, {}, "fp32", asked.preset)
    models = {name: load.build_model(found, grid, load.DTYPES[name], cpu) for name in ("fp32", "bf16", "int8")}
    rate = bandwidth()
    print(f"{torch.get_num_threads()} threads, {rate / 1e9:.1f} GB/s, int8 over {models['int8'].dtype}")
    for batch in asked.batch:
        decode(models, batch, asked.prompt, asked.tokens, rate)
    read(models, asked.prompt, max(3, asked.tokens // 8))
    for rows in (1, 8, asked.prompt):
        products(shape.hidden_size, shape.known_vocab_size, rows, asked.rounds)


if __name__ == "__main__":
    main()
