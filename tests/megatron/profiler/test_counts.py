"""What is counted of a model is what it runs: equal to the closed form, the same however the model is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from megatron import recompute
from megatron.model import GPT2, count_parameters
from megatron.profiler.flop_recorder import FlopRecording
from megatron.profiler.profile import Macs, ModelProfile, build_profile
from mpu import groups as mpu_groups
from tests.distributed import run_ranks
from tests.megatron.helpers import engine_of, tiny_model
from tests.megatron.profiler.models import gpt2, on_meta, preset, recorded, row, step_macs, table, tokens


@pytest.mark.parametrize(("name", "chunk"), [("tiny", 4), ("small", 1), ("124M", 4), ("345M", None)])
def test_the_total_of_each_preset_is_the_closed_form(name: str, chunk: int | None) -> None:
    """On the meta device attention is written out in products. 4 does not divide the layers of `tiny`."""
    config = preset(name)
    model = on_meta(config)
    if chunk is not None:
        model.run_blocks = recompute.in_chunks(chunk)
    x = tokens(model)
    found = recorded(model, x, x)
    assert found.macs == step_macs(config, 2, config.max_position_embeddings, causal=False, chunk=chunk)
    assert found.root.parameters == count_parameters(config)[0]
    assert found.outside_modules == Macs()


@pytest.mark.parametrize(("chunk", "dropout"), [
    (None, {}), (1, {"hidden_dropout": 0.1}), (2, {"attention_dropout": 0.1}), (2, {})], ids=str)
def test_a_causal_kernel_is_counted_for_the_scores_that_it_forms(chunk: int | None, dropout: dict[str, float]) -> None:
    """Dropout of attention has no such kernel: it is written out in products."""
    model = gpt2(num_layers=3, **dropout)
    if chunk is not None:
        model.run_blocks = recompute.in_chunks(chunk)
    x = tokens(model)
    assert recorded(model, x, x).macs == step_macs(model.config, 2, 16, causal="attention_dropout" not in dropout,
                                                   chunk=chunk)


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
    model = nn.Sequential(linear(3, 5), linear(5, 7), nn.Sequential(linear(7, 11)), linear(11, 2))
    found = recorded(model, torch.zeros(1, 3, requires_grad=True))
    assert [row(found, path).macs for path in ("0", "1", "2", "2.0", "3")] == [
        Macs(size, 2 * size) for size in (15, 35, 77, 77, 22)]


class Product(torch.autograd.Function):
    """Of a user's own; its backward makes one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.saved_tensors[0].T, None


def counted(model: nn.Module, run: Callable[[], Any]) -> ModelProfile:
    recording = FlopRecording(model)
    with recording.record():
        run()
    return build_profile(recording)


# ---- inside or outside of modules, backward or recomputation ----------------------------------------------------


def linear(rows: int = 8, columns: int = 8) -> nn.Linear:
    return nn.Linear(rows, columns, bias=False)


class Module(nn.Module):
    """What a function does, with the modules that it calls."""

    def __init__(self, run: Callable[[Tensor], Tensor], *inner: nn.Module) -> None:
        super().__init__()
        self.run, self.inner = run, nn.ModuleList(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def checkpointed(function: Callable[[Tensor], Tensor], reentrant: bool = False) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=reentrant)  # type: ignore


def backward(model: nn.Module, **asked: bool) -> Callable[[Tensor], object]:
    return lambda x: model(x).sum().backward(**asked)


WEIGHT = torch.ones(8, 8, requires_grad=True)
A = linear()
TWO = nn.Sequential(linear(), linear())
OWN = Module(lambda x: Product.apply(F.linear(x, WEIGHT), WEIGHT))  # type: ignore[no-untyped-call]
AGAIN = Module(lambda x: Product.apply(x, WEIGHT).sin())  # type: ignore[no-untyped-call]
MLP = nn.Sequential(linear(), nn.GELU())


CASES: dict[str, tuple[nn.Module, Callable[[Tensor], object], Macs, Macs]] = {
    # of 4 x 8 @ 8 x 8, which is 256: model, what runs, counts of the model, counts outside of modules
    "a product behind the model": (A, lambda x: (A(x) @ WEIGHT).sum().backward(), Macs(256, 256), Macs(256, 512)),
    "a user's own function": (OWN, backward(OWN), Macs(512, 512), Macs()),
    "a backward to be differentiated": (TWO, backward(TWO, create_graph=True), Macs(512, 768), Macs()),
    "the gradient of a function": (TWO, lambda x: torch.func.grad(lambda w: (x @ w).sum())(WEIGHT.detach()), Macs(),
                                   Macs(256, 256)),
    **{f"a checkpoint without modules{reentrant, asked}": (
        TWO, lambda x, reentrant=reentrant, asked=asked: checkpointed(lambda x: (x @ WEIGHT).sin(), reentrant)(
            x.requires_grad_()).sum().backward(**asked), Macs(), Macs(256, 512, 256))
       for reentrant, asked in ((False, {"retain_graph": True}), (True, {}), (False, {"create_graph": True}))},
    "a user's own function, again": (AGAIN, lambda x: checkpointed(AGAIN)(x.requires_grad_()).sum().backward(),
                                     Macs(256, 256, 256), Macs()),
    **{f"a checkpoint of torch's, reentrant {reentrant}": (
        MLP, lambda x, reentrant=reentrant: checkpointed(MLP, reentrant)(x.requires_grad_()).sum().backward(),
        Macs(256, 512, 256), Macs()) for reentrant in (False, True)}}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_forward_backward_and_recomputation_are_told_apart_inside_and_outside_of_modules(name: str) -> None:
    model, run, inside, outside = CASES[name]
    found = counted(model, lambda: run(torch.ones(4, 8)))
    assert (found.root.macs, found.outside_modules) == (inside, outside) and not found.backward_is_estimated


# ---- the same table ----------------------------------------------------------------------------------------------


def test_two_profiles_in_a_row_are_equal_and_add_up_where_asked() -> None:
    model = gpt2()
    x = tokens(model)
    assert table(recorded(model, x, x)) == (first := table(recorded(model, x, x)))
    twice = recorded(model, x, x, times=2)
    assert [(macs, calls) for *_, macs, calls in table(twice)] == [
        (macs.times(2), 2 * calls) for *_, macs, calls in first]


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


def profiled(tp: int, stage: int) -> ModelProfile:
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


def at_every_layout(rank: int, world: int) -> list[ModelProfile]:
    return [profiled(1, 0), profiled(1, 2), profiled(1, 3), profiled(2, 0)]


def test_the_stages_have_the_same_table_and_tensor_parallel_ranks_their_share_of_it() -> None:
    model = gpt2(vocab_size=256)
    whole = recorded(model, tokens(model), tokens(model))
    for *stages, found in run_ranks(at_every_layout, 2):
        assert [table(stage) for stage in stages] == 3 * [table(whole)]
        assert [line[:2] for line in table(found)] == [line[:2] for line in table(whole)]
        for path in ("blocks.0.attn", "blocks.1.mlp.fc", "blocks"):
            assert row(found, path).macs == row(whole, path).macs
            assert row(found, path).macs_on_rank.times(2) == row(whole, path).macs
            assert row(found, path).parameters == row(whole, path).parameters
        assert row(found, "wte").parameters_on_rank * 2 == row(found, "wte").parameters == 256 * 32
        assert row(found, "ln_f").parameters_on_rank == row(found, "ln_f").parameters
        assert found.root.parameters == whole.root.parameters == count_parameters(tiny_model(vocab_size=256))[0]


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


# ---- single operations ---------------------------------------------------------------------------------------------

def macs(run: Callable[[], Any]) -> int:
    with (counting := FlopRecording(nn.Module())):
        run()
    return sum(counting.macs.values())


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


MATRIX, B, X = zeros(3, 5), zeros(5, 7), zeros(2, 3, 5)


PRODUCTS: list[tuple[Callable[[], Any], int]] = [
    (lambda: MATRIX @ B, 3 * 5 * 7),
    (lambda: torch.mm(MATRIX, B, out=zeros(3, 7)), 3 * 5 * 7),
    (lambda: zeros(3, 7).addmm_(MATRIX, B), 3 * 5 * 7),
    (lambda: torch.addmm(zeros(7), MATRIX, B), 3 * 5 * 7),
    (lambda: X @ B, 2 * 3 * 5 * 7),
    (lambda: torch.bmm(X, zeros(2, 5, 7)), 2 * 3 * 5 * 7),
    (lambda: torch.baddbmm(zeros(2, 3, 7), X, zeros(2, 5, 7)), 2 * 3 * 5 * 7),
    (lambda: torch.einsum("bik,kj->bij", X, B), 2 * 3 * 5 * 7),
    (lambda: MATRIX @ zeros(5), 3 * 5),
    (lambda: torch.addmv(zeros(3), MATRIX, zeros(5)), 3 * 5),
    (lambda: zeros(5) @ zeros(5), 5),
    (lambda: F.linear(X, zeros(7, 5), zeros(7)), 2 * 3 * 5 * 7),
    (lambda: torch._int_mm(torch.zeros(32, 16, dtype=torch.int8), torch.zeros(16, 8, dtype=torch.int8)), 32 * 16 * 8),
    (lambda: torch.cdist(zeros(30, 5), zeros(26, 5)), 30 * 26 * (5 + 2)),
    (lambda: F.gelu(F.layer_norm(X, (5,))) + X.softmax(-1) * 2, 0),
    (lambda: F.embedding(torch.zeros(4, dtype=torch.long), B), 0)]


def test_products_are_counted_by_whatever_name_they_are_called() -> None:
    for number, (run, expected) in enumerate(PRODUCTS):
        assert macs(run) == expected, number


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_what_needs_no_gradients_is_counted_alike(grad: Callable[[], Any]) -> None:
    query = zeros(2, 4, 6, 8)
    with grad():
        assert macs(lambda: F.linear(X, zeros(7, 5))) == 2 * 3 * 5 * 7
        assert macs(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True)) == 2 * 4 * 21 * 16


@pytest.mark.parametrize("rows, columns, causal", [(1, 1, True), (6, 6, False), (4, 9, True), (9, 4, True)])
def test_attention_is_the_products_of_the_scores_that_it_forms(rows: int, columns: int, causal: bool) -> None:
    heads, width = 3, 8
    query = torch.zeros(2, heads, rows, width, requires_grad=True)
    key, value = (torch.zeros(2, heads, columns, width, requires_grad=True) for _ in range(2))
    pairs = sum(not causal or j <= i for i in range(rows) for j in range(columns))
    made: list[Tensor] = []
    forward = macs(lambda: made.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal)))
    assert forward == 2 * heads * pairs * 2 * width
    assert macs(lambda: made[0].sum().backward()) == 2 * heads * pairs * 5 * width


@pytest.mark.parametrize("layer, groups", [(F.conv1d, 1), (F.conv2d, 2), (F.conv_transpose2d, 2)])
def test_convolutions_apply_a_filter_at_each_point(layer: Callable[..., Tensor], groups: int) -> None:
    """A bias of a filter's own at each point is not counted; backward is one such product by the image and one by the
    weight, and without a gradient of the image only the latter."""
    one = layer is F.conv1d
    image = torch.zeros(2, 4, 9, *() if one else (7,), requires_grad=True)
    transposed = layer is F.conv_transpose2d
    shape = (4, 6 // groups) if transposed else (6, 4 // groups)
    weight = torch.zeros(*shape, 3, *() if one else (3,), requires_grad=True)
    made: list[Tensor] = []
    forward = macs(lambda: made.append(layer(image, weight, stride=2, padding=1, groups=groups)))
    points = (image if transposed else made[0])[0, 0].numel()
    assert forward == 2 * points * 4 * 6 // groups * weight[0, 0].numel()
    assert macs(lambda: made[0].sum().backward()) == 2 * forward
    fixed = image.detach()
    loss = layer(fixed, weight, stride=2, padding=1, groups=groups).sum()
    assert macs(loss.backward) == forward


def test_torch_counts_the_same_where_it_counts() -> None:
    """Its counter takes causal attention for full, and passes over products in place and of vectors."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.zeros(2, 6, 16, requires_grad=True)
    ours = macs(lambda: layer(x).sum().backward())
    with FlopCounterMode(display=False) as theirs, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        layer(x).sum().backward()
    attention = 2 * 6 * 6 * 16  # one product; a kernel's backward makes the scores again
    assert 2 * (ours - attention) == theirs.get_total_flops()


@torch.library.custom_op("profiler_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


def test_operations_of_others_are_counted_by_their_formula_and_told_without_one() -> None:
    with (counting := FlopRecording(nn.Module())):
        thrice(MATRIX)
        thrice(MATRIX)
    assert dict(counting.uncounted_ops) == {"profiler_tests.thrice.default": 2}

    @torch.library.custom_op("profiler_tests::known", mutates_args=())
    def known(x: Tensor) -> Tensor:
        return x * 4

    register_flop_formula(torch.ops.profiler_tests.known)(lambda shape, out_shape=None: 2 * shape[0] * shape[1] * 10)
    try:
        assert macs(lambda: known(MATRIX)) == 150
    finally:
        del flop_registry[torch.ops.profiler_tests.known]
