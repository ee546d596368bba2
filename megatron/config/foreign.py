"""Flags of other programs that people type here.

Names whose meaning is the same are aliases, declared with their field. Here are flags that change nothing, and are
accepted, and well-known ones that have no counterpart of the same meaning: each is answered with what to do instead.
Only the exact name, in any case, is answered: a guess would mislead.
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
    """Values that are accepted and change nothing; "" is a switch, "*" any value."""
    noted: bool = False
    """An accepted one has an effect elsewhere, and is answered with a note."""
    is_alias: bool = False
    """Other values are those of a field that declares the name."""


_ON = ("", "True", "true")
_MODEL = "leave it out: the model is GPT-2: learned positions, LayerNorm, GELU and tied embeddings"
_PIPELINE = "there is no pipeline parallelism; use --model-parallel-size and --zero-stage"
_SEQUENCE = "sequences are not split over ranks; use --checkpoint-activations or --zero-stage to save memory"
_KERNELS = "torch chooses the kernels, and --compile fuses the rest"
_RANKS = "gpus num-gpus nproc-per-node world-size"


def _table(rows: Mapping[str, Foreign | str]) -> dict[str, Foreign]:
    """Names, of which several may have one answer -> the answer. A text refuses every value."""
    return {name: row if isinstance(row, Foreign) else Foreign(row) for names, row in rows.items()
            for name in names.split()}


FOREIGN = _table({
    # precision and devices
    "dtype precision mixed-precision": Foreign("use --bf16 or --fp16; fp32 is the default", ("float32", "fp32", "no")),
    "device use-cpu no-cuda": "leave it out: GPUs are used if there are any; CUDA_VISIBLE_DEVICES= trains on the CPU",
    _RANKS: "start one process per GPU: python -m megatron.launch --nproc-per-node N pretrain_gpt2.py ...",
    # length and batches
    "epochs num-epochs num-train-epochs": "use --train-iters STEPS; the data is repeated as often as that needs",
    "gradient-accumulation-steps": Foreign(
        "use --global-batch-size, which is --batch-size x data parallel size x accumulation", ("1",)),
    "train-samples lr-decay-samples lr-warmup-samples":
        "lengths are counted in optimizer steps: use --train-iters, --lr-decay-iters, --lr-warmup-iters",
    "rampup-batch-size": "the batch size is constant: use --global-batch-size",
    "per-device-eval-batch-size": "leave it out: evaluation uses --batch-size",
    # learning rate and optimizer
    "lr-scheduler-type lr-scheduler lr-schedule":
        "use --lr-decay-style constant, linear, cosine, inverse-square-root or WSD",
    "decay-lr": Foreign("use --lr-decay-style; constant does not decay", _ON),
    "weight-decay-incr-style start-weight-decay end-weight-decay": Foreign(
        "weight decay is constant: use --weight-decay", ("constant",)),
    "optim": Foreign("use --optimizer, for instance adamw", ("adamw_torch", "adamw_torch_fused")),
    # model
    "dropout": "use --attention-dropout and --hidden-dropout",
    "bias": Foreign("leave it out: layers have biases, as in GPT-2", _ON),
    "model model-name-or-path config-name":
        "use --load-hf FOLDER for weights, or --preset for a shape; nothing is downloaded",
    "tokenizer-name tokenizer-model": "use --tokenizer-type, and --tokenizer-path for its file",
    "init-from": Foreign("use --load FOLDER to resume, or --load-hf FOLDER for GPT-2's weights", ("scratch",)),
    "swiglu squared-relu use-rotary-position-embeddings rotary-percent rotary-base disable-bias-linear kv-channels "
    "untie-embeddings-and-output-weights group-query-attention num-query-groups qk-layernorm": _MODEL,
    "model-type": Foreign(_MODEL, ("gpt2",)),
    "normalization": Foreign(_MODEL, ("LayerNorm",)),
    "position-embedding-type": Foreign(_MODEL, ("learned_absolute",)),
    # parallelism and memory
    "ddp-impl": Foreign("leave it out: gradients are summed as --zero-stage says", ("local", "torch")),
    "pipeline-model-parallel-size": Foreign(_PIPELINE, ("1",)),
    "num-layers-per-virtual-pipeline-stage": _PIPELINE,
    "context-parallel-size": Foreign(_SEQUENCE, ("1",)),
    "sequence-parallel": _SEQUENCE,
    "expert-model-parallel-size num-experts": Foreign("there are no experts in this model", ("1",)),
    "use-torch-fsdp2 fsdp": "use --zero-stage 3",
    "accumulate-allreduce-grads-in-fp32":
        "leave it out: sums over micro-batches are fp32; --fp32-allreduce also reduces over ranks in fp32",
    "recompute-activations recompute-granularity recompute-method recompute-num-layers":
        "use --checkpoint-activations, with --checkpoint-num-layers N for longer chunks",
    "cpu-offload offload zero-cpu-offload fsdp-cpu-offload":
        "use --offload-optimizer-device cpu, and --offload-param-device cpu at stage 3",
    "offload-optimizer": "use --offload-optimizer-device cpu or nvme",
    "offload-param offload-params cpu-offload-param cpu-offload-params":
        "use --offload-param-device cpu or nvme, at --zero-stage 3",
    "remote-device": Foreign("use --offload-param-device cpu or nvme", ("none",), is_alias=True),
    "nvme-path": "use --offload-optimizer-nvme-path, and --offload-param-nvme-path for the parameters",
    "cpu-torch-adam use-torch-optimizer-for-cpu-offload": Foreign("the same optimizer runs on every device", _ON),
    "overlap-cpu-optimizer-d2h-h2d": Foreign("copies always run beside the update", _ON),
    "cpu-offload-use-pin-memory pin-cpu-grads pin-cpu-params": Foreign(
        "use --offload-optimizer-pin-memory, which is on by default", _ON),
    "no-pin-cpu-grads no-pin-cpu-params": "use --no-offload-optimizer-pin-memory",
    "split-transformers": Foreign("a block is gathered as a whole; use --memory-centric-tiled-linear for layers that "
                                  "are too large", _ON, noted=True),
    "scattered-embeddings": Foreign("use --partition-activations to split activations over tensor parallel ranks", _ON,
                                    noted=True),
    "distributed-timeout-minutes": "use --distributed-timeout-seconds",
    # kernels
    "use-mcore-models use-cpu-initialization": Foreign("there is one model; its weights start the same anywhere", _ON),
    "attention-backend transformer-impl": Foreign(_KERNELS, ("*",), noted=True),
    "use-flash-attn no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-persist-layer-norm "
    "no-gradient-accumulation-fusion attention-softmax-in-fp32": Foreign(_KERNELS, _ON, noted=True),
    # data, checkpoints, logs
    "cache-dir": Foreign("nothing is downloaded; sample indices are kept in --data-cache-path", ("*",), noted=True),
    "dataset dataset-name": "use --train-data with files of your own; nothing is downloaded",
    "dataloader-type": Foreign("leave it out: each epoch is shuffled by --seed", ("single", "cyclic")),
    "data-impl": Foreign("leave it out: corpora are always read where they are", ("mmap",)),
    "out-dir output-dir": "use --save FOLDER, and --load FOLDER to resume from it",
    "overwrite-output-dir": "leave it out: without --load a run starts from iteration 0",
    "resume-from-checkpoint": "use --load FOLDER",
    "checkpoint-key": NOT_SIGNED,
    "ckpt-format": Foreign("there is one format, which any number of ranks loads", ("torch_dist",), noted=True),
    "use-checkpoint-args": "give the flags of the model: they are compared with those of the checkpoint",
    "save-strategy always-save-checkpoint": "use --save-interval STEPS",
    "evaluation-strategy eval-strategy do-eval": "use --eval-interval STEPS; 0 turns evaluation off",
    "do-train": Foreign("leave it out: the program trains, unless --skip-train is given", _ON),
    "logging-strategy": "use --log-interval STEPS",
    "report-to": Foreign("use --metrics-file FILE, --tensorboard-dir FOLDER or --wandb-project NAME", ("none",)),
    "wandb-log": "use --wandb-project NAME",
    "wandb-run-name wandb-exp-name run-name": "set WANDB_NAME in the environment, beside --wandb-project",
    "log-num-zeros-in-grad": "leave it out: zeros are not counted; the gradient norm is always logged",
    "exit-signal-handler log-throughput no-async-tensor-model-parallel-allreduce no-query-key-layer-scaling": Foreign(
        "leave it out: what it asks for always happens", _ON),
    "tensorboard-log-interval": Foreign("leave it out: every step is written", ("1",)),
})
"""Flag without dashes, in lower case -> what to type instead."""

_OF_PLANNER = _table({_RANKS: "use --ranks N, the ranks of the whole run"})
"""The same where another command is to plan or to tune a run."""


def answers(words: Sequence[str], *, starts_ranks: bool = True) -> tuple[list[str], list[str], list[str]]:
    """The words without foreign flags and their values, one sentence for each that cannot be ignored, and notes of
    those that are ignored."""
    table = FOREIGN if starts_ranks else FOREIGN | _OF_PLANNER
    kept, sentences, notes, index = [], [], [], 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        known = table.get(name[2:].lower()) if name.startswith("--") else None
        index += 1
        if known is None:
            kept.append(words[index - 1])
            continue
        if not equals:
            following = words[index] if index < len(words) else "--"
            value = "" if following.startswith("--") else following
            index += bool(value)
        if value in known.harmless or value and "*" in known.harmless:
            notes += [f" note: {name} has no effect: {known.answer}"] if known.noted else []
        elif known.is_alias and value:
            kept += [name.lower(), value]
        else:
            sentences.append(f"{name}{f' {value}' if value else ''} is not a flag here: {known.answer}")
    return kept, sentences, notes
