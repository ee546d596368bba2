"""Flags of other programs that people type here, and the answer that names ours.

Names whose meaning is the same are aliases, declared with their field; here are those that need a word. A few are
accepted with the value that means what happens anyway (`--pipeline-model-parallel-size 1`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.config.save import NOT_SIGNED


@dataclass(frozen=True)
class Foreign:
    """What to type instead."""

    answer: str
    harmless: tuple[str, ...] = ()
    """Values that are accepted and change nothing; "" is a switch."""
    noted: bool = False
    """An accepted one has an effect elsewhere, and is answered with a note."""
    means: str = ""
    """The flag that takes the other values."""


_NO_PIPELINE = "there is no pipeline parallelism; use --model-parallel-size and --zero-stage"
_NO_SEQUENCE = "sequences are not split over ranks; use --checkpoint-activations or --zero-stage to save memory"
_NO_EXPERTS = "there are no experts in this model"
_SHAPE = "the model is GPT-2: learned positions, LayerNorm, GELU and tied embeddings"
_WARMUP = "give --warmup, the share of --lr-decay-iters (default: --train-iters) spent warming up"
_SAMPLES = "lengths are counted in optimizer steps: "
_RECOMPUTE = "use --checkpoint-activations, with --checkpoint-num-layers N for longer chunks"
_MONITOR = "use --metrics-file FILE, --tensorboard-dir FOLDER or --wandb-project NAME"
_SAVE = "use --save FOLDER, and --load FOLDER to resume from it"
_LEAVE_OUT = "leave it out: "
_RANKS = ("gpus", "num-gpus", "nproc-per-node", "world-size")
_ON = ("", "True", "true")
_BLOCKS = "a block is gathered as a whole; use --memory-centric-tiled-linear for layers that are too large"
_ONE_RULE = "the same optimizer runs on every device"
_OFFLOAD = "use --offload-optimizer-device cpu, and --offload-param-device cpu at stage 3"
_UNLOCKED = "use --no-offload-optimizer-pin-memory"
_FUSED = "leave it out: kernels are chosen by torch, and --compile fuses the rest"

FOREIGN: dict[str, Foreign] = {
    # precision and devices
    "dtype": Foreign("use --bf16 or --fp16; fp32 is the default", ("float32", "fp32")),
    "mixed-precision": Foreign("use --bf16 or --fp16", ("no",)),
    "precision": Foreign("use --bf16 or --fp16; fp32 is the default"),
    "device": Foreign("leave it out: GPUs are used where there are any; CUDA_VISIBLE_DEVICES= trains on the CPU"),
    "use-cpu": Foreign("leave it out: CUDA_VISIBLE_DEVICES= trains on the CPU"),
    "no-cuda": Foreign("leave it out: CUDA_VISIBLE_DEVICES= trains on the CPU"),
    **dict.fromkeys(_RANKS, Foreign(
        "start one process per GPU: python -m megatron.launch --nproc-per-node N pretrain_gpt2.py ...")),
    # length and batches
    "epochs": Foreign("use --train-iters STEPS; the data is repeated as often as that needs"),
    "num-epochs": Foreign("use --train-iters STEPS; the data is repeated as often as that needs"),
    "num-train-epochs": Foreign("use --train-iters STEPS; the data is repeated as often as that needs"),
    "gradient-accumulation-steps": Foreign(
        "use --global-batch-size, which is --batch-size x data parallel size x accumulation", ("1",)),
    "train-samples": Foreign(_SAMPLES + "use --train-iters"),
    "lr-decay-samples": Foreign(_SAMPLES + "use --lr-decay-iters"),
    "lr-warmup-samples": Foreign(_WARMUP),
    "rampup-batch-size": Foreign("the batch size is constant: use --global-batch-size"),
    "per-device-eval-batch-size": Foreign("leave it out: evaluation uses --batch-size"),
    # learning rate and optimizer
    "lr-warmup-iters": Foreign(_WARMUP),
    "warmup-iters": Foreign(_WARMUP),
    "warmup-steps": Foreign(_WARMUP),
    **dict.fromkeys(("lr-scheduler-type", "lr-scheduler", "lr-schedule"), Foreign(
        "use --lr-decay-style constant, linear, cosine or inverse-square-root")),
    "decay-lr": Foreign("use --lr-decay-style; constant does not decay", ("True", "true")),
    "optim": Foreign("use --optimizer, for instance adamw", ("adamw_torch", "adamw_torch_fused")),
    "lr-wsd-decay-style": Foreign("use --lr-decay-style"),
    # model
    "dropout": Foreign("use --attention-dropout and --hidden-dropout"),
    "bias": Foreign(_LEAVE_OUT + "layers have biases, as in GPT-2", ("True", "true")),
    "model": Foreign("use --preset, or --load-hf FOLDER"),
    "model-name-or-path": Foreign("use --load-hf FOLDER for weights, or --preset for a shape; nothing is downloaded"),
    "model-type": Foreign(_LEAVE_OUT + _SHAPE, ("gpt2",)),
    "config-name": Foreign("use --preset, or --load-hf FOLDER"),
    "tokenizer-name": Foreign("use --tokenizer-type, and --tokenizer-path for its file"),
    "tokenizer-model": Foreign("use --tokenizer-path FILE"),
    "init-from": Foreign("use --load FOLDER to resume, or --load-hf FOLDER for GPT-2's weights", ("scratch",)),
    **dict.fromkeys(("swiglu", "squared-relu", "use-rotary-position-embeddings", "rotary-percent", "rotary-base",
                     "untie-embeddings-and-output-weights", "disable-bias-linear", "group-query-attention",
                     "num-query-groups", "kv-channels", "qk-layernorm"), Foreign(_LEAVE_OUT + _SHAPE)),
    "normalization": Foreign(_LEAVE_OUT + _SHAPE, ("LayerNorm",)),
    "position-embedding-type": Foreign(_LEAVE_OUT + _SHAPE, ("learned_absolute",)),
    # parallelism and memory
    "pipeline-model-parallel-size": Foreign(_NO_PIPELINE, ("1",)),
    "num-layers-per-virtual-pipeline-stage": Foreign(_NO_PIPELINE),
    "context-parallel-size": Foreign(_NO_SEQUENCE, ("1",)),
    "sequence-parallel": Foreign(_NO_SEQUENCE),
    "expert-model-parallel-size": Foreign(_NO_EXPERTS, ("1",)),
    "num-experts": Foreign(_NO_EXPERTS),
    "use-distributed-optimizer": Foreign("use --zero-stage 1"),
    "use-torch-fsdp2": Foreign("use --zero-stage 3"),
    "fsdp": Foreign("use --zero-stage 3"),
    "overlap-grad-reduce": Foreign("use --overlap-comm, which is on by default"),
    "overlap-param-gather": Foreign("use --overlap-comm, which is on by default"),
    "accumulate-allreduce-grads-in-fp32": Foreign(
        "leave it out: sums over micro-batches are fp32; --fp32-allreduce also reduces over ranks in fp32"),
    "recompute-activations": Foreign(_RECOMPUTE),
    "recompute-granularity": Foreign(_RECOMPUTE),
    "recompute-method": Foreign(_RECOMPUTE),
    "recompute-num-layers": Foreign("use --checkpoint-activations with --checkpoint-num-layers"),
    "cpu-offload": Foreign(_OFFLOAD),
    "offload": Foreign(_OFFLOAD),
    "zero-cpu-offload": Foreign(_OFFLOAD),
    "fsdp-cpu-offload": Foreign(_OFFLOAD),
    "offload-optimizer": Foreign("use --offload-optimizer-device cpu or nvme"),
    **dict.fromkeys(("offload-param", "offload-params", "cpu-offload-param", "cpu-offload-params"), Foreign(
        "use --offload-param-device cpu or nvme, at --zero-stage 3")),
    "cpu-offload-use-pin-memory": Foreign("use --offload-optimizer-pin-memory, which is on by default", _ON),
    "nvme-path": Foreign("use --offload-optimizer-nvme-path, and --offload-param-nvme-path for the parameters"),
    "remote-device": Foreign("use --offload-param-device cpu or nvme", ("none",), means="--offload-param-device"),
    "cpu-torch-adam": Foreign(_LEAVE_OUT + _ONE_RULE, _ON),
    "use-torch-optimizer-for-cpu-offload": Foreign(_LEAVE_OUT + _ONE_RULE, _ON),
    "overlap-cpu-optimizer-d2h-h2d": Foreign(_LEAVE_OUT + "copies always run beside the update", _ON),
    "pin-cpu-grads": Foreign(_LEAVE_OUT + "use --offload-optimizer-pin-memory, which is on by default", _ON),
    "pin-cpu-params": Foreign(_LEAVE_OUT + "use --offload-optimizer-pin-memory, which is on by default", _ON),
    "no-pin-cpu-grads": Foreign(_UNLOCKED),
    "no-pin-cpu-params": Foreign(_UNLOCKED),
    "split-transformers": Foreign(_BLOCKS, _ON, noted=True),
    "scattered-embeddings": Foreign("use --partition-activations to split activations over tensor parallel ranks", _ON,
                                    noted=True),
    "distributed-timeout-minutes": Foreign("use --distributed-timeout-seconds"),
    **dict.fromkeys(("use-flash-attn", "attention-backend", "no-masked-softmax-fusion", "no-bias-gelu-fusion",
                     "no-bias-dropout-fusion", "no-gradient-accumulation-fusion", "transformer-impl",
                     "use-mcore-models", "attention-softmax-in-fp32", "use-cpu-initialization", "no-persist-layer-norm"
                     ), Foreign(_FUSED)),
    # data, checkpoints, logs
    "dataset": Foreign("use --train-data"),
    "dataset-name": Foreign("use --train-data with files of your own; nothing is downloaded"),
    "data-impl": Foreign(_LEAVE_OUT + "corpora are always read where they are", ("mmap",)),
    "out-dir": Foreign(_SAVE),
    "output-dir": Foreign(_SAVE),
    "overwrite-output-dir": Foreign(_LEAVE_OUT + "without --load a run starts anew"),
    "resume-from-checkpoint": Foreign("use --load FOLDER"),
    "checkpoint-key": Foreign(NOT_SIGNED),
    "ckpt-format": Foreign(_LEAVE_OUT + "there is one format", ("torch_dist",)),
    "save-strategy": Foreign("use --save-interval STEPS"),
    "evaluation-strategy": Foreign("use --eval-interval STEPS; 0 turns evaluation off"),
    "eval-strategy": Foreign("use --eval-interval STEPS; 0 turns evaluation off"),
    "do-train": Foreign(_LEAVE_OUT + "the program trains", ("True", "true")),
    "do-eval": Foreign("use --eval-interval STEPS"),
    "eval-only": Foreign("the program evaluates every --eval-interval steps and at the end", ("False", "false")),
    "always-save-checkpoint": Foreign("use --save-interval STEPS"),
    "logging-strategy": Foreign("use --log-interval STEPS"),
    "report-to": Foreign(_MONITOR, ("none",)),
    "wandb-log": Foreign("use --wandb-project NAME"),
    **dict.fromkeys(("wandb-run-name", "wandb-exp-name", "run-name"), Foreign(
        "set WANDB_NAME in the environment, beside --wandb-project")),
    "log-throughput": Foreign(_LEAVE_OUT + "throughput is always logged"),
    "tensorboard-log-interval": Foreign(_LEAVE_OUT + "every step is written"),
}
"""Flag without dashes -> what to type instead."""

OF_PLANNER = FOREIGN | dict.fromkeys(_RANKS, Foreign("use --ranks N, the GPUs of the whole run; nothing is started"))
"""The same for `megatron.plan`."""


def answers(words: Sequence[str], table: Mapping[str, Foreign] = FOREIGN) -> tuple[list[str], list[str], list[str]]:
    """The words without foreign flags and their values, one sentence for each that cannot be ignored, and notes of
    those that are ignored."""
    kept, sentences, notes, index = [], [], [], 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        known = table.get(name[2:]) if name.startswith("--") else None
        index += 1
        if known is None:
            kept.append(words[index - 1])
            continue
        if not equals:
            following = words[index] if index < len(words) else "--"
            value = "" if following.startswith("--") else following
            index += bool(value)
        if value not in known.harmless and known.means and value:
            kept += [known.means, value]
        elif value not in known.harmless:
            sentences.append(f"{name}{f' {value}' if value else ''} is not a flag here: {known.answer}")
        elif known.noted:
            notes.append(f" note: {name} has no effect: {known.answer}")
    return kept, sentences, notes
