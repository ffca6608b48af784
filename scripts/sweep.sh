#!/usr/bin/env bash
# A hyperparameter sweep: the same training at several values of a setting, sequentially, compared in a table and a
# plot. The same command resumes an interrupted sweep.
#
#   bash scripts/sweep.sh recipe=zerotir env.max_tool_calls=0,2,4,20 model.path=MODEL data.train_files=[FILE]
#
# Arguments are those of main_ppo; one with several values, separated by commas, is swept (scripts/sweep.py --help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
exec "$VERL_PYTHON" scripts/sweep.py "$@"
