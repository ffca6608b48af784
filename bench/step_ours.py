"""Our side of bench/step.py: the library's training step, with policy and engine in this process or a child."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import answer, cpu_seconds, requests
from local import PLAIN_GRPO, join_alone, load_worker, policy_of, worker_of
from step import CHECKED_RESPONSES, Spec, check_rows, first_tasks, reward, stream
from transformers import AutoTokenizer

from verl.batch.experience import policy_minibatch
from verl.batch.samples import batch_of, sample_from_completion
from verl.build.env import single_turn_runner
from verl.chat.template import ChatTemplate
from verl.config.schema import ActorConfig, Config, DataConfig, RolloutConfig
from verl.episodes.group import GroupRollout
from verl.episodes.manager import RolloutManager
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.hf_engine import load_hf_engine
from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings
from verl.scoring.pool import DirectScorer
from verl.tracking.timers import PhaseTimer
from verl.trainer.learner import Learner
from verl.trainer.policy import Policy
from verl.trainer.ppo import PPOTrainer
from verl.trainer.weight_sync import WeightSync
from verl.transfer.shared_memory import SharedMemory
from verl.types import Completion, FinishReason
from verl.utils.reward_score.base import FunctionReward
from verl.workers.model import load_causal_lm

KV_CACHE_GIB = 1  # room for 40,000 tokens of SmolLM2
BUCKET_BYTES = 2**28  # as in a run
NUM_PROBES, PROBE_PROMPT, PROBE_TOKENS, TOLERANCE = 2, 64, 8, 0.25  # canary settings, as in a run


@asynccontextmanager
async def engine_of(spec: Spec) -> AsyncIterator[RolloutEngine]:
    """The rollout engine, started."""
    if spec.our_rollout == "hf":
        yield load_hf_engine(spec.model, torch.bfloat16, "cpu", max_batch=spec.prompts * spec.n)
        return
    engine = await VLLMEngine.start(
        VLLMSettings(spec.model, spec.max_prompt + spec.response, kv_cache_gib=KV_CACHE_GIB)
    )
    yield engine
    await engine.close()


def build_trainer(spec: Spec, policy: Policy, engine: RolloutEngine, chat: ChatTemplate) -> PPOTrainer:
    """The trainer, with the canary of a run."""
    sampling = Sampling(spec.response)
    probes = [chat.prompt_ids(task.prompt)[:PROBE_PROMPT] for task in first_tasks(spec, chat, NUM_PROBES)]
    probe_sampling = replace(sampling, max_tokens=PROBE_TOKENS)
    layouts = policy.connect([SharedMemory], torch.bfloat16, BUCKET_BYTES)
    config = Config(
        data=DataConfig(train_batch_size=spec.prompts),
        actor=ActorConfig(ppo_mini_batch_size=spec.prompts),
        rollout=RolloutConfig(name="hf", n=spec.n),  # with seeds
    )
    rollouts = RolloutManager(
        config,
        PLAIN_GRPO,
        stream(spec, chat),
        GroupRollout(engine, DirectScorer(FunctionReward(reward)), sampling, single_turn_runner(chat, spec.response)),
    )
    timer = PhaseTimer(cpu=cpu_seconds)
    learner = Learner(config=config, algorithm=PLAIN_GRPO, policy=policy, timer=timer)
    weight_sync = WeightSync(
        policy=policy, engine=engine, layouts=layouts, probes=probes, sampling=probe_sampling, tolerance=TOLERANCE
    )
    return PPOTrainer(rollouts=rollouts, learner=learner, weight_sync=weight_sync)


async def step(trainer: PPOTrainer) -> dict[str, float]:
    """CPU seconds of one training step and of its phases."""
    started = cpu_seconds()
    await trainer.train_step()
    return {"step": cpu_seconds() - started, **trainer.learner.timer.cpu_s}


def check(spec: Spec, chat: ChatTemplate) -> dict[str, Any]:
    """Loss and gradient norm of the common batch, with its old log-probs: our own plus noise."""
    rounded = load_causal_lm(spec.model, torch.bfloat16).float()  # the same weights that both sides train
    policy = policy_of(worker_of(rounded, torch.float32))
    samples, advantages = [], []
    for row, (prompt, response, advantage) in enumerate(check_rows(spec, chat)):
        completion = Completion(response, (0.0,) * len(response), FinishReason.LENGTH, 0)
        samples.append(sample_from_completion(prompt, completion, row // CHECKED_RESPONSES))
        advantages += [advantage] * len(response)
    batch = batch_of(samples)
    scored = policy.score(policy.shard_for_scoring(batch))
    old = scored + np.random.default_rng(0).normal(0.0, 0.1, scored.shape).astype(np.float32)
    given = np.array(advantages, dtype=np.float32)
    scored_batch = replace(batch, advantages=given, old_logprobs=old, rollout_logprobs=old)
    learned = policy.update(policy_minibatch(scored_batch, PLAIN_GRPO), PLAIN_GRPO).metrics
    found = {name: learned[f"actor/{name}"].value for name in ("loss", "grad_norm")}
    return {**found, "old_logprobs": old.reshape(len(batch), spec.response).tolist()}


async def serve(spec: Spec) -> None:
    """Answer requests until end of file."""
    chat = ChatTemplate(AutoTokenizer.from_pretrained(spec.model))
    policy = policy_of(load_worker(Path(spec.model), torch.bfloat16))
    async with engine_of(spec) as engine:
        trainer = build_trainer(spec, policy, engine, chat)
        for request in requests():
            answer(check(spec, chat) if request["do"] == "check" else await step(trainer))


if __name__ == "__main__":
    join_alone()
    torch.manual_seed(0)
    asyncio.run(serve(Spec(**json.loads(sys.argv[1]))))
