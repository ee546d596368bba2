"""Help texts of the command line, the argument parser of all commands, and answers to flags of other programs.

Flags of other programs with the same meaning are aliases, declared with their field. The others are accepted where they
change nothing, or refused with the flag to use instead; only exact names are answered.
"""

from __future__ import annotations

import argparse
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from typing import Any, Literal

from data.cli import StrictArgumentParser, command_name
from megatron.config.model_config import PRESETS
from megatron.config.schema import flag_name, plain_type, setting_of
from megatron.config.tree import SECTIONS
from megatron.errors import ConfigError

_ON = ("", "True", "true")
_MODEL = "leave it out: the model is GPT-2, with biases and tied embeddings"
_PIPELINE = "there is no pipeline parallelism; use --model-parallel-size and --zero-stage"
_SEQUENCE = "sequences are not split over ranks; use --checkpoint-activations or --zero-stage to save memory"
_KERNELS = "torch chooses the kernels, and --compile fuses the rest"
_RANKS = "gpus num-gpus nproc-per-node world-size"


def _by_name(rows: Mapping[str, str | tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Split keys with several names; a plain text accepts no value."""
    return {name: (row,) if isinstance(row, str) else row for names, row in rows.items() for name in names.split()}


# flags without dashes, in lower case -> what to use instead, and the values that are accepted without effect: "" is a
# switch, "*" any value. These have an effect in the other program, so that an accepted value prints a note:
NOTED_FLAGS = _by_name({
    "split-transformers": (
        "a block is gathered as a whole; use --memory-centric-tiled-linear for layers that are too large", *_ON),
    "scattered-embeddings": ("use --partition-activations to split activations over tensor parallel ranks", *_ON),
    "attention-backend transformer-impl": (_KERNELS, "*"),
    "use-flash-attn no-masked-softmax-fusion no-bias-gelu-fusion no-bias-dropout-fusion no-persist-layer-norm "
    "no-gradient-accumulation-fusion attention-softmax-in-fp32": (_KERNELS, *_ON),
    "cache-dir": ("tokenized text is kept in --data-cache-path", "*"),
    "ckpt-format": ("there is one format, which any number of ranks loads", "torch_dist")})
FOREIGN_FLAGS = NOTED_FLAGS | _by_name({
    # precision and devices
    "dtype precision mixed-precision": ("use --bf16 or --fp16; fp32 is the default", "float32", "fp32", "no"),
    "device use-cpu no-cuda": "leave it out: GPUs are used if there are any; CUDA_VISIBLE_DEVICES= trains on the CPU",
    _RANKS: "start one process per GPU: python -m megatron.launch --nproc-per-node N pretrain_gpt2.py ...",
    # length and batches
    "epochs num-epochs num-train-epochs": "use --train-iters STEPS; the data is repeated as often as that needs",
    "gradient-accumulation-steps": (
        "use --global-batch-size, which is --batch-size x data parallel size x accumulation", "1"),
    "train-samples lr-decay-samples lr-warmup-samples": "lengths are counted in optimizer steps: use --train-iters, "
    "--lr-decay-iters, --lr-warmup-iters",
    "per-device-eval-batch-size": "leave it out: evaluation uses --batch-size",
    # learning rate and optimizer
    "lr-scheduler-type lr-scheduler lr-schedule": "use --lr-decay-style constant, linear, cosine, inverse-square-root "
    "or WSD",
    "decay-lr": ("use --lr-decay-style; constant does not decay", *_ON),
    "weight-decay-incr-style start-weight-decay end-weight-decay": (
        "weight decay is constant: use --weight-decay", "constant"),
    "optim": ("use --optimizer, for instance adamw", "adamw_torch", "adamw_torch_fused"),
    # model
    "dropout": "use --attention-dropout and --hidden-dropout",
    "bias": ("leave it out: layers have biases, as in GPT-2", *_ON),
    "model model-name-or-path config-name": "use --load-hf FOLDER for weights, or --preset for a shape; nothing is "
    "downloaded",
    "tokenizer-name tokenizer-model": "use --tokenizer-type, and --tokenizer-path for its file",
    "init-from": ("use --load FOLDER to resume, or --load-hf FOLDER for GPT-2's weights", "scratch"),
    "swiglu": "use --activation swiglu",
    "squared-relu": "use --activation squared_relu",
    "use-rotary-position-embeddings": "use --position-embedding-type rope",
    "rotary-percent": ("leave it out: rope turns whole heads", "1.0"),
    "group-query-attention": "leave it out: --num-query-groups N is enough",
    "disable-bias-linear kv-channels untie-embeddings-and-output-weights": _MODEL,
    "model-type": (_MODEL, "gpt2"),
    # parallelism and memory
    "ddp-impl": ("leave it out: gradients are summed as --zero-stage says", "local", "torch"),
    "pipeline-model-parallel-size": (_PIPELINE, "1"),
    "num-layers-per-virtual-pipeline-stage": _PIPELINE,
    "context-parallel-size": (_SEQUENCE, "1"),
    "expert-model-parallel-size num-experts": ("there are no experts in this model", "1"),
    "use-torch-fsdp2 fsdp": "use --zero-stage 3",
    "accumulate-allreduce-grads-in-fp32": "leave it out: sums over micro-batches are fp32; --fp32-allreduce also "
    "reduces over ranks in fp32",
    "recompute-activations": "use --checkpoint-activations --recompute-granularity selective",
    "recompute-method recompute-num-layers": "use --checkpoint-activations, with --checkpoint-num-layers N for longer "
    "chunks",
    "cpu-offload offload zero-cpu-offload fsdp-cpu-offload": "use --offload-optimizer-device cpu, and "
    "--offload-param-device cpu at stage 3",
    "offload-optimizer": "use --offload-optimizer-device cpu or nvme",
    "offload-param offload-params cpu-offload-param cpu-offload-params": "use --offload-param-device cpu or nvme, at "
    "--zero-stage 3",
    "remote-device": ("use --offload-param-device cpu or nvme", "none"),  # another value goes to that flag
    "nvme-path": "use --offload-optimizer-nvme-path, and --offload-param-nvme-path for the parameters",
    "cpu-torch-adam use-torch-optimizer-for-cpu-offload": ("the same optimizer runs on every device", *_ON),
    "overlap-cpu-optimizer-d2h-h2d": ("copies always run beside the update", *_ON),
    "cpu-offload-use-pin-memory pin-cpu-grads pin-cpu-params": (
        "use --offload-optimizer-pin-memory, which is on by default", *_ON),
    "no-pin-cpu-grads no-pin-cpu-params": "use --no-offload-optimizer-pin-memory",
    "distributed-timeout-minutes": "use --distributed-timeout-seconds",
    # kernels
    "use-mcore-models use-cpu-initialization": ("there is one model; its weights start the same anywhere", *_ON),
    # data, checkpoints, logs
    "data dataset dataset-name": "use --train-data hf:NAME, or files of your own",
    "dataloader-type": ("leave it out: each epoch is shuffled by --seed", "single", "cyclic"),
    "data-impl": ("leave it out: corpora are always read where they are", "mmap"),
    "out-dir output-dir": "use --save FOLDER, and --load FOLDER to resume from it",
    "overwrite-output-dir": "leave it out: without --load a run starts from iteration 0",
    "resume resume-from-checkpoint": "use --load FOLDER",
    "use-checkpoint-args": "give the flags of the model: they are compared with those of the checkpoint",
    "save-strategy always-save-checkpoint": "use --save-interval STEPS",
    "evaluation-strategy eval-strategy do-eval": "use --eval-interval STEPS; 0 turns evaluation off",
    "do-train": ("leave it out: the program trains, unless --skip-train is given", *_ON),
    "logging-strategy": "use --log-interval STEPS",
    "report-to": ("use --metrics-file FILE, --tensorboard-dir FOLDER or --wandb-project NAME", "none"),
    "wandb wandb-log": "use --wandb-project NAME",
    "wandb-run-name wandb-exp-name run-name": "set WANDB_NAME in the environment, beside --wandb-project",
    "log-num-zeros-in-grad": "leave it out: zeros are not counted; the gradient norm is always logged",
    "exit-signal-handler log-throughput no-async-tensor-model-parallel-allreduce no-query-key-layer-scaling":
        ("leave it out: what it asks for always happens", *_ON),
    "tensorboard-log-interval": ("leave it out: every step is written", "1")})
PLANNER_FLAGS = FOREIGN_FLAGS | _by_name({_RANKS: "use --ranks N, the ranks of the whole run"})  # and the tuner's

WIDTH, COLUMN = 80, 30

EXAMPLES = """\
Pretrain a GPT-2 with tensor and ZeRO data parallelism. A trial without data, a
run on two GPUs:

  {program} --preset tiny --mock-data --train-iters 50
  {launch} \\
      --preset 124M --bf16 --zero-stage 2 --train-data corpus.jsonl \\
      --save runs/gpt2 --load runs/gpt2
"""
COMMON_FLAGS = {
    "--config FILE": "YAML or TOML file with flags of the run, such as `lr: 6e-4` (configs/); flags that are given "
    "win",
    "--preset NAME": f"model shape: {', '.join(PRESETS)}; other flags win",
    "--deepspeed-config FILE": "DeepSpeed's JSON file (docs/ds_config.md); flags that are given must agree with it"}
RARE_FLAGS = {
    "--print-config FORMAT": "print every setting of this run as a file for --config, and leave; one of yaml, toml",
    "--dry-run": "print the plan of the run (memory, traffic, what is in its way) and leave; takes the options of "
    "`python -m megatron.plan` as well",
    "--[no-]cpu-optimizer": "accepted for old scripts: --offload-optimizer-device cpu, unless the JSON file says nvme "
    "[also --optimizer-cpu-offload]",
    "--[no-]deepspeed": "accepted for old scripts: there is one engine"}


def command_parser(module: str, description: str, examples: str = "", **more: Any) -> StrictArgumentParser:
    """The parser of `python -m megatron.NAME`, its module form; help and examples show the command as typed."""
    program = command_name(module)
    return StrictArgumentParser(program, description.replace(module, program),
                                epilog=examples.replace(module, program), usage_error=ConfigError,
                                formatter_class=argparse.RawDescriptionHelpFormatter, **more)


def require_positive(options: argparse.Namespace, *names: str) -> None:
    """Refuse numbers below 1, or floats that are not above 0, among the options of these names."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            least = "1 or more" if isinstance(value, int) else "more than 0"
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}: expected {least}")


def help_text(*, short: bool) -> str:
    """Usage and examples, as typed in a clone or for an installed package, then every flag by topic; `short`: those of
    a first run."""
    program = command_name("python pretrain_gpt2.py")
    launch = ("gpt2-launch --nproc-per-node 2 -m pretrain_gpt2" if program == "gpt2-train" else
              "python -m megatron.launch --nproc-per-node 2 pretrain_gpt2.py")
    lines = [f"usage: {program} [FLAGS]", "", EXAMPLES.format(program=program, launch=launch)]
    if not short:
        lines += ["Dashes and underscores are the same in flag names. --[no-]NAME is a switch.", ""]
    for flag, text in {**COMMON_FLAGS, **({} if short else RARE_FLAGS)}.items():
        lines += _help_entry(flag, text)
    for name, section in SECTIONS.items():
        if not short:
            lines += ["", *textwrap.wrap(f"{name}: {' '.join((section.__doc__ or '').split())}", WIDTH), ""]
        for item, hint in fields_with_types(section):
            if setting_of(item).common or not short:
                lines += _field_entry(item, hint, short)
    if short:
        lines += ["", "--help-all lists every flag; README.md and docs/ are the guide."]
    return "\n".join(lines)


def fields_with_types(section: type) -> Iterator[tuple[Field[Any], Any]]:
    """Each field of a section and its type without `| None`."""
    hints = typing.get_type_hints(section)
    return ((item, plain_type(hints[item.name])[0]) for item in fields(section))


def _field_entry(item: Field[Any], hint: Any, short: bool) -> list[str]:
    """The flag with the placeholder of its value, and its text; `short` leaves out how a switch is turned off, the
    choices and the aliases."""
    flag, text, kind = flag_name(item.name), setting_of(item).help, typing.get_origin(hint)
    if hint is bool:
        flag = flag if item.name.startswith("no_") or short else f"--[no-]{flag[2:]}"
    elif hint in (int, float):
        flag += " N" if hint is int else " X"
    else:
        flag += f" {setting_of(item).metavar or ('NAME' if kind is Literal else 'PATH')}{' ...' * (kind is tuple)}"
    text += f"; one of {', '.join(typing.get_args(hint))}" if kind is Literal and not short else ""
    if item.default not in (None, False, ()) and "(default" not in text:
        text += f" (default: {'on' if item.default is True else item.default})"
    aliases = [] if short else [f"--{alias}" for alias in setting_of(item).aliases if "contigious" not in alias]
    return _help_entry(flag, text + (f" [also {', '.join(aliases)}]" if aliases else ""))


def _help_entry(flag: str, text: str) -> list[str]:
    """A flag and its text in two columns."""
    lines = textwrap.wrap(text, WIDTH - COLUMN, break_on_hyphens=False)
    if len(flag) + 4 > COLUMN:
        return [f"  {flag}", *(" " * COLUMN + line for line in lines)]
    return [f"  {flag}".ljust(COLUMN) + lines[0], *(" " * COLUMN + line for line in lines[1:])]
