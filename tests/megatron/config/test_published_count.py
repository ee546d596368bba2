"""How many published DeepSpeed files are accepted, and why the others are not: the figures of docs/ds_config.md.

97 different files of DeepSpeedExamples (at 45b4b715, bdf8e59a, v0.1.0 and the parent of 89ce0d5a) that set a batch
size, ZeRO or fp16 were read once and sorted by all that they ask for. The files are not here. Each kind is, as one
small file of our own that asks for the same, with the number of published files it stands for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


from megatron.config.schema import error_sentences
from megatron.config.ds_json import build_ds_config
from megatron.errors import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ds_config.md"
FILES = 97

ADAM = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
UNCORRECTED = {"type": "Adam", "params": {"lr": 1e-4, "bias_correction": False}}
STAGE_3 = {"stage": 3, "stage3_max_reuse_distance": 1e8, "contiguous_gradients": True, "overlap_comm": True}
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PRESCALED = {"optimizer": ADAM, "prescale_gradients": True, "zero_optimization": {"stage": 0}}


def compressed(**sections: Any) -> dict[str, Any]:
    """With pruning switched off, as all of them have it."""
    return {"prescale_gradients": True, "compression_training": {
        "sparse_pruning": {"shared_parameters": {"enabled": False, "method": "l1"}}, **sections}}


def quantised(on: bool, bits: int = 8) -> dict[str, Any]:
    return {"shared_parameters": {"enabled": on, "quantize_groups": 64, "schedule_offset": 0}, "different_groups": {
        "wq1": {"params": {"start_bits": bits, "target_bits": bits, "quantization_period": 0},
                "modules": ["attn.c_attn", "mlp.c_fc"]}}}


def one_bit(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": False,
                                                   "cuda_aware": False, "comm_backend_name": "nccl", **params}}}


class Published(NamedTuple):
    files: int
    asks_for: str
    source: dict[str, Any] | str
    refused: tuple[str, ...] = ()
    """What each reason begins with."""


ACTIVATIONS = {"shared_parameters": {"enabled": True}, "different_groups": {"aq1": {"params": {"bits": 8}}}}
GROUPS = "compression_training.weight_quantization.different_groups is"
NO_ACTIVATIONS, NO_REDUCTION = (f"compression_training.{name} is not supported"
                                for name in ("activation_quantization", "layer_reduction"))

KINDS = [
    Published(18, "nothing unusual", {"optimizer": ADAM, "zero_optimization": {"stage": 2}}),
    Published(12, "1-bit Adam, 1-bit Lamb", one_bit("OneBitAdam", freeze_step=23000)),
    Published(6, "offloading", {"optimizer": ADAM, "zero_optimization": {"stage": 2, **ON_HOST}}),
    Published(5, "Adam without bias correction", {"optimizer": UNCORRECTED}),
    Published(5, "`autotuning`", {"autotuning": {"enabled": True, "fast": True}}),
    Published(4, "gradients scaled before they are summed", PRESCALED),
    Published(2, "clipping by both of its names", {
        "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}}),
    Published(2, "`fp16.auto_cast`, and `cuda_visible_devices`", {
        "fp16": {"enabled": True, "auto_cast": True}, "cuda_visible_devices": 0}),
    Published(1, "`cuda_visible_devices`", {"cuda_visible_devices": "0,1"}),
    Published(1, "`torch_autocast`, switched off", {"torch_autocast": {"enabled": False}, "bf16": {"enabled": True}}),
    Published(1, "layer dropping", {"prescale_gradients": True, "optimizer": UNCORRECTED, "progressive_layer_drop": {
        "enabled": True, "theta": 0.5, "gamma": 0.001}}),
    Published(1, "`quantize_training`", {"fp16": {"enabled": True, "initial_scale_power": 16}, "quantize_training": {
        "enabled": True, "quantizer_kernel": True, "quantize_groups": 8, "quantize_bits": {"target_bits": 8}}}),
    Published(1, "`aio.use_gds`", {"aio": {"use_gds": True}, "zero_optimization": {**STAGE_3, **ON_HOST}}),
    Published(1, "compression, all of it switched off", compressed(
        weight_quantization=quantised(False, 1), layer_reduction={"enabled": False, "keep_number_layer": 5})),

    Published(10, "compression of activations, and of some modules' weights", compressed(
        weight_quantization=quantised(True), activation_quantization=ACTIVATIONS), (GROUPS, NO_ACTIVATIONS)),
    Published(8, "placeholders for a script to fill in: no JSON", '{"train_batch_size": BATCH_SIZE}', ("line 1",)),
    Published(5, "a misspelt threshold of stage 3", {"optimizer": ADAM, "zero_optimization": {
        **STAGE_3, "stage3_param_persitence_threshold": 1e5}},
        ("unknown key zero_optimization.stage3_param_persitence_threshold; did you mean",)),
    Published(4, "`data_efficiency`", {**PRESCALED, "data_efficiency": {"enabled": True, "data_routing": {}}},
              ("data_efficiency is not supported",)),
    Published(2, "0/1 Adam", one_bit("ZeroOneAdam", var_freeze_step=155000, local_step_scaler=32678),
              ('optimizer.type "ZeroOneAdam" is not supported',)),
    Published(1, "a student of fewer layers", compressed(
        weight_quantization=quantised(False, 1), layer_reduction={"enabled": True, "keep_number_layer": 5}),
        (NO_REDUCTION,)),
    Published(1, "the same, with compression of weights and activations", compressed(
        layer_reduction={"enabled": True, "keep_number_layer": 5}, weight_quantization=quantised(True, 1),
        activation_quantization=ACTIVATIONS), (NO_REDUCTION, GROUPS, NO_ACTIVATIONS)),
    Published(1, "pruning of channels", compressed(channel_pruning={"shared_parameters": {"enabled": True}}),
              ("compression_training.channel_pruning is not supported",)),
    Published(1, "`zenflow`", {"zero_optimization": {"stage": 2, **ON_HOST, "zenflow": {"topk_ratio": 0.1}}},
              ("zero_optimization.zenflow is",)),
    Published(1, "`sparse_attention`", {"sparse_attention": {"mode": "fixed"}}, ("sparse_attention is not supported",)),
    Published(1, "sequences over ranks, and DeepCompile", {
        "sequence_parallel_size": 2, "compile": {"deepcompile": True, "passes": ["autosp"]}},
        ("compile is not supported", "sequence_parallel_size is 2")),
    Published(1, "`tensor_parallel`, a schedule without its end", {
        "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": 4},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}},
        ("tensor_parallel is not supported", "WarmupDecayLR needs scheduler.params.total_num_steps as a number")),
    Published(1, "16-bit masters, and `torch_autocast`", {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "torch_autocast": {"enabled": True}},
        ("bf16.bf16_master_weights_and_grads is", "torch_autocast is not supported")),
]


def told(kind: Published, folder: Path) -> list[str]:
    source: Any = kind.source
    if isinstance(source, str):
        (folder / "ds.json").write_text(source)
        source = folder / "ds.json"
    try:
        build_ds_config(source if isinstance(source, Path) else {"train_batch_size": 8, **source})
    except ConfigError as error:
        return [sentence.removeprefix(f"{source} ") for sentence in error_sentences(error)]
    return []


def test_a_published_kind_is_accepted_or_refused_for_all_that_is_missing(tmp_path: Path) -> None:
    for kind in KINDS:
        found = told(kind, tmp_path)
        assert len(found) == len(kind.refused), (kind.asks_for, found)
        for beginning in kind.refused:
            assert sum(sentence.startswith(beginning) for sentence in found) == 1, (beginning, found)


def test_the_page_has_the_count() -> None:
    accepted = sum(kind.files for kind in KINDS if not kind.refused)
    page = PAGE.read_text()
    assert sum(kind.files for kind in KINDS) == FILES
    assert f"{FILES} different files of" in page and f"; {accepted} are accepted" in page
