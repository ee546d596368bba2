#!/usr/bin/env bash
# The smoke tier (tests/smoke.txt) under every available pair of Python and torch, with the versions of requirements.txt
# for the rest. Unavailable pairs are named in one line, and are not a failure.
#
#   bash scripts/test_versions.sh              pairs that are installed: pythonX on the path, or .cache/versions/X-torchY
#   bash scripts/test_versions.sh --install    makes the missing ones in .cache/versions (4.6 GB each with CUDA's torch)
#
#   PYTHONS, TORCHES   the versions to pair (3.11 3.12 3.13; 2.11.0 2.13.0)
set -euo pipefail
ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$ROOT"

VERSIONS="$ROOT/.cache/versions"

torch_of() {  # PYTHON: the version of its torch, without the build; nothing where the tests could not run
    "$1" -c 'import importlib.metadata as m, pytest, numpy; print(m.version("torch").partition("+")[0])' 2>/dev/null
}

find_pair() {  # PYTHON-VERSION TORCH-VERSION: a Python that has both
    local candidate
    for candidate in "$VERSIONS/$1-torch$2/bin/python" "python$1"; do
        candidate="$(command -v -- "$candidate")" || continue
        [[ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" == "$1" ]] || continue
        [[ "$(torch_of "$candidate")" == "$2" ]] || continue
        echo "$candidate"
        return
    done
    return 1
}

install_pair() {  # PYTHON-VERSION TORCH-VERSION
    local folder="$VERSIONS/$1-torch$2"
    "python$1" -c '' 2>/dev/null || return 1
    echo "installing Python $1 with torch $2 into $folder" >&2
    rm -rf -- "$folder"
    "python$1" -m venv "$folder" >&2 && "$folder/bin/pip" install --quiet --no-input "torch==$2" >&2 &&
        "$folder/bin/pip" install --quiet --no-input -r <(grep -v '^torch==' requirements.txt) \
            -r <(grep -v '^triton==' requirements-test.txt) >&2 || { rm -rf -- "$folder"; return 1; }
}

status=0 missing=()
for version in ${PYTHONS:-3.11 3.12 3.13}; do
    for torch in ${TORCHES:-2.11.0 2.13.0}; do
        if ! python="$(find_pair "$version" "$torch")"; then
            if [[ "${1:-}" != --install ]] || ! install_pair "$version" "$torch"; then
                missing+=("Python $version with torch $torch")
                continue
            fi
            python="$VERSIONS/$version-torch$torch/bin/python"
        fi
        echo "Python $version with torch $torch: $python"
        PYTHONPATH="$ROOT" "$python" -P -m pytest -q @tests/smoke.txt || status=1
    done
done
if [[ ${#missing[@]} -gt 0 ]]; then
    printf -v list '%s, ' "${missing[@]}"
    echo "not available, not tested: ${list%, } (--install makes them)"
fi
exit "$status"
