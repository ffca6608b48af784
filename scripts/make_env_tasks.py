"""Write the bundled tasks of an environment to a data file for training or evaluation:

    python scripts/make_env_tasks.py bfcl --option category=base --option split=train --out bfcl_train.jsonl
    python scripts/make_env_tasks.py tau2 --option data=DIR --option domain=retail --out retail_train.jsonl

DIR is a folder like tau2-bench's data/tau2/domains. Rows have the columns of docs/data.md, `env` among them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from verl.envs.registry import build_tasks
from verl.errors import VerlError
from verl.host.files import ending_in, replacing
from verl.registry import option
from verl.types import Task


def to_row(task: Task) -> dict[str, Any]:
    """A task as a row for `verl.data.tasks.to_task`, which derives the task id from file and row number."""
    return {
        "data_source": task.data_source,
        "prompt": [{"role": message.role, "content": message.content} for message in task.prompt],
        "reward_model": {"style": "rule", "ground_truth": task.answer},
        "env": task.env,
        "extra_info": {**task.extra, "id": task.id},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file. Returns 1 on a user error."""
    parser = argparse.ArgumentParser(prog="python scripts/make_env_tasks.py", description="Tasks of an environment.")
    parser.add_argument("env")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=ending_in(".jsonl"), required=True, metavar="FILE.jsonl")
    arguments = parser.parse_args(argv)
    try:
        tasks = build_tasks(arguments.env, dict(arguments.option))
    except VerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    with replacing(arguments.out) as path:
        path.write_text(
            "".join(json.dumps(to_row(task), ensure_ascii=False) + "\n" for task in tasks), encoding="utf-8"
        )
    print(f"{len(tasks)} tasks in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
