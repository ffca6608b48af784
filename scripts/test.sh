#!/usr/bin/env bash
# Runs the tests in an environment that has what they need; arguments go to pytest (bash scripts/test.sh -m slow).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VERL_DEV=1
source scripts/setup_env.sh
"$VERL_PYTHON" -m pytest "$@"
