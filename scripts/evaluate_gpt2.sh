#!/usr/bin/env bash
# Perplexity of a model that pretrain_gpt2.sh trained, its newest run or that of PRESET, on the documents that training
# held out.
#
#   bash scripts/evaluate_gpt2.sh
#   bash scripts/evaluate_gpt2.sh --protocol lm-eval --json              all flags: docs/evaluate.md, or --help
#   bash scripts/evaluate_gpt2.sh --task wikitext --data wiki.test.raw   another task, of the same model
#   bash scripts/evaluate_gpt2.sh --load runs/mine                       another run
#
#   PRESET          (any) tiny, small, 124M, ...: which of the quick start's models
#   RUNS            where runs are kept (the repository's runs/; of an installation, runs/ here)
#   GPUS_PER_NODE   (1) GPUs, or CPU ranks, that share out the work
. "$(dirname -- "${BASH_SOURCE[0]}")/trained.sh"

FLAGS=()
if ! names_a_model "$@" && ! asks_for_help "$@"; then
    folder="$(trained_model)"
    FLAGS+=(--load "$folder")
fi
if ! given --task "$@" && ! asks_for_help "$@"; then
    FLAGS+=(--task perplexity)
    if ! given --data "$@" && ! given --valid-data "$@"; then
        python -m data.default_corpus --output-dir "$RUNS/default_corpus" >/dev/null  # is there already
        FLAGS+=(--data "$RUNS/default_corpus/corpus.jsonl")
        if ! given --load-hf "$@" && ! given --part "$@"; then FLAGS+=(--part valid); fi
    fi
fi
PYTHONPATH="$(with_sources)"
export PYTHONPATH
exec "$PYTHON" -P -m megatron.launch --nproc-per-node "${GPUS_PER_NODE:-1}" -m megatron.evaluate "${FLAGS[@]}" "$@"
