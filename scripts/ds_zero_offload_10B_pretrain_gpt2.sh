#!/usr/bin/env bash
# Train a 10B GPT-2 (50 layers of 4096, 32 heads) on one GPU with ZeRO-Offload: stage 2, optimizer state on the host.
#
#   bash scripts/ds_zero_offload_10B_pretrain_gpt2.sh             one GPU; without one, a CPU rank of a small model
#   PRESET=tiny bash scripts/ds_zero_offload_10B_pretrain_gpt2.sh
#   bash scripts/ds_zero_offload_10B_pretrain_gpt2.sh --dry-run   what 10B need of the GPU and of the host
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

NNODES=1 NODE_RANK=0
real_size 10B
choose_ranks 1 1
FLAGS+=(--deepspeed --deepspeed_config "$ROOT/scripts/configs/ds_zero_offload_10B_config.json" --checkpoint-activations)
pretrain ds_zero_offload_10B_pretrain_gpt2 --batch-size 10 "$@"
