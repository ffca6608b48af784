#!/usr/bin/env bash
# Runs the fast tests, two files at a time, in an environment that has what they need. With arguments for pytest, those
# that they choose, one at a time: bash scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VERL_DEV=1
source scripts/setup_env.sh
if (($# == 0)); then set -- --numprocesses 2 --dist loadfile; fi
"$VERL_PYTHON" -m pytest "$@"
