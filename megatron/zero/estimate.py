"""DeepSpeed's estimates of what ZeRO's model states need, for scripts written against them: same names, same formulas.

Each function prints a table, one row for each choice of offloading and of construction, and returns its rows. Those
called `all_live` count the parameters of a model, those called `all_cold` are given their number.

Bytes per parameter: 2 for the 16-bit weight, 2 for its gradient, 4 for the gradient in fp32, 12 for the fp32 master
and the moments. `zero_init` shards each layer when it is built, so that the host never holds a full model per GPU.
These are rules of thumb for DeepSpeed's engine, without activations and buffers (this engine makes no fp32 copy of the
gradients, for example); `python -m megatron.plan` computes what a run of this trainer needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import nn

BUFFER_FACTOR = 1.5  # safety factor for host memory


@dataclass(frozen=True)
class ModelStatesEstimate:
    """Bytes of model states on the host of one node and on one GPU, for one choice of options."""

    host: int
    gpu: int
    offload_optimizer: bool
    offload_param: bool | None = None  # None at stage 2, which does not have the option
    zero_init: bool | None = None


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = BUFFER_FACTOR
) -> list[ModelStatesEstimate]:
    total, _ = count_parameters(model)
    return estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = BUFFER_FACTOR
) -> list[ModelStatesEstimate]:
    """Stage 2: with offloading the GPU keeps only the weights; otherwise everything but the weights is sharded."""
    gpus, total_params = num_gpus_per_node * num_nodes, int(total_params)  # 2851e6 is a float
    rows = [ModelStatesEstimate(int(total_params * max(4 * gpus, 16) * additional_buffer_factor),
                                2 * total_params, True),
            ModelStatesEstimate(int(total_params * 4 * num_gpus_per_node * additional_buffer_factor),
                                2 * total_params + 18 * total_params // gpus, False)]
    _print_table(rows, f"ZeRO stage 2, {total_params:,} parameters", num_gpus_per_node, num_nodes)
    return rows


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = BUFFER_FACTOR
) -> list[ModelStatesEstimate]:
    return estimate_zero3_model_states_mem_needs_all_cold(
        *count_parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
        total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1,
        additional_buffer_factor: float = BUFFER_FACTOR) -> list[ModelStatesEstimate]:
    """Stage 3: the GPU also holds the gathered weights and gradients of the largest layer."""
    total_params, largest_layer_params = int(total_params), int(largest_layer_params)  # 2851e6 is a float
    gpus, layer = num_gpus_per_node * num_nodes, 4 * largest_layer_params
    whole_models = 4 * total_params * num_gpus_per_node  # one in fp32 for every process of the node
    rows = []
    for optimizer, param in ((True, True), (True, False), (False, False)):
        on_gpu = 0 if param else 2 if optimizer else 18
        on_host = (18 if param else 16 if optimizer else 0) * total_params / num_nodes
        for zero_init in (True, False):
            built = (0 if optimizer else layer * num_gpus_per_node) if zero_init else whole_models
            rows.append(ModelStatesEstimate(int(max(on_host, built) * additional_buffer_factor),
                                            layer + on_gpu * total_params // gpus, optimizer, param, zero_init))
    _print_table(rows, f"ZeRO stage 3, {total_params:,} parameters, {largest_layer_params:,} in the largest layer",
                 num_gpus_per_node, num_nodes)
    return rows


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all parameters, those of the largest layer). Shared ones count once; a layer is a module that directly owns
    parameters."""
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = (sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers, default=0)


def _print_table(rows: Sequence[ModelStatesEstimate], what: str, gpus: int, nodes: int) -> None:
    print(f"{what}; {nodes} node(s) with {gpus} GPU(s) each\n{'per CPU':>12} {'per GPU':>12}   options")
    for row in rows:
        named = ", ".join(f"{name}={int(value)}" for name, value in asdict(row).items()
                          if name not in ("host", "gpu") and value is not None)
        print(f"{row.host / 2**30:9.2f} GB {row.gpu / 2**30:9.2f} GB   {named}")
