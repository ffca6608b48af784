#!/usr/bin/env bash
# Train a policy to call tools with PPO and a critic. Variables and arguments as in train_grpo.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/train.sh
train ppo "$@"
