"""The command line of a program that uses a trained model. Its first flags say which one: of a run or of a Hugging Face
folder, in which precision, on how many ranks, with which tokenizer files. No torch: flags are checked before it is
imported."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, final

from megatron.config.flags import dashed
from megatron.config.help import typed
from megatron.config.setting import place_told
from megatron.config.tree import require
from megatron.errors import ConfigError

TOKENIZER_FLAGS = {
    "tokenizer_type": ("KIND", "GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer, CharacterLevelTokenizer"),
    "vocab_file": ("FILE", "vocab.json or a tokenizer.json of GPT-2's kind; the text of CharacterLevelTokenizer"),
    "merge_file": ("FILE", "merges.txt"), "tokenizer_path": ("FILE", "a SentencePiece model")}
"""With what stands for the value, and its meaning."""

PLACES = {*TOKENIZER_FLAGS, "checkpoint_key"} - {"tokenizer_type"}
"""Flags of files, which may lie elsewhere on each node."""


@dataclass(frozen=True)
class Source:
    load: str | None
    load_hf: str | None
    step: int | None = None
    """Of `load`: the checkpoint of this iteration."""
    dtype: str | None = None
    """None: as it was trained."""
    model_parallel_size: int = 1
    tokenizer: dict[str, str] = field(default_factory=dict)
    """What flags say of it, in place of what the model's folder says."""
    key_file: str | None = None
    """Of `load`: it must be signed with the key in it."""
    shape: Mapping[str, float] = field(default_factory=dict)
    """What flags say of the model; it has to be so."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--load", metavar="DIR", help="checkpoint folder of a run; DIR:TAG names a tag")
    add("--ckpt-step", type=int, metavar="N", help="the checkpoint of iteration N (default: the latest)")
    add("--checkpoint-key", metavar="FILE", help="take only a checkpoint of --load that is signed with this key")
    add("--load-hf", metavar="DIR", help="folder of a Hugging Face GPT-2")
    add("--model-parallel-size", "--tensor-model-parallel-size", type=int, default=1, metavar="N",
        help="split each layer over so many ranks, whatever the model was trained on (1)")
    add("--dtype", choices=("fp32", "bf16", "fp16", "int8"), help="of the weights (default: as it was trained)")
    group = parser.add_argument_group("tokenizer", "that of the model, as its folder says it; these say another, or "
                                      "where its files are now")
    for name, (metavar, text) in TOKENIZER_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)


def told(asked: argparse.Namespace) -> dict[str, object]:
    """Flag -> value, of all that every rank has to be told alike; of a place whether it is given."""
    return {f"--{name.replace('_', '-')}": place_told(value) if name in PLACES else value
            for name, value in vars(asked).items()}


def source_of(asked: argparse.Namespace) -> Source:
    load, step = asked.load, asked.ckpt_step
    require((load is None) != (asked.load_hf is None), "give one of --load and --load-hf: the model to use")
    require(step is None or load is not None, "--ckpt-step goes with --load")
    require(asked.checkpoint_key is None or load is not None, "--checkpoint-key goes with --load")
    require(asked.model_parallel_size >= 1, f"--model-parallel-size is {asked.model_parallel_size}: expected 1 or more")
    said = {name: getattr(asked, name) for name in TOKENIZER_FLAGS}
    return Source(load, asked.load_hf, step, asked.dtype, asked.model_parallel_size,
                  {name: value for name, value in said.items() if value is not None},
                  key_file=asked.checkpoint_key)


@final
class Parser(argparse.ArgumentParser):
    """What is wrong with a flag is a ConfigError, so that it ends like every other error: in one line."""

    def __init__(self, module: str, description: str, examples: str) -> None:
        """`module` as it is run, `python -m megatron.NAME`; help and examples have what was typed in its place."""
        program = typed(module)
        super().__init__(prog=program, description=description, epilog=examples.replace(module, program),
                         allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_flags(self)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Dashes and underscores are the same, before a `--` of its own; for a flag that is not known, the nearest one
        is named."""
        end = argv.index("--") if "--" in argv else len(argv)
        flags, unknown = self.parse_known_args([*map(dashed, argv[:end]), *argv[end:]])
        if unknown:
            flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
            if flag is None:
                self.error(f"unexpected argument {unknown[0]}: flags begin with --")
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
            self.error(f"unknown flag {flag}" + (f": did you mean {near[0]}?" if near else ""))
        return flags

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")
