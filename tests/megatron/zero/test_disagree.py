"""Ranks that begin alike and differ later: other arguments, other hyper-parameters, other sums of losses. Each is
refused on all ranks by what differs, its values and their ranks, and no weight has changed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron import zero
from megatron.checkpoint.convert.importers import open_huggingface
from megatron.checkpoint.reader import open_checkpoint
from megatron.errors import ConfigError
from megatron.inference import load
from megatron.zero import step_result
from megatron.zero.api.checkpoint_io import LoadOptions, load_external_weights
from megatron.zero.api.engine import Engine
from mpu.groups import build
from tests.distributed import run_ranks
from tests.megatron.zero.run import configure_gpt2, gpt2_engine
from tests.megatron.zero.small import Model, rows, whole
from tests.megatron.zero.test_watch import SAME, ends_of, one_error, rows as watched_rows
from tests.wires import accelerator_side

STAGES = (0, 1, 3)


def engine_of(stage: int, accumulation: int = 1, lr: Any = 0.1) -> Engine:
    model = Model()
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "weight_decay": 0.5}]
    return zero.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=lr), config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True}})[0]


def trained(engine: Engine, rank: int, steps: int = 1) -> None:
    for number in range(steps):
        engine.backward(engine(rows(rank, number)))
        engine.step()


def said(action: Callable[[], Any]) -> str:
    """What the engine refuses with; nothing where it does not."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def one(found: Sequence[str]) -> str:
    assert len(set(found)) == 1, found
    return found[0]


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


def steps_with_others(rank: int, world: int, stage: int, what: str, side: bool) -> str:
    with accelerator_side(side):
        engine = engine_of(stage)
        for group in engine.optimizer.param_groups if what == "in place" else ():
            group["betas"] = [0.9, 0.999]
        trained(engine, rank, 2)
        engine.finish_step()
        kept = [{**group, "betas": type(group["betas"])(group["betas"])} for group in engine.optimizer.param_groups]
        before = whole(engine)
        if rank == world - 1:
            CHANGES[what][0](engine)
        engine.backward(engine(rows(rank, 2)))

        def step() -> None:
            engine.step()
            for group, old in zip(engine.optimizer.param_groups, kept, strict=True):  # after it, before it is known
                group.clear()
                group.update(old)
            engine.finish_step()

        found = said(step)
        assert torch.equal(whole(engine), before)
        for group, old in zip(engine.optimizer.param_groups, kept, strict=True):
            group.clear()
            group.update(old)
        if side:  # the gradients of a step that was given are spent
            engine.backward(engine(rows(rank, 2)))
        report = engine.step()
        assert report is not None and report.applied and not torch.equal(whole(engine), before)
        return found


STEPS = [("a rate", 0, 2, False), ("a decay", 1, 2, False), ("betas", 3, 2, False), ("in place", 0, 3, False),
         ("a scheduler", 3, 3, False), ("a key", 1, 2, True), ("a rate", 3, 2, True)]


@pytest.mark.parametrize("what, stage, world, side", STEPS)
def test_a_step_with_another_hyper_parameter_on_one_rank_changes_no_weight(what: str, stage: int, world: int,
                                                                           side: bool) -> None:
    error = one(run_ranks(steps_with_others, world, stage, what, side))
    others = "rank 0" if world == 2 else f"ranks 0-{world - 2}"
    assert CHANGES[what][1].format(others=others, last=f"rank {world - 1}") in error
    assert what == "a scheduler" or error.count(" of param group ") == 1, error


def tensor_rate(rank: int, world: int, side: bool) -> str:
    with accelerator_side(side):
        engine = engine_of(1, lr=torch.tensor(0.1))
        trained(engine, rank)
        if rank == 1:
            engine.optimizer.param_groups[0]["lr"].fill_(0.25)
        return said(lambda: (trained(engine, rank), engine.finish_step()))


def test_a_rate_that_is_a_tensor_is_read_on_the_host_and_not_fetched_from_a_device() -> None:
    assert "lr of param group 0 is 0.1" in one(run_ranks(tensor_rate, 2, False))
    assert one(run_ranks(tensor_rate, 2, True)) == ""


def test_a_digest_of_one_rank_that_differs_by_one_is_seen_in_float64() -> None:
    for ranks, case in product((2, 3, 8, 1000, 1024, 16384), range(4)):
        largest = (1 << step_result.digest_bits(ranks)) - 1
        usual, other = ((largest, largest - 1), (0, 1), (largest - 1, largest), (1, largest))[case]
        total = torch.tensor(float((ranks - 1) * usual + other), dtype=torch.float64)
        squares = torch.tensor(float((ranks - 1) * usual**2 + other**2), dtype=torch.float64)
        assert int(total) == (ranks - 1) * usual + other and int(squares) == (ranks - 1) * usual**2 + other**2
        assert bool(squares * ranks != total * total)
        all_alike = torch.tensor([ranks * usual, ranks * usual**2], dtype=torch.float64)
        assert bool(all_alike[1] * ranks == all_alike[0] * all_alike[0])
        assert (ranks * largest)**2 <= 2**53 and step_result.digest_bits(ranks) >= 12


# ---- sums of losses ------------------------------------------------------------------------------------------------


def boundary_by_hand(engine: Engine, rank: int) -> None:
    """Rank 1 has a micro-batch less."""
    for number in range(2 - rank):
        engine.set_gradient_accumulation_boundary(number == 1 - rank)
        engine.backward(engine(rows(rank, number)))
        engine.step()


def undivided(engine: Engine, rank: int) -> None:
    for number in range(2):
        engine.backward(engine(rows(rank, number)), scale_wrt_gas=rank == 0)
        engine.step()


def forgets(engine: Engine, rank: int) -> None:
    engine.backward(engine(rows(rank, 0)))
    engine.step()
    if rank == 1:
        engine.zero_grad()
    engine.backward(engine(rows(rank, 1)))
    engine.step()


def one_backward_more(engine: Engine, rank: int) -> None:
    with engine.no_sync():
        for number in range(1 + rank):
            engine.backward(engine(rows(rank, number)))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(rows(rank, 2)))
    engine.step()


SUMS = {"a boundary by hand": (boundary_by_hand, "2 x 1/2 on rank 0, 1 x 1/2 on rank 1"),
        "undivided": (undivided, "2 x 1/2 on rank 0, 2 x 1/1 on rank 1"),
        "forgotten": (forgets, "2 x 1/2 on rank 0, 1 x 1/2 on rank 1"),
        "a backward more": (one_backward_more, "2 x 1/2 on rank 0, 3 x 1/2 on rank 1")}


def sums_differently(rank: int, world: int, what: str, stage: int) -> str:
    engine = engine_of(stage, 2)
    trained(engine, rank, 2)
    before = whole(engine)
    found = said(lambda: SUMS[what][0](engine, rank))
    assert torch.equal(whole(engine), before)
    return found


@pytest.mark.parametrize("what, stage", [("a boundary by hand", 0), ("a backward more", 1), ("undivided", 3),
                                         ("forgotten", 1)])
def test_a_step_of_another_sum_of_losses_on_one_rank_changes_no_weight(what: str, stage: int) -> None:
    assert f"the step's sum of losses is {SUMS[what][1]}" in one(run_ranks(sums_differently, 2, what, stage))


def steps_alone(engine: Engine, rank: int) -> None:
    engine.set_gradient_accumulation_boundary(True)
    for number in range(3):
        engine.backward(engine(watched_rows(), (0, 1, 2, 3)))
        if number == 1:
            engine.set_gradient_accumulation_boundary(rank == 1)
        engine.step()
    engine.save_checkpoint("nowhere")


@pytest.mark.parametrize("stage, side", [(0, False), (1, True), (2, False), (3, True)])
def test_a_step_at_a_boundary_that_only_one_rank_sees_does_not_hang(stage: int, side: bool) -> None:
    error = one_error(ends_of(steps_alone, 2, SAME, stage, side, stage3_max_reuse_distance=0))
    assert "rank 1 is at a step" in error and "rank 0 is at " in error
    assert stage > 1 or "rank 0 is at a save" in error


# ---- extra scalars --------------------------------------------------------------------------------------------------


def rides(rank: int, world: int, stage: int, side: bool) -> tuple[list[Any], list[str]]:
    """Each rank gives other numbers of extra scalars; then one gives what cannot travel."""
    with accelerator_side(side):
        engine = engine_of(stage)
        found: list[Any] = []
        for given in ([[1.0, 2.0], []], [[], [3.0]], [8 * [1.0], [torch.tensor(2.0), 4]]):
            engine.backward(engine(rows(rank, 0)))
            report = engine.step(extra_scalars=given[rank])
            assert report is not None and report.applied
            found.append(report.extra_scalars)
        before, refused = whole(engine), []
        for wrong in (9 * [1.0], [torch.ones(2)]):
            engine.backward(engine(rows(rank, 1)))
            scalars = wrong if rank == 1 else [1.0]
            refused.append(said(lambda: (engine.step(extra_scalars=scalars), engine.finish_step())))
            assert torch.equal(whole(engine), before)
        return found, refused


@pytest.mark.parametrize("stage, side", [(0, False), (1, True), (3, False)])
def test_other_extra_scalars_on_one_rank_add_nothing_or_are_refused(stage: int, side: bool) -> None:
    (first, said_there), (second, said_here) = run_ranks(rides, 2, stage, side)
    assert first == [(1.0, 2.0), (), (3.0, 5.0, *(6 * [1.0]))] and second == [(), (3.0,), (3.0, 5.0)]
    assert said_there == said_here and "has 9 numbers: give at most 8 (so on rank 1, not on all)" in said_here[0]
    assert "a tensor of shape [2]: give numbers" in said_here[1]


# ---- arguments -----------------------------------------------------------------------------------------------------


Call = Callable[[Engine, int, Path], Any]
CALLS: dict[str, tuple[Call, str]] = {
    "load: module only": (lambda e, r, f: e.load_checkpoint(f, load_module_only=r == 1), "load_module_only is false"),
    "load: optimizer": (lambda e, r, f: e.load_checkpoint(f, load_optimizer_states=r == 0),
                        "load_optimizer_states is true on rank 0, false on rank 1"),
    "load: scheduler": (lambda e, r, f: e.load_checkpoint(f, load_lr_scheduler_states=r == 0),
                        "load_lr_scheduler_states is true on rank 0, false on rank 1"),
    "load: strict": (lambda e, r, f: e.load_checkpoint(f, load_module_strict=r == 0), "load_module_strict is true"),
    "load: tag": (lambda e, r, f: e.load_checkpoint(f, tag=None if r else "a"), "tag is a on rank 0, null on rank 1"),
    "restore": (lambda e, r, f: e.restore(open_checkpoint(f, "a", world=e.groups.world), LoadOptions(rng=r == 0)),
                "rng is true on rank 0, false on rank 1"),
    "save: tag": (lambda e, r, f: e.save_checkpoint(f, tag=r), "tag is 0 on rank 0, 1 on rank 1"),
    "save: background": (lambda e, r, f: e.save_checkpoint(f, tag="b", in_background=r == 1), "in_background is false"),
    "save: latest": (lambda e, r, f: e.save_checkpoint(f, tag="b", save_latest=r == 0), "save_latest is true"),
    "save: frozen": (lambda e, r, f: e.save_checkpoint(f, tag="b", exclude_frozen_parameters=r == 1),
                     "exclude_frozen_parameters is false on rank 0, true on rank 1"),
    "save: optimizer": (lambda e, r, f: e.save_checkpoint(f, tag="b", save_optimizer_states=r == 1),
                        "save_optimizer_states is false on rank 0, true on rank 1"),
    "save: client": (lambda e, r, f: e.save_checkpoint(f, tag="b", client_state={"module": 1} if r else {}),
                     "client_state: module is the engine's own"),
    "16bit": (lambda e, r, f: e.save_16bit_model(f, "w.bin", exclude_frozen_parameters=r == 1),
              "exclude_frozen_parameters is false on rank 0, true on rank 1"),
    "16bit: name": (lambda e, r, f: e.save_16bit_model(f, f"w{r}.bin"), "save_filename is w0.bin on rank 0, w1.bin"),
    "state dict": (lambda e, r, f: e.load_module_state_dict({}, strict=r == 0), "strict is true on rank 0"),
    "offload": (lambda e, r, f: e.offload_states(["optim_states"] if r else None), "include is "),
    "offload: wrong": (lambda e, r, f: e.offload_states(["none"] if r else None), "unknown state 'none'"),
}


def calls(rank: int, world: int, folder: str, stage: int) -> dict[str, str]:
    engine = engine_of(stage)
    trained(engine, rank)
    engine.save_checkpoint(folder, tag="a")
    before, files = whole(engine), sorted(Path(folder).rglob("*"))
    kept = engine.get_batch_info()
    found = {what: said(lambda: call(engine, rank, Path(folder))) for what, (call, _) in CALLS.items()}
    assert sorted(Path(folder).rglob("*")) == files and torch.equal(whole(engine), before)
    assert engine.get_batch_info() == kept
    trained(engine, rank)
    assert engine.load_checkpoint(folder)[0] is not None
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_call_with_another_argument_on_one_rank_is_refused_and_changes_nothing(stage: int, tmp_path: Path) -> None:
    first, second = run_ranks(calls, 2, str(tmp_path), stage)
    assert first == second
    assert {what: text for what, text in first.items() if CALLS[what][1] not in text} == {}


def exports_alone(rank: int, world: int) -> str:
    engine = engine_of(3)
    return said(lambda: engine.module_state_dict(exclude_frozen_parameters=rank == 1))


def test_a_state_dict_that_is_gathered_is_of_the_same_parameters() -> None:
    assert "exclude_frozen_parameters is false on rank 0, true on rank 1" in one(run_ranks(exports_alone, 2))


# ---- batch sizes, which no call compares ---------------------------------------------------------------------------


SIZES: dict[str, tuple[Callable[[Engine, int], None], str]] = {
    "batch": (lambda e, r: e.set_train_batch_size(8 * (r + 1)), "gradient_accumulation_steps is 2 on rank 0, 4 on"),
    "batch, alone": (lambda e, r: e.set_train_batch_size(8) if r else None,
                     "gradient_accumulation_steps is 1 on rank 0, 2 on rank 1"),
    "micro-batch": (lambda e, r: e.set_train_micro_batch_size(1 + r),
                    "train_micro_batch_size_per_gpu is 1 on rank 0, 2 on rank 1"),
    "micro-batch, alone": (lambda e, r: e.set_train_micro_batch_size(4) if r else None,
                           "train_micro_batch_size_per_gpu is 2 on rank 0, 4 on rank 1")}


def sets_sizes(rank: int, world: int, what: str, stage: int) -> str:
    engine = engine_of(stage)
    trained(engine, rank)
    before = whole(engine)
    SIZES[what][0](engine, rank)
    found = said(lambda: trained(engine, rank, engine.gradient_accumulation_steps()))
    assert torch.equal(whole(engine), before)
    if what.startswith("micro-batch"):
        engine.zero_grad()
        engine.set_train_micro_batch_size(2)
        trained(engine, rank)
        assert not torch.equal(whole(engine), before)
    return found


@pytest.mark.parametrize("what, stage", [("batch", 0), ("batch, alone", 1), ("micro-batch", 3),
                                         ("micro-batch, alone", 2)])
def test_a_batch_size_that_one_rank_sets_is_refused_by_its_next_step(what: str, stage: int) -> None:
    assert SIZES[what][1] in one(run_ranks(sets_sizes, 2, what, stage))


def accumulates_alone(engine: Engine, rank: int) -> None:
    if rank == 1:
        engine.set_train_batch_size(2 * engine.train_batch_size())
    for _ in range(4):
        engine.backward(engine(watched_rows(), (0, 1, 2, 3)))
        engine.step()


@pytest.mark.parametrize("stage, side", [(2, True), (3, False)])
def test_where_a_step_of_more_micro_batches_exchanges_otherwise_the_number_is_named(stage: int, side: bool) -> None:
    error = one_error(ends_of(accumulates_alone, 2, SAME, stage, side, stage3_max_reuse_distance=0))
    assert "gradient_accumulation_steps 1 on rank 0, gradient_accumulation_steps 2 on rank 1" in error


# ---- the text of a step's settings ---------------------------------------------------------------------------------


def param_group(**other: Any) -> dict[str, Any]:
    return {"params": [], "lr": 0.1, "betas": (0.9, 0.99), **other}


def settings_of(*groups: dict[str, Any], step: int = 3) -> dict[str, str]:
    return step_result.make_step_settings(step, {"1/2": 2}, 2, None, groups)


def digest_of(*groups: dict[str, Any], step: int = 3, ranks: int = 2) -> int:
    return step_result.settings_digest(settings_of(*groups, step=step), 7, ranks)


def test_every_change_of_a_group_is_seen_and_an_order_is_none() -> None:
    groups = [param_group(), param_group(weight_decay=0.5, note=[1, 2], rate=torch.tensor(0.5)), {"params": []}]
    first = settings_of(*groups)
    assert (first["betas of param group 0"], first["lr of param group 0"]) == ("[0.9, 0.99]", "0.1")
    kept, seen = dict(first), {digest_of(*groups)}
    changes: list[Callable[[], object]] = [
        lambda: groups[1].update(lr=0.2), lambda: groups[1]["note"].append(3), lambda: groups[1]["rate"].fill_(0.25),
        lambda: groups[0].update(lr=float("nan")), lambda: groups[0].update(lr=None), lambda: groups[0].pop("betas"),
        lambda: groups[2].update(betas=(0.9, 0.99)), lambda: groups[0].update(flag=True),
        lambda: groups[0].update(flag=1), lambda: groups.append(param_group()), lambda: groups[1].update(note=(1, 2)),
        lambda: groups[1].update(rate=0.5), lambda: groups[1].update(lr=0.5, weight_decay=0.2),
        lambda: groups[2].update(note=groups[1].pop("note"))]
    for number, change in enumerate(changes, 2):
        change()
        seen.add(digest_of(*groups))
        assert len(seen) == number
    assert first == kept, "those of an earlier step stay"
    before = digest_of(*groups)
    groups[0]["lr"] = groups[0].pop("lr")
    assert digest_of(*groups) == before


ALIKE: list[tuple[Any, Any, bool]] = [
    (1, 1.0, True), ((1, 2), [1, 2], True), (0.0, -0.0, True), (0, -0.0, True), ({0.5, 0.9}, {0.9, 0.5}, True),
    ({0.5, 0.99}, {0.9, 0.99}, False), (1, 1.5, False), (2**53 + 1, 2**53, False), ("0.1", 0.1, False)]


def test_values_are_compared_as_what_they_are() -> None:
    for one, other, equal in ALIKE:
        assert (settings_of(param_group(x=one)) == settings_of(param_group(x=other))) is equal, (one, other)


def client_states(rank: int, world: int, folder: str) -> tuple[dict[str, Any], str]:
    """Values of another rank are its own affair; keys that rank 0 does not have are told."""
    engine, told = engine_of(1), io.StringIO()
    with redirect_stderr(told):
        engine.save_checkpoint(folder, "a", {"loss": float(rank), "epoch": 3})
        engine.save_checkpoint(folder, "b", {"epoch": 3} if rank == 0 else None)
        assert told.getvalue() == ""
        engine.save_checkpoint(folder, "c", {"epoch": 3, f"seen by {rank}": rank})
    return engine.load_checkpoint(folder, "c")[1] or {}, told.getvalue()


def test_what_only_another_rank_gives_as_client_state_is_told(tmp_path: Path) -> None:
    (first, told), (second, silent), (_, nothing) = run_ranks(client_states, 3, str(tmp_path))
    assert first == second == {"epoch": 3, "seen by 0": 0} and silent == nothing == ""
    assert told == ("warning: client_state: 'seen by 1' (given on rank 1), 'seen by 2' (given on rank 2) is not saved: "
                    "a checkpoint holds that of rank 0; give it there\n"), told


# ---- copies of a folder --------------------------------------------------------------------------------------------


def hugging_face(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda weights: None) -> Path:
    folder.mkdir()
    h, generator = 16, torch.Generator().manual_seed(0)
    shapes = {"wte.weight": (64, h), "wpe.weight": (8, h), "ln_f.weight": (h,), "ln_f.bias": (h,)}
    for block in range(2):
        for name, shape in {"ln_1.weight": (h,), "ln_1.bias": (h,), "ln_2.weight": (h,), "ln_2.bias": (h,),
                            "attn.c_attn.weight": (h, 3 * h), "attn.c_attn.bias": (3 * h,),
                            "attn.c_proj.weight": (h, h), "attn.c_proj.bias": (h,), "mlp.c_fc.weight": (h, 4 * h),
                            "mlp.c_fc.bias": (4 * h,), "mlp.c_proj.weight": (4 * h, h),
                            "mlp.c_proj.bias": (h,)}.items():
            shapes[f"h.{block}.{name}"] = shape
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    change(weights)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": h, "n_head": 2,
                                                    "vocab_size": 64, "n_positions": 8}))
    return folder


COPIES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a block": (lambda weights: weights["h.1.mlp.c_fc.weight"].mul_(2), "blocks.1.mlp.fc.weight is "),
    "the end of a bias": (lambda weights: weights["h.0.attn.c_attn.bias"][47:].add_(1), "blocks.0.attn.qkv.bias is ")}


def copies(rank: int, world: int, folders: list[str], stage: int) -> list[str]:
    """What inference and an engine refuse this rank's copy with."""
    grid = build(1)
    core = gpt2_engine(configure_gpt2(hidden_size=16, num_attention_heads=2, vocab_size=64, max_position_embeddings=8,
                                      zero_stage=stage), grid)
    before = [bucket.device_param_shard.clone() for bucket in core.buckets]
    found = [said(lambda: load.open_hf_folder(folders[rank], grid)),
             said(lambda: load_external_weights(core, open_huggingface(Path(folders[rank]))))]
    assert all(map(torch.equal, before, [bucket.device_param_shard for bucket in core.buckets])) == bool(found[1])
    return found


@pytest.mark.parametrize("what, stage", [("a block", 3), ("the end of a bias", 0), ("", 1)])
def test_copies_of_a_folder_that_differ_are_not_used(what: str, stage: int, tmp_path: Path) -> None:
    folders = [hugging_face(tmp_path / "first"), hugging_face(tmp_path / "second", *[COPIES[what][0]] if what else [])]
    for error in map(one, zip(*run_ranks(copies, 2, [*map(str, folders)], stage))):
        assert (error == "") == (what == ""), error
        assert not what or all(words in error for words in (COPIES[what][1], "on rank 0, ", "on rank 1")), error
