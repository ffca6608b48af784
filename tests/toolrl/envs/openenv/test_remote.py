"""Environments of ours on other machines: nothing is lost on the wire, and a dead server is reported."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.conftest import ROOT
from tests.support.episodes import Played, call, calls, play, respond
from tests.support.every import every
from tests.support.proxy import FAULTS, MODES, behind
from tests.toolrl.envs.openenv.test_openenv_server import server
from toolrl.envs.openenv import session
from toolrl.envs.openenv.remote import RemoteFactory
from toolrl.envs.openenv.wire import Start, Started, Step, Stepped, Verdict, as_json
from verl.envs.base import Observation, StepResult
from verl.envs.registry import build_env_factory, build_tasks
from verl.errors import ConfigError, ServiceDownError
from verl.types import Message, Score, Task, ToolCall, ToolSpec, ToolStatus, ToolUse

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(ToolCall, st.text(), OBJECTS)
MESSAGES = st.builds(Message, st.text(), st.text(), st.lists(CALLS, max_size=2).map(tuple), st.none() | st.text())
SPECS = st.builds(ToolSpec, st.text(), st.text(), OBJECTS)
TASKS = st.builds(
    Task,
    id=st.text(),
    prompt=st.lists(MESSAGES, max_size=2).map(tuple),
    answer=st.text(),
    data_source=st.text(),
    env=st.text(),
    reward=st.none() | st.text(),
    extra=OBJECTS,
)
RESULTS = st.builds(
    StepResult,
    st.lists(MESSAGES, max_size=2).map(tuple),
    st.booleans(),
    st.lists(st.builds(ToolUse, st.text(), st.sampled_from(ToolStatus), FLOATS), max_size=2).map(tuple),
    st.lists(SPECS, max_size=1).map(tuple),
)
SCORES = st.none() | st.builds(Score, FLOATS, st.dictionaries(st.text(), FLOATS, max_size=2))
OBSERVATIONS = st.builds(Observation, st.lists(MESSAGES, max_size=2).map(tuple), st.lists(SPECS, max_size=2).map(tuple))


@pytest.mark.long
@given(TASKS, MESSAGES, RESULTS, OBSERVATIONS, SCORES)
def test_the_wire_loses_nothing(
    task: Task, message: Message, result: StepResult, observation: Observation, score: Score | None
) -> None:
    started = Started(observation=observation, judges=True)
    sent: list[BaseModel] = [Start(task=task), started, Step(message=message), Stepped(result=result)]
    for each in (*sent, Verdict(score=score)):
        assert type(each).model_validate(json.loads(json.dumps(as_json(each)))) == each


def num_sessions(url: str) -> int:
    return int(httpx2.get(f"{url}/health", trust_env=False).json()["sessions"])


@pytest.fixture(scope="module")
def shop_url() -> Iterator[str]:
    with server("--env", "shop") as (place, _):
        yield f"http://{place}"


def buy(task: Task) -> list[Message]:
    made = [ToolCall("set_quantity", {"product_id": id, "quantity": n}) for id, n in json.loads(task.answer).items()]
    return [calls(*made), call("checkout"), respond()]


def without_times(played: Played) -> list[Any]:
    steps = [(r.messages, r.done, [(u.name, u.status) for u in r.tool_uses], r.tools) for r in played]
    return [*steps, played.score]


async def test_a_remote_environment_is_like_a_local_one(shop_url: str) -> None:
    tasks = build_tasks("shop", {"count": 6})
    remote, local = build_env_factory("remote", {"urls": shop_url}), build_env_factory("shop")
    assert await remote(tasks[0]).reset() == await local(tasks[0]).reset()
    episodes = [(task, messages) for task in tasks for messages in (buy(task), [respond()], [call("steal"), respond()])]
    theirs = await asyncio.gather(*(play(remote(task), messages) for task, messages in episodes))
    ours = [await play(local(task), messages) for task, messages in episodes]
    assert list(map(without_times, theirs)) == list(map(without_times, ours))
    assert [played.score.total for played in theirs if played.score] == [1.0, 0.0, 0.0] * len(tasks)
    await remote.close()


async def test_odd_arguments_arrive_as_far_as_they_can_be_written(shop_url: str) -> None:
    (task,) = build_tasks("shop", {"count": 1})
    odd = [call("get_product", product_id="a\ud83d"), call("set_quantity", product_id="p", quantity=float("inf"))]
    remote, local = RemoteFactory(shop_url), build_env_factory("shop")
    theirs, ours = await play(remote(task), odd), await play(local(task), odd)
    assert "there is no product 'a" in theirs[0].messages[0].content
    assert theirs[1].messages == ours[1].messages and "inf is not of type 'integer'" in ours[1].messages[0].content
    assert all(message.content.encode() for result in ours for message in result.messages)
    await remote.close()


def test_two_hundred_episodes_at_once_leave_nothing_open() -> None:
    async def many(url: str) -> None:
        remote = RemoteFactory(url)
        tasks = build_tasks("shop", {"count": 25})
        played = await asyncio.gather(*(play(remote(task), buy(task)) for task in tasks for _ in range(8)))
        assert [each.score.total for each in played if each.score] == [1.0] * 200
        async with asyncio.timeout(10):  # the server sees the end of a connection in its own time
            while num_sessions(url):
                await asyncio.sleep(0.05)
        await remote.close()

    with server("--env", "shop") as (place, _):  # one of its own: no sessions of other tests
        asyncio.run(many(f"http://{place}"))


def test_a_server_that_dies_is_a_service_that_is_down() -> None:
    (task,) = build_tasks("shop", {"count": 1})
    with server("--env", "shop") as (place, process):
        url = f"http://{place}"

        async def lose() -> None:
            remote = RemoteFactory(url)
            env = remote(task)
            await env.reset()
            process.kill()
            process.wait()
            with pytest.raises(ServiceDownError, match=url):
                await env.step(respond())
            await env.close()  # what is gone need not be closed
            with pytest.raises(ServiceDownError, match="environment server: "):
                await remote(task).reset()
            await remote.close()

        asyncio.run(lose())


async def test_episodes_go_to_a_server_that_is_up_and_the_other_is_reported_once(
    shop_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    remote = RemoteFactory(["http://127.0.0.1:1", shop_url])
    played = await asyncio.gather(*(play(remote(task), buy(task)) for task in build_tasks("shop", {"count": 4})))
    assert every(each.score is not None and each.score.total == 1.0 for each in played)
    await remote.close()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "toolrl.servers.endpoints"]
    assert warning.startswith("environment server http://127.0.0.1:1: ConnectionRefusedError")


def test_idle_episodes_are_forgotten_and_asking_them_is_a_fault() -> None:
    (task,) = build_tasks("shop", {"count": 1})
    with server("--env", "shop", "--idle-s", "2") as (place, _):  # no less, or a busy machine loses it in its reset
        url = f"http://{place}"

        async def wait() -> None:
            remote = RemoteFactory(url)
            env = remote(task)
            await env.reset()
            for _ in range(100):
                if num_sessions(url) == 0:
                    break
                await asyncio.sleep(0.1)
            with pytest.raises(ServiceDownError, match="idle for more than"):
                await env.step(respond())
            await env.close()
            await remote.close()

        asyncio.run(wait())


BROKEN = """
from verl.errors import ServiceDownError
from toolrl.envs.shop.shop import ShopEnv


class Broken(ShopEnv):
    async def step(self, message):
        if message.content == "bug":
            raise KeyError("bug")
        if message.content == "nothing":
            return None
        if message.content == "unclosable":
            self.close = None
        if message.content == "down":
            raise ServiceDownError("index", "not there")
        self.broken = message.content == "no verdict"
        return await super().step(message)

    async def judge(self):
        if self.broken:
            raise KeyError("state")
        return await super().judge()
"""


def test_an_environment_that_breaks_is_a_fault_of_its_own_episode(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    (task,) = build_tasks("shop", {"count": 1})
    with server("--env", f"{tmp_path}/broken.py:Broken") as (place, _):
        url = f"http://{place}"

        async def ask() -> list[Any]:
            remote = RemoteFactory(url)
            episodes = [remote(task) for _ in range(5)]
            await asyncio.gather(*(env.reset() for env in episodes))
            steps = zip(episodes, ("bug", "nothing", "down", "unclosable", "Done."), strict=True)
            results = await asyncio.gather(*(env.step(respond(text)) for env, text in steps), return_exceptions=True)
            assert (await episodes[4].judge()) == Score(0.0, {"bought": 0.0})
            await episodes[4].step(respond("no verdict"))
            with pytest.raises(ServiceDownError, match="KeyError: 'state'"):
                await episodes[4].judge()
            await asyncio.gather(*(env.close() for env in episodes))
            assert num_sessions(url) == 0
            with pytest.raises(ServiceDownError, match="KeyError: 'products'"):
                await remote(Task("t", (), "", "shop")).reset()
            await remote.close()
            return results

        bug, nothing, down, _, fine = asyncio.run(ask())
    assert isinstance(bug, ServiceDownError) and "KeyError: 'bug'" in str(bug)
    assert isinstance(nothing, ServiceDownError) and "result" in str(nothing)
    assert isinstance(down, ServiceDownError) and str(down) == f"index at {url}: not there"
    assert isinstance(fine, StepResult) and fine.done


HUNG = """
import asyncio
from verl.envs.base import Observation

class Hung:
    def __init__(self, task):
        pass
    async def reset(self):
        return Observation(())
    async def step(self, message):
        await asyncio.sleep(3600)
    async def close(self):
        pass
"""


def test_a_step_that_hangs_does_not_hold_up_the_verdict_of_an_environment_without_a_judge(tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(HUNG)
    with server("--env", f"{tmp_path}/hung.py:Hung") as (place, _):
        url = f"http://{place}"

        async def ask() -> None:
            remote = RemoteFactory(url)
            env = remote(Task("t", (), "", "x"))
            await env.reset()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await env.step(respond())
            async with asyncio.timeout(60):
                assert await env.judge() is None
            await remote.close()

        asyncio.run(ask())


LATE = """
import asyncio
from toolrl.envs.shop.shop import ShopEnv

class Late(ShopEnv):
    async def step(self, message):
        await asyncio.sleep(0.5)
        return await super().step(message)
"""


async def test_a_verdict_after_a_step_that_was_given_up_is_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    (task,) = build_tasks("shop", {"count": 1})
    with server("--env", f"{tmp_path}/late.py:Late") as (place, _):
        url = f"http://{place}"
        remote = RemoteFactory(url)
        env = remote(task)
        await env.reset()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await env.step(respond())
        assert await env.judge() == Score(0.0, {"bought": 0.0})
        await env.close()
        await remote.close()


async def test_an_environment_that_never_closes_does_not_keep_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unclosable:
        async def reset(self) -> Observation:
            return Observation(())

        async def step(self, message: Message) -> StepResult:
            raise NotImplementedError

        async def close(self) -> None:
            await asyncio.Event().wait()

    class Factory:
        def __call__(self, task: Task) -> Unclosable:
            return Unclosable()

        async def close(self) -> None:
            pass

    monkeypatch.setattr(session, "CLOSE_S", 0.1)
    playing = session.Session(Factory(), session.TaskDraw([], Factory()))
    await playing.answer_own("toolrl/start", as_json(Start(task=Task("t", (), "", "x"))))
    await playing.close()


def test_episodes_beyond_the_sessions_wait() -> None:
    with server("--env", "shop", "--max-episodes", "3") as (place, _):

        async def many() -> None:
            remote = RemoteFactory(f"http://{place}")
            tasks = build_tasks("shop", {"count": 6})
            played = await asyncio.gather(*(play(remote(task), buy(task)) for task in tasks))
            assert [each.score.total for each in played if each.score] == [1.0] * 6
            await remote.close()

        asyncio.run(many())


ENDLESS = """
import asyncio
from pathlib import Path
from toolrl.envs.shop.shop import ShopEnv

class Endless(ShopEnv):
    async def step(self, message):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            Path(__file__).with_name("cancelled").touch()
            raise
"""


async def test_steps_of_a_client_that_hangs_up_are_cancelled(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    (task,) = build_tasks("shop", {"count": 1})
    with server("--env", f"{tmp_path}/endless.py:Endless") as (place, _):
        url = f"http://{place}"
        remote = RemoteFactory(url, timeout_s=1.0)
        env = remote(task)
        await env.reset()
        with pytest.raises(ServiceDownError, match="no answer within timeout_s=1"):
            await env.step(respond())
        await asyncio.wait_for(env.close(), 60)
        await remote.close()
        for _ in range(100):
            if (tmp_path / "cancelled").exists():
                return
            time.sleep(0.1)
    pytest.fail("the step goes on")


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="names no environment server"):
        build_env_factory("remote", {"urls": []})
    command = [sys.executable, "-m", "toolrl.envs.openenv.server", "--env", "shopp"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "did you mean 'shop'" in found.stderr


@pytest.mark.parametrize("mode", MODES)
async def test_a_network_failure_is_an_error_that_names_the_server_in_time(mode: str, shop_url: str) -> None:
    """From the start of an episode on, and in the middle of one."""
    task = build_tasks("shop", {"count": 1})[0]
    faulty = mode in FAULTS
    with behind(shop_url) as network:
        for started in (True, False):
            network.mode = "pass" if started else mode
            factory = RemoteFactory(network.url, timeout_s=3.0 if mode == "stall" else 60.0)
            env = factory(task)
            start = time.monotonic()
            with pytest.raises(ServiceDownError, match=network.url) if faulty else nullcontext():
                await env.reset()
                network.mode = mode
                played = await env.step(buy(task)[0])
                assert played.tool_uses[0].status is ToolStatus.SUCCESS
            assert not faulty or time.monotonic() - start < 20
            network.mode = "pass"
            await env.close()
            if started or not faulty:  # with a network again
                again = factory(task)
                await again.reset()
                await again.close()
            await factory.close()
