"""What is compiled where, and that it is one graph without a break that computes the same numbers.

The tests run the accelerator's side of the model on a CPU (mpu/device.py) and the backend `aot_eager`, which runs
torch's own operators: results are then bit for bit those of an eager run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn.attention import SDPBackend

import mpu.device
from megatron.config.tree import Config, build_config
from megatron.errors import ConfigError
from megatron.train import build, compile
from mpu import groups
from mpu.groups import Groups
from mpu.layers import ColumnParallelLinear
from mpu.random import model_parallel_cuda_manual_seed
from tests.distributed import run_ranks
from tests.megatron.helpers import records, train
from tests.megatron.zero.run import configure_gpt2, gpt2_engine, gpt2_loss, weights

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
                         "vocab_size": 60, "batch_size": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0}


def config(**values: Any) -> Config:
    return build_config({**SHAPE, **values})


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_missing_compiler", lambda: "")


SELECTIVE: dict[str, Any] = {"checkpoint_activations": True, "recompute_granularity": "selective"}
SCOPES: list[tuple[dict[str, Any], int, torch.device, str]] = [
    ({}, 1, CPU, "nothing"), ({"compile": True}, 1, CPU, "model"), ({}, 1, CUDA, "model"),
    ({"compile": False}, 1, CUDA, "nothing"), ({"compile_scope": "blocks"}, 1, CUDA, "blocks"),
    ({"zero_stage": 1}, 1, CUDA, "model"), ({"zero_stage": 2}, 1, CUDA, "model"),
    ({"zero_stage": 3}, 1, CUDA, "blocks"),
    ({}, 2, CUDA, "blocks"), ({"compile_scope": "model"}, 2, CUDA, "model"), ({"zero_stage": 2}, 2, CUDA, "blocks"),
    ({"checkpoint_activations": True}, 1, CUDA, "blocks"), (SELECTIVE, 1, CUDA, "model"),
]
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"zero_stage": 3}, 1, "come and go at stage 3"), ({"zero_stage": 1}, 2, "arrive block by block"),
    ({"progressive_layer_drop": True}, 1, "blocks are left out; use --compile-scope blocks"),
    ({"checkpoint_activations": True}, 1, "recomputation works block by block")]


def test_the_model_is_one_graph_where_nothing_happens_between_blocks(complete: None) -> None:
    for values, dp, device, scope in SCOPES:
        assert compile.choose_compilation(config(**values), dp, device).scope == scope, (values, dp, device)
    for values, dp, told in REFUSED:
        with pytest.raises(ConfigError, match=told):
            compile.choose_compilation(config(compile=True, compile_scope="model", **values), dp, CPU)


def test_the_line_says_what_was_chosen(complete: None) -> None:
    assert compile.compilation_line(config(), 1, CPU) is None
    assert compile.compilation_line(config(), 1, CUDA) == " products of fp32 matrices in TF32; the model is compiled"
    assert compile.compilation_line(config(cuda_graphs=True, matmul_precision="highest"), 2, CUDA) == (
        " products of fp32 matrices in fp32; each block is compiled into CUDA graphs (gradients are reduced while "
        "backward runs)")


def test_the_line_on_attention_says_what_a_faster_kernel_needs() -> None:
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for kernel, is_hopper, values, said in (
            (cudnn, True, {}, " attention by cuDNN"), (flash, False, {"attention_dropout": 0.1},
                                                       " attention by FlashAttention"),
            (flash, True, {"attention_dropout": 0.1, "deterministic": True}, " attention by FlashAttention; cuDNN, "
             "which is faster, needs --attention-dropout 0 or a multiple of 1/16, no --deterministic"),
            (SDPBackend.EFFICIENT_ATTENTION, False, {"bf16": False}, " attention by memory-efficient attention; "
             "FlashAttention, which is faster, needs a 16-bit precision (--bf16)")):
        chosen = config(**{"bf16": True, "attention_dropout": 0.0, **values})
        assert compile.describe_attention(kernel, chosen, is_hopper=is_hopper) == said
    assert compile.attention_line(config(), CPU) is None


def trained(values: dict[str, Any], steps: int = 2) -> list[float]:
    """Loss and gradient norm of each step."""
    chosen, groups = config(**values), Groups()
    build.seed_everything(chosen.train, groups)
    engine = build.engine(chosen, build.model(chosen, groups), groups, CPU)
    rows = torch.randint(0, 60, (2, 17), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(steps):
        loss = engine(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), grad_scale=engine.backward_scale)
        engine.backward(loss)
        engine.step()
        found += [loss.item(), float(engine.get_global_grad_norm())]
    return found


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch
@pytest.mark.parametrize("values", [
    *({"zero_stage": stage} for stage in range(4)), {"zero_stage": 1, "bf16": True},
    {"zero_stage": 2, "bf16": True, "fp8": True, "fp8_head": True},
    {"checkpoint_activations": True}, SELECTIVE, {**SELECTIVE, "zero_stage": 3}], ids=str)
def test_a_compiled_engine_has_no_graph_break_and_computes_the_same_bits(values, monkeypatch):
    monkeypatch.setattr(mpu.device, "FORCE_ACCELERATOR_PATH", True)
    eager = trained({**values, "compile": False})
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, mode: partial(whole, backend="aot_eager")(forward))
    torch._dynamo.reset()
    counters.clear()
    compiled = trained({**values, "compile": True})
    assert not counters["graph_break"]
    blocks = values.get("zero_stage") == 3 or values == {"checkpoint_activations": True}
    assert counters["stats"]["unique_graphs"] == 1, "one graph serves all blocks" if blocks else "the whole model"
    assert compiled == eager


FLAGS = ["--preset", "tiny", "--mock-data", "--train-iters", "8", "--batch-size", "4", "--eval-interval", "0",
         "--log-interval", "0", "--attention-dropout", "0", "--hidden-dropout", "0"]


@pytest.mark.slow  # the compiler takes 10 s
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch
@pytest.mark.parametrize("extra", [[], ["--checkpoint-activations", "--zero-stage", "3"]], ids=["plain", "composed"])
def test_a_compiled_run_trains_like_an_eager_one(extra: list[str], tmp_path: Path) -> None:
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        train([*FLAGS, *extra, *flags, "--metrics-file", tmp_path / name])
    eager, compiled = (records(tmp_path / name) for name in ("eager", "compiled"))
    for key in ("lm_loss", "grad_norm"):
        # Fused kernels round elsewhere: 1e-4 over 8 fp32 steps.
        assert [row[key] for row in compiled] == pytest.approx([row[key] for row in eager], rel=1e-4)
    assert [row["samples_digest"] for row in compiled] == [row["samples_digest"] for row in eager]


# ---- blocks inside the engine --------------------------------------------------------------------------------------

TRACED = partial(torch.compile, backend="aot_eager")


def traced_steps(rank: int, world: int, stage: int, tp: int,
                 more: dict[str, Any]) -> list[tuple[int, int, list[Tensor]]]:
    """(breaks, graphs, weights after two steps) of compiled blocks, and of blocks as they are."""
    found, grid = [], groups.build(tp)
    for compiled in (True, False):
        torch._dynamo.reset()
        counters.clear()
        model_parallel_cuda_manual_seed(1, grid)
        settings: dict[str, Any] = {"model_parallel_size": tp, "zero_stage": stage, "compile": compiled,
                                    "compile_scope": "blocks", "lr": 1e-2, "lr_warmup_iters": 0, "batch_size": 2,
                                    **more}
        with patch("torch.compile", TRACED):
            engine = gpt2_engine(configure_gpt2(**settings), grid)
        draw = torch.Generator().manual_seed(grid.dp.rank)
        for _ in range(2):
            engine.backward(gpt2_loss(engine, torch.randint(0, 61, (2, 17), generator=draw)))
            engine.step()
        found.append((sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"],
                      [*weights(engine).values()]))
    return found


@pytest.mark.parametrize(("stage", "tp", "more"), [(3, 2, {}), (2, 2, {"sequence_parallel": True}), *(
    pytest.param(stage, tp, {}, marks=pytest.mark.slow) for stage, tp in ((0, 2), (1, 1), (2, 2)))])
def test_blocks_inside_the_engine_are_one_graph_each(stage: int, tp: int, more: dict[str, Any]) -> None:
    found = run_ranks(traced_steps, 2 * tp, stage, tp, more, timeout=300)
    for (breaks, graphs, results), (_, none, wanted) in found:
        assert (breaks, none) == (0, 0) and 1 <= graphs <= 2
        assert all(map(torch.equal, results, wanted))


def test_split_positions_draw_their_dropout_without_a_graph_break() -> None:
    more = {"sequence_parallel": True, "attention_dropout": 0.1, "hidden_dropout": 0.1}
    assert [compiled[0] for compiled, _ in run_ranks(traced_steps, 2, 0, 2, more, timeout=300)] == [0, 0]


def kept_by_a_layer(rank: int, world: int) -> list[int]:
    """Elements of what the compiled forward of a layer returns: its output, and what the backward needs."""
    layer = ColumnParallelLinear(8, 24, gather_output=False, sequence_parallel=True, tp=groups.build(world).tp)
    found: list[list[int]] = []

    def note(module: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        found.append([node.meta["val"].numel() for node in module.graph.output_node().args[0]])
        return module

    backend = aot_autograd(fw_compiler=note, bw_compiler=lambda module, inputs: module,
                           partition_fn=min_cut_rematerialization_partition)
    x = torch.ones(2, 4, 8, requires_grad=True)
    torch.compile(lambda x: layer(x.sin()), backend=backend)(x).sum().backward()
    return found[0]


def test_a_compiled_layer_keeps_its_own_positions_alone() -> None:
    for kept in run_ranks(kept_by_a_layer, 2, timeout=120):
        assert sorted(kept) == [2 * 4 * 8, 8 * 12, 2 * 8 * 12], "a gathered input has 2 x 8 x 8 elements"
