"""How many published DeepSpeed files are accepted: the figures of docs/ds_config.md.

97 different files of DeepSpeedExamples (at 45b4b715, bdf8e59a, v0.1.0 and the parent of 89ce0d5a) that set a batch
size, ZeRO or fp16 were read once and sorted by all that they ask for. The files are not here. Each kind is, as one
small file of our own that asks for the same, with the number of published files it stands for. Why the others are
refused is in test_ds_config.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.config.ds_json import build_ds_config

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ds_config.md"
FILES = 97

ADAM = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
UNCORRECTED = {"type": "Adam", "params": {"lr": 1e-4, "bias_correction": False}}
STAGE_3 = {"stage": 3, "stage3_max_reuse_distance": 1e8, "contiguous_gradients": True, "overlap_comm": True}
ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PRESCALED: dict[str, Any] = {"optimizer": ADAM, "prescale_gradients": True, "zero_optimization": {"stage": 0}}

KINDS: list[tuple[int, str, dict[str, Any]]] = [
    (18, "nothing unusual", {"optimizer": ADAM, "zero_optimization": {"stage": 2}}),
    (12, "1-bit Adam, 1-bit Lamb", {"optimizer": {"type": "OneBitAdam", "params": {
        "lr": 4e-4, "weight_decay": 0.01, "bias_correction": False, "cuda_aware": False, "comm_backend_name": "nccl",
        "freeze_step": 23000}}}),
    (6, "offloading", {"optimizer": ADAM, "zero_optimization": {"stage": 2, **ON_HOST}}),
    (5, "Adam without bias correction", {"optimizer": UNCORRECTED}),
    (5, "`autotuning`", {"autotuning": {"enabled": True, "fast": True}}),
    (4, "gradients scaled before they are summed", PRESCALED),
    (2, "clipping by both of its names", {
        "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 1.0}}}),
    (2, "`fp16.auto_cast`, and `cuda_visible_devices`", {
        "fp16": {"enabled": True, "auto_cast": True}, "cuda_visible_devices": 0}),
    (1, "`cuda_visible_devices`", {"cuda_visible_devices": "0,1"}),
    (1, "`torch_autocast`, switched off", {"torch_autocast": {"enabled": False}, "bf16": {"enabled": True}}),
    (1, "layer dropping", {"prescale_gradients": True, "optimizer": UNCORRECTED, "progressive_layer_drop": {
        "enabled": True, "theta": 0.5, "gamma": 0.001}}),
    (1, "`quantize_training`", {"fp16": {"enabled": True, "initial_scale_power": 16}, "quantize_training": {
        "enabled": True, "quantizer_kernel": True, "quantize_groups": 8, "quantize_bits": {"target_bits": 8}}}),
    (1, "`aio.use_gds`", {"aio": {"use_gds": True}, "zero_optimization": {**STAGE_3, **ON_HOST}}),
    (1, "compression, all of it switched off", {"prescale_gradients": True, "compression_training": {
        "sparse_pruning": {"shared_parameters": {"enabled": False, "method": "l1"}},
        "layer_reduction": {"enabled": False, "keep_number_layer": 5}, "weight_quantization": {
            "shared_parameters": {"enabled": False, "quantize_groups": 64, "schedule_offset": 0}, "different_groups": {
                "wq1": {"params": {"start_bits": 1, "target_bits": 1, "quantization_period": 0},
                        "modules": ["attn.c_attn", "mlp.c_fc"]}}}}}),
]


def test_every_published_kind_that_the_page_counts_is_accepted() -> None:
    for _, asks_for, source in KINDS:
        assert build_ds_config({"train_batch_size": 8, **source}), asks_for
    page = PAGE.read_text()
    assert f"{FILES} different files of" in page and f"; {sum(files for files, *_ in KINDS)} are accepted" in page
