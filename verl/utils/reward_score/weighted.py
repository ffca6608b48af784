"""Several rewards at once: `reward=[{name: calls}, {name: mine.py:brief, weight: 0.2}]`.

The total is the sum of weight * total; every part is logged as name/part, and every total, unweighted, as name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import ConfigError
from verl.host.services import check_services
from verl.registry import nearest
from verl.types import Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import GroupReward, Reward, TaskCheckingReward, build_reward, reads_step
from verl.verl_compat.published import AUTO

SUM = "sum"  # its name in the configuration
_KEYS = ("name", "weight", "options")


@dataclass(frozen=True)
class Term:
    """One reward of a sum. label: its name in the log; without the module for a reward of your own"""

    name: str
    reward: Reward
    weight: float

    @property
    def label(self) -> str:
        return self.name.rpartition(":")[2]

    def own(self, score: Score) -> Score:
        """Its own score, from the score of the sum."""
        prefix = f"{self.label}/"
        parts = {name.removeprefix(prefix): part for name, part in score.parts.items() if name.startswith(prefix)}
        return Score(score.parts.get(self.label, 0.0), parts, score.exceeded)


class WeightedSum:
    """terms: names, or {name: .., weight: 1.0, options: {..}}"""

    def __init__(self, terms: list) -> None:  # type: ignore[type-arg]  # the name of the type is compared
        if not terms:
            raise ConfigError("reward=[] names no reward")
        self.terms: list[Term] = []
        for given in terms:
            self.terms.append(_term(given, [term.label for term in self.terms]))
        self.names = tuple(term.name for term in self.terms)
        rewards = [term.reward for term in self.terms]
        self.reads_calls = any(getattr(reward, "reads_calls", False) for reward in rewards)
        self.reads_step = any(map(reads_step, rewards))
        if any(isinstance(reward, GroupReward) for reward in rewards):
            self.shape = self._shape  # makes it a GroupReward

    def check_task(self, task: Task) -> None:
        for term in self.terms:
            if isinstance(term.reward, TaskCheckingReward):
                term.reward.check_task(task)

    async def check_services(self) -> None:
        await check_services(term.reward for term in self.terms)

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """The sum of the rewards that apply to the response; not counted if none does."""
        total, parts = 0.0, {}
        details: dict[str, Any] = {}
        not_counted = []
        for term in self.terms:
            own = term.reward.score(trajectory, task, step)
            details |= {f"{term.label}/{name}": value for name, value in own.details.items()}
            if not own.counted:
                not_counted.append(term.label)
                continue
            total += term.weight * own.total
            parts[term.label] = own.total
            parts |= {f"{term.label}/{name}": part for name, part in own.parts.items()}
        counted = len(not_counted) < len(self.terms)
        return Score(total, parts, counted=counted, not_counted=tuple(not_counted), details=details)

    def _shape(self, group: TrajectoryGroup, state: Mapping[str, Any]) -> tuple[tuple[float, ...], Mapping[str, Any]]:
        """Every term shapes its own scores; the state is kept by label."""
        totals, states = [0.0] * len(group.scores), dict(state)
        for term in self.terms:
            scores = tuple(map(term.own, group.scores))
            rewards = tuple(score.total for score in scores)
            if isinstance(term.reward, GroupReward):
                own = replace(group, scores=scores, rewards=rewards)
                rewards, states[term.label] = term.reward.shape(own, states.get(term.label, {}))
            totals = [total + term.weight * reward for total, reward in zip(totals, rewards, strict=True)]
        return tuple(totals), states


def _term(given: str | Mapping[str, Any], labels: Sequence[str]) -> Term:
    """labels: of the terms before it. Raises ConfigError for an unusable one."""
    entry: Any = {"name": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"an entry of reward must be a name or {{name: .., weight: .., options: ..}}, got {given!r}")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"an entry of reward has no key {key!r}; {nearest(key, list(_KEYS))}")
    if entry["name"] == AUTO:
        raise ConfigError("an entry of reward cannot be auto; name calls, for rows with a gold turn, or rlla")
    name, weight, options = entry["name"], entry.get("weight", 1.0), entry.get("options", {})
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"the weight of reward {name!r} must be a finite number, got {weight!r}")
    if not isinstance(options, Mapping):
        raise ConfigError(f"the options of reward {name!r} must be {{option: value}}, got {options!r}")
    term = Term(name, build_reward(name, options), float(weight))
    if term.label in labels:
        raise ConfigError(f"reward has two entries {term.label!r}; add up their weights, or rename your functions")
    return term
