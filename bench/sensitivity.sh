#!/usr/bin/env bash
# Can learning alone distinguish a trainer with a planted mistake from the right one? bench/sensitivity/learning.py says how.
#
#   bash bench/sensitivity.sh [NAME ..]       mistakes; default: all
#
# A run takes some two minutes on two idle cores. Finished runs are kept, so that a second call continues. Settings, all
# optional:
#   SEEDS (5)                     seeds per mistake
#   JOBS (1)                      runs at the same time
#   OUT (outputs/sensitivity)     folder of the runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_env.sh
exec "$VERL_PYTHON" bench/sensitivity/learning.py "${OUT:-outputs/sensitivity}" --seeds "${SEEDS:-5}" --jobs "${JOBS:-1}" "$@"
