"""A checkpoint of another program is named as what it is, with the command that reads it, wherever it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.cli import main
from megatron.checkpoint.convert.detect_format import describe_format
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.made import save_solo
from tests.megatron.helpers import TINY, train


def _touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def deepspeed(root: Path, tag: str = "global_step5") -> None:
    _touch(root, f"{tag}/mp_rank_00_model_states.pt", f"{tag}/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (root / "latest").write_text(tag)


def deepspeed_bf16(root: Path) -> None:
    _touch(root, "step_7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32.py")
    (root / "latest").write_text("step_7\n")


def megatron_lm(root: Path) -> None:
    _touch(root, "iter_0000010/mp_rank_00/model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("10")


KINDS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "deepspeed": (deepspeed, ("DeepSpeed", "tag global_step5", "zero_to_fp32.py", "checkpoint convert")),
    "deepspeed, a tag of its own": (lambda root: deepspeed(root, "best"), ("DeepSpeed", "tag best")),
    "deepspeed in bf16": (deepspeed_bf16, ("DeepSpeed", "tag step_7", "-t step_7")),
    "megatron": (megatron_lm, ("Megatron-LM", "checkpoint convert", "--finetune")),
    "megatron, an iteration": (lambda root: _touch(root, "mp_rank_00/model_optim_rng.pt"), ("Megatron-LM",)),
    "hf": (lambda root: _touch(root, "config.json", "model.safetensors"), ("Hugging Face", "--load-hf", "convert")),
    "hf without its configuration": (lambda root: _touch(root, "pytorch_model.bin"), ("config.json",)),
    "nanogpt": (lambda root: _touch(root, "ckpt.pt"), ("nanoGPT", "checkpoint convert")),
    "dcp": (lambda root: _touch(root, ".metadata", "__0_0.distcp"), ("torch.distributed.checkpoint", "dcp_to_torch")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_the_command_and_the_script_say_whose_it_is(kind: str, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    make, words = KINDS[kind]
    make(tmp_path)
    for command in (["list", str(tmp_path)], ["verify", str(tmp_path)], ["digest", str(tmp_path)]):
        assert main(command) == 4
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and all(word in lines[0] for word in words), lines
    with pytest.raises(CheckpointError) as caught:
        train([*TINY, "--mock-data", "--train-iters", 2, "--load", tmp_path])
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_deepspeed_tag_that_is_named_is_recognised_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed(tmp_path)
    for word in (f"{tmp_path}:global_step5", f"{tmp_path}/global_step5"):
        assert main(["verify", word]) == 4
        assert "it is a DeepSpeed checkpoint (tag global_step5)" in capsys.readouterr().err
    assert main(["convert", str(tmp_path), "--output", str(tmp_path / "out")]) == 4
    assert "it is a DeepSpeed checkpoint" in capsys.readouterr().err


def test_a_deepspeed_folder_is_told_in_a_sentence(tmp_path: Path) -> None:
    deepspeed(tmp_path)
    assert len(describe_format(tmp_path).replace(str(tmp_path), "DIR")) < 240


def test_ours_and_nothing_are_not_taken_for_anothers(tmp_path: Path) -> None:
    save_solo(tmp_path / "s", 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "latest").write_bytes(b"../../etc")
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "latest").write_bytes(b"x" * 5000)
    for name in ("s", "empty", "absent", "hostile", "long"):
        assert describe_format(tmp_path / name) == ""
