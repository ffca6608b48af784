"""Distillation by the teacher's likeliest tokens: the divergence by hand and against the whole vocabulary's."""

from __future__ import annotations

import asyncio
import math
import pickle
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.tiny import run_overrides
from tests.verl.batch.test_packing import VOCABULARY, tiny_model
from tests.verl.batch.test_segments import edited
from tests.verl.trainer.test_distillation import BESIDE, configured, one_rank, teacher
from tests.verl.trainer.test_train_step import policy, stepped, trainer
from toolrl.analysis.replay.record import Recorder, read_record, record_path
from verl.algorithms.distillation import top_divergence
from verl.algorithms.estimators.opd import OPD
from verl.batch.samples import to_batch
from verl.batch.token_batch import top_type
from verl.build.algorithm import algorithm_of
from verl.build.teacher import check_teacher
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.trainer.policy import PackSettings
from verl.workers import logprobs as module
from verl.workers.logprobs import logprobs_of, token_logprobs, top_tokens
from verl.workers.model import hf_named_parameters
from verl.workers.policy_worker import PolicyWorker

__all__ = ["one_rank"]  # a fixture
TOP = replace(OPD, teacher_top_k=3)


def test_two_tokens_and_the_rest_by_hand() -> None:
    """p = 0.5, 0.3, rest 0.2 and q = 0.6, 0.2, rest 0.2; then a policy that has all its probability elsewhere."""
    p, q = torch.tensor([[0.5, 0.3], [1e-9, 1e-9]]).log(), torch.tensor([[0.6, 0.2], [0.5, 0.4]]).log()
    first = 0.5 * math.log(0.5 / 0.6) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.2)
    found = top_divergence(p, q)
    assert found.tolist() == pytest.approx([first, math.log(1 / 0.1)], rel=1e-4)


def full(logits_TV: Tensor, teacher_TV: Tensor) -> Tensor:
    """[T] KL(p, p_teacher) of the whole distributions."""
    one, other = (torch.distributions.Categorical(logits=each) for each in (logits_TV, teacher_TV))
    return torch.distributions.kl_divergence(one, other)


def test_all_tokens_give_the_divergence_of_the_distributions_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn, taught = torch.randn(2, 5, 20, generator=generator, dtype=torch.float64)
    gradients, values = [], []
    for divergence in (full, lambda p, q: top_divergence(p.log_softmax(-1), q.log_softmax(-1))):
        logits = drawn.clone().requires_grad_()
        values.append(divergence(logits, taught))
        values[-1].sum().backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-9)


def test_more_tokens_come_nearer_from_below() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(50, 30, generator=generator).log_softmax(-1) for _ in range(2))
    whole, bounds = full(one, other), []
    for k in (1, 2, 5, 10, 30):
        ids = other.topk(k).indices
        bounds.append(top_divergence(one.gather(1, ids), other.gather(1, ids)))
    for fewer, more in pairwise(bounds):
        assert bool((fewer <= more + 1e-5).all()) and bool((fewer >= -1e-6).all())
    torch.testing.assert_close(bounds[-1], whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at_once", [2**22, 100])
def test_log_probs_of_chosen_tokens_are_those_of_all_logits(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, in one chunk and in many; a token may be chosen twice."""
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", at_once)
    generator = torch.Generator().manual_seed(2)
    drawn, head = (torch.randn(*shape, generator=generator) for shape in ((7, 6), (11, 6)))
    ids, target = (torch.randint(11, shape, generator=generator) for shape in ((7, 4), (7,)))
    weights = torch.randn(7, 4, generator=generator)
    found = []
    for chosen in (True, False):
        hidden, rows = drawn.clone().requires_grad_(), head.clone().requires_grad_()
        if chosen:
            values = logprobs_of(ids, hidden, rows, target, token_logprobs(hidden, rows, target, 0.7)[0], 0.7)
        else:
            values = (hidden @ rows.T / 0.7).log_softmax(-1).gather(1, ids)
        (values * weights).sum().backward()
        found.append((values, hidden.grad, rows.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_likeliest_tokens_are_those_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ids that the policy has; the others count in the softmax."""
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", 30)
    generator = torch.Generator().manual_seed(3)
    hidden, head = (torch.randn(*shape, generator=generator) for shape in ((7, 6), (11, 6)))
    ids, logprobs = top_tokens(hidden, head, 4, num_ids=9, temperature=0.7)
    expected = (hidden @ head.T / 0.7).log_softmax(-1)[:, :9].topk(4)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(logprobs, expected.values)
    assert [each.shape for each in top_tokens(hidden[:0], head, 4, 9)] == [(0, 4), (0, 4)]


def test_the_policy_itself_teaches_nothing() -> None:
    metrics = stepped(trainer(TOP, teacher=policy(1e-2), minibatches=1))
    assert metrics["actor/teacher_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(0.0, abs=1e-4) and "kl/teacher" not in metrics


def test_all_tokens_give_an_update_the_divergence_of_the_vocabulary() -> None:
    """Its mean in the first update is that of the two models' own logits, by transformers."""
    learning = trainer(replace(OPD, teacher_top_k=VOCABULARY), teacher=teacher(), minibatches=1)
    plain, taught = (tiny_model("qwen2", tied=True, dtype=torch.float32) for _ in range(2))
    taught.load_state_dict(teacher().workers.call(_state)[0])
    result = asyncio.run(learning.train_step())
    divergences = []
    for low, high in pairwise(result.batch.bounds.tokens):
        ids = torch.from_numpy(result.batch.token_ids[low:high].astype(np.int64))
        places = np.flatnonzero(result.batch.action_mask[low:high]) - 1
        one, other = (_logits(each, ids)[places] for each in (plain, taught))
        divergences.append(full(one, other))
    assert result.metrics["actor/teacher_kl"] == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-4)


def _state(worker: PolicyWorker) -> dict[str, Tensor]:
    named = hf_named_parameters(worker._policy)
    return {name: each.clone() for name, each in worker.engine.export_weights(named)}


def _logits(model: Any, ids: Tensor) -> Tensor:
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits: Tensor = model(ids[None]).logits[0]
        return logits


OBSERVING = replace(TOP, observation_coefficient=0.5)


@pytest.mark.parametrize(
    "algorithm",
    [TOP, replace(BESIDE, teacher_top_k=3), OBSERVING],
    ids=["alone", "beside", "beside observations"],
)
def test_shared_segments_are_distilled_as_separate_ones(algorithm: Any) -> None:
    """Episodes of several turns and segments, in two mini-batches."""
    batch, found = to_batch([edited(), replace(edited(), rewards=(0.0, 2.0, 1.0))]), []
    for share_prefix in (True, False):
        packed = partial(replace, packing=PackSettings(60, share_prefix))
        learner = trainer(algorithm, teacher=packed(teacher())).learner
        found.append(replace(learner, policy=packed(learner.policy)).learn(batch, 0).metrics)
    shared, separate = found
    assert shared["actor/teacher_kl"] > 0 and shared["actor/computed_share"] == 1.0
    assert shared == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in separate.items()}


def test_the_divergence_falls() -> None:
    learning = trainer(TOP, teacher=teacher())
    history = [stepped(learning)["actor/teacher_kl"] for _ in range(4)]
    assert history[-1] < 0.7 * history[0]


def test_tokens_that_the_policy_did_not_sample_learn_nothing() -> None:
    """Without a sampled token there is no loss; the divergence counts as 0 there."""
    learner = trainer(TOP, teacher=teacher()).learner
    batch = to_batch([edited()])
    nothing = replace(batch, rollout_logprobs=np.full_like(batch.rollout_logprobs, np.nan))
    metrics = learner.learn(nothing, 0).metrics
    assert metrics["actor/teacher_kl"] == 0.0 and metrics["actor/grad_norm"] == pytest.approx(0.0, abs=1e-6)


def test_the_likeliest_tokens_travel_with_the_batch(tmp_path: Path) -> None:
    batch = to_batch([edited()])
    number = int(batch.num_trained.sum())
    top = np.zeros(number, dtype=top_type(2))
    top["ids"], top["logprobs"] = np.arange(2 * number).reshape(-1, 2), -np.arange(2 * number).reshape(-1, 2)
    batch = replace(batch, teacher_top=top)
    order = np.arange(len(batch))[::-1]
    turned = batch.rows(order).rows(order).teacher_top
    assert turned is not None and np.array_equal(turned, top)
    assert np.array_equal(pickle.loads(pickle.dumps(batch)).teacher_top, top)
    Recorder(tmp_path, {}, {}).write(1, batch, {}, {})
    assert np.array_equal(read_record(record_path(tmp_path, 1)).batch.teacher_top, top)


def test_the_setting_reaches_the_algorithm(model: Path, tmp_path: Path) -> None:
    algorithm = algorithm_of(configured("teacher.path=t", "teacher.weight=0.5", "teacher.top_k=8"))
    assert (algorithm.teacher_weight, algorithm.teacher_top_k) == (0.5, 8)
    assert not algorithm.teacher_in_advantages and not algorithm.logprobs_in_advantages
    assert algorithm_of(configured("teacher.path=t")).teacher_in_advantages
    for overrides, message in (
        (["teacher.top_k=8"], "teacher.top_k=8 has no effect: teacher.path is not set"),
        (["teacher.path=t", "teacher.top_k=0"], "teacher.top_k must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            configured(*overrides)
    more = [f"teacher.path={model}", "teacher.top_k=100000"]
    with pytest.raises(ConfigError, match=r"teacher.top_k=100000 is more than the policy's \d+ token ids"):
        check_teacher(load_config([*run_overrides(model, tmp_path, "hf", 1), *more]))
