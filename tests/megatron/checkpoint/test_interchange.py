"""Hugging Face, nanoGPT and Megatron-LM: their weights in, ours out, the same logits at every tensor parallel size."""

from __future__ import annotations

import argparse
import enum
import itertools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.cli import main
from megatron.checkpoint.convert.export_huggingface import export_huggingface
from megatron.checkpoint.convert.importers import open_external_checkpoint
from megatron.checkpoint.reader import digest_lines, open_checkpoint, read_logical
from megatron.config.tree import build_config
from megatron.errors import CheckpointError, ConfigError
from megatron.model import GPT2
from megatron.train import build
from megatron.zero.api.checkpoint_io import load_external_weights
from mpu.groups import build as build_groups
from tests.distributed import run_ranks
from tests.megatron.checkpoint.made import Payload
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, train, train_all, write_corpus

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

VOCAB, LAYERS, HIDDEN, HEADS, LENGTH = 257, 2, 32, 4, 16
"""The model of TINY; 257 is not a multiple of 128, so the table is padded, differently for each tp."""

SHAPE = dict(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, max_position_embeddings=LENGTH,
             vocab_size=VOCAB)


LENGTHS = (1, 7, LENGTH)
"""Of the prompts whose next token is looked at: the model of a run gives the logits of the last position."""


def tokens() -> Tensor:
    return torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def theirs(**changes: Any) -> torch.nn.Module:
    """transformers' GPT-2 with weights as large as those of a trained model, none of them zero or one."""
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS,
                                     **changes)
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.05
    return model


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    theirs().save_pretrained(folder)
    return folder


def hf_logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return transformers.GPT2LMHeadModel.from_pretrained(folder).eval()(tokens()).logits


def our_logits(rank: int, world: int, source: Path, tp: int, stage: int = 0) -> Tensor:
    """Through an engine that takes its weights as a run does."""
    groups = build_groups(tp)
    config = build_config({**SHAPE, "batch_size": 1, "zero_stage": stage, "model_parallel_size": tp,
                           "stage3_param_persistence_threshold": 0, "attention_dropout": 0.0, "hidden_dropout": 0.0})
    engine = build.engine(config, build.model(config, groups), groups, torch.device("cpu"))
    load_external_weights(engine.core, open_external_checkpoint(source))
    engine.eval()
    with torch.no_grad():
        return torch.stack([engine(tokens()[:, :length]) for length in LENGTHS], dim=1)


def weights(root: Path) -> list[str]:
    """Digests of the weights a folder of ours holds."""
    return [line for line in digest_lines(open_checkpoint(root)) if " weight " in line]


# ---- Hugging Face ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("tp", "world", "stage"), [(2, 2, 0), (1, 2, 3),
                                                    pytest.param(2, 4, 2, marks=pytest.mark.slow)])
def test_their_weights_give_their_logits_at_every_layout(tp: int, world: int, stage: int, hf: Path) -> None:
    for ours in run_ranks(our_logits, world, hf, tp, stage):
        # fp32 sums in another order; logits are of size 1.
        expected = hf_logits(hf)[:, [length - 1 for length in LENGTHS]]
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_import_then_export_gives_their_files_back_bit_for_bit(hf: Path, tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    assert main(["convert", str(hf), "--output", str(ours)]) == 0
    assert main(["convert", str(ours), "--output", str(back)]) == 0
    before, after = load_file(hf / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(hf_logits(back), hf_logits(hf))
    assert main(["verify", str(ours)]) == 0


def test_a_trained_run_exported_gives_the_logits_of_the_run(tmp_path: Path) -> None:
    root, folder, again = tmp_path / "s", tmp_path / "hf", tmp_path / "again"
    run_ranks(train_all, 2, [[*TINY, *NO_DROPOUT, "--train-data", write_corpus(tmp_path / "corpus"), "--train-iters",
                              3, "--lr", 1e-2, "--model-parallel-size", 2, "--save", root]])
    assert main(["convert", str(root), "--output", str(folder)]) == 0
    found, model = open_checkpoint(root), GPT2(tiny_model())
    for name, parameter in model.named_parameters():
        shape = found.shape("weight", name)
        parameter.data[:shape[0]] = read_logical(found, "weight", name, 0, torch.Size(shape).numel()).view(shape)
    with torch.no_grad():
        ours = model.logits(model.hidden_states(tokens()))
    torch.testing.assert_close(ours, hf_logits(folder), atol=1e-5, rtol=0)
    assert main(["convert", str(folder), "--output", str(again)]) == 0
    assert weights(again) == weights(root)


def old_styles(state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The same weights as releases of long ago, and other tools, keep them."""
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    masks = {f"h.{layer}.attn.{name}": torch.ones(1) for layer in range(LAYERS) for name in ("bias", "masked_bias")}
    return {"bare": {**bare, **masks}, "head": {**state, "lm_head.weight": state["transformer.wte.weight"].clone()},
            "module": {f"module.{name}": tensor for name, tensor in state.items()}}


def check_same(found: Any, expected: Any) -> None:
    assert found.shapes == expected.shapes
    for name in expected.shapes:
        assert torch.equal(found.tensor(name), expected.tensor(name)), name


def test_old_key_styles_and_torch_files_are_read(hf: Path, tmp_path: Path) -> None:
    for style, renamed in old_styles(load_file(hf / "model.safetensors")).items():
        for file, write in (("model.safetensors", save_file), ("pytorch_model.bin", torch.save)):
            folder = tmp_path / style / file.partition(".")[0]
            folder.mkdir(parents=True)
            write(renamed, folder / file)
            shutil.copy(hf / "config.json", folder)
            check_same(open_external_checkpoint(folder), open_external_checkpoint(hf))


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_folders_are_read_and_written(safe: bool, hf: Path, tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path / "in", max_shard_size="20KB")
    if not safe:
        index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())
        for file in set(index["weight_map"].values()):
            torch.save(load_file(tmp_path / "in" / file), tmp_path / "in" / f"{file}.bin")
            (tmp_path / "in" / file).unlink()
        index["weight_map"] = {name: f"{file}.bin" for name, file in index["weight_map"].items()}
        (tmp_path / "in" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        (tmp_path / "in" / "model.safetensors.index.json").unlink()
    assert main(["convert", str(tmp_path / "in"), "--output", str(tmp_path / "ours")]) == 0
    export_huggingface(open_checkpoint(tmp_path / "ours"), tmp_path / "out", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    assert torch.equal(hf_logits(tmp_path / "out"), hf_logits(hf))


def edited(hf: Path, folder: Path, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """A copy with other settings or tensors (None: without it)."""
    folder.mkdir()
    told = json.loads((hf / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(told))
    state = {**load_file(hf / "model.safetensors"), **{name.replace("__", "."): x for name, x in tensors.items()}}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")
    return folder


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"activation_function": "relu"}, {}, "activation_function is 'relu'"),
    ({"tie_word_embeddings": False}, {}, "tie_word_embeddings is False, True expected"),
    ({"scale_attn_by_inverse_layer_idx": True}, {}, "scale_attn_by_inverse_layer_idx"),
    ({"model_type": "llama"}, {}, "model_type is 'llama'"),
    ({"n_head": 5}, {}, "config.json: .*not divisible"),
    ({"n_layer": 3}, {}, "12 tensors missing .* blocks.2.attn.proj.bias"),
    ({"n_layer": 1}, {}, "12 tensors unknown .* blocks.1.attn.proj.bias"),
    ({"n_positions": 32}, {}, r"wpe.weight: expected \[32, 32\]"),
    ({}, {"transformer__ln_f__bias": None}, "1 tensors missing .* ln_f.bias"),
    ({}, {"transformer__wte__weight": torch.zeros(300, 32)}, r"wte.weight: expected \[257, 32\]"),
    ({}, {"transformer__ln_f__bias": torch.zeros(32, dtype=torch.int64)}, "ln_f.bias: .*int64"),
    ({}, {"lm_head__weight": torch.zeros(VOCAB, HIDDEN)}, "lm_head.weight differs"),
]


def test_another_model_is_refused_by_name(hf: Path, tmp_path: Path) -> None:
    for number, (config, tensors, words) in enumerate(REFUSED):
        with pytest.raises(CheckpointError, match=words):
            open_external_checkpoint(edited(hf, tmp_path / str(number), config, **tensors))


def test_damaged_and_hostile_folders_are_exit_4_and_one_line(hf: Path, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    for number, (name, data) in enumerate([("model.safetensors", b""), ("model.safetensors", b"\xff" * 64),
                                           ("config.json", b"{"), ("config.json", b"[]"), ("config.json", b"{}"),
                                           ("model.safetensors", None)]):
        folder = edited(hf, tmp_path / str(number))
        (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
        assert main(["convert", str(folder), "--output", str(tmp_path / "out")]) == 4
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    folder = edited(hf, tmp_path / "index")
    (folder / "model.safetensors").rename(tmp_path / "stray.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../stray.safetensors"}}')
    assert main(["convert", str(folder), "--output", str(tmp_path / "out")]) == 4
    assert "not a plain name" in capsys.readouterr().err and not (tmp_path / "out" / "latest").exists()


def test_an_output_folder_that_holds_something_is_not_touched(hf: Path, tmp_path: Path) -> None:
    assert main(["convert", str(hf), "--output", str(tmp_path / "ours")]) == 0
    assert main(["convert", str(hf), "--output", str(tmp_path / "ours")]) == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["convert", str(tmp_path / "ours"), "--output", str(tmp_path / "full")]) == 2
    assert main(["convert", str(tmp_path / "nothing"), "--output", str(tmp_path / "x")]) == 4


# ---- a run that starts from them ------------------------------------------------------------------------------------

def test_runs_from_the_folder_and_from_its_import_are_the_same_text(hf: Path, tmp_path: Path) -> None:
    """--load-hf, and convert then --load --finetune; other layouts to the tolerance of another order of sums."""
    assert main(["convert", str(hf), "--output", str(tmp_path / "ours")]) == 0
    common = [*TINY, *NO_DROPOUT, "--train-data", write_corpus(tmp_path / "corpus"), "--train-iters", 3, "--lr", 1e-3,
              "--global-batch-size", 4, "--batch-size", 2]
    said = train([*common, "--load-hf", hf, "--metrics-file", tmp_path / "a"])
    assert f"initial weights from the Hugging Face folder {hf}" in said
    train([*common, "--load", tmp_path / "ours", "--finetune", "--metrics-file", tmp_path / "b"])
    first = [record["lm_loss"] for record in steps(tmp_path / "a")]
    assert first == [record["lm_loss"] for record in steps(tmp_path / "b")]
    train([*common, "--metrics-file", tmp_path / "fresh"])
    assert abs(steps(tmp_path / "fresh")[0]["lm_loss"] - first[0]) > 0.01
    run_ranks(train_all, 2, [[*common, "--load-hf", hf, "--model-parallel-size", 2, "--metrics-file", tmp_path / "tp"]])
    assert [record["lm_loss"] for record in steps(tmp_path / "tp")] == pytest.approx(first, abs=1e-5)


def test_what_does_not_fit_is_refused_with_every_difference_named(hf: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--num-layers 2 there, 3 here; --layernorm-epsilon 1e-05 there, 0.001"):
        train([*TINY, "--mock-data", "--load-hf", hf, "--num-layers", 3, "--layernorm-epsilon", 1e-3])
    with pytest.raises(ConfigError, match="memory-centric"):
        train([*TINY, "--mock-data", "--load-hf", hf, "--memory-centric-tiled-linear", "--tile-factor", 2])
    assert main(["convert", str(hf), "--output", str(tmp_path / "ours")]) == 0
    with pytest.raises(CheckpointError, match="was not saved by the trainer .*: give --finetune"):
        train([*TINY, "--mock-data", "--load", tmp_path / "ours"])


def test_load_hf_takes_the_shape_from_the_folder(hf: Path, tmp_path: Path) -> None:
    """No shape flag is needed; one that is given must agree; a resume does not need the folder any more."""
    common = ["--tokenizer-type", "ByteLevelTokenizer", "--mock-data", "--batch-size", 1, "--log-interval", 0,
              "--sample-tokens", 0, "--num-workers", 0, "--eval-interval", 0, "--train-iters", 2]
    again = [*common, "--load-hf", tmp_path / "hf", "--save", tmp_path / "s", "--load", tmp_path / "s"]
    shutil.copytree(hf, tmp_path / "hf")
    assert "initial weights" in train([*again, "--exit-interval", 1])
    assert open_checkpoint(tmp_path / "s").shape("weight", "wpe.weight") == (LENGTH, HIDDEN)
    with pytest.raises(CheckpointError, match="--hidden-size 32 there, 64 here"):
        train([*common, "--load-hf", hf, "--hidden-size", 64])
    with pytest.raises(CheckpointError, match="--hidden-size 32 there, 64 here"):
        train([*common, "--load-hf", hf, "--preset", "tiny"])
    shutil.rmtree(tmp_path / "hf")
    shape = ["--num-layers", LAYERS, "--hidden-size", HIDDEN, "--num-attention-heads", HEADS,
             "--max-position-embeddings", LENGTH]
    assert "loaded weights and optimizer of global_step1" in train([*again, *shape])
    for name, words in (("gpt2", "is not a folder"), (tmp_path, "has no config.json")):
        with pytest.raises(ConfigError, match=f"--load-hf {name}: {words}; give a local .* nothing is downloaded"):
            train([*common, "--load-hf", name])


# ---- nanoGPT --------------------------------------------------------------------------------------------------------

LINEAR = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def nanogpt_file(path: Path, hf: Path, *, bias: bool = True, rows: int = VOCAB, compiled: bool = False) -> Path:
    """What nanoGPT's train.py saves of the same weights."""
    state = {name: tensor.T.contiguous() if name.endswith(LINEAR) else tensor
             for name, tensor in load_file(hf / "model.safetensors").items()}
    table = torch.cat([state["transformer.wte.weight"], torch.full((rows - VOCAB, HIDDEN), 3.0)])
    state |= {"transformer.wte.weight": table, "lm_head.weight": table}
    state = {name: tensor for name, tensor in state.items() if bias or not name.endswith(".bias")}
    args = dict(n_layer=LAYERS, n_head=HEADS, n_embd=HIDDEN, block_size=LENGTH, bias=bias, vocab_size=rows, dropout=0.0)
    torch.save({"model": {("_orig_mod." if compiled else "") + name: tensor for name, tensor in state.items()},
                "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []}, "model_args": args,
                "iter_num": 3, "best_val_loss": torch.tensor(2.5), "config": {"out_dir": "out"}}, path)
    return path


def test_nanogpt_weights_are_ours(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nanogpt_file(tmp_path / "ckpt.pt", hf, rows=320, compiled=True)
    for number, source in enumerate((tmp_path, tmp_path / "ckpt.pt")):
        assert main(["convert", str(source), "--output", str(tmp_path / f"o{number}"), "--vocab-size", str(VOCAB)]) == 0
    assert "exact GELU" in capsys.readouterr().out
    assert main(["convert", str(hf), "--output", str(tmp_path / "hf")]) == 0
    assert weights(tmp_path / "o0") == weights(tmp_path / "o1") == weights(tmp_path / "hf")
    assert open_external_checkpoint(tmp_path).shapes["wte.weight"] == (320, HIDDEN)
    check_same(open_external_checkpoint(nanogpt_file(tmp_path / "plain.pt", hf)), open_external_checkpoint(hf))
    found = open_external_checkpoint(nanogpt_file(tmp_path / "unbiased.pt", hf, bias=False))
    assert not any(found.tensor(name).any() for name in found.shapes if name.endswith(".bias"))
    assert torch.equal(found.tensor("ln_f.weight"), open_external_checkpoint(hf).tensor("ln_f.weight"))


# ---- Megatron-LM ----------------------------------------------------------------------------------------------------

class AttnMaskType(enum.Enum):
    """Stands for the classes that Megatron's arguments hold."""

    causal = 2


BLOCK = {"ln_1": "input_layernorm", "attn.qkv": "attention.query_key_value", "attn.proj": "attention.dense",
         "ln_2": "post_attention_layernorm", "mlp.fc": "mlp.dense_h_to_4h", "mlp.proj": "mlp.dense_4h_to_h"}


def in_their_order(whole: Tensor, version: float, rank: int, tp: int) -> Tensor:
    """Rows of the fused projection as one rank of Megatron-LM keeps them: [q k v, head, width] in another order."""
    rows = [(part, head, i) for part in range(3) for head in range(rank * HEADS // tp, (rank + 1) * HEADS // tp)
            for i in range(HIDDEN // HEADS)]
    if version > 0:
        rows.sort(key=lambda row: (row[1], row[2], row[0]) if version == 1 else (row[1], row[0], row[2]))
    return whole.unflatten(0, (3, HEADS, -1))[tuple(zip(*rows, strict=True))]


def megatron_folder(root: Path, hf: Path, tp: int, version: float, style: str = "transformer") -> Path:
    """What Megatron-LM saves of the same weights, its table padded to 384 rows."""
    source, ranks = open_external_checkpoint(hf), []
    for rank in range(tp):
        layers: dict[str, Tensor] = {}
        for name in source.shapes:
            whole = source.tensor(name).clone()
            if not name.startswith("blocks."):
                continue
            _, layer, *middle, last = name.split(".")
            kind = ".".join(middle)
            if kind == "attn.qkv":
                whole = in_their_order(whole, version, rank, tp)
            elif kind == "mlp.fc":
                whole = whole.chunk(tp)[rank]
            elif kind.endswith("proj") and last == "weight":
                whole = whole.chunk(tp, dim=1)[rank]
            module = BLOCK[kind].replace("attention.", "self_attention.") if style == "encoder" else BLOCK[kind]
            layers[f"layers.{layer}.{module}.{last}"] = whole.clone()
        layers |= {f"final_layernorm.{last}": source.tensor(f"ln_f.{last}").clone() for last in ("weight", "bias")}
        table = torch.cat([source.tensor("wte.weight"), torch.full((384 - VOCAB, HIDDEN), 5.0)]).chunk(tp)[rank]
        words, places = table.clone(), source.tensor("wpe.weight").clone()
        if style == "flat":  # the first release
            model: dict[str, Any] = {"word_embeddings.weight": words, "position_embeddings.weight": places,
                                     **{f"transformer.{name}": tensor for name, tensor in layers.items()}}
        else:
            embedding = {"word_embeddings": {"weight": words}, "position_embeddings": {"weight": places}}
            model = {"language_model": {"embedding": embedding, style: layers}}
        ranks.append(model)
    for rank, model in enumerate(ranks):
        folder = root / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        arguments = argparse.Namespace(num_attention_heads=HEADS, layernorm_epsilon=1e-5, mask=AttnMaskType.causal,
                                       params_dtype=torch.float16)
        saved: dict[str, Any] = {"model": model, "args": arguments, "iteration": 7}
        torch.save(saved | ({"checkpoint_version": version} if version else {}), folder / "model_optim_rng.pt")
    return root


def test_megatron_weights_are_ours_for_every_tp_and_version(hf: Path, tmp_path: Path) -> None:
    expected = open_external_checkpoint(hf)
    for number, (tp, version, style) in enumerate([
            *((tp, version, "transformer") for tp, version in itertools.product((1, 2, 4), (0, 1.0, 2.0))),
            (2, 3.0, "encoder"), (2, 0, "flat")]):
        root = tmp_path / str(number)
        megatron_folder(root / "iter_0000007", hf, tp, version, style)
        check_same(open_external_checkpoint(root / "iter_0000007", VOCAB), expected)
        (root / "latest_checkpointed_iteration.txt").write_text("7")
        check_same(open_external_checkpoint(root, VOCAB), expected)
    path = tmp_path / "0" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    saved["args"] = argparse.Namespace(num_attention_heads=HEADS)
    torch.save(saved, path, _use_new_zipfile_serialization=False)  # as old releases of torch
    check_same(open_external_checkpoint(tmp_path / "0", VOCAB), expected)


def test_megatron_folders_that_do_not_fit_are_refused_by_name(hf: Path, tmp_path: Path) -> None:
    folder = megatron_folder(tmp_path / "m", hf, 2, 2.0)
    (folder / "mp_rank_01").rename(folder / "mp_rank_02")
    with pytest.raises(CheckpointError, match="expected mp_rank_00, mp_rank_01, found mp_rank_00, mp_rank_02"):
        open_external_checkpoint(folder)
    (folder / "mp_rank_02").rename(folder / "mp_rank_01")
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    saved = torch.load(path, weights_only=False)
    torch.save({**saved, "model": {**saved["model"], "output_layer.weight": torch.zeros(1)}}, path)
    with pytest.raises(CheckpointError, match="mp_rank_01.*output_layer.weight belongs to no GPT-2"):
        open_external_checkpoint(folder)
    torch.save({"model": saved["model"]}, folder / "mp_rank_00" / "model_optim_rng.pt")
    torch.save({"model": saved["model"]}, path)
    with pytest.raises(CheckpointError, match="give --num-attention-heads"):
        open_external_checkpoint(folder)


def test_a_state_dict_that_deepspeeds_script_made_of_a_megatron_model_is_read(
        hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (0, 1.0, 2.0):
        folder = megatron_folder(tmp_path / f"m{version}", hf, 1, version, "encoder")
        model = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]["language_model"]
        flat = {f"language_model.embedding.{name}.weight": part["weight"] for name, part in model["embedding"].items()}
        flat |= {f"language_model.encoder.{name}": tensor for name, tensor in model["encoder"].items()}
        torch.save(flat, tmp_path / "pytorch_model.bin")
        check_same(open_external_checkpoint(tmp_path / "pytorch_model.bin", VOCAB, HEADS, version),
                   open_external_checkpoint(hf))
    command = ["convert", str(tmp_path / "pytorch_model.bin"), "--output", str(tmp_path / "out"), "--vocab-size",
               str(VOCAB)]
    for missing, value in (("--checkpoint-version", "2.0"), ("--num-attention-heads", str(HEADS))):
        assert main(command) == 4
        assert missing in capsys.readouterr().err
        command += [missing, value]
    assert main(command) == 0 and open_checkpoint(tmp_path / "out").shape("weight", "wte.weight") == (VOCAB, HIDDEN)


# ---- hostile files --------------------------------------------------------------------------------------------------


def test_a_payload_in_a_torch_file_is_never_run(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value = {"model": {"wte.weight": torch.ones(2, 2)}, "args": Payload(), "x": Payload()}
    for kind in ("ckpt.pt", "mp_rank_00/model_optim_rng.pt", "pytorch_model.bin"):
        path = tmp_path / "in" / kind
        path.parent.mkdir(parents=True)
        if kind == "pytorch_model.bin":
            shutil.copy(hf / "config.json", path.parent)
        for zipped in (True, False):
            torch.save(value, path, _use_new_zipfile_serialization=zipped)
            assert main(["convert", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 4
        path.write_bytes(pickle.dumps(value))
        assert main(["convert", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 4
        shutil.rmtree(tmp_path / "in")
    assert not (tmp_path / "canary").exists()
