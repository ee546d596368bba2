#!/usr/bin/env bash
# Perplexity of what scripts/pretrain_gpt2.sh trained, on the documents that its training held out. Trains nothing.
#
#   bash scripts/evaluate_gpt2.sh                                          seconds
#   bash scripts/evaluate_gpt2.sh --protocol lm-eval --json                flags of python -m megatron.evaluate win
#   bash scripts/evaluate_gpt2.sh --task wikitext --data wiki.test.raw     another task, of the same model
#   GPUS_PER_NODE=4 PRESET=345M bash scripts/evaluate_gpt2.sh --load runs/my_run
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh" --  # without the arguments: their --help is not the trainer's

if given --help "$@" || given -h "$@"; then
    python -m megatron.evaluate --help
    exit
fi
choose_ranks "${GPUS_PER_NODE:-1}" 1
if ! given --load "$@" && ! given --load-hf "$@"; then
    FOLDER="$RUNS/pretrain_gpt2/$PRESET"
    [[ -e "$FOLDER/latest" ]] || fail "no trained model in $FOLDER; train it (bash scripts/pretrain_gpt2.sh), set PRESET, or give --load"
    FLAGS+=(--load "$FOLDER")
fi
if ! given --task "$@"; then FLAGS+=(--task perplexity); fi
if ! given --task "$@" && ! given --data "$@" && ! given --valid-data "$@"; then
    python -m data.default_corpus --output-dir "$RUNS/default_corpus" >/dev/null
    FLAGS+=(--data "$RUNS/default_corpus/corpus.jsonl")
    if ! given --load-hf "$@"; then FLAGS+=(--part valid); fi
fi
PYTHONPATH="$(with_sources)"
export PYTHONPATH
exec "$PYTHON" -P -m megatron.launch --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m megatron.evaluate "${FLAGS[@]}" "$@"
