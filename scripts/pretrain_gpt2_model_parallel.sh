#!/usr/bin/env bash
# Train GPT-2 with each layer cut over two ranks; the other ranks are data parallel (8 GPUs: 4 x 2).
#
#   bash scripts/pretrain_gpt2_model_parallel.sh              every GPU of this node; with fewer than two, two CPU ranks
#   GPUS_PER_NODE=4 bash scripts/pretrain_gpt2_model_parallel.sh --model-parallel-size 4
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

choose_ranks all 2
FLAGS+=(--model-parallel-size 2)
pretrain pretrain_gpt2_model_parallel "$@"
