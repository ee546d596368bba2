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
    rows+=("$(printf '%-24s %-7s %s' "$name" "$result" "$(grep -E '^ours|passed|failed' -- "$log" | tail -n 1)")")
    rm -f -- "$log"
}

check "pytest -m gpu" python -m pytest -m gpu -q "$@"
for model in 124M 345M; do
    for compile in "" --compile; do  # beside the same plain-torch model, compiled or not
        check "$model bf16 $compile" "$PYTHON" scripts/bench/step_time.py --device cuda --model "$model" --seq 1024 --batch 8 \
            --precision bf16 --steps 20 --warmup 5 --contenders plain,ours,zero2,zero3 $compile
    done
done

printf '\n%-24s %-7s %s\n' check result "last line"
printf '%s\n' "${rows[@]}"
exit "$status"
