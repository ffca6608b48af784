#!/usr/bin/env bash
# A scaling study: the same training at several values of a setting, one after the other, compared in a table and a
# picture. The same command goes on where it was stopped.
#
#   bash scripts/sweep.sh recipe=zerotir env.max_tool_calls=0,2,4,20 model.path=MODEL data.train_files=[FILE]
#
# Arguments are those of main_ppo; one with several values, separated by commas, is swept (scripts/sweep.py --help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
exec "$VERL_PYTHON" scripts/sweep.py "$@"
