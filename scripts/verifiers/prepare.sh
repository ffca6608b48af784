#!/usr/bin/env bash
# An environment for env.name=verifiers: verifiers, pinned, and packages with environments.
#
#   bash scripts/verifiers/prepare.sh FOLDER [PACKAGE ..]
#
# Then: env.options.python=FOLDER/bin/python. PYTHON=python3.12 chooses the interpreter (3.11 or later).
set -euo pipefail

folder=${1:?usage: bash scripts/verifiers/prepare.sh FOLDER [PACKAGE ..]}
shift
requirements=$(dirname "$0")/requirements.txt
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet -r "$requirements" "$@" -c "$requirements"
"$folder/bin/python" -c "import verifiers.v1"
echo "env.options.python=$folder/bin/python"
