"""The training step in one process: it learns, repeats itself bit for bit, and without a signal changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerFast

from tests.test_packing import VOCABULARY, tiny_model
from verl.algorithms.algorithm import Algorithm, KLPlacement, KLTerm
from verl.algorithms.grpo import GRPO
from verl.algorithms.toolrl_grpo import TOOLRL_GRPO
from verl.data.chat import ChatCodec
from verl.data.tasks import TaskStream
from verl.errors import ConfigError
from verl.rollout.engine import Sampling
from verl.rollout.group import GroupRollout
from verl.rollout.hf_engine import HFEngine
from verl.single_controller.local import LocalGroup
from verl.trainer.experience import build_experience, with_weights
from verl.trainer.policy import PackSettings, Policy
from verl.trainer.ppo import PPOTrainer, StepSettings
from verl.types import Message, Sample, Score, Task, Trajectory
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker

EOS = 0
PLAIN = replace(GRPO, kl=KLTerm())


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<eos>": EOS} | {f"w{number}": number for number in range(1, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", chat_template=template)


class SaysEvenWords:
    """Share of the reply's words with an even number: about a half to begin with."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        words = trajectory.reply.split()
        share = sum(int(word[1:]) % 2 == 0 for word in words) / len(words) if words else 0.0
        return Score(share, {"share": share})


class AlwaysOne:
    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(1.0, {})


def policy(lr: float) -> Policy:
    module = PackedPolicy(tiny_model("qwen2", tied=True, dtype=torch.float32))
    optimizer = OptimizerSettings(lr=lr, weight_decay=0.0)
    engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), optimizer)
    return Policy(LocalGroup(PolicyWorker(engine, temperature=1.0)), PackSettings(max_tokens_per_pack=400))


def trainer(algorithm: Algorithm, scorer: object = None, lr: float = 1e-2) -> PPOTrainer:
    rollout_model = tiny_model("qwen2", tied=True, dtype=torch.float32)
    rollout_model.set_attn_implementation("sdpa")
    sampling = Sampling(max_tokens=4, stop_token_ids=(EOS,))
    scorer = scorer or SaysEvenWords()
    tasks = [Task(f"t{n}", (Message("user", f"w{n} w{n + 1}"),), "w7", "words") for n in range(1, 5)]
    reference = policy(lr) if algorithm.kl.placement is not KLPlacement.NONE else None
    rollout = GroupRollout(HFEngine(rollout_model), ChatCodec(tokenizer()), scorer, sampling)  # type: ignore[arg-type]
    settings = StepSettings(prompts_per_step=4, rollouts_per_prompt=8, minibatches_per_step=2)
    return PPOTrainer(settings, algorithm, TaskStream([tasks]), rollout, policy(lr), reference)


def weights(trained: PPOTrainer) -> dict[str, Tensor]:
    return {name: full.clone() for name, full in trained.policy.weights()}


@pytest.mark.parametrize("algorithm", [PLAIN, GRPO, TOOLRL_GRPO], ids=["without KL", "KL in loss", "KL in reward"])
def test_the_policy_learns_to_say_even_words(algorithm: Algorithm) -> None:
    learning = trainer(algorithm)
    history = [learning.train_step() for _ in range(9)]
    rewards = [metrics["reward/total"] for metrics in history]
    assert rewards[-1] > 0.8 > 0.65 > rewards[0]
    assert history[0]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-2)
    assert {"time/rollout_s", "time/update_s", "actor/grad_norm", "actor/entropy"} <= history[0].keys()


def test_two_runs_are_equal_bit_for_bit() -> None:
    one, two = trainer(TOOLRL_GRPO), trainer(TOOLRL_GRPO)
    for _ in range(2):
        first, second = one.train_step(), two.train_step()
        assert {key: value for key, value in first.items() if not key.startswith("time/")} == {
            key: value for key, value in second.items() if not key.startswith("time/")
        }
    assert all(torch.equal(full, weights(two)[name]) for name, full in weights(one).items())


def test_groups_without_a_signal_change_nothing() -> None:
    learning = trainer(PLAIN, AlwaysOne())
    before = weights(learning)
    metrics = learning.train_step()
    assert metrics["reward/zero_variance_groups"] == 1.0 and metrics["actor/grad_norm"] == 0.0
    assert all(torch.equal(full, before[name]) for name, full in weights(learning).items())


def test_the_engine_generates_with_the_trained_weights() -> None:
    learning = trainer(PLAIN)
    learning.train_step()
    engine = learning.rollout.engine
    assert isinstance(engine, HFEngine)
    own = dict(engine._model.named_parameters(remove_duplicate=False))
    assert all(torch.equal(own[name], full) for name, full in weights(learning).items())


def sample(mask: tuple[bool, ...], reward: float, group: int = 0) -> Sample:
    return Sample((1,) * len(mask), mask, (0.0,) * len(mask), group, reward)


def test_experience_by_hand() -> None:
    samples = [sample((False, True, False, True), 1.0), sample((False, True), 0.0)]
    old = [torch.tensor([9.0, -1.0, 9.0, -2.0]), torch.tensor([9.0, -1.0])]
    ref = [torch.tensor([9.0, -2.0, 9.0, -2.0]), torch.tensor([9.0, -1.0])]
    kl = replace(PLAIN, kl=KLTerm(KLPlacement.REWARD, "k1", 0.1))
    experience = build_experience(samples, old, kl, ref)
    # rewards: 1 - 0.1 * (1 + 0) = 0.9 and 0; mean 0.45, unbiased std 0.9 / sqrt(2)
    unit = 0.45 / (0.9 / 2**0.5 + 1e-6)
    assert experience.columns["advantages"][0].tolist() == pytest.approx([0.0, unit, 0.0, unit])
    assert experience.columns["advantages"][1].tolist() == pytest.approx([0.0, -unit])
    weighted = with_weights(experience, PLAIN.aggregation)
    assert weighted.columns["weight"][0].tolist() == pytest.approx([0.25] * 4)
    assert weighted.columns["metric_weight"][1].tolist() == pytest.approx([1 / 3] * 2)


def test_values_at_masked_tokens_do_no_harm() -> None:
    """A NaN where nothing is trained must not reach an advantage."""
    poisoned = [torch.tensor([float("nan"), -1.0]), torch.tensor([float("nan"), -2.0])]
    samples = [sample((False, True), 1.0), sample((False, True), 0.0)]
    experience = build_experience(samples, poisoned, TOOLRL_GRPO, poisoned)
    assert all(bool(row.isfinite().all()) for row in experience.columns["advantages"])


def test_minibatches_are_whole_groups_and_lose_nothing() -> None:
    samples = [sample((False, True), 0.0, group) for group in (0, 0, 1, 2, 2, 2, 3)]
    experience = build_experience(samples, [torch.zeros(2)] * 7, PLAIN)
    parts = [[each.group for each in part.samples] for part in experience.split(2)]
    assert parts == [[0, 0, 1], [2, 2, 2, 3]]
    assert [len(part.samples) for part in experience.split(9)] == [2, 1, 3, 1]


def test_a_tokenizer_without_a_template_is_a_config_error(tmp_path: Path) -> None:
    plain = tokenizer()
    plain.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatCodec(plain)
