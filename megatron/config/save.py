"""The section `save`: where checkpoints are written and read, and what of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from megatron.config.problems import ErrorList
from megatron.config.setting import flag_name, require, setting
from megatron.errors import ConfigError

NOT_SIGNED_MESSAGE = "checkpoints are not signed any more: use the storage's own means (object lock, access rights)"


def refuse_checkpoint_key(file: str) -> NoReturn:
    """The retired flag of the commands that read checkpoints."""
    raise ConfigError(f"--checkpoint-key {file} is not a flag here: {NOT_SIGNED_MESSAGE}")


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Checkpoints: where they are written and read, and what of them."""

    save: str | None = setting(None, "folder to write checkpoints to", in_short_help=True)
    load: str | None = setting(
        None, "folder to resume from, or FOLDER:TAG; must hold a checkpoint, unless it is an empty --save",
        in_short_help=True)
    ckpt_step: int | None = setting(None, "resume from the checkpoint of this step, not the one that `latest` names")
    load_hf: str | None = setting(
        None, "Hugging Face GPT-2 folder of the initial weights; --load wins where it resumes", in_short_help=True)
    save_interval: int = setting(1000, "steps between checkpoints; 0 saves at the end only", "save-steps",
                                 in_short_help=True)
    async_save: bool = setting(False, "train on while a copy of the state is written")
    keep_last: int | None = setting(None, "keep only this many of the newest checkpoints", "save-total-limit")
    keep_every: int | None = setting(None, "with --keep-last: also keep those of steps divisible by this")
    no_save_optim: bool = setting(False, "leave the optimizer state out of checkpoints")
    no_save_rng: bool = setting(False, "leave the random number state out of checkpoints")
    no_load_optim: bool = setting(False, "do not load the optimizer state")
    no_load_rng: bool = setting(False, "do not load the random number state")
    finetune: bool = setting(False, "load the weights only, and start at iteration 0")
    load_precision_change: bool = setting(False, "accept a checkpoint of another precision; the loss scale starts anew")
    resume_fallback: bool = setting(
        False, "if the checkpoint to load is damaged, load its newest intact ancestor, never one of another branch")
    resume_dataloader: bool = setting(False, "accepted for old scripts: the data position is always restored")

    def __post_init__(self) -> None:
        problems = ErrorList()
        problems.require_range(self, "save_interval ckpt_step", 0)
        problems.require_range(self, "keep_last keep_every", 1)
        problems.raise_if_any()
        require(self.keep_every is None or self.keep_last is not None,
                "--keep-every needs --keep-last: without it every checkpoint is kept")
        for name in ("finetune", "load_precision_change", "resume_fallback", "ckpt_step"):
            require(
                getattr(self, name) is None or getattr(self, name) is False or self.load is not None,
                f"{flag_name(name)} needs --load: there is nothing to load",
            )

    def notes(self) -> Iterator[str]:
        """Of what is not done in any case, as the scripts of DeepSpeed's examples have it in their first run."""
        for name in ("no_load_optim", "no_load_rng"):
            if getattr(self, name) and self.load is None:
                yield f" note: {flag_name(name)} has no effect: without --load there is nothing to load"
