"""The training step in one process: it learns, repeats itself bit for bit, and without a signal changes nothing."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast

from tests.support.every import every
from tests.support.metric_names import known
from tests.verl.batch.test_packing import VOCABULARY, tiny_model
from tests.verl.batch.test_segments import edited
from toolrl.check.preflight.local_group import LocalGroup
from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.correction import UNBOUNDED, Correction, token_weights
from verl.algorithms.entropy import AdaptiveEntropy
from verl.algorithms.estimators.advantage import AdvantageInputs
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.estimators.reinforce_pp import reinforce_pp
from verl.algorithms.estimators.toolrl_grpo import TOOLRL_GRPO
from verl.algorithms.kl import KL_ESTIMATORS, AdaptiveKL
from verl.algorithms.losses.policy_loss import SelectionInputs
from verl.algorithms.losses.ppo import PPO
from verl.algorithms.names import KLPlacement, Level, OldLogprobs
from verl.batch.experience import (
    nonzero_advantage_rows,
    policy_minibatch,
    with_advantages,
)
from verl.batch.packed import PackedBatch
from verl.batch.packing import Shard
from verl.batch.samples import Sample, batch_of, to_batch
from verl.batch.token_batch import TokenBatch
from verl.build.algorithm import build_algorithm
from verl.build.env import single_turn_runner
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import ActorConfig, Config, DataConfig, RolloutConfig, TrainerConfig
from verl.data.tasks import TaskStream
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RewardFaultError, RolloutManager
from verl.errors import ConfigError
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import HFEngine
from verl.scoring.pool import DirectScorer
from verl.scoring.rewards import Rewards
from verl.tracking.flops import DecoderShape
from verl.tracking.metric import Max
from verl.trainer.learner import Learner
from verl.trainer.metrics import Meter, Metrics
from verl.trainer.not_finite import NotFiniteError
from verl.trainer.policy import Critic, PackSettings, Policy, PolicyUpdate
from verl.trainer.ppo import PPOTrainer
from verl.trainer.update_plan import Deferred, UpdatePlan, plan_updates
from verl.trainer.weight_sync import StaleEngineError, WeightSync
from verl.transfer.bucket import BucketHandle, BucketLayout, Receiver
from verl.transfer.shared_memory import SharedMemory
from verl.types import Message, Outcome, Score, StopReason, Task, Trajectory, TrajectoryGroup
from verl.workers.critic_worker import CriticWorker
from verl.workers.fsdp_engine import FSDPEngine, UpdateResult
from verl.workers.model import PackedCritic, PackedPolicy, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker, _engine_metrics

EOS = 0
PLAIN = replace(GRPO, kl=KLTerm())


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<eos>": EOS} | {f"w{number}": number for number in range(1, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", chat_template=template)


class RewardsEvenNumbers:
    """Share of the response's tokens with an even number: about a half to begin with."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        numbers = trajectory.response.split()
        share = sum(int(word[1:]) % 2 == 0 for word in numbers) / len(numbers) if numbers else 0.0
        return Score(share, {"share": share})


class AlwaysOne:
    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(1.0, {})


def policy(lr: float) -> Policy:
    module = PackedPolicy(tiny_model("qwen2", tied=True, dtype=torch.float32))
    optimizer = OptimizerSettings(lr=lr, weight_decay=0.0)
    engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), optimizer)
    return Policy(LocalGroup(PolicyWorker(engine, temperature=1.0)), PackSettings(max_tokens_per_pack=400))


def trainer(
    algorithm: Algorithm,
    scorer: object = None,
    lr: float = 1e-2,
    minibatches: int = 2,
    critic: Critic | None = None,
    control: AdaptiveKL | None = None,
    entropy: AdaptiveEntropy | None = None,
    teacher: Policy | None = None,
) -> PPOTrainer:
    rollout_model = tiny_model("qwen2", tied=True, dtype=torch.float32)
    rollout_model.set_attn_implementation("sdpa")
    sampling = Sampling(max_tokens=4, stop_token_ids=(EOS,))
    scorer = scorer or RewardsEvenNumbers()
    tasks = [Task(f"t{n}", (Message("user", f"w{n} w{n + 1}"),), "w7", "tokens") for n in range(1, 5)]
    reference = policy(lr) if algorithm.kl.placement is not KLPlacement.NONE else None
    engine, chat, learner = HFEngine(rollout_model), ChatTemplate(tokenizer()), policy(lr)
    rollout = GroupRollout(engine, DirectScorer(scorer), sampling, single_turn_runner(chat, sampling.max_tokens))  # type: ignore[arg-type]
    config = Config(
        data=DataConfig(train_batch_size=4),
        actor=ActorConfig(ppo_mini_batch_size=4 // minibatches),
        rollout=RolloutConfig(name="hf", n=8),
    )
    probes = [chat.prompt_ids(tasks[0].prompt)]
    layouts = learner.connect([SharedMemory], torch.float32, 1000)  # small, so that there are several
    assert len(layouts) > 3
    weight_sync = WeightSync(
        policy=learner,
        engine=engine,
        layouts=layouts,
        probes=probes,
        sampling=replace(sampling, seed=1),
        tolerance=1e-4,
    )
    rollouts = RolloutManager(config, algorithm, TaskStream([tasks]), rollout)
    whole = Learner(
        config=config,
        algorithm=algorithm,
        policy=learner,
        reference=reference,
        teacher=teacher,
        critic=critic,
        kl_control=control,
        entropy_control=entropy,
    )
    return PPOTrainer(rollouts=rollouts, learner=whole, weight_sync=weight_sync)


def stepped(learning: PPOTrainer) -> Metrics:
    """The metrics of one training step."""
    return asyncio.run(learning.train_step()).metrics


def value_model() -> Critic:
    module = PackedCritic(tiny_model("qwen2", tied=True, dtype=torch.float32))
    optimizer = OptimizerSettings(lr=3e-2, weight_decay=0.0)
    engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), optimizer)
    return Critic(LocalGroup(CriticWorker(engine, clip=0.5)), PackSettings(max_tokens_per_pack=400))


def weights(trained: PPOTrainer) -> dict[str, Tensor]:
    receiver, found, layouts = Receiver(torch.device("cpu")), {}, trained.weight_sync.layouts
    receiver.begin(layouts)
    for layout in layouts:
        handles = trained.learner.policy.workers.call(PolicyWorker.send_bucket, layout.number, layout.version)
        flat = receiver.receive(layout, handles)
        found |= {name: view.clone() for name, view in layout.named(flat)}
    return found


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [PLAIN, GRPO, TOOLRL_GRPO], ids=["without KL", "KL in loss", "KL in reward"])
def test_the_policy_learns_to_write_even_numbers(algorithm: Algorithm) -> None:
    learning = trainer(algorithm)
    history = [stepped(learning) for _ in range(9)]
    rewards = [metrics["reward/total"] for metrics in history]
    assert rewards[-1] > 0.8 > 0.65 > rewards[0]
    assert history[0]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-2)
    assert {"time/rollout_s", "time/update_s", "actor/grad_norm", "actor/entropy"} <= history[0].keys()
    assert history[0]["engine/logprob_diff_max"] < 1e-4 and history[-1]["engine/canary_logprob_diff"] < 1e-4
    assert history[0]["correction/ess"] == pytest.approx(1.0) and history[0]["correction/engine_kl"] < 1e-6
    assert [name for name in history[0] if not known(name)] == []


@pytest.mark.long
def test_ppo_learns_and_so_does_its_critic() -> None:
    learning = trainer(PPO, critic=value_model())
    history = [stepped(learning) for _ in range(12)]
    assert history[-1]["reward/total"] > 0.75 > 0.65 > history[0]["reward/total"]
    assert history[-1]["critic/loss"] < 0.5 * history[0]["critic/loss"]
    assert [name for name in history[0] if not known(name)] == []


OBSERVING = [replace(each, name=f"{each.name} and ECHO", observation_coefficient=0.5) for each in (GRPO, TOOLRL_GRPO)]


@pytest.mark.parametrize("algorithm", [GRPO, PPO, *OBSERVING], ids=lambda each: each.name)
def test_shared_segments_train_as_separate_ones(algorithm: Algorithm) -> None:
    """Two mini-batches of episodes of several segments, with reference and critic where the algorithm has one."""
    batch = to_batch([edited(), replace(edited(), rewards=(0.0, 2.0, 1.0))])
    found = []
    for share_prefix in (True, False):
        packed = partial(replace, packing=PackSettings(60, share_prefix))
        learner = trainer(algorithm, critic=packed(value_model()) if algorithm.needs_critic else None).learner
        learner = replace(learner, policy=packed(learner.policy), reference=packed(learner.reference))
        found.append(learner.learn(batch, 0).metrics)
    shared, separate = found
    assert "actor/loss" in shared and shared == {
        name: pytest.approx(value, rel=1e-3, abs=1e-5) for name, value in separate.items()
    }


def with_epochs(config: Config, epochs: int) -> Config:
    return replace(config, actor=replace(config.actor, ppo_epochs=epochs))


def test_more_epochs_go_over_the_same_minibatches_with_the_log_probs_before_the_first() -> None:
    once, twice = (trainer(PLAIN, minibatches=1) for _ in range(2))
    twice.learner.config = with_epochs(twice.learner.config, 2)
    result = asyncio.run(once.train_step())
    assert result.metrics["actor/ppo_kl"] == 0.0
    assert (
        twice.learner.learn(result.batch, 0).metrics["actor/ppo_kl"] != 0.0
    )  # the second update's, from before the first
    updates = []
    spied = trainer(PLAIN, minibatches=2)
    spied.learner.config = with_epochs(spied.learner.config, 3)
    update = Policy.update

    def spy(self: Policy, minibatch: TokenBatch, *rest: Any) -> PolicyUpdate:
        assert minibatch.old_logprobs is not None
        updates.append(minibatch.old_logprobs.tobytes())
        return update(self, minibatch, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "update", spy)
        spied.learner.learn(result.batch, 0)
    assert len(updates) == 6 and updates[:2] == updates[2:4] == updates[4:] and updates[0] != updates[1]


def test_tokens_are_selected_by_the_entropies_that_each_update_begins_with() -> None:
    """Two updates: those of the second are of the policy that the first one made."""
    seen: list[Tensor] = []

    def spy(inputs: SelectionInputs) -> Tensor:
        seen.append(inputs.entropies())
        return torch.ones(len(seen[-1]), dtype=torch.bool)

    learning = trainer(replace(PLAIN, selection=spy), minibatches=1)
    learning.learner.config = with_epochs(learning.learner.config, 2)
    metrics = stepped(learning)
    assert not torch.equal(*seen)
    assert metrics["actor/entropy"] == pytest.approx(float(torch.cat(seen).mean()), rel=1e-5)


def test_cut_samples_are_trained_on_from_the_whole_distribution() -> None:
    """The engine's log-probs are higher than the trainer's by -log of what it keeps; the update's ratio begins at 1."""
    learning = trainer(PLAIN, minibatches=1)
    rollout = learning.rollouts.rollout
    learning.rollouts.rollout = replace(rollout, sampling=replace(rollout.sampling, top_k=5))
    metrics = stepped(learning)
    assert metrics["engine/kl"] > 0.5 and metrics["engine/canary_logprob_diff"] < 1e-4
    assert metrics["engine/kl"] == pytest.approx(
        metrics["engine/logprob_diff_mean"]
    )  # no token is less likely to the engine
    assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/clip_fraction"] == 0.0


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_in_the_reward_takes_its_estimator(estimator: str) -> None:
    algorithm = replace(TOOLRL_GRPO, kl=KLTerm(KLPlacement.REWARD, estimator, 0.5), advantage=reinforce_pp)
    batch = scored([sample((False, True, True), 1.0)], old_logprobs=[-1.0, -2.0], ref_logprobs=[-1.5, -1.0])
    advantages = with_advantages(batch, algorithm).advantages
    log_ratios = [-0.5, 1.0]  # log p_ref - log p
    by_hand = {
        "k1": [-each for each in log_ratios],
        "k2": [each * each / 2 for each in log_ratios],
        "k3": [math.exp(each) - each - 1 for each in log_ratios],
        "abs": [abs(each) for each in log_ratios],
        "unbiased_k3": [math.exp(each) - each - 1 for each in log_ratios],  # its ratio is 1
    }[estimator]
    last = 1.0 - 0.5 * by_hand[1]
    returns = torch.tensor([last - 0.5 * by_hand[0], last])
    white = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    assert advantages is not None and advantages.tolist() == pytest.approx(white.tolist(), abs=1e-5)


def test_in_the_warm_up_the_critic_alone_learns() -> None:
    learning = trainer(PPO, critic=value_model())
    learning.learner.config = replace(learning.learner.config, trainer=TrainerConfig(critic_warmup=2))
    before = weights(learning)
    first = stepped(learning)
    assert every(torch.equal(full, before[name]) for name, full in weights(learning).items())
    assert "actor/loss" not in first and first["critic/grad_norm"] > 0
    assert "actor/loss" in stepped(learning)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("correction", [None, Correction(Level.SEQUENCE, is_cap=1.0)])
def test_a_first_update_needs_no_pass_for_old_logprobs(
    correction: Correction | None, minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update with the policy's own log-probs is the update with those of a pass before it."""
    algorithm = replace(PLAIN, correction=correction)

    def paying(*arguments: Any, **options: Any) -> UpdatePlan:
        return replace(plan_updates(*arguments, **options), deferred=Deferred.NOTHING)

    free, paid = (trainer(algorithm, minibatches=minibatches) for _ in range(2))
    one = stepped(free)
    monkeypatch.setattr("verl.trainer.learner.plan_updates", paying)
    two = stepped(paid)
    assert one["actor/loss"] == pytest.approx(two["actor/loss"], rel=1e-6, abs=1e-7)
    for name, full in weights(free).items():
        torch.testing.assert_close(full, weights(paid)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("coefficient", [0.0, 1e-3])
def test_with_kl_in_the_reward_a_first_update_estimates_its_own_advantages(
    coefficient: float, minibatches: int, passes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all advantages were known before. In the second step, in which policy and reference differ."""
    kl = KLTerm(KLPlacement.REWARD, "k1", 0.5)
    algorithm = replace(TOOLRL_GRPO, kl=kl, entropy_coefficient=coefficient)
    free, paid = (trainer(algorithm, minibatches=minibatches, lr=1e-3) for _ in range(2))
    learned = []
    for learning in (free, paid):
        batch = asyncio.run(learning.train_step()).batch
        passes.clear()
        learned.append(learning.learner.learn(batch, 1))
        trained = int(batch.num_trained.sum())
        scored = [tokens for name, tokens in passes if name == "score"]
        rest = [trained] if learning is paid else [trained * (minibatches - 1) // minibatches] * (minibatches > 1)
        assert scored == pytest.approx([trained, *rest] if learning is free else [*rest, trained], rel=0.2)
        monkeypatch.setattr(Policy, "can_estimate", lambda *_: False)
    one, two = learned
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        np.testing.assert_allclose(getattr(one.batch, name), getattr(two.batch, name), rtol=1e-5, atol=1e-5)
    assert one.metrics.keys() == two.metrics.keys() and one.computed.tolist() == two.computed.tolist()
    assert one.metrics == pytest.approx(two.metrics, rel=1e-3, abs=1e-5)
    for name, full in weights(free).items():
        torch.testing.assert_close(full, weights(paid)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kl", [KLTerm(), KLTerm(KLPlacement.REWARD, "k1", 0.5)], ids=["no KL", "KL in the reward"])
def test_mini_batches_have_values_or_none_at_all(kl: KLTerm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is NaN until later."""
    minibatches: list[TokenBatch] = []
    update = Policy.update

    def spy(self: Policy, minibatch: TokenBatch, *rest: Any) -> PolicyUpdate:
        minibatches.append(minibatch)
        return update(self, minibatch, *rest)

    monkeypatch.setattr(Policy, "update", spy)
    stepped(trainer(replace(TOOLRL_GRPO, kl=kl), minibatches=2))
    first, second = minibatches
    assert first.old_logprobs is None and (first.advantages is None) == (kl.placement is KLPlacement.REWARD)
    assert second.old_logprobs is not None and second.advantages is not None
    assert np.isfinite(second.old_logprobs).all() and np.isfinite(second.advantages).all()


def test_groups_in_several_packs_have_their_advantages_before_the_update() -> None:
    """32 tokens hold no group of 8 responses."""
    learning, batch = trainer(TOOLRL_GRPO), batch_of([sample((False, True), 1.0)] * 2)
    assert learning.learner.policy.can_estimate(batch)
    apart = replace(learning.learner.policy, packing=PackSettings(max_tokens_per_pack=2, share_prefix=False))
    assert not apart.can_estimate(batch)


def test_mfu_by_hand() -> None:
    """Two responses of 2 and 3 tokens to one prompt of 4, which is computed once; the last tokens are not computed, and
    3 of the parameters only at trained positions. 3 forwards' worth of FLOPs."""
    samples = [sample((False,) * 4 + (True,) * length, 0.0) for length in (2, 3)]
    meter = Meter(DecoderShape(10, 1, 8, head_parameters=5, selecting=3), peak=1000.0, num_devices=2)
    tokens, pairs = 4 + 1 + 2, (4 * 5 / 2) + (1 * 4 + 1 * 2 / 2) + (2 * 4 + 2 * 3 / 2)
    flops = 3 * (2 * 7 * tokens + 4 * 8 * pairs + 2 * (5 + 3) * 5)
    batch = batch_of(samples)
    assert meter.mfu(batch, PackSettings(100), seconds=7.0) == {"perf/mfu": pytest.approx(flops / (7 * 1000 * 2))}
    assert replace(meter, peak=None).mfu(batch, PackSettings(100), 7.0) == {}
    asking = batch_of([sample((False, True, False, False, True), 0.0)])  # two observations, at the head if learned
    plain, more = (replace(meter, observations=each).mfu(asking, PackSettings(100), 7.0) for each in (False, True))
    assert more["perf/mfu"] - plain["perf/mfu"] == pytest.approx(3 * 2 * (5 + 3) * 2 / (7 * 1000 * 2))


@pytest.mark.parametrize("old", OldLogprobs)
def test_the_kl_coefficient_follows_its_target(old: OldLogprobs) -> None:
    control = AdaptiveKL(coefficient=0.1, target=0.5, horizon=100)
    control.observe(5.0, 50)  # error held at 0.2: 0.1 * (1 + 0.2 * 0.5)
    assert control.coefficient == pytest.approx(0.11)
    learning = trainer(replace(TOOLRL_GRPO, old_logprobs=old), control=AdaptiveKL(0.001, target=1e9, horizon=32))
    first, second = stepped(learning), stepped(learning)
    assert (first["kl/coefficient"], second["kl/coefficient"]) == pytest.approx((0.001, 0.0008))
    saved = learning.state()
    assert saved.pop("coefficients") == {"kl": pytest.approx(0.00064)}
    learning.restore({**saved, "kl_coefficient": 0.5})  # as in older checkpoints
    assert learning.state()["coefficients"] == {"kl": 0.5}


def test_the_entropy_bonus_follows_its_target_by_hand() -> None:
    control = AdaptiveEntropy(target=0.2, maximum=0.012)
    seen = []
    for entropy in (0.3, 0.2, 0.1, 0.1, 0.3, 0.1):
        control.observe(entropy)
        seen.append((control.coefficient, control.bonus))
    # 0 is the least; 0.2 is not above the target; 0.015 exceeds the maximum; above the target there is no bonus
    by_hand = [(0.0, 0.0), (0.005, 0.005), (0.01, 0.01), (0.012, 0.012), (0.007, 0.0), (0.012, 0.012)]
    assert seen == [pytest.approx(each) for each in by_hand]


def test_a_step_has_the_entropy_bonus_that_the_last_one_left() -> None:
    """Far below its target the bonus grows by 0.005 a step; a run that goes on from a checkpoint has it, too."""
    low, high = replace(PLAIN, entropy_target=1e9), replace(PLAIN, entropy_target=1e-9)
    learning = trainer(low, entropy=AdaptiveEntropy(1e9))
    first, second, third = (stepped(learning) for _ in range(3))
    used = [each["actor/entropy_coefficient"] for each in (first, second, third)]
    assert used == pytest.approx([0.0, 0.005, 0.01])
    assert third["actor/computed_share"] == 1.0  # samples without advantages have a bonus, too
    assert third["actor/grad_norm"] > 0
    saved = learning.state()
    assert saved["coefficients"] == pytest.approx({"entropy": 0.015, "entropy_bonus": 0.015})
    resumed = trainer(low, entropy=AdaptiveEntropy(1e9))
    resumed.restore(json.loads(json.dumps(saved)))
    assert stepped(resumed)["actor/entropy_coefficient"] == pytest.approx(0.015)
    above = trainer(high, entropy=AdaptiveEntropy(1e-9, coefficient=0.02, bonus=0.02))
    assert [stepped(above)["actor/entropy_coefficient"] for _ in range(2)] == pytest.approx([0.02, 0.0])
    assert above.state()["coefficients"] == pytest.approx({"entropy": 0.01, "entropy_bonus": 0.0})


def test_the_entropy_bonus_of_an_update_is_the_controllers() -> None:
    """The same weights come from a fixed coefficient of the same size."""
    fixed = trainer(replace(PLAIN, entropy_coefficient=0.3))
    adapting = trainer(replace(PLAIN, entropy_target=1e9), entropy=AdaptiveEntropy(1e9, coefficient=0.3, bonus=0.3))
    for learning in (fixed, adapting):
        stepped(learning)
    by_fixed, by_adapting = weights(fixed), weights(adapting)
    assert all(torch.equal(by_fixed[name], by_adapting[name]) for name in by_fixed)


class FailsOn:
    """Raises for some of the responses."""

    def __init__(self, every: int) -> None:
        self.every, self.count = every, 0

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        self.count += 1
        if self.count % self.every == 0:
            raise RuntimeError("the service is down")
        return Score(float(self.count % 2), {})


def test_observations_are_trained_in_the_first_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[bool] = []

    def noted(groups: Sequence[TrajectoryGroup], train_on_observations: bool = False) -> TokenBatch:
        trained.append(train_on_observations)
        return to_batch(groups, train_on_observations)

    monkeypatch.setattr("verl.trainer.ppo.to_batch", noted)
    for setting, expected in ((2, [True, True, False]), (True, [True] * 3), (False, [False] * 3)):
        learning = trainer(PLAIN)
        config = learning.learner.config
        learning.learner.config = replace(config, env=replace(config.env, train_on_observations=setting))
        for _ in range(3):
            stepped(learning)
        assert trained[-3:] == expected
    learning.step, learning.learner.config = 7, replace(config, env=replace(config.env, train_on_observations=7))
    stepped(learning)  # as after a resume
    assert trained[-1] is False


@pytest.mark.parametrize("setting", [0, -1, 1.5, "yes", None])
def test_a_stage_has_a_number_of_steps(setting: Any) -> None:
    with pytest.raises(ConfigError, match=r"env\.train_on_observations must be true, false or a number of steps"):
        replace(Config().env, train_on_observations=setting)


def test_a_reward_that_fails_is_counted_and_never_a_zero() -> None:
    learning = trainer(PLAIN, FailsOn(16))
    result = asyncio.run(learning.train_step())
    assert result.metrics["reward/infrastructure_faults"] == 2
    assert sum(len(group.trajectories) for group in result.groups) == 30
    with pytest.raises(RewardFaultError, match=r"16 of 32 responses.*\n.*the service is down"):
        stepped(trainer(PLAIN, FailsOn(2)))


class Forgetful(HFEngine):
    """Reports that it has the new weights, and has not."""

    async def load_bucket(self, layout: BucketLayout, *handles: BucketHandle) -> None:
        self._receiver.receive(layout, handles)


class RanksWithinItsGroup(RewardsEvenNumbers):
    """Trains on ranks instead of scores, and counts how often it saw each task."""

    def shape(self, group: TrajectoryGroup, state: Mapping[str, Any]) -> tuple[tuple[float, ...], Mapping[str, Any]]:
        totals = [score.total for score in group.scores]
        ranks = tuple(float(sum(other < total for other in totals)) for total in totals)
        return ranks, {**state, group.task.id: state.get(group.task.id, 0) + 1}


def test_rewards_are_shaped_within_their_group_and_what_shaping_remembers_is_saved() -> None:
    learning = trainer(PLAIN)
    learning.rollouts.rewards = Rewards(RanksWithinItsGroup(), "ranks")
    groups = asyncio.run(learning.train_step()).groups
    for group in groups:
        totals = [score.total for score in group.scores]
        assert group.rewards == tuple(sum(other < total for other in totals) for total in totals)
        assert max(totals) <= 1.0  # the scores themselves stay as they are
    assert max(reward for group in groups for reward in group.rewards) > 1.0
    saved = json.loads(json.dumps(learning.state()))
    assert saved["rollouts"]["shaping"] == {"ranks": {"t1": 1, "t2": 1, "t3": 1, "t4": 1}}

    resumed = trainer(PLAIN)
    resumed.rollouts.rewards = Rewards(RanksWithinItsGroup(), "ranks")
    resumed.restore(saved)
    stepped(resumed)
    assert resumed.state()["rollouts"]["shaping"] == {"ranks": {"t1": 2, "t2": 2, "t3": 2, "t4": 2}}


def test_a_stale_engine_stops_the_run() -> None:
    learning = trainer(PLAIN)
    learning.weight_sync.engine.__class__ = Forgetful
    with pytest.raises(StaleEngineError, match="stale weights or different numerics"):
        stepped(learning)


def test_weights_that_an_update_broke_are_not_blamed_on_the_engine() -> None:
    with pytest.raises(NotFiniteError, match=r"log-probs are not finite at version 1 .*actor\.optim\.lr"):
        stepped(trainer(PLAIN, lr=1e38))


class DividesByZero:
    """A user's estimator, with NaN for one group."""

    def __call__(self, inputs: AdvantageInputs) -> Any:
        estimate = PLAIN.advantage(inputs)
        spoiled = [each * math.nan if number // 8 == 2 else each for number, each in enumerate(estimate.advantages)]
        return replace(estimate, advantages=spoiled)


def test_advantages_that_are_not_finite_end_the_run_and_name_the_row() -> None:
    learning = trainer(replace(PLAIN, advantage=DividesByZero()))
    third = asyncio.run(trainer(PLAIN).train_step()).groups[2].task.id
    before = weights(learning)
    with pytest.raises(NotFiniteError, match=rf"advantages of row {third} are not finite"):
        stepped(learning)
    assert every(torch.equal(full, before[name]) for name, full in weights(learning).items())


def test_an_update_that_is_not_finite_is_left_out_and_names_the_row(caplog: pytest.LogCaptureFixture) -> None:
    """The other mini-batch is trained as if it were alone."""
    batch, spoiled, alone = asyncio.run(trainer(GRPO).train_step()).batch, trainer(GRPO), trainer(GRPO)
    in_third_A = batch.groups.repeat(batch.num_trained) == 2
    reference = spoiled.learner.reference
    assert reference is not None
    ref_A = np.where(in_third_A, np.float32(np.nan), reference.score(reference.shard_for_scoring(batch)))
    spoiled.learner.reference = SimpleNamespace(score=lambda sharding: ref_A)  # type: ignore[assignment]
    metrics = spoiled.learner.learn(batch, 0, rows=["t1", "t2", "t3", "t4"]).metrics
    problem = "step 1: an update of the actor is not finite and was left out"
    assert f"{problem}: reference log-probs of row t3 are not finite" in caplog.text
    assert not math.isfinite(metrics["actor/loss"])
    first = batch.rows(next(batch.minibatch_rows(2)))
    alone.learner.config = replace(alone.learner.config, data=DataConfig(train_batch_size=2))
    alone.learner.learn(first, 0)
    assert every(torch.equal(full, weights(alone)[name]) for name, full in weights(spoiled).items())


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "perf/"))}


@pytest.mark.long
def test_two_runs_are_equal_bit_for_bit() -> None:
    one, two = trainer(TOOLRL_GRPO), trainer(TOOLRL_GRPO)
    for _ in range(2):
        first, second = stepped(one), stepped(two)
        assert untimed(first) == untimed(second)
    assert every(torch.equal(full, weights(two)[name]) for name, full in weights(one).items())


def test_groups_without_a_signal_change_nothing() -> None:
    learning = trainer(PLAIN, AlwaysOne())
    before = weights(learning)
    metrics = stepped(learning)
    assert metrics["reward/zero_variance_groups"] == 1.0 and metrics["actor/grad_norm"] == 0.0
    assert every(torch.equal(full, before[name]) for name, full in weights(learning).items())


class OnlyTheFirstTaskDiffers:
    """Rewards differ in the group of one task alone, by the response's first word."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(task.id == "t1" and trajectory.index % 2), {})


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(what, tokens) of every pass over packs that a policy worker makes."""
    made: list[tuple[str, int]] = []
    for name in ("score", "update"):
        plain = getattr(PolicyWorker, name)

        def counted(self: PolicyWorker, shard: Shard, *args: Any, name: str = name, plain: Any = plain) -> Any:
            made.append((name, int(shard.batch.num_trained.sum())))
            return plain(self, shard, *args)

        monkeypatch.setattr(PolicyWorker, name, counted)
    return made


RATES = (("update_tokens_per_s", "update_s"), ("tokens_per_s", "step_s"))


def test_samples_without_a_signal_are_not_computed_and_nothing_changes(
    passes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lean, full = (trainer(PLAIN, OnlyTheFirstTaskDiffers(), minibatches=1) for _ in range(2))
    one = stepped(lean)
    tokens = dict(passes)["update"]
    monkeypatch.setattr("verl.batch.experience.nonzero_advantage_rows", lambda batch, _: np.arange(len(batch)))
    two = stepped(full)
    assert one["actor/computed_share"] == 0.25 and two["actor/computed_share"] == 1.0
    assert 0 < tokens < dict(passes)["update"]
    updated, everything = (one[f"perf/{name}"] * one[f"time/{time}"] for name, time in RATES)
    assert 0 < updated < 0.5 * everything
    assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-5) and one["actor/grad_norm"] > 0
    for name, weight in weights(lean).items():  # gradients of key biases are nothing but rounding, which Adam scales up
        torch.testing.assert_close(weight, weights(full)[name], rtol=1e-4, atol=1e-5)


def test_old_logprobs_of_samples_without_a_signal_are_not_computed(passes: list[tuple[str, int]]) -> None:
    learning = trainer(PLAIN, OnlyTheFirstTaskDiffers(), minibatches=2)
    learning.learner.config = with_epochs(learning.learner.config, 2)
    stepped(learning)
    scored = next(tokens for name, tokens in passes if name == "score")
    assert 2 * scored == sum(tokens for name, tokens in passes if name == "update")


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_old_logprobs_of_the_first_minibatch_cost_no_pass(
    passes: list[tuple[str, int]], minibatches: int, epochs: int
) -> None:
    """Unless a later epoch needs them, too."""
    learning = trainer(replace(PLAIN, entropy_coefficient=1e-3), minibatches=minibatches)  # computes all samples
    learning.learner.config = with_epochs(learning.learner.config, epochs)
    stepped(learning)
    names, tokens = [name for name, _ in passes], [number for _, number in passes]
    scores = names.index("update")  # the canary scores after the updates
    updates = slice(scores, scores + minibatches * epochs)
    expected = sum(tokens[updates][epochs == 1 :]) / epochs
    assert names[updates] == ["update"] * minibatches * epochs and sum(tokens[:scores]) == expected
    assert scores == (minibatches * epochs > 1)
    share = learning.learner.algorithm.old_pass_share(minibatches, epochs)
    assert share == (1.0 if epochs > 1 else 1.0 - 1.0 / minibatches)


def test_a_step_without_advantages_has_no_pass(passes: list[tuple[str, int]]) -> None:
    stepped(trainer(PLAIN, AlwaysOne(), minibatches=2))
    assert [name for name, _ in passes] == ["update", "update", "score"]  # the canary's


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_stale_engine_shows_in_the_metrics_and_is_corrected(minibatches: int) -> None:
    found = []
    for correction in (None, Correction(Level.TOKEN, is_cap=1.1)):
        learning = trainer(replace(PLAIN, correction=correction), minibatches=minibatches)
        assert isinstance(learning.rollouts.rollout.engine, HFEngine)
        generator = torch.Generator().manual_seed(0)
        for weight in learning.rollouts.rollout.engine._model.parameters():
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
        found.append(stepped(learning))
    plain, corrected = found
    assert plain["correction/engine_kl"] == pytest.approx(corrected["correction/engine_kl"], rel=1e-4)
    assert plain["correction/engine_kl"] > 1e-3 and plain["correction/truncated"] == 0.0
    assert plain["correction/weight_max"] > 1.1 and corrected["correction/weight_max"] == pytest.approx(1.1)
    assert plain["correction/ess"] < corrected["correction/ess"] < 1.0 and corrected["correction/truncated"] > 0.0
    assert plain["actor/grad_norm"] != pytest.approx(corrected["actor/grad_norm"], rel=1e-3)


def test_with_the_rollouts_own_logprobs_there_is_no_pass_before_the_update(passes: list[tuple[str, int]]) -> None:
    learning = trainer(replace(PLAIN, old_logprobs=OldLogprobs.ROLLOUT), minibatches=2)
    metrics = stepped(learning)
    assert [name for name, _ in passes] == ["update", "update", "score"]  # the last is the canary's
    # against the trainer, not against itself, and before the policy has learned
    assert 0.0 < metrics["engine/logprob_diff_mean"] < 1e-4 and metrics["engine/logprob_diff_max"] < 1e-3
    assert metrics["correction/weight_max"] < 1.001


def test_long_prompts_start_first_and_groups_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    learning = trainer(PLAIN)
    lengths = {"short": 1, "longest": 30, "middle": 9, "long": 20}
    tasks = [Task(name, (Message("user", "w1 " * count),), "w7", "tokens") for name, count in lengths.items()]
    learning.rollouts.tasks = TaskStream([tasks])
    started: list[tuple[str, int]] = []

    async def run(self: GroupRollout, task: Task, num_rollouts: int, step: int, first_seed: int) -> TrajectoryGroup:
        started.append((task.id, first_seed))
        episodes = tuple(Trajectory(task, index, (), StopReason.STOP, Outcome.SCORED) for index in range(2))
        return TrajectoryGroup(task, episodes, (), (), ())

    monkeypatch.setattr(GroupRollout, "run", run)
    drawn = [group.task.id for group in asyncio.run(learning.rollouts.take(0)).kept]
    assert [name for name, _ in started] == ["longest", "long", "middle", "short"]
    assert [name for name, _ in sorted(started, key=lambda pair: pair[1])] == drawn  # a prompt's seed stays its own


def test_kl_or_entropy_in_the_loss_is_a_signal_of_its_own() -> None:
    batch = with_advantages(batch_of([sample((False, True), 1.0), sample((False, True), 1.0)]), PLAIN)
    assert not len(nonzero_advantage_rows(batch, PLAIN))
    for algorithm in (
        replace(PLAIN, entropy_coefficient=0.01),
        replace(PLAIN, kl=KLTerm(KLPlacement.LOSS, "k3", 0.1)),
    ):
        assert nonzero_advantage_rows(batch, algorithm).tolist() == [0, 1]
        assert len(policy_minibatch(batch, algorithm)) == 2


def test_the_engine_generates_with_the_trained_weights() -> None:
    learning = trainer(PLAIN)
    engine = learning.rollouts.rollout.engine
    assert isinstance(engine, HFEngine)
    for _ in range(2):
        stepped(learning)
        own = dict(engine._model.named_parameters(remove_duplicate=False))
        assert every(torch.equal(own[name], full) for name, full in weights(learning).items())


def test_a_step_trains_its_own_rollouts_with_their_rewards() -> None:
    learning = trainer(PLAIN)
    for _ in range(2):
        result = asyncio.run(learning.train_step())
        assert result.batch.rewards is not None
        by_sample = np.split(result.batch.rewards, result.batch.bounds.trained[1:-1])
        assert [each.sum() for each in by_sample] == pytest.approx(
            [r for group in result.groups for r in group.rewards]
        )


def sample(mask: tuple[bool, ...], reward: float, group: int = 0) -> Sample:
    return Sample(
        token_ids=np.ones(len(mask), dtype=np.int32),
        action_mask=np.array(mask),
        rollout_logprobs=np.zeros(sum(mask)),
        group=group,
        reward=reward,
    )


def scored(samples: Sequence[Sample], **columns: Sequence[float]) -> TokenBatch:
    """The batch with these values of its trained tokens."""
    arrays: dict[str, Any] = {name: np.array(values, dtype=np.float32) for name, values in columns.items()}
    return replace(batch_of(samples), **arrays)


def test_a_batch_by_hand() -> None:
    samples = [sample((False, True, False, True), 1.0), sample((False, True), 0.0)]
    batch = scored(samples, old_logprobs=[-1.0, -2.0, -1.0], ref_logprobs=[-2.0, -2.0, -1.0])
    batch = with_advantages(batch, replace(PLAIN, kl=KLTerm(KLPlacement.REWARD, "k1", 0.1)))
    # rewards: 1 - 0.1 * (1 + 0) = 0.9 and 0; mean 0.45, unbiased std 0.9 / sqrt(2)
    unit = 0.45 / (0.9 / 2**0.5 + 1e-6)
    assert batch.advantages is not None and batch.advantages.tolist() == pytest.approx([unit, unit, -unit])
    weighted = policy_minibatch(batch, PLAIN)
    assert weighted.loss_weights is not None and weighted.loss_weights.tolist() == pytest.approx([0.25, 0.5])
    assert weighted.metric_weight == weighted.sampled_weight == pytest.approx(1 / 3)


def test_the_gap_is_that_of_the_tokens_that_the_engine_sampled() -> None:
    """Of three trained tokens one was observed: the mean of 0.2 and 0.4 is 0.3, not their sum by three."""
    observed = replace(sample((False, True, True, True), 1.0), rollout_logprobs=np.array([-1.0, math.nan, -2.0]))
    weighted = policy_minibatch(batch_of([observed]), PLAIN)
    assert weighted.rollout_logprobs is not None and weighted.metric_weight == pytest.approx(1 / 3)
    rollout_A, trainer_A = torch.from_numpy(weighted.rollout_logprobs), torch.tensor([-1.2, -7.0, -2.4])
    weights = token_weights(UNBOUNDED, trainer_A, rollout_A, torch.zeros(3, dtype=torch.long))
    metrics = _engine_metrics(weights, rollout_A, trainer_A, weighted.sampled_weight)
    diff = {name: metric.value() for name, metric in metrics.items()}
    assert diff["engine/logprob_diff_mean"].value == pytest.approx(0.3)
    assert diff["engine/logprob_diff_max"] == Max(pytest.approx(0.4))
    assert diff["engine/kl"].value == pytest.approx(0.3)


class Recorder(LocalGroup):
    """Takes packs as a group of one worker would, and keeps them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.packs: list[PackedBatch] = []

    def scatter(self, function: Callable[..., Any], shards: Iterable[Shard], *args: Any) -> list[Any]:
        (shard,) = shards
        self.packs = list(shard)
        return [UpdateResult(loss=0.0, grad_norm=0.0, lr=0.0, metrics={})]


def test_a_constant_length_divides_the_sums_of_an_update_by_hand() -> None:
    """Losses of one token and of three, two samples, length 8: every token weighs 1 / (2 * 8)."""
    overrides = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.name=grpo", "rollout.n=2"]
    for more, expected in (["data.max_response_length=8"], 1 / 16), (["algorithm.aggregation_length=5"], 1 / 10):
        config = load_config([*overrides, *more])
        algorithm = build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)
        samples = [sample((False, True, True, True), 1.0), sample((False, True), 0.0)]
        group = Recorder()
        computed = policy_minibatch(scored(samples, advantages=[1.0] * 4), algorithm)
        Policy(group, PackSettings(400)).update(computed, algorithm)
        (packed,) = group.packs
        assert packed.loss_weights is not None and packed.loss_weights.tolist() == pytest.approx([expected] * 4)
    with pytest.raises(ConfigError, match=r"algorithm\.aggregation_length must be positive"):
        load_config(["actor_rollout_ref.actor.loss_scale_factor=0"])


def test_minibatches_are_whole_groups_and_lose_nothing() -> None:
    samples = [sample((False, True), 0.0, group) for group in (0, 0, 1, 2, 2, 2, 3)]
    batch = batch_of(samples)
    assert [batch.groups[rows].tolist() for rows in batch.minibatch_rows(2)] == [[0, 0, 1], [2, 2, 2, 3]]
    assert [len(rows) for rows in batch.minibatch_rows(9)] == [2, 1, 3, 1]


def test_a_tokenizer_without_a_template_is_a_config_error(tmp_path: Path) -> None:
    plain = tokenizer()
    plain.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(plain)
