#!/usr/bin/env bash
# Train GPT-2 in one process: a small model on the CPU, the 124M one on a GPU. Run it again: it resumes.
#
#   bash scripts/pretrain_gpt2.sh                             about 4 minutes, then an evaluation and samples of text
#   PRESET=345M bash scripts/pretrain_gpt2.sh --fp16          another model; further flags win over those in lib.sh
#   bash scripts/pretrain_gpt2.sh --train-data my_texts       your own text
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

NNODES=1 NODE_RANK=0
choose_ranks 1 1
pretrain pretrain_gpt2 "$@"
