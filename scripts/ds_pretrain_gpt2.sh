#!/usr/bin/env bash
# Train GPT-2 in one process with a DeepSpeed-style JSON file (docs/ds_config.md lists its keys).
#
#   bash scripts/ds_pretrain_gpt2.sh
#   bash scripts/ds_pretrain_gpt2.sh --deepspeed_config my.json     a flag and a key of the file must agree
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

NNODES=1 NODE_RANK=0
choose_ranks 1 1
FLAGS+=(--deepspeed --deepspeed_config "$ROOT/scripts/configs/ds_config.json")
pretrain ds_pretrain_gpt2 "$@"
