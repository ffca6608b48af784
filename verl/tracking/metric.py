"""Metrics, and how their values of several updates are combined. Units: `names.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    value: float

    @staticmethod
    def combined(values: list[float]) -> float:
        return sum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Max:
    value: float

    @staticmethod
    def combined(values: list[float]) -> float:
        return max(values)


Metric = Mean | Max


def combined(updates: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """One value per metric, over the updates that have it."""
    by_name: dict[str, list[Metric]] = {}
    for update in updates:
        for name, metric in update.items():
            by_name.setdefault(name, []).append(metric)
    return {name: metrics[0].combined([each.value for each in metrics]) for name, metrics in by_name.items()}
