"""On-policy distillation: a teacher's advantages by hand, in every kind of update, and a policy that learns by them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, Qwen2Config

from tests.support.every import every
from tests.support.metric_names import known
from tests.support.tiny import run_overrides, save_tiny_model
from tests.verl.algorithms.test_algorithm_invariances import Table
from tests.verl.batch.test_packing import tiny_model
from tests.verl.batch.test_segments import edited
from tests.verl.trainer.test_train_step import PLAIN, passes, policy, sample, scored, stepped, trainer, weights
from toolrl.check.preflight.local_group import LocalGroup
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.estimators.opd import OPD
from verl.algorithms.names import OldLogprobs
from verl.batch.experience import nonzero_advantage_rows, policy_minibatch, with_advantages
from verl.batch.packing import make_units, pack
from verl.batch.samples import to_batch
from verl.batch.token_batch import TokenBatch
from verl.build.algorithm import algorithm_of
from verl.build.ranks import abs_paths, rank_spec
from verl.build.teacher import check_teacher
from verl.checkpoint.contents import contents_of
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.trainer.metrics import teacher_kl
from verl.trainer.not_finite import NotFiniteError
from verl.trainer.policy import PackSettings, Policy
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.policy_worker import PolicyWorker, policy_loss

__all__ = ["passes"]  # a fixture
BESIDE = replace(PLAIN, teacher_weight=0.5)  # the reward


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def teacher(seed: int = 7) -> Policy:
    """A frozen model with other weights than the policy's."""
    module = PackedPolicy(tiny_model("qwen2", tied=True, dtype=torch.float32))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in module.parameters():
            each += 0.2 * torch.randn(each.shape, generator=generator)
    engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), None)
    return Policy(LocalGroup(PolicyWorker(engine, temperature=1.0)), PackSettings(max_tokens_per_pack=400))


def conversation(**columns: list[float]) -> TokenBatch:
    """Two responses to a prompt: one of two turns around an observation, which is not trained, and one of one turn."""
    samples = [sample((False, True, False, True), 1.0), sample((False, True), 0.0)]
    return scored(samples, teacher_logprobs=[-1.5, -1.0, -4.0], **columns)


def test_the_advantages_of_a_teacher_by_hand() -> None:
    """Log-probs of the policy before the update -1, -2, -1, and of the engine 0: stale weights do not matter."""
    batch = conversation(old_logprobs=[-1.0, -2.0, -1.0])
    alone = with_advantages(batch, replace(OPD, teacher_weight=2.0)).advantages
    assert alone is not None and alone.tolist() == pytest.approx([-1.0, 2.0, -6.0])
    unit = 0.5 / (0.5**0.5 + 1e-6)  # GRPO's: rewards 1 and 0, standard deviation sqrt(1/2)
    both = with_advantages(batch, BESIDE).advantages
    assert both is not None and both.tolist() == pytest.approx([unit - 0.25, unit + 0.5, -unit - 1.5])
    assert teacher_kl(batch) == pytest.approx((0.5 - 1.0 + 3.0) / 3)
    by_engine = with_advantages(conversation(), OPD).advantages
    assert by_engine is not None and by_engine.tolist() == [-1.5, -1.0, -4.0]


def test_tokens_that_the_policy_did_not_sample_learn_nothing_from_a_teacher() -> None:
    """A trained observation, the second token: its log-prob is no sample of the policy's distribution."""
    batch = conversation(old_logprobs=[-1.0, -2.0, -1.0], rollout_logprobs=[-1.0, math.nan, -1.0])
    alone = with_advantages(batch, OPD).advantages
    assert alone is not None and alone.tolist() == pytest.approx([-0.5, 0.0, -3.0])
    assert teacher_kl(batch) == pytest.approx((0.5 + 3.0) / 2)


def test_the_gradient_of_a_distilling_update_by_hand() -> None:
    """On-policy: minus the advantage of each token, over the three of them."""
    batch = with_advantages(conversation(old_logprobs=[-1.0, -2.0, -1.0]), OPD)
    batch = policy_minibatch(replace(batch, returns=np.arange(3, dtype=np.float32)), OPD)
    parameters = torch.tensor([-1.0, -2.0, -1.0], requires_grad=True)
    loss, _ = policy_loss(Table(parameters), pack(make_units(batch, True, 100), batch), OPD, 1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert parameters.grad is not None
    torch.testing.assert_close(parameters.grad, torch.tensor([0.5, -1.0, 3.0]) / 3)


def test_groups_of_equal_rewards_learn_from_a_teacher() -> None:
    batch = with_advantages(replace(conversation(), rewards=np.zeros(3, dtype=np.float32)), BESIDE)
    assert nonzero_advantage_rows(batch, BESIDE).tolist() == [0, 1]
    assert nonzero_advantage_rows(with_advantages(batch, PLAIN), PLAIN).tolist() == []


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("algorithm", [OPD, BESIDE], ids=["alone", "beside"])
def test_a_first_update_estimates_the_advantages_of_a_teacher_itself(
    algorithm: Algorithm, minibatches: int, passes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all were known before, and without the pass of the policy that this would take."""
    free, paid = (trainer(algorithm, minibatches=minibatches, lr=1e-3, teacher=teacher()) for _ in range(2))
    batch = asyncio.run(free.train_step()).batch
    asyncio.run(paid.train_step())
    learned, scores = [], []
    for learning in (free, paid):
        passes.clear()
        learned.append(learning.learner.learn(batch, 1))
        scores.append(sum(tokens for name, tokens in passes if name == "score"))
        monkeypatch.setattr(Policy, "can_estimate", lambda *_: False)
    one, two = learned
    trained = int(batch.num_trained.sum())
    assert scores[1] == 2 * trained and scores[0] < 1.7 * trained
    for name in ("old_logprobs", "teacher_logprobs", "advantages"):
        np.testing.assert_allclose(getattr(one.batch, name), getattr(two.batch, name), rtol=1e-5, atol=1e-5)
    assert one.metrics == pytest.approx(two.metrics, rel=1e-3, abs=1e-5) and one.metrics["kl/teacher"] > 0
    for name, full in weights(free).items():
        torch.testing.assert_close(full, weights(paid)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", [OPD, BESIDE], ids=["alone", "beside"])
def test_shared_segments_are_distilled_as_separate_ones(algorithm: Algorithm) -> None:
    """Episodes of several turns and segments, in two mini-batches."""
    batch, found = to_batch([edited(), replace(edited(), rewards=(0.0, 2.0, 1.0))]), []
    for share_prefix in (True, False):
        packed = partial(replace, packing=PackSettings(60, share_prefix))
        learner = trainer(algorithm, teacher=packed(teacher())).learner
        found.append(replace(learner, policy=packed(learner.policy)).learn(batch, 0).metrics)
    shared, separate = found
    assert {"kl/teacher", "actor/loss"} <= shared.keys()
    assert shared == {name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in separate.items()}


def test_the_policy_itself_teaches_nothing() -> None:
    learning = trainer(OPD, teacher=policy(1e-2))
    metrics = stepped(learning)
    assert metrics["kl/teacher"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(0.0, abs=1e-5)


def test_a_teacher_whose_log_probs_are_not_finite_is_named() -> None:
    learning = trainer(replace(OPD, old_logprobs=OldLogprobs.ROLLOUT), teacher=teacher())
    before = weights(learning)
    plain = teacher()
    spoiled = SimpleNamespace(score=lambda sharding: plain.score(sharding) * np.float32(np.nan))
    learning.learner.teacher = spoiled  # type: ignore[assignment]
    with pytest.raises(NotFiniteError, match="the teacher's log-probs of row t"):
        stepped(learning)
    assert every(torch.equal(full, before[name]) for name, full in weights(learning).items())


@pytest.mark.long
def test_a_policy_learns_from_a_better_copy_of_itself() -> None:
    """GRPO makes the copy, which then teaches the policy as it was: without a reward, in half as many steps."""
    steps = 10
    better = trainer(PLAIN)
    rewards = [stepped(better)["reward/total"] for _ in range(steps)]
    frozen = better.learner.policy
    learning = trainer(OPD, teacher=frozen)
    history = [stepped(learning) for _ in range(steps // 2 + 1)]
    gained = [metrics["reward/total"] for metrics in history]
    assert rewards[-1] > 0.8 > 0.65 > rewards[0] and gained[0] == rewards[0]
    assert gained[-1] > 0.8 and gained[-1] > rewards[steps // 2]
    assert history[-1]["kl/teacher"] < history[0]["kl/teacher"] / 4
    assert [name for name in history[0] if not known(name)] == []


def configured(*overrides: str) -> Any:
    return load_config(["model.path=m", "algorithm.name=grpo", "rollout.n=2", *overrides])


def test_the_settings_of_a_teacher_reach_algorithm_and_ranks(tmp_path: Path) -> None:
    config = configured(f"teacher.path={tmp_path}", "teacher.weight=0.25")
    algorithm = algorithm_of(config)
    assert algorithm.teacher_weight == 0.25 and algorithm.advantage is GRPO.advantage
    spec = rank_spec(config, algorithm, "cpu", total_steps=1)
    assert (spec.teacher_path, spec.with_reference) == (str(tmp_path), True)
    plain = configured()
    assert algorithm_of(plain).teacher_weight == 0.0
    assert rank_spec(plain, algorithm_of(plain), "cpu", total_steps=1).teacher_path is None
    assert algorithm_of(configured("algorithm.name=opd", "teacher.path=t")) == OPD


def test_a_teacher_in_a_folder_has_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "better").mkdir()
    monkeypatch.chdir(tmp_path)
    assert abs_paths(configured("teacher.path=better")).teacher.path == str((tmp_path / "better").resolve())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.name=opd"], "algorithm.name=opd learns from a teacher; set teacher.path"),
        (["teacher.weight=0.5"], "teacher.weight=0.5 has no effect: teacher.path is not set"),
        (["teacher.path=t", "teacher.weight=0"], "teacher.weight must be positive"),
        (["ref.offload_params=true", "algorithm.kl_placement=none"], "algorithm.kl_placement is none"),
    ],
)
def test_settings_without_a_teacher_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm_of(configured(*overrides))


def test_a_teacher_without_a_reference_is_offloaded() -> None:
    config = configured("ref.offload_params=true", "algorithm.kl_placement=none", "teacher.path=t")
    assert rank_spec(config, algorithm_of(config), "cuda", total_steps=1).frozen_offload.params
    config = configured("ref.offload_params=true", "lora.rank=4", "teacher.path=t")
    assert config.ref.offload_params


def test_a_teacher_must_read_the_tokens_of_the_policy(model: Path, tmp_path: Path) -> None:
    """Also one that has more rows in its embedding, as larger models of a family have."""

    def checked(folder: Path, *overrides: str) -> None:
        check_teacher(load_config([*run_overrides(model, tmp_path, "hf", 1), f"teacher.path={folder}", *overrides]))

    def changed(name: str, **values: int) -> Path:
        folder = save_tiny_model(tmp_path / name)
        shape = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**shape, **values}))
        return folder

    size = Qwen2Config.from_pretrained(model).vocab_size
    checked(model)
    checked(changed("padded", vocab_size=size + 64))
    with pytest.raises(ConfigError, match=rf"has {size - 1} token ids and the policy {size}"):
        checked(changed("fewer", vocab_size=size - 1))
    with pytest.raises(ConfigError, match=r"is 528 tokens, but the teacher supports 100"):
        checked(changed("short", max_position_embeddings=100))
    other = save_tiny_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(other)
    place = rf"\(None here, {len(tokenizer) - 1} there\)"
    problem = f"has other ids than the policy's for 1 tokens, such as '<another>' {place}"
    with pytest.raises(ConfigError, match=problem):
        checked(other)


def test_a_resume_notices_other_weights_of_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    settings = {"teacher.path": str(tmp_path), "model.path": str(tmp_path)}
    before = contents_of(settings, reads_weights=False)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    after = contents_of(settings, reads_weights=False)
    assert before["model.path"] == after["model.path"] and before["teacher.path"] != after["teacher.path"]
