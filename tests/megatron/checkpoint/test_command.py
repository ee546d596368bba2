"""python -m megatron.checkpoint: exit codes, one error line, torch only where needed, no code from files ever run; a
checkpoint of another program is named as what it is, with the command that reads it, wherever it is given."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.cli import main
from megatron.checkpoint.tags import describe_format
from megatron.errors import CheckpointError
from tests.megatron.checkpoint.made import Grid, Payload, save_grid, save_solo
from tests.megatron.helpers import ROOT, TINY, train


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A save root with tags of steps 1 and 2 on two ranks."""
    root = tmp_path / "root with space; touch x"
    for step in (1, 2):
        save_grid(root, Grid(2, 1), step=step)
    return root


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one error line."""
    code = main(list(arguments))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return code, lines[0]


def test_list_and_verify_name_every_tag_and_import_no_torch(root: Path) -> None:
    (root.parent / "torch.py").write_text("raise SystemExit('torch was imported')")
    for command in ("list", "verify"):
        done = subprocess.run([sys.executable, "-m", "megatron.checkpoint", command, str(root)], cwd=ROOT,
                              env={**os.environ, "PYTHONPATH": str(root.parent)}, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split()[0].strip(":") for line in done.stdout.splitlines()] == ["global_step1", "global_step2"]


def test_errors_have_their_exit_codes(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(capsys, "digest", str(root), "--tag", "../root")[0] == 4
    code, line = failing(capsys, "merge", str(root), "--output", str(root / "latest" / "all"))
    assert code == 7 and f"--output: cannot write {root / 'latest' / 'all'}: " in line
    for command in ("list", "verify", "digest"):
        code, line = failing(capsys, command, str(tmp_path / "nowhere"))
        assert code == 4 and "there is no such folder" in line
        for spelling in ([f"{root}:nope"], [str(root), "--tag", "nope"]):
            assert "no tag nope" in (line := failing(capsys, command, *spelling)[1]) and "holds global_step1, " in line
    for wrong in (["merge", str(root)], ["frobnicate", str(root)], []):
        assert failing(capsys, *wrong)[0] == 2
    for spelling in ([f"{root}/global_step1"], [str(root), "--tag", "global_step1"]):
        assert main(["digest", *spelling]) == 0
    digests = capsys.readouterr().out.splitlines()
    assert digests[:len(digests) // 2] == digests[len(digests) // 2:] and digests[-1].startswith("total ")
    (root / "global_step1" / "rank1.json").unlink()
    code, line = failing(capsys, "verify", str(root))
    assert code == 4 and "tag global_step1: shard file rank1.json (rank 1 of 2) missing" in line
    assert main(["verify", str(root), "--tag", "global_step2"]) == 0


def moved_out(folder: Path) -> Path:
    """Where it is now; a link is left."""
    elsewhere = Path(shutil.move(folder, folder.parent.parent / f"{folder.name} elsewhere"))
    folder.symlink_to(elsewhere)
    return elsewhere


def another_step(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "global_step1", folder)


UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "manifest.json", 100), "damaged: its 100 bytes do not match"),
    "missing": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json missing"),
    "a folder instead": (lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()),
                         "manifest.json missing"),
    "moved out": (moved_out, "outside the save root"),
    "dangling": (lambda folder: shutil.rmtree(moved_out(folder)), "outside the save root"),
    "another step": (another_step, "manifest.json is of tag global_step1")}


@pytest.mark.parametrize("accident", UNREADABLE)
def test_list_names_what_it_cannot_read_and_fails_where_a_load_would(accident: str, root: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    harm, reason = UNREADABLE[accident]
    harm(root / "global_step2")
    for latest, code in (("global_step2", 4), ("global_step1", 0), ("", 4)):
        (root / "latest").write_text(latest) if latest else (root / "latest").unlink()
        assert main(["list", str(root)]) == code
        output = capsys.readouterr()
        assert [line.split()[0] for line in output.out.splitlines()] == ["global_step1"]
        warning, *errors = output.err.splitlines()
        assert warning.startswith("warning: tag global_step2: ") and reason in warning
        is_marked = latest == "global_step2" and accident != "dangling"  # as if there was no folder of that name
        assert warning.endswith("  latest") == is_marked
        assert len(errors) == (code == 4) and all(f"name another tag ({root}:global_step1)" in line for line in errors)
        if is_marked:
            assert errors[0].startswith(f"error: {root}/latest names global_step2, which cannot be read")
    assert main(["verify", str(root)]) == 4
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("name", "cut"), [("rank0.safetensors", True), ("rank1.json", False), ("shared.json", True)])
def test_list_marks_tags_with_missing_or_shorter_files(name: str, cut: bool, root: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """And recommends none of them. A byte that was changed takes `verify`."""
    for step in (3, 4):
        save_grid(root, Grid(2, 1), step=step)
        file = root / f"global_step{step}" / name
        file.write_bytes(file.read_bytes()[:-1]) if cut else file.unlink()
    assert main(["list", str(root)]) == 4
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[3].endswith("after global_step3  damaged  latest") and lines[2].count("  damaged") == 1
    assert not any("damaged" in line for line in lines[:2])
    *warnings, error = output.err.splitlines()
    assert [line.split(":")[:2] for line in warnings] == [["warning", f" tag global_step{step}"] for step in (3, 4)]
    assert all(name in line for line in warnings)
    assert f"name another tag ({root}:global_step2), which `python -m megatron.checkpoint verify` checks" in error
    assert failing(capsys, "list", f"{root}:global_step4")[0] == 4
    (root / "latest").write_text("global_step2")
    assert main(["list", str(root)]) == 0


def test_a_folder_of_a_tag_under_another_name_is_told(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "global_step1").rename(root / "mine")
    assert main(["list", str(root)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("global_step2 ") and output.out.endswith("  latest\n")
    assert output.err == "warning: tag mine: manifest.json is of tag global_step1\n"
    assert failing(capsys, "verify", str(root)) == (4, "error: tag mine: manifest.json is of tag global_step1")


def test_a_root_without_a_tag_that_can_be_read_recommends_none(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "latest").unlink()
    for step in (1, 2):
        os.truncate(root / f"global_step{step}" / "manifest.json", 100)
    assert main(["list", str(root)]) == 4
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in told] == ["warning", "warning", "error"] and "no committed" in told[2]


def test_a_pickle_in_place_of_any_file_is_never_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                    ) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rank0.safetensors", "rank1.json", "shared.json", "manifest.json", "latest"):
        path = root / name if name == "latest" else root / "global_step2" / name
        before = path.read_bytes()
        for protocol in (0, 5):
            path.write_bytes(pickle.dumps(Payload(), protocol=protocol))
            for command in (["verify"], ["digest"], ["list"], ["merge", "--output", "out"]):
                assert main([command[0], str(root), *command[1:]]) == (0 if name == "latest" else 4), (name, command)
        path.write_bytes(before)
    assert not (tmp_path / "canary").exists()


# ---- checkpoints of other programs -----------------------------------------------------------------------------------

# (its files with their content, what is said of them)
FOREIGN: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"global_step5/mp_rank_00_model_states.pt": "", "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt": "",
      "latest": "global_step5"}, ("DeepSpeed", "tag global_step5", "zero_to_fp32.py", "checkpoint convert")),
    ({"best/mp_rank_00_model_states.pt": "", "latest": "best"}, ("DeepSpeed", "tag best")),
    ({"step_7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "", "zero_to_fp32.py": "", "latest": "step_7\n"},
     ("DeepSpeed", "tag step_7", "-t step_7")),
    ({"iter_0000010/mp_rank_00/model_optim_rng.pt": "", "latest_checkpointed_iteration.txt": "10"},
     ("Megatron-LM", "checkpoint convert", "--finetune")),
    ({"mp_rank_00/model_optim_rng.pt": ""}, ("Megatron-LM",)),
    ({"config.json": "", "model.safetensors": ""}, ("Hugging Face", "--load-hf", "convert")),
    ({"pytorch_model.bin": ""}, ("config.json",)), ({"ckpt.pt": ""}, ("nanoGPT", "checkpoint convert")),
    ({".metadata": "", "__0_0.distcp": ""}, ("torch.distributed.checkpoint", "dcp_to_torch"))]


def test_a_load_and_the_command_say_whose_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (files, words) in enumerate(FOREIGN):
        root = tmp_path / str(number)
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        for command in ("list", "verify", "digest"):
            code, line = failing(capsys, command, str(root))
            assert code == 4 and all(word in line for word in words), line
        with pytest.raises(CheckpointError) as caught:
            train([*TINY, "--mock-data", "--train-iters", 2, "--load", root])
        assert all(word in str(caught.value) for word in words), caught.value
    for arguments in (["verify", f"{tmp_path / '0'}:global_step5"], ["verify", f"{tmp_path / '0'}/global_step5"],
                      ["convert", str(tmp_path / "0"), "--output", str(tmp_path / "out")]):
        code, line = failing(capsys, *arguments)
        assert code == 4 and "it is a DeepSpeed checkpoint (tag global_step5)" in line


def test_ours_and_nothing_are_not_taken_for_anothers(tmp_path: Path) -> None:
    save_solo(tmp_path / "s", 1)
    for name, content in (("empty", b""), ("hostile", b"../../etc"), ("long", b"x" * 5000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "latest").write_bytes(content)
    for name in ("s", "empty", "absent", "hostile", "long"):
        assert describe_format(tmp_path / name) == ""
