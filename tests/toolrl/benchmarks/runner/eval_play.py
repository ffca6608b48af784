"""Runs benchmarks with a scripted policy, by the episode runner and the rewards of training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from transformers import AutoTokenizer

from tests.support.tiny import MINI
from toolrl.benchmarks.runner.benchmark import Benchmark, Category
from toolrl.benchmarks.runner.handlers import env_of
from verl.build.env import build_episode_runner, prompt_fn
from verl.chat.template import ChatTemplate
from verl.config.schema import Config, DataConfig, EnvConfig
from verl.episodes.group import GroupRollout
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.types import Completion, FinishReason, Score, Task, TrajectoryGroup
from verl.utils.reward_score.base import build_reward

Policy = Callable[[Task], Sequence[str]]  # the text of each turn of an episode
_ROOM = 100_000  # tokens


@cache
def chat() -> ChatTemplate:
    """The tokenizer of dataset/mini, whose chat template would list no tools."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + tokenizer.chat_template
    return ChatTemplate(tokenizer)


class _Speaker:
    """Generates the given texts one after the other, each up to its stop string."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts: Iterator[str] = iter(texts)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        text = next(self._texts)
        ends = any(stop in text for stop in sampling.stop_strings)
        ids = (*chat().response_ids(text)[0], *(() if ends else (chat().end_token_id,)))
        return (Completion(ids, (0.0,) * len(ids), FinishReason.STOP, 0),)


def category(benchmark: Benchmark, name: str) -> Category:
    (found,) = (each for each in benchmark.categories if each.name == name)
    return found


def roomy(env: EnvConfig, length: int) -> Config:
    """The configuration of episodes with room for this many tokens."""
    return Config(env=env, data=DataConfig(max_prompt_length=length, max_response_length=length))


def groups(of: Category, handler: str, policy: Policy, tasks: Iterable[Task] | None = None) -> list[TrajectoryGroup]:
    """An episode of every task."""

    async def play() -> list[TrajectoryGroup]:
        episode_runner = build_episode_runner(roomy(env_of(of.episode, handler), _ROOM), chat())
        scorer = DirectScorer(build_reward(of.episode.reward, of.episode.reward_options))
        rollout = GroupRollout(_Speaker([]), scorer, Sampling(max_tokens=_ROOM), episode_runner)  # type: ignore[arg-type]
        played = []
        for task in of.tasks() if tasks is None else tasks:
            one = replace(rollout, engine=_Speaker(policy(task)))  # type: ignore[arg-type]
            played.append(await one.run(task, 1, 0))
        await rollout.close()
        return played

    return asyncio.run(play())


def scores(of: Category, handler: str, policy: Policy, tasks: Iterable[Task] | None = None) -> list[Score]:
    """The score of an episode of every task; all could be scored."""
    played = groups(of, handler, policy, tasks)
    assert not [fault for group in played for fault in group.faults]
    return [group.scores[0] for group in played]


def foretold(of: Category, handler: str, tasks: Sequence[Task]) -> bool:
    """Whether every episode opens with the tokens that are counted before any is started."""
    episode_runner = build_episode_runner(roomy(env_of(of.episode, handler), _ROOM), chat())
    opening = prompt_fn(episode_runner)
    played = groups(of, handler, lambda _: ["I am done."] * 99, tasks)
    return [tuple(group.trajectories[0].turns[0].context_ids) for group in played] == list(map(opening, tasks))
