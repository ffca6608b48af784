"""The tasks of a verifiers environment as a data file for env.name=verifiers:

    python scripts/verifiers/make_tasks.py --id my_taskset --python envs/verifiers/bin/python --out tasks.jsonl
    python scripts/verifiers/make_tasks.py --id my_taskset --python envs/verifiers/bin/python --out tasks.jsonl \\
        --taskset split=train --count 500

A row holds the data of one task, from which the environment makes the task again, and the prompt for people to read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from toolrl.envs.verifiers.env import FIELD, VerifiersFactory
from toolrl.envs.verifiers.process import list_tasks
from verl.errors import DataError, VerlError
from verl.registry import option


def as_row(id: str, data: Mapping[str, Any]) -> dict[str, Any]:
    prompt = data.get("prompt") or f"(the environment {id} opens the conversation)"
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if data.get("system_prompt"):
        messages.insert(0, {"role": "system", "content": data["system_prompt"]})
    return {
        "data_source": f"verifiers/{id}",
        "prompt": messages,
        "reward_model": {"ground_truth": "judged by the environment"},
        "extra_info": {FIELD: dict(data)},
    }


async def read(id: str, python: str, taskset: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    factory = VerifiersFactory(id, python, taskset)
    try:
        return [as_row(id, data) for data in await list_tasks(factory.worker, count)]
    finally:
        await factory.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--id", required=True, help="of the environment: an installed module with a taskset")
    parser.add_argument("--python", required=True, help="interpreter with verifiers and that module")
    parser.add_argument("--taskset", type=option, action="append", default=[], metavar="KEY=VALUE", help="its settings")
    parser.add_argument("--count", type=int, default=1_000_000, help="at most; needed for an endless taskset")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        rows = asyncio.run(read(arguments.id, arguments.python, dict(arguments.taskset), arguments.count))
        if not rows:
            raise DataError(f"the environment {arguments.id} has no tasks")
    except VerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with arguments.out.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    print(f"{len(rows)} tasks in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
