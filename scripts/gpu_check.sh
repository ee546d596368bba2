#!/usr/bin/env bash
# What must hold on a GPU, in one call of nine minutes: the tests marked `gpu`, where the host waits for the device, speed
# and MFU of four models beside the same plain torch model (compiled as a whole), text a second beside transformers and a
# compiled loop, kernels of a step, the planner against the allocator. The table comes last; gpu_check.jsonl holds the
# numbers. With two GPUs the tests include NCCL.
#
#   bash scripts/gpu_check.sh                        on a GPU; exit code 0 when everything passed, 1 otherwise, 2 without
#   bash scripts/gpu_check.sh --device cpu --tiny    every check's code on a CPU, with models of no size: minutes
#
#   SECONDS_IN_ALL   (540) what has not begun by then is left out, and said
WITH_TESTS=1
. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd -- "$ROOT"

DRY=() DECODE=() DEVICE=cuda TESTS=(-m gpu)
if [[ "$*" == "--device cpu --tiny" ]]; then
    DEVICE=cpu DRY=(--device cpu --tiny --no-compile --steps 2 --warmup 1) TESTS=(-m gpu --accelerator-side)
    DECODE=(--device cpu --tiny --new 4 --rounds 1 --contenders ours,transformers)
    export CUDA_VISIBLE_DEVICES=
elif [[ $# -gt 0 ]]; then
    fail "gpu_check.sh takes no arguments but '--device cpu --tiny'"
else
    python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "torch sees no GPU; run this on a machine with an NVIDIA GPU and its driver (nvidia-smi lists it)"
    python -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.device_count(), torch.cuda.get_device_name())'
fi

RESULTS="${RESULTS:-$ROOT/gpu_check.jsonl}" rows=() status=0 END=$((SECONDS + ${SECONDS_IN_ALL:-540}))
rm -f -- "$RESULTS"
check() {  # NAME COMMAND...: run it while there is time, remember how it ended and its last line
    local name="$1" log result left=$((END - SECONDS))
    shift
    if [[ $left -lt 10 ]]; then
        rows+=("$(printf '%-22s %-7s %s' "$name" "not run" "no time was left")") status=1
        return
    fi
    log="$(mktemp)"
    say "== $name"
    if timeout "$left" "$@" 2>&1 | tee -- "$log"; then result=passed; else result=FAILED status=1; fi
    rows+=("$(printf '%-22s %-7s %s' "$name" "$result" "$(grep -E '^(ours|plain):|passed|failed|Error' -- "$log" | tail -n 1)")")
    rm -f -- "$log"
}
report() {  # CHECK MODEL CONTENDER
    check "$2 $3 $1" "$PYTHON" scripts/bench/gpu_report.py "$1" --model "$2" --contender "$3" --results "$RESULTS" "${DRY[@]}"
}

report syncs 124M ours
report speed 124M ours
report speed 124M plain
report kernels 350M ours
report speed 350M ours
report speed 350M plain
for batch in 1 8; do
    check "124M decode x $batch" "$PYTHON" scripts/bench/decode.py --batch $batch --contenders ours,transformers,compiled \
        --results "$RESULTS" "${DECODE[@]}"
done
check "pytest -m gpu" "$PYTHON" -m pytest -q "${TESTS[@]}" tests/gpu
for model in 774M 1.5B; do
    report speed $model ours
    report speed $model plain
done

printf '\n%-22s %-7s %s\n' check result "last line"
printf '%s\n' "${rows[@]}"
exit "$status"
