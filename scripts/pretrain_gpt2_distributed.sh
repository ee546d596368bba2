#!/usr/bin/env bash
# Train GPT-2 with pure data parallelism: every rank holds the model and sees its share of each global batch.
#
#   bash scripts/pretrain_gpt2_distributed.sh                 every GPU of this node; without GPUs, two CPU ranks
#   GPUS_PER_NODE=4 bash scripts/pretrain_gpt2_distributed.sh --zero-stage 2
#   on each of two nodes, NODE_RANK 0 and 1:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=first.node MASTER_PORT=6000 bash scripts/pretrain_gpt2_distributed.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

choose_ranks all 1
pretrain pretrain_gpt2_distributed "$@"
