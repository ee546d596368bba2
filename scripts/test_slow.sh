#!/usr/bin/env bash
# The slow tests alone (four ranks, long runs, fault injection); arguments go to pytest.
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/test.sh" -m "slow and not gpu" "$@"
