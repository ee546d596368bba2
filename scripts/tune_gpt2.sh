#!/usr/bin/env bash
# The fastest settings of this machine for a model and a batch: a few trials of a few steps, on random tokens unless the
# arguments name a corpus. docs/tune.md says how it searches. Run again, it continues where it stopped.
#
#   bash scripts/tune_gpt2.sh
#   bash scripts/tune_gpt2.sh --global-batch-size 64 --seq-length 512
#   PRESET=345M GPUS_PER_NODE=2 bash scripts/tune_gpt2.sh --bf16
#
#   PRESET          (124M, on a CPU small) the model
#   GPUS_PER_NODE   (all, on a CPU 2) ranks
#   RUNS            where results are kept (the repository's runs/; of an installation, runs/ here)
HELP_OF=megatron.tune
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

choose_ranks all 1
if ! given --train-data "$@" && ! given --mock-data "$@"; then
    FLAGS+=(--mock-data --tokenizer-type ByteLevelTokenizer)
    given --vocab-size "$@" || FLAGS+=(--vocab-size "$([[ "$PRESET" == small ]] && echo 8192 || echo 50257)")
fi
given --global-batch-size "$@" || FLAGS+=(--global-batch-size 16)
PYTHONPATH="$(with_sources)"
export PYTHONPATH
exec "$PYTHON" -P -m megatron.tune --ranks "$GPUS_PER_NODE" --preset "$PRESET" --attention-dropout 0 --hidden-dropout 0 \
    --autotuning-results-dir "$RUNS/tune_gpt2/$PRESET" \
    "${FLAGS[@]}" "$@"
