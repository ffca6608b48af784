#!/usr/bin/env bash
# Runs the fast tests, three files in parallel (they wait as long as they compute), in a suitable environment. With
# arguments for pytest, the selected tests, sequentially: bash scripts/test.sh -m slow
#
# In separate environments, built on first use (scripts/setup_env.sh), with
#   Python 3.12:            VERL_VENV=.venv-3.12 VERL_BASE_PYTHON=python3.12 bash scripts/test.sh
#   the GPU set, torch 2.11: VERL_VENV=.venv-gpu VERL_DEVICE=gpu bash scripts/test.sh
# The second also works without a GPU: tests that need vLLM or a GPU are skipped (scripts/gpuset.sh has the former).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VERL_DEV=1
if [[ -n "${VERL_VENV:-}" ]]; then VERL_VENV="$(realpath -m "$VERL_VENV")"; fi  # tests start scripts in other folders
source scripts/setup_env.sh
if (($# == 0)); then set -- --numprocesses 3 --dist loadfile --no-loadscope-reorder; fi  # in the order of conftest.py
"$VERL_PYTHON" -m pytest "$@"
