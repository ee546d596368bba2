"""What GPT-2 promises beside equality with HF (test_parity_hf.py): counts, spread, causality, tensor parallelism."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron.config.cli import parse_args
from megatron.config.tree import PRESETS, ModelConfig
from megatron.errors import ConfigError
from megatron.model import GPT2, count_parameters
from megatron.train.build import engine as make_engine, model as make_model, tokenizer, with_vocab_size
from mpu.groups import build
from tests.distributed import run_ranks
from tests.megatron.helpers import NO_DROPOUT, TINY, steps, tiny_model, train


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


def dropout_masks(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(which outputs of the embedding dropout are zero, which heads' weights) for one step of a tp 2 x dp 2 grid."""
    from megatron.config.tree import TrainConfig
    from megatron.train.build import seed_everything

    groups = build(2)
    seed_everything(TrainConfig(), groups)
    model = GPT2(tiny_model(hidden_dropout=0.5, attention_dropout=0.5), groups.tp)
    seen: list[torch.Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach() == 0))
    values: list[torch.Tensor] = []
    attention = model.blocks[0].attn
    plain = attention._attend

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, dropout: float) -> torch.Tensor:
        # With q, k = 0 and v = 1 the result shows how many weights of each row were dropped.
        y = plain(q * 0, k * 0, torch.ones_like(v), mask, dropout)
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
