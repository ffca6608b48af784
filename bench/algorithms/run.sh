#!/usr/bin/env bash
# Which algorithms differ in what they teach? bench/algorithms/study.py describes how this is measured.
#
#   bash bench/algorithms/run.sh [STAGE ..]     sweep, sort, confirm; default: all
#
# A run takes under a minute of a core (confirm: three). Finished runs are kept, so that a second call continues. Settings:
#   JOBS (2)                   processes that train at the same time, a core each
#   OUT (outputs/algorithms)   folder of the runs
#   KNOWN                      runs that are not run again, such as docs/assets/algorithm_study.jsonl.gz
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/setup_env.sh
exec "$VERL_PYTHON" bench/algorithms/study.py "${OUT:-outputs/algorithms}" --jobs "${JOBS:-2}" ${KNOWN:+--known "$KNOWN"} "$@"
