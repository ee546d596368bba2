"""What GPT-2 promises beside equality with HF (test_parity_hf.py): counts, spread, causality, tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.cli import parse_args
from megatron.config.tree import PRESETS, ModelConfig, TrainConfig
from megatron.errors import ConfigError
from megatron.model import GPT2, count_parameters
from megatron.plan.footprint import PlannedRun
from megatron.train.build import (engine as make_engine, model as make_model, seed_everything, tokenizer,
                                  with_vocab_size)
from mpu.groups import build
from mpu.partition import join_local_slices, partition_of
from mpu.split import Partition
from tests.distributed import run_ranks
from tests.megatron.counting import Launches
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, train
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, weights


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_a_built_model_has_the_parameters_that_are_counted(preset: str) -> None:
    shape = {key: value for key, value in PRESETS[preset].items() if key != "tokenizer_type"}
    for odd in ({}, {"intermediate_size": 100, "num_layers": 3}):
        config = ModelConfig(**(shape | odd), vocab_size=1009, make_vocab_size_divisible_by=1)
        h, f = config.hidden_size, config.ffn_size
        block = 4 * h * h + 2 * h * f + 9 * h + f  # qkv, proj, two of the MLP, their biases, two LayerNorms
        whole = (1009 + config.max_position_embeddings + 2) * h + config.num_layers * block
        assert count_parameters(config) == (whole, block)
        assert sum(p.numel() for p in GPT2(config).parameters()) == whole


def test_initial_weights_spread_as_the_paper_says() -> None:
    config = tiny_model(num_layers=8, hidden_size=128, init_method_std=0.02)
    residual = 0.02 / math.sqrt(2 * 8)
    model = GPT2(config)
    heads = {tuple(weight.flatten()[:4].tolist()) for weight in model.parameters() if weight.dim() == 2}
    assert len(heads) == 2 + 4 * 8, "no two matrices start alike"
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert parameter.eq(1.0 if ".ln_" in name and name.endswith("weight")
                                or name == "ln_f.weight" else 0.0).all(), name
            continue
        rows = parameter[:257] if name == "wte.weight" else parameter
        expected = residual if name.endswith("proj.weight") else 0.02
        assert rows.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(rows.mean().item()) < 5 * expected / math.sqrt(rows.numel()), name


@torch.no_grad()
def test_no_logit_sees_a_later_token() -> None:
    model = GPT2(tiny_model(init_method_std=0.3)).eval()
    row = torch.randint(257, (1, 16), generator=torch.Generator().manual_seed(1))
    before = model.logits(model.hidden_states(row))[0]
    for at in range(16):
        changed = row.clone()
        changed[0, at] = (changed[0, at] + 1) % 257
        moved = (model.logits(model.hidden_states(changed))[0] != before).any(dim=1)
        assert moved.tolist() == [there >= at for there in range(16)]


PADDINGS = [(257, 128), (130, 128), (64, 1), (3, 4)]
"""Vocabularies, and what they are padded to a multiple of. Of 130 tokens in 4 x 128 rows some ranks have no token."""


def logits_of(rank: int, world: int) -> list[torch.Tensor]:
    found, tp = [], build(world).tp
    for vocabulary, multiple in PADDINGS:
        config = tiny_model(vocab_size=vocabulary, init_method_std=0.2, make_vocab_size_divisible_by=multiple)
        model, row = GPT2(config, tp).eval(), torch.arange(16).unsqueeze(0) % vocabulary
        with torch.no_grad():
            found += [model.logits(model.hidden_states(row, segments=segments))
                      for segments in (None, torch.arange(16).unsqueeze(0) // 5)]
        assert found[-1].shape == (1, 16, vocabulary), "no logit of a padding row"
    return found


def test_logits_over_tensor_parallel_equal_one_process_whatever_the_padding() -> None:
    (expected,) = run_ranks(logits_of, 1)
    for tp in (2, 4):
        for found in run_ranks(logits_of, tp):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # partial sums in another order


def test_dropout_is_on_in_training_alone() -> None:
    model = GPT2(tiny_model(attention_dropout=0.5, hidden_dropout=0.5))
    row = torch.arange(17).unsqueeze(0)
    with torch.no_grad():
        assert model(row[:, :-1], row[:, 1:]) != model(row[:, :-1], row[:, 1:])
        model.eval()
        assert model(row[:, :-1], row[:, 1:]) == model(row[:, :-1], row[:, 1:])


def dropout_masks(rank: int, world: int, sequence_parallel: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(which outputs of the embedding dropout are zero, which heads' weights) for one step of a tp 2 x dp 2 grid."""
    groups = build(2)
    seed_everything(TrainConfig(), groups)
    model = GPT2(tiny_model(hidden_dropout=0.5, attention_dropout=0.5), groups.tp,
                 sequence_parallel=sequence_parallel)
    seen: list[torch.Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach() == 0))
    values: list[torch.Tensor] = []
    attention = model.blocks[0].attn
    plain = attention._attend

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object) -> torch.Tensor:
        # With q, k = 0 and v = 1 the result shows how many weights of each row were dropped.
        y = plain(q * 0, k * 0, torch.ones_like(v), mask)
        values.append(y.detach().clone())
        return y

    attention._attend = attend
    model(torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long))
    return seen[0], values[0]


def test_dropout_is_equal_where_activations_are_replicated_and_different_elsewhere() -> None:
    """Ranks 0, 1 and ranks 2, 3 are tensor parallel groups: hidden dropout is alike within, attention's is not."""
    hidden, heads = zip(*run_ranks(dropout_masks, 4), strict=True)
    assert hidden[0].equal(hidden[1]) and hidden[2].equal(hidden[3]) and not hidden[0].equal(hidden[2])
    assert not any(heads[a].equal(heads[b]) for a in range(4) for b in range(a))
    for masks in zip(*run_ranks(dropout_masks, 4, True), strict=True):
        assert not any(masks[a].equal(masks[b]) for a in range(4) for b in range(a))


@pytest.mark.parametrize("weighted", [False, True])
def test_negative_targets_are_left_out_of_loss_and_gradients_as_torch_does(weighted: bool) -> None:
    model, draw = GPT2(tiny_model(attention_dropout=0.0, hidden_dropout=0.0)), torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(257, (2, 8), generator=draw) for _ in range(2))
    targets[0, :3] = targets[1, 7] = -100
    logits = model.logits(model.hidden_states(tokens))
    weight = torch.rand(2, 8, generator=draw) if weighted else torch.ones(2, 8)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    expected = (losses * weight.flatten()).sum() / weight[targets >= 0].sum()
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(tokens, targets, weight if weighted else None)
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("length", "target", "words"), [
    (8, 257, r"target 257 is outside the vocabulary 0\.\.256"), (33, 0, "33 tokens is longer than the 32 positions")])
def test_what_the_model_has_no_place_for_is_refused(length: int, target: int, words: str) -> None:
    tokens = torch.zeros(1, length, dtype=torch.int64)
    with pytest.raises(ConfigError, match=words):
        GPT2(tiny_model(max_position_embeddings=32))(tokens, tokens + target)


# ---- sequence parallelism ------------------------------------------------------------------------------------------

SPLIT: dict[str, Any] = {"model_parallel_size": 2, "sequence_parallel": True}
RUNS: list[dict[str, Any]] = [{**SPLIT, "zero_stage": stage, "checkpoint_activations": recomputes}
                              for stage in (0, 2, 3) for recomputes in (False, True)]
Weights = dict[str, tuple[torch.Tensor, Partition | None]]


def losses_and_weights(rank: int, world: int, runs: list[dict[str, Any]]) -> list[tuple[list[float], Weights]]:
    """Of four steps of each run, with documents kept apart, and the loss of an evaluation."""
    found = []
    for values in runs:
        config = configure_gpt2(batch_size=3, lr=1e-2, lr_warmup_iters=0, **values)
        engine = gpt2_engine(config, build(config.parallel.model_parallel_size))
        losses = []
        for number in range(5):
            rows = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(number))
            engine.module.train(number < 4)
            loss = engine(rows[:, :-1], rows[:, 1:], segments=(rows[:, :-1] == 5).cumsum(1),
                          grad_scale=engine.backward_scale)
            losses.append(loss.item())
            if number < 4:
                engine.backward(loss)
                engine.step()
        partitions = {name: partition_of(parameter) for name, parameter in engine.module.named_parameters()}
        found.append((losses, {name: (value, partitions[name]) for name, value in weights(engine).items()}))
    return found


def joined(by_rank: Sequence[Weights]) -> dict[str, torch.Tensor]:
    whole = {}
    for name, (first, cut) in by_rank[0].items():
        parts = [each[name][0] for each in by_rank]
        assert cut is not None or all(map(first.equal, parts)), f"{name} is another on the other ranks"
        whole[name] = first if cut is None else join_local_slices(parts, cut)
    return {**whole, "wte.weight": whole["wte.weight"][:61]}


LLAMA_LIKE: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "qk_norm": True,
                              "num_query_groups": 2, "activation": "swiglu", "z_loss": 1e-3}


@pytest.mark.parametrize("shape, runs", [({}, RUNS), (LLAMA_LIKE, RUNS[3:4])], ids=["GPT-2", "like Llama"])
def test_split_positions_train_as_one_rank_does(shape: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    (expected, wanted), = run_ranks(losses_and_weights, 1, [shape])[0]
    cases = [{**values, **shape} for values in ({"model_parallel_size": 2}, *runs)]
    for per_rank in zip(*run_ranks(losses_and_weights, 2, cases), strict=True):
        assert per_rank[0][0] == per_rank[1][0] == pytest.approx(expected, abs=1e-6)
        torch.testing.assert_close(joined([each for _, each in per_rank]), joined([wanted]), rtol=0,
                                   atol=5e-6 if shape else 1e-6)


def kept_and_collectives(rank: int, world: int, values: dict[str, Any]) -> list[tuple[int, int, dict[str, int]]]:
    """(bytes that autograd keeps, those that the plan counts for the blocks, collectives) of a micro-batch, of 2 and of
    3 blocks."""
    found = []
    for layers in (2, 3):
        config = configure_gpt2(batch_size=3, num_layers=layers, **values)
        grid = build(2)
        seed_everything(config.train, grid)
        engine = gpt2_engine(config, grid)
        rows, saved = torch.randint(61, (3, 17)), dict[int, torch.Tensor]()

        def note(tensor: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        with Launches() as launches:
            with saved_tensors_hooks(note, lambda tensor: tensor):
                loss = engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale)
            known = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
            kept = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in known)
            engine.backward(loss)
        sent = {name: launches.by_name[name] for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single")}
        found.append((kept, PlannedRun(config, 2, "cpu").activations.block * layers, sent))
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_split_positions_keep_what_the_plan_counts_and_send_so_often(dropout: float) -> None:
    values = {**SPLIT, "hidden_dropout": dropout}
    for two, three in run_ranks(kept_and_collectives, 2, values):
        assert three[0] - two[0] == three[1] - two[1]
        # A block gathers before two column-parallel products, in backward behind two row-parallel ones, and its inputs
        # again; it sums the gradients of two LayerNorms. The others are of the embedding, of ln_f and of the loss.
        # gloo reduces and scatters by an exchange of rows.
        for layers, (_, _, sent) in ((2, two), (3, three)):
            assert sent == {"all_gather_into_tensor": 6 * layers + 2,
                            "all_to_all_single": 4 * layers + 2, "all_reduce": 2 * layers + 1 + 2}


# ---- padding of the vocabulary -------------------------------------------------------------------------------------

def test_the_vocabulary_padding_does_not_change_the_training(tmp_path: Path) -> None:
    """257 tokens in 257, 384 and 1,000 rows."""
    for multiple in (1, 128, 1000):
        train([*TINY, "--mock-data", "--train-iters", 20, "--lr", 1e-2, "--weight-decay", 0.1, "--metrics-file",
               tmp_path / str(multiple), "--make-vocab-size-divisible-by", multiple])
        for mine, theirs in zip(steps(tmp_path / str(multiple)), steps(tmp_path / "1"), strict=True):
            # Padding takes part in the products and sums as zeros, which changes the order of the others: 1e-7 a step.
            assert mine["lm_loss"] == pytest.approx(theirs["lm_loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def padding_of_wte(rank: int, world: int) -> list[float]:
    """The largest absolute value of this rank's padding rows, after training in every precision."""
    found = []
    for precision in ([], ["--bf16"], ["--fp16"]):
        config = parse_args([*TINY, *NO_DROPOUT, *precision, "--mock-data", "--model-parallel-size", str(world),
                             "--lr", "1e-2", "--lr-warmup-iters", "0", "--weight-decay", "0.1"])
        groups = build(world)
        config = with_vocab_size(config, tokenizer(config))
        engine = make_engine(config, make_model(config, groups), groups, torch.device("cpu")).core
        rows = torch.randint(257, (4, 17), generator=torch.Generator().manual_seed(1))
        for _ in range(10):
            engine.backward(engine(rows[:, :-1], rows[:, 1:], grad_scale=engine.backward_scale))
            engine.step()
        weight = dict(engine.module.named_parameters())["wte.weight"]
        padding = weight[max(0, 257 - rank * len(weight)):]
        found.append(padding.abs().max().item() if len(padding) else -1.0)
    return found


def test_padding_rows_stay_zero_on_every_tensor_parallel_rank_and_precision() -> None:
    """257 rows in 2 x 256: the second rank holds one real token and 255 rows of padding."""
    assert run_ranks(padding_of_wte, 2) == [[-1.0] * 3, [0.0] * 3]
