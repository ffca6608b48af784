#!/usr/bin/env bash
# Demonstrates that a policy learns to repair programs: the model of dataset/mini on functions with a bug on one line,
# in real runtimes, judged by hidden tests. For two CPU cores.
#
#   bash scripts/train_swe.sh [SEED] [key=value ...]     default seed 0; overrides of the training configuration
#
# A short SFT cold start on demonstrations, GRPO, and the programs that training does not contain before and after it. OUT
# is the output folder (outputs/swe_mini_SEED).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seed=0
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    seed="$1"
    shift
fi
out="${OUT:-outputs/swe_mini_$seed}"
source scripts/setup_env.sh

bash scripts/swe/cold_start.sh "$out" "$seed"
before="$out/cold_start/checkpoints/step-000400/hf"
"$VERL_PYTHON" -m verl.trainer.main_ppo recipe=swe_mini model.path="$before" \
    data.train_files=["$out/data/train.jsonl"] data.val_files=["$out/data/test.jsonl"] \
    trainer.seed="$seed" trainer.default_local_dir="$out" "$@"
"$VERL_PYTHON" scripts/swe/resolved.py "$out/swe_mini/metrics.jsonl" "$out/data/test.jsonl"
