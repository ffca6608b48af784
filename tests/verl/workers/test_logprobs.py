"""Log-probs and entropy in slices: the same numbers and gradients as the full matrix of logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.verl.batch.test_packing import random_samples, tiny_model
from verl.algorithms.algorithm import KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.batch.packing import make_units, pack
from verl.batch.samples import batch_of
from verl.workers import logprobs
from verl.workers.logprobs import token_logprobs
from verl.workers.model import PackedPolicy
from verl.workers.policy_worker import policy_loss


def plain(hidden: Tensor, head: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    every = (hidden @ head.T / temperature).log_softmax(-1)
    return every.gather(-1, target[:, None]).squeeze(-1), -(every.exp() * every).sum(-1)


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 5, dtype=dtype, requires_grad=True)
    head = torch.randn(23, 5, dtype=dtype, requires_grad=True)
    return hidden, head, torch.randint(0, 23, (num_tokens,))


@pytest.mark.parametrize("at_once", [1, 40, 10**6])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_values_and_gradients_are_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, at_once: int, entropy_weight: float
) -> None:
    monkeypatch.setitem(logprobs.LOGITS_AT_ONCE, "cpu", at_once)
    hidden, head, target = inputs(11)
    weight = torch.linspace(-1, 2, 11, dtype=torch.float64)
    found = []
    for values, entropy in (token_logprobs(hidden, head, target, 0.7, True), plain(hidden, head, target, 0.7)):
        assert entropy is not None
        loss = (
            (weight * values).sum() + (entropy_weight * weight * entropy).sum()
            if entropy_weight
            else values.dot(weight)
        )
        found.append([values, entropy, *torch.autograd.grad(loss, (hidden, head))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradients_by_finite_differences() -> None:
    hidden, head, target = inputs(4)
    assert torch.autograd.gradcheck(lambda *args: token_logprobs(*args, target, 1.3, True), (hidden, head))


def test_only_the_entropy_may_be_learned_from() -> None:
    hidden, head, target = inputs(4)
    _, entropy = token_logprobs(hidden, head, target, 1.3, True)
    _, expected = plain(hidden, head, target, 1.3)
    assert entropy is not None
    torch.testing.assert_close(
        torch.autograd.grad(entropy.sum(), hidden)[0], torch.autograd.grad(expected.sum(), hidden)[0]
    )


def test_no_trained_token_gives_no_value_and_zero_gradients() -> None:
    hidden, head, target = inputs(0)
    values, entropy = token_logprobs(hidden, head, target, 1.0, False)
    assert values.shape == (0,) and entropy is None
    assert all(not grad.any() for grad in torch.autograd.grad(values.sum(), (hidden, head)))


def test_half_precision_is_summed_in_full() -> None:
    hidden, head, target = inputs(6, torch.bfloat16)
    values, _ = token_logprobs(hidden, head, target)
    assert values.dtype == torch.float32
    values.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_an_entropy_that_is_only_logged_costs_nothing_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient, a tensor of zeros, would make every logit's gradient as dear as that of a loss with entropy."""
    backward: Callable[..., Any] = logprobs._TokenLogprobs.backward
    reached: list[bool] = []

    def recorded(ctx: Any, *grads: Tensor | None) -> Any:
        reached.append(grads[1] is not None)
        return backward(ctx, *grads)

    monkeypatch.setattr(logprobs._TokenLogprobs, "backward", staticmethod(recorded))
    policy, samples = PackedPolicy(tiny_model("qwen2", True, torch.float32)), random_samples(5)
    batch = batch_of(samples)
    batch = replace(
        batch,
        advantages=np.full_like(batch.rollout_logprobs, 0.5),
        rollout_logprobs=np.full_like(batch.rollout_logprobs, -4.0),
        loss_weights=np.full(len(batch), 0.1),
        metric_weight=0.1,
        sampled_weight=0.1,
    )
    packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    found = []
    for coefficient in (0.0, 1e-30):  # the second is lost in rounding, but takes the way of an entropy in the loss
        algorithm = replace(GRPO, kl=KLTerm(), entropy_coefficient=coefficient)
        loss, metrics = policy_loss(policy, packed, algorithm, 1.0)
        found.append([loss, metrics["actor/entropy"].parts[0], *torch.autograd.grad(loss, list(policy.parameters()))])
    assert reached == [False, True]
    assert float(found[0][1]) > 0
    for without, with_entropy in zip(*found, strict=True):
        torch.testing.assert_close(without, with_entropy)
