#!/usr/bin/env bash
# Train a policy to call tools with GRPO.
#
#   bash train_grpo.sh                       the embedded tasks and their model (recipe=composed_grpo), < 10 minutes on a CPU
#   BASE_MODEL=PATH_OR_HUB_NAME EXPERIMENT_NAME=NAME bash train_grpo.sh   ToolRL's experiment (recipe=toolrl_grpo)
#
# BASE_MODEL=smollm2 is SmolLM2-135M-Instruct, created by scripts/prepare_smollm2.py on first use. Further variables:
# DATA_DIR (train.parquet and test.parquet; dataset/rlla_4k), N_GPUS (those found), ROLLOUT_TP_SIZE (1), NNODES (1), and
# the reward's switches of docs/reward.md, for example `export WITHLENGTH=1`. Arguments override the configuration:
#   bash train_grpo.sh trainer.total_training_steps=20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/train.sh
train grpo "$@"
