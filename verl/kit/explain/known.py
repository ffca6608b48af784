"""What the record of a step knows about the rewards of a sample, its group and all episodes.

With a KL penalty in the reward, each token's reward is -beta * KL beside its own, and the return of an episode is
r - beta * sum(KL): that is what the estimators see.

Shape legend: B samples of the step, E its episodes, T turns if the estimator compares them, else B, A trained tokens of
the sample, L those of its episode, G episodes of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.names import KLPlacement
from verl.kit.kept_samples.sample_files import KeptSample, LossScale, StepRewards, StepSamples

_Array = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TurnReturns:
    """Of all turns of the step. place_A: the turn of every token of the sample"""

    returns_T: _Array
    states_T: _Ints
    place_A: _Ints


@dataclass(frozen=True)
class Known:
    """beta: coefficient of the KL in the reward; None if it is not known

    All but `lacks` and what is given needs a record that lacks nothing.
    """

    sample: KeptSample
    kept: StepSamples
    algorithm: Algorithm
    beta: float | None

    @property
    def estimator(self) -> Any:
        return getattr(self.algorithm.advantage, "func", self.algorithm.advantage)

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the estimator."""
        return getattr(self.algorithm.advantage, "keywords", {})

    @property
    def is_penalized(self) -> bool:
        return self.algorithm.kl.placement is KLPlacement.REWARD

    def lacks(self, whole_episode: bool) -> str:
        """What keeps the advantage from being computed; empty if nothing does.

        whole_episode: whether it follows from the tokens of all segments of the episode
        """
        if self.kept.rewards is None or self.kept.scale is None:
            return "the step was recorded without the rewards of all its samples"
        if self.is_penalized and (self.beta is None or self.rewards.penalties is None):
            return "the coefficient of the KL in the reward (kl/coefficient) is not logged"
        if self.algorithm.needs_turns and self.rewards.states is None:
            return "the step was recorded without its turns"
        if self.algorithm.greedy_baseline and self.rewards.baselines is None:
            return "the step was recorded without the rewards of the greedy responses"
        if not self.sample.row < len(self.scale.num_trained):
            return "the sample is not one of the step's"
        if not all(map(self._is_kept, self._rows if whole_episode else [self.sample.row])):
            return "not all segments of the episode are kept with their rewards"
        if not np.isfinite(self.returns).all():
            return "tokens that the engine has not sampled have no KL"
        return ""

    def _is_kept(self, row: int) -> bool:
        """Whether the sample of the row is kept with all that its advantage follows from."""
        columns = self._segments[row].columns if row in self._segments else {}
        critics = ("values", "returns") if self.algorithm.needs_critic else ()
        kl = ("rollout_logprobs", "ref_logprobs") if self.is_penalized else ()
        lengths = {len(columns.get(name, ())) for name in ("advantages", "rewards", *critics, *kl)}
        return row in self._segments and lengths == {int(self.scale.num_trained[row])}

    @property
    def rewards(self) -> StepRewards:
        assert self.kept.rewards is not None
        return self.kept.rewards

    @property
    def scale(self) -> LossScale:
        assert self.kept.scale is not None
        return self.kept.scale

    @cached_property
    def _episodes(self) -> _Ints:
        """[B] number of each sample's episode"""
        numbers: _Ints = np.unique(self.scale.episodes, return_inverse=True)[1]
        return numbers

    @property
    def episode(self) -> int:
        return int(self._episodes[self.sample.row])

    @cached_property
    def lengths(self) -> _Ints:
        """[E] trained tokens"""
        return np.bincount(self._episodes, self.scale.num_trained).astype(np.int64)

    @cached_property
    def _groups(self) -> _Ints:
        """[E]"""
        groups: _Ints = self.scale.groups[np.unique(self._episodes, return_index=True)[1]]
        return groups

    @cached_property
    def _totals(self) -> _Array:
        """[T] token rewards with their KL"""
        return self.rewards.rewards.astype(np.float64) - self._penalties

    @property
    def _penalties(self) -> _Array:
        """[T] beta * sum(KL)"""
        if self.beta is None or self.rewards.penalties is None:
            return np.zeros(len(self.rewards.rewards))
        return self.beta * self.rewards.penalties.astype(np.float64)

    @cached_property
    def _starts(self) -> _Ints:
        """[T] first token among the trained tokens of the step"""
        lengths = self.scale.num_trained if self.rewards.lengths is None else self.rewards.lengths
        return np.cumsum(lengths) - lengths

    @cached_property
    def _turn_episodes(self) -> _Ints:
        """[T]"""
        if self.rewards.lengths is None:
            return self._episodes
        ends_E = np.cumsum(self.lengths)
        return np.searchsorted(ends_E, self._starts, side="right").clip(max=len(ends_E) - 1)

    @cached_property
    def returns(self) -> _Array:
        """[E]"""
        return np.bincount(self._turn_episodes, self._totals, len(self.lengths)).astype(np.float64)

    @property
    def own(self) -> float:
        """Return of the sample's episode."""
        return float(self.returns[self.episode])

    @property
    def _in_group(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._groups == self._groups[self.episode])

    @property
    def group(self) -> _Array:
        """[G] returns"""
        return self.returns[self._in_group]

    @property
    def group_lengths(self) -> _Ints:
        """[G] in tokens"""
        return self.lengths[self._in_group]

    def groups(self) -> Iterator[_Array]:
        """The returns of every group of the step."""
        return (self.returns[self._groups == group] for group in np.unique(self._groups))

    @property
    def means(self) -> _Array:
        """[E] the mean of each episode's group; 0 for a group of one"""
        _, group_E, sizes = np.unique(self._groups, return_inverse=True, return_counts=True)
        means = np.where(sizes > 1, np.bincount(group_E, self.returns) / sizes, 0.0)
        return means[group_E]

    @property
    def size(self) -> float:
        """Of what a return is added up from, for its rounding error: rewards and the KL of tokens of about 1 nat."""
        nats = (self.beta or 0.0) * float(self.lengths.max())
        return float(np.abs(self.rewards.rewards).max() + np.abs(self._penalties).max()) + nats

    @property
    def baseline(self) -> float:
        assert self.rewards.baselines is not None
        return float(self.rewards.baselines[self.sample.row])

    @cached_property
    def _segments(self) -> Mapping[int, KeptSample]:
        return {each.row: each for each in self.kept.samples}

    @property
    def _rows(self) -> list[int]:
        """Those of the sample's episode."""
        rows: list[int] = np.flatnonzero(self._episodes == self.episode).tolist()
        return rows

    @property
    def length(self) -> int:
        """L"""
        return int(self.lengths[self.episode])

    def column(self, name: str) -> _Array:
        """[L] of all segments of the episode"""
        return np.concatenate([self._segments[row].columns[name] for row in self._rows]).astype(np.float64)

    @property
    def token_rewards(self) -> _Array:
        """[L] with their KL"""
        rewards_L = self.column("rewards")
        if not self.is_penalized:
            return rewards_L
        kl_L = np.concatenate([kl_of_tokens(self._segments[row], self.algorithm) for row in self._rows])
        return rewards_L - (self.beta or 0.0) * kl_L

    def of_sample(self, values_L: _Array) -> _Array:
        """[A] the values of the sample's own tokens."""
        before = sum(int(self.scale.num_trained[row]) for row in self._rows if row < self.sample.row)
        return values_L[before : before + len(self.sample.columns["advantages"])]

    def turns(self, gamma: float) -> TurnReturns:
        """The returns of all turns, discounted by turns."""
        assert self.rewards.states is not None
        returns_T = self._totals.copy()
        for turn in reversed(range(len(returns_T) - 1)):
            if self._turn_episodes[turn] == self._turn_episodes[turn + 1]:
                returns_T[turn] += gamma * returns_T[turn + 1]
        return TurnReturns(returns_T, self.rewards.states, self._turns)

    @property
    def _turns(self) -> _Ints:
        """[A] the turn of every token"""
        first = int(self.scale.num_trained[: self.sample.row].sum())
        token_A = first + np.arange(len(self.sample.columns["advantages"]))
        return np.searchsorted(self._starts, token_A, side="right") - 1

    def differing(self) -> list[str]:
        """What the kept tokens differ in from the step's rewards. Empty if they agree."""
        pairs = {"rewards": (self.sample.columns["rewards"], self.rewards.rewards)}
        if self.is_penalized and self.rewards.penalties is not None:
            pairs["KL in the reward"] = (kl_of_tokens(self.sample, self.algorithm), self.rewards.penalties)
        places, number_A = np.unique(self._turns, return_inverse=True)
        sums = {name: np.bincount(number_A, tokens_A, len(places)) for name, (tokens_A, _) in pairs.items()}
        pairs_of = {name: (sums[name], totals_T[places]) for name, (_, totals_T) in pairs.items()}
        return [name for name, (one, two) in pairs_of.items() if not np.allclose(one, two, rtol=1e-4, atol=1e-5)]


def kl_of_tokens(sample: KeptSample, algorithm: Algorithm) -> _Array:
    """[A] by the log-probs that sampled: those before the update, or the engine's where the step had no such pass."""
    columns = sample.columns
    sampling = columns["old_logprobs"] if "old_logprobs" in columns else columns["rollout_logprobs"]
    pair = (torch.from_numpy(each.astype(np.float64)) for each in (sampling, columns["ref_logprobs"]))
    return KL_ESTIMATORS[algorithm.kl.estimator](*pair).numpy()
