#!/usr/bin/env bash
# Train a 10B GPT-2 with ZeRO-2 alone: optimizer state and gradients split over data parallel, no model parallelism.
#
#   bash scripts/ds_zero2_pretrain_gpt2_10B.sh                every GPU of this node; without GPUs, two CPU ranks of a small model
#   PRESET=tiny bash scripts/ds_zero2_pretrain_gpt2_10B.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

real_size 10B
choose_ranks all 1
FLAGS+=(--deepspeed --deepspeed_config "$ROOT/scripts/configs/ds_zero2_10B_config.json" --checkpoint-activations)
pretrain ds_zero2_pretrain_gpt2_10B --batch-size 4 "$@"
