#!/usr/bin/env bash
# The tests. Without arguments: flake8, mypy and the whole suite; arguments go to pytest (`-k zero`, `tests/mpu`,
# `@tests/smoke.txt`: two minutes).
WITH_TESTS=1
. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd -- "$ROOT"

python -c 'import pytest' 2>/dev/null || fail "$PYTHON lacks pytest; install requirements-test.txt there, or unset PYTHON"

# flake8 and mypy, whose lines come after the tests.
look() {
    local tool status=0
    for tool in flake8 mypy; do
        if ! python -c "import $tool" 2>/dev/null; then
            say "$tool: not installed in $PYTHON, skipped"
        elif python -m "$tool" $([[ $tool == flake8 ]] && echo .); then
            say "$tool: passed"
        else
            say "$tool: failed"
            status=1
        fi
    done
    return "$status"
}

status=0 together=() slowest=()
if [[ $# -eq 0 ]]; then
    # Three at a time where that is possible: most of a multi-rank test is one rank waiting for another, and with two the
    # cores of a small machine are idle half of the time. Each has a third of the files, and a process that is
    # done takes files from the others. The two tools check the sources meanwhile.
    if python -c 'import xdist' 2>/dev/null; then together=(-n 3 --dist worksteal); fi
    slowest=(--durations 30 --durations-min 5)
    seen="$(mktemp)"
    look >"$seen" 2>&1 & looking=$!
    trap 'kill "$looking" 2>/dev/null || true; rm -f "$seen"' EXIT  # a trap that fails would be the script's exit code
fi
python -m pytest "${together[@]}" "${slowest[@]}" "$@" || status=$?
if [[ $# -eq 0 ]]; then
    wait "$looking" || status=1
    cat "$seen" >&2
fi
exit "$status"
