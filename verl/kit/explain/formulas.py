"""The advantage of a sample by the algorithm's formula, with its numbers filled in, and whether the record agrees.

Computed apart from the trainer, from the token rewards of the sample, and from the rewards of all samples of the step.
Nothing is fitted to the recorded advantages, so a wrong scale in the trainer is found.

Shape legend: A trained tokens of the sample, L those of its episode, E episodes of the step, G those of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verl.algorithms.estimators.advantage import gae, grpo
from verl.algorithms.estimators.dr_grpo import group_centered
from verl.algorithms.estimators.gigpo import gigpo
from verl.algorithms.estimators.gpg import gpg
from verl.algorithms.estimators.opo import opo
from verl.algorithms.estimators.pass_at_k import pass_at_k
from verl.algorithms.estimators.reinforce_pp import reinforce_pp
from verl.algorithms.estimators.reinforce_pp_baseline import reinforce_pp_baseline
from verl.algorithms.estimators.remax import remax
from verl.algorithms.estimators.rloo import rloo
from verl.kit.explain.known import Known
from verl.text import counted

_Array = npt.NDArray[np.float64]
_EPSILON = 1e-6  # of the group's std
_WHITEN_EPSILON = 1e-8  # of the variance
_ULP = 2.0**-24  # relative rounding error of a number with 32 bits, which the trainer computes with
_ROUNDED = 16 * _ULP  # of a return: the reward and its KL are added up
_WHITE = 1e-4  # by how much mean and variance may differ from 0 and 1


@dataclass(frozen=True, slots=True)
class Formula:
    """values_A: on every token, or one value for all, or None if the record lacks what it needs

    error: what rounding changes; checks: what else has to hold, and whether it does
    """

    text: str
    values_A: _Array | float | None = None
    error: float = 0.0
    checks: Sequence[tuple[str, bool]] = ()

    def agrees(self, recorded_A: npt.NDArray[np.float32]) -> bool:
        """Whether the formula gives the recorded advantages, and the checks hold."""
        assert self.values_A is not None
        same = np.allclose(recorded_A, self.values_A, rtol=1e-4, atol=self.error + 1e-7)
        return same and all(holds for _, holds in self.checks)


def advantage_formula(known: Known) -> Formula | None:
    """None for an estimator of the user's own."""
    make = _FORMULAS.get(known.estimator)
    if make is None:
        return None
    if lacks := known.lacks(known.estimator in _BY_TOKEN):
        return Formula(f"not computed: {lacks}")
    return make(known)


def _grpo(known: Known) -> Formula:
    if len(known.group) == 1:
        return _alone(known, known.own / (1 + _EPSILON))
    mean, std = float(known.group.mean()), _std(known.group)
    value = (known.own - mean) / (std + _EPSILON) if std else 0.0
    text = f"A = (r - mean) / (std + 1e-6) = ({known.own:.6g} - {mean:.6g}) / ({std:.6g} + 1e-6)"
    return Formula(text, value, _error(known, std, std + _EPSILON))


def _std(values: _Array) -> float:
    """Exactly 0 for equal values, and for one alone."""
    return float(values.std(ddof=1)) if len(values) > 1 and np.ptp(values) else 0.0


def _error(known: Known, std: float, scale: float) -> float:
    """Of a return that is divided by `scale`; equal returns are without."""
    return known.size * _ROUNDED / scale if std else 0.0


def _alone(known: Known, value: float) -> Formula:
    return Formula("A = r: the group has one response", value, known.size * _ROUNDED)


def _centered(known: Known) -> Formula:
    if len(known.group) == 1:
        return _alone(known, known.own)
    mean = float(known.group.mean())
    return Formula(f"A = r - mean = {known.own:.6g} - {mean:.6g}", known.own - mean, known.size * _ROUNDED)


def _rloo(known: Known) -> Formula:
    count, mean = len(known.group), float(known.group.mean())
    if count == 1:
        return _alone(known, known.own)
    text = f"A = n / (n - 1) * (r - mean) = {count} / {count - 1} * ({known.own:.6g} - {mean:.6g})"
    return Formula(text, count / (count - 1) * (known.own - mean), known.size * _ROUNDED)


def _opo(known: Known) -> Formula:
    if len(known.group) == 1:
        return _alone(known, known.own)
    lengths = known.group_lengths
    baseline = float(lengths @ known.group / lengths.sum())
    text = (
        "A = r - b, b = sum(length * r) / sum(length) over the group with lengths "
        f"{', '.join(map(str, lengths.tolist()))}: {known.own:.6g} - {baseline:.6g}"
    )
    return Formula(text, known.own - baseline, known.size * _ROUNDED)


def _gpg(known: Known) -> Formula:
    without = [len(group) for group in known.groups() if _is_centered(group)]
    total = len(known.returns)
    alpha = total / max(1, total - sum(without))
    mean = 0.0 if len(known.group) == 1 else float(known.group.mean())
    centered = "r, the group has one response" if len(known.group) == 1 else "r - mean"
    text = (
        f"A = alpha * ({centered}), alpha = B / (B - M) = {total} / {total - sum(without)}, where M of the B responses "
        f"are in groups without advantage: {alpha:.6g} * ({known.own:.6g} - {mean:.6g})"
    )
    return Formula(text, alpha * (known.own - mean), alpha * known.size * _ROUNDED)


def _is_centered(group_G: _Array) -> bool:
    """Whether r - mean is 0, at the precision of the trainer's returns. The return of a group of one remains."""
    return not group_G.any() if len(group_G) == 1 else len(set(group_G.astype(np.float32).tolist())) == 1


def _pass_at_k(known: Known) -> Formula:
    if len(known.group) == 1:
        return _alone(known, known.own)
    second, top = np.sort(known.group)[-2:].tolist()
    scale = _std(known.group) + _EPSILON if known.options.get("divide_by_std") else 1.0
    by_std = known.options.get("divide_by_std", False)
    text = f"A = (max(group) - max(group without this response)){' / (std + 1e-6)' if by_std else ''}"
    best = known.own == top
    which = f"({top:.6g} - {second:.6g}) / {scale:.6g}" if best else "0, as another response is the best"
    return Formula(f"{text} = {which}", (top - second) / scale if best else 0.0, known.size * _ROUNDED / scale)


def _remax(known: Known) -> Formula:
    returns_A = known.of_sample(_returns_to_go(known.token_rewards, 1.0))
    baseline = known.baseline
    text = f"A_t = R_t - b; R_t is {returns_A[0]:.6g} on the first token; b = {baseline:.6g} of the greedy response"
    return Formula(text, returns_A - baseline, (known.size + abs(baseline)) * _ROUNDED)


def _gigpo(known: Known) -> Formula:
    by_std, weight = known.options.get("divide_by_std", True), known.options.get("turn_weight", 1.0)
    episode = _grpo(known) if by_std else _centered(known)
    turns = known.turns(known.options.get("gamma", 0.95))
    assert isinstance(episode.values_A, float)
    values_A, errors, shown = np.full(len(turns.place_A), episode.values_A), [0.0], []
    for place in dict.fromkeys(turns.place_A.tolist()):
        same_N = turns.returns_T[turns.states_T == turns.states_T[place]]
        std = _std(same_N)
        scale = std + _EPSILON if by_std else 1.0
        centered = float(turns.returns_T[place] - same_N.mean()) / scale if std else 0.0
        values_A[turns.place_A == place] += weight * centered
        errors.append(weight * _error(known, std, scale))
        shown.append(f"{turns.returns_T[place]:.6g} among {counted(len(same_N), 'turn')} gives {centered:.6g}")
    text = (
        f"A = A_episode + {weight:g} * A_turn, A_turn as A_episode among the turns in an equal state; A_episode: "
        f"{episode.text} = {episode.values_A:.6g}; A_turn of its turns, by discounted return: {'; '.join(shown)}"
    )
    return Formula(text, values_A, episode.error + max(errors))


def _reinforce_pp(known: Known) -> Formula:
    gamma = float(known.options.get("gamma", 1.0))
    raw_L = _returns_to_go(known.token_rewards, gamma)
    every_E = known.returns if gamma == 1.0 and not known.is_penalized else None
    return _whitened(known, "R_t", raw_L, known.size, every_E)


def _reinforce_pp_baseline(known: Known) -> Formula:
    means_E = known.means
    raw = known.own - means_E[known.episode]
    name = "r - mean" if len(known.group) > 1 else "r of a group of one"
    return _whitened(known, name, np.full(known.length, raw), known.size, known.returns - means_E)


def _gae(known: Known) -> Formula:
    gamma, lam = (float(known.options.get(name, 1.0)) for name in ("gamma", "lam"))
    values_L = known.column("values")
    deltas_L = known.token_rewards + gamma * np.append(values_L[1:], 0.0) - values_L
    raw_L = _returns_to_go(deltas_L, gamma * lam)
    size = max(known.size, float(np.abs(values_L).max()))
    formula = _whitened(known, "GAE_t", raw_L, size)
    targets_A, returns_A = known.of_sample(raw_L + values_L), known.sample.columns["returns"]
    holds = np.allclose(returns_A, targets_A, rtol=1e-4, atol=len(raw_L) * size * _ROUNDED)
    text = (
        f"GAE_t = delta_t + {gamma:g} * {lam:g} * GAE_t+1, delta_t = r_t + {gamma:g} * V_t+1 - V_t, with the recorded "
        f"values; on the first token delta_t is {known.of_sample(deltas_L)[0]:.6g}. {formula.text}"
    )
    checks = [*formula.checks, ("the critic's targets are GAE_t + V_t", holds)]
    return Formula(text, formula.values_A, formula.error, checks)


def _whitened(known: Known, name: str, raw_L: _Array, size: float, every_E: _Array | None = None) -> Formula:
    """A_t = (raw_t - m) / s, with m and s over all trained tokens of the step.

    every_E: raw_t of all episodes if it is the same on all tokens of one; else m and s are those that the trainer has
    recorded. The recorded advantages of the whole step have to have mean 0 and variance 1, which only the right m and s
    give. size: of what enters
    """
    count, raw_A = int(known.scale.num_trained.sum()), known.of_sample(raw_L)
    text = f"A_t = ({name} - m) / s, whitened over the {counted(count, 'trained token')} of the step"
    if every_E is not None:
        mean, std = _moments(every_E, known.lengths)
        source = "m and s follow from the rewards of the step"
    elif known.rewards.whitening is not None:
        mean, std = known.rewards.whitening
        source = "m and s are the trainer's"
    else:
        return Formula(f"{text}; {name} is {raw_A[0]:.6g} on the first token, m and s are not recorded")
    expected = 1 - _WHITEN_EPSILON / std**2
    off, variance = known.rewards.moments
    white = abs(off) < _WHITE and (count == 1 or abs(variance - expected) < _WHITE)
    recorded = f"the recorded advantages of the step have mean {off:.3g} and variance {variance:.6g}, as whitened ones"
    filled = f"({raw_A[0]:.6g} - {mean:.6g}) / {std:.6g} on the first token; {source}"
    error = len(raw_L) * size * _ROUNDED / std
    return Formula(f"{text}: {filled}", (raw_A - mean) / std, error, [(recorded, white)])


def _moments(raw_E: _Array, lengths_E: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Mean and standard deviation over the tokens of all episodes, as the trainer whitens."""
    count = int(lengths_E.sum())
    mean = float(raw_E @ lengths_E) / count
    variance = float((raw_E - mean) ** 2 @ lengths_E) / (count - 1) if count > 1 else 1.0
    return mean, float(np.sqrt(variance + _WHITEN_EPSILON))


def _returns_to_go(rewards_L: _Array, gamma: float) -> _Array:
    """[L] R_t = r_t + gamma * R_t+1"""
    returns_L, running = np.empty(len(rewards_L)), 0.0
    for place in reversed(range(len(rewards_L))):
        running = returns_L[place] = rewards_L[place] + gamma * running
    return returns_L


_BY_TOKEN = (gae, reinforce_pp, remax)
_FORMULAS: Mapping[Any, Callable[[Known], Formula]] = {
    grpo: _grpo,
    group_centered: _centered,
    rloo: _rloo,
    opo: _opo,
    gpg: _gpg,
    pass_at_k: _pass_at_k,
    remax: _remax,
    gigpo: _gigpo,
    reinforce_pp: _reinforce_pp,
    reinforce_pp_baseline: _reinforce_pp_baseline,
    gae: _gae,
}
