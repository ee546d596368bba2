# Sourced by every script: afterwards ROOT is the repository, PYTHON a Python with all packages, and `python` runs it.
#
#   PYTHON=some/python          that one is used as it is; nothing is installed
#   an installed package        its Python is used as it is: these files are then in `megatron/scripts` of site-packages
#   an active virtualenv        is used; missing packages are added, present ones are kept
#   otherwise                   the project's own .venv is made once and used from then on
#
# WITH_TESTS=1 before sourcing adds requirements-test.txt. The caller's folder stays the current one.

set -euo pipefail
unset CDPATH
ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"

say() { printf '%s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

given() {  # FLAG ARGUMENTS...: whether the user gave this flag, spelt with dashes or underscores
    local flag="$1" word
    shift
    for word in "$@"; do
        word="${word%%=*}"
        [[ "${word//_/-}" != "$flag" ]] || return 0
    done
    return 1
}

# Ours come first on the path where ROOT is the repository; an installation is on the path already.
INSTALLED="" LAUNCHER_VARIABLES="$ROOT" PROGRAM=("$ROOT/pretrain_gpt2.py")
if [[ ! -e "$ROOT/pretrain_gpt2.py" ]]; then INSTALLED=yes LAUNCHER_VARIABLES="" PROGRAM=(-m pretrain_gpt2); fi
with_sources() { local path="$LAUNCHER_VARIABLES${LAUNCHER_VARIABLES:+:}${PYTHONPATH:-}"; echo "${path%:}"; }

# The scripts' own Python: nothing from the current folder (-P), which may hold another `data`.
python() { PYTHONPATH="$(with_sources)" "$PYTHON" -P "$@"; }

recent_enough() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

requirement_files() {
    echo requirements.txt
    [[ -z "${WITH_TESTS:-}" ]] || echo requirements-test.txt
}

use_given_python() {
    local path
    path="$(command -v -- "$PYTHON")" || fail "PYTHON=$PYTHON is not a command; give the path of a Python, or leave it unset"
    [[ "$path" == /* ]] || path="$PWD/$path"
    PYTHON="$path"
    recent_enough "$PYTHON" || fail "PYTHON=$PYTHON does not run, or is not Python 3.11, 3.12 or 3.13; give one of them"
    "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("numpy")))' ||
        fail "PYTHON=$PYTHON lacks torch or numpy; install requirements.txt there, or leave PYTHON unset to get a .venv"
}

find_base_python() {
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13; do
        if recent_enough "$candidate"; then command -v "$candidate"; return; fi
    done
    fail "no Python 3.11 to 3.13 found (tried python3, python3.12, python3.11, python3.13); install one, or set PYTHON"
}

up_to_date() {  # every requirements file is the one that was installed last
    local file
    "$VENV/bin/python" -c '' 2>/dev/null || return 1
    for file in $(requirement_files); do
        cmp -s -- "$ROOT/$file" "$VENV/.installed-$file" || return 1
    done
}

missing_packages() {  # FILE: its lines that are not satisfied; in a borrowed environment any version will do
    "$VENV/bin/python" - "$1" "$OWN" <<'PY'
import importlib.metadata as metadata
import sys

for line in open(sys.argv[1]):
    wanted, conditional, _ = line.strip().partition(";")  # of which pip decides
    name, _, version = wanted.partition("==")
    if not name or name.startswith("#"):
        continue
    try:
        present = metadata.version(name)
    except metadata.PackageNotFoundError:
        present = ""
    # A conditional requirement may have come with torch, in the version that torch wants.
    if not present or sys.argv[2] == "yes" and not conditional and present.partition("+")[0] != version:
        print(line.strip())
PY
}

install() {  # FILE
    local package packages others=()
    packages="$(missing_packages "$ROOT/$1")"
    for package in $packages; do
        if [[ "$package" == torch==* ]]; then pip_install "$package"; else others+=("$package"); fi
    done
    [[ ${#others[@]} -eq 0 ]] || pip_install "${others[@]}"
    cp -- "$ROOT/$1" "$VENV/.installed-$1"
}

pip_install() {
    say "setup: installing $* into $VENV (once; torch takes some minutes)"
    : >"$VENV/.installing"
    "$VENV/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$@" >&2 || {
        rm -f -- "$VENV/.installing"
        fail "pip could not install $*: see its message above; check network and disk space and start again"
    }
    rm -f -- "$VENV/.installing"
}

make_venv() {
    # The marker of an installation that was killed half-way: a package may look installed and not be whole.
    if [[ -e "$VENV/.installing" ]] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        local base
        base="$(find_base_python)"
        say "setup: making the virtual environment $VENV"
        rm -rf -- "$VENV"
        "$base" -m venv "$VENV" >&2 || fail "$base cannot make $VENV; install its venv module (python3-venv), check space"
    fi
}

use_venv() {
    OWN=no VENV="${VIRTUAL_ENV:-}"
    if [[ -z "$VENV" || ! -x "$VENV/bin/python" || "$VENV" -ef "$ROOT/.venv" ]]; then OWN=yes VENV="$ROOT/.venv"; fi
    PYTHON="$VENV/bin/python"
    ! up_to_date || return 0
    local lock="$ROOT/.cache/setup.lock"
    mkdir -p -- "$ROOT/.cache" && : >>"$lock" || fail "cannot write $lock; use a writable copy, or set PYTHON"
    (   # A second script that starts meanwhile waits here, and then finds everything done.
        ! command -v flock >/dev/null || flock 9
        ! up_to_date || exit 0
        [[ "$OWN" == no ]] || make_venv
        recent_enough "$PYTHON" || fail "$PYTHON is not Python 3.11, 3.12 or 3.13; deactivate it, or make one of these"
        local file
        for file in $(requirement_files); do install "$file"; done
    ) 9>>"$lock"
}

use_installed_python() {  # the one beside whose packages this file is: LIB/python3.x/site-packages/megatron/scripts
    local prefix="${ROOT%/lib*/python3*}"
    PYTHON="$prefix/bin/python3"
    [[ -x "$PYTHON" ]] || fail "$ROOT is not the repository, and $PYTHON is not a Python interpreter; set PYTHON to the one that runs this"
}

if [[ -n "${PYTHON:-}" ]]; then
    use_given_python
elif [[ -n "$INSTALLED" ]]; then
    use_installed_python
else
    use_venv
fi
