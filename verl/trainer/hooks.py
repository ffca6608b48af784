"""What the kit adds to a training run, where it is installed: every tool is a folder of verl/kit, loaded by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from verl.batch.token_batch import TokenBatch
from verl.episodes.group import GroupRollout
from verl.errors import ConfigError
from verl.types import Task, TrajectoryGroup

if TYPE_CHECKING:
    from verl.trainer.learner import Learned  # loads torch

TOOLS: Mapping[str, str] = {
    "preflight": "verl.kit.preflight.preflight:preflight",
    "plan": "verl.kit.plan.plan:plan_of_run",
    "collapse": "verl.kit.collapse.collapse:build_watch",
    "samples": "verl.kit.kept_samples.keeper:build_keeper",
    "replay": "verl.kit.replay.record:build_recorder",
    "online_eval": "verl.kit.evaluation.online:build_online_eval",
    "check_benchmarks": "verl.kit.evaluation.registry:check_benchmarks",
    "evaluate": "verl.kit.evaluation.evaluate:evaluate",
    "probe": "verl.kit.probe.run:probe",
    "sft": "verl.kit.sft.build:built",
    "generate": "verl.kit.generation.generation:generate",
    "verdict": "verl.kit.report.verdict:verdict_of",
    "model_files": "verl.kit.export.model_files:write_model_files",
    "chat": "verl.kit.generation.chat:chat",
}
MAX_ROLLBACKS = 2  # per process; the next alarm stops the run


def needed_tool(name: str) -> Any:
    """The tool of this name. Raises ConfigError if it is not installed."""
    found = installed_tool(name)
    if found is None:
        raise ConfigError(f"{TOOLS[name].partition(':')[0]} or a tool that it uses is not installed")
    return found


def installed_tool(name: str) -> Any | None:
    """The tool of this name; None if its folder, or that of a tool that it uses, is missing."""
    module, _, attribute = TOOLS[name].partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("verl.kit"):
            return None
        raise


class Watch(Protocol):
    """Looks for a collapse in the metrics of every step. By default it has no rules."""

    @property
    def triggered(self) -> Mapping[str, Any]:
        """The rules that are triggered now."""
        return {}

    def observe(self, step: int, metrics: Mapping[str, float]) -> Sequence[object]:
        """The alarms raised by this step; `str` describes one."""
        return ()

    def state(self) -> dict[str, Any]:
        """As plain JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""
        return


class NoWatch(Watch):
    """No rules."""


class Recorder(Protocol):
    """Keeps what a step needs to be replayed."""

    def write(self, step: int, batch: TokenBatch, kl_coefficient: float | None, metrics: Mapping[str, float]) -> None:
        """Write the record of a step."""

    def truncate_after(self, step: int) -> None:
        """Remove the records of later steps."""


class SampleKeeper(Protocol):
    """Keeps the tokens of some rollouts of every step, to be looked at."""

    def choose(self, groups: Sequence[TrajectoryGroup]) -> Sequence[Any]:
        """Samples, each with its `row` in the batch of these groups; the update traces them."""

    def collect(
        self,
        groups: Sequence[TrajectoryGroup],
        logged: Sequence[TrajectoryGroup],
        chosen: Sequence[Any],
        outcome: Learned,
    ) -> Any:
        """What is known about the chosen samples. logged: the groups of the step's transcript"""

    def write(self, step: int, samples: Any) -> None:
        """Write what was collected in a step."""

    def truncate_after(self, step: int) -> None:
        """Remove the files of later steps."""


class OnlineEval(Protocol):
    """Benchmarks during training."""

    def files(self) -> Iterable[str]:
        """Descriptions of the benchmarks' files."""

    def tasks(self) -> Mapping[str, Sequence[Task]]:
        """The tasks by category."""

    async def run(self, rollout: GroupRollout) -> dict[str, float]:
        """The metrics eval/*. rollout: greedy"""

    async def close(self) -> None:
        """Close the resources shared by episodes."""
