"""Our environments over OpenEnv's wire: episodes, errors and limits; slow tests use the official client."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketTestSession
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.conftest import ROOT
from tests.support.episodes import call, play, respond
from tests.support.foreign import foreign_python
from tests.support.service import free_port, wait_for
from toolrl.envs.openenv import server as env_server
from toolrl.envs.openenv.server import build_app
from verl.envs.registry import build_env_factory, build_tasks
from verl.host.services import TOKEN_VARIABLE
from verl.types import Message

COUNT = 4
OFFICIAL = Path(__file__).with_name("requirements.txt")


@contextmanager
def connected(client: TestClient, path: str = "/ws") -> Iterator[WebSocketTestSession]:
    """A session that its client closes at the end."""
    with client.websocket_connect(path) as socket:
        yield socket
        socket.send_json({"type": "close"})
        assert socket.receive()["type"] == "websocket.close"


@contextmanager
def session(env: str = "shop") -> Iterator[WebSocketTestSession]:
    tasks = build_tasks("shop", {"count": COUNT}) if env == "shop" else []
    with TestClient(build_app(env, build_env_factory(env), tasks, 60.0, 8)) as client, connected(client) as socket:
        yield socket


def ask(socket: WebSocketTestSession, type: str, data: dict[str, Any] | None = None) -> Any:
    socket.send_json({"type": type, **({} if data is None else {"data": data})})
    return socket.receive_json()


def as_action(message: Message) -> dict[str, Any]:
    calls = [{"name": each.name, "arguments": dict(each.arguments)} for each in message.tool_calls]
    return {"content": message.content, "tool_calls": calls}


def buying(index: int) -> list[Message]:
    answer = json.loads(build_tasks("shop", {"count": COUNT})[index].answer)
    bought = [call("set_quantity", product_id=id, quantity=number) for id, number in answer.items()]
    return [call("list_products"), *bought, call("checkout"), respond()]


def test_an_episode_is_the_local_one() -> None:
    (*_, task) = build_tasks("shop", {"count": COUNT})
    messages = buying(COUNT - 1)
    local = asyncio.run(play(build_env_factory("shop")(task), messages))
    with session() as socket:
        opening = ask(socket, "reset", {"index": COUNT - 1})["data"]
        assert opening["observation"]["messages"] == [{"role": m.role, "content": m.content} for m in task.prompt]
        names = ["list_products", "get_product", "set_quantity", "checkout"]
        assert [tool["name"] for tool in opening["observation"]["tools"]] == names
        assert (opening["reward"], opening["done"]) == (None, False)
        for message, expected in zip(messages, local, strict=True):
            found = ask(socket, "step", as_action(message))["data"]
            shown = [(each["role"], each["content"], each["name"]) for each in found["observation"]["messages"]]
            assert shown == [(each.role, each.content, each.tool) for each in expected.messages]
            assert found["done"] == expected.done
            assert found["reward"] == (1.0 if expected.done else None)
        state = ask(socket, "state")["data"]
        assert state["task_id"] == task.id and state["step_count"] == len(messages)


def test_mcp_actions_are_calls() -> None:
    with session() as socket:
        ask(socket, "reset", {"index": 0})
        listed = ask(socket, "step", {"type": "list_tools"})["data"]["observation"]["tools"]
        assert listed[1]["name"] == "get_product" and "product_id" in listed[1]["input_schema"]["properties"]
        for message in buying(0)[:-1]:
            (made,) = message.tool_calls
            action = {"type": "call_tool", "tool_name": made.name, "arguments": dict(made.arguments)}
            found = ask(socket, "step", action)["data"]["observation"]
            assert found["tool_name"] == made.name and found["error"] is None and found["result"]
        assert ask(socket, "step", {"content": "Done."})["data"] == {
            "observation": {"messages": []},
            "reward": 1.0,
            "done": True,
        }


def rpc(client: TestClient, method: str, **params: Any) -> Any:
    answer = client.post("/mcp", json={"jsonrpc": "2.0", "id": 7, "method": method, "params": params}).json()
    assert answer["jsonrpc"] == "2.0" and answer["id"] == 7
    return answer.get("result") or answer["error"]


@contextmanager
def shop(max_sessions: int = 8, idle_s: float = 60.0) -> Iterator[TestClient]:
    tasks = build_tasks("shop", {"count": COUNT})
    with TestClient(build_app("shop", build_env_factory("shop"), tasks, idle_s, max_sessions)) as client:
        yield client


def test_a_session_over_http_is_that_of_its_websocket() -> None:
    with shop() as client:
        id = rpc(client, "openenv/session/create")["session_id"]
        with connected(client, f"/ws?session_id={id}") as socket:
            assert "reset comes first" in rpc(client, "tools/list", session_id=id)["message"]
            ask(socket, "reset", {"index": 0})
            listed = rpc(client, "tools/list", session_id=id)["tools"]
            assert listed[1]["name"] == "get_product" and "product_id" in listed[1]["inputSchema"]["properties"]
            for message in buying(0)[:-1]:
                (made,) = message.tool_calls
                called = rpc(client, "tools/call", session_id=id, name=made.name, arguments=dict(made.arguments))
                assert called["data"] == called["content"][0]["text"] and not called["isError"]
                assert called["_meta"] == {"reward": None, "done": False}
            assert ask(socket, "step", {"content": "Done."})["data"]["reward"] == 1.0
            assert rpc(client, "openenv/session/close", session_id=id)["closing"] is True
        assert client.get("/health").json()["sessions"] == 0
        assert "does not exist" in rpc(client, "tools/list", session_id=id)["message"]


def test_a_session_over_http_ends_by_its_id() -> None:
    with shop(max_sessions=1) as client:
        id = rpc(client, "openenv/session/create")["session_id"]
        full = rpc(client, "openenv/session/create")
        assert full["code"] == -32000 and "--max-episodes=1" in full["message"]
        assert rpc(client, "openenv/session/close", session_id=id)["closed"] is True
        assert "session_id" in rpc(client, "openenv/session/create")


def test_a_session_over_http_ends_when_it_is_idle() -> None:
    with shop(idle_s=0.4) as client:
        rpc(client, "openenv/session/create")
        for _ in range(100):
            if client.get("/health").json()["sessions"] == 0:
                return
            time.sleep(0.05)
        raise AssertionError("an idle session stays open")


def test_one_websocket_attaches_to_a_session() -> None:
    with shop() as client:
        id = rpc(client, "openenv/session/create")["session_id"]
        with connected(client, f"/ws?session_id={id}") as socket:
            for other, problem in ((id, "has a WebSocket already"), ("unknown", "does not exist")):
                with client.websocket_connect(f"/ws?session_id={other}") as refused:
                    assert problem in refused.receive_json()["data"]["message"]
            asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            ask(socket, "reset")
            assert len(ask(socket, "mcp", asked)["data"]["result"]["tools"]) == 4


@pytest.mark.parametrize(
    ("method", "params", "code", "problem"),
    [
        ("fly", {}, -32601, "'fly'"),
        ("tools/call", {}, -32602, "tool_name"),
        ("tools/call", {"name": "list_products", "args": {}}, -32602, "unknown args"),
        ("tools/call", {"name": "list_products", "arguments": 3}, -32602, "arguments"),
        ("tools/list", {"session_id": None}, -32602, "openenv/session/create"),
    ],
)
def test_a_bad_rpc_is_an_error(method: str, params: dict[str, Any], code: int, problem: str) -> None:
    with shop() as client:
        id = rpc(client, "openenv/session/create")["session_id"]
        found = rpc(client, method, **{"session_id": id, **params})
        assert found["code"] == code and problem in found["message"]
        assert client.post("/mcp", json=[1]).status_code == 422
        as_json, listing = {"content-type": "application/json"}, '{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'
        assert client.post("/mcp", content="{", headers=as_json).status_code == 422
        plain = client.post("/mcp", content=listing, headers={"content-type": "text/plain"})
        assert plain.status_code == 422, "a page of another site may send this without permission"


def test_resets_select_tasks() -> None:
    tasks = build_tasks("shop", {"count": COUNT})
    with session() as socket:

        def chosen(data: dict[str, Any]) -> str:
            ask(socket, "reset", data)
            return str(ask(socket, "state")["data"]["task_id"])

        assert [chosen({}) for _ in range(COUNT + 1)] == [task.id for task in (*tasks, tasks[0])]
        assert chosen({"index": 2}) == chosen({"seed": COUNT + 2}) == tasks[2].id
        assert chosen({}) == tasks[1].id  # those did not advance it
        assert "indices are 0 to 3" in ask(socket, "reset", {"index": COUNT})["data"]["message"]
        assert "select the task" in ask(socket, "reset", {"index": 0, "seed": 1})["data"]["message"]
        ask(socket, "reset", {"episode_id": "mine"})
        assert ask(socket, "state")["data"]["episode_id"] == "mine"


def test_a_client_may_send_its_own_row() -> None:
    row = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"ground_truth": "4"},
    }
    with session("single_turn") as socket:
        assert "--data" in ask(socket, "reset")["data"]["message"]
        opening = ask(socket, "reset", {"row": row})["data"]["observation"]
        assert opening["messages"] == row["prompt"] and opening["tools"] == []
        assert ask(socket, "step", {"content": "4"})["data"]["done"] is True
        refused = ask(socket, "reset", {"row": {"prompt": "x"}})
        assert refused["type"] == "error" and refused["data"]["message"].startswith("row: ")


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        ("{", "INVALID_JSON", "invalid JSON"),
        ("[1]", "VALIDATION_ERROR", "expected an object"),
        ('{"type": "step", "data": []}', "VALIDATION_ERROR", "expected an object"),
        ('{"type": "fly"}', "UNKNOWN_TYPE", "'fly'"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR", "seed"),
        ('{"type": "reset", "data": {"sead": 1}}', "VALIDATION_ERROR", "sead"),
        ('{"type": "step", "data": {"content": 3}}', "VALIDATION_ERROR", "content"),
        ('{"type": "step", "data": {"type": "call_tool"}}', "VALIDATION_ERROR", "tool_name"),
        ('{"type": "step", "data": {"tool_name": "x"}}', "VALIDATION_ERROR", "tool_name"),
        ('{"type": "step", "data": {"type": "list_tools", "content": "x"}}', "VALIDATION_ERROR", "content"),
        ('{"type": "step", "data": {"arguments": {"a": 1}}}', "VALIDATION_ERROR", "arguments"),
        (f'{{"type": "step", "data": {{"a": [{"1," * 250_000}1]}}}}', "VALIDATION_ERROR", "more than 250000 values"),
    ],
)
def test_a_bad_message_is_an_error_and_the_session_goes_on(text: str, code: str, problem: str) -> None:
    with session() as socket:
        ask(socket, "reset", {"index": 0})
        socket.send_text(text)
        found = socket.receive_json()
        assert found["type"] == "error" and found["data"]["code"] == code and problem in found["data"]["message"]
        assert ask(socket, "step", as_action(call("list_products")))["type"] == "observation"


def test_steps_need_an_episode() -> None:
    with session() as socket:
        assert "reset comes first" in ask(socket, "step", {"content": "hi"})["data"]["message"]
        ask(socket, "reset")
        assert ask(socket, "step", {"content": "bye"})["data"]["done"] is True
        assert "has ended" in ask(socket, "step", {"content": "more"})["data"]["message"]


ODD = """
from pathlib import Path

from verl.envs.base import Observation, StepResult
from verl.types import Message, Score


class Odd:
    def __init__(self, task, log):
        self.task, self.log = task, Path(log)

    async def reset(self):
        return Observation(self.task.prompt)

    async def step(self, message):
        if message.content == "raise":
            raise RuntimeError("odd")
        if message.content == "wait":
            self.note("waits")
            try:
                await __import__("asyncio").sleep(600)
            finally:
                self.note("cancelled")
        return StepResult((Message("user", "go on"),), done=message.content == "end", reward=0.25)

    async def judge(self):
        return Score(2.0, {})

    async def close(self):
        self.note("closed")

    def note(self, text):
        with self.log.open("a") as file:
            file.write(text + " ")
"""
ROW = {"data_source": "odd", "prompt": [{"role": "user", "content": "Go."}], "reward_model": {"ground_truth": "-"}}


@contextmanager
def server(*arguments: str, token: str | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """host:port of an OpenEnv server of ours in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "toolrl.envs.openenv.server", "--port", str(port), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    environment |= {} if token is None else {TOKEN_VARIABLE: token}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def test_rewards_add_up_to_the_return_and_what_an_environment_raises_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    log = tmp_path / "log"
    argv = ("--env", f"{tmp_path}/odd.py:Odd", "--option", f"log={log}", "--data", f"{tmp_path}/rows.jsonl")
    with server(*argv) as (place, _):

        def step(text: str) -> Any:
            socket.send(json.dumps({"type": "step", "data": {"content": text}}))
            return json.loads(socket.recv(timeout=30))["data"]

        with connect(f"ws://{place}/ws") as socket:
            socket.send('{"type": "reset"}')
            assert json.loads(socket.recv(timeout=30))["data"]["observation"]["messages"] == ROW["prompt"]
            assert [step("a")["reward"], step("b")["reward"], step("end")["reward"]] == [0.25, 0.25, 2.25]
            socket.send('{"type": "reset"}')
            socket.recv(timeout=30)
            assert step("raise") == {"message": "RuntimeError: odd", "code": "EXECUTION_ERROR"}
            socket.send('{"type": "step", "data": {"content": "wait"}}')
            _until(log, "closed waits ")
        _until(log, "closed waits cancelled closed ")  # the client left in the middle of a step


def test_an_idle_websocket_is_closed_and_so_is_its_environment(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    log = tmp_path / "log"
    argv = ("--env", f"{tmp_path}/odd.py:Odd", "--option", f"log={log}", "--data", f"{tmp_path}/rows.jsonl")
    with server(*argv, "--idle-s", "2") as (place, _):
        with connect(f"ws://{place}/ws") as idle:
            idle.send('{"type": "reset"}')
            idle.recv(timeout=30)
            assert not list(idle)  # ends when the server closes it
        _until(log, "closed ")


def _until(log: Path, text: str) -> None:
    for _ in range(300):
        if log.exists() and log.read_text() == text:
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_a_full_server_reports_that_it_is_full() -> None:
    client = TestClient(build_app("shop", build_env_factory("shop"), build_tasks("shop", {"count": 1}), 60.0, 1))
    with client, connected(client) as first:
        ask(first, "reset")
        with client.websocket_connect("/ws") as second:
            assert second.receive_json()["data"]["code"] == "CAPACITY_REACHED"
            assert second.receive()["type"] == "websocket.close"
        assert client.get("/health").json() == {"status": "healthy", "sessions": 1}


def test_the_server_describes_itself() -> None:
    with shop() as client:
        assert "tool_calls" in client.get("/schema").json()["action"]["properties"]
        assert client.get("/metadata").json()["name"] == "shop"


def test_a_token_is_needed_and_pages_of_others_may_not_connect() -> None:
    with server("--env", "shop", token="secret") as (place, _):

        def status(url: str, **headers: str) -> int:
            try:
                with connect(url, additional_headers=headers, proxy=None):
                    return 101
            except InvalidStatus as error:
                return error.response.status_code

        basic = base64.b64encode(b"any:secret").decode()
        assert status(f"ws://{place}/ws") == 401
        assert status(f"ws://{place}/ws", Authorization="Bearer wrong") == 401
        assert status(f"ws://any:wrong@{place}/ws") == 401
        assert status(f"ws://{place}/ws", Authorization="Bearer secret") == 101
        assert status(f"ws://{place}/ws", Authorization=f"Basic {basic}") == 101
        assert status(f"ws://any:secret@{place}/ws") == 101
        bearer = {"Authorization": "Bearer secret"}
        assert status(f"ws://{place}/ws", Origin="http://evil.example", **bearer) == 403
        assert status(f"ws://{place}/ws", Origin=f"http://{place}", **bearer) == 101
        assert status(f"ws://{place}/ws", Host="evil.example", **bearer) == 400


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--env", "shop", "--data", "x.jsonl"], "no such file"),
        (["--env", "single_turn", "--task-option", "a=1"], "no bundled tasks"),
        (["--env", "shop", "--task-option", "a=1"], "no option 'a'"),
    ],
)
def test_a_server_that_cannot_start_prints_the_reason(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert env_server.main(argv) == 2
    assert problem in capsys.readouterr().err


OFFICIAL_CLIENT = """
import asyncio, json, sys
from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction

async def main(url, answers):
    async with GenericEnvClient(base_url=url) as env:
        for index, answer in enumerate(answers):
            opening = await env.reset(index=index)
            assert opening.observation["messages"][-1]["role"] == "user" and not opening.done
            bought = [{"product_id": id, "quantity": n} for id, n in answer.items()]
            calls = [{"name": "set_quantity", "arguments": each} for each in bought]
            result = await env.step({"content": "", "tool_calls": calls + [{"name": "checkout"}]})
            assert len(result.observation["messages"]) == len(calls) + 1 and result.reward is None
            result = await env.step({"content": "Done."})
            assert (result.reward, result.done) == (1.0, True), result
        assert (await env.state())["step_count"] == 2
        try:
            await env.step({"content": "again"})
        except RuntimeError as error:
            assert "has ended" in str(error)
        else:
            raise AssertionError
    async with GenericEnvClient(base_url=url) as env:
        await env.reset(seed=1)
        listed = await env.step(ListToolsAction())
        assert listed.observation["tools"][0]["name"] == "list_products"
        for id, n in answers[1].items():
            await env.step(CallToolAction(tool_name="set_quantity", arguments={"product_id": id, "quantity": n}))
        shown = await env.step(CallToolAction(tool_name="list_products"))
        assert shown.observation["tool_name"] == "list_products" and "p" in shown.observation["result"]
    assert GenericEnvClient(base_url=url).sync().reset().reward is None
    print("all", len(answers))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


OFFICIAL_TOOL_CLIENT = """
import asyncio, json, sys
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient

async def main(url, answers):
    for index, answer in enumerate(answers):
        async with MCPToolClient(base_url=url) as env:
            opening = await env.reset(index=index)
            assert opening.observation.metadata["messages"][-1]["role"] == "user"
            tools = await env.list_tools()
            assert tools[0].name == "list_products" and tools[1].input_schema["properties"], tools
            shown = await env.call_tool("list_products")
            assert "p" in shown, shown
            for id, n in answer.items():
                await env.call_tool("set_quantity", product_id=id, quantity=n)
            result = await env.step(CallToolAction(tool_name="checkout", arguments={}))
            assert not result.done and (await env.state()).step_count == len(answer) + 2
            try:
                await env.call_tool("checkout", **{"session": 1})
            except RuntimeError:
                raise AssertionError("wrong arguments are the policy's")
    print("all", len(answers))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", [OFFICIAL_CLIENT, OFFICIAL_TOOL_CLIENT])
def test_the_official_clients_play_our_environments(source: str) -> None:
    python = foreign_python(OFFICIAL)
    answers = json.dumps([json.loads(task.answer) for task in build_tasks("shop", {"count": COUNT})])
    arguments = ("--env", "shop", "--task-option", f"count={COUNT}")
    with server(*arguments, token="secret") as (place, _):
        command = [str(python), "-c", source, f"http://any:secret@{place}", answers]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.stdout == f"all {COUNT}\n", done.stderr
