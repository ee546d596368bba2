#!/usr/bin/env bash
# From raw pages to the corpus that `--train-data webtext` finds. Run again, it continues where it stopped.
#
#   bash scripts/preprocess_webtext.sh                              the default corpus of novels, half a minute
#   bash scripts/preprocess_webtext.sh crawl/ more.jsonl.gz         your files; flags of `python -m data.webtext run` follow
#   python pretrain_gpt2.py --preset small --tokenizer-type GPT2BPETokenizer --train-data webtext
#
#   RUNS             where the stages and the report are kept: RUNS/webtext (the repository's runs/)
#   WEBTEXT_PREFIX   the corpus (data/webtext/corpus)
. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

FOLDER="${RUNS:-${LAUNCHER_VARIABLES:-$PWD}/runs}/webtext"
# An installation writes no files among its packages.
if [[ -n "$INSTALLED" ]]; then WEBTEXT_PREFIX="${WEBTEXT_PREFIX:-$FOLDER/corpus}"; fi
if [[ $# -eq 0 || "$1" == -* ]]; then
    python -m data.default_corpus --output-dir "$FOLDER/sample" > /dev/null
    set -- "$FOLDER/sample/corpus.jsonl" "$@"
fi
python -m data.webtext run --output "$FOLDER/stages" --output-prefix "${WEBTEXT_PREFIX:-$ROOT/data/webtext/corpus}" "$@"
CORPUS="${WEBTEXT_PREFIX:-webtext}"  # the name `webtext` would need the variable again
say "report: $FOLDER/stages/report.html; to train on it: --train-data $CORPUS --tokenizer-type GPT2BPETokenizer"
