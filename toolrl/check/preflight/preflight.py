"""Preflight: the most common failures, found in under a minute on a tiny copy of the model."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

from toolrl.check.lab.__main__ import try_rewards
from toolrl.check.plan.plan import Plan
from toolrl.check.plan.show import format_episode, format_suggestions
from toolrl.check.preflight.local_group import LocalGroup
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.algorithms.algorithm import KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.batch.experience import policy_minibatch, with_advantages
from verl.batch.samples import to_batch
from verl.build.env import single_turn_runner
from verl.build.run import Inputs
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.schema import Config
from verl.envs.single_turn import SingleTurnEnv
from verl.episodes.episode import EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.episodes.written import written_response
from verl.errors import ConfigError
from verl.formats.base import ToolCallFormat
from verl.formats.plain import PLAIN
from verl.host.daemon import run_async
from verl.pretrained import class_of, read_model_config
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.scoring.rewards import Rewards
from verl.text import counted
from verl.trainer.policy import PackSettings, Policy
from verl.types import Message, Task, TrajectoryGroup
from verl.units import GIB
from verl.utils.reward_score.base import EnvReward, LabReward
from verl.workers import attention
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.parity import small_copy
from verl.workers.policy_worker import PolicyWorker

_NUM_ROWS = 20
_LR = 1e-3  # trial step on the tiny copy: large enough for a visible effect


def preflight(config: Config, inputs: Inputs, plan: Plan, console: Console) -> None:
    """Run all checks and print their results. Raises ConfigError or DataError at the first failure."""
    chat, tasks, rewards = inputs.episode_runner.chat, inputs.train[0][:_NUM_ROWS], inputs.rewards
    runner, observations = inputs.episode_runner, inputs.episode_runner.observations
    assert config.model.path is not None
    shape = read_model_config(config.model.path)
    for name, result in (
        ("template", check_lengths(observations, rewards, tasks, config.data.max_response_length)),
        ("reward", check_reward(runner, rewards, tasks)),
        ("step", check_step(small_copy(shape), chat, rewards, tasks, config, observations.tool_call_format)),
        ("batch", config.batch_arithmetic()),
        ("episode", format_episode(plan)),
        ("memory", check_memory(plan)),
    ):
        console.print(f"preflight {name:9}{result}", markup=False, soft_wrap=True)


def golden(rewards: Rewards, task: Task, tool_call_format: ToolCallFormat) -> str:
    """The golden response of a task: the reward's own if it has one, else the task's answer."""
    reward = rewards.of(task)
    return written_response(reward.gold(task, 0) if isinstance(reward, LabReward) else task.answer, tool_call_format)


def check_lengths(
    observations: ObservationTokenizer, rewards: Rewards, tasks: Sequence[Task], max_response_length: int
) -> str:
    """Most golden responses must fit into the response length; the start check has tried their tokens.

    Those of a reward without golden responses are the tasks' answers, but where the environment judges: an answer may
    then be anything.
    """
    tasks = [task for task in tasks if not isinstance(rewards.of(task), EnvReward)]
    if not tasks:
        return "skipped: the environment judges, so there are no golden responses"
    are_golden = all(isinstance(rewards.of(task), LabReward) for task in tasks)
    name = "golden response" if are_golden else "answer"
    texts = [golden(rewards, task, observations.tool_call_format) for task in tasks]
    lengths = [len(observations.chat.response((), text.strip(), observations.raw)[1][0]) for text in texts]
    too_long = sum(length > max_response_length for length in lengths)
    if too_long > len(tasks) / 2:
        raise ConfigError(
            f"{too_long} of {counted(len(tasks), name)} exceed data.max_response_length={max_response_length} tokens "
            f"(the longest has {max(lengths)}): the policy could never generate them"
        )
    return f"{counted(len(tasks), name)}, the longest has {max(lengths)} tokens"


def check_reward(runner: EpisodeRunner, rewards: Rewards, tasks: Sequence[Task]) -> str:
    """Golden responses must score the maximum and corrupted ones less, if the reward provides them."""
    tasks = [task for task in tasks if isinstance(rewards.of(task), LabReward)]
    if not tasks:
        return "has no golden responses to try"
    report = try_rewards(rewards, tasks, tool_call_format=runner.observations.tool_call_format, runner=runner)
    responses = sum(stats.responses for stats in report.stats.values())
    shown = "".join(f"\n  {violation}" for violation in report.violations[:3])
    return f"{responses} responses to {len(tasks)} tasks, {len(report.violations)} violations{shown}"


def check_step(
    shape: PretrainedConfig,
    chat: ChatTemplate,
    rewards: Rewards,
    tasks: Sequence[Task],
    config: Config,
    tool_call_format: ToolCallFormat = PLAIN,
) -> str:
    """One update, from scoring on, must favor golden over useless responses."""
    if config.env.multi_turn and not all(isinstance(rewards.of(task), LabReward) for task in tasks[:4]):
        return "skipped: the reward has no golden responses, and episodes are multi-turn"
    chosen = list(tasks[:4])
    if config.env.multi_turn:  # a prompt of one message, which no format has to rewrite; its content does not matter
        prompts = [(Message("user", f"{number}: {task.prompt[-1].content}"),) for number, task in enumerate(chosen)]
        chosen = [replace(task, prompt=prompt, tools=()) for task, prompt in zip(chosen, prompts, strict=True)]
    sampling = Sampling(config.data.max_response_length, config.rollout.temperature)
    runner = single_turn_runner(chat, sampling.max_tokens, tool_call_format)
    prompt_ids_of = runner.observations.prompt_ids
    by_prompt = {tuple(prompt_ids_of(SingleTurnEnv.initial_observation(task))): task for task in chosen}

    def script(prompt_ids: Sequence[int], number: int) -> Sequence[int]:
        task = by_prompt[tuple(prompt_ids)]
        text = golden(rewards, task, tool_call_format) if number % 2 == 0 else "I do not know."
        return chat.response(prompt_ids, text, runner.observations.raw)[1][0]

    rollout = GroupRollout(ScriptedEngine(script), DirectScorer(rewards), sampling, runner)

    async def roll() -> list[float]:
        groups = await rollout.run_all([*by_prompt.values()], 4)
        faults = [fault for group in groups for fault in group.faults]
        if faults:
            raise ConfigError(f"the reward failed: {faults[0]}")
        return _learn(shape, groups, config)

    before, after = run_async(roll())
    if not after > before:
        raise ConfigError(
            f"one update on a tiny copy of the model did not make better responses more likely: sum of advantage * "
            f"log p went from {before:.4f} to {after:.4f}"
        )
    return f"one update on a tiny {shape.model_type} moved sum of advantage * log p from {before:.3f} to {after:.3f}"


def _learn(shape: PretrainedConfig, groups: Sequence[TrajectoryGroup], config: Config) -> list[float]:
    """[sum over tokens of advantage times log p, before and after one update] on one rank in this process."""
    batch = to_batch(groups)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            attention.register()
            model = class_of(shape).from_config(shape, dtype=torch.float32, attn_implementation=attention.PACKED)
            module = PackedPolicy(model)
            settings = OptimizerSettings(lr=_LR, weight_decay=0.0)
            engine = FSDPEngine(module, decoder_layers(module), init_device_mesh("cpu", (1,)), settings)
            worker = PolicyWorker(engine, config.rollout.temperature)
            tokens_per_pack = max(int(batch.num_tokens.max()), config.actor.max_tokens_per_pack)
            policy = Policy(LocalGroup(worker), PackSettings(tokens_per_pack))
            sharding = policy.shard_for_scoring(batch)
            old = policy.score(sharding)
            algorithm = replace(GRPO, kl=KLTerm())
            batch = with_advantages(replace(batch, old_logprobs=old), algorithm)
            advantages = batch.advantages
            if advantages is None or not advantages.any():
                raise ConfigError("golden and useless responses get the same reward, so all advantages are zero")
            grad_norm = policy.update(policy_minibatch(batch, algorithm), algorithm).metrics["actor/grad_norm"].value
            if not math.isfinite(grad_norm) or grad_norm == 0.0:
                raise ConfigError(f"grad_norm is {grad_norm} on a tiny copy of the model")
            new = policy.score(sharding)
            return [float((advantages * scored).sum()) for scored in (old, new)]
        finally:
            gc.collect()
            dist.destroy_process_group()


def check_memory(plan: Plan) -> str:
    """Raises ConfigError with suggestions if a rank or an engine exceeds a GPU's."""
    rank, engine = plan.peak_gib(), sum(plan.engine().values()) / GIB
    summary = (
        f"{plan.policy.parameters / 1e6:.1f}M parameters; at most {rank:.2f} GiB per trainer rank, "
        f"{engine:.2f} GiB per engine, of {plan.hardware.memory_gib:.1f} GiB"
    )
    violations = plan.violations()
    if violations and not plan.hardware.on_cpu:
        episode = f"The longest episode has {format_episode(plan)}"
        raise ConfigError(f"{'; '.join(violations)}. {episode}. Set {format_suggestions(plan)}")
    return "; ".join([summary, *violations])
