#!/usr/bin/env bash
# Train GPT-2 with ZeRO-3: optimizer state, gradients and parameters split over data parallel.
#
#   bash scripts/ds_zero3_pretrain_gpt2.sh                    every GPU of this node; without GPUs, two CPU ranks
#   PRESET=1.5B bash scripts/ds_zero3_pretrain_gpt2.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

choose_ranks all 1
FLAGS+=(--deepspeed --deepspeed_config "$ROOT/scripts/configs/ds_zero3_config.json" --checkpoint-activations)
pretrain ds_zero3_pretrain_gpt2 "$@"
