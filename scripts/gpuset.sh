#!/usr/bin/env bash
# Runs the tests of the pinned GPU set (torch 2.11, vLLM 0.24 for CUDA) on a machine that need not have a GPU:
#   bash scripts/gpuset.sh              trainer, checkpoints and losses under that torch, then all tests marked gpuset
#   bash scripts/gpuset.sh ARGUMENTS    pytest with these arguments in that environment
#
# GPUSET_ENV: the environment, 10 GB, which the first run builds in about five minutes; default .venv-gpu.
# STAGE: the folder of bench/gpu/stage.py's archives for tests/gpuset/test_stage.py; default outputs/stage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VERL_VENV VERL_DEVICE=gpu VERL_DEV=1
VERL_VENV="$(realpath -m "${GPUSET_ENV:-.venv-gpu}")"
source scripts/setup_env.sh
export PYTHONPATH="$PWD"  # the environment may have been built from another checkout

# vLLM's extensions link to the driver's library, which a machine without a GPU lacks.
if ! "$VERL_PYTHON" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then
    mkdir -p "$VERL_VENV/stub"
    gcc -shared -fPIC -o "$VERL_VENV/stub/libcuda.so.1" tests/gpuset/libcuda_stub.c
    export LD_LIBRARY_PATH="$VERL_VENV/stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi

# flash-attn's Python, without its extension and in a folder of its own, for tests/gpuset/test_flash_attn.py.
if [[ ! -d "$VERL_VENV/flash-attn" ]]; then
    rm -rf "$VERL_VENV/flash-attn.unfinished"
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE "$VERL_PYTHON" -m pip install --quiet \
        --no-deps --no-build-isolation --no-cache-dir --target "$VERL_VENV/flash-attn.unfinished" \
        --requirement scripts/requirements/flash.txt
    mv "$VERL_VENV/flash-attn.unfinished" "$VERL_VENV/flash-attn"
fi

if (($#)); then exec "$VERL_PYTHON" -m pytest "$@"; fi
"$VERL_PYTHON" -m pytest -m "not slow and not gpu and not gpuset and not browser and not chaos" \
    tests/verl/algorithms tests/verl/batch tests/verl/checkpoint tests/verl/workers tests/verl/transfer tests/verl/trainer/test_train_step.py \
    tests/toolrl/check/plan tests/verl/rollout/test_hf_engine.py
"$VERL_PYTHON" -m pytest -m gpuset
TRITON_INTERPRET=1 "$VERL_PYTHON" -m pytest -m gpuset tests/verl/workers/test_kernels.py tests/gpuset/test_rejection.py
