"""The advantage of a sample by the algorithm's formula, with its numbers filled in, and whether the record agrees.

What other samples of the step enter with is known as far as the record has it: the returns of the group, the rewards
of the step's rollouts, and the kept samples, from which mean and deviation of a whitened step follow.

Shape legend: A trained tokens of the sample, G rollouts of its group, K trained tokens of several kept samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.advantage import AdvantageInputs, gae, grpo, returns_to_go, turn_returns
from verl.algorithms.estimators.dr_grpo import group_centered
from verl.algorithms.estimators.gigpo import gigpo
from verl.algorithms.estimators.gpg import gpg
from verl.algorithms.estimators.opo import length_weighted_centered, opo
from verl.algorithms.estimators.pass_at_k import best_of_group, pass_at_k
from verl.algorithms.estimators.reinforce_pp import reinforce_pp
from verl.algorithms.estimators.reinforce_pp_baseline import reinforce_pp_baseline
from verl.algorithms.estimators.remax import remax
from verl.algorithms.estimators.rloo import rloo
from verl.batch.experience import turns_of
from verl.batch.token_batch import TokenBatch
from verl.kit.explain.penalty import is_penalized, kl_of_tokens, penalized
from verl.tracking.samples import KeptSample

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Known:
    """rollouts: of the step's transcript, in its order; beta: coefficient of a KL in the reward"""

    sample: KeptSample
    own: float  # return of the rollout
    kept: Sequence[KeptSample]  # of the step
    rollouts: Sequence[Mapping[str, Any]]
    algorithm: Algorithm
    options: Mapping[str, Any]  # of the estimator
    beta: float

    @property
    def returns(self) -> _Array:
        """[G]"""
        return np.array(self.sample.group_returns, dtype=np.float64)

    @property
    def lengths(self) -> list[int]:
        """[G] in tokens; empty where the transcript has not the whole group."""
        lengths = [each["num_tokens"] for each in self.rollouts if each.get("task_id") == self.sample.task_id]
        return lengths if len(lengths) == len(self.sample.group_returns) else []


@dataclass(frozen=True, slots=True)
class Formula:
    """values_A: what the formula gives on every token, or one value for all; None: not known without other samples"""

    text: str
    values_A: _Array | float | None = None


def advantage_formula(known: Known) -> Formula | None:
    """None for an estimator of the user's own."""
    estimator = getattr(known.algorithm.advantage, "func", known.algorithm.advantage)
    if estimator in _FORMULAS and estimator not in _BY_TOKEN and is_penalized(known.algorithm, known.beta):
        adjusted = _after_kl(known)
        return adjusted or Formula("not computed: the KL of the group's other rollouts is not kept")
    return _formula(known, estimator)


def _after_kl(known: Known) -> Formula | None:
    """With the returns r - beta * sum(KL) of the group, if all of its rollouts are kept."""
    groups = {each.group: each for each in known.kept}.values()
    adjusted = [penalized(each, known.kept, known.algorithm, known.beta) for each in groups]
    kept = [each for group in adjusted for each in group or ()]
    place = next((each for each in kept if each.row == known.sample.row), None)
    if place is None:
        return None
    own = known.own + place.reward - known.sample.reward
    estimator = getattr(known.algorithm.advantage, "func", known.algorithm.advantage)
    formula = _formula(replace(known, sample=place, own=own, kept=kept), estimator)
    if formula is None:
        return None
    returns = ", ".join(f"{each:.6g}" for each in place.group_returns)
    return replace(formula, text=f"with r - beta * sum(KL) for r, in the group {returns}: {formula.text}")


def _formula(known: Known, estimator: Any) -> Formula | None:
    if len(known.returns) == 1 and estimator in (grpo, group_centered, rloo, opo, pass_at_k):
        return Formula("A = r: the group has one response", known.own)
    make = _FORMULAS.get(estimator)
    return make(known) if make else None


def _grpo(known: Known) -> Formula:
    returns_G = known.returns
    mean, std = float(returns_G.mean()), float(returns_G.std(ddof=1)) if len(returns_G) > 1 else 0.0
    value = 0.0 if std == 0.0 else (known.own - mean) / (std + 1e-6)
    return Formula(f"A = (r - mean) / (std + 1e-6) = ({known.own:.6g} - {mean:.6g}) / ({std:.6g} + 1e-6)", value)


def _centered(known: Known) -> Formula:
    mean = float(known.returns.mean())
    return Formula(f"A = r - mean = {known.own:.6g} - {mean:.6g}", known.own - mean)


def _rloo(known: Known) -> Formula:
    count, mean = len(known.returns), float(known.returns.mean())
    value = count / (count - 1) * (known.own - mean)
    return Formula(
        f"A = n / (n - 1) * (r - mean) = {count} / {count - 1} * ({known.own:.6g} - {mean:.6g})", float(value)
    )


def _opo(known: Known) -> Formula:
    text = "A = r - b, b = sum(length * r) / sum(length) over the group"
    if not known.lengths:
        return Formula(f"{text}; the lengths of the group are not in the transcript")
    returns_G, lengths_G = torch.from_numpy(known.returns), torch.tensor(known.lengths, dtype=torch.float64)
    place = int((returns_G - known.own).abs().argmin())
    value = float(length_weighted_centered(returns_G, lengths_G)[place])
    return Formula(f"{text} with lengths {known.lengths}: {known.own:.6g} - {known.own - value:.6g}", value)


def _gpg(known: Known) -> Formula:
    kept = [each for each in known.kept if len(each.columns["advantages"]) and _is_simple(each)]
    centered = np.array([each.reward - np.mean(each.group_returns) for each in kept])
    text = "A = alpha * (r - mean)"
    if not _is_simple(known.sample) or not centered.any():
        return Formula(text)
    alpha = float(centered @ [each.columns["advantages"][0] for each in kept] / (centered @ centered))
    mean = float(known.returns.mean())
    return Formula(
        f"{text}, alpha = B / (B - M) = {alpha:.6g} from {len(kept)} kept samples (M of the B responses are in "
        f"groups of equal rewards): {alpha:.6g} * ({known.own:.6g} - {mean:.6g})",
        alpha * (known.own - mean),
    )


def _pass_at_k(known: Known) -> Formula:
    returns_G = torch.from_numpy(known.returns)
    top, second = returns_G.topk(2).values.tolist() if len(returns_G) > 1 else (known.own, 0.0)
    place = int((returns_G - known.own).abs().argmin())
    divided = " / (std + 1e-6)" if known.options.get("divide_by_std") else ""
    which = f"{top:.6g} - {second:.6g}{divided}" if known.own == top else "0: another response is the best"
    value = float(best_of_group(returns_G, bool(divided))[place])
    return Formula(f"A = max(group) - max(group without this response){divided} = {which}", value)


def _remax(known: Known) -> Formula:
    returns_A = _returns_to_go(known, known.sample, 1.0)
    baseline = float((returns_A - known.sample.columns["advantages"])[-1])
    return Formula(
        f"A_t = R_t - b; R_t is {returns_A[0]:.6g} on the first token; b = {baseline:.6g} from the record is the "
        "reward of the greedy response",
        returns_A - baseline,
    )


def _gigpo(known: Known) -> Formula:
    mean = float(known.returns.mean())
    std = float(known.returns.std(ddof=1)) + 1e-6 if known.options.get("divide_by_std", True) else 1.0
    episode = (known.own - mean) / std if known.returns.std() else 0.0
    weight = known.options.get("turn_weight", 1.0)
    filled = f"({known.own:.6g} - {mean:.6g}) / {std:.6g} = {episode:.6g}"
    text = f"A = A_episode + {weight:g} * A_turn; A_episode = (R - mean) / std = {filled}"
    inputs = None if is_penalized(known.algorithm, known.beta) else _group_inputs(known)  # a KL is in every turn
    if inputs is None:
        rest = known.sample.columns["advantages"] - episode
        return Formula(f"{text}; the rest, from {rest.min():.6g} to {rest.max():.6g}, is of the turns in equal states")
    place = next(number for number, each in enumerate(_group(known)) if each.row == known.sample.row)
    assert inputs.turns is not None
    turns = inputs.turns[place]
    returns_N = turn_returns(inputs.token_rewards[place], turns, known.options.get("gamma", 0.95))
    values_A = gigpo(inputs, **known.options).advantages[place].double()
    first = [int((turns.turn_L == turn).nonzero()[0]) for turn in range(len(returns_N))]
    shown = ", ".join(
        f"{each:.6g} and {(float(values_A[at]) - episode) / (weight or 1.0):.6g}"
        for each, at in zip(returns_N.tolist(), first, strict=True)
    )
    return Formula(f"{text}; discounted return and A_turn of the turns: {shown}", values_A.numpy())


def _group(known: Known) -> list[KeptSample]:
    return [each for each in known.kept if each.group == known.sample.group]


def _group_inputs(known: Known) -> AdvantageInputs | None:
    """The estimator's inputs for the group; None unless all of its rollouts are kept, and of one segment each."""
    group = _group(known)
    rows = {row.get("index"): row for row in known.rollouts if row.get("task_id") == known.sample.task_id}
    if len(group) != len(known.returns) or any(each.num_segments > 1 or each.index not in rows for each in group):
        return None
    counts = [np.array([count(each) for each in group]) for count in (lambda s: len(s.mask), lambda s: s.mask.sum())]
    batch = TokenBatch(
        token_ids=np.concatenate([each.token_ids for each in group]),
        action_mask=np.concatenate([each.mask for each in group]),
        num_tokens=counts[0],
        num_trained=counts[1],
        groups=np.zeros(len(group), dtype=np.int64),
    )
    turns, rewards = turns_of(batch), []
    for each, own in zip(group, turns, strict=True):
        given = [value or 0.0 for value in rows[each.index].get("turn_rewards") or ()]
        if len(given) != len(own.state_N):  # turns without an observation between them cannot be distinguished
            return None
        rewards_L = torch.zeros(len(own.turn_L), dtype=torch.float64)
        ends = np.cumsum(np.bincount(own.turn_L.numpy(), minlength=len(given))) - 1
        rewards_L[ends] = torch.tensor(given, dtype=torch.float64)
        rewards_L[-1] += each.reward
        rewards.append(rewards_L)
    return AdvantageInputs(rewards, torch.zeros(len(group), dtype=torch.long), turns=turns)


def _reinforce_pp(known: Known) -> Formula:
    gamma = float(known.options.get("gamma", 1.0))
    return _whitened(known, "R_t", lambda each: _returns_to_go(known, each, gamma))


def _reinforce_pp_baseline(known: Known) -> Formula:
    return _whitened(known, "r - mean", lambda each: _constant(each, each.reward - float(np.mean(each.group_returns))))


def _gae(known: Known) -> Formula:
    return _whitened(known, "return_t - value_t", lambda each: each.columns["returns"] - each.columns["values"], False)


def _whitened(known: Known, name: str, raw: Callable[[KeptSample], _Array], by_reward: bool = True) -> Formula:
    """A_t = (raw_t - m) / s, with m and s of all trained tokens of the step: the line through the kept samples.

    by_reward: raw_t follows from the reward alone, so only samples without rewards of turns can be used
    """
    text = f"A_t = ({name} - m) / s, whitened over all trained tokens of the step"
    kept = [each for each in known.kept if len(each.columns["advantages"]) and (not by_reward or _is_simple(each))]
    own_A = np.asarray(raw(known.sample), dtype=np.float64)
    raw_K = np.concatenate([raw(each) for each in kept]) if kept else np.empty(0)
    if len(raw_K) < 3 or (by_reward and not _is_simple(known.sample)) or np.ptp(raw_K) < 1e-6:
        return Formula(f"{text}; {name} is {own_A[0]:.6g} on the first token")
    slope, offset = np.polyfit(raw_K, np.concatenate([each.columns["advantages"] for each in kept]), 1)
    filled = f"({own_A[0]:.6g} - {-offset / slope:.6g}) / {1 / slope:.6g} on the first token"
    return Formula(f"{text} = {filled}; m and s follow from {len(kept)} kept samples", slope * own_A + offset)


def _is_simple(sample: KeptSample) -> bool:
    """Whether its only reward is that of the rollout, on the last token."""
    return sample.num_segments == 1 and any(math.isclose(sample.reward, each) for each in sample.group_returns)


def _constant(sample: KeptSample, value: float) -> _Array:
    return np.full(len(sample.columns["advantages"]), value)


def _returns_to_go(known: Known, sample: KeptSample, gamma: float) -> _Array:
    """[A] the reward on the last token, and minus beta * KL on each."""
    rewards_A = torch.zeros(len(sample.columns["advantages"]), dtype=torch.float64)
    rewards_A[-1] = sample.reward
    if is_penalized(known.algorithm, known.beta):
        rewards_A -= known.beta * torch.from_numpy(kl_of_tokens(sample, known.algorithm))
    return returns_to_go(rewards_A, gamma).numpy()


_BY_TOKEN = (gae, reinforce_pp, remax)  # their formulas have each token's KL
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
