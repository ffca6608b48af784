"""A group's requests: one for all responses of one turn, whose prompt is tokenized once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.virtual_clock import run_at_once
from tests.verl.episodes.test_episode import AskFormat, Echoes, Length
from verl.build.env import single_turn_runner
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.episodes import group
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.errors import EngineLostError
from verl.rollout.engine import Sampling, each_of
from verl.rollout.joined import JoinedRequests
from verl.scoring.pool import DirectScorer
from verl.types import Completion, FinishReason, Message, Outcome, StopReason, Task, TrajectoryGroup

TASK = Task("13", (Message("user", "sum"),), "42", "sums")


class Seeded:
    """An engine whose response is its seed; it remembers its requests, and aborts those of `aborts`."""

    def __init__(self, *aborts: int) -> None:
        self.asked: list[tuple[Sequence[int], Sampling]] = []
        self.aborts = list(aborts)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        self.asked.append((prompt_ids, sampling))
        await asyncio.sleep(0)
        return tuple(self.answer(one.seed or 0) for one in each_of(sampling))

    def answer(self, seed: int) -> Completion:
        reason = FinishReason.STOP
        if seed in self.aborts:
            self.aborts.remove(seed)
            reason = FinishReason.ABORT
        elif seed % 4 == 3:
            reason = FinishReason.LENGTH
        return Completion((seed,), (-float(seed),), reason, 0)


def rolled(engine: Any, runner: EpisodeRunner, seed: int | None = 4) -> TrajectoryGroup:
    rollout = GroupRollout(engine, DirectScorer(Length()), Sampling(5, 0.7, stop_token_ids=(1,)), runner)
    return run_at_once(rollout.run(TASK, 4, 0, seed))


@pytest.mark.parametrize("seed", [4, None])
def test_responses_of_one_turn_are_one_request(chat: ChatTemplate, seed: int | None) -> None:
    engine = Seeded()
    group = rolled(engine, single_turn_runner(chat, 5), seed)
    assert engine.asked == [(chat.task_prompt_ids(TASK), Sampling(5, 0.7, 4, (1,), seed=seed))]
    turns = [trajectory.turns for trajectory in group.trajectories]
    expected = (0, 0, 0, 0) if seed is None else (4, 5, 6, 7)
    assert tuple(turn.completion.token_ids[0] for (turn,) in turns) == expected
    assert len({id(turn.context_ids) for (turn,) in turns}) == 1  # the step holds the prompt once
    if seed is not None:
        reasons = [(each.stop_reason, each.outcome) for each in group.trajectories]
        assert reasons == [(StopReason.STOP, Outcome.SCORED)] * 3 + [(StopReason.LENGTH, Outcome.MODEL_FAULT)]


def test_a_prompt_is_rendered_once_for_a_group(chat: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[object] = []
    whole = ChatTemplate.initial_ids

    def initial_ids(self: ChatTemplate, *args: Any) -> tuple[int, ...]:
        rendered.append(args)
        return whole(self, *args)

    monkeypatch.setattr(ChatTemplate, "initial_ids", initial_ids)
    rolled(Seeded(), single_turn_runner(chat, 5))
    assert len(rendered) == 1


def test_episodes_of_several_turns_do_not_wait_for_one_another(chat: ChatTemplate) -> None:
    engine = Seeded()
    runner = EpisodeRunner(Echoes(), ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits(max_turns=2))
    rolled(engine, runner)
    assert [(sampling.n, sampling.seed) for _, sampling in engine.asked] == [(1, 4), (1, 5), (1, 6), (1, 7)]


def test_an_aborted_response_is_sampled_again_by_itself(chat: ChatTemplate) -> None:
    engine, runner = Seeded(4, 6), single_turn_runner(chat, 5)
    runner = replace(runner, limits=replace(runner.limits, retries=1))
    group = rolled(engine, runner)
    assert [trajectory.index for trajectory in group.trajectories] == [0, 1, 2, 3] and not group.faults
    assert [(sampling.n, sampling.seed) for _, sampling in engine.asked] == [(4, 4), (1, 4), (1, 6)]
    (fault,) = rolled(Seeded(5, 5), runner).faults
    assert "aborted" in fault


def test_only_equal_requests_are_joined() -> None:
    engine = Seeded()
    joined = JoinedRequests(engine)  # type: ignore[arg-type]

    async def ask() -> list[tuple[Completion, ...]]:
        first = Sampling(5, seed=8)
        asked = ((1, first), (2, replace(first, seed=9)), (1, replace(first, seed=9)), (1, replace(first, top_k=3)))
        return await asyncio.gather(*(joined.generate((prompt,), sampling) for prompt, sampling in asked))

    assert [completion.token_ids for (completion,) in run_at_once(ask())] == [(8,), (9,), (9,), (8,)]
    assert [(ids, sampling.n, sampling.seed) for ids, sampling in engine.asked] == [
        ((1,), 2, 8),
        ((2,), 1, 9),
        ((1,), 1, 8),
    ]


class Slow(Seeded):
    """Writes a token per look, and never ends; the second look fails."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        await asyncio.sleep(60)
        raise AssertionError

    async def tokens_written(self) -> int:
        self.looks += 1
        if self.looks == 2:
            raise EngineLostError("lost")
        return 10 * self.looks


def test_the_engine_is_followed_while_a_rollout_waits(chat: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_FOLLOW_S", 0.01)
    engine, seen = Slow(), list[str]()
    any_engine: Any = engine
    rollout = GroupRollout(any_engine, DirectScorer(Length()), Sampling(5), single_turn_runner(chat, 8))
    rollout.progress.on_change = lambda: seen.append(str(rollout.progress).rpartition(",")[0])

    async def follow() -> None:
        following = asyncio.create_task(rollout.follow())
        await asyncio.sleep(0.1)
        assert engine.looks == 0  # nothing is asked for
        running = asyncio.create_task(rollout.run(TASK, 4, 0))
        while engine.looks < 4:
            await asyncio.sleep(0.01)
        for task in (running, following):
            task.cancel()

    run_at_once(follow())
    assert seen[:2] == ["0 of 4 responses, 10 tokens", "0 of 4 responses, 30 tokens"]
