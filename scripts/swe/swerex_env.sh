#!/bin/sh
# An environment with SWE-ReX, for the option `deployment` (docs/swe.md):
#   sh scripts/swe/swerex_env.sh FOLDER
set -e
: "${1:?usage: sh scripts/swe/swerex_env.sh FOLDER}"
python3 -m venv "$1"
"$1/bin/pip" install --quiet -r "$(dirname "$0")/swerex.txt"
