"""Sections `model`, `data`, `train`, `layer_drop` and `quantize`, and the shapes that `--preset` names."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron.bit_schedule import MIN_UNIFORM_BITS, BitSchedule
from megatron.config.schema import (COUNT, MAX_INT64, NUMBER, ConfigSection, ErrorList, JsonKey, NumberRange, flag_name,
                                    one_of, setting)
from megatron.errors import ConfigError
from megatron.layer_drop import ThetaSchedule


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "max_position_embeddings": 1024,
            "tokenizer_type": "GPT2BPETokenizer"}


# Preset -> fields that it fills in. Sizes from 20B on are from the ZeRO papers and GPT-3 (175B), for the planner.
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
    "20B": _gpt2(98, 4096, 32),
    "40B": _gpt2(88, 6144, 48),
    "100B": _gpt2(125, 8192, 64),
    "175B": {**_gpt2(96, 12288, 96), "max_position_embeddings": 2048},
    "1T": _gpt2(128, 25600, 160),
}


# Fields of ModelConfig that training alone reads, or that change neither logical weights nor their use.
_NOT_ARCHITECTURE = ("make_vocab_size_divisible_by", "attention_dropout", "hidden_dropout", "z_loss",
                     "init_method_std", "memory_centric_tiled_linear")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ConfigSection):
    """The shape of the GPT-2. `--preset` fills it in; flags that are given win."""

    num_layers: int = setting(24, "transformer blocks", "n-layer", common=True, ge=1)
    hidden_size: int = setting(1024, "width of the residual stream", "n-embd", common=True, ge=1)
    num_attention_heads: int = setting(16, "attention heads; must divide the hidden size", "n-head", common=True, ge=1)
    intermediate_size: int | None = setting(None, "width of the MLP (default: 4 x hidden size; with swiglu 8/3 x, "
                                            "rounded down to a multiple of 64)", "ffn-hidden-size", ge=1)
    max_position_embeddings: int = setting(1024, "size of the position table: the longest sequence", "block-size", ge=1)
    vocab_size: int | None = setting(None, "tokens in the vocabulary, before padding (default: the tokenizer's)", ge=1)
    make_vocab_size_divisible_by: int = setting(
        128, "pad the vocabulary to a multiple of this times the tensor parallel size", ge=1)
    attention_dropout: float = setting(0.1, "dropout on attention weights", ge=0, le=0.999)
    hidden_dropout: float = setting(0.1, "dropout on embeddings and block outputs", ge=0, le=0.999)
    position_embedding_type: Literal["learned_absolute", "rope"] = setting(
        "learned_absolute", "a table of positions, or rotary embeddings of queries and keys")
    rotary_base: float = setting(10_000.0, "rope: base of the wavelengths", "rope-theta", gt=1,
                                 needs={"position_embedding_type": ("rope",)})
    normalization: Literal["LayerNorm", "RMSNorm"] = setting("LayerNorm", "norm of block inputs and of the output")
    qk_norm: bool = setting(False, "scale each head's queries and keys to RMS 1 (no weights)", "qk-layernorm")
    num_query_groups: int | None = setting(None, "grouped-query attention: heads of keys and values; must divide the "
                                           "attention heads (default: as many)", "num-key-value-heads", ge=1)
    activation: Literal["gelu", "squared_relu", "swiglu"] = setting("gelu", "activation of the MLP")
    layernorm_epsilon: float = setting(1e-5, "epsilon of every norm", "norm-epsilon", gt=0)
    z_loss: float = setting(0.0, "training loss: add this times the square of log(sum(exp(logits))), 1e-4 is usual; 0 "
                                 "turns it off", ge=0)
    init_method_std: float = setting(0.02, "standard deviation of the initial weights", gt=0)
    memory_centric_tiled_linear: bool = setting(False, "cut each weight matrix of a block into tiles, so that stage 3 "
                                                       "gathers one tile at a time")
    tile_factor: int = setting(1, "a tile has about (hidden size / this) squared elements")

    def check(self, errors: ErrorList) -> None:
        errors.require(1 <= self.tile_factor <= self.hidden_size, "{tile_factor} is {found}: expected {tiles}",
                       found=self.tile_factor, tiles=NumberRange(1, self.hidden_size))
        errors.require(self.hidden_size % self.num_attention_heads == 0,
                       "{hidden_size=} is not divisible by {num_attention_heads=}")
        errors.require(self.num_attention_heads % self.kv_heads == 0,
                       "{num_attention_heads=} is not divisible by {num_query_groups=}")
        errors.require(self.position_embedding_type != "rope" or self.head_size % 2 == 0,
                       "{position_embedding_type=} needs an even head size, found {size}: {hidden_size=} / "
                       "{num_attention_heads=}", size=self.head_size)

    @property
    def ffn_size(self) -> int:
        if self.intermediate_size is None and self.activation == "swiglu":  # as many weights as 4 x without a gate
            return max(64, 8 * self.hidden_size // 3 // 64 * 64)
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    def flags_unlike_gpt2(self) -> list[str]:
        """The flags that make this another architecture than GPT-2's."""
        names, own = "position_embedding_type normalization qk_norm activation num_query_groups", self.architecture()
        return [flag_name(name) for name in names.split() if own[name] != getattr(ModelConfig, name)]

    def architecture(self) -> dict[str, Any]:
        """Field -> value, of the fields that must be equal in a model and the checkpoint it loads."""
        effective = {"intermediate_size": self.ffn_size,
                     "num_query_groups": self.kv_heads if self.kv_heads != self.num_attention_heads else None,
                     "rotary_base": self.rotary_base if self.position_embedding_type == "rope" else None,
                     "tile_factor": self.tile_factor if self.memory_centric_tiled_linear else None}
        return {name: value for name, value in (asdict(self) | effective).items() if name not in _NOT_ARCHITECTURE}

    @property
    def known_vocab_size(self) -> int:
        """The vocabulary size; ConfigError until the trainer has filled it in from its tokenizer."""
        if self.vocab_size is None:
            raise ConfigError("ModelConfig has no vocab_size; give ModelConfig(vocab_size=tokenizer.vocab_size)")
        return self.vocab_size


@dataclass(frozen=True, kw_only=True)
class DataConfig(ConfigSection):
    """The corpora, their tokenizer, and how samples are cut from them."""

    train_data: tuple[str, ...] = setting(
        (), "corpus prefix, .jsonl or .txt file, folder of them, hf:NAME[:CONFIG/SPLIT], `webtext`, `default` or "
        "mixture.yaml; or weights and names",
        "data-path", "train-data-path", "train-file", common=True, is_location=True)
    valid_data: tuple[str, ...] = setting((), "validation corpus (default: the second part of --split)",
                                          "val-data-path", "validation-file", is_location=True)
    test_data: tuple[str, ...] = setting(
        (), "test corpus (default: the third part of --split)", "test-data-path", is_location=True)
    split: str = setting("949,50,1", "shares of --train-data for training, validation and test, by document",
                         metavar="SHARES")
    seq_length: int | None = setting(None, "tokens per sample (default: --max-position-embeddings)", common=True, ge=1)
    tokenizer_type: str | None = setting(
        None, "GPT2BPETokenizer, SentencePieceTokenizer, ByteLevelTokenizer or CharacterLevelTokenizer (default: the "
        "preset's, or GPT2BPETokenizer)", metavar="NAME", common=True)
    vocab_file: str | None = setting(None, "GPT-2 encoder.json (default: the packaged one)", is_location=True)
    merge_file: str | None = setting(None, "GPT-2 vocab.bpe (default: the packaged one)", is_location=True)
    tokenizer_path: str | None = setting(None, "SentencePiece model or character vocabulary", common=True,
                                         is_location=True)
    mock_data: bool = setting(False, "random tokens instead of a corpus, for benchmarks")
    data_cache_path: str | None = setting(None, "folder for the corpora made of text files",
                                          is_location=True)
    text_key: str = setting("text", "key of the text in .jsonl files, or its column", "json-key", metavar="KEY")
    document_separator: str | None = setting(
        None, "what ends a document inside a .txt file: blank-line, or a text such as '<|endoftext|>' "
        "(default: the end of the file)", metavar="TEXT")
    num_workers: int = setting(2, "data loading workers; 0 loads in the training thread", "dataloader-num-workers",
                               ge=0)
    lazy_loader: bool = setting(False, "accepted for old scripts: corpora are always read where they are")
    reset_position_ids: bool = setting(False, "restart position numbers at each document")
    reset_attention_mask: bool = setting(False, "attend only within a document")
    eod_mask_loss: bool = setting(False, "ignore the loss of the token after an end-of-document token")

    def check(self, errors: ErrorList) -> None:
        errors.require(not (self.mock_data and self.train_data),
                       "{mock_data} and {train_data} exclude each other: give one of them")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ConfigSection):
    """The length of the run, its batches, and how reproducible it is."""

    batch_size: int = setting(
        4, "micro-batch: samples per data parallel rank in one forward", "micro-batch-size",
        "per-device-train-batch-size", common=True,
        json=JsonKey("train_micro_batch_size_per_gpu", COUNT, is_independent=False, nullable=True, default=""), ge=1)
    global_batch_size: int | None = setting(
        None, "samples per optimizer step (default: batch size x data parallel size)", common=True,
        json=JsonKey("train_batch_size", COUNT, is_independent=False, nullable=True), ge=1)
    rampup_batch_size: tuple[str, ...] = setting(
        (), "three numbers START INCREMENT SAMPLES: the batch of a step grows from START by INCREMENT to "
        "--global-batch-size over this many samples", metavar="N")
    train_iters: int = setting(1000, "optimizer steps of the whole run", "max-iters", "max-steps", common=True, ge=0)
    eval_interval: int = setting(1000, "steps between evaluations; 0 turns them off", "eval-steps", common=True, ge=0)
    eval_iters: int = setting(100, "global batches per evaluation; 0 turns evaluations off", ge=0)
    skip_train: bool = setting(False, "evaluate what --load or --load-hf names, and neither train nor save",
                               "eval-only")
    exit_interval: int = setting(0, "exit after steps divisible by this; 0 turns it off", ge=0)
    exit_duration_in_mins: float = setting(0.0, "wall-clock limit: exit after the step in which the run is this "
                                                "many minutes old; 0 turns it off", ge=0)
    gc_interval: int = setting(
        0, "steps between looks of Python's garbage collector, at the same steps on all ranks; 0: whenever it wants to",
        "manual-gc-interval", ge=0)
    seed: int = setting(1234, "seed of weights, dropout and data order", ge=0, le=MAX_INT64)
    compile: bool | None = setting(None, "compile the model with torch.compile (default: on a GPU)", "torch-compile")
    compile_scope: Literal["auto", "blocks", "model"] = setting(
        "auto", "what --compile makes one graph of: each block, or the whole model (auto: the model, where nothing has "
                "to happen between blocks)")
    cuda_graphs: bool = setting(False, "--compile on a GPU: replay launches as CUDA graphs (torch's reduce-overhead); "
                                       "faster for small models, takes more memory; stages 0 to 2, no recomputation")
    deterministic: bool = setting(False, "on a GPU: only kernels that give the same bits in every run, slower ones if "
                                         "need be (docs/training.md)")

    @property
    def batch_ramp(self) -> tuple[int, int, int] | None:
        """(first batch size, increment, samples until it is --global-batch-size)."""
        if not self.rampup_batch_size:
            return None
        start, increment, samples = map(int, self.rampup_batch_size)
        return start, increment, samples

    def check(self, errors: ErrorList) -> None:
        given = self.rampup_batch_size
        errors.require(not given or len(given) == 3 and all(each.isdecimal() and int(each) > 0 for each in given),
                       "{rampup_batch_size} is {found}: expected three whole numbers, START INCREMENT SAMPLES",
                       found=" ".join(given))
        errors.require(not given or self.global_batch_size is not None, "{rampup_batch_size} needs "
                       "{global_batch_size}: the size at its end")
        errors.require(self.compile is not False or not self.cuda_graphs, "{cuda_graphs} and {no compile} exclude each "
                       "other: only what is compiled is replayed; leave one out")
        errors.require(not self.skip_train or self.evaluates_every > 0, "{skip_train} leaves nothing to do with "
                       "{eval_interval} 0 or {eval_iters} 0: leave that out")

    @property
    def evaluates_every(self) -> int:
        """Steps between evaluations; 0: none."""
        return self.eval_interval if self.eval_iters else 0


_PROGRESSIVE_LAYER_DROP = "progressive_layer_drop."


@dataclass(frozen=True, kw_only=True)
class LayerDropConfig(ConfigSection):
    """Progressive layer dropping: each training step leaves out some blocks, more of them later in the run and more of
    the later ones (docs/methods.md)."""

    progressive_layer_drop: bool = setting(False, "leave out blocks of a training step at random",
                                           json=_PROGRESSIVE_LAYER_DROP + "enabled")
    pld_theta: float = setting(0.5, "what the keep probability falls to, behind the last block", json=JsonKey(
        _PROGRESSIVE_LAYER_DROP + "theta", NUMBER, is_independent=False, default="1.0",
        help="what the keep probability falls to, behind the last block; 1 leaves nothing out"), gt=0, le=1,
        needs="progressive_layer_drop")
    pld_gamma: float = setting(0.001, "how fast it falls: by exp(-this) a step", json=_PROGRESSIVE_LAYER_DROP + "gamma",
                               ge=0, needs="progressive_layer_drop")

    @property
    def schedule(self) -> ThetaSchedule | None:
        """The schedule of theta; None without layer dropping."""
        return ThetaSchedule(self.pld_theta, self.pld_gamma) if self.progressive_layer_drop else None

    def notes(self) -> list[str]:
        """Notes on settings that are on but have no effect."""
        idle = {"--pld-theta is 1": self.pld_theta == 1, "--pld-gamma is 0": self.pld_gamma == 0}
        why = [reason for reason, holds in idle.items() if holds and self.progressive_layer_drop]
        return [f" note: --progressive-layer-drop leaves no block out: {why[0]}"] if why else []


_QUANTIZE_TRAINING = "quantize_training."
_COMPRESSION = "compression_training.weight_quantization.shared_parameters."
MAX_BITS = 16  # bits of working weights without quantisation, for this method


def _quantize_keys(path: str, *others: str) -> tuple[JsonKey, ...]:
    return tuple(JsonKey(one) for one in (_QUANTIZE_TRAINING + path, *others))


def _eigenvalue_keys(name: str) -> tuple[JsonKey, ...]:
    return JsonKey(f"eigenvalue.{name}"), JsonKey(f"{_QUANTIZE_TRAINING}eigenvalue.{name}")


def _algorithm_keys(name: str, shared: str, *words: str) -> tuple[JsonKey, ...]:
    """A choice under its three DeepSpeed spellings: as documented, as implemented, and in the newer section."""
    paths = (f"{_QUANTIZE_TRAINING}quantize_algo.{name}", f"{_QUANTIZE_TRAINING}quantize-algo.{name}",
             _COMPRESSION + shared)
    return tuple(JsonKey(path, one_of(*words)) for path in paths)


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(ConfigSection):
    """Quantisation in training (MoQ): the weights at work are rounded to fewer and fewer bits, their fp32 masters are
    not (docs/methods.md)."""

    quantize_training: bool = setting(False, "round the weights at work to fewer and fewer bits",
                                      json=_quantize_keys("enabled", _COMPRESSION + "enabled"))
    quantize_start_bits: int = setting(MAX_BITS, "bits that a weight begins with",
                                       json=_quantize_keys("quantize_bits.start_bits"), ge=1, le=MAX_BITS,
                                       needs="quantize_training")
    quantize_target_bits: int = setting(8, "bits that it ends with: 3 to 16, 2 is ternary, 1 is binary",
                                        json=_quantize_keys("quantize_bits.target_bits"), ge=1, le=MAX_BITS,
                                        needs="quantize_training")
    quantize_period: int = setting(1000, "applied steps until the first bit falls; the others fall after 2, 4, 8, ... "
                                   "times as many", json=_quantize_keys("quantize_schedule.quantize_period"), ge=1,
                                   needs="quantize_training")
    quantize_offset: int = setting(1000, "applied steps before the first weight is rounded", json=_quantize_keys(
        "quantize_schedule.schedule_offset", _COMPRESSION + "schedule_offset"), ge=0, needs="quantize_training")
    quantize_groups: int = setting(1, "groups of rows of each matrix, which are scaled each by itself",
                                   json=_quantize_keys("quantize_groups", _COMPRESSION + "quantize_groups"), ge=1,
                                   needs="quantize_training")
    quantize_type: Literal["symmetric", "asymmetric"] = setting(
        "symmetric", "whether a grid lies around 0, or between the smallest and the largest weight",
        json=(*_algorithm_keys("q_type", "quantization_type", "symmetric", "asymmetric"),
              JsonKey(_QUANTIZE_TRAINING + "quantize_type")), needs="quantize_training")
    quantize_rounding: Literal["nearest", "stochastic"] = setting(
        "nearest", "how weights are rounded", json=_algorithm_keys("rounding", "rounding", "nearest", "stochastic"),
        needs="quantize_training")
    quantize_mixed: bool = setting(
        False, "when a bit falls, go over to rounded weights little by little",
        json=_quantize_keys("fp16_mixed_quantize.enabled", _COMPRESSION + "fp16_mixed_quantize.enabled"),
        needs="quantize_training")
    quantize_change_ratio: float = setting(
        0.001, "with --quantize-mixed: the share of rounded weights that a step adds", json=_quantize_keys(
            "fp16_mixed_quantize.quantize_change_ratio", _COMPRESSION + "fp16_mixed_quantize.quantize_change_ratio"),
        gt=0, le=1, needs="quantize_mixed")
    quantize_verbose: bool = setting(False, "print a line whenever a bit falls",
                                     json=_quantize_keys("quantize_verbose", _COMPRESSION + "quantize_verbose"),
                                     needs="quantize_training")

    quantize_eigenvalue: bool = setting(
        False, "keep the bits of blocks longer in which the loss is steeper: the largest eigenvalue of each is looked "
        "for before a bit falls", json=_eigenvalue_keys("enabled"), needs="quantize_training")
    eigenvalue_max_iter: int = setting(100, "steps of the search for an eigenvalue, at most",
                                       json=_eigenvalue_keys("max_iter"), ge=1, needs="quantize_eigenvalue")
    eigenvalue_tol: float = setting(1e-2, "an eigenvalue that changes by less in a step is found",
                                    json=_eigenvalue_keys("tol"), gt=0, needs="quantize_eigenvalue")
    eigenvalue_stability: float = setting(1e-6, "what is added to the length that directions are divided by",
                                          json=_eigenvalue_keys("stability"), ge=0, needs="quantize_eigenvalue")
    eigenvalue_layer_name: str | None = setting(
        None, "the list of modules that are the blocks (default: the outermost)", json=_eigenvalue_keys("layer_name"),
        needs="quantize_eigenvalue")
    eigenvalue_layer_num: int = setting(0, "how many blocks there have to be; 0: as many as there are",
                                        json=_eigenvalue_keys("layer_num"), ge=0, needs="quantize_eigenvalue")
    eigenvalue_verbose: bool = setting(False, "print the eigenvalues", json=_eigenvalue_keys("verbose"),
                                       needs="quantize_eigenvalue")

    def check(self, errors: ErrorList) -> None:
        errors.require(not self.quantize_eigenvalue or self.quantize_training,
                       "{quantize_eigenvalue} needs {quantize_training}: it only says when bits fall")
        errors.require(not self.quantize_eigenvalue or self.quantize_period > 1,
                       "{quantize_eigenvalue} needs {quantize_period} of at least 2, not 1: an eigenvalue is found "
                       "with a batch of the step before a bit falls")
        errors.require(self.quantize_target_bits <= self.quantize_start_bits,
                       "{quantize_target_bits=} is above {quantize_start_bits=}: bits only fall")
        few = self.quantize_training and self.quantize_target_bits < MIN_UNIFORM_BITS
        for name, is_plain in (("quantize_type", self.quantize_type == "symmetric"),
                               ("quantize_rounding", self.quantize_rounding == "nearest")):
            errors.require(not few or is_plain, f"{{{name}=}} needs {{quantize_target_bits}} of at least "
                           f"{MIN_UNIFORM_BITS}, not {self.quantize_target_bits}: ternary and binary weights are "
                           "symmetric and nearest")

    @property
    def schedule(self) -> BitSchedule | None:
        """The schedule of the bits; None without quantisation."""
        if not self.quantize_training:
            return None
        return BitSchedule(self.quantize_start_bits, self.quantize_target_bits, self.quantize_period,
                           self.quantize_change_ratio if self.quantize_mixed else None)

    def notes(self, train_iters: int | None = None) -> list[str]:
        """Notes on when bits fall, and whether the run is long enough."""
        schedule = self.schedule
        if schedule is None:
            return []
        start, target, begin = schedule.start, schedule.target, self.quantize_offset
        end = math.inf if train_iters is None else train_iters
        if end < begin:
            return [f" note: nothing is rounded: --train-iters {train_iters} is below --quantize-offset {begin}"]
        since = f" from applied step {begin} on" if begin else ""
        falls = [begin + fall for fall in schedule.drop_counters()]
        if not falls:
            return [f" note: weights are rounded to {target} bits{since}"]
        if self.quantize_eigenvalue:
            lines = [f" note: weights are rounded to {start} bits{since}, and to fewer until they have {target}: at "
                     f"applied step {falls[0]} for the first time, then when eigenvalues say so"]
            if falls[0] > end:
                lines.append(f" note: --train-iters {train_iters} ends the run at {start} bits, before an "
                             "eigenvalue is looked for")
            return lines
        fewer = ", ".join(map(str, range(start - 1, target - 1, -1)))
        lines = [f" note: weights are rounded to {start} bits{since}, and to {fewer} bits at applied "
                 f"step{'s' * (len(falls) > 1)} {', '.join(map(str, falls))}"]
        if falls[-1] > end:
            reached = start - sum(fall <= end for fall in falls)
            lines.append(f" note: --train-iters {train_iters} ends the run at {reached} bits: a period P takes "
                         f"2^{len(falls) - 1} P applied steps from {start} to {target} bits")
        return lines
