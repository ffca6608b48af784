"""Where metrics go: one protocol, and a fan-out to all that were chosen."""

from __future__ import annotations

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
    """What a tracker may know of the run: its folder, how it is called, and its configuration."""

    folder: Path
    name: str = "default"
    project: str = "toolrl"
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Takes the metrics of one step at a time, steps in rising order. Subclasses inherit what they have no need of."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, all of them at once."""

    def close(self) -> None:
        """Ends what is open."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to continue; keys are this tracker's own."""
        return {}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Continues after `step`: whatever was logged beyond it is dropped. -1 and {} start over.

        state: of all trackers together, as `Trackers.state` gave it
        """


@dataclass(frozen=True)
class Trackers:
    """Several trackers as one."""

    members: tuple[Tracker, ...]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, to every tracker; call it once a step, before the step's checkpoint."""
        plain = {name: float(value) for name, value in metrics.items()}
        for member in self.members:
            member.log(step, plain)

    def close(self) -> None:
        """Closes all of them, also when one fails to."""
        with ExitStack() as stack:
            for member in self.members:
                stack.callback(member.close)

    def state(self) -> dict[str, Any]:
        """What all of them need in a checkpoint."""
        return {key: value for member in self.members for key, value in member.state().items()}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Tracker.restore`. To be called before the first `log`, also at a start from nothing (-1 and {}); and
        whenever a run goes back.
        """
        for member in self.members:
            member.restore(step, state)


def build_trackers(names: Iterable[str], run: Run, display: Tracker | None = None) -> Trackers:
    """JSONL and TensorBoard always, the display if there is one, and those named.

    A name is a key of TRACKERS, "console" (which is the display), or `module:attribute` of something made from a `Run`.
    Raises ConfigError for an unknown name and for wandb where it is not installed.
    """
    chosen = [name for name in dict.fromkeys((*ALWAYS, *names)) if name != "console"]
    members: list[Tracker] = [resolve("tracker", name, TRACKERS)(run) for name in chosen]
    return Trackers(tuple(members if display is None else [display, *members]))
