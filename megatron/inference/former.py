"""The command line of Megatron-LM's `generate_samples.py` works here: what its flags mean in ours.

The model's shape is the checkpoint's; such a script says it again, and what it says is held against that. What it sets
for training means nothing here, and one line says so. Not here: flags that mean the same under both names, which are
aliases where they are declared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.config.tree import require

SHAPE_FLAGS: dict[str, tuple[Any, ...]] = {
    "num_layers": (int,), "hidden_size": (int,), "num_attention_heads": (int,), "max_position_embeddings": (int,),
    "vocab_size": (int,), "intermediate_size": (int, "--ffn-hidden-size"), "layernorm_epsilon": (float,)}
"""Fields of the model that a script may say again: their kind, and other names."""

IGNORED_SWITCHES = (
    "--recompute", "--no-load-optim", "--no-load-rng", "--finetune", "--checkpoint-activations", "--lazy-mpu-init",
    "--use-cpu-initialization", "--deepspeed", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--openai-gelu",
    "--apply-query-key-layer-scaling", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
IGNORED_OPTIONS = (
    "--cache-dir", "--tokenizer-model-type", "--DDP-impl", "--distributed-backend", "--local-rank", "--data-path",
    "--attention-dropout", "--hidden-dropout", "--make-vocab-size-divisible-by", "--deepspeed-config", "--split",
    "--log-interval", "--checkpoint-num-layers", "--global-batch-size")
"""Without a meaning here."""


def add_megatron_flags(parser: argparse.ArgumentParser, switches: Sequence[str] = (),
                       values: Sequence[str] = ()) -> None:
    """With `switches` and `values` of one program, without a meaning here as well."""
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
        add(name, action=_IgnoredOption, dest="meaningless")


class _IgnoredOption(argparse.Action):
    """A flag whose value is not looked at."""

    def __call__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, values: object,
                 flag: str | None = None) -> None:
        args.meaningless = [*(args.meaningless or ()), flag]


def translate_megatron_flags(args: argparse.Namespace) -> list[str]:
    """`asked` in our flags; a note on what has no effect."""
    size = args.pipeline_model_parallel_size
    require(size == 1, f"--pipeline-model-parallel-size is {size}: there is no pipeline parallelism; use "
            "--model-parallel-size")
    precisions = sorted({*(args.precisions or ()), *([f"--{args.dtype}"] if args.dtype else ())})
    require(len(precisions) < 2, f"{' and '.join(precisions)}: give one precision")
    args.dtype = precisions[0].removeprefix("--") if precisions else None
    return [f"note: {', '.join(args.meaningless)}: no effect here"] if args.meaningless else []


def translate_generate_samples_flags(args: argparse.Namespace) -> list[str]:
    """Of generate_samples.py: a zero may mean that it is not given, and `--genfile` asks for texts without a prompt."""
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
    return translate_megatron_flags(args)


def shape_from_flags(args: argparse.Namespace) -> dict[str, float]:
    """What flags say of the model."""
    return {name: value for name in SHAPE_FLAGS if (value := getattr(args, name)) is not None}
