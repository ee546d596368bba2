#!/usr/bin/env bash
# What must hold on a GPU: the tests marked `gpu`, then the benchmarks in scripts/bench/. The table comes last.
# Exit code: 0 when everything passed, 1 otherwise, 2 without a GPU.
WITH_TESTS=1
. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd -- "$ROOT"

python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch sees no GPU; run this on a machine with an NVIDIA GPU and its driver (nvidia-smi lists it)"
python -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.get_device_name())'

rows=() status=0
check() {  # NAME COMMAND...: run it, remember how it ended and its last line
    local name="$1" log result
    shift
    log="$(mktemp)"
    say "== $name"
    if "$@" 2>&1 | tee -- "$log"; then result=passed; else result=FAILED status=1; fi
    rows+=("$(printf '%-24s %-7s %s' "$name" "$result" "$(tail -n 1 -- "$log")")")
    rm -f -- "$log"
}

check "pytest -m gpu" python -m pytest -m gpu -q "$@"
for bench in scripts/bench/*.py; do
    [[ -e "$bench" ]] || continue
    check "$(basename -- "$bench")" env PYTHONPATH="$ROOT" "$PYTHON" "$bench"
done

printf '\n%-24s %-7s %s\n' check result "last line"
printf '%s\n' "${rows[@]}"
exit "$status"
