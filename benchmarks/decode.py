"""Text a second: ours beside transformers' `generate`, a compiled loop in plain torch, and what memory allows.

    python benchmarks/decode.py --dtype bf16 --batch 1
    python benchmarks/decode.py --dtype int8 --batch 1 --contenders ours,ours-bf16

Random weights, the likeliest token, prompts of 128 tokens, 128 new ones; contenders take turns, medians over rounds.
NAME-DTYPE is a contender in another precision. A step is the time of 129 tokens less that of one, by 128. The floor is
the time to read the weights once, at the rate at which this machine sums a large array. Prefill is beside the forward
of training of the same prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import torch  # noqa: E402
from int8_decode import Drawn  # noqa: E402
from plain_decode import PlainDecoder  # noqa: E402
from plain_gpt2 import PlainGPT2  # noqa: E402

from megatron.config.model_config import PRESETS  # noqa: E402
from megatron.config.tree import ModelConfig, build_config  # noqa: E402
from megatron.inference import load  # noqa: E402
from megatron.inference.decoder import Decoder  # noqa: E402
from megatron.inference.generation import Generator, texts_of  # noqa: E402
from megatron.inference.request import Sampling  # noqa: E402
from megatron.model.gpt2 import GPT2  # noqa: E402
from mpu import groups  # noqa: E402

Prompts = Sequence[Sequence[int]]
Writes = Callable[[Prompts, int], object]
"""That many tokens after each prompt."""


@dataclass(frozen=True)
class Task:
    shape: ModelConfig
    dtype: str
    device: torch.device
    rows: int
    positions: int
    """A text and its prompt."""
    sampling: Sampling


def our_model(task: Task) -> GPT2:
    found = load.OpenedModel(Drawn(task.shape).read_slice, task.shape, {}, "fp32", "random weights")
    return load.build_model(found, groups.build(1), load.DTYPES[task.dtype], task.device)


def ours(task: Task) -> Writes:
    decoder = Decoder(our_model(task), task.rows)

    def text(prompts: Prompts, new: int) -> None:
        generator = Generator(decoder, vocabulary=task.shape.known_vocab_size, eod=None)
        found = texts_of(generator, prompts, new, task.sampling, 0)
        assert all(len(text.tokens) == new for text in found)
    return text


def transformers(task: Task) -> Writes:
    import transformers as library
    library.logging.set_verbosity_error()
    shape, sampling = task.shape, task.sampling
    config = library.GPT2Config(n_layer=shape.num_layers, n_embd=shape.hidden_size, n_head=shape.num_attention_heads,
                                vocab_size=shape.known_vocab_size, n_positions=shape.max_position_embeddings)
    model = library.GPT2LMHeadModel(config).to(task.device, load.DTYPES[task.dtype]).eval()
    drawn = {} if sampling.greedy else {"top_k": sampling.top_k, "temperature": sampling.temperature}

    def text(prompts: Prompts, new: int) -> None:
        ids = torch.tensor(prompts, device=task.device)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                       do_sample=not sampling.greedy, pad_token_id=0, **drawn)
    return text


def compiled(task: Task) -> Writes:
    """It is always greedy."""
    shape = task.shape
    model = PlainGPT2(shape.num_layers, shape.hidden_size, shape.num_attention_heads, shape.known_vocab_size,
                      shape.max_position_embeddings).to(task.device, load.DTYPES[task.dtype])
    return PlainDecoder(model.eval().requires_grad_(False), shape.num_attention_heads, task.rows, task.positions).text


CONTENDERS = {"ours": ours, "transformers": transformers, "compiled": compiled}


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of work that is over, on a device as well."""
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    wait()
    begin = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begin


def read_rate(device: torch.device) -> float:
    """Bytes a second."""
    numbers = torch.ones(1 << 26, dtype=torch.int64, device=device)
    return numbers.nbytes / min(seconds(numbers.sum, device) for _ in range(5))


def runs_of(asked: argparse.Namespace, task: Task) -> dict[str, Callable[[], object]]:
    prompts = torch.randint(task.shape.known_vocab_size, (asked.batch, asked.prompt)).tolist()
    found: dict[str, Callable[[], object]] = {}
    for name in asked.contenders.split(","):
        kind, _, dtype = name.partition("-")
        text = CONTENDERS[kind](replace(task, dtype=dtype or task.dtype))
        found[f"{name} once"] = partial(text, prompts, 1)
        found[name] = partial(text, prompts, 1 + asked.new)
    model = our_model(task)
    decoder, tokens = Decoder(model, asked.batch), torch.tensor(prompts, device=task.device)
    found["prefill"] = lambda: decoder.prefill(range(asked.batch), prompts)
    found["forward"] = lambda: model(tokens)
    return found


@torch.no_grad()
def measure(asked: argparse.Namespace) -> dict[str, Any]:
    shape = build_config({**PRESETS["tiny" if asked.tiny else asked.preset], "vocab_size": 50257,
                          "max_position_embeddings": 1024}).model
    sampling = Sampling(temperature=0.8, top_k=40) if asked.sample else Sampling(greedy=True)
    task = Task(shape, asked.dtype, torch.device(asked.device), asked.batch, asked.prompt + asked.new + 1, sampling)
    runs, rates = runs_of(asked, task), []
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(-1, asked.rounds):
        rates.append(read_rate(task.device))
        for name, run in runs.items():
            found = seconds(run, task.device)
            if round_ >= 0:
                times[name].append(found)
    median = {name: statistics.median(found) for name, found in times.items()}
    steps = {name: (median[name] - median[f"{name} once"]) / asked.new for name in asked.contenders.split(",")}
    return {"step_ms": {name: 1e3 * step for name, step in steps.items()}, "rate": max(rates),
            "weights": sum(parameter.nbytes for parameter in our_model(task).parameters()),
            "prefill_ms": 1e3 * median["prefill"], "forward_ms": 1e3 * median["forward"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="124M")
    parser.add_argument("--dtype", choices=sorted(load.DTYPES), default="bf16")
    parser.add_argument("--contenders", default="ours,transformers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sample", action="store_true", help="temperature 0.8 and top-k 40, not the likeliest token")
    parser.add_argument("--tiny", action="store_true", help="the model is of no size, whatever --preset says")
    for name, default in (("batch", 1), ("prompt", 128), ("new", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--results", type=Path, help="a file of JSON lines to add the result to")
    asked = parser.parse_args()
    found = measure(asked)
    first = asked.contenders.split(",")[0]
    step, floor = found["step_ms"][first], 1e3 * found["weights"] / found["rate"]
    model = "tiny" if asked.tiny else asked.preset
    others = "".join(f", {name} {other:.2f} ms ({other / step:.2f} x)" for name, other in found["step_ms"].items()
                     if name != first)
    prefill = found["prefill_ms"]
    print(f"{first}: {model} {asked.dtype}, batch {asked.batch}: {1e3 * asked.batch / step:.1f} tokens/s, "
          f"a step {step:.2f} ms{others}; floor {floor:.2f} at {found['rate'] / 1e9:.0f} GB/s ({floor / step:.2f} of "
          f"it); prefill {prefill:.1f} ms ({prefill / found['forward_ms']:.2f} of training's forward)")
    if asked.results is not None:
        with asked.results.open("a") as file:
            file.write(json.dumps({"check": "decode", "model": asked.preset, "contender": first, "dtype": asked.dtype,
                                   "batch": asked.batch, **found}) + "\n")


if __name__ == "__main__":
    main()
