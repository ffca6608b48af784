"""The tracker protocol, and a fan-out to all configured trackers."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl import plugins
from verl.errors import ConfigError
from verl.registry import resolve

TRACKERS: Mapping[str, str] = {
    "jsonl": "verl.tracking.jsonl:JsonlTracker",
    "tensorboard": "verl.tracking.tensorboard:TensorBoardTracker",
    **plugins.TRACKERS,
}
ALWAYS = ("jsonl", "tensorboard")
DISPLAYED = ("console", "rollouts", "verl_names")  # what the display prints, and under which names; no trackers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunInfo:
    folder: Path
    name: str = "default"
    project: str = "toolrl"
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives the metrics of one step at a time, in increasing order. All defaults are no-ops."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log all metrics of a step."""

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log some rollouts of a step (`transcripts.sample_rows`) as a table; before the step's metrics."""
        return

    def close(self) -> None:
        """Close open files and sessions."""

    def state(self) -> dict[str, Any]:
        """State for the checkpoint, under keys unique to this tracker."""
        return {}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Resume after `step`, dropping later logs; -1 and {} start over. state: from `Trackers.state`"""


class Fallible(Tracker):
    """A tracker whose failure does not end the run: one warning, and it is off from then on."""

    def __init__(self, name: str, member: Tracker) -> None:
        self.name, self.member, self._off = name, member, False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._attempt(self.member.log, step, metrics)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._attempt(self.member.log_rollouts, step, rows)

    def close(self) -> None:
        self._attempt(self.member.close)

    def state(self) -> dict[str, Any]:
        return self._attempt(self.member.state) or {}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        self._attempt(self.member.restore, step, state)

    def _attempt(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._off:
            return None
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001  other packages and users' code may raise anything
            self._off = True
            problem = f"{type(error).__name__}: {error}"
            _log.warning("the tracker %s has failed and is off; the run goes on (%s)", self.name, problem)
            return None


@dataclass(frozen=True)
class Trackers:
    members: tuple[Tracker, ...]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """To be called once per step, before the step's checkpoint."""
        plain = {name: float(value) for name, value in metrics.items()}
        for member in self.members:
            member.log(step, plain)

    def log_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for member in self.members if rows else ():
            member.log_rollouts(step, rows)

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


def build_trackers(names: Iterable[str], run: RunInfo, display: Tracker | None = None) -> Trackers:
    """JSONL and TensorBoard always, the display if given, and those named.

    A name is a key of TRACKERS, one of DISPLAYED, or `module:attribute` or `file.py:attribute` of a callable that takes
    a `RunInfo` and returns a tracker. Raises ConfigError for a name or a tracker that cannot be used.
    """
    chosen = [name for name in dict.fromkeys((*ALWAYS, *names)) if name not in DISPLAYED]
    members = [_build(name, run) for name in chosen]
    return Trackers(tuple(members if display is None else [display, *members]))


def _build(name: str, run: RunInfo) -> Tracker:
    make = resolve("tracker", name, TRACKERS)
    try:
        member: Tracker = make(run)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"trainer.logger: {name!r} cannot start ({type(error).__name__}: {error})") from error
    methods = ("log", "log_rollouts", "close", "state", "restore")
    if missing := [method for method in methods if not callable(getattr(member, method, None))]:
        raise ConfigError(
            f"trainer.logger: {name!r} has no {', '.join(missing)}; inherit from verl.tracking.tracker.Tracker, "
            "where each does nothing"
        )
    return member if name in ALWAYS else Fallible(name, member)
