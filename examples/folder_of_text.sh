#!/usr/bin/env bash
# From a folder of .txt files to a trained model, with the flags of pretrain_gpt2.py after the folder:
#
#    bash examples/folder_of_text.sh my_texts
#
# The folder's text is tokenized once, into my_texts.cache; the model is kept in runs/folder_of_text. Started again, the
# command continues from there. The flags are those of a model of 0.1 M parameters, for a first try on any machine:
# `--preset 124M --tokenizer-type GPT2BPETokenizer --bf16` and a GPU are the next step.
set -euo pipefail
folder="${1:?give a folder of .txt files}"
shift
# Parts between blank lines are documents, so that --split can hold some of them back for validation.
exec python -m pretrain_gpt2 --preset tiny --train-data "$folder" --document-separator blank-line --split 90,10 \
    --train-iters 200 --batch-size 8 --lr 3e-3 --eval-interval 100 --eval-iters 5 --save runs/folder_of_text \
    --load runs/folder_of_text "$@"
