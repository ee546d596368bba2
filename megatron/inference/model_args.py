"""Command-line flags that generate, evaluate and serve share: the model, its precision, tensor parallel size and
tokenizer.

Also accepts the flags of Megatron-LM's generate_samples.py and tasks/main.py. Flags of the model's shape are
compared with the checkpoint; flags of training are accepted, have no effect, and are named in one note. Does not
import torch: flags are checked before it is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.cli import StrictArgumentParser
from megatron.config.cli_help import command_parser
from megatron.config.schema import location_presence
from megatron.config.tree import require
from megatron.distributed import process_group

# Name -> (metavar, help).
TOKENIZER_FLAGS = {
    "tokenizer_type": ("KIND", "GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer, CharacterLevelTokenizer"),
    "vocab_file": ("FILE", "vocab.json or a tokenizer.json of GPT-2's kind; the text of CharacterLevelTokenizer"),
    "merge_file": ("FILE", "merges.txt"), "tokenizer_path": ("FILE", "a SentencePiece model")}

PATH_FLAGS = {*TOKENIZER_FLAGS} - {"tokenizer_type"}  # flags of files, whose paths may differ between nodes


@dataclass(frozen=True)
class ModelSource:
    load: str | None
    load_hf: str | None
    step: int | None = None  # iteration of the checkpoint in `load`
    dtype: str | None = None  # None: as it was trained
    model_parallel_size: int = 1
    # Flags that override the tokenizer of the model's folder.
    tokenizer: dict[str, str] = field(default_factory=dict)
    # Flags of the model's shape, which the checkpoint must have.
    shape: Mapping[str, float] = field(default_factory=dict)


def model_parser(module: str, description: str, examples: str) -> StrictArgumentParser:
    """A command's parser with the flags of the model."""
    parser = command_parser(module, description, examples)
    add = parser.add_argument
    add("--load", metavar="DIR", help="checkpoint folder of a run; DIR:TAG names a tag")
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N (default: the latest)")
    add("--load-hf", metavar="DIR", help="folder of a Hugging Face GPT-2")
    add("--model-parallel-size", "--tensor-model-parallel-size", type=int, default=1, metavar="N",
        help="split each layer over this many ranks, whatever the model was trained on (1)")
    add("--dtype", choices=("fp32", "bf16", "fp16", "int8"), help="of the weights (default: as it was trained)")
    group = parser.add_argument_group("tokenizer", "that of the model, as its folder says it; these say another, or "
                                      "where its files are now")
    for name, (metavar, text) in TOKENIZER_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
    return parser


def flags_to_compare(args: argparse.Namespace) -> dict[str, object]:
    """Flag -> value, to compare between ranks; of a path only whether it is given."""
    return {f"--{name.replace('_', '-')}": location_presence(value) if name in PATH_FLAGS else value
            for name, value in vars(args).items()}


def model_source_from_args(args: argparse.Namespace) -> ModelSource:
    load, step = args.load, args.ckpt_step
    require((load is None) != (args.load_hf is None), "give one of --load and --load-hf: the model to use")
    require(step is None or load is not None, "--ckpt-step goes with --load")
    require(args.model_parallel_size >= 1, f"--model-parallel-size is {args.model_parallel_size}: expected 1 or more")
    tokenizer, shape = ({name: value for name in names if (value := getattr(args, name, None)) is not None}
                        for names in (TOKENIZER_FLAGS, SHAPE_FLAGS))
    return ModelSource(load, args.load_hf, step, args.dtype, args.model_parallel_size, tokenizer, shape)


# Fields of the model's shape: type, other flags.
SHAPE_FLAGS: dict[str, tuple[Any, ...]] = {
    "num_layers": (int,), "hidden_size": (int,), "num_attention_heads": (int,), "max_position_embeddings": (int,),
    "vocab_size": (int,), "intermediate_size": (int, "--ffn-hidden-size"), "layernorm_epsilon": (float,)}

IGNORED_SWITCHES = (
    "--recompute", "--no-load-optim", "--no-load-rng", "--finetune", "--checkpoint-activations", "--lazy-mpu-init",
    "--use-cpu-initialization", "--deepspeed", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--openai-gelu",
    "--apply-query-key-layer-scaling", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
# Flags of training; they have no effect.
IGNORED_OPTIONS = ("--cache-dir", "--tokenizer-model-type", "--DDP-impl", "--distributed-backend", "--local-rank",
                   "--data-path", "--attention-dropout", "--hidden-dropout", "--make-vocab-size-divisible-by",
                   "--deepspeed-config", "--split", "--log-interval", "--checkpoint-num-layers", "--global-batch-size")


def add_megatron_flags(parser: argparse.ArgumentParser, switches: Sequence[str] = (),
                       values: Sequence[str] = ()) -> None:
    """`switches` and `values` are ignored too."""
    def add(*names: str, **more: Any) -> None:
        parser.add_argument(*names, help=argparse.SUPPRESS, **more)

    add("--seq-length", type=int, metavar="N")
    add("--pipeline-model-parallel-size", type=int, default=1)
    for name in ("--fp16", "--bf16"):
        add(name, action="append_const", const=name, dest="precisions")
    for name, (kind, *others) in SHAPE_FLAGS.items():
        add(f"--{name.replace('_', '-')}", *others, type=kind)
    for name in (*IGNORED_SWITCHES, *switches):
        add(name, action="append_const", const=name, dest="meaningless")
    for name in (*IGNORED_OPTIONS, *values):
        add(name, action="append", type=lambda value, name=name: name, dest="meaningless")  # in place of its value


def translate_megatron_flags(args: argparse.Namespace) -> None:
    """Translates `args` in place; rank 0 prints a note about flags without effect."""
    require(args.pipeline_model_parallel_size == 1, "--pipeline-model-parallel-size is "
            f"{args.pipeline_model_parallel_size}: there is no pipeline parallelism; use --model-parallel-size")
    precisions = sorted({*(args.precisions or ()), *([f"--{args.dtype}"] if args.dtype else ())})
    require(len(precisions) < 2, f"{' and '.join(precisions)}: give one precision")
    args.dtype = precisions[0].removeprefix("--") if precisions else None
    if args.meaningless:
        log = process_group.rank_0_printer(process_group.read_environment().rank)
        log(f"note: {', '.join(args.meaningless)}: no effect here")


def translate_generate_samples_flags(args: argparse.Namespace) -> None:
    """Flags of generate_samples.py: 0 means "not given", and `--genfile` asks for texts without a prompt."""
    if args.genfile is not None and args.num_samples:
        given = {"prompts": args.prompts, "--file": args.file, "--output": args.output,
                 "--interactive": args.interactive}
        others = [name for name, value in given.items() if value]
        require(not others, f"--genfile is for texts without a prompt: leave out {' and '.join(others)}")
        args.prompts, args.output, args.jsonl = [""], args.genfile, True
    elif args.genfile is not None:
        args.meaningless = [*(args.meaningless or ()), "--genfile"]
    args.num_samples = 1 if args.num_samples == 0 else args.num_samples
    args.top_p = args.top_p or 1.0
    translate_megatron_flags(args)
