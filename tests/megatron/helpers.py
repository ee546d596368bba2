"""Whole runs of pretrain_gpt2.py inside a test process: dozens of them cost seconds.

`train(argv)` calls the program's own `main` with these flags, here or inside a rank of `run_ranks`; what a run leaves
(metrics lines, checkpoint digest) is read back from its files.
"""

from __future__ import annotations

import io
import json
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import pretrain_gpt2
from data.tokenizer import ByteLevelTokenizer
from data.writer import CorpusWriter
from megatron.checkpoint.reader import digest_lines, open_checkpoint
from megatron.config.tree import ModelConfig, build_config
from megatron.distributed import process_group
from megatron.distributed.rank_status import STATUS
from megatron.distributed.signals import STOP_SIGNALS
from megatron.model import GPT2
from megatron.train import build
from megatron.zero.engine import ZeroEngine
from mpu.groups import Groups

ROOT = Path(__file__).resolve().parents[2]

TINY = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 "
        "--tokenizer-type ByteLevelTokenizer --num-workers 0 --sample-tokens 0 --log-interval 0 --eval-interval 0 "
        "--save-interval 0").split()
"""The smallest model that has everything; a step takes a few milliseconds."""

NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]

TIMES_AND_MEMORY = ("step_ms", "tokens_per_s", "tflops", "mfu", "max_memory_bytes", "drive_wait_ms")
"""The only fields in which the metrics of two equal runs may differ."""


TINY_SHAPE: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16,
                                  vocab_size=257, attention_dropout=0.0, hidden_dropout=0.0)


def tiny_model(**changes: Any) -> ModelConfig:
    return ModelConfig(**(TINY_SHAPE | changes))


def engine_of(model: GPT2, groups: Groups, *, accumulation: int = 1, **values: Any) -> ZeroEngine:
    """The mechanism around a model; `values` are fields of any section of the configuration."""
    batch = {"batch_size": 1, "global_batch_size": accumulation * groups.dp.size}
    device = next(model.parameters()).device
    return build.engine(build_config({**batch, **values}), model, groups, device).core


def write_corpus(prefix: Path, documents: int = 60, longest: int = 40) -> str:
    """Documents of a few words that follow each other by a rule, so that there is something to learn."""
    tokenizer, rng = ByteLevelTokenizer(), np.random.default_rng(7)
    with CorpusWriter(prefix, vocab_size=tokenizer.vocab_size) as writer:
        for number in range(documents):
            text = " ".join(["one", "two", "three", "four"][(number + k) % 4]
                            for k in range(1 + rng.integers(longest // 4)))
            tokens = [*tokenizer.encode(text), tokenizer.eod]
            writer.add_documents(tokens, [len(tokens)])
    return str(prefix)


def train(argv: Sequence[object]) -> str:
    """Run the program with these flags in this process; what it printed."""
    random.seed(99)  # leave no stream where an earlier run of this process would have left it
    np.random.seed(99)
    torch.manual_seed(99)
    said = io.StringIO()
    words = ["pretrain_gpt2.py", *map(str, argv)]
    with own_signals(), patch("sys.argv", words), redirect_stdout(said), \
            patch("megatron.distributed.process_group.shutdown", end_among_others):
        assert pretrain_gpt2.main() == 0
    return said.getvalue()


def end_among_others() -> None:
    """The end of a run whose process group others go on with: old checkpoints are deleted all the same, and the end of
    this process is none in the middle of a step."""
    process_group.AFTER_SHUTDOWN.run()
    STATUS.mark_done()


@contextmanager
def own_signals() -> Iterator[None]:
    """Give SIGTERM and Ctrl-C back to the test process afterwards: the program listens to them."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train_all(rank: int, world: int, runs: Sequence[Sequence[object]]) -> list[str]:
    """For run_ranks: one run after the other in one job."""
    return [train(argv) for argv in runs]


def records(path: str | Path) -> list[dict[str, Any]]:
    """The steps and evaluations of a metrics file, without times and memory."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES_AND_MEMORY} for line in lines
            if "iteration" in line]


def steps(path: str | Path) -> list[dict[str, Any]]:
    """The metrics of the training steps alone."""
    return [record for record in records(path) if "eval" not in record]


def lines(path: str | Path) -> list[str]:
    """The metrics file as text, without times and memory: equal text is equal bits."""
    return [json.dumps(record) for record in records(path)]


def total_digest(folder: str | Path, tag: str | None = None) -> str:
    """The layout-free digest of everything a checkpoint holds; the newest one by default."""
    return list(digest_lines(open_checkpoint(folder, tag)))[-1]
