"""FLOPs per token of the model and peak FLOP/s of devices, for TFLOP/s and MFU. No torch."""

from __future__ import annotations

from megatron.config.tree import ModelConfig

PEAK_TFLOPS = {
    "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "H800": 989.0, "B200": 2250.0, "GH200": 989.0, "A100": 312.0,
    "A800": 312.0, "A40": 149.7, "A30": 165.0, "A10": 125.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0, "V100": 125.0,
    "T4": 65.0, "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 4080": 97.5, "RTX 3090": 71.0, "MI300X": 1307.0,
    "MI250X": 383.0,
}
"""Dense 16-bit peaks in TFLOP/s from vendors' data sheets, by a substring of the device name; `--peak-tflops`
overrides."""

DEVICES_WITHOUT_TF32 = ("V100", "T4", "MI250X")
"""All other devices run TF32 at half the 16-bit peak."""

FP32_TFLOPS = {
    "H200": 66.9, "H100 PCIe": 51.2, "H100": 66.9, "H800": 66.9, "B200": 80.0, "GH200": 66.9, "A100": 19.5,
    "A800": 19.5, "A40": 37.4, "A30": 10.3, "A10": 31.2, "L40S": 91.6, "L40": 90.5, "L4": 30.3, "V100": 15.7, "T4": 8.1,
    "RTX 5090": 104.8, "RTX 4090": 82.6, "RTX 4080": 48.7, "RTX 3090": 35.6, "MI300X": 163.4, "MI250X": 47.9,
}
"""Peaks of fp32 without tensor cores, in TFLOP/s, from the same data sheets."""


def flops_per_token(model: ModelConfig, seq_length: int, blocks: float | None = None) -> float:
    """FLOPs of forward and backward: 6 per parameter plus attention over the sequence. `blocks` counts the blocks that
    run; None: all."""
    ran = model.num_layers if blocks is None else blocks
    parameters = model.parameters() - (model.num_layers - ran) * model.block_parameters
    return 6.0 * parameters + 12.0 * ran * model.hidden_size * seq_length


def peak_tflops(device_name: str, arithmetic: str = "16-bit") -> float | None:
    """Peak TFLOP/s of a device in that arithmetic (16-bit, TF32 or fp32); None if unknown (a CPU, for example): no MFU
    then."""
    matches = [key for key in PEAK_TFLOPS if key in device_name]
    if not matches:
        return None
    key = max(matches, key=len)
    if arithmetic == "16-bit":
        return PEAK_TFLOPS[key]
    return PEAK_TFLOPS[key] / 2 if arithmetic == "TF32" and key not in DEVICES_WITHOUT_TF32 else FP32_TFLOPS[key]
