"""Which model a program is to use, as its flags say it: of a run or of a Hugging Face folder, in which precision, on
how many ranks, with which tokenizer files. No torch: flags are checked before it is imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from megatron.config.help import CommandArgumentParser
from megatron.config.save import refuse_checkpoint_key
from megatron.config.setting import location_presence
from megatron.config.tree import require

TOKENIZER_FLAGS = {
    "tokenizer_type": ("KIND", "GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer, CharacterLevelTokenizer"),
    "vocab_file": ("FILE", "vocab.json or a tokenizer.json of GPT-2's kind; the text of CharacterLevelTokenizer"),
    "merge_file": ("FILE", "merges.txt"), "tokenizer_path": ("FILE", "a SentencePiece model")}
"""With what stands for the value, and its meaning."""

PATH_FLAGS = {*TOKENIZER_FLAGS} - {"tokenizer_type"}
"""Flags of files, which may lie elsewhere on each node."""


@dataclass(frozen=True)
class ModelSource:
    load: str | None
    load_hf: str | None
    step: int | None = None
    """Of `load`: the checkpoint of this iteration."""
    dtype: str | None = None
    """None: as it was trained."""
    model_parallel_size: int = 1
    tokenizer: dict[str, str] = field(default_factory=dict)
    """What flags say of it, in place of what the model's folder says."""
    shape: Mapping[str, float] = field(default_factory=dict)
    """What flags say of the model; it has to be so."""


@final
class ModelArgumentParser(CommandArgumentParser):
    """The command line of a program that uses a trained model."""

    def __init__(self, module: str, description: str, examples: str) -> None:
        super().__init__(module, description, examples)
        add = self.add_argument
        add("--load", metavar="DIR", help="checkpoint folder of a run; DIR:TAG names a tag")
        add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N (default: the latest)")
        add("--checkpoint-key", type=refuse_checkpoint_key, help=argparse.SUPPRESS)
        add("--load-hf", metavar="DIR", help="folder of a Hugging Face GPT-2")
        add("--model-parallel-size", "--tensor-model-parallel-size", type=int, default=1, metavar="N",
            help="split each layer over so many ranks, whatever the model was trained on (1)")
        add("--dtype", choices=("fp32", "bf16", "fp16", "int8"), help="of the weights (default: as it was trained)")
        group = self.add_argument_group("tokenizer", "that of the model, as its folder says it; these say another, or "
                                        "where its files are now")
        for name, (metavar, text) in TOKENIZER_FLAGS.items():
            group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)


def flags_to_compare(args: argparse.Namespace) -> dict[str, object]:
    """Flag -> value, of all that every rank has to be told alike; of a place whether it is given."""
    return {f"--{name.replace('_', '-')}": location_presence(value) if name in PATH_FLAGS else value
            for name, value in vars(args).items()}


def model_source_from_args(args: argparse.Namespace) -> ModelSource:
    load, step = args.load, args.ckpt_step
    require((load is None) != (args.load_hf is None), "give one of --load and --load-hf: the model to use")
    require(step is None or load is not None, "--ckpt-step goes with --load")
    require(args.model_parallel_size >= 1, f"--model-parallel-size is {args.model_parallel_size}: expected 1 or more")
    tokenizer_flags = {name: getattr(args, name) for name in TOKENIZER_FLAGS}
    return ModelSource(load, args.load_hf, step, args.dtype, args.model_parallel_size,
                       {name: value for name, value in tokenizer_flags.items() if value is not None})
