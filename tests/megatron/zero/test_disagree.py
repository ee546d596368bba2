"""Ranks that begin alike and differ later: other arguments, other hyper-parameters, other sums of losses, calls of one
rank alone. Each is refused on all ranks by what differs, its values and their ranks, and no weight has changed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron import zero
from megatron.checkpoint.convert.importers import open_huggingface
from megatron.checkpoint.reader import open_checkpoint
from megatron.errors import ConfigError
from megatron.inference import load
from megatron.distributed import step_consistency
from megatron.zero.api.checkpoint_io import LoadOptions, load_external_weights
from megatron.zero.api.engine import Engine
from megatron.zero.utils import (safe_get_full_fp32_param, safe_get_local_fp32_param, safe_set_full_fp32_param,
                                 safe_set_full_grad, safe_set_local_fp32_param, safe_set_local_grad)
from mpu.groups import build
from tests.distributed import on_ranks
from tests.megatron.inference.gpt2s import theirs as hugging_face
from tests.megatron.zero.models import WIDTH
from tests.megatron.zero.run import configure_gpt2, gpt2_engine
from tests.megatron.zero import small
from tests.megatron.zero.small import Model, backward, rows, train, whole
from tests.megatron.zero.test_watch import (ALL, SAME, ends_of, engine_of as watched_engine, one_error,
                                            rows as watched_rows, train as train_watched)
from tests.wires import accelerator_side


def engine_of(stage: int, accumulation: int = 1, lr: Any = 0.1) -> Engine:
    model = Model()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "weight_decay": 0.5}]
    return small.engine_of(stage, model, accumulation, given={"optimizer": torch.optim.AdamW(groups, lr=lr)},
                           stage3_gather_16bit_weights_on_model_save=True)


def said(action: Callable[[], Any]) -> str:
    """What the engine refuses with; nothing where it does not."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


# ---- hyper-parameters ----------------------------------------------------------------------------------------------


def group(engine: Engine, number: int) -> dict[str, Any]:
    found: dict[str, Any] = engine.optimizer.param_groups[number]
    return found


CHANGES: dict[str, tuple[Callable[[Engine], object], str]] = {
    "a rate": (lambda e: group(e, 0).update(lr=0.25), "lr of param group 0 is 0.1 on {others}, 0.25 on {last}"),
    "a decay": (lambda e: group(e, 1).update(weight_decay=0.125),
                "weight_decay of param group 1 is 0.5 on {others}, 0.125 on {last}"),
    "betas": (lambda e: group(e, 1).update(betas=(0.5, 0.75)),
              "betas of param group 1 is [0.9, 0.999] on {others}, [0.5, 0.75] on {last}"),
    "in place": (lambda e: group(e, 0)["betas"].__setitem__(0, 0.5),
                 "betas of param group 0 is [0.9, 0.999] on {others}, [0.5, 0.999] on {last}"),
    "a scheduler": (lambda e: torch.optim.lr_scheduler.ExponentialLR(e.optimizer, 0.5).step(),
                    "lr of param group 1 is 0.1 on {others}, 0.05 on {last}"),
    "a key": (lambda e: group(e, 0).update(scale=2),
              "scale of param group 0 is not there on {others}, 2.0 on {last}")}


STEPS = [("a rate", 0, False), ("a decay", 1, False), ("betas", 3, False), ("in place", 0, False),
         ("a scheduler", 3, False), ("a key", 1, True), ("a rate", 3, True)]


@pytest.mark.parametrize("what, stage, side", STEPS)
@on_ranks(3)
def test_a_step_with_another_hyper_parameter_on_one_rank_changes_no_weight(rank: int, world: int, what: str, stage: int,
                                                                           side: bool) -> None:
    with accelerator_side(side):
        engine = engine_of(stage)
        param_groups = engine.optimizer.param_groups
        for group in param_groups if what == "in place" else ():
            group["betas"] = [0.9, 0.999]
        train(engine, 0, 1, rank=rank)
        engine.finish_step()
        kept = [{**group, "betas": type(group["betas"])(group["betas"])} for group in param_groups]

        def restore() -> None:
            for group, old in zip(param_groups, kept, strict=True):
                group.clear()
                group.update(old)

        before, (change, told) = whole(engine), CHANGES[what]
        if rank == 2:
            change(engine)
        backward(engine, 2, rank=rank)
        with pytest.raises(ConfigError, match=re.escape(told.format(others="ranks 0-1", last="rank 2"))) as caught:
            engine.step()
            restore()  # after the step, before the host knows of it
            engine.finish_step()
        assert what == "a scheduler" or str(caught.value).count(" of param group ") == 1
        assert torch.equal(whole(engine), before)
        restore()
        if side:  # the gradients of a step that was given are spent
            backward(engine, 2, rank=rank)
        report = engine.step()
        assert report is not None and report.applied and not torch.equal(whole(engine), before)


# ---- sums of losses ------------------------------------------------------------------------------------------------


def boundary_by_hand(engine: Engine, rank: int) -> None:
    """Rank 1 has a micro-batch less."""
    for number in range(2 - rank):
        engine.set_gradient_accumulation_boundary(number == 1 - rank)
        train(engine, number, rank=rank)


def undivided(engine: Engine, rank: int) -> None:
    for number in range(2):
        engine.backward(engine(rows(rank, number)), scale_wrt_gas=rank == 0)
        engine.step()


def forgets(engine: Engine, rank: int) -> None:
    train(engine, 0, rank=rank)
    if rank == 1:
        engine.zero_grad()
    train(engine, 1, rank=rank)


def one_backward_more(engine: Engine, rank: int) -> None:
    with engine.no_sync():
        backward(engine, *range(1 + rank), rank=rank)
    engine.set_gradient_accumulation_boundary(True)
    train(engine, 2, rank=rank)


SUMS = {"a boundary by hand": (boundary_by_hand, "2 x 1/2 on rank 0, 1 x 1/2 on rank 1"),
        "undivided": (undivided, "2 x 1/2 on rank 0, 2 x 1/1 on rank 1"),
        "forgotten": (forgets, "2 x 1/2 on rank 0, 1 x 1/2 on rank 1"),
        "a backward more": (one_backward_more, "2 x 1/2 on rank 0, 3 x 1/2 on rank 1")}


@on_ranks(2)
def test_a_step_of_another_sum_of_losses_on_one_rank_changes_no_weight(rank: int, world: int) -> None:
    for stage, (sums, told) in zip((0, 3, 1, 1), SUMS.values(), strict=True):
        engine = engine_of(stage, 2)
        train(engine, 0, 1, rank=rank)
        before = whole(engine)
        with pytest.raises(ConfigError, match=f"the step's sum of losses is {told}"):
            sums(engine, rank)
        assert torch.equal(whole(engine), before)


# ---- extra scalars --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage, side", [(0, False), (1, True)])
@on_ranks(2)
def test_other_extra_scalars_on_one_rank_add_nothing_or_are_refused(rank: int, world: int, stage: int,
                                                                    side: bool) -> None:
    with accelerator_side(side):
        engine = engine_of(stage)
        for given, summed in (([[1.0, 2.0], []], [(1.0, 2.0), ()]), ([[], [3.0]], [(), (3.0,)]),
                              ([8 * [1.0], [torch.tensor(2.0), 4]], [(3.0, 5.0, *(6 * [1.0])), (3.0, 5.0)])):
            backward(engine, 0, rank=rank)
            report = engine.step(extra_scalars=given[rank])
            assert report is not None and report.applied and report.extra_scalars == summed[rank]
        before = whole(engine)
        for wrong, told in ((9 * [1.0], r"has 9 numbers: give at most 8 \(so on rank 1, not on all\)"),
                            ([torch.ones(2)], r"a tensor of shape \[2\]: give numbers")):
            backward(engine, 1, rank=rank)
            with pytest.raises(ConfigError, match=told):
                engine.step(extra_scalars=wrong if rank == 1 else [1.0])
                engine.finish_step()
            assert torch.equal(whole(engine), before)


# ---- arguments -----------------------------------------------------------------------------------------------------


Call = Callable[[Engine, int, Path], Any]
CALLS: dict[str, tuple[Call, str]] = {
    "load: tag": (lambda e, r, f: e.load_checkpoint(f, tag=None if r else "a"), "tag is a on rank 0, null on rank 1"),
    "restore": (lambda e, r, f: e.restore(open_checkpoint(f, "a", world=e.groups.world), LoadOptions(rng=r == 0)),
                "rng is true on rank 0, false on rank 1"),
    "save: tag": (lambda e, r, f: e.save_checkpoint(f, tag=r), "tag is 0 on rank 0, 1 on rank 1"),
    "save: client": (lambda e, r, f: e.save_checkpoint(f, tag="b", client_state={"module": 1} if r else {}),
                     "client_state: module is the engine's own"),
    "16bit: name": (lambda e, r, f: e.save_16bit_model(f, f"w{r}.bin"), "save_filename is w0.bin on rank 0, w1.bin"),
    "offload": (lambda e, r, f: e.offload_states(["optim_states"] if r else None), "include is "),
    "offload: wrong": (lambda e, r, f: e.offload_states(["none"] if r else None), "unknown state 'none'"),
}
SWITCHES = {
    "load_checkpoint": ("load_module_only", "load_optimizer_states", "load_lr_scheduler_states", "load_module_strict"),
    "save_checkpoint": ("in_background", "save_latest", "exclude_frozen_parameters", "save_optimizer_states"),
    "save_16bit_model": ("exclude_frozen_parameters",), "load_module_state_dict": ("strict",),
    "module_state_dict": ("exclude_frozen_parameters",)}
"""Method -> arguments that are true on rank 0 and false on rank 1."""


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_call_with_another_argument_on_one_rank_is_refused_and_changes_nothing(rank: int, world: int, stage: int,
                                                                                 tmp_path: Path) -> None:
    engine = engine_of(stage)
    train(engine, 0, rank=rank)
    engine.save_checkpoint(tmp_path, tag="a")
    before, files, sizes = whole(engine), sorted(tmp_path.rglob("*")), engine.get_batch_info()
    for what, (call, told) in CALLS.items():
        assert told in said(lambda: call(engine, rank, tmp_path)), what
    first: dict[str, list[Any]] = {"load_module_state_dict": [{}], "module_state_dict": []}
    for method in SWITCHES if stage == 3 else [*SWITCHES][:-1]:  # the last gathers at stage 3
        for switch in SWITCHES[method]:
            told = said(lambda: getattr(engine, method)(*first.get(method, [tmp_path]), **{switch: rank == 0}))
            assert f"{switch} is true on rank 0, false on rank 1" in told, method
    assert sorted(tmp_path.rglob("*")) == files and torch.equal(whole(engine), before)
    assert engine.get_batch_info() == sizes
    train(engine, 0, rank=rank)
    assert engine.load_checkpoint(tmp_path)[0] is not None
    engine.destroy()


# ---- batch sizes, which no call compares ---------------------------------------------------------------------------


SIZES: list[tuple[Callable[[Engine, int], None], str]] = [
    (lambda e, r: e.set_train_batch_size(8) if r else None, "gradient_accumulation_steps is 1 on rank 0, 2 on rank 1"),
    (lambda e, r: e.set_train_micro_batch_size(1 + r), "train_micro_batch_size_per_gpu is 1 on rank 0, 2 on rank 1")]


@on_ranks(2)
def test_a_batch_size_that_one_rank_sets_is_refused_by_its_next_step(rank: int, world: int) -> None:
    for stage, (change, told) in zip((1, 3), SIZES, strict=True):
        engine = engine_of(stage)
        train(engine, 0, rank=rank)
        before = whole(engine)
        change(engine, rank)
        with pytest.raises(ConfigError, match=told):
            train(engine, *range(engine.gradient_accumulation_steps()), rank=rank)
        assert torch.equal(whole(engine), before)
    engine.zero_grad()
    engine.set_train_micro_batch_size(2)
    train(engine, 0, rank=rank)
    assert not torch.equal(whole(engine), before)


def accumulates_alone(engine: Engine, rank: int) -> None:
    if rank == 1:
        engine.set_train_batch_size(2 * engine.train_batch_size())
    for _ in range(4):
        engine.backward(engine(watched_rows(), (0, 1, 2, 3)))
        engine.step()


def test_where_a_step_of_more_micro_batches_exchanges_otherwise_the_number_is_named() -> None:
    error = one_error(ends_of(accumulates_alone, 2, SAME, 3, False, stage3_max_reuse_distance=0))
    assert "gradient_accumulation_steps 1 on rank 0, gradient_accumulation_steps 2 on rank 1" in error


# ---- the text of a step's settings ---------------------------------------------------------------------------------


def settings_of(value: Any) -> dict[str, str]:
    return step_consistency.make_step_settings(3, {"1/2": 2}, 2, None, [{"params": [], "lr": 0.1, "x": value}])


def test_digests_have_as_many_bits_as_their_sums_are_exact_with() -> None:
    assert [step_consistency.digest_bits(ranks) for ranks in (2, 3, 1000)] == [25, 24, 16]
    for ranks in (2, 3, 8, 1000, 1024, 16384):
        assert (ranks * ((1 << step_consistency.digest_bits(ranks)) - 1)) ** 2 <= 2**53


ALIKE: list[tuple[Any, Any, bool]] = [
    (1, 1.0, True), ((1, 2), [1, 2], True), (0.0, -0.0, True), (0, -0.0, True), ({0.5, 0.9}, {0.9, 0.5}, True),
    (torch.tensor(0.5), 0.5, True), ({0.5, 0.99}, {0.9, 0.99}, False), (1, 1.5, False), (2**53 + 1, 2**53, False),
    ("0.1", 0.1, False), (None, float("nan"), False), (True, 1, False)]


def test_values_are_compared_as_what_they_are() -> None:
    for one, other, equal in ALIKE:
        texts = settings_of(one), settings_of(other)
        assert (texts[0] == texts[1]) is equal, (one, other)
        one, other = (step_consistency.settings_digest(text, 7, 2) for text in texts)
        assert (one == other) is equal


@on_ranks(3)
def test_what_only_another_rank_gives_as_client_state_is_told(rank: int, world: int, tmp_path: Path) -> None:
    """Values of another rank are its own affair; keys that rank 0 does not have are told, by rank 0."""
    engine, told = engine_of(1), io.StringIO()
    with redirect_stderr(told):
        engine.save_checkpoint(tmp_path, "a", {"loss": float(rank), "epoch": 3})
        engine.save_checkpoint(tmp_path, "b", {"epoch": 3} if rank == 0 else None)
        assert told.getvalue() == ""
        engine.save_checkpoint(tmp_path, "c", {"epoch": 3, f"seen by {rank}": rank})
    assert engine.load_checkpoint(tmp_path, "c")[1] == {"epoch": 3, "seen by 0": 0}
    assert told.getvalue() == (
        "" if rank else "warning: client_state: 'seen by 1' (given on rank 1), 'seen by 2' (given on rank 2) is not "
        "saved: a checkpoint holds that of rank 0; give it there\n")


# ---- copies of a folder --------------------------------------------------------------------------------------------


COPIES: list[tuple[int, Callable[[Any], object], str]] = [
    (3, lambda model: model.h[1].mlp.c_fc.weight.data.mul_(2), "blocks.1.mlp.fc.weight is "),
    (0, lambda model: model.h[0].attn.c_attn.bias.data[47:].add_(1), "blocks.0.attn.qkv.bias is "),
    (1, lambda model: None, "")]
"""(stage, what is changed in the copy of rank 1, what is told of it)"""


@on_ranks(2)
def _refuse_copies(rank: int, world: int, folders: list[list[str]]) -> None:
    grid = build(1)
    for (stage, _, told), of_ranks in zip(COPIES, folders, strict=True):
        core = gpt2_engine(configure_gpt2(hidden_size=16, num_attention_heads=2, vocab_size=64,
                                          max_position_embeddings=8, zero_stage=stage), grid)
        before = [bucket.device_param_shard.clone() for bucket in core.buckets]
        for error in (said(lambda: load.open_hf_folder(of_ranks[rank], grid)),
                      said(lambda: load_external_weights(core, open_huggingface(Path(of_ranks[rank]))))):
            assert all(words in error for words in (told, "on rank 0, ", "on rank 1")) if told else error == "", error
        is_same = all(map(torch.equal, before, [bucket.device_param_shard for bucket in core.buckets]))
        assert is_same == bool(told)


def test_copies_of_a_folder_that_differ_are_not_used(tmp_path: Path) -> None:
    folders = [[str(tmp_path / f"{number} of rank {rank}") for rank in range(2)] for number in range(len(COPIES))]
    for of_ranks, (_, change, _) in zip(folders, COPIES, strict=True):
        for rank, folder in enumerate(of_ranks):
            model = hugging_face(n_embd=16, n_head=2, n_layer=2, vocab_size=64, n_positions=8)
            if rank == 1:
                change(model.transformer)
            model.save_pretrained(folder)
    _refuse_copies(folders=folders)


# ---- what one rank calls alone, or with another value ----------------------------------------------------------------


NAME = "blocks.1.wide.weight"


def weight_of(engine: Engine) -> torch.nn.Parameter:
    found: torch.nn.Parameter = engine.module.get_parameter(NAME)
    return found


def gathers(engine: Engine) -> float:
    with zero.GatheredParameters([weight_of(engine)]):
        return float(weight_of(engine).sum())


ALONE: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "masters": (lambda engine: safe_get_full_fp32_param(weight_of(engine)), f"reading the weight of {NAME}"),
    "set weights": (lambda engine: safe_set_full_fp32_param(weight_of(engine), torch.ones(16, WIDTH)),
                    f"setting the weight of {NAME}"),
    "a loan": (gathers, f"GatheredParameters of parameter '{NAME}'"),
    "load weights": (lambda engine: engine.load_module_state_dict({}), "a load"),
    "weights": (lambda engine: engine.module_state_dict(), "a save"),
}


def alone(what: str, engine: Engine, rank: int) -> None:
    train_watched(engine)
    engine.backward(engine(watched_rows(), ALL))
    if rank == 1:
        pytest.fail(f"{what}: {ALONE[what][0](engine)}")
    for _ in range(3):
        engine.step()
        engine.backward(engine(watched_rows(), ALL))


@pytest.mark.parametrize("what, stage, side", [
    ("set weights", 0, False), ("a loan", 2, False), ("masters", 3, True), ("load weights", 0, False),
    ("weights", 3, False)])
def test_what_one_rank_calls_alone(what: str, stage: int, side: bool) -> None:
    section: dict[str, Any] = {"stage3_gather_16bit_weights_on_model_save": True} if what == "weights" else {}
    error = one_error(ends_of(partial(alone, what), 2, SAME, stage, side, **section))
    assert "rank 0 is at a step" in error and f"rank 1 is at {ALONE[what][1]}" in error


# ---- another value -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_values_that_differ_are_refused_where_ranks_hold_the_same(rank: int, world: int, stage: int) -> None:
    engine = watched_engine(SAME, stage)
    weight = weight_of(engine)
    run = safe_get_local_fp32_param(weight)
    assert run is not None
    engine.backward(engine(watched_rows(), ALL))
    whole = (16, WIDTH)
    for setter, size, kind in ((safe_set_full_fp32_param, whole, "weight"), (safe_set_full_grad, whole, "gradient"),
                               (safe_set_local_grad, run.shape, "gradient"),
                               (safe_set_local_fp32_param, run.shape, "weight")):
        told = f"the {kind} given for {NAME} is not the same on all data parallel ranks"
        is_own = stage == 1 and size == run.shape
        with nullcontext() if is_own else pytest.raises(ConfigError, match=told):
            setter(weight, torch.full(size, float(rank)))
    engine.step()
    engine.destroy()


# ---- between a forward and its backward ----------------------------------------------------------------------------


def edits(engine: Engine) -> None:
    with zero.GatheredParameters([weight_of(engine)], modifier_rank=0):
        weight_of(engine).mul_(2)


NEW_WEIGHTS: dict[str, Callable[[Engine, str], Any]] = {
    "a step": lambda engine, folder: train_watched(engine),
    "a setter": lambda engine, folder: safe_set_full_fp32_param(weight_of(engine), torch.ones(16, WIDTH)),
    "a loan": lambda engine, folder: edits(engine),
    "a state dict": lambda engine, folder: engine.load_module_state_dict(
        {name: torch.ones_like(value) for name, value in watched_engine(SAME, 0).module.state_dict().items()}),
    "a checkpoint": lambda engine, folder: engine.load_checkpoint(folder)}


def test_new_weights_between_a_forward_and_its_backward_are_refused(tmp_path: Path) -> None:
    for stage in range(4):
        for what, change in NEW_WEIGHTS.items():
            engine = watched_engine(SAME, stage)
            engine.save_checkpoint(tmp_path)
            loss = engine(watched_rows(), ALL)
            change(engine, str(tmp_path))
            with pytest.raises((ConfigError, RuntimeError), match="before the weights changed|modified by an inplace|"
                                                                  "after it was written to"):
                engine.backward(loss)
            train_watched(engine)
            engine.destroy()
