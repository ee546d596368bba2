"""Detect which program wrote a folder that holds no checkpoint of ours, and say which command reads it. No torch."""

from __future__ import annotations

from pathlib import Path

CONVERT_COMMAND = "`python -m megatron.checkpoint convert"


def no_checkpoint_message(root: Path) -> str:
    """The error text for a folder without a checkpoint of ours."""
    missing = "" if root.exists() else ": there is no such folder"
    return f"no committed checkpoint under {root}{missing}{describe_format(root)}"


def describe_format(path: Path) -> str:
    """"; it is FORMAT: ADVICE", or "" for an unknown format."""
    try:
        sentence = _detect_deepspeed(path) or _detect_other_format(path)
    except OSError:  # an unreadable folder is not recognised
        return ""
    return f"; it is {sentence}" if sentence else ""


def _detect_deepspeed(path: Path) -> str | None:
    folders = [path]
    if (path / "latest").is_file():
        with open(path / "latest", "rb") as file:
            name = file.read(256).decode("utf-8", "replace").strip()
        if name and "/" not in name and name not in (".", ".."):
            folders.append(path / name)
    patterns = "*mp_rank_*_model_states.pt", "*zero_pp_rank_*_optim_states.pt"
    tag_folder = next((folder for folder in folders if any(any(folder.glob(pattern)) for pattern in patterns)), None)
    if tag_folder is None:
        return None
    root, tag = path.parent if tag_folder == path else path, tag_folder.resolve().name
    return (f"a DeepSpeed checkpoint (tag {tag}): resume it with DeepSpeed, or take its weights with "
            f"`python {root}/zero_to_fp32.py {root} OUT -t {tag}`, then {CONVERT_COMMAND} OUT --output NEW` "
            "(docs/checkpoints.md)")


def _detect_other_format(path: Path) -> str | None:
    advice = f"{CONVERT_COMMAND} {path} --output NEW` makes a checkpoint of its weights, for `--load NEW --finetune`"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model_optim_rng.pt")):
        return f"a Megatron-LM checkpoint: {advice}"
    if (path / ".metadata").is_file():
        return ("a checkpoint of torch.distributed.checkpoint (DCP): make one file of it with `python -m "
                f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} OUT/pytorch_model.bin`, then "
                f"{CONVERT_COMMAND} OUT --output NEW` (a Hugging Face GPT-2, its config.json copied into OUT)")
    weights = [name for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json",
                                 "pytorch_model.bin.index.json") if (path / name).is_file()]
    if weights and (path / "config.json").is_file():
        return f"a Hugging Face folder: start from it with --load-hf {path}, or {advice}"
    if weights:
        return (f"a folder with {weights[0]}, but without the config.json that says which Hugging Face model it is: "
                f"copy it there; of a Megatron GPT-2, {CONVERT_COMMAND} {path / weights[0]} --num-attention-heads N "
                "--checkpoint-version V --output NEW`")
    if (path / "ckpt.pt").is_file():
        return f"a nanoGPT folder: {advice}"
    if path.is_file() and path.suffix in (".pt", ".bin", ".pth"):
        return f"a torch file: if nanoGPT wrote it, or it is a state dict of a Megatron GPT-2, {advice}"
    return None
