#!/usr/bin/env bash
# Makes dataset/mini/model from scratch: random weights, then SFT on dataset/mini/sft.parquet.
#
#   bash scripts/make_mini_model.sh [FOLDER]     default: dataset/mini/model; about ten minutes on one core
#
# The same seed and the same library versions give the same model.
set -euo pipefail
out="$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../dataset/mini/model}")"
if [[ -n "${1:-}" && -e "$out" ]]; then
    echo "$out already exists; choose another folder" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"$VERL_PYTHON" scripts/make_mini_model.py --out "$work/untrained"
"$VERL_PYTHON" -m verl.trainer.main_sft \
    model.path="$work/untrained" model.compute_dtype=float32 \
    data.train_files=[dataset/mini/sft.parquet] data.train_batch_size=16 \
    data.max_prompt_length=256 data.max_response_length=256 \
    actor.optim.lr=3e-3 actor.optim.betas=[0.9,0.95] actor.optim.warmup_steps=40 \
    trainer.total_training_steps=1200 trainer.device=cpu \
    trainer.default_local_dir="$work" trainer.experiment_name=sft
rm -rf "$out"
mkdir -p "$(dirname "$out")"
cp -r "$work"/sft/checkpoints/step-001200/hf "$out"
echo "the model is in $out"
