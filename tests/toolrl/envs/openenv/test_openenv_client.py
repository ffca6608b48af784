"""Episodes on OpenEnv servers: a scripted one in process, ours, and in slow tests the official package's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from tests.support.episodes import call, calls, respond
from tests.support.foreign import foreign_python
from tests.support.service import free_port, wait_for
from tests.toolrl.envs.openenv.test_openenv_server import OFFICIAL, server
from toolrl.envs.openenv import sessions
from toolrl.envs.openenv.client import OpenEnvFactory
from verl.envs.registry import build_env_factory
from verl.errors import ConfigError, ServiceDownError
from verl.types import Message, Score, Task, ToolCall, ToolSpec, ToolStatus

TASK = Task("row#7", (Message("system", "Rules."), Message("user", "Play.")), "", "x", extra={"secret": 3})
GUESS = {
    "description": "Guess the number.",
    "properties": {"metadata": {}, "number": {"type": "integer"}},
    "required": ["number"],
    "type": "object",
}
Script = Callable[[str, Mapping[str, Any]], Any]


def seen(observation: Mapping[str, Any], reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def failed(code: str, message: str = "no") -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


def guess(type: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """A guessing game as its official server answers."""
    if type == "reset":
        shown = {"text": f"secret {data['secret']}, seed {data['seed']}", "hints": [], "metadata": {"level": 1}}
        return seen(shown)
    right = data["number"] == 3
    return seen({"text": "right" if right else "wrong"}, 1.0 if right else -0.25, right)


@asynccontextmanager
async def scripted(
    script: Script, schema: Any = GUESS, sessions: int = 100, closed: list[bool] | None = None
) -> AsyncIterator[str]:
    """The URL of a server that answers by a script: an answer, a text to send as it is, or None to hang up."""
    num_open = 0

    async def session(socket: ServerConnection) -> None:
        nonlocal num_open
        if num_open >= sessions:
            await socket.send(json.dumps(failed("CAPACITY_REACHED")))
            return
        num_open += 1
        try:
            async for text in socket:
                message = json.loads(text)
                if message["type"] == "close":
                    if closed is not None:
                        closed.append(True)
                    return
                answer = script(message["type"], message.get("data", {}))
                if isinstance(answer, Coroutine):
                    answer = await answer
                if answer is None:
                    socket.transport.abort()
                    return
                await socket.send(answer if isinstance(answer, str) else json.dumps(answer))
        finally:
            num_open -= 1

    def get(socket: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        return socket.respond(HTTPStatus.OK, json.dumps({"action": schema} if request.path == "/schema" else {}))

    async with serve(session, "127.0.0.1", 0, process_request=get) as running:
        host, port = next(iter(running.sockets)).getsockname()
        yield f"http://{host}:{port}"


async def episode(factory: OpenEnvFactory, *messages: Message) -> tuple[list[Any], Score | None]:
    env = factory(TASK)
    try:
        found = [await env.reset(), *[await env.step(message) for message in messages]]
        return found, await env.judge()
    finally:
        await env.close()


def play(script: Script, *messages: Message, schema: Any = GUESS, **options: Any) -> tuple[list[Any], Score | None]:
    async def run() -> tuple[list[Any], Score | None]:
        async with scripted(script, schema) as url:
            factory = OpenEnvFactory(url, **options)
            try:
                return await asyncio.wait_for(episode(factory, *messages), 20)
            finally:
                await factory.close()

    return asyncio.run(run())


def test_the_fields_of_an_action_are_the_parameters_of_a_tool() -> None:
    odd = calls(ToolCall("act", {"number": "x"}), ToolCall("fly", {}), ToolCall("act", {"number": 3}))
    (opening, first, second), score = play(guess, call("act", number=5), odd)
    shown = f"Play.\n\nsecret 3, seed {zlib.crc32(b'row#7')}"
    assert opening.messages == (TASK.prompt[0], Message("user", shown))
    number = {"number": {"type": "integer"}}
    assert opening.tools == (ToolSpec("act", "Guess the number.", {**GUESS, "properties": number}),)
    assert first.messages == (Message("tool", "wrong", tool="act"),) and not first.done and first.reward is None
    assert [use.status for use in second.tool_uses] == [
        ToolStatus.USER_ERROR,
        ToolStatus.USER_ERROR,
        ToolStatus.SUCCESS,
    ]
    assert "not of type" in second.messages[0].content and "no function 'fly'" in second.messages[1].content
    assert second.done and score == Score(0.75, {"return": 0.75})


@pytest.mark.parametrize(
    ("option", "rewards", "total"),
    [("sum", [None, None], 0.75), ("last", [None, None], 1.0), ("turns", [-0.25, 1.0], 0.0)],
)
def test_rewards_of_steps_are_summed_or_the_last_counts_or_each_is_of_its_turn(
    option: str, rewards: list[float | None], total: float
) -> None:
    (_, *steps), score = play(guess, call("act", number=5), call("act", number=3), score=option)
    assert [step.reward for step in steps] == rewards
    assert score is not None and score.total == total


def test_nothing_is_sent_after_the_environment_is_done() -> None:
    sent = []

    def script(type: str, data: Mapping[str, Any]) -> Any:
        sent.append(data.get("number"))
        return guess(type, data)

    (_, step), score = play(script, calls(*(ToolCall("act", {"number": number}) for number in (3, 4, 5))))
    assert sent == [None, 3] and step.done and len(step.messages) == 1
    assert score is not None and score.total == 1.0


def silent(type: str, data: Mapping[str, Any]) -> Any:
    return seen({"text": "ok"}) if type == "step" else guess(type, data)


@pytest.mark.parametrize("score", ["sum", "last", "turns"])
@pytest.mark.parametrize(
    "messages", [(call("act", number=5), respond()), (respond(),), (call("act", number="x"), respond())]
)
def test_an_episode_without_a_reward_scores_0_whatever_others_had(score: str, messages: tuple[Message, ...]) -> None:
    assert play(silent, *messages, score=score)[1] == Score(0.0, {} if score == "turns" else {"return": 0.0})


def test_an_environment_without_rewards_leaves_the_score_to_a_reward() -> None:
    assert play(silent, call("act", number=5), respond(), score="none")[1] is None
    assert play(guess, call("act", number=3), score="none")[1] is None


def test_many_episodes_without_a_reward_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first, second = (OpenEnvFactory("http://localhost:1") for _ in range(2))
    second.note_reward(True)
    for factory in (first, second):
        for _ in range(200):
            factory.note_reward(False)
    assert [each.getMessage()[:32] for each in caplog.records] == ["64 episodes have had no reward, "]
    caplog.clear()
    unscored = OpenEnvFactory("http://localhost:1", score="none")
    for _ in range(200):
        assert asyncio.run(unscored(TASK).judge()) is None
    assert not caplog.records


def test_the_text_of_the_policy_is_the_action() -> None:
    def talk(type: str, data: Mapping[str, Any]) -> Any:
        if type == "reset":
            return seen({"prompt": "Write stop.", "rest": 1})
        if data["message"] == "bad":
            return failed("VALIDATION_ERROR", "too short")
        return seen({"prompt": f"got {data['message']}", "rest": 2}, 0.5, "stop" in data["message"])

    options = {"text_field": "message", "shown_field": "prompt"}
    (opening, *steps), score = play(talk, respond("hi"), respond("bad"), respond("stop"), **options)
    assert opening.tools == () and opening.messages[-1].content == "Play.\n\nWrite stop."
    assert [step.messages for step in steps] == [
        (Message("user", "got hi"),),
        (Message("user", "Error: too short"),),
        (),
    ]
    assert [step.done for step in steps] == [False, False, True]
    assert score == Score(1.0, {"return": 1.0})


@pytest.mark.parametrize("listed", [True, False])
def test_tools_of_an_mcp_server_are_offered(listed: bool) -> None:
    """openenv-core 0.3 may list them without parameters."""
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}

    def echo(type: str, data: Mapping[str, Any]) -> Any:
        if type == "reset":
            return seen({})
        if type == "mcp":
            return {"type": "mcp", "data": {"result": {"tools": [{"name": "echo", "inputSchema": parameters}]}}}
        if data["type"] == "list_tools":
            schema = parameters if listed else {}
            return seen({"tools": [{"name": "echo", "description": "Repeats.", "input_schema": schema}]})
        if data["arguments"]["text"] == "bad":
            return seen({"tool_name": "echo", "result": None, "error": {"error_type": "timeout", "message": "late"}})
        text = {"content": [{"type": "text", "text": "t"}], "data": None if data["arguments"]["text"] == "t" else "d"}
        return seen({"tool_name": "echo", "result": text, "error": None}, 0.5)

    asked = [ToolCall("echo", {"text": text}) for text in ("t", "d", "bad")]
    schema = {"properties": {"type": {}, "tool_name": {}, "arguments": {}, "metadata": {}}}
    (opening, step), score = play(echo, calls(*asked, ToolCall("echo", {})), schema=schema)
    assert opening.messages == TASK.prompt
    assert opening.tools == (ToolSpec("echo", "Repeats.", parameters),)
    assert [message.content for message in step.messages][:3] == ["t", "d", "Error: late"]
    assert "'text' is a required property" in step.messages[3].content
    assert score == Score(1.0, {"return": 1.0})


async def test_episodes_wait_for_a_free_session_and_close_theirs() -> None:
    closed: list[bool] = []
    async with scripted(guess, sessions=2, closed=closed) as url:
        factory = OpenEnvFactory(url, max_sessions=5)
        ends = await asyncio.gather(*(episode(factory, call("act", number=3)) for _ in range(8)))
        assert [score for _, score in ends] == [Score(1.0, {"return": 1.0})] * 8
        assert closed == [True] * 8
        await factory.close()


async def test_a_server_that_stays_full_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "QUEUE_S", 0.3)
    async with scripted(guess, sessions=0) as url:
        factory = OpenEnvFactory(url, max_sessions=1)
        for _ in range(2):  # the first one frees its slot
            with pytest.raises(ServiceDownError, match="all sessions were in use"):
                await factory(TASK).reset()
        await factory.close()


async def _hang() -> None:
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (failed("EXECUTION_ERROR", "bad luck"), "EXECUTION_ERROR: bad luck"),
        ("not json", "JSONDecodeError"),
        ("[1]", "not a message of OpenEnv"),
        ({"type": "observation", "data": 3}, "not a message of OpenEnv"),
        (None, "ConnectionClosedError"),
        (_hang, "no answer within timeout_s=0.2"),
    ],
)
def test_a_step_that_is_lost_is_a_fault_of_the_service(answer: Any, problem: str) -> None:
    def script(type: str, data: Mapping[str, Any]) -> Any:
        return guess(type, data) if type == "reset" else answer() if callable(answer) else answer

    with pytest.raises(ServiceDownError, match=problem):
        play(script, call("act", number=5), timeout_s=0.2 if answer is _hang else 60.0)


def test_a_reset_that_is_refused_is_a_fault_that_names_the_row() -> None:
    with pytest.raises(ServiceDownError, match="reset refuses the row's extra_info: no"):
        play(lambda *_: failed("VALIDATION_ERROR"))


async def test_a_server_that_is_down_is_a_fault() -> None:
    factory = OpenEnvFactory(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ServiceDownError, match="not reachable"):
        await factory.check_services()
    with pytest.raises(ServiceDownError, match="OpenEnv server"):
        await factory(TASK).reset()
    await factory.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "url"),
        ({"url": "localhost:8000"}, "OpenEnv server"),
        ({"url": "http://localhost:1", "score": "mean"}, "must be sum, last, turns or none"),
        ({"url": "http://localhost:1", "fields": 1}, "no option 'fields'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_env_factory("openenv", options)


def test_our_own_server_is_one_of_them() -> None:
    async def run(url: str) -> None:
        factory = OpenEnvFactory(url)
        await factory.check_services()
        task = Task("t", (Message("user", "Shop."),), "", "x", extra={"seed": 1})
        env = factory(task)
        opening = await env.reset()
        assert opening.tools[0].name == "list_products"
        (found,) = (await env.step(call("list_products"))).messages
        assert found.tool == "list_products" and json.loads(found.content)
        await env.close()
        await factory.close()

    with server("--env", "shop", "--task-option", "count=4") as (place, _):
        asyncio.run(asyncio.wait_for(run(f"http://{place}"), 30))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "messages", "shown", "total"),
    [
        ("guess", {}, [call("act", number=5), call("act", number=3)], "From 0 to 9?", 0.75),
        ("talk", {"text_field": "message"}, [respond("hi"), respond("stop")], "Write stop.", 1.0),
        (
            "echo",
            {"score": "none"},
            [call("echo", message="ab", times=2), call("echo", message="ab", times=-1), respond()],
            "",
            None,
        ),
    ],
)
def test_episodes_on_servers_of_the_official_package(
    kind: str, options: dict[str, Any], messages: list[Message], shown: str, total: float | None
) -> None:
    python, port = foreign_python(OFFICIAL), free_port()
    command = [str(python), str(Path(__file__).with_name("official_server.py")), kind, str(port), "2"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, env=environment)

    async def run() -> None:
        factory = OpenEnvFactory(f"http://127.0.0.1:{port}", **options)
        await factory.check_services()
        found = await asyncio.gather(*(episode(factory, *messages) for _ in range(5)))  # in two sessions
        assert len({opening.messages for (opening, *_), _ in found}) == 1
        (opening, *steps), _ = found[0]
        assert opening.messages[-1].content == (f"Play.\n\n{shown}" if shown else "Play.")
        assert [each and each.total for _, each in found] == [total] * 5
        if kind == "echo":
            assert set(opening.tools[0].parameters["properties"]) == {"message", "times"}
            assert [steps[0].messages[0].content, steps[1].tool_uses[0].status] == ["abab", ToolStatus.USER_ERROR]
        if kind == "guess":
            env = factory(TASK)
            await env.reset()
            with pytest.raises(ServiceDownError, match="bad luck"):
                await env.step(call("act", number=66))
            await env.close()
        await factory.close()

    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        process.kill()
        process.wait()
