"""Rules of later papers by hand, and equal to what veRL's and TRL's own functions gave (`peers/`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.verl.algorithms.test_algorithm_family import close, learned, per_token, rollouts, selection_of
from verl.algorithms.aggregate import episode_weights
from verl.algorithms.correction import token_weights
from verl.algorithms.estimators.advantage import AdvantageInputs, Turns, gae
from verl.algorithms.estimators.aspo import aspo
from verl.algorithms.estimators.gdpo import gdpo
from verl.algorithms.estimators.lite_ppo import lite_ppo
from verl.algorithms.estimators.matchtir import by_turn_and_rollout
from verl.algorithms.estimators.max_rl import max_rl
from verl.algorithms.estimators.raft_pp import right_only
from verl.algorithms.filters import resample_on_correct, void_turns
from verl.algorithms.kl import loss_divergence
from verl.algorithms.losses.dppo_kl import within_binary_kl
from verl.algorithms.losses.dppo_tv import within_total_variation
from verl.algorithms.losses.high_entropy import clipped_where_selected, highest_entropy
from verl.algorithms.losses.ipo import penalized_within_bounds
from verl.algorithms.losses.kpop import KPOP
from verl.algorithms.losses.opsm import clipped_unless_off_policy
from verl.algorithms.losses.policy_loss import LossInputs, SelectionInputs
from verl.algorithms.losses.vapo import right_tokens
from verl.algorithms.names import Aggregation, KLEstimate
from verl.errors import ConfigError
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    ParsedResponse,
    Score,
    StopReason,
    Task,
    ToolStatus,
    ToolUse,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

PEERS = Path(__file__).parent / "peers"
TRL, VERL = (json.loads((PEERS / f"{name}.json").read_text()) for name in ("trl", "verl"))
HALF = math.log(0.5)


def in_parts(lengths: list[int], groups: list[int], parts: dict[str, list[float]]) -> AdvantageInputs:
    tensors = {name: torch.tensor(values) for name, values in parts.items()}
    return AdvantageInputs([torch.zeros(length) for length in lengths], torch.tensor(groups), parts=tensors)


def test_gdpo_by_hand() -> None:
    # Two responses of a token: format 1 and 0, correctness -3 and 3. Each part is +-1 / sqrt(2) of its group, so they
    # cancel, where a sum of rewards would be -2 and 3. With half the weight on correctness they do not.
    given = in_parts([1, 1], [0, 0], {"format": [1.0, 0.0], "correctness": [-3.0, 3.0]})
    assert torch.cat(gdpo(given).advantages).tolist() == pytest.approx([0.0, 0.0], abs=1e-2)
    unit = 1 / math.sqrt(2)  # whitened: two opposite numbers have the unbiased variance 2 x^2
    weighted = gdpo(given, weights=[1.0, 0.5])
    assert torch.cat(weighted.advantages).tolist() == pytest.approx([unit, -unit], abs=1e-4)
    alone = gdpo(given, parts=["correctness"])
    assert torch.cat(alone.advantages).tolist() == pytest.approx([-unit, unit], abs=1e-4)


def test_gdpo_equals_verls() -> None:
    given = VERL["gdpo"]
    got = gdpo(in_parts(given["lengths"], given["groups"], given["parts"]), weights=given["weights"])
    assert torch.cat(got.advantages).tolist() == pytest.approx(given["advantages"], abs=1e-5)


def test_gdpo_equals_trls_up_to_what_is_added_to_a_std() -> None:
    """TRL adds 1e-4 to both, and whitens over responses, which have one token each here."""
    given = TRL["given"]
    got = gdpo(in_parts([1] * 8, given["groups"], given["parts"]), weights=given["weights"])
    assert torch.cat(got.advantages).tolist() == pytest.approx(TRL["advantages"]["parts"], abs=1e-3)


def test_gdpo_names_parts_and_weights_that_do_not_fit() -> None:
    given = in_parts([1, 1], [0, 0], {"format": [1.0, 0.0], "correctness": [-3.0, 3.0]})
    with pytest.raises(ConfigError, match="no score has the part 'form'; did you mean 'format'"):
        gdpo(given, parts=["form"])
    with pytest.raises(ConfigError, match=r"a number for each of format, correctness; got \[1.0\]"):
        gdpo(given, weights=[1.0])


def test_max_rl_by_hand() -> None:
    # mean 1/4: one right response of four gets 3, the others -1; a mean of 1/2 gives +-1; no right one, a mean below 0
    # and a group of one give nothing
    got = max_rl(rollouts([[1.0], [0.0], [0.0], [0.0]], [0] * 4))
    assert per_token(got.advantages) == [[3.0], [-1.0], [-1.0], [-1.0]]
    assert per_token(max_rl(rollouts([[1.0, 0.0], [0.0]], [0, 0])).advantages) == [[1.0, 1.0], [-1.0]]
    nothing = max_rl(rollouts([[0.0], [0.0], [1.0], [-2.0], [1.0]], [0, 0, 1, 1, 2]))
    assert per_token(nothing.advantages) == [[0.0]] * 5


def test_lite_ppo_by_hand() -> None:
    # rewards 0, 4, 1 and 1: squares around their mean of 1.5 sum to 9, so the std is sqrt(3)
    got = lite_ppo(rollouts([[0.0], [4.0], [1.0], [0.5, 0.5]], [0, 0, 1, 1]))
    unit = round(2 / (math.sqrt(3) + 1e-6), 5)
    assert per_token(got.advantages) == [[-unit], [unit], [0.0], [0.0, 0.0]]


def test_lite_ppo_equals_trls_scale_of_the_batch() -> None:
    given = TRL["given"]
    parts = zip(*given["parts"].values(), strict=True)
    rewards = [[sum(weight * part for weight, part in zip(given["weights"], each, strict=True))] for each in parts]
    got = torch.cat(lite_ppo(rollouts(rewards, given["groups"])).advantages)
    assert got.tolist() == pytest.approx(TRL["advantages"]["batch"], abs=1e-3)


def test_dppo_tv_by_hand() -> None:
    # p_old = 1/2. A rise to 0.75 and a fall to 0.25 leave the region, each in its direction alone.
    loss = partial(within_total_variation, clip_low=0.2, clip_high=0.2)
    got = learned(loss, [1.5, 1.5, 0.5, 0.5, 1.2], [1.0, -1.0, 1.0, -1.0, 1.0], [0] * 5, logprob=HALF)
    weights = [0.0, -1.5, 0.5, 0.0, 1.2]
    ratios = [1.5, 1.5, 0.5, 0.5, 1.2]
    losses = [-weight * (HALF + math.log(ratio)) for weight, ratio in zip(weights, ratios, strict=True)]
    close(got, losses, [-weight for weight in weights])
    # a rare token may rise eightyfold, but weighs no more than the cap
    rare = learned(loss, [80.0], [1.0], [0], logprob=math.log(1e-3))
    close(rare, [-20.0 * math.log(0.08)], [-20.0])


def test_dppo_kl_by_hand() -> None:
    # p_old = 1/2 and p = 3/4: KL = 1/2 log(2/3) + 1/2 log 2 = 0.144; p = 0.55 has 0.005. What moves back is kept.
    loss = partial(within_binary_kl, clip_low=0.1, clip_high=0.1)
    got = learned(loss, [1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 1.0], [0] * 5, logprob=HALF)
    assert got[1] == pytest.approx([0.0, 1.5, -0.5, 0.0, -1.1], abs=1e-5)
    wider = learned(partial(loss, clip_high=0.15), [1.5], [1.0], [0], logprob=HALF)
    assert wider[1] == pytest.approx([-1.5], abs=1e-5)


def test_ipo_by_hand() -> None:
    # p_old = 1/2: 0.55 is kept, 0.75 and 0.25 are not, whatever the advantage. The penalty is on all of them, and its
    # gradient is 2 tau log(ratio).
    ratios, advantages = [1.1, 1.5, 0.5, 1.0], [2.0, -1.0, 1.0, 0.0]
    got = learned(partial(penalized_within_bounds, tau=0.5), ratios, advantages, [0] * 4, logprob=HALF)
    logs = [math.log(ratio) for ratio in ratios]
    close(got, [-2.2 + logs[0] ** 2 / 2, logs[1] ** 2 / 2, logs[2] ** 2 / 2, 0.0], [-2.2 + logs[0], *logs[1:]])


def test_opsm_by_hand() -> None:
    # log ratios -1 and 0: their mean log(p_old / p) is 0.5; -2 and 0 have 1, and only where A < 0 they are left out
    ratios = [math.exp(-1), 1.0, math.exp(-2), 1.0, math.exp(-2), 1.0]
    loss = partial(clipped_unless_off_policy, max_divergence=0.75)
    got = learned(loss, ratios, [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2])
    close(got, [0.8, 1.0, 0.0, 0.0, -math.exp(-2), -1.0], [0.0, 1.0, 0.0, 0.0, -math.exp(-2), -1.0])


def test_the_unbiased_estimate_has_the_gradient_of_kl() -> None:
    """Over both tokens of a policy, weighted by the probabilities of the old one, which is another."""
    p, ref, old = (torch.tensor(each, dtype=torch.float64) for each in ([0.3, 0.7], [0.6, 0.4], [0.5, 0.5]))
    logits = p.log().requires_grad_()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    log_p = logits.log_softmax(0)
    exact = gradient((log_p.exp() * (log_p - ref.log())).sum())
    estimates = {
        name: gradient((old * loss_divergence(name, log_p, ref.log(), old.log())).sum())
        for name in (KLEstimate.UNBIASED_K3, KLEstimate.K3)
    }
    torch.testing.assert_close(estimates[KLEstimate.UNBIASED_K3], exact)
    assert not torch.allclose(estimates[KLEstimate.K3], exact, atol=1e-2)


def tokens_of_trl() -> tuple[LossInputs, dict[str, Tensor], Tensor]:
    """TRL's tokens, and the weight of each in its loss: the mean over responses of the means over their tokens."""
    columns = {name: torch.tensor(values) for name, values in TRL["tokens"].items()}
    lengths = columns["lengths"]
    sample_T = torch.arange(len(lengths)).repeat_interleave(lengths)
    weights_T = episode_weights(Aggregation.SEQ_MEAN_TOKEN_MEAN, lengths).repeat_interleave(lengths)
    logprobs_T = columns["logprobs"].clone().requires_grad_()
    inputs = LossInputs(logprobs_T, columns["old"], columns["advantages"][sample_T], sample_T)
    return inputs, columns, weights_T


def assert_loss_of_trl(name: str, inputs: LossInputs, loss_T: Tensor, weights_T: Tensor) -> None:
    total = (loss_T * weights_T).sum()
    total.backward()
    assert inputs.logprobs_T.grad is not None
    assert float(total.detach()) == pytest.approx(TRL["loss"][name]["value"], abs=1e-5)
    assert inputs.logprobs_T.grad.tolist() == pytest.approx(TRL["loss"][name]["gradient"], abs=1e-5)


def test_opsm_and_the_unbiased_kl_equal_trls() -> None:
    inputs, columns, weights_T = tokens_of_trl()
    token = clipped_unless_off_policy(inputs)
    assert 0 < float(token.metrics_T["off_policy_fraction"].mean()) < 1
    kl_T = loss_divergence(KLEstimate.UNBIASED_K3, inputs.logprobs_T, columns["ref"], inputs.old_logprobs_T)
    assert_loss_of_trl("opsm", inputs, token.loss_T + 0.1 * kl_T, weights_T)


def test_the_selection_of_high_entropy_equals_trls() -> None:
    inputs, columns, weights_T = tokens_of_trl()
    given = SelectionInputs(*[columns["logprobs"]] * 3, torch.Generator(), lambda: columns["entropies"])
    selected_T = highest_entropy(given).float()
    assert int(selected_T.sum()) == 5  # of 25
    inputs = replace(inputs, selected_T=selected_T)
    assert_loss_of_trl("entropy", inputs, clipped_where_selected(inputs).loss_T, weights_T)


def test_high_entropy_by_hand() -> None:
    given = selection_of(torch.zeros(5), torch.tensor([0.1, 0.9, 0.5, 0.4, 0.2]))  # the second is the entropies, too
    assert highest_entropy(given, share=0.25).tolist() == [False, True, True, False, False]  # the quantile is 0.5
    close(learned(clipped_where_selected, [1.0, 1.0], [1.0, 1.0], [0, 0], [0.0, 1.0]), [0.0, -1.0], [0.0, -1.0])


def test_vapo_by_hand() -> None:
    # Two right tokens of four: the mean over them, times 0.1.
    rewards = torch.tensor([1.0, 1.0, 0.0, -1.0])
    assert right_tokens(rewards).tolist() == pytest.approx([0.05, 0.05, 0.0, 0.0])
    assert right_tokens(rewards, threshold=-0.5, nll_weight=3.0).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert not right_tokens(rewards, threshold=1.0).any()


def test_gae_of_vapo_by_hand() -> None:
    # Deltas 0.2, 0.2 and 0.4: with lambda 1 the critic's targets are all 1. Three tokens at alpha = 2/3 have lambda
    # 1/2: advantages 0.4, 0.4 and 0.4, whitened 0. At alpha = 0.1 it would be below 0: the deltas are left.
    values, rewards = [torch.tensor([0.2, 0.4, 0.6])], [torch.tensor([0.0, 0.0, 1.0])]
    given = AdvantageInputs(rewards, torch.tensor([0]), values)
    half = gae(given, critic_lam=1.0, length_alpha=2 / 3)
    assert half.returns is not None and half.returns[0].tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert half.whitening is not None and half.whitening.mean == pytest.approx(0.4)
    assert half.advantages[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-2)
    short = gae(given, length_alpha=0.1)
    assert short.returns is not None and short.returns[0].tolist() == pytest.approx([0.4, 0.6, 1.0])
    apart = gae(given, lam=0.0, critic_lam=1.0)
    assert apart.returns is not None and apart.returns[0].tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert apart.advantages[0].tolist() == pytest.approx(short.advantages[0].tolist())


def in_turns(rewards: list[list[float]], turns: list[list[int]], groups: list[int]) -> AdvantageInputs:
    """turns: that each token belongs to"""
    states = [Turns(torch.tensor(each), torch.arange(max(each) + 1)) for each in turns]
    return AdvantageInputs([torch.tensor(each) for each in rewards], torch.tensor(groups), turns=states)


def test_matchtir_by_hand() -> None:
    # Rewards 1 and 2 of the two turns of a rollout, 0 of the other's only one: discounted by half the first turns
    # return 2 and 0, the rollouts 3 and 0. Both are +-1 / sqrt(2) of their group. The second turn is alone.
    given = in_turns([[0.0, 1.0, 2.0], [0.0]], [[0, 0, 1], [0]], [0, 0])
    unit = 1 / math.sqrt(2)
    got = by_turn_and_rollout(given, gamma=0.5, turn_weight=0.5)
    assert torch.cat(got.advantages).tolist() == pytest.approx([unit, unit, unit / 2, -unit], abs=1e-5)
    turns_alone = by_turn_and_rollout(given, gamma=0.5, turn_weight=1.0)
    assert torch.cat(turns_alone.advantages).tolist() == pytest.approx([unit, unit, 0.0, -unit], abs=1e-5)


def test_a_turn_is_compared_with_those_of_its_number_and_its_group_alone() -> None:
    # first turns 0 and 4, second ones 2 and 2, at gamma 0 what each was given; another group with the same numbers
    rewards, turns = [[0.0, 2.0], [4.0, 2.0]], [[0, 1], [0, 1]]
    got = by_turn_and_rollout(in_turns(rewards + [[9.0, 9.0]] * 2, turns * 2, [0, 0, 1, 1]), 0.0, 1.0)
    unit = 1 / math.sqrt(2)
    assert torch.cat(got.advantages).tolist() == pytest.approx([-unit, 0.0, unit, 0.0] + [0.0] * 4, abs=1e-5)


def test_aspo_by_hand() -> None:
    # Right responses of 4 and 6 tokens call after 1 and 3, the third makes no call, the fourth is wrong: A = +-1/2. The
    # means are 2 and 5, so the bonus of delta = -1 is +-1/5.
    turns = [[0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0], [0, 1]]
    rewards = [[0.0] * (len(each) - 1) + [reward] for each, reward in zip(turns, (1.0, 1.0, 1.0, 0.0), strict=True)]
    given = in_turns(rewards, turns, [0] * 4)
    right, wrong = 0.25 / 0.5, -0.75 / 0.5  # a std of 1/2
    got = [each[0].item() for each in aspo(given, delta=-1.0, k=0.7).advantages]
    assert got == pytest.approx([right + 0.2, right - 0.2, right, wrong], abs=1e-5)
    bounded = [each[0].item() for each in aspo(given, delta=-10.0, k=0.5).advantages]
    assert bounded == pytest.approx([1.5 * right, 0.5 * right, right, wrong], abs=1e-5)


def test_raft_pp_by_hand() -> None:
    assert per_token(right_only(rollouts([[0.0, 1.0], [0.0], [-1.0], [0.2]], [0, 0, 1, 2])).advantages) == [
        [1.0, 1.0],
        [0.0],
        [0.0],
        [1.0],
    ]
    assert per_token(right_only(rollouts([[0.5], [0.6]], [0, 0]), threshold=0.5).advantages) == [[0.0], [1.0]]


def test_kpop_by_hand() -> None:
    # The engine at 1/2: d(3/4) is 0.144 and 0.131, d(0.55) 0.005. A rare token may be five times as likely. What the
    # engine did not sample is kept.
    trainer, engine = torch.tensor([0.75, 0.55, 5e-3, 0.5]).log(), torch.tensor([0.5, 0.5, 1e-3, float("nan")]).log()
    for bound, kept in (0.14, [0.0, 1.1, 5.0, 1.0]), (0.15, [1.5, 1.1, 5.0, 1.0]):
        correction = replace(KPOP.correction, rejection_upper=math.exp(bound))  # type: ignore[type-var]
        weights = token_weights(correction, trainer, engine, torch.zeros(4, dtype=torch.long))
        assert weights.weight_T.tolist() == pytest.approx(kept, abs=1e-4)


def played(*turns: Turn, uses: Sequence[ToolStatus] = (), malformed: int = 0) -> Trajectory:
    task, made = Task("t", (), "", "s"), tuple(ToolUse("f", each, 0.0) for each in uses)
    return Trajectory(task, 0, turns, StopReason.STOP, Outcome.SCORED, made, num_malformed_calls=malformed)


def turn_of(parsed: ParsedResponse | None, answered: bool = False) -> Turn:
    completion = Completion((5,), (-1.0,), FinishReason.STOP, 0)
    return Turn((1,), completion, Message("assistant", "x"), (Message("tool", "y"),) * answered, parsed=parsed)


def group_of(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> TrajectoryGroup:
    scores = tuple(Score(reward, {}) for reward in rewards)
    return TrajectoryGroup(trajectories[0].task, tuple(trajectories), scores, tuple(rewards))


def test_rollouts_with_a_void_turn_are_dropped() -> None:
    good, empty = ParsedResponse(), ParsedResponse(complete=False)
    pause = turn_of(empty)  # what a format continues in the same turn
    cases = [
        (played(turn_of(good, True), turn_of(good)), True),
        (played(turn_of(good, True), pause, turn_of(good)), True),
        (played(turn_of(empty, True), turn_of(good)), False),
        (played(turn_of(good, True), turn_of(None)), False),
        (played(turn_of(ParsedResponse(error="no JSON"), True), turn_of(good)), False),
        (played(), True),
    ]
    assert void_turns(group_of([each for each, _ in cases], [0.0] * 6)) == [kept for _, kept in cases]


def test_right_rollouts_with_the_fewest_tool_errors_are_kept() -> None:
    ok, error, late = ToolStatus.SUCCESS, ToolStatus.USER_ERROR, ToolStatus.TIMEOUT
    half, none = played(uses=[ok, error]), played(uses=[ok])
    all_, unreadable, silent = played(uses=[late]), played(uses=[ok, ok], malformed=2), played()
    # errors 1/2, 1, 0, 1/2 (calls that could not be read) and 1/2 (no call) of right ones, three wrong ones
    group = group_of([half, all_, none, unreadable, silent, none, none, none], [1.0] * 5 + [0.0] * 3)
    assert resample_on_correct(group, 0.5, least=1) == [True, False, True, False, False, True, True, False]
    # two of each, though a share of the two wrong ones would be one
    assert resample_on_correct(group_of([none] * 8, [1.0] * 6 + [0.0] * 2)) == [True, True] + [False] * 4 + [True, True]
    # of one kind alone
    assert resample_on_correct(group_of([none, all_, none, half], [1.0] * 4)) == [True, False, True, False]
    assert resample_on_correct(group_of([none] * 4, [0.0] * 4)) == [True, True, False, False]
    # a fault of a service is no error of the policy
    down = played(uses=[ToolStatus.UNAVAILABLE])
    assert resample_on_correct(group_of([half, down], [1.0, 1.0])) == [False, True]
