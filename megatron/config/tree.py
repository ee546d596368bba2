"""The frozen configuration tree: what a run is, decided once, before anything heavy is imported.

Each section is a dataclass; each field is one command-line flag of the same name (`num_layers` is `--num-layers`),
and its help text stands beside it. A section checks itself in `__post_init__`; what needs the world size is checked
in `Config.check_world`. Not here: parsing (arguments.py), the JSON file's keys (ds_config.py), anything that opens a
file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from megatron.config.optimizers import OPTIMIZERS, Name, own_parameter
from megatron.errors import ConfigError


def flag(default: Any, help: str, *aliases: str, metavar: str = "PATH") -> Any:
    """A field that is also a flag; `aliases` are further spellings of it, `metavar` is what a list is a list of."""
    return field(default=default, metadata={"help": help, "aliases": aliases, "metavar": metavar})


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _require_range(section: Any, names: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Every named field that is set lies in [low, high] (or (low, high] with open_low), and is a number at all."""
    for name in names.split():
        value = getattr(section, name)
        if value is None:
            continue
        inside = (low < value if open_low else low <= value) and value <= high and math.isfinite(value)
        bounds = f"{'>' if open_low else '>='} {low:g}" + ("" if high == math.inf else f" and <= {high:g}")
        require(inside, f"{flag_name(name)} is {value}: expected a number {bounds}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the GPT-2; `--preset` fills it in, explicit flags win."""

    num_layers: int = flag(24, "transformer blocks")
    hidden_size: int = flag(1024, "width of the residual stream")
    num_attention_heads: int = flag(16, "attention heads; must divide the hidden size")
    intermediate_size: int | None = flag(None, "width of the MLP (default: 4 x hidden size)", "ffn-hidden-size")
    max_position_embeddings: int = flag(1024, "longest sequence the position table holds")
    vocab_size: int | None = flag(None, "tokens in the vocabulary, without padding (default: the tokenizer's)")
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this times the tensor parallel size"
    )
    attention_dropout: float = flag(0.1, "dropout on attention weights")
    hidden_dropout: float = flag(0.1, "dropout on embeddings and block outputs")
    layernorm_epsilon: float = flag(1e-5, "epsilon of every LayerNorm")
    init_method_std: float = flag(0.02, "standard deviation of the initial weights")
    memory_centric_tiled_linear: bool = flag(False, "cut each matrix of a block into tiles, layers of their own")
    tile_factor: int = flag(1, "a tile is about hidden size / this squared")

    def __post_init__(self) -> None:
        _require_range(self, "num_layers hidden_size num_attention_heads intermediate_size", 1)
        _require_range(self, "max_position_embeddings vocab_size make_vocab_size_divisible_by", 1)
        _require_range(self, "attention_dropout hidden_dropout", 0, 0.999)
        _require_range(self, "layernorm_epsilon init_method_std", 0, open_low=True)
        require(
            self.hidden_size % self.num_attention_heads == 0,
            f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}",
        )
        _require_range(self, "tile_factor", 1, self.hidden_size)

    @property
    def ffn_size(self) -> int:
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def tokens(self) -> int:
        """The vocabulary size once the tokenizer is known."""
        assert self.vocab_size is not None, "the vocabulary size is filled in from the tokenizer first"
        return self.vocab_size

    def parameters(self, vocab_size: int | None = None) -> int:
        """Exact parameter count (tied embeddings once), without vocabulary padding."""
        h, ffn = self.hidden_size, self.ffn_size
        block = (4 * h + 2 * h * ffn) + 4 * h * h + (5 * h + ffn)
        return (vocab_size or self.tokens) * h + self.max_position_embeddings * h + self.num_layers * block + 2 * h


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, cut how."""

    train_data: tuple[str, ...] = flag(
        (),
        "corpus prefix, .jsonl file, `webtext`, `default`, or weights and prefixes in turn",
        "data-path",
        "train-data-path",
    )
    valid_data: tuple[str, ...] = flag((), "validation corpus (default: the second part of --split)", "val-data-path")
    test_data: tuple[str, ...] = flag((), "test corpus (default: the third part of --split)", "test-data-path")
    split: str = flag("949,50,1", "train, validation and test shares of --train-data, by documents")
    seq_length: int | None = flag(None, "tokens in a sample (default: --max-position-embeddings)")
    tokenizer_type: str | None = flag(
        None, "GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer or CharacterLevelTokenizer"
    )
    vocab_file: str | None = flag(None, "GPT-2 encoder.json (default: the packaged one)")
    merge_file: str | None = flag(None, "GPT-2 vocab.bpe (default: the packaged one)")
    tokenizer_path: str | None = flag(None, "SentencePiece model or character vocabulary")
    mock_data: bool = flag(False, "random tokens instead of a corpus, for benchmarks")
    data_cache_path: str | None = flag(None, "folder for sample indices and tokenised .jsonl files")
    text_key: str = flag("text", "key of the text in .jsonl files", "json-key")
    num_workers: int = flag(2, "background readers; 0 reads in the training thread")
    lazy_loader: bool = flag(False, "accepted for old scripts: corpora are always memory-mapped")
    reset_position_ids: bool = flag(False, "count positions from the start of each document")
    reset_attention_mask: bool = flag(False, "attend only within a document")
    eod_mask_loss: bool = flag(False, "no loss on predicting what follows an end-of-document token")

    def __post_init__(self) -> None:
        _require_range(self, "num_workers", 0)
        _require_range(self, "seq_length", 1)
        require(
            not (self.mock_data and self.train_data),
            "--mock-data and --train-data exclude each other: give one of them",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks are arranged; the data parallel size is what remains of the world."""

    model_parallel_size: int = flag(1, "tensor parallel size", "tensor-model-parallel-size")
    distributed_backend: Literal["nccl", "gloo"] | None = flag(None, "default: nccl with GPUs, gloo without")
    distributed_timeout_seconds: float = flag(600.0, "longest wait for a peer in one collective")
    local_rank: int | None = flag(None, "accepted for old launchers; LOCAL_RANK in the environment is what counts")

    def __post_init__(self) -> None:
        _require_range(self, "model_parallel_size", 1)
        _require_range(self, "distributed_timeout_seconds", 0, open_low=True)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer; matrices and embeddings decay, biases and LayerNorms do not."""

    optimizer: Name = flag("adam", "adam and adamw are both AdamW")
    weight_decay: float = flag(0.01, "weight decay; decoupled from the gradient in adam, adamw and lion")
    adam_beta1: float = flag(0.9, "first moment of adam, adamw, lamb, nadam, radam and adamax")
    adam_beta2: float = flag(0.999, "second moment of the same")
    adam_eps: float = flag(1e-8, "epsilon of the same")
    adam_w_mode: bool = flag(True, "adam: decoupled weight decay (no: added to the gradient)")
    sgd_momentum: float = flag(0.9, "momentum of sgd")
    optimizer_params: tuple[str, ...] = flag(
        (), "further parameters of the optimizer, such as nesterov=true", metavar="NAME=VALUE")
    clip_grad: float = flag(1.0, "largest global gradient norm; 0 switches clipping off")

    def __post_init__(self) -> None:
        _require_range(self, "weight_decay clip_grad", 0)
        _require_range(self, "adam_beta1 adam_beta2 sgd_momentum", 0, 0.9999999)
        _require_range(self, "adam_eps", 0, open_low=True)
        require(self.optimizer in OPTIMIZERS, f"--optimizer is {self.optimizer}: expected {', '.join(OPTIMIZERS)}")
        require(self.adam_w_mode or self.optimizer != "adamw",
                "--no-adam-w-mode contradicts --optimizer adamw: give --optimizer adam")
        self._own_parameters()

    def hyper_parameters(self) -> dict[str, Any]:
        """What the optimizer takes, by the names of torch.optim, but for the learning rate."""
        takes = OPTIMIZERS[self.optimizer]
        named = {name: tuple(getattr(self, field) for field in fields.split()) for name, fields in takes.fields.items()}
        hyper = {name: values if len(values) > 1 else values[0] for name, values in named.items()}
        hyper |= {"weight_decay": self.weight_decay} if takes.decays else {}
        hyper.pop("adam_w_mode", None)  # says which Adam it is
        return {**hyper, **takes.own, **self._own_parameters()}

    def _own_parameters(self) -> dict[str, Any]:
        """`optimizer_params`, read and checked."""
        found: dict[str, Any] = {}
        for text in self.optimizer_params:
            name, equals, value = text.partition("=")
            require(bool(equals), f"--optimizer-params {text}: expected NAME=VALUE")
            require(name not in found, f"--optimizer-params {name} is given twice; leave one of them out")
            try:
                found[name] = own_parameter(self.optimizer, name, json.loads(value))
            except ValueError as error:
                reason = f"{value} is no number, true or false" if isinstance(error, json.JSONDecodeError) else error
                raise ConfigError(f"--optimizer-params {text}: {reason}") from None
        return found


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate as a function of the step: warm up, then decay until --lr-decay-iters."""

    lr: float = flag(1.5e-4, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "inverse-square-root"] = flag(
        "cosine", "shape of the decay"
    )
    lr_decay_iters: int | None = flag(None, "step at which --min-lr is reached (default: --train-iters)")
    warmup: float = flag(0.01, "share of --lr-decay-iters spent warming up")
    warmup_type: Literal["linear", "log"] = flag("linear", "shape of the warm-up; log is fast at first")
    override_lr_scheduler: bool = flag(False, "on resume, these flags win over the checkpoint's schedule")
    use_checkpoint_lr_scheduler: bool = flag(False, "on resume, the checkpoint's schedule wins over these flags",
                                             "use-checkpoint-opt-param-scheduler")

    def __post_init__(self) -> None:
        _require_range(self, "lr min_lr", 0)
        _require_range(self, "warmup", 0, 1)
        _require_range(self, "lr_decay_iters", 1)
        require(self.min_lr <= self.lr, f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}")
        require(not (self.override_lr_scheduler and self.use_checkpoint_lr_scheduler),
                "--override-lr-scheduler and --use-checkpoint-lr-scheduler exclude each other: give at most one")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Working precision of the weights; masters and moments are fp32 always."""

    fp16: bool = flag(False, "fp16 with loss scaling")
    bf16: bool = flag(False, "bf16")
    loss_scale: float | None = flag(None, "fp16: fixed loss scale (default: dynamic)")
    initial_loss_scale: float = flag(2.0**16, "fp16: first dynamic loss scale")
    loss_scale_window: int = flag(1000, "fp16: clean steps before the scale doubles")
    hysteresis: int = flag(2, "fp16: overflows before the scale halves")
    min_scale: float = flag(1.0, "fp16: the smallest loss scale; an overflow there ends the run")
    fp32_allreduce: bool = flag(False, "reduce 16-bit gradients over data parallel in fp32")

    def __post_init__(self) -> None:
        require(
            not (self.fp16 and self.bf16), "--fp16 and --bf16 exclude each other: give one (--no-bf16 takes one back)"
        )
        _require_range(self, "loss_scale initial_loss_scale min_scale", 0, 2.0**64, open_low=True)
        _require_range(self, "loss_scale_window hysteresis", 1)
        require(
            self.loss_scale is None or self.fp16,
            f"--loss-scale {self.loss_scale} needs --fp16: other precisions are not scaled",
        )
        require(self.min_scale <= self.initial_loss_scale,
                f"--min-scale {self.min_scale:g} is above --initial-loss-scale {self.initial_loss_scale:g}")

    @property
    def name(self) -> Literal["fp32", "fp16", "bf16"]:
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is split over data parallel (see zero/policy.py), and how it travels. Sizes are in elements, not bytes."""

    zero_stage: int = flag(0, "0: nothing split; 1: optimizer state; 2: and gradients; 3: and parameters")
    contiguous_gradients: bool = flag(
        True, "gradients in one buffer as they are made", "zero-contiguous-gradients", "zero-contigious-gradients"
    )
    overlap_comm: bool = flag(True, "go on computing while gradients and parameters travel")
    reduce_scatter: bool = flag(True, "reduce gradients to their owner, not to all", "zero-reduce-scatter")
    reduce_bucket_size: int = flag(500_000_000, "gradients reduced at a time", "zero-reduce-bucket-size")
    allgather_partitions: bool = flag(True, "collect updated weights by all-gather (no: by broadcasts)")
    allgather_bucket_size: int = flag(500_000_000, "weights collected at a time", "zero-allgather-bucket-size")
    load_from_fp32_weights: bool = flag(True, "on load take fp32 masters from the checkpoint (no: from its weights)")
    ignore_unused_parameters: bool = flag(True, "a parameter without gradient is no error")
    round_robin_gradients: bool = flag(False, "spread copies of gradients to the host over the ranks")
    sub_group_size: int = flag(1_000_000_000, "elements of one tile of the optimizer step")
    stage3_max_live_parameters: int = flag(1_000_000_000, "most gathered parameters at once")
    stage3_max_reuse_distance: int = flag(
        0, "keep a block gathered after its forward if its backward comes before so many other parameters are used")
    stage3_prefetch_bucket_size: int = flag(50_000_000, "parameters gathered ahead of their use")
    stage3_param_persistence_threshold: int = flag(100_000, "a parameter of fewer elements is never split")
    stage3_gather_16bit_weights_on_model_save: bool = flag(False, "save_16bit_model may gather split parameters")

    def __post_init__(self) -> None:
        require(self.zero_stage in (0, 1, 2, 3), f"--zero-stage is {self.zero_stage}: expected 0, 1, 2 or 3")
        _require_range(self, "reduce_bucket_size allgather_bucket_size sub_group_size", 1, 2**63 - 1)
        _require_range(self, "stage3_max_live_parameters stage3_max_reuse_distance", 0, 2**63 - 1)
        _require_range(self, "stage3_prefetch_bucket_size stage3_param_persistence_threshold", 0, 2**63 - 1)


OFFLOAD_DEVICES = ("none",)
"""Homes of state away from the device that the engine has; others are refused when the configuration is built."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where the ranks' shards live when not in use: on the device, on the host, or on NVMe."""

    offload_optimizer_device: Literal["none", "cpu", "nvme"] = flag("none", "home of masters and moments")
    offload_optimizer_nvme_path: str | None = flag(None, "folder on the NVMe drive")
    offload_optimizer_buffer_count: int = flag(4, "buffers on the host in front of the NVMe drive")
    offload_optimizer_pin_memory: bool = flag(False, "page-locked host memory")
    offload_optimizer_pipeline_read: bool = flag(False, "read the next tile during the step of this one")
    offload_optimizer_pipeline_write: bool = flag(False, "write the last tile during the step of this one")
    offload_param_device: Literal["none", "cpu", "nvme"] = flag("none", "home of parameters; stage 3 only")
    offload_param_nvme_path: str | None = flag(None, "folder on the NVMe drive")
    offload_param_buffer_count: int = flag(5, "buffers on the host in front of the NVMe drive")
    offload_param_buffer_size: int = flag(100_000_000, "elements of one buffer")
    offload_param_max_in_cpu: int = flag(1_000_000_000, "elements kept on the host beside the NVMe drive")
    offload_param_pin_memory: bool = flag(False, "page-locked host memory")
    aio_block_size: int = flag(1_048_576, "bytes of one NVMe request")
    aio_queue_depth: int = flag(8, "NVMe requests under way")
    aio_intra_op_parallelism: int = flag(1, "threads of one read or write", "aio-thread-count")
    aio_single_submit: bool = flag(False, "submit NVMe requests one by one")
    aio_overlap_events: bool = flag(True, "submit further NVMe requests while others complete")

    def __post_init__(self) -> None:
        _require_range(self, "offload_optimizer_buffer_count offload_param_buffer_count offload_param_buffer_size", 1)
        _require_range(self, "offload_param_max_in_cpu", 0)
        _require_range(self, "aio_block_size aio_queue_depth aio_intra_op_parallelism", 1)
        for kind in ("optimizer", "param"):
            device, path = (getattr(self, f"offload_{kind}_{what}") for what in ("device", "nvme_path"))
            name = flag_name(f"offload_{kind}_device")
            require(device in ("none", "cpu", "nvme"), f"{name} is {device}: expected none, cpu or nvme")
            require(device in OFFLOAD_DEVICES, f"{name} {device}: offloading is not supported yet; leave it out")
            require(device != "nvme" or bool(path), f"{name} nvme needs {flag_name(f'offload_{kind}_nvme_path')}")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing: keep the input of each chunk of blocks, recompute the rest in backward."""

    checkpoint_activations: bool = flag(
        False, "recompute activations in backward", "deepspeed-activation-checkpointing"
    )
    checkpoint_num_layers: int = flag(1, "blocks per recomputed chunk")
    partition_activations: bool = flag(False, "split kept inputs over tensor parallel")
    cpu_checkpointing: bool = flag(False, "keep inputs on the host", "checkpoint-in-cpu")
    contiguous_memory_optimization: bool = flag(
        False, "keep inputs in one buffer", "contiguous-checkpointing", "contigious-checkpointing"
    )
    number_checkpoints: int | None = flag(
        None, "chunks that buffer has room for (default: those of one forward)", "num-checkpoints"
    )
    synchronize_checkpoint_boundary: bool = flag(False, "wait for the device at each chunk", "synchronize-each-layer")
    profile_backward: bool = flag(False, "time each chunk's forward and recomputation")

    def __post_init__(self) -> None:
        _require_range(self, "checkpoint_num_layers number_checkpoints", 1)
        require(self.partition_activations or not self.contiguous_memory_optimization,
                "--contiguous-memory-optimization needs --partition-activations: its buffer holds the parts of inputs")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in which batches, and how reproducibly."""

    batch_size: int = flag(4, "samples of one data parallel rank in one forward", "micro-batch-size")
    global_batch_size: int | None = flag(
        None, "samples of one optimizer step (default: batch size x data parallel size)"
    )
    train_iters: int = flag(1000, "optimizer steps of the whole run")
    eval_interval: int = flag(1000, "evaluate every so many steps; 0 switches it off")
    eval_iters: int = flag(100, "global batches of one evaluation")
    exit_interval: int = flag(0, "leave after steps divisible by this; 0 switches it off")
    exit_duration_in_mins: float = flag(0.0, "leave after the step in which the program has run so many minutes; 0 "
                                             "switches it off")
    seed: int = flag(1234, "seed of weights, dropout and data order")
    compile: bool = flag(False, "torch.compile each block")
    deterministic: bool = flag(False, "refuse kernels whose result varies from run to run")

    def __post_init__(self) -> None:
        _require_range(self, "batch_size global_batch_size", 1)
        _require_range(self, "train_iters eval_interval exit_interval exit_duration_in_mins", 0)
        _require_range(self, "eval_iters", 1)
        _require_range(self, "seed", 0, 2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Where checkpoints go and come from."""

    save: str | None = flag(None, "folder for checkpoints")
    load: str | None = flag(None, "folder to resume from; must hold a checkpoint unless it is an empty --save")
    load_hf: str | None = flag(None, "Hugging Face GPT-2 folder of the initial weights; --load wins where it resumes")
    save_interval: int = flag(1000, "save every so many steps; 0 saves only at the end")
    async_save: bool = flag(False, "go on training after a copy of the state, while it is written")
    keep_last: int | None = flag(None, "keep only the newest so many checkpoints")
    keep_every: int | None = flag(None, "with --keep-last: keep those of steps divisible by this as well")
    no_save_optim: bool = flag(False, "leave optimizer state out of checkpoints")
    no_save_rng: bool = flag(False, "leave random number state out of checkpoints")
    no_load_optim: bool = flag(False, "do not load optimizer state")
    no_load_rng: bool = flag(False, "do not load random number state")
    finetune: bool = flag(False, "load the weights only, and start at iteration 0")
    load_precision_change: bool = flag(False, "load a checkpoint of another precision; the loss scale starts anew")
    resume_fallback: bool = flag(False, "where the newest checkpoint is damaged, take the newest good one")
    resume_dataloader: bool = flag(False, "accepted for old scripts: the data position is always restored")

    def __post_init__(self) -> None:
        _require_range(self, "save_interval", 0)
        _require_range(self, "keep_last keep_every", 1)
        require(self.keep_every is None or self.keep_last is not None,
                "--keep-every needs --keep-last: without it every checkpoint is kept")
        for name in ("no_load_optim", "no_load_rng", "finetune", "load_precision_change", "resume_fallback"):
            require(
                not getattr(self, name) or self.load is not None,
                f"{flag_name(name)} needs --load: there is nothing to load",
            )


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What the run tells, and where."""

    log_interval: int = flag(100, "steps between console lines; 0 switches them off")
    metrics_file: str | None = flag(None, "append one JSON object per step to this file")
    tensorboard_dir: str | None = flag(None, "write tensorboard scalars here")
    peak_tflops: float | None = flag(None, "peak of one device for MFU (default: by device name)")
    sample_tokens: int = flag(64, "tokens of the text sample at the end; 0 switches it off")
    sample_prompt: str = flag("The", "prompt of the text sample at the end")
    debug: bool = flag(False, "print tracebacks")

    def __post_init__(self) -> None:
        _require_range(self, "log_interval sample_tokens", 0)
        _require_range(self, "peak_tflops", 0, open_low=True)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    log: LogConfig = field(default_factory=LogConfig)
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What the user should read once about how this tree came about; no section, and not saved."""

    def __post_init__(self) -> None:
        length, table = self.seq_length, self.model.max_position_embeddings
        require(
            length <= table,
            f"--seq-length {length} is above --max-position-embeddings {table}: the position table is too short",
        )
        tp = self.parallel.model_parallel_size
        require(tp == 1 or not self.model.memory_centric_tiled_linear,
                f"--memory-centric-tiled-linear and --model-parallel-size {tp} exclude each other: both cut the "
                "matrices of a block; give one of them")
        require(self.save.load_hf is None or not self.model.memory_centric_tiled_linear,
                "--load-hf and --memory-centric-tiled-linear exclude each other: its matrices are whole; give one of "
                "them")
        for name in ("num_attention_heads", "hidden_size"):
            value = getattr(self.model, name)
            require(value % tp == 0, f"{flag_name(name)} {value} is not divisible by --model-parallel-size {tp}")
        require(
            self.model.ffn_size % tp == 0,
            f"the MLP width {self.model.ffn_size} (--intermediate-size) is not divisible by --model-parallel-size {tp}",
        )
        require(self.offload.offload_param_device == "none" or self.zero.zero_stage == 3,
                f"--offload-param-device {self.offload.offload_param_device} needs --zero-stage 3, "
                f"not {self.zero.zero_stage}: other stages keep whole parameters on the device")
        again = self.recompute
        buffered = again.checkpoint_activations and again.contiguous_memory_optimization
        require(not buffered or (again.number_checkpoints or self.chunks) >= self.chunks,
                f"--number-checkpoints {again.number_checkpoints} is below the {self.chunks} chunks of --num-layers "
                f"{self.model.num_layers} with --checkpoint-num-layers {again.checkpoint_num_layers}: leave it out")

    @property
    def chunks(self) -> int:
        """Chunks of blocks in one forward of a model that recomputes."""
        return math.ceil(self.model.num_layers / self.recompute.checkpoint_num_layers)

    @property
    def seq_length(self) -> int:
        return self.data.seq_length or self.model.max_position_embeddings

    def check_world(self, world_size: int) -> None:
        """Refuse a world this configuration cannot fill, with every factor named."""
        dp = data_parallel_size(world_size, self.parallel.model_parallel_size)
        micro, batch = self.train.batch_size, self.train.global_batch_size
        require(
            batch is None or batch % (micro * dp) == 0,
            f"--global-batch-size {batch} is not divisible by --batch-size {micro} x data parallel size {dp} "
            f"= {micro * dp}",
        )

    def global_batch_size(self, dp_size: int) -> int:
        return self.train.global_batch_size or self.train.batch_size * dp_size

    def accumulation(self, dp_size: int) -> int:
        """Micro-batches of one optimizer step."""
        return self.global_batch_size(dp_size) // (self.train.batch_size * dp_size)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain JSON values, section by section (saved in every checkpoint)."""
        return {name: {key: list(value) if isinstance(value, tuple) else value
                       for key, value in asdict(getattr(self, name)).items()} for name in SECTIONS}


SECTIONS: dict[str, type] = {f.name: f.default_factory for f in fields(Config)  # type: ignore[misc]
                             if f.name != "notes"}
"""Section name -> its dataclass; every field name is unique across sections (a test holds it)."""


def build_config(values: Mapping[str, Any]) -> Config:
    """A Config from flat field values; fields not named keep their defaults."""
    sections = {name: section(**{f.name: values[f.name] for f in fields(section) if f.name in values})
                for name, section in SECTIONS.items()}
    return Config(**sections)


def data_parallel_size(world_size: int, tp: int) -> int:
    """What remains of the world for data parallel."""
    require(world_size % tp == 0, f"{world_size} ranks cannot be arranged in groups of --model-parallel-size {tp}: "
            f"{world_size} is not divisible by {tp}")
    return world_size // tp


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "max_position_embeddings": 1024,
            "tokenizer_type": "GPT2BPETokenizer"}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32,
             "tokenizer_type": "ByteLevelTokenizer"},
    "small": {"num_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "max_position_embeddings": 256,
              "tokenizer_type": "SentencePieceTokenizer"},
    "124M": _gpt2(12, 768, 12),
    "345M": _gpt2(24, 1024, 16),
    "774M": _gpt2(36, 1280, 20),
    "1.5B": _gpt2(48, 1600, 25),
    "8.3B": _gpt2(72, 3072, 24),
    "10B": _gpt2(50, 4096, 32),
}
"""`--preset` -> the fields it fills in; a flag that is given wins."""
