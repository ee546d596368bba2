#!/usr/bin/env bash
# Train the 1.5B GPT-2 with ZeRO-1: masters and moments split over data parallel, no model parallelism.
#
#   bash scripts/ds_zero1_pretrain_gpt2_1.5B.sh               every GPU of this node; without GPUs, two CPU ranks of a small model
#   PRESET=tiny bash scripts/ds_zero1_pretrain_gpt2_1.5B.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

real_size 1.5B
choose_ranks all 1
FLAGS+=(--deepspeed --deepspeed_config "$ROOT/scripts/configs/ds_zero1_config.json" --checkpoint-activations)
pretrain ds_zero1_pretrain_gpt2_1.5B "$@"
