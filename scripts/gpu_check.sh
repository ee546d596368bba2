#!/usr/bin/env bash
# Checks of a GPU in a quarter of an hour, the most important first: the tests marked `gpu`, where the host waits for the
# device, the quick start (left, resumed, in fp16 at stage 3 with state on the host) beside the planner's prediction, speed
# and MFU of four models and of the same plain torch model (compiled as a whole), kernels of a step, text a second beside
# transformers and a compiled loop. The table comes last; gpu_check.jsonl holds the numbers. With two GPUs the tests
# include NCCL.
#
#   bash scripts/gpu_check.sh                        on a GPU; exit code 0 when everything passed, 1 otherwise, 2 without
#   bash scripts/gpu_check.sh --device cpu --tiny    every check's code on a CPU, with models of no size: minutes
#
#   SECONDS_IN_ALL   (1200) checks that have not begun by then are left out and named
WITH_TESTS=1
. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd -- "$ROOT"

DRY=() DECODE=() DEVICE=cuda TESTS=(-m gpu) MODEL=124M PREDICT=(--bf16 --batch-size 16)
if python -c 'import xdist' 2>/dev/null; then TESTS+=(-n 4 --dist loadfile); fi
if [[ "$*" == "--device cpu --tiny" ]]; then
    DEVICE=cpu DRY=(--device cpu --tiny --no-compile --steps 2 --warmup 1) TESTS=(-m gpu --accelerator-side)
    DECODE=(--device cpu --tiny --new 4 --rounds 1 --contenders ours,transformers)
    MODEL=tiny PREDICT=(--batch-size 8 --device cpu)
    export CUDA_VISIBLE_DEVICES=
elif [[ $# -gt 0 ]]; then
    fail "gpu_check.sh takes no arguments but '--device cpu --tiny'"
else
    python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "torch sees no GPU; run this on a machine with an NVIDIA GPU and its driver (nvidia-smi lists it)"
    python -c 'import torch; print("torch", torch.__version__, "on", torch.cuda.device_count(), torch.cuda.get_device_name())'
fi

RESULTS="${RESULTS:-$ROOT/gpu_check.jsonl}" rows=() status=0 END=$((SECONDS + ${SECONDS_IN_ALL:-1200}))
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
    rows+=("$(printf '%-22s %-7s %s' "$name" "$result" "$(grep -E '^(ours|plain):|^\* |^ saved|passed|failed|Error|^error' -- "$log" | tail -n 1)")")
    rm -f -- "$log"
}
report() {  # CHECK MODEL CONTENDER OPTIONS...
    check "$2 $3 $1" "$PYTHON" benchmarks/gpu_report.py "$1" --model "$2" --contender "$3" --results "$RESULTS" \
        "${DRY[@]}" "${@:4}"
}

quick_start() {  # NAME ARGUMENTS...: some steps of the quick start
    check "$1" env PYTHON="$PYTHON" RUNS="$RUNS" PRESET="$MODEL" bash scripts/pretrain_gpt2.sh --train-iters 60 \
        --eval-iters 2 --sample-tokens 8 "${@:2}"
}

RUNS="$(mktemp -d)"
trap 'rm -rf -- "$RUNS"' EXIT
check "pytest -m gpu" "$PYTHON" -m pytest -q "${TESTS[@]}" tests/gpu
report syncs 124M ours
quick_start "quick start, left" --exit-interval 30
quick_start "quick start, resumed"
check "predicted step" "$PYTHON" -m megatron.plan --time --preset "$MODEL" "${PREDICT[@]}" --attention-dropout 0 \
    --hidden-dropout 0
RUNS="$RUNS/other" quick_start "fp16, stage 3, offload" --mock-data --fp16 --zero-stage 3 --offload-optimizer-device cpu
report speed 124M ours --kernels
report speed 124M plain
report speed 350M ours --kernels
report speed 350M plain
for batch in 1 8; do
    check "124M decode x $batch" "$PYTHON" benchmarks/decode.py --batch $batch --contenders ours,transformers,compiled \
        --results "$RESULTS" "${DECODE[@]}"
done
for model in 774M 1.5B; do
    report speed $model ours
    report speed $model plain
done

printf '\n%-22s %-7s %s\n' check result "last line"
printf '%s\n' "${rows[@]}"
exit "$status"
