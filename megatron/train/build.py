"""Build the parts of a run from its Config: tokenizer, datasets, model, engine. pretrain_gpt2.py puts them together."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

import data.tokenizer
from data.sources import Datasets, open_datasets
from data.tokenizer import Tokenizer
from megatron import recompute
from megatron.config.tree import Config, TrainConfig, require
from megatron.distributed.consistency import all_succeed_or_raise, assert_equal_across_ranks
from megatron.distributed.rank_status import START_UP, STATUS
from megatron.model import GPT2
from megatron.optim.rule import ParamGroup
from megatron.recompute import Recomputation
from megatron.train.batches import MicroBatchSampler
from megatron.train.compile import compile_model, matmul_precision
from megatron.train.input_checks import DEFAULT_TOKENIZER, tokenizer_path
from megatron.zero.api.engine import Engine
from megatron.zero.api.initialize import initialize
from megatron.zero.deferred_init import defer_param_init
from megatron.zero.partitioned_param import full_shape
from megatron.zero.tiling import tile_linears
from mpu.groups import SOLO, Groups
from mpu.layers import use_fp8
from mpu.random import model_parallel_cuda_manual_seed

CUBLAS_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"  # setting it makes cuBLAS deterministic


def tokenizer(config: Config) -> Tokenizer:
    section = config.data
    return data.tokenizer.build(section.tokenizer_type or DEFAULT_TOKENIZER, vocab_file=section.vocab_file,
                                merge_file=section.merge_file, tokenizer_path=tokenizer_path(section))


def with_vocab_size(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with `vocab_size` set; ConfigError if the given one is smaller than the tokenizer's, or is that of
    --load-hf and more than twice as large: the tokenizer is another than that of the weights."""
    size, folder = config.model.vocab_size, config.save.load_hf
    if size is not None:
        found = (f"the {tokenizer.vocab_size} tokens of {tokenizer.name}"
                 + ("" if config.data.tokenizer_type else ", the default"))
        require(folder is None or size // 2 < tokenizer.vocab_size <= size, f"--load-hf {folder} has {size} tokens, "
                f"but this run uses {found}: give the tokenizer of those weights, --tokenizer-type with its files "
                "(--tokenizer-path or --vocab-file)")
        require(size >= tokenizer.vocab_size, f"--vocab-size {size} is smaller than {found}; leave it out, or choose "
                "another --tokenizer-type")
    return replace(config, model=replace(config.model, vocab_size=size or tokenizer.vocab_size))


def datasets(config: Config, tokenizer: Tokenizer, groups: Groups) -> Datasets:
    """Training, validation and test samples. Collective: raises if ranks find different corpora or tokenizers."""
    STATUS.set_activity(f"{START_UP}, building of the index")
    section, train = config.data, config.train
    opened = all_succeed_or_raise(lambda: open_datasets(
        train_data=section.train_data, valid_data=section.valid_data, test_data=section.test_data, split=section.split,
        seq_length=config.seq_length, seed=train.seed, tokenizer=tokenizer, cache_path=section.data_cache_path,
        mock=section.mock_data, json_key=section.text_key, document_separator=section.document_separator,
        train_samples=0 if train.skip_train else train.train_iters * config.global_batch_size(groups.dp.size)),
        groups.world)
    parts = {"training": opened.train, "validation": opened.valid, "test": opened.test}
    assert_equal_across_ranks({"the tokenizer": tokenizer.fingerprint,
                               **{f"the {name} corpus": part and part.fingerprint for name, part in parts.items()}},
                              groups.world, "the files of --train-data, or of what goes with it, differ between ranks")
    STATUS.set_activity(f"{START_UP}, building of the model")
    return opened


def seed_everything(train: TrainConfig, groups: Groups) -> None:
    """Seed all generators. Dropout is equal within a tensor parallel group and differs over data parallel ranks."""
    random.seed(train.seed)
    np.random.seed(train.seed % 2**32)
    model_parallel_cuda_manual_seed(train.seed, groups, vary_over_dp=True)


@contextmanager
def deterministic_algorithms(train: TrainConfig) -> Iterator[None]:
    """Apply --deterministic inside the context; restores the previous torch settings afterwards."""
    if not train.deterministic:
        yield
        return
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(CUBLAS_WORKSPACE_VARIABLE)
    os.environ.setdefault(CUBLAS_WORKSPACE_VARIABLE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(CUBLAS_WORKSPACE_VARIABLE, None)


def recomputation(config: Config, groups: Groups) -> Recomputation:
    section = config.recompute
    # with sequence parallelism an input is a share already, another on each rank
    split_over = SOLO if config.parallel.sequence_parallel else groups.tp
    return Recomputation(replace(section, recompute_granularity="full",  # selective recomputation does not use it
                                 number_checkpoints=section.number_checkpoints or config.chunks), split_over)


def model(config: Config, groups: Groups, recompute_runner: Recomputation | None = None) -> GPT2:
    """GPT-2 with parameters on the meta device, which the engine draws, and with the configured recomputation and
    tiling. `recompute_runner` replaces the default recomputation."""
    deferred = not config.model.memory_centric_tiled_linear  # tiles are slices of materialized layers
    gpt2 = GPT2(config.model, groups.tp, config.train.seed, deferred, config.parallel.sequence_parallel)
    if deferred:
        defer_param_init(gpt2.parameters(), groups.dp)
    if config.precision.fp8:
        use_fp8(gpt2.blocks)
        gpt2.fp8_head = config.precision.fp8_head
    if config.recompute.is_selective:
        for block in gpt2.blocks:
            recompute.recompute_selectively(block, config.recompute.recompute_modules)
    elif config.recompute.checkpoint_activations:
        recompute_runner = recompute_runner or recomputation(config, groups)
        gpt2.run_blocks = recompute.in_chunks(config.recompute.checkpoint_num_layers, recompute_runner.checkpoint)
    if config.model.memory_centric_tiled_linear:
        tile_linears(gpt2.blocks, config.model.tile_factor, config.model.hidden_size)
    return gpt2


def engine(config: Config, model: GPT2, groups: Groups, device: torch.device) -> Engine:
    """The engine on `device`. Applies torch.compile to the model as configured."""
    require(not config.precision.fp8 or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9),
            "--fp8: this GPU has no products of 8-bit factors, Ada and Hopper (capability 8.9) do; leave it out")
    torch.set_float32_matmul_precision(matmul_precision(config, device))
    compile_model(model, config, groups.dp.size, device)
    param_groups: list[ParamGroup] = [  # no weight decay for biases and LayerNorms
        {"params": [p for p in model.parameters() if len(full_shape(p)) >= 2],
         "weight_decay": config.optim.weight_decay},
        {"params": [p for p in model.parameters() if len(full_shape(p)) < 2], "weight_decay": 0.0}]
    built = initialize(model=model, model_parameters=param_groups, mpu=groups, config=config, device=device)[0]
    built.block_until_params_gathered = False
    model.on_blocks_chosen = built.core.pass_coordinator.set_forward_modules
    return built


def token_bytes(config: Config, tokenizer: Tokenizer) -> torch.Tensor | None:
    """[vocab_size]: bytes of text per token id; None if the tokenizer or the data does not say."""
    lengths = None if config.data.mock_data else tokenizer.byte_lengths()
    return None if lengths is None else torch.from_numpy(lengths)


def micro_batch_sampler(config: Config, groups: Groups, tokenizer: Tokenizer) -> MicroBatchSampler:
    section = config.data
    return MicroBatchSampler(config.train.batch_size, config.accumulation(groups.dp.size), groups.dp.rank,
                             groups.dp.size, tokenizer.eod, section.reset_position_ids, section.reset_attention_mask,
                             section.eod_mask_loss, config.train.batch_ramp)
