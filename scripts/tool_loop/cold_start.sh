#!/usr/bin/env bash
# Data of the tool loop, and its SFT cold start: OUT/data and OUT/cold_start/checkpoints/step-000400/hf.
#
#   bash scripts/tool_loop/cold_start.sh OUT SEED     existing results are kept
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="$1" seed="$2"
if [[ -e "$out/cold_start/done" ]]; then
    exit 0
fi
rm -rf "$out/cold_start"  # left by an interruption
source scripts/setup_env.sh
"$VERL_PYTHON" scripts/tool_loop/make_data.py --out "$out/data" --seed "$seed"
"$VERL_PYTHON" -m verl.trainer.main_sft \
    model.path=dataset/mini/model model.compute_dtype=float32 \
    data.train_files=["$out/data/demonstrations.jsonl"] data.train_batch_size=16 \
    data.max_prompt_length=80 data.max_response_length=80 \
    actor.optim.lr=1e-3 actor.optim.warmup_steps=20 trainer.total_training_steps=400 trainer.seed="$seed" \
    trainer.device=cpu trainer.default_local_dir="$out" trainer.experiment_name=cold_start
touch "$out/cold_start/done"
