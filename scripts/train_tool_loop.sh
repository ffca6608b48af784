#!/usr/bin/env bash
# Demonstrates that a policy learns to use a tool: the model of dataset/mini on products of three-digit numbers, which
# are beyond it, with Python in the sandbox. Under ten minutes on two CPU cores.
#
#   bash scripts/train_tool_loop.sh [SEED] [key=value ...]     default seed 0; overrides of the training configuration
#
# A short SFT cold start on demonstrations, GRPO, then the test questions again without the tool. OUT is the output
# folder (outputs/tool_loop_SEED).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seed=0
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    seed="$1"
    shift
fi
out="${OUT:-outputs/tool_loop_$seed}"
source scripts/setup_env.sh

bash scripts/tool_loop/cold_start.sh "$out" "$seed"
"$VERL_PYTHON" -m verl.trainer.main_ppo recipe=tool_loop \
    model.path="$out/cold_start/checkpoints/step-000400/hf" \
    data.train_files=["$out/data/train.jsonl"] data.val_files=["$out/data/test.jsonl"] \
    trainer.seed="$seed" trainer.default_local_dir="$out" "$@"

models=("$out"/tool_loop/checkpoints/step-*/hf)
echo "the same questions without the tool:"
"$VERL_PYTHON" -m verl.trainer.main_generation \
    model.path="${models[-1]}" data.val_files=["$out/data/test.jsonl"] eval.output="$out/without_tool.jsonl" \
    data.max_prompt_length=64 data.max_response_length=80 model.compute_dtype=float32 \
    reward.name=retool env.name=tool env.tool_call_format=tags env.tools=[python] \
    env.max_tool_calls=0
