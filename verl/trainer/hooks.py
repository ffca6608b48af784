"""What plug-ins may add to a training run, with their types: `python -m verl.trainer.main_ppo` works without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl.batch.token_batch import TokenBatch
from verl.episodes.group import GroupRollout
from verl.plugins import HOOKS, Plugin
from verl.types import Task, TrajectoryGroup

if TYPE_CHECKING:  # some load torch
    from rich.console import Console

    from verl.algorithms.algorithm import Algorithm
    from verl.batch.trace import Trace
    from verl.build.run import Inputs
    from verl.chat.template import ChatTemplate
    from verl.config.schema import Config
    from verl.trainer.learner import Learned

MAX_ROLLBACKS = 2  # per process; the next alarm stops the run


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

    def write(
        self, step: int, batch: TokenBatch, coefficients: Mapping[str, float], metrics: Mapping[str, float]
    ) -> None:
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
        trace: Trace,
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


class RunPlan(Protocol):
    """What a run will need."""

    def format_peak(self, measured: Mapping[str, float]) -> str:
        """The measured memory beside the expected one."""


class WriteModelFiles(Protocol):
    def __call__(self, folder: Path, state: Mapping[str, Any], *, user_code: bool) -> None:
        """Write what other programs need into the folder of a model. state: of the checkpoint"""


BENCHMARKS: Plugin[Callable[[Config, ChatTemplate], OnlineEval]] = Plugin(HOOKS["benchmarks"])
CHECK_BENCHMARKS: Plugin[Callable[[Sequence[str]], None]] = Plugin(HOOKS["check_benchmarks"])
COLLAPSE: Plugin[Callable[[Algorithm, Config], Watch]] = Plugin(HOOKS["collapse"])
MODEL_FILES: Plugin[WriteModelFiles] = Plugin(HOOKS["model_files"])
PLAN: Plugin[Callable[[Config, Inputs], RunPlan]] = Plugin(HOOKS["plan"])
PREFLIGHT: Plugin[Callable[[Config, Inputs, Any, Console], None]] = Plugin(HOOKS["preflight"])
REPLAY: Plugin[Callable[[Config, Path, str, int], Recorder]] = Plugin(HOOKS["replay"])
SAMPLES: Plugin[Callable[[Config, Algorithm, Path, Callable[[list[int]], str]], SampleKeeper | None]] = Plugin(
    HOOKS["samples"]
)
VERDICT: Plugin[Callable[[Path], list[str]]] = Plugin(HOOKS["verdict"])
