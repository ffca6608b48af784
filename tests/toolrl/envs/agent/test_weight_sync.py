"""Weight syncs while agents play: versions per token within a request, and runs that are ahead of their learner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.local_run import local_trainer
from tests.support.tiny import run_overrides, save_tiny_model
from tests.toolrl.envs.agent.play import observations
from tests.toolrl.envs.agent.test_agent import PROGRAMS
from tests.verl.rollout.test_pool import Writes
from toolrl.check.preflight.local_group import LocalGroup
from toolrl.envs.agent.gateway import Gateway
from toolrl.envs.agent.session import Session
from verl.build.run import resolve_on_weight_sync
from verl.config.load import load_config
from verl.episodes.episode import EpisodeLimits
from verl.episodes.program import ProgramPolicy
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool, OnWeightSync

LENGTH = 100


@pytest.mark.parametrize("on_weight_sync", [OnWeightSync.CONTINUE, OnWeightSync.ABORT_AND_RETRY])
async def test_every_token_of_a_request_has_the_version_that_wrote_it(on_weight_sync: OnWeightSync) -> None:
    """The engine writes the number of its version as a token."""

    async def sync(pool: EnginePool, engine: Writes, version: int) -> None:
        while not engine.running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        await pool.begin_weights([])
        await pool.end_weights(version)

    engine, gateway = Writes(), Gateway()
    pool = EnginePool(LocalGroup(engine), [[0]], on_weight_sync)
    limits = EpisodeLimits(max_turns=4, max_tokens=4000, max_prompt_length=4000)
    policy = ProgramPolicy(observations(), limits, Sampling(1), pool, None)
    await gateway.start()
    async with policy.timer.running():
        session = Session(policy)
        headers = {"authorization": f"Bearer {session.key}"}
        url = gateway.url(session)
        with gateway.serving(session):
            async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
                body: dict[str, Any] = {"input_ids": [7, 7], "max_tokens": LENGTH}
                asked = asyncio.create_task(client.post("/generate", json=body))
                for version in (1, 2):
                    await sync(pool, engine, version)
                first = (await asked).json()
                body["input_ids"] += [*first["token_ids"], 7]
                second = (await client.post("/generate", json=body)).json()
        await session.close()
    await gateway.close()
    assert first["versions"] == first["token_ids"] and len(first["logprobs"]) == LENGTH
    spanned = {OnWeightSync.CONTINUE: {0, 1, 2}, OnWeightSync.ABORT_AND_RETRY: {2}}
    assert set(first["versions"]) == spanned[on_weight_sync] and set(second["versions"]) == {2}
    (segment,) = session.ledger.segments
    one, two = (turn.completion for turn in segment.turns)
    assert list(one.versions) == first["versions"] and list(two.versions) == second["versions"]
    assert engine.asked[-1] == (7, 7, *one.token_ids, 7)
    assert segment.token_ids.tolist() == [7, 7, *one.token_ids, 7, *two.token_ids]


AGENT = ("env.name=agent", "env.agent=a.py:run", "env.tool_call_format=toolrl", "reward.name=env")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (AGENT, None),
        (("rollout.max_staleness=1",), OnWeightSync.CONTINUE),
        (("rollout.max_staleness=1", *AGENT), OnWeightSync.FINISH),
        (("rollout.max_staleness=1", *AGENT, "rollout.on_weight_sync=continue"), OnWeightSync.CONTINUE),
    ],
)
def test_weights_change_between_the_requests_of_a_program(
    overrides: Sequence[str], expected: OnWeightSync | None
) -> None:
    assert resolve_on_weight_sync(load_config(["recipe=mini_grpo", *overrides])) is expected


@pytest.mark.long
@pytest.mark.parametrize("on_weight_sync", ["auto", "continue", "abort_and_retry"])
def test_agents_play_while_the_run_learns(on_weight_sync: str, tmp_path: Path) -> None:
    overrides = [
        *run_overrides(save_tiny_model(tmp_path / "model"), tmp_path, "hf", 1),
        *("env.name=agent", f"env.agent={PROGRAMS}:short_turns", "env.tool_call_format=toolrl", "reward.name=env"),
        *("data.train_batch_size=2", "data.max_response_length=128"),
        *("rollout.max_staleness=1", f"rollout.on_weight_sync={on_weight_sync}"),
    ]

    async def train(trained: Any) -> list[Any]:
        await trained.weight_sync.sync(0)
        try:
            return [await trained.train_step() for _ in range(4)]
        finally:
            await trained.rollouts.close()

    with local_trainer(load_config(overrides)) as trained:
        results = asyncio.run(train(trained))
    assert [each.metrics["staleness/max"] for each in results] == [0, 1, 1, 1]
    for result in results:
        assert (result.metrics["agent/requests"], result.metrics["agent/segments"]) == (3.0, 1.0)
    for group in results[-1].groups:
        for trajectory in group.trajectories:
            if on_weight_sync == "auto":
                assert all(len(set(turn.completion.versions)) == 1 for turn in trajectory.turns)
            versions = [version for turn in trajectory.turns for version in turn.completion.versions]
            assert versions == sorted(versions) and versions[0] >= 2
