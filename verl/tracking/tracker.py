"""The tracker protocol, and a fan-out to all configured trackers."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.registry import resolve

TRACKERS: Mapping[str, str] = {
    "jsonl": "verl.tracking.jsonl:JsonlTracker",
    "tensorboard": "verl.tracking.tensorboard:TensorBoardTracker",
    "wandb": "verl.tracking.wandb:WandbTracker",
}
ALWAYS = ("jsonl", "tensorboard")


@dataclass(frozen=True)
class Run:
    folder: Path
    name: str = "default"
    project: str = "toolrl"
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives the metrics of one step at a time, in increasing order. All defaults are no-ops."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics of a step."""

    def close(self) -> None:
        """Close open files and sessions."""

    def state(self) -> dict[str, Any]:
        """State for the checkpoint, under keys unique to this tracker."""
        return {}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Resume after `step`, dropping later logs; -1 and {} start over. state: from `Trackers.state`"""


@dataclass(frozen=True)
class Trackers:
    members: tuple[Tracker, ...]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """To be called once per step, before the step's checkpoint."""
        plain = {name: float(value) for name, value in metrics.items()}
        for member in self.members:
            member.log(step, plain)

    def close(self) -> None:
        """Close all trackers, even if one of them fails."""
        with ExitStack() as stack:
            for member in self.members:
                stack.callback(member.close)

    def state(self) -> dict[str, Any]:
        return {key: value for member in self.members for key, value in member.state().items()}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Tracker`. Must be called before the first `log`, of a new run too, and at every rollback."""
        for member in self.members:
            member.restore(step, state)


def build_trackers(names: Iterable[str], run: Run, display: Tracker | None = None) -> Trackers:
    """JSONL and TensorBoard always, the display if given, and those named.

    A name is a key of TRACKERS, "console" (the display), or `module:attribute` of a callable that takes a `Run`.
    Raises ConfigError for an unknown name, and for wandb if it is not installed.
    """
    chosen = [name for name in dict.fromkeys((*ALWAYS, *names)) if name != "console"]
    members: list[Tracker] = [resolve("tracker", name, TRACKERS)(run) for name in chosen]
    return Trackers(tuple(members if display is None else [display, *members]))
