#!/usr/bin/env bash
# The tests. Without arguments: flake8, mypy and the whole suite; arguments go to pytest (`-k zero`, `tests/mpu`, `-m gpu`).
WITH_TESTS=1
. "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
cd -- "$ROOT"

python -c 'import pytest' 2>/dev/null || fail "$PYTHON lacks pytest; install requirements-test.txt there, or unset PYTHON"

status=0
if [[ $# -eq 0 ]]; then
    for tool in flake8 mypy; do
        if ! python -c "import $tool" 2>/dev/null; then
            say "$tool: not installed in $PYTHON, skipped"
        elif python -m "$tool" $([[ $tool == flake8 ]] && echo .); then
            say "$tool: passed"
        else
            say "$tool: failed (pytest follows)"
            status=1
        fi
    done
fi
# The whole suite takes three files at a time where it can: most of a multi-rank test is one rank waiting for another, and
# with two the cores of a small machine are idle half of the time.
together=() slowest=()
if [[ $# -eq 0 ]] && python -c 'import xdist' 2>/dev/null; then together=(-n 3 --dist loadfile); fi
if [[ $# -eq 0 ]]; then slowest=(--durations 30 --durations-min 5); fi
python -m pytest "${together[@]}" "${slowest[@]}" "$@" || status=$?
exit "$status"
