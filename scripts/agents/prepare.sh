#!/usr/bin/env bash
# An environment of its own for an agent of examples/agents: what scripts/agents/requirements pins, and nothing of ours.
#
#   bash scripts/agents/prepare.sh NAME [FOLDER]     NAME: openai_loop, ..; default folder: .agents/NAME
#
# For env.options.python=FOLDER/bin/python, or NODE_PATH=FOLDER/node_modules. PYTHON=python3.12 chooses the interpreter
# (3.11 or later).
set -euo pipefail

requirements=$(cd "$(dirname "$0")/requirements" && pwd)
name=${1:?usage: bash scripts/agents/prepare.sh NAME [FOLDER]}
folder=${2:-.agents/$name}
if [[ -f "$requirements/$name.txt" ]]; then
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet -r "$requirements/$name.txt"
    echo "env.options.python=$folder/bin/python"
elif [[ -f "$requirements/$name.json" ]]; then
    mkdir -p "$folder"
    cp "$requirements/$name.json" "$folder/package.json"
    npm install --prefix "$folder" --silent
    echo "NODE_PATH=$folder/node_modules"
else
    echo "there is no agent $name, only: $(cd "$requirements" && ls | sed 's/\..*//' | sort | xargs)" >&2
    exit 2
fi
