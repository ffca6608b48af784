"""Callbacks of a training: they see steps, validations and checkpoints, and may stop the run.

    # mine.py
    from toolrl import Callback

    class Mine(Callback):
        def on_checkpoint(self, step, folder):
            upload(folder)

        def on_step(self, step, metrics):
            return "the budget is spent" if step == 100 else None

`trainer.callbacks=[mine.py:Mine, {name: early_stopping, patience: 3}]`. A run that a callback stops ends as after its
last step: with a validation, a checkpoint and exit code 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, VerlError
from verl.registry import check_options, resolve

CALLBACKS: Mapping[str, str] = {"early_stopping": "verl.trainer.callbacks:EarlyStopping"}
_METHODS = ("on_step", "on_validation", "on_checkpoint", "state", "restore")


class CallbackError(VerlError, RuntimeError):
    """A callback of the user's has failed."""


class Callback:
    """Every method may return a reason to stop the run, as a text."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """After every update, before its validation."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """After every validation, also that before the first step. metrics: val/* and eval/*"""

    def on_checkpoint(self, step: int, folder: Path) -> str | None:
        """After every checkpoint, once it is on disk: training may be some steps ahead by then.

        folder: of the checkpoint; the exported model is in `hf`
        """

    def state(self) -> dict[str, Any]:
        """For the checkpoint, as plain JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state()`."""


class EarlyStopping(Callback):
    """Stops after `patience` validations in a row that were no better than the best one by more than `min_change`.

    metric: default: the mean reward of the first validation set, else the score of the first benchmark
    lower: whether less is better
    """

    def __init__(
        self, patience: int = 3, metric: str | None = None, min_change: float = 0.0, lower: bool = False
    ) -> None:
        if patience < 1:
            raise ConfigError(f"trainer.callbacks: early_stopping needs a patience of 1 or more, got {patience}")
        self.metric, self._patience, self._min_change, self._sign = metric, patience, min_change, -1 if lower else 1
        self._best: float | None = None
        self._worse = 0

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> str | None:
        name = self.metric or main_metric(metrics)
        if name is None or name not in metrics:
            listed = ", ".join(sorted(metrics)) or "there are no validation rows and no benchmarks"
            raise ConfigError(f"trainer.callbacks: early_stopping has no metric {name or ''}: {listed}")
        value = metrics[name]
        if isfinite(value) and (self._best is None or self._sign * (value - self._best) > self._min_change):
            self._best, self._worse = value, 0
            return None
        self._worse += 1
        if self._worse < self._patience:
            return None
        return f"{name} was no better than {self._best:.4g} in {self._worse} validations"

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "worse": self._worse}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._best, self._worse = state["best"], state["worse"]


def main_metric(metrics: Mapping[str, float]) -> str | None:
    """The first validation set's mean reward, else the first benchmark's score."""
    totals = [name for name in metrics if name.startswith("val/") and name.endswith("/total")]
    scores = [name for name in metrics if name.startswith("eval/") and name.endswith("/score")]
    return next(iter((*totals, *scores)), None)


@dataclass
class Callbacks:
    """All callbacks of a run. stopped: the first reason to stop"""

    members: Mapping[str, Any] = field(default_factory=dict)  # by the entry of trainer.callbacks
    stopped: str | None = None

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda each: each.on_step(step, metrics))

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda each: each.on_validation(step, metrics))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self._each(lambda each: each.on_checkpoint(step, folder))

    def state(self) -> dict[str, Any]:
        return {"stopped": self.stopped, "members": {name: each.state() for name, each in self.members.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Callbacks that are new in a resumed run start anew; without those of before, a stopped run goes on."""
        known = [name for name in self.members if name in state["members"]]
        for name in known:
            self.members[name].restore(state["members"][name])
        self.stopped = state["stopped"] if known else None

    def _each(self, call: Callable[[Any], str | None]) -> None:
        for name, member in self.members.items():
            try:
                reason = call(member)
            except VerlError:
                raise
            except Exception as error:  # the user's code
                raise CallbackError(f"the callback {name} has failed ({type(error).__name__}: {error})") from error
            self.stopped = self.stopped or reason


def build_callbacks(entries: Sequence[Any], validates: bool) -> Callbacks:
    """Raises ConfigError for an entry that is no callback. validates: whether the run has validations between steps"""
    members: dict[str, Any] = {}
    for entry in entries:
        options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
        name = options.pop("name", None)
        if not isinstance(name, str):
            known = ", ".join(CALLBACKS)
            raise ConfigError(
                f"trainer.callbacks: {entry!r} is no callback; use file.py:Class, or {{name: NAME, option: value}}. "
                f"Known names: {known}"
            )
        factory = resolve("callback", name, CALLBACKS)
        if name in members:
            raise ConfigError(f"trainer.callbacks: {name} is given twice")
        check_options("callback", name, factory, options)
        member = factory(**options)
        if missing := [method for method in _METHODS if not callable(getattr(member, method, None))]:
            inherit = "inherit from toolrl.Callback, where each does nothing"
            raise ConfigError(f"trainer.callbacks: {name!r} has no {', '.join(missing)}; {inherit}")
        if isinstance(member, EarlyStopping) and not validates:
            raise ConfigError(
                "trainer.callbacks: early_stopping needs validations between the steps; set data.val_share or "
                "data.val_files, and trainer.test_freq above 0"
            )
        members[name] = member
    return Callbacks(members)
