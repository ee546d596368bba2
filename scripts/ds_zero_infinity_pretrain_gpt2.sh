#!/usr/bin/env bash
# Train a 20B GPT-2 with ZeRO-Infinity: stage 3, optimizer state and parameters on an NVMe drive.
#
#   NVME_PATH=/nvme bash scripts/ds_zero_infinity_pretrain_gpt2.sh     every GPU of this node; without GPUs, two CPU ranks of
#                                                                      a small model
#   PRESET=tiny bash scripts/ds_zero_infinity_pretrain_gpt2.sh
#   bash scripts/ds_zero_infinity_pretrain_gpt2.sh --dry-run           what 20B need of a GPU, the host and the drive
#
# NVME_PATH is a folder on the drive of each node (nvme/ where runs are kept); a run's files there disappear at its end.
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

NVME_PATH="${NVME_PATH:-$RUNS/nvme}"
real_size 20B
choose_ranks all 1
[[ -n "$DRY_RUN" ]] || mkdir -p -- "$NVME_PATH" || fail "cannot make $NVME_PATH; set NVME_PATH to a folder on the drive"
FLAGS+=(--deepspeed --deepspeed_config "$ROOT/scripts/configs/ds_zero_infinity_config.json" --checkpoint-activations
        --offload-optimizer-nvme-path "$NVME_PATH" --offload-param-nvme-path "$NVME_PATH")
pretrain ds_zero_infinity_pretrain_gpt2 "$@"
