"""What torch.compile compiles of the model, the precision of fp32 matrix products, and the kernel of attention.

    model    embeddings to last LayerNorm in one graph: below stage 3, on one data-parallel rank, no chunks recomputed
    blocks   one graph per block; the engine's hooks run between them

On several data-parallel ranks a whole-model graph would return all gradients at its end, so their reduction could not
overlap backward. The loss head is never compiled; neither is anything that runs without gradients.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from megatron.config.tree import Config, require
from megatron.model import GPT2
from megatron.zero.flat_buffers import DTYPES

# torch's precision level -> arithmetic of fp32 matrix products on a GPU that supports it.
_MATMUL_PRECISION_NAMES = {"highest": "fp32", "high": "TF32", "medium": "bf16"}


@dataclass(frozen=True)
class Compilation:
    """What is compiled, and why not more."""

    scope: Literal["nothing", "blocks", "model"]
    reason: str = ""


def choose_compilation(config: Config, dp_size: int, device: torch.device) -> Compilation:
    train = config.train
    if train.compile is None and device.type != "cuda" or train.compile is False:
        return Compilation("nothing")
    if train.compile is None and (lacking := _missing_compiler()):
        return Compilation("nothing", f"no {lacking} was found")
    between = list(_reasons_between_blocks(config, dp_size))
    if train.compile_scope == "model":
        require(not between, f"--compile-scope model: {'; '.join(between)}; use --compile-scope blocks")
        return Compilation("model")
    if train.compile_scope == "blocks" or between:
        return Compilation("blocks", between[0] if between else "")
    if dp_size > 1:
        return Compilation("blocks", "gradients are reduced while backward runs")
    return Compilation("model")


def _missing_compiler() -> str:
    """The missing prerequisite of torch.compile, or "": Triton for kernels, a C compiler for their launchers."""
    if find_spec("triton") is None:
        return "Triton"
    return "" if any(map(shutil.which, ("cc", "gcc", "clang"))) else "C compiler"


def _reasons_between_blocks(config: Config, dp_size: int) -> Iterator[str]:
    """Why Python code must run between blocks, which rules out one graph for the model."""
    if config.zero.zero_stage == 3:
        yield "the parameters of blocks come and go at stage 3"
    elif config.zero.zero_stage and dp_size > 1:
        yield "new weights arrive block by block"
    if config.layer_drop.progressive_layer_drop:
        yield "blocks are left out"
    if config.offload.offload_optimizer_device != "none":
        yield "new weights come from the host block by block"
    if config.recompute.recomputes_chunks:
        yield "recomputation works block by block"


def compile_model(model: GPT2, config: Config, dp_size: int, device: torch.device) -> None:
    """Apply torch.compile to the model or to its blocks; call it before an engine wraps the model."""
    made, graphs = choose_compilation(config, dp_size, device), config.train.cuda_graphs
    if made.scope == "model":
        model.run_blocks = _run_blocks_without_hooks
        model.hidden_states = _compile_for_training(model.hidden_states, graphs, True)  # type: ignore[method-assign]
    elif made.scope == "blocks":
        for block in model.blocks:
            block.forward = _compile_for_training(block.forward, graphs, False)


def _run_blocks_without_hooks(blocks: Sequence[nn.Module], x: Tensor, *args: Any) -> Tensor:
    for block in blocks:
        x = block.forward(x, *args)
    return x


def _compile_for_training(forward: Callable[..., Tensor], graphs: bool, whole: bool) -> Callable[..., Tensor]:
    """`forward`, compiled only for calls with gradients enabled."""
    compiled = torch.compile(forward, mode="reduce-overhead" if graphs else None)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if graphs and whole:
            torch.compiler.cudagraph_mark_step_begin()  # outputs of the previous pass may be overwritten
        result: Tensor = compiled(*args, **kwargs)
        return result

    return run


def matmul_precision(config: Config, device: torch.device) -> str:
    """Precision of fp32 matrix products as torch.set_float32_matmul_precision names it: highest, high or medium."""
    return config.precision.matmul_precision or ("high" if device.type == "cuda" else "highest")


def arithmetic_precision(config: Config, device: torch.device) -> str:
    """Arithmetic of most matrix products: 16-bit, TF32 or fp32. It decides the device's peak FLOP/s."""
    if config.precision.name != "fp32" or matmul_precision(config, device) == "medium":
        return "16-bit"
    return _MATMUL_PRECISION_NAMES[matmul_precision(config, device)]


def compilation_line(config: Config, dp_size: int, device: torch.device) -> str | None:
    """Console line on precision and compilation; None on a CPU with default settings."""
    made = choose_compilation(config, dp_size, device)
    fp8 = config.precision.fp8
    if device.type == "cpu" and made.scope == "nothing" and config.precision.matmul_precision is None and not fp8:
        return None
    what = {"nothing": "nothing is compiled", "blocks": "each block is compiled", "model": "the model is compiled"}
    graphs = " into CUDA graphs" if config.train.cuda_graphs and made.scope != "nothing" else ""
    why = f" ({made.reason})" if made.reason else ""
    in_8_bits = f"products of blocks{' and logits' * config.precision.fp8_head} in fp8; " * fp8
    return (f" {in_8_bits}products of fp32 matrices in {_MATMUL_PRECISION_NAMES[matmul_precision(config, device)]}; "
            f"{what[made.scope]}{graphs}{why}")


_ATTENTION_KERNELS = {SDPBackend.MATH: "separate operations", SDPBackend.FLASH_ATTENTION: "FlashAttention",
                      SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention", SDPBackend.CUDNN_ATTENTION: "cuDNN"}
CUDNN_DROPOUT_STEP = 1 / 16  # cuDNN drops with multiples of this probability


def attention_line(config: Config, device: torch.device) -> str | None:
    """Console line on the attention kernel that torch chooses for this run, and on what a faster one needs; None on a
    CPU."""
    if device.type != "cuda":
        return None
    model, tp = config.model, config.parallel.model_parallel_size
    query, key = (torch.empty(1, heads // tp, config.seq_length, model.head_size, dtype=DTYPES[config.precision.name],
                              device=device, requires_grad=True)
                  for heads in (model.num_attention_heads, model.kv_heads))
    mask = None
    if config.data.reset_attention_mask:
        mask = torch.ones(1, 1, config.seq_length, config.seq_length, dtype=torch.bool, device=device)
    kernel = SDPBackend(torch._fused_sdp_choice(query, key, key, mask, model.attention_dropout, mask is None,
                                                enable_gqa=model.kv_heads != model.num_attention_heads))
    return describe_attention(kernel, config, is_hopper=torch.cuda.get_device_capability(device) >= (9, 0))


def describe_attention(kernel: SDPBackend, config: Config, *, is_hopper: bool) -> str:
    # from Hopper on torch prefers cuDNN, where it can be used
    fastest = SDPBackend.CUDNN_ATTENTION if is_hopper else SDPBackend.FLASH_ATTENTION
    obstacles = {"a 16-bit precision (--bf16)": config.precision.name == "fp32",
                 "no --reset-attention-mask": config.data.reset_attention_mask,
                 "--attention-dropout 0 or a multiple of 1/16":
                     is_hopper and config.model.attention_dropout % CUDNN_DROPOUT_STEP != 0,
                 "no --deterministic": is_hopper and config.train.deterministic}
    needs = ", ".join(need for need, is_there in obstacles.items() if is_there)
    why = f"; {_ATTENTION_KERNELS[fastest]}, which is faster, needs {needs}" if kernel is not fastest and needs else ""
    return f" attention by {_ATTENTION_KERNELS.get(kernel, kernel.name)}{why}"
