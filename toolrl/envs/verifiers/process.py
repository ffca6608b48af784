"""The worker process (inside/worker.py) of the trainer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolrl.servers.line_process import Line, LineProcess
from verl.errors import ConfigError

WORKER = Path(__file__).with_name("inside") / "worker.py"


def worker_process(python: str, options: Mapping[str, Any], start_s: float) -> LineProcess:
    """python: interpreter with verifiers and the environment's package; options: of the worker. Raises ConfigError."""
    if not os.access(python, os.X_OK):
        hint = "build it with scripts/verifiers/prepare.sh"
        raise ConfigError(f"env.options.python={python} is not an interpreter of an environment; {hint}")
    python = str(Path(python).absolute())
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment.get('PATH', '')}"  # uv starts its programs
    command = (python, str(WORKER), json.dumps(options))
    return LineProcess(f"verifiers environment {options['id']}", command, "episode", start_s, environment=environment)


async def list_tasks(worker: LineProcess, count: int) -> list[Line]:
    """The data of the first tasks of the environment's taskset."""
    inbox = await worker.open("", list=count)
    tasks: list[Line] = []
    while "listed" not in (line := await worker.next(inbox)):
        tasks.append(line["task"])
    worker.forget("")
    return tasks
