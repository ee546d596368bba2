# Sourced by the scripts that use a trained model. Afterwards RUNS is where runs are kept, and
#
#   asks_for_help ARGUMENTS...     --help is among them
#   names_a_model ARGUMENTS...     the user says which
#   trained_model                  prints the folder of the quick start's run that was saved last, or that of PRESET
. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
RUNS="${RUNS:-${LAUNCHER_VARIABLES:-$PWD}/runs}"

asks_for_help() { given --help "$@" || given -h "$@"; }
names_a_model() { given --load "$@" || given --load-hf "$@"; }

trained_model() {
    local latest newest=""
    for latest in "$RUNS"/pretrain_gpt2/"${PRESET:-}"*/latest; do
        [[ -z "${PRESET:-}" || "$latest" == */"$PRESET"/latest ]] || continue
        if [[ -e "$latest" && ( -z "$newest" || "$latest" -nt "$newest" ) ]]; then newest="$latest"; fi
    done
    [[ -n "$newest" ]] || fail "nothing is trained in $RUNS/pretrain_gpt2${PRESET:+ with PRESET=$PRESET} yet:" \
        "bash scripts/pretrain_gpt2.sh trains a model in about 4 minutes; or name one with --load DIR"
    dirname -- "$newest"
}
