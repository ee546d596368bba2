#!/usr/bin/env bash
# Text from a model that pretrain_gpt2.sh trained: its newest run, or that of PRESET. At a terminal without a prompt it is
# a session: the model continues each line that is typed.
#
#   bash scripts/generate_text.sh "The meaning of life is"
#   bash scripts/generate_text.sh --file prompts.txt --jsonl      all flags: docs/generate.md, or --help
#   bash scripts/generate_text.sh --load runs/mine                another run
#
#   PRESET          (any) tiny, small, 124M, ...: which of the quick start's models
#   RUNS            where runs are kept (the repository's runs/; of an installation, runs/ here)
#   GPUS_PER_NODE   (1) split each layer over that many GPUs, or CPU ranks
. "$(dirname -- "${BASH_SOURCE[0]}")/trained.sh"

MODEL=()
if ! names_a_model "$@" && ! asks_for_help "$@"; then
    folder="$(trained_model)"
    MODEL=(--load "$folder")
fi
PYTHONPATH="$(with_sources)"
export PYTHONPATH
exec "$PYTHON" -P -m megatron.launch --nproc-per-node "${GPUS_PER_NODE:-1}" -m megatron.generate \
    "${MODEL[@]}" --model-parallel-size "${GPUS_PER_NODE:-1}" "$@"
