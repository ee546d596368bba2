#!/usr/bin/env bash
# Train GPT-2 with ZeRO-2 and each layer cut over two ranks: optimizer state and gradients split over data parallel.
#
#   bash scripts/ds_zero2_pretrain_gpt2_model_parallel.sh     every GPU of this node; with fewer than two, two CPU ranks
#   GPUS_PER_NODE=4 bash scripts/ds_zero2_pretrain_gpt2_model_parallel.sh --model-parallel-size 4
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

choose_ranks all 2
FLAGS+=(--model-parallel-size 2 --checkpoint-activations
        --deepspeed --deepspeed_config "$ROOT/scripts/configs/ds_zero2_config.json")
pretrain ds_zero2_pretrain_gpt2_model_parallel "$@"
