"""zero_to_fp32.py and the functions around it: the same bytes as the digest, for every layout, and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron import fsdp, zero
from megatron.checkpoint import cli, zero_to_fp32
from megatron.checkpoint.convert.fp32_state_dict import LazyStateDict
from megatron.checkpoint.reader import digest_lines, open_checkpoint, write_fp32_weights
from megatron.checkpoint.reshard import TPSlice
from megatron.checkpoint.writer import TensorSource
from megatron.errors import CheckpointError, ConfigError, StorageError
from mpu.split import Partition
from tests.distributed import run_ranks
from tests.megatron.checkpoint.made import (SHAPES, Grid, ThreadWorld, load_from, logical, save_grid, save_solo,
                                            whole)


def expected(step: int) -> dict[str, torch.Tensor]:
    return {name: tensor for (kind, name), tensor in logical(step).items() if kind == "weight"}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def script(root: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The copy beside the tags, run far from this project."""
    return subprocess.run([sys.executable, "-I", root / "zero_to_fp32.py", *map(str, arguments)], cwd=root,
                          capture_output=True, text=True, timeout=60)


def test_every_layout_gives_the_logical_tensors(tmp_path: Path) -> None:
    for grid in (Grid(1, 1), Grid(1, 4), Grid(4, 1), Grid(2, 2)):
        root = tmp_path / str(grid)
        save_grid(root, grid, step=3, padding=9.0)
        assert zero_to_fp32.main([str(root), str(tmp_path / "all.safetensors")]) == 0
        assert same(load_file(tmp_path / "all.safetensors"), expected(0))
        assert same(dict(zero.get_fp32_state_dict_from_zero_checkpoint(root)), expected(0))
        size = write_fp32_weights(open_checkpoint(root), tmp_path / "merged.safetensors")
        assert size == (tmp_path / "merged.safetensors").stat().st_size
        assert same(load_file(tmp_path / "merged.safetensors"), expected(0))
        lazy = zero.get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
        assert isinstance(lazy, LazyStateDict) and same(dict(lazy), expected(0))


def test_the_copy_beside_the_tags_needs_neither_this_program_nor_torch(tmp_path: Path) -> None:
    save_grid(tmp_path / "root", Grid(2, 2), step=7)
    (tmp_path / "no").mkdir()
    for name in ("torch", "megatron", "safetensors"):
        (tmp_path / "no" / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    done = subprocess.run([sys.executable, "zero_to_fp32.py", ".", "out.safetensors"], cwd=tmp_path / "root",
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "no")}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "global_step7: iteration 7, ZeRO stage unknown, world size 4 (tp 2, dp 2)" in done.stdout
    assert f"{len(SHAPES)} tensors, {sum(t.numel() for t in expected(0).values())} elements" in done.stdout
    assert same(load_file(tmp_path / "root" / "out.safetensors"), expected(0))


@pytest.mark.parametrize("safe", [False, True])
def test_shards_and_their_index_hold_every_tensor_once(safe: bool, tmp_path: Path) -> None:
    save_grid(tmp_path, Grid(4, 1))
    (tmp_path / "pytorch_model.bin").write_bytes(b"of an earlier conversion")
    flags = ["--safe_serialization"] if safe else []
    done = script(tmp_path, ".", "pytorch_model.bin", "--max_shard_size", "2KB", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    suffix = ".safetensors" if safe else ".bin"
    index = json.loads((tmp_path / f"pytorch_model{suffix}.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"pytorch_model-00001-of-{len(files):05d}{suffix}"
    parts = [load_file(tmp_path / file) if safe else torch.load(tmp_path / file, weights_only=True) for file in files]
    assert same({name: tensor for part in parts for name, tensor in part.items()}, expected(0))
    assert all(name in part for file, part in zip(files, parts)
               for name, place in index["weight_map"].items() if place == file)
    # One tensor larger than the limit is alone.
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= 2000 for part in parts)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected(0).values())
    assert safe or not (tmp_path / "pytorch_model.bin").exists(), "loaders would take the stale file first"


def test_a_folder_gets_the_name_its_loaders_look_for_and_the_latest_tag_is_taken(tmp_path: Path) -> None:
    for step in (2, 10):
        save_grid(tmp_path, Grid(1, 1), step=step, seed=step)
    (tmp_path / "latest").write_text("global_step2\n")
    for tag, step, safe in ((None, 2, False), ("global_step10", 10, True)):
        zero.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", tag=tag, safe_serialization=safe)
        path = tmp_path / "out" / ("model.safetensors" if safe else "pytorch_model.bin")
        found = load_file(path) if safe else torch.load(path, weights_only=True)
        assert same(found, expected(step))
    assert same(dict(zero.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "global_step2")), expected(2))


def test_a_tag_that_stands_aside_counts_until_its_successor_is_there(tmp_path: Path) -> None:
    for step in (1, 2):
        save_grid(tmp_path, Grid(1, 1), step=step, seed=step)
    save_grid(tmp_path / "new", Grid(1, 1), step=2, run="new")
    (tmp_path / "global_step2").rename(tmp_path / ".aside-global_step2")
    assert zero_to_fp32.open_tag(tmp_path)[1]["run_id"] == "made"
    (tmp_path / "new" / "global_step2").rename(tmp_path / "global_step2")
    assert zero_to_fp32.open_tag(tmp_path)[1]["run_id"] == "new"
    (tmp_path / "global_step2").rename(tmp_path / "new" / "global_step3")
    with pytest.raises(zero_to_fp32.DamagedCheckpoint, match="its manifest is of tag 'global_step2'"):
        zero_to_fp32.open_tag(tmp_path / "new", "global_step3")


def test_errors_have_their_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_grid(tmp_path, Grid(1, 1))
    root = str(tmp_path)
    assert zero_to_fp32.main([str(tmp_path / "nowhere"), "out.bin"]) == 4
    assert zero_to_fp32.main([root, str(tmp_path / "absent" / "out.bin")]) == 7
    assert zero_to_fp32.main([root]) == 2
    assert zero_to_fp32.main([root, "out.bin", "--max_shard_size", "much"]) == 2
    assert zero_to_fp32.main([root, "out.bin", "-t", "../x"]) == 4
    assert capsys.readouterr().err.count("error: ") == 5
    with pytest.raises(ConfigError, match="max_shard_size"):
        zero.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", max_shard_size="0GB")
    with pytest.raises(StorageError):
        zero.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "absent" / "out.bin")
    (tmp_path / "global_step1" / "rank0.safetensors").write_bytes(b"")
    assert zero_to_fp32.main([root, str(tmp_path / "out.bin")]) == 4 and not (tmp_path / "out.bin").exists()
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "rank0.safetensors: damaged" in error and error.count("\n") == 1
    with pytest.raises(CheckpointError, match="rank0.safetensors: damaged"):
        zero.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_dtypes_buffers_and_frozen_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    half = {dtype: torch.randn(6).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)}
    weights = [whole(str(dtype), value) for dtype, value in half.items()]
    learnt = whole("torch.float16", torch.zeros(6), "exp_avg")
    buffers = {"mask": torch.tensor([[True, False]]), "count": torch.tensor(7), "mean": torch.ones(2).bfloat16()}
    save_solo(tmp_path, 1, tensors=[*weights, learnt], shared_state={"buffers": buffers})
    for name in ("out.safetensors", "out.bin"):
        zero.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / name)
        found = load_file(tmp_path / name) if "safe" in name else torch.load(tmp_path / name, weights_only=True)
        assert same(found, {str(dtype): value.float() for dtype, value in half.items()}
                    | {"mask": buffers["mask"], "count": buffers["count"], "mean": torch.ones(2)})
    data = (tmp_path / "out.safetensors").read_bytes()
    header = json.loads(data[8:8 + int.from_bytes(data[:8], "little")])
    width = {"F32": 4, "I64": 8, "BOOL": 1}
    assert not any(told["data_offsets"][0] % width[told["dtype"]] for name, told in header.items() if name[0] != "_")
    trained = zero.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert set(trained) == {"torch.float16", *buffers}
    save_solo(tmp_path / "alone", 1, tensors=weights)
    with pytest.raises(ConfigError, match="no optimizer state"):
        zero.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "alone", exclude_frozen_parameters=True)


class TwiceTied(nn.Module):
    """One tensor under three names, a buffer under two; the block uses it before the module that it is named after."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.table = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3)), nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.block[0].weight = self.table.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.head.register_buffer("scale", self.scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.head(self.table(tokens)) @ self.table.weight).sum() * self.scale


def save_tied(rank: int, world: int, face: str, root: Path) -> dict[str, torch.Tensor]:
    """By the engine at a stage, or by the FSDP face; what the model is afterwards, in the checkpoint's precision."""
    torch.manual_seed(0)
    model = TwiceTied()
    if face == "fsdp":
        torch.distributed.init_process_group("gloo", init_method=f"file://{root}.store", rank=rank, world_size=world)
        model = fsdp.FullyShardedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.tensor([rank])).backward()
        optimizer.step()
        fsdp.save_checkpoint(model, optimizer, root)
        return {name: value.cpu() for name, value in model.state_dict().items()}
    engine = zero.initialize(model=model, config={
        "train_batch_size": world, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": int(face), "stage3_gather_16bit_weights_on_model_save": True}})[0]
    engine.backward(engine(torch.tensor([rank])))
    engine.step()
    engine.save_checkpoint(root)
    return {name: value.cpu().clone() for name, value in engine.module_state_dict().items()}


@pytest.mark.parametrize("face", ["0", "3", "fsdp"])
def test_every_name_of_a_tied_tensor_comes_out(face: str, tmp_path: Path) -> None:
    """By all ways out, into a model of the user's, strictly; stored once where the format can."""
    state = run_ranks(save_tied, 2, face, tmp_path / "s", init=face != "fsdp")[0]
    assert {"table.weight", "head.weight", "block.0.weight", "scale", "head.scale"} < state.keys()
    root, first = tmp_path / "s", next(name for name in ("table.weight", "head.weight", "block.0.weight")
                                       if name in open_checkpoint(tmp_path / "s").names("weight"))
    found = zero.get_fp32_state_dict_from_zero_checkpoint(root)
    lazy = zero.get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
    for name in ("pytorch_model.bin", "model.safetensors"):
        zero.convert_zero_checkpoint_to_fp32_state_dict(root, tmp_path / name)
    assert write_fp32_weights(open_checkpoint(root), tmp_path / "merged.safetensors") > 0
    from_bin = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    merged = load_file(tmp_path / "merged.safetensors")
    for weights in (dict(found), dict(lazy), from_bin, load_file(tmp_path / "model.safetensors"),
                    {**merged, "scale": state["scale"], "head.scale": state["scale"]}):
        assert same(weights, state)
        TwiceTied().load_state_dict(weights)
    for weights in (found, from_bin):
        assert len({weights[name].data_ptr() for name in ("table.weight", "head.weight", "block.0.weight")}) == 1
    filled = zero.load_state_dict_from_zero_checkpoint(TwiceTied(), root)
    assert same(filled.state_dict(), state) and filled.head.weight is filled.table.weight
    larger = TwiceTied()
    larger.block[1] = nn.Linear(4, 5)
    for other, words in ((nn.Linear(3, 4), "only one of the model and the checkpoint"), (larger, "shape")):
        with pytest.raises(CheckpointError, match=words):
            zero.load_state_dict_from_zero_checkpoint(other, root)
    assert len(list(digest_lines(open_checkpoint(root)))) == 1 + 3 * sum(1 for _ in TwiceTied().parameters()), first
    done = script(root, ".", tmp_path / "sharded", "--max_shard_size", "20B")
    assert (done.returncode, done.stderr) == (0, "")
    index = json.loads((tmp_path / "sharded" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert index.keys() == state.keys() and index["table.weight"] == index["head.weight"] == index["block.0.weight"]


MEASURE = """
import re, runpy, sys
sys.argv = sys.argv[1:]
def peak():  # not ru_maxrss, which a child inherits
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
import numpy
if not sys.argv[2].endswith("safetensors"):
    import torch
    torch.save({"x": torch.zeros(9)}, sys.argv[2])
before = peak()
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("PEAK", peak() - before)
"""


@pytest.mark.parametrize("suffix", [".safetensors", pytest.param(".bin", marks=pytest.mark.slow)])
def test_peak_memory_is_that_of_one_output_file(suffix: str, tmp_path: Path) -> None:
    """Eight matrices of 12 MB, split over tp 2 along the columns, in files of 24 MB."""
    tp, side = 2, 1732
    saved = ThreadWorld(tp).run(lambda world: save_solo(tmp_path, 1, layout={"tp": tp, "dp": 1}, world=world, tensors=[
        TensorSource.of("weight", f"m{i}", torch.float32, TPSlice((side, side // tp), Partition(1), world.rank, tp),
                        load_from(torch.full((side * side // tp,), float(i)))) for i in range(8)]))
    assert saved == [None, None]
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path / "zero_to_fp32.py", tmp_path, tmp_path /
                           f"out{suffix}", "--max_shard_size", "25MB"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shard = max(path.stat().st_size for path in tmp_path.glob("out-*"))
    assert shard < 25e6 and len(list(tmp_path.glob("out-*"))) == 4
    peak = int(done.stdout.split("PEAK")[1])
    assert shard / 4 < peak <= 1.3 * shard, (peak / shard, done.stdout)


def test_nothing_is_written_over_the_checkpoint_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_grid(tmp_path, Grid(1, 1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for place in ("global_step1/rank0.safetensors", "global_step1/new.bin", "global_step1", "latest",
                  "zero_to_fp32.py"):
        assert zero_to_fp32.main([str(tmp_path), str(tmp_path / place)]) == 2
        assert cli.main(["merge", str(tmp_path), "--output", str(tmp_path / place)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2 and all("is a place of a checkpoint's own files" in line for line in said), place
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
