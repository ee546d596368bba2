"""What the fused kernel of the update must do, against torch's fused kernel and against float64.

test_adam.py runs these tests on a CPU in Triton's interpreter, and tests/gpu/test_loss.py on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.optim import adam, adam_kernel
from megatron.optim.adam import AdamW
from megatron.optim.rule import StepScalars, UpdateSegment
from megatron.train.build import engine as build_engine, model as build_model
from megatron.zero.engine import ZeroEngine
from megatron.zero.layout import ALIGNMENT
from mpu.groups import Groups
from tests.megatron.counting import Launches
from tests.megatron.optim.test_rules import segments_of
from tests.megatron.zero.run import configure_gpt2, master, work
from tests.wires import accelerator_side

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

KINDS = [(torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
         (torch.float32, torch.bfloat16)]
"""Of gradients, and of the narrow weights."""

LENGTHS = [7 * ALIGNMENT, adam_kernel._BLOCK, 2 * adam_kernel._BLOCK + ALIGNMENT]
"""Of the spans: less than a block of the kernel, one exactly, several."""

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
FACTOR, STEP = 0.3, 4

TORCHS = 4 if DEVICE.type == "cpu" else 500
"""Units in the last place by which torch's kernel may be off. On a GPU it takes beta in fp32: 1 - 0.999 is wrong by
2**-25 of 1e-3 at most then, which is 500 units (217 in these, as that arithmetic was done by hand)."""

Flat = dict[str, Tensor | None]


def made(kinds: tuple[torch.dtype, torch.dtype | None], numel: int = sum(LENGTHS)) -> Flat:
    generator = torch.Generator().manual_seed(1)
    grad_kind, narrow_kind = kinds
    flat = {name: torch.randn(numel, generator=generator).to(DEVICE) for name in ("master", "grad", "exp_avg", "new")}
    return {"master": flat["master"], "grad": flat["grad"].to(grad_kind), "exp_avg": flat["exp_avg"] / 10,
            "exp_avg_sq": flat["new"].square() / 100,
            "narrow": None if narrow_kind is None else flat["master"].to(narrow_kind)}


def spans_of(flat: Flat, lengths: Sequence[int] = LENGTHS) -> Iterator[UpdateSegment]:
    return segments_of(flat["master"], flat["grad"], {name: flat[name] for name in AdamW.states}, lengths,
                       flat["narrow"])


def scalars(steps: int = STEP, skip: float | None = None) -> StepScalars:
    at = StepScalars.for_applied_step(FACTOR, steps - 1, DEVICE)
    return StepScalars(at.count, at.divisor, None if skip is None else torch.full((), skip, device=DEVICE))


def run(flat: Flat, at: StepScalars, rule: AdamW = AdamW(), lengths: Sequence[int] = LENGTHS, **hyper: Any) -> Flat:
    with mock.patch.object(adam_kernel, "_beta_constants", _in_fp32):
        assert adam_kernel.update([*spans_of(flat, lengths)], adam_kernel.SegmentTable(), HYPER | hyper, at,
                                  bias_correction=rule.bias_correction, decoupled=rule.decoupled)
    return flat


def _in_fp32(*arguments: Any, of_beta: Any = adam_kernel._beta_constants) -> list[float]:
    """A GPU takes these numbers in fp32, which the interpreter does not show."""
    return torch.tensor(of_beta(*arguments), dtype=torch.float32).tolist()


def exact(flat: Flat, at: StepScalars, rule: AdamW = AdamW(), **hyper: Any) -> tuple[Flat, Flat]:
    """The update in float64, and the size of the terms of each sum: what an error is measured by."""
    w, g, m, v = (flat[name].double() for name in ("master", "grad", "exp_avg", "exp_avg_sq"))
    now: Any = HYPER | hyper
    (beta1, beta2), lr, decay, t = now["betas"], now["lr"], now["weight_decay"], at.count.item()
    g = g / at.divisor.double()
    if not rule.decoupled:
        g = g + decay * w
    first, second = (1 - beta1**t, 1 - beta2**t) if rule.bias_correction else (1, 1)
    new_m, new_v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    step = lr / first * new_m / ((new_v / second).sqrt() + now["eps"])
    size = (beta1 * m).abs() + ((1 - beta1) * g).abs()
    result = {"master": (1 - lr * decay * rule.decoupled) * w - step, "exp_avg": new_m, "exp_avg_sq": new_v}
    return result, {"master": w.abs() + step.abs() * size / new_m.abs(), "exp_avg": size, "exp_avg_sq": new_v}


def ulps(found: Flat, expected: Flat, sizes: Flat, name: str) -> float:
    """The largest error, in units of the last place of the terms."""
    size = sizes[name].float()
    unit = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
    return ((found[name].double() - expected[name].double()).abs() / unit).max().item()


RULES = [AdamW(), AdamW(bias_correction=False), AdamW(decoupled=False)]


@pytest.mark.few(4)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=["AdamW", "no correction", "Adam"])
def test_an_update_is_that_of_float64_and_of_torch_to_a_few_units_in_the_last_place(rule: AdamW, kinds: Any) -> None:
    most = 4 if rule.decoupled else 8  # decay that is added to the gradient may cancel it
    at = scalars()
    expected, sizes = exact(made(kinds), at, rule)
    found, torchs = run(made(kinds), at, rule), made(kinds)
    rule._step_with_torch(rule._large_batches([*spans_of(torchs)]), HYPER, at)
    for name in ("master", *rule.states):
        assert ulps(found, expected, sizes, name) <= most
        assert ulps(found, torchs, sizes, name) <= max(most, TORCHS)


@pytest.mark.few(6)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.99, 0.99999)], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 30, 1000, 10**6])
def test_bias_corrections_are_right_in_the_first_step_and_in_the_last(steps: int, betas: tuple[float, float]) -> None:
    at = scalars(steps)
    expected, sizes = exact(made(KINDS[0]), at, betas=betas, lr=1.0)
    found = run(made(KINDS[0]), at, betas=betas, lr=1.0)
    # With a rate of 1 the step is as large as the weights, and all its roundings show: six in turn.
    assert ulps(found, expected, sizes, "master") <= 6


@pytest.mark.parametrize("kinds", KINDS[1:], ids=str)
def test_the_narrow_weights_are_the_masters_rounded(kinds: Any) -> None:
    found = run(made(kinds), scalars())
    expected = found["master"].to(kinds[1])
    if DEVICE.type == "cuda" or kinds[1] == torch.float16:
        assert torch.equal(found["narrow"], expected)
    else:  # Triton's interpreter cuts bf16 numbers off
        torch.testing.assert_close(found["narrow"], expected, rtol=2.0**-7, atol=0)
    assert not torch.equal(found["narrow"], made(kinds)["narrow"])


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_step_that_is_not_taken_changes_no_bit(kinds: Any) -> None:
    flat = made(kinds)
    flat["grad"][::3] = torch.nan
    if kinds[1] is not None:
        flat["narrow"].fill_(7)
    before = {name: None if value is None else value.clone() for name, value in flat.items()}
    run(flat, scalars(skip=1.0))
    for name, value in flat.items():
        assert value is None or torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
    taken, sure = run(made(kinds), scalars(skip=0.0)), run(made(kinds), scalars())
    assert all(value is None or torch.equal(value, taken[name]) for name, value in sure.items())


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_cuts_change_no_bit_and_nothing_between_the_spans_is_touched(kinds: Any) -> None:
    whole, cut = run(made(kinds), scalars(), lengths=[sum(LENGTHS)]), run(made(kinds), scalars())
    part = run(made(kinds), scalars(), lengths=LENGTHS[:2])
    edge, untouched = sum(LENGTHS[:2]), made(kinds)
    for name, value in whole.items():
        if value is not None:
            assert torch.equal(value, cut[name])
            assert torch.equal(part[name][:edge], value[:edge]) and torch.equal(part[name][edge:],
                                                                                untouched[name][edge:])


def test_tables_are_kept_until_a_gradient_has_moved() -> None:
    flat, places = made(KINDS[1]), adam_kernel.SegmentTable()
    moved = flat | {"grad": flat["grad"].clone()}
    tables = [places.refresh([*spans_of(now)]) and (places.rows, places.row_of_block) for now in (flat, flat, moved)]
    assert tables[1][0] is tables[0][0] and tables[2][0] is not tables[0][0]
    assert all(row_of is tables[0][1] for _, row_of in tables), "which block is whose stays"
    assert places.refresh([*spans_of(flat, LENGTHS[:2])]) and (len(places.rows), len(places.row_of_block)) == (2, 2)


@pytest.mark.parametrize("case", ["an odd address", "an odd length", "two kinds of gradients"])
def test_what_the_kernel_cannot_read_it_leaves_to_torch(case: str) -> None:
    flat = made(KINDS[0])
    odd = {name: None if value is None else value[1:] for name, value in flat.items()}
    spans = [*spans_of(*{"an odd address": (odd, [16]), "an odd length": (flat, [24])}.get(case, (flat, [16])))]
    if case == "two kinds of gradients":
        spans += spans_of(made(KINDS[1]), [16])
    before = [span.master.clone() for span in spans]
    assert not adam_kernel.update(
        spans, adam_kernel.SegmentTable(), HYPER, scalars(), bias_correction=True, decoupled=True)
    assert all(torch.equal(span.master, old) for span, old in zip(spans, before, strict=True))


# ---- in the engine -----------------------------------------------------------------------------------------------


PRECISIONS = {"fp32": {}, "fp16": {"fp16": True, "loss_scale": 128.0}, "bf16": {"bf16": True}}
"""With a loss scale that stays, so that the host learns of a step later. (The engine compares weights with masters, and
the interpreter rounds those of bf16 its own way.)"""

FOR_ENGINES = [name for name in PRECISIONS if DEVICE.type == "cuda" or name != "bf16"]


def engine_of(precision: str, stage: int) -> ZeroEngine:
    config = configure_gpt2(zero_stage=stage, compile=False, lr=1e-3, lr_warmup_iters=0, **PRECISIONS[precision])
    return build_engine(config, build_model(config, Groups()), Groups(), DEVICE).core


def step_of(engine: ZeroEngine) -> Launches:
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    engine.backward(engine(tokens, tokens.clone(), grad_scale=engine.backward_scale))
    with Launches() as counted:
        engine.step()
    return counted


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", FOR_ENGINES)
def test_an_engine_steps_by_the_kernel_alone(precision: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerator_side():
        ours = engine_of(precision, stage)
        with monkeypatch.context() as without:
            without.setattr(adam, "load_kernels", lambda *which: None)
            torchs = engine_of(precision, stage)
        for _ in range(3):
            counted = step_of(ours)
            assert not counted.kernels["_fused_adamw_"] and not counted.kernels["_foreach_copy_"]
            assert step_of(torchs).kernels["_fused_adamw_"] == 2
        assert counted.waits <= 1  # in the third step: before, weights are compared with masters
    for one, other in zip(ours.buckets, torchs.buckets, strict=True):
        # A weight that is rounded to 16 bits the other way changes small gradients by a good part, and Adam divides by
        # their size: a tenth of one step of 1e-3. In fp32 on a GPU sums of the backward come in any order: a hundredth.
        in_fp32 = 1e-6 if DEVICE.type == "cpu" else 1e-5
        torch.testing.assert_close(master(one), master(other), rtol=0, atol=in_fp32 if precision == "fp32" else 1e-4)
        assert torch.equal(work(one), master(one).to(work(one).dtype))
