# Sourced by the training scripts: set-up, what this node has, and the flags of the shipped presets.
# --help and --help-all print the trainer's help at once: they need no package. A script of another program names its
# module in HELP_OF before.
#
#   GPUS_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT   the job's shape, from the environment
#   PRESET                                                  tiny, small, 124M, 345M, ... (pretrain_gpt2.py --help)
#   TRAIN_SECONDS                                           how long training should take (about; --train-iters wins)
#   RUNS                                                    where runs are kept (the repository's runs/; of an installation, runs/ here)
#
# The arguments of a script go through to pretrain_gpt2.py after the script's own flags, so they win. With --config FILE
# among them the file is the recipe, and the script adds neither model, corpus nor folders. With --dry-run
# among them the scripts only print the plan of the run on GPUs, whether there are any here or not.

HELP=""
for word in "$@"; do
    if [[ "$word" =~ ^(-h|--help|--help[-_]all)$ ]]; then HELP="$word"; fi
done
ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [[ -n "$HELP" && -z "${HELP_OF:=}" && -e "$ROOT/pretrain_gpt2.py" ]]; then
    for candidate in "${PYTHON:-}" "${VIRTUAL_ENV:-/none}/bin/python" "$ROOT/.venv/bin/python" python3 python3.12 python3.11; do
        if "${candidate:-false}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$candidate" -P "$ROOT/pretrain_gpt2.py" "$HELP"
        fi
    done
fi

. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
if [[ -n "$HELP" && "$HELP" != --help?all && -n "$HELP_OF" ]]; then PROGRAM=(-m "$HELP_OF"); fi
[[ -z "$HELP" ]] || PYTHONPATH="$(with_sources)" exec "$PYTHON" -P "${PROGRAM[@]}" "$HELP"

RUNS="${RUNS:-${LAUNCHER_VARIABLES:-$PWD}/runs}"
NNODES="${NNODES:-1}" NODE_RANK="${NODE_RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-6000}"

DRY_RUN="" CONFIG_FILE=""
if given --dry-run "$@"; then DRY_RUN=yes; fi
if given --config "$@"; then CONFIG_FILE=yes; fi  # it has the whole recipe: preset, corpus, batch, where to save

# Sets GPUS, how many torch can use, and GPU_BYTES, the memory of the first. Asks torch (seconds) once, and only where
# the driver's tool says that there is one. (`read` and not `timeout`: a process that hangs in the driver cannot be
# killed.)
GPUS="" GPU_BYTES="" DRIVER_SECONDS="${DRIVER_SECONDS:-60}"
look_for_gpus() {
    local found="0 0" listed="" code=0
    [[ -z "$GPUS" ]] || return 0
    [[ "$DRIVER_SECONDS" =~ ^[1-9][0-9]{0,4}$ ]] || fail "DRIVER_SECONDS is '$DRIVER_SECONDS'; expected whole seconds, 1 or more"
    if command -v nvidia-smi >/dev/null; then
        read -r -d "" -t "$DRIVER_SECONDS" listed < <(nvidia-smi -L 2>/dev/null) || code=$?
        [[ $code -le 128 ]] || fail "nvidia-smi has not answered in $DRIVER_SECONDS s: the driver of the GPUs hangs (take nvidia-smi off the PATH to do without)"
    fi
    if [[ $'\n'"$listed" == *$'\n'"GPU "[0-9]* ]]; then
        found="$(python -c 'import torch
count = torch.cuda.device_count()
print(count, torch.cuda.get_device_properties(0).total_memory if count else 0)' | tail -n 1)"
    fi
    read -r GPUS GPU_BYTES <<<"$found"
}

# Sets GPUS_PER_NODE (ranks on this node), DEVICE (gpu or cpu) and PRESET. $1: ranks wanted without word from the
# environment (a number, or `all` for every GPU); $2: the fewest that make sense.
choose_ranks() {
    local gpus
    look_for_gpus
    gpus="$GPUS" DEVICE=gpu
    if [[ -n "$DRY_RUN" && "$gpus" -lt "$2" ]]; then gpus="$2"; fi
    if [[ "$gpus" -lt "$2" ]]; then
        DEVICE=cpu
        # One GPU cannot do what needs two: leave it out rather than fail.
        if [[ "$gpus" -gt 0 ]]; then export CUDA_VISIBLE_DEVICES=; fi
    fi
    if [[ "$1" != all ]]; then
        GPUS_PER_NODE="$1"
    elif [[ $DEVICE == gpu ]]; then
        GPUS_PER_NODE="${GPUS_PER_NODE:-$gpus}"
    else
        GPUS_PER_NODE="${GPUS_PER_NODE:-2}"
    fi
    [[ "$GPUS_PER_NODE" =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE is '$GPUS_PER_NODE'; expected a number, 1 or more"
    if [[ -n "$CONFIG_FILE" ]]; then
        say "$GPUS_PER_NODE $DEVICE rank(s), with the settings of --config"
    elif [[ -n "$DRY_RUN" ]]; then
        PRESET="${PRESET:-124M}"
        say "dry run: the $PRESET model, $((GPUS_PER_NODE * NNODES)) rank(s)"
    elif [[ $DEVICE == gpu ]]; then
        PRESET="${PRESET:-124M}"
        say "$GPUS_PER_NODE of $gpus GPUs: the $PRESET model (PRESET=345M is the classic one)"
    else
        # On a CPU a step's memory is the C library's: keep its holes fit for use (megatron/train/processor.py).
        export GLIBC_TUNABLES="glibc.malloc.tcache_count=0${GLIBC_TUNABLES:+:$GLIBC_TUNABLES}"
        PRESET="${PRESET:-small}"
        say "$([[ $gpus -eq 0 ]] && echo no GPU || echo only one GPU): $GPUS_PER_NODE CPU rank(s) of the $PRESET model"
    fi
}

real_size() {  # PRESET: the model that a script is for, unless the environment names one or there is no GPU to train it
    [[ -n "${PRESET:-}" ]] || { look_for_gpus; [[ -z "$DRY_RUN" && "$GPUS" -eq 0 ]]; } || PRESET="$1"
}

# Adds the flags of a corpus to FLAGS, unless the user brings one; MOST_STEPS is for limit_time.
add_corpus() {
    if given --train-data "$@" || given --mock-data "$@"; then
        # The small preset's own tokenizer is of the default corpus.
        [[ "$PRESET" != small ]] || given --tokenizer-type "$@" || given --tokenizer-path "$@" ||
            FLAGS+=(--tokenizer-type GPT2BPETokenizer)
        return
    fi
    local folder="$RUNS/default_corpus"
    python -m data.default_corpus --output-dir "$folder" >/dev/null
    FLAGS+=(--sample-tokens 80 --sample-prompt "It was" "She" "\"My dear")
    if [[ $DEVICE == gpu ]]; then MOST_STEPS=600; fi  # 11 times over the corpus; more would learn it by heart
    if [[ "$PRESET" == small ]]; then
        FLAGS+=(--train-data "$folder/corpus" --tokenizer-path "$folder/tokenizer.model")
    else
        FLAGS+=(--train-data "$folder/corpus.jsonl")  # made into tokens of the preset's own tokenizer, once
    fi
}

# Adds the preset's batch, length and learning rate. limit_time adds a later --train-iters, which wins, where it
# measures the speed.
add_recipe() {
    local warmup=0.1
    # No dropout: attention without it runs in its fused kernel on every device.
    FLAGS+=(--preset "$PRESET" --split 980,19,1 --clip-grad 1.0 --weight-decay 0.1
            --attention-dropout 0 --hidden-dropout 0)
    case "$DEVICE:$PRESET" in
        *:tiny) warmup=0.05
                FLAGS+=(--batch-size 8 --train-iters 500 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
                        --eval-interval 250 --eval-iters 10 --save-interval 250) ;;
        cpu:*)  given --fp16 "$@" || FLAGS+=($(python -m megatron.train.processor))  # --bf16 where the processor has it
                TRAIN_SECONDS="${TRAIN_SECONDS:-240}"
                FLAGS+=(--batch-size 8 --train-iters 600 --eval-interval 200 --eval-iters 5 --save-interval 100)
                if [[ "$PRESET" == small ]]; then  # the lowest loss after minutes, by search
                    FLAGS+=(--num-layers 4 --hidden-size 256 --num-attention-heads 4 --position-embedding-type rope
                            --optimizer muon --lr 3e-2 --min-lr 0 --lr-decay-style linear --adam-beta2 0.95)
                    warmup=0.05
                else
                    FLAGS+=(--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine)
                fi ;;
        gpu:*)  given --fp16 "$@" || FLAGS+=(--bf16)
                TRAIN_SECONDS="${TRAIN_SECONDS:-300}"
                FLAGS+=(--batch-size 16 --train-iters 600 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine
                        --eval-interval 250 --eval-iters 10 --save-interval 500) ;;
    esac
    given --lr-warmup-iters "$@" || FLAGS+=(--warmup "$warmup")
    if [[ $DEVICE == gpu && ( -z "$DRY_RUN" || -n "${CARD_GB:-}" ) ]] && ! fits "$@"; then FLAGS+=(--checkpoint-activations); fi
}

# Sets --train-iters to what takes TRAIN_SECONDS by a short trial on this machine; resumes keep the number.
limit_time() {  # FOLDER ARGUMENTS...
    local file="$1/train_iters" seconds="" iterations=""
    shift
    if [[ -z "${TRAIN_SECONDS:-}" || "$NNODES" -gt 1 ]] || given --train-iters "$@" || given --skip-train "$@"; then return; fi
    read -r seconds iterations 2>/dev/null <"$file" || true
    if [[ "$seconds" != "$TRAIN_SECONDS" ]]; then
        say "measuring the speed of a few steps (--train-iters N does without)"
        iterations="$(python -m megatron.tune --steps-in "$TRAIN_SECONDS" --ranks "$GPUS_PER_NODE" \
            --device "${DEVICE/gpu/cuda}" "${FLAGS[@]}" "$@")" || exit
        echo "$TRAIN_SECONDS $iterations" >"$file"
    fi
    if [[ -n "${MOST_STEPS:=}" && "$iterations" -gt "$MOST_STEPS" ]]; then iterations="$MOST_STEPS"; fi
    FLAGS+=(--train-iters "$iterations")
    say "training takes $iterations steps"
}

fits() {  # ARGUMENTS...: whether the planner puts the run on this node's first GPU without recomputation. Runs
    # that it cannot plan are recomputed; the trainer reports invalid flags.
    local gb plan asked=()
    gb="${CARD_GB:-$((GPU_BYTES / 1000000000))}"
    [[ "$gb" =~ ^[0-9]*\.?[0-9]+$ && "$gb" =~ [1-9] ]] || fail "CARD_GB is '$gb'; expected the GB of a card, such as 80"
    while [[ $# -gt 0 ]]; do  # the planner reads the file that training writes
        case "$1" in
            --metrics[-_]file) shift ;;
            --metrics[-_]file=*) ;;
            *) asked+=("$1") ;;
        esac
        [[ $# -eq 0 ]] || shift
    done
    plan="$(python -m megatron.plan "${FLAGS[@]}" --save "$RUNS" --load "$RUNS" "${asked[@]}" --json \
        --ranks $((GPUS_PER_NODE * NNODES)) --card-gb "$gb" 2>/dev/null)" || return 1
    python -c 'import json, sys
rows = json.load(sys.stdin)["rows"]
sys.exit(not all(card["fits"] for row in rows if row["chosen"] for card in row["cards"].values()))' <<<"$plan"
}

plan_only() {  # ARGUMENTS...: print the plan. Does not return
    # The tokenizer of the default corpus is not made for this.
    if [[ "${PRESET:-}" == small ]] && ! given --tokenizer-path "$@"; then FLAGS+=(--vocab-size 8192); fi
    PYTHONPATH="$(with_sources)"
    export PYTHONPATH
    exec "$PYTHON" -P "${PROGRAM[@]}" "${FLAGS[@]}" --ranks $((GPUS_PER_NODE * NNODES)) \
        --ranks-per-node "$GPUS_PER_NODE" "$@"
}

# pretrain NAME [arguments...]: train into RUNS/NAME/PRESET, or go on from what is there. Does not return.
pretrain() {
    local folder="$RUNS/$1/${PRESET:-}"
    shift
    [[ -n "$CONFIG_FILE" ]] || add_recipe "$@"
    [[ -z "$DRY_RUN" ]] || plan_only "$@"
    if [[ -z "$CONFIG_FILE" ]]; then
        add_corpus "$@"
        mkdir -p -- "$folder" || fail "cannot make $folder; set RUNS to a folder that can be written"
        FLAGS+=(--save "$folder" --load "$folder" --keep-last 2 --metrics-file "$folder/metrics.jsonl"
                --data-cache-path "$RUNS/cache" --summary)
        given --print-config "$@" || limit_time "$folder" "$@"
    fi
    PYTHONPATH="$(with_sources)"
    export PYTHONPATH
    if given --print-config "$@"; then exec "$PYTHON" -P "${PROGRAM[@]}" "${FLAGS[@]}" "$@"; fi  # once, not on every rank
    exec "$PYTHON" -P -m megatron.launch --nproc-per-node "$GPUS_PER_NODE" --nnodes "$NNODES" --node-rank "$NODE_RANK" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "${PROGRAM[@]}" "${FLAGS[@]}" "$@"
}
FLAGS=()
