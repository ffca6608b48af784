"""The Python API of `verl` under the name of the distribution. `python -m toolrl` is the command `toolrl`.

Modules are imported lazily, on first use of a name.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def _check_package() -> None:
    """Raises ImportError if the package `verl` that is found is veRL's own, which has the same import name."""
    spec = find_spec("verl")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / "embedded.py").is_file():
        raise ImportError(
            f"`import verl` finds another package than toolrl's, in {folder}: veRL, from PyPI or a checkout, has the "
            "same import name. Use an environment without it (pip uninstall verl toolrl, then pip install toolrl), or "
            "take its folder from PYTHONPATH"
        )


_check_package()

from verl import __version__ as __version__  # noqa: E402

_API = {
    "Callback": "verl.trainer.callbacks",
    "Completion": "verl.types",
    "Config": "verl.config.schema",
    "ConfigError": "verl.errors",
    "DataError": "verl.errors",
    "Env": "verl.envs.base",
    "Message": "verl.types",
    "Observation": "verl.envs.base",
    "Reward": "verl.utils.reward_score.base",
    "RllaOptions": "verl.utils.reward_score.rlla",
    "Score": "verl.types",
    "ServiceDownError": "verl.errors",
    "StepResult": "verl.envs.base",
    "Task": "verl.types",
    "ToolCall": "verl.types",
    "ToolError": "verl.envs.tools.base",
    "ToolSpec": "verl.types",
    "Trajectory": "verl.types",
    "Rollout": "toolrl.api.run",
    "Run": "toolrl.api.run",
    "build_reward": "verl.utils.reward_score.base",
    "compute_score": "verl.utils.reward_score.rlla",
    "evaluate": "toolrl.api.api",
    "load_config": "verl.config.load",
    "load_run": "toolrl.api.run",
    "probe": "toolrl.api.api",
    "rewards": "toolrl.api.inputs",
    "sft": "toolrl.api.api",
    "tool": "verl.envs.tools.function",
    "train": "toolrl.api.api",
    "written": "verl.utils.reward_score.base",
}
__all__ = ["__version__", *_API]  # noqa: PLE0604  all are strings


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'toolrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_API[name]), name)


def __dir__() -> list[str]:
    return __all__


def main() -> int:
    """The command `toolrl`."""
    from toolrl.cli import main as run

    return run()
