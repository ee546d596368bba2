"""What is counted of a model is what it runs: equal to the closed form, the same however the model is run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules import module as torch_module

from megatron import recompute
from megatron.model import GPT2
from megatron.profiler.flop_recorder import FlopRecording
from megatron.profiler.profile import Macs, ModelProfile, build_profile
from megatron.train.flops import flops_per_token
from mpu import groups as mpu_groups
from tests.distributed import run_ranks
from tests.megatron.helpers import engine_of, tiny_model
from tests.megatron.profiler.closed_form import step_macs
from tests.megatron.profiler.models import gpt2, on_meta, preset, recorded, row, table, tokens

PRESETS = ["tiny", "small", "124M", "345M", "774M", "1.5B"]


@pytest.mark.few(6)
@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("name", PRESETS)
def test_the_total_of_each_preset_is_the_closed_form(name: str, chunk: int | None) -> None:
    """On the meta device attention is written out in products. 4 divides no number of layers of `tiny` and `small`."""
    config = preset(name)
    model = on_meta(config)
    if chunk is not None:
        model.run_blocks = recompute.in_chunks(chunk)
    x = tokens(model)
    found = recorded(model, x, x)
    assert found.macs == step_macs(config, 2, config.max_position_embeddings, causal=False, chunk=chunk)
    assert found.root.parameters == config.parameters()
    assert found.outside_modules == Macs()


@pytest.mark.parametrize("name", ["tiny", "124M", "1.5B"])
def test_the_formula_of_mfu_differs_by_what_the_guide_says(name: str) -> None:
    """It takes attention for full, and biases, norms and positions for products; padding it does not know."""
    config = preset(name)
    length, h = config.max_position_embeddings, config.hidden_size
    ran = step_macs(config, 1, length, causal=False,
                    padded=config.known_vocab_size).all - length  # without the mean of the loss
    no_products = length * h + config.num_layers * (9 * h + config.ffn_size) + 2 * h
    assert length * flops_per_token(config, length) == 2 * ran + length * 6 * no_products


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_a_causal_kernel_is_counted_for_the_scores_that_it_forms(chunk: int | None, dropout: float) -> None:
    model = gpt2(num_layers=3, hidden_dropout=dropout)
    if chunk is not None:
        model.run_blocks = recompute.in_chunks(chunk)
    x = tokens(model)
    assert recorded(model, x, x).macs == step_macs(model.config, 2, 16, causal=True, chunk=chunk)


def test_dropout_of_attention_writes_it_out_in_products() -> None:
    model = gpt2(attention_dropout=0.1)
    x = tokens(model)
    assert recorded(model, x, x).macs == step_macs(model.config, 2, 16, causal=False)


def test_each_module_has_its_own_products_also_in_backward() -> None:
    model, tall = gpt2(), 2 * 16
    x = tokens(model)
    found = recorded(model, x, x)
    h, ffn, scores = 32, 128, 2 * 32 * 16 * 17 // 2
    for block in ("blocks.0", "blocks.1"):
        for path, macs in (("attn.qkv", 3 * h * h), ("attn.proj", h * h), ("mlp.fc", h * ffn), ("mlp.proj", h * ffn)):
            assert row(found, f"{block}.{path}").macs == Macs(tall * macs, 2 * tall * macs), path
        attention = row(found, f"{block}.attn").macs
        assert attention == Macs(tall * 4 * h * h + 2 * scores, 2 * tall * 4 * h * h + 5 * scores)
        assert row(found, f"{block}.ln_1").macs == Macs()
    assert row(found, "wte").macs == Macs()  # the loss, which uses its table, is the model's


def test_neighbours_of_one_operation_are_told_apart_in_backward() -> None:
    """Each module makes one node of autograd's: an interval that is off by one gives it to another."""
    class Product(nn.Module):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(rows, columns))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = nn.Sequential(Product(3, 5), Product(5, 7), nn.Sequential(Product(7, 11)), Product(11, 2))
    found = recorded(model, torch.zeros(1, 3, requires_grad=True))
    assert [row(found, path).macs for path in ("0", "1", "2", "2.0", "3")] == [
        Macs(size, 2 * size) for size in (15, 35, 77, 77, 22)]


def test_what_runs_outside_of_modules_is_told_apart() -> None:
    model, weight = nn.Linear(4, 4), torch.zeros(4, 4, requires_grad=True)
    recording = FlopRecording(model)
    with recording.record():
        (model(torch.zeros(2, 4)) @ weight).sum().backward()
    found = build_profile(recording)
    assert (found.root.macs, found.outside_modules) == (Macs(32, 32), Macs(32, 64))


class Product(torch.autograd.Function):
    """Of a user's own; its backward makes one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.saved_tensors[0].T, None


def test_functionals_and_functions_of_a_users_own_are_seen() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Product.apply(F.linear(x, self.weight), self.weight)  # type: ignore[no-untyped-call]
            return y

    assert recorded(Model(), torch.zeros(2, 5)).macs == Macs(2 * 30, 2 * 30)


def test_a_module_that_another_thread_is_in_gets_nothing_of_this_one() -> None:
    """Torch's modes see their own thread: what the other one runs is not counted, and no call either."""
    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entered, self.may_leave = threading.Event(), threading.Event()

        def forward(self, x: Tensor) -> Tensor:
            self.entered.set()
            assert self.may_leave.wait(60)
            return x @ x

    waits, x = Waits(), torch.ones(4, 4)
    model = nn.Sequential(waits, nn.Linear(4, 4))

    def run() -> None:
        other = threading.Thread(target=waits, args=(x,))
        other.start()
        assert waits.entered.wait(60)
        x @ x
        model[1](x)
        waits.may_leave.set()
        other.join()

    found = counted(model, run)
    assert (found.outside_modules, row(found, "0").macs, row(found, "1").macs) == (Macs(64), Macs(), Macs(64))
    assert [row(found, path).calls for path in ("0", "1")] == [0, 1]


# ---- backward, or recomputation ---------------------------------------------------------------------------------


def counted(model: nn.Module, run: Callable[[], Any]) -> ModelProfile:
    recording = FlopRecording(model)
    with recording.record():
        run()
    return build_profile(recording)


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_backward_that_is_to_be_differentiated_is_no_recomputation() -> None:
    """Two layers of 8 x 8 see 4 rows: 256 MACs each; the first one's image wants no gradient."""
    model, x = two(), torch.ones(4, 8)
    found = counted(model, lambda: model(x).sum().backward(create_graph=True))
    assert found.macs == Macs(512, 768) and not found.backward_is_estimated
    assert row(found, "0").macs == Macs(256, 256) and row(found, "1").macs == Macs(256, 512)


def test_a_gradient_penalty_recomputes_nothing() -> None:
    """Of 4 x 8 @ 8 x 8 the slope by x is one product, and the slope of that by the weight another. No forward made the
    latter, which is taken for outside."""
    model, x = nn.Linear(8, 8, bias=False), torch.ones(4, 8, requires_grad=True)

    def run() -> None:
        slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    found = counted(model, run)
    assert (found.root.macs, found.outside_modules) == (Macs(256, 256), Macs(0, 256))


def test_the_gradient_of_a_function_is_a_backward() -> None:
    weight, x = torch.ones(8, 8), torch.ones(4, 8)
    found = counted(two(), lambda: torch.func.grad(lambda w: (x @ w).sum())(weight))
    assert found.macs == found.outside_modules == Macs(256, 256)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("reentrant, asked", [(False, {}), (False, {"retain_graph": True}), (True, {}),
                                              (False, {"create_graph": True})])
def test_a_checkpoint_without_modules_runs_again(reentrant: bool, asked: dict[str, bool]) -> None:
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(4, 8, requires_grad=True)

    def run() -> None:
        y: Tensor = torch.utils.checkpoint.checkpoint(lambda x: (x @ weight).sin(), x, use_reentrant=reentrant)
        y.sum().backward(**asked)

    assert counted(two(), run).macs == Macs(256, 512, 256)


def test_a_backward_without_products_is_seen_and_not_estimated() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.norm = nn.Linear(8, 8).requires_grad_(False), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.fixed(x))
            return y

    found = recorded(Last(), torch.ones(4, 8))
    assert found.macs == Macs(256) and not found.backward_is_estimated


# ---- the same table ----------------------------------------------------------------------------------------------


def forward_table(profile: ModelProfile) -> list[tuple[Any, ...]]:
    return [(*found[:3], found[3].forward, *found[4:]) for found in table(profile)]


def test_two_profiles_in_a_row_are_equal_and_add_up_where_asked() -> None:
    model = gpt2()
    x = tokens(model)
    assert table(recorded(model, x, x)) == (first := table(recorded(model, x, x)))
    twice = recorded(model, x, x, times=2)
    assert [(macs, calls) for *_, macs, calls in table(twice)] == [
        (macs.times(2), 2 * calls) for *_, macs, calls in first]


def test_recomputation_changes_no_other_column() -> None:
    plain, again = gpt2(), gpt2()
    again.run_blocks = recompute.in_chunks(1)
    x = tokens(plain)
    without = [(*found[:3], replace(found[3], recomputation=0), *found[4:]) for found in table(recorded(again, x, x))]
    assert without == table(recorded(plain, x, x))


def test_a_function_with_a_backward_of_its_own_is_recomputation_where_it_runs_again() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = Product.apply(x, torch.zeros(4, 4))  # type: ignore[no-untyped-call]
            return y.sin()

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            return made

    found = recorded(Kept(), torch.zeros(2, 4, requires_grad=True))
    assert found.macs == row(found, "inner").macs == Macs(32, 32, 32)


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpoint_is_seen_as_well(reentrant: bool) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=reentrant)
            return made

    x = torch.zeros(2, 4, requires_grad=True)
    assert recorded(Kept(), x).macs == Macs(128, 256, 128)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_a_compiled_model_has_the_same_table_and_stays_compiled() -> None:
    plain, model = gpt2(), gpt2()
    compiler = CompileCounter()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=compiler)
    x = tokens(plain)
    model(x, x).backward()
    before, graphs = compiler.op_count, compiler.frame_count
    assert graphs
    assert table(recorded(model, x, x)) == table(recorded(plain, x, x))
    model(x, x).backward()
    assert (compiler.op_count, compiler.frame_count) == (before, graphs)


def test_what_modules_inside_of_an_ignored_one_run_is_ignored_and_nothing_else() -> None:
    """Also where everything is ignored that has the class of what stands for the outside."""
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)), torch.zeros(2, 4)
    model[0].__class__ = type("Block", (nn.Sequential,), {})
    for ignored, root, outside in ((type(model[0]), 32, 32), (nn.Linear, 0, 32), (nn.Identity, 64, 32)):
        recording = FlopRecording(model, [ignored])
        with recording.record(), torch.no_grad():
            model(x) @ torch.zeros(4, 4)
        found = build_profile(recording)
        assert (found.root.macs, found.outside_modules) == (Macs(root), Macs(outside))


def test_a_tied_parameter_and_a_shared_module_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.other.weight = self.one.weight
            self.again = nn.Sequential(self.third)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.again(self.third(self.other(self.one(x))))
            return y

    found = recorded(Tied(), torch.zeros(2, 4))
    assert found.root.parameters == 2 * 16 + 3 * 4
    assert [inner.name for inner in found.root.children] == ["one", "other", "third", "again"]
    assert not row(found, "again").children
    assert row(found, "third").calls == 2 and row(found, "third").macs.forward == 64
    assert row(found, "other").parameters == 4
    assert sum(inner.parameters for inner in found.root.children) == found.root.parameters


def test_a_head_that_is_tied_has_the_products_and_the_embedding_the_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.inner(self.table(x)))
            return y

    found = recorded(Tied(), torch.zeros(2, dtype=torch.long))
    assert [(inner.parameters, inner.macs.forward) for inner in found.root.children] == [(40, 0), (20, 32), (0, 80)]


def profiled(rank: int, world: int, tp: int, stage: int) -> ModelProfile:
    """A step on this rank; of 256 tokens, so that padding is the same at every tensor parallel size."""
    groups = mpu_groups.build(tp)
    model = GPT2(tiny_model(vocab_size=256), groups.tp)
    engine = engine_of(model, groups, zero_stage=stage, stage3_param_persistence_threshold=0)
    x = tokens(model)
    recording = FlopRecording(model)
    for _ in range(2):  # at stage 3 the first pass finds out in which order units come
        recording.reset()
        with recording.record():
            loss = engine(x, x)
            engine.backward(loss)
        engine.step()
    return build_profile(recording)


def alone() -> ModelProfile:
    model = gpt2(vocab_size=256)
    return recorded(model, tokens(model), tokens(model))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_stages_have_the_same_table(stage: int) -> None:
    for found in run_ranks(profiled, 2, 1, stage):
        assert table(found) == table(alone())


def test_tensor_parallel_ranks_show_the_logical_model_and_their_share() -> None:
    whole = alone()
    for found in run_ranks(profiled, 2, 2, 0):
        assert [line[:2] for line in table(found)] == [line[:2] for line in table(whole)]
        for path in ("blocks.0.attn", "blocks.1.mlp.fc", "blocks"):
            assert row(found, path).macs == row(whole, path).macs
            assert row(found, path).macs_on_rank.times(2) == row(whole, path).macs
            assert row(found, path).parameters == row(whole, path).parameters
        assert row(found, "wte").parameters_on_rank * 2 == row(found, "wte").parameters == 256 * 32
        assert row(found, "ln_f").parameters_on_rank == row(found, "ln_f").parameters
        assert found.root.parameters == whole.root.parameters == tiny_model(vocab_size=256).parameters()


# ---- nothing is left ---------------------------------------------------------------------------------------------


def test_the_model_and_torch_are_left_as_they_were() -> None:
    model = gpt2()
    model.blocks[0].eval()
    before = [(module.training, set(vars(module)), len(module._forward_hooks)) for module in model.modules()]
    x = tokens(model)
    recorded(model, x, x)
    recording = FlopRecording(model)
    with pytest.raises(RuntimeError, match="of the user"), recording.record():
        raise RuntimeError("of the user")
    assert [(module.training, set(vars(module)), len(module._forward_hooks)) for module in model.modules()] == before
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_profile_changes_no_bit() -> None:
    torch.manual_seed(3)
    one, other = gpt2(hidden_dropout=0.1), gpt2(hidden_dropout=0.1)
    x = tokens(one)
    torch.manual_seed(5)
    one(x, x).backward()
    torch.manual_seed(5)
    recorded(other, x, x)
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.equal(theirs.grad)
