#!/usr/bin/env bash
# Environment and data of scripts/train_swe.sh, and its SFT cold start: OUT/environment, OUT/data and
# OUT/cold_start/checkpoints/step-000400/hf.
#
#   bash scripts/swe/cold_start.sh OUT SEED     existing results are kept
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="$1" seed="$2"
if [[ -e "$out/cold_start/done" ]]; then
    exit 0
fi
rm -rf "$out/cold_start"  # left by an interruption
source scripts/setup_env.sh
if [[ ! -e "$out/environment" ]]; then
    "$VERL_PYTHON" scripts/swe/prepare.py --output "$out/environment" --copy pytest
fi
"$VERL_PYTHON" scripts/swe/make_mini.py --out "$out/data" --environment "$out/environment" --seed "$seed"
"$VERL_PYTHON" -m verl.trainer.main_sft \
    model.path=dataset/mini/model model.compute_dtype=float32 \
    data.train_files=["$out/data/demonstrations.jsonl"] data.train_batch_size=16 \
    data.max_prompt_length=256 data.max_response_length=80 \
    actor.optim.lr=2e-3 actor.optim.warmup_steps=20 trainer.total_training_steps=400 trainer.seed="$seed" \
    trainer.device=cpu trainer.default_local_dir="$out" trainer.experiment_name=cold_start
touch "$out/cold_start/done"
