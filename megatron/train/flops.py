"""FLOPs per token of the model and peak rates of devices, for TFLOP/s, MFU and predicted times."""

from __future__ import annotations

from megatron.config.tree import ModelConfig

# Peaks from vendors' data sheets, by a substring of the device name (`--peak-tflops` overrides): TFLOP/s in dense 16
# bits, and in fp32 without tensor cores; for `python -m megatron.plan --time`, GB/s of memory, and of the links to
# other GPUs in one direction.
GPUS: dict[str, tuple[float, ...]] = {
    "H200": (989.0, 66.9, 4800, 450), "H100 PCIe": (756.0, 51.2, 2000, 64), "H100": (989.0, 66.9, 3350, 450),
    "H800": (989.0, 66.9), "B200": (2250.0, 80.0, 8000, 900), "GH200": (989.0, 66.9), "A100": (312.0, 19.5, 2039, 300),
    "A800": (312.0, 19.5), "A40": (149.7, 37.4, 696, 64), "A30": (165.0, 10.3), "A10": (125.0, 31.2, 600, 32),
    "L40S": (362.0, 91.6, 864, 32), "L40": (181.0, 90.5), "L4": (121.0, 30.3, 300, 32), "V100": (125.0, 15.7, 900, 150),
    "T4": (65.0, 8.1, 320, 16), "RTX 5090": (209.5, 104.8), "RTX 4090": (165.2, 82.6, 1008, 32),
    "RTX 4080": (97.5, 48.7), "RTX 3090": (71.0, 35.6, 936, 32), "MI300X": (1307.0, 163.4), "MI250X": (383.0, 47.9)}

DEVICES_WITHOUT_TF32 = ("V100", "T4", "MI250X")  # all other devices run TF32 at half the 16-bit peak


def flops_per_token(model: ModelConfig, seq_length: int, blocks: float | None = None) -> float:
    """FLOPs of forward and backward: 6 per parameter plus attention over the sequence. `blocks` counts the blocks that
    run; None: all."""
    from megatron.model import count_parameters  # imports torch

    ran = model.num_layers if blocks is None else blocks
    parameters, block = count_parameters(model)
    return 6.0 * (parameters - (model.num_layers - ran) * block) + 12.0 * ran * model.hidden_size * seq_length


def peak_tflops(device_name: str, arithmetic: str = "16-bit") -> float | None:
    """Peak TFLOP/s of a device in that arithmetic (16-bit, TF32 or fp32); None if unknown (a CPU, for example): no MFU
    then."""
    key = max((key for key in GPUS if key in device_name), key=len, default="")
    if not key:
        return None
    half, full = GPUS[key][:2]
    if arithmetic == "16-bit":
        return half
    return half / 2 if arithmetic == "TF32" and key not in DEVICES_WITHOUT_TF32 else full
