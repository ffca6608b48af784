"""Tools of real MCP servers, in processes of their own, over stdio and over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.service import free_port, service
from verl.envs.tool_env import ToolEnv, ToolEnvFactory
from verl.envs.tools.base import EpisodeTool, Tool
from verl.envs.tools.build import build_tools
from verl.envs.tools.runner import ToolLimits, ToolRunner
from verl.errors import ConfigError, ServiceDownError
from verl.types import Message, Task, ToolCall, ToolStatus

SERVER = str(Path(__file__).with_name("mcp_server.py"))
ODD = str(Path(__file__).with_name("mcp_odd_server.py"))
TASK = Task("t", (Message("user", "?"),), "", "test")
Results = list[tuple[str, ToolStatus]]


STDIO = {"name": "mcp", "command": [sys.executable, SERVER], "env": {"PLACE": "here"}, "timeout_s": 60}


@pytest.fixture(scope="module", params=["stdio", "http"])
def reached(request: pytest.FixtureRequest) -> Iterator[list[Tool | EpisodeTool]]:
    """The tools of a server, by either way."""
    with ExitStack() as stack:
        options = STDIO
        if request.param == "http":
            port = free_port()
            url = f"http://127.0.0.1:{port}/mcp"
            stack.enter_context(service(SERVER, str(port), url=url))
            options = {"name": "mcp", "url": url, "timeout_s": 60}
        tools = build_tools([options])
        yield tools
        asyncio.run(tools[0].close())


def episode(
    tools: list[Tool | EpisodeTool], play: Callable[[ToolEnv], Coroutine[Any, Any, None]], **limits: Any
) -> None:
    """Plays one episode, whose calls have 20 s."""
    runner = ToolRunner(ToolLimits(**{"deadline_s": 20, "backoff_s": 0.01, **limits}))
    asyncio.run(play(ToolEnvFactory(tools, runner)(TASK)))


async def call_tools(env: ToolEnv, *calls: ToolCall) -> Results:
    result = await env.step(Message("assistant", "", tool_calls=calls))
    return [(message.content, use.status) for message, use in zip(result.messages, result.tool_uses, strict=True)]


@pytest.mark.long
def test_tools_are_listed_called_in_parallel_and_may_refuse(reached: list[Tool | EpisodeTool]) -> None:
    async def play(env: ToolEnv) -> None:
        specs = {spec.name: spec for spec in (await env.reset()).tools}
        assert list(specs) == ["add", "refuse", "meet", "hang", "die"] and specs["add"].description == "Adds."
        assert specs["add"].parameters["required"] == ["a"]
        assert await call_tools(env, ToolCall("add", {"a": 2}), ToolCall("add", {"a": 2, "b": "3"})) == [
            ("3", ToolStatus.SUCCESS),
            ("Wrong arguments of 'add': '3' is not of type 'integer' (at $.b).", ToolStatus.USER_ERROR),
        ]
        assert await call_tools(env, ToolCall("refuse", {"why": "cold"})) == [
            ("Error executing tool refuse: too cold", ToolStatus.USER_ERROR)
        ]
        meetings = await call_tools(env, ToolCall("meet", {"name": "a"}), ToolCall("meet", {"name": "b"}))
        assert [text for text, _ in meetings] == ["a", "b"]

    episode(reached, play)


@pytest.mark.long
def test_a_hanging_call_is_stopped_and_the_connection_lives_on(reached: list[Tool | EpisodeTool]) -> None:
    async def play(env: ToolEnv) -> None:
        assert [status for _, status in await call_tools(env, ToolCall("hang", {}))] == [ToolStatus.TIMEOUT]
        assert await call_tools(env, ToolCall("add", {"a": 2})) == [("3", ToolStatus.SUCCESS)]

    episode(reached, play, deadline_s=6.0)


@pytest.mark.long
def test_a_program_that_dies_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def play(env: ToolEnv) -> None:
        assert await call_tools(env, ToolCall("die", {})) == [("alive in here", ToolStatus.SUCCESS)]
        assert await call_tools(env, ToolCall("add", {"a": 2})) == [("3", ToolStatus.SUCCESS)]

    tools = build_tools([STDIO])
    episode(tools, play)
    asyncio.run(tools[0].close())
    assert (tmp_path / "died").exists()


@pytest.mark.long
def test_a_server_that_is_killed_while_it_works_is_down_until_it_is_back() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"

    def scene(process: subprocess.Popen[bytes]) -> None:
        async def play(env: ToolEnv) -> None:
            threading.Timer(0.5, process.kill).start()
            with pytest.raises(ServiceDownError, match=f"tool 'hang': MCP server {url}"):
                await call_tools(env, ToolCall("hang", {}))
            with pytest.raises(ServiceDownError, match="cannot be reached"):
                await call_tools(env, ToolCall("add", {"a": 2}))
            with service(SERVER, str(port), url=url):
                assert await call_tools(env, ToolCall("add", {"a": 2})) == [("3", ToolStatus.SUCCESS)]

        tools = build_tools([{"name": "mcp", "url": url, "timeout_s": 60}])
        episode(tools, play, retries=1)
        asyncio.run(tools[0].close())

    with service(SERVER, str(port), url=url) as process:
        scene(process)


def test_an_unreadable_answer_is_an_error_at_once() -> None:
    async def play(env: ToolEnv) -> None:
        with pytest.raises(ServiceDownError, match=r"MCP server .*not valid JSON-RPC"):
            await call_tools(env, ToolCall("tool0", {}))

    tools = build_tools([{"name": "mcp", "command": [sys.executable, ODD, "answers"], "timeout_s": 60}])
    episode(tools, play, retries=0, deadline_s=300)
    asyncio.run(tools[0].close())


@pytest.mark.long
@pytest.mark.parametrize("manner", ["stderr", "stdout"])
def test_30_mb_of_noise_for_each_request_on_stderr_or_stdout_are_passed_over(manner: str) -> None:
    async def play(env: ToolEnv) -> None:
        assert await call_tools(env, ToolCall("tool0", {})) == [("HALF", ToolStatus.SUCCESS)]

    began = psutil.Process().memory_info().rss
    tools = build_tools([{"name": "mcp", "command": [sys.executable, ODD, manner], "timeout_s": 120}])
    episode(tools, play, retries=0, deadline_s=120)
    asyncio.run(tools[0].close())
    assert psutil.Process().memory_info().rss - began < 200 << 20


@pytest.mark.long
def test_closing_ends_the_program() -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children(recursive=True)}

    before = children()
    (tool,) = build_tools([{"name": "mcp", "command": f"{sys.executable} {SERVER}", "only": ["add"], "timeout_s": 60}])
    assert len(children() - before) == 1
    asyncio.run(tool.close())
    asyncio.run(tool.close())
    assert children() <= before


@pytest.mark.long
def test_a_run_that_is_not_closed_ends_anyway() -> None:
    code = f"""
from verl.envs.tools.build import build_tools
tools = build_tools([{{"name": "mcp", "command": {[sys.executable, SERVER]!r}, "timeout_s": 60}}])
print(len(tools))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, cwd=Path.cwd())
    assert ended.returncode == 0 and ended.stdout.strip() == "5", ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ConfigError, "either a command"),
        ({"command": "a", "url": "b"}, ConfigError, "either a command"),
        ({"command": "/nowhere/server"}, ServiceDownError, "MCP server /nowhere/server: cannot be reached"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no key')"]}, ServiceDownError, "stderr: no key"),
        (
            {"command": "sleep 60", "timeout_s": 0.5},
            ServiceDownError,
            "MCP server sleep 60: does not answer within its",
        ),
        (
            {"command": [sys.executable, ODD, "endless"], "timeout_s": 5},
            ServiceDownError,
            "does not list its tools within",
        ),
        ({"command": [sys.executable, ODD, "schema"], "timeout_s": 60}, ServiceDownError, "not list its tools"),
        ({"command": [sys.executable, ODD, "version"], "timeout_s": 60}, ServiceDownError, "cannot be reached .*1999"),
        ({"command": [sys.executable, ODD, "id"], "timeout_s": 5}, ServiceDownError, "does not answer within"),
        ({"url": "http://127.0.0.1:9/mcp"}, ServiceDownError, "cannot be reached .ConnectError"),
        (
            {"command": [sys.executable, SERVER], "only": ["sub"], "timeout_s": 60},
            ConfigError,
            "has no tools sub; it has add, refuse",
        ),
    ],
)
def test_unusable_servers_are_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error, match=message):
        build_tools([{"name": "mcp", **options}])
    for thread in set(threading.enumerate()) - before:  # nothing of the attempt stays
        thread.join(10)
        assert not thread.is_alive() or thread.name != "mcp"
