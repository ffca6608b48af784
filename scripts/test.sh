#!/usr/bin/env bash
# Runs the fast tests, two files at a time, in an environment that has what they need. With arguments for pytest, those
# that they choose, one at a time: bash scripts/test.sh -m slow
#
# In environments of their own, built the first time (scripts/setup_env.sh), under
#   Python 3.12:            VERL_VENV=.venv-3.12 VERL_BASE_PYTHON=python3.12 bash scripts/test.sh
#   the GPU set, torch 2.11: VERL_VENV=.venv-gpu VERL_DEVICE=gpu bash scripts/test.sh
# The second works without a GPU, too: what needs vLLM or a GPU is skipped there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VERL_DEV=1
if [[ -n "${VERL_VENV:-}" ]]; then VERL_VENV="$(realpath -m "$VERL_VENV")"; fi  # tests start scripts in other folders
source scripts/setup_env.sh
if (($# == 0)); then set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder; fi  # in the order of conftest.py
"$VERL_PYTHON" -m pytest "$@"
