#!/usr/bin/env bash
# Data of the shop, and its SFT cold start: OUT/data and OUT/cold_start/checkpoints/step-000500/hf.
#
#   bash bench/algorithms/shop_start.sh OUT     existing results are kept
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="$1"
if [[ -e "$out/cold_start/done" ]]; then
    exit 0
fi
rm -rf "$out/cold_start"  # left by an interruption
source scripts/setup_env.sh
"$VERL_PYTHON" bench/algorithms/shop.py --out "$out/data"
"$VERL_PYTHON" -m verl.trainer.main_sft \
    model.path=embedded:composed/model model.compute_dtype=float32 \
    data.train_files=["$out/data/demonstrations.jsonl"] data.train_batch_size=16 \
    data.prompt_template="$out/data/prompt.txt" env.tool_call_format=toolrl \
    data.max_prompt_length=224 data.max_response_length=256 \
    actor.optim.lr=1e-3 actor.optim.warmup_steps=20 trainer.total_training_steps=500 \
    trainer.device=cpu trainer.default_local_dir="$out" trainer.experiment_name=cold_start
touch "$out/cold_start/done"
