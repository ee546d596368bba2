"""Detect which program wrote a folder that holds no checkpoint of ours, and say which command reads it. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

CONVERT_COMMAND = "`python -m megatron.checkpoint convert"


def no_checkpoint_message(root: Path) -> str:
    """The error text for a folder without a checkpoint of ours."""
    missing = "" if root.exists() else ": there is no such folder"
    return f"no committed checkpoint under {root}{missing}{describe_format(root)}"


def describe_format(path: Path) -> str:
    """"; it is FORMAT: ADVICE", or "" for an unknown format."""
    try:
        sentence = next((found for kind in FORMAT_DETECTORS if (found := kind(path))), None)
    except OSError:  # an unreadable folder is not recognised
        return ""
    return f"; it is {sentence}" if sentence else ""


def _detect_deepspeed(path: Path) -> str | None:
    folders = [path, *(path / tag for tag in _name_in_file(path / "latest"))]
    found = next((folder for folder in folders if _any(folder.glob("*mp_rank_*_model_states.pt"))
                  or _any(folder.glob("*zero_pp_rank_*_optim_states.pt"))), None)
    if found is None:
        return None
    root, tag = found.parent if found == path else path, found.resolve().name
    return (f"a DeepSpeed checkpoint (tag {tag}): resume it with DeepSpeed, or take its weights with "
            f"`python {root}/zero_to_fp32.py {root} OUT -t {tag}`, then {CONVERT_COMMAND} OUT --output NEW` "
            "(docs/checkpoints.md)")


def _detect_megatron_lm(path: Path) -> str | None:
    is_one = (path / "latest_checkpointed_iteration.txt").is_file() or _any(path.glob("mp_rank_*/model_optim_rng.pt"))
    return f"a Megatron-LM checkpoint: {_convert_advice(path)}" if is_one else None


def _detect_torch_distributed(path: Path) -> str | None:
    if not (path / ".metadata").is_file():
        return None
    return ("a checkpoint of torch.distributed.checkpoint (DCP): make one file of it with `python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} OUT/pytorch_model.bin`, then "
            f"{CONVERT_COMMAND} OUT --output NEW` (a Hugging Face GPT-2, its config.json copied into OUT)")


def _detect_huggingface(path: Path) -> str | None:
    weights = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
    if (path / "config.json").is_file() and any((path / name).is_file() for name in weights):
        return f"a Hugging Face folder: start from it with --load-hf {path}, or {_convert_advice(path)}"
    if found := next((name for name in weights if (path / name).is_file()), None):
        return (f"a folder with {found}, but without the config.json that says which Hugging Face model it is: copy it "
                f"there; of a Megatron GPT-2, {CONVERT_COMMAND} {path / found} --num-attention-heads N "
                "--checkpoint-version V --output NEW`")
    return None


def _detect_nanogpt(path: Path) -> str | None:
    return f"a nanoGPT folder: {_convert_advice(path)}" if (path / "ckpt.pt").is_file() else None


def _detect_torch_file(path: Path) -> str | None:
    if path.is_file() and path.suffix in (".pt", ".bin", ".pth"):
        return f"a torch file: if nanoGPT wrote it, or it is a state dict of a Megatron GPT-2, {_convert_advice(path)}"
    return None


FORMAT_DETECTORS = (_detect_deepspeed, _detect_megatron_lm, _detect_torch_distributed, _detect_huggingface,
                    _detect_nanogpt, _detect_torch_file)


def _convert_advice(path: Path) -> str:
    return f"{CONVERT_COMMAND} {path} --output NEW` makes a checkpoint of its weights, for `--load NEW --finetune`"


def _any(found: Iterable[Path]) -> bool:
    return next(iter(found), None) is not None


def _name_in_file(path: Path) -> Iterator[str]:
    """The name in a small text file, if it is one plain name."""
    if path.is_file():
        with open(path, "rb") as file:
            name = file.read(256).decode("utf-8", "replace").strip()
        if name and "/" not in name and name not in (".", ".."):
            yield name
