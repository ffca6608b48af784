"""Environments behind OpenEnv servers (wire.py), for our policies: `env.name=openenv env.options.url=http://host:8000`.

An episode is a session. The tools are those of the environment's MCP server or, of an environment without one, the tool
`act`, whose parameters are the fields of an action. With `text_field` there is no tool: each message of the policy is
an action. `reset` gets the row's extra_info and, if that has no seed, one from the row's id: all rollouts of a prompt
start alike.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from toolrl.envs.openenv.sessions import Answer, Connection, SessionPool
from toolrl.envs.openenv.wire import ProtocolError
from toolrl.servers.endpoints import Endpoint
from toolrl.servers.messages import sendable
from verl.envs.base import Observation, StepResult
from verl.envs.tools.base import ToolError
from verl.envs.tools.functions import Toolbox
from verl.envs.tools.runner import MAX_CHARS
from verl.errors import ConfigError, ServiceDownError
from verl.text import as_text, shortened
from verl.types import Message, Score, Task, ToolCall, ToolSpec, ToolStatus, ToolUse

_log = logging.getLogger(__name__)
ACT = "act"  # the tool of environments without an MCP server
_WARN_AFTER = 64
_MCP_FIELDS = {"type", "tool_name", "arguments", "metadata"}


class OpenEnvFactory(SessionPool):
    """Episodes on OpenEnv servers.

    url:          of the server, or of several that share the tasks
    text_field:   the field of an action that is the policy's text; default: the policy calls tools
    shown_field:  the field of observations that the policy sees; default: all, as JSON if there are several
    score:        of the rewards of the steps: their sum, the last, or "turns": each is a turn reward; "none": no score
    max_sessions: open at a time; further episodes wait, also where the server has fewer
    timeout_s:    limit per request, and so for the slowest step
    """

    def __init__(
        self,
        url: str | Sequence[str],
        text_field: str | None = None,
        shown_field: str | None = None,
        score: str = "sum",
        max_sessions: int = 64,
        timeout_s: float = 60.0,
        health_timeout_s: float = 30.0,
    ) -> None:
        if score not in ("sum", "last", "turns", "none"):
            raise ConfigError(f"env.options.score={score} must be sum, last, turns or none")
        hint = "Start it, or correct env.options.url"
        super().__init__("OpenEnv server", url, hint, max_sessions, timeout_s, health_timeout_s)
        self.text_field, self.shown_field, self.score = text_field, shown_field, score
        self._unrewarded: int | None = 0  # episodes before the first reward; None after it
        self._schemas: dict[str, asyncio.Task[Mapping[str, Any]]] = {}

    def __call__(self, task: Task) -> OpenEnv:
        return OpenEnv(task, self)

    def note_reward(self, rewarded: bool) -> None:
        """Count an ended episode; many without a reward suggest an environment that gives none."""
        if rewarded:
            self._unrewarded = None
        elif self._unrewarded is not None:
            self._unrewarded += 1
            if self._unrewarded == _WARN_AFTER:
                hint = "if the environment gives none, set env.options.score=none and another reward.name"
                _log.warning("%d episodes have had no reward, and score 0: %s", _WARN_AFTER, hint)

    async def start(self, reset: Mapping[str, Any], connection: Connection) -> tuple[Answer, tuple[ToolSpec, ...]]:
        """The answer to a reset, and the tools."""
        try:
            answer = await connection.ask("reset", reset)
            return answer, () if self.text_field else await self._tools(connection)
        except ProtocolError as error:
            problem = f"reset refuses the row's extra_info: {error}"
            raise ServiceDownError(connection.endpoint.name, problem) from error

    async def _tools(self, connection: Connection) -> tuple[ToolSpec, ...]:
        action = await self._action_schema(connection.endpoint)
        fields = {name: each for name, each in action.get("properties", {}).items() if name != "metadata"}
        if set(fields) - _MCP_FIELDS and "tool_name" not in fields:
            description = action.get("description") or "Take one step in the environment."
            return (ToolSpec(ACT, description, {**action, "properties": fields}),)
        listed = (await connection.ask("step", {"type": "list_tools"})).get("observation", {}).get("tools", [])
        if not listed:
            problem = "the environment lists no tools; set text_field for one without"
            raise ServiceDownError(connection.endpoint.name, problem)
        return await _with_schemas(listed, connection)

    async def _action_schema(self, endpoint: Endpoint) -> Mapping[str, Any]:
        """Asked for once per server."""

        async def ask() -> Mapping[str, Any]:
            async with endpoint.asked(ValueError):
                response = await self.client.get(endpoint.url + "/schema", timeout=self._timeout_s)
                response.raise_for_status()
                schema: Mapping[str, Any] = response.json()["action"]
                return schema

        asked = self._schemas.get(endpoint.url)
        if asked is None or (asked.done() and asked.exception()):
            asked = self._schemas[endpoint.url] = asyncio.create_task(ask())
        return await asyncio.shield(asked)


async def _with_schemas(listed: Sequence[Answer], connection: Connection) -> tuple[ToolSpec, ...]:
    """The listed tools. openenv-core 0.3 with mcp 2 leaves out their parameters, but not in `tools/list`."""
    schemas = {each["name"]: each.get("input_schema") for each in listed}
    if not all(schemas.values()):
        answer = await connection.ask("mcp", {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1})
        for each in (answer.get("result") or {}).get("tools", []):
            schemas[each["name"]] = schemas.get(each["name"]) or each.get("inputSchema") or each.get("input_schema")
    without = {"type": "object", "properties": {}}
    return tuple(
        ToolSpec(each["name"], each.get("description") or "", schemas[each["name"]] or without) for each in listed
    )


class OpenEnv:
    """One episode. It ends when the environment is done or, with tools, with a message without a call."""

    def __init__(self, task: Task, factory: OpenEnvFactory) -> None:
        self._task, self._factory = task, factory
        self._connection: Connection | None = None
        self._toolbox = Toolbox(())
        self._rewards: list[float] = []

    async def reset(self) -> Observation:
        reset = {"seed": zlib.crc32(self._task.id.encode()), **self._task.extra}
        opened = await self._factory.begin(self._task.id, partial(self._factory.start, reset))
        self._connection, (answer, tools) = opened
        self._toolbox = Toolbox(tools)
        text = self._show(answer)
        *before, last = self._task.prompt
        content = f"{last.content}\n\n{text}" if text else last.content
        return Observation((*before, replace(last, content=content)), tools)

    async def step(self, message: Message) -> StepResult:
        message = sendable(message)
        if self._factory.text_field:
            return await self._act_by_text(message.content)
        messages, uses, rewards, done = [], [], [], not message.tool_calls
        for call in message.tool_calls:
            start, status = perf_counter(), ToolStatus.SUCCESS
            try:
                answer = await self._call(call)
                text, done = self._show(answer), bool(answer.get("done"))
                rewards += self._reward(answer)
            except (ToolError, ProtocolError) as error:
                text, status = f"Error: {error}", ToolStatus.USER_ERROR
            messages.append(Message("tool", text, tool=call.name))
            uses.append(ToolUse(call.name, status, perf_counter() - start))
            if done:
                break
        return StepResult(tuple(messages), done, tuple(uses), reward=self._turn_reward(rewards))

    async def judge(self) -> Score | None:
        """A step without a reward adds nothing. With score=none a reward function scores the episode."""
        if self._factory.score == "none":
            return None
        self._factory.note_reward(bool(self._rewards))
        if self._factory.score == "turns":
            return Score(0.0, {})  # the return is the sum of the turn rewards
        total = sum(self._rewards) if self._factory.score == "sum" else (self._rewards or [0.0])[-1]
        return Score(total, {"return": total})

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._factory.end(connection)

    async def _act_by_text(self, text: str) -> StepResult:
        assert self._factory.text_field is not None
        try:
            answer = await self._take({self._factory.text_field: text})
        except ProtocolError as error:
            return StepResult((Message("user", f"Error: {error}"),))
        done, reward = bool(answer.get("done")), self._turn_reward(self._reward(answer))
        return StepResult(() if done else (Message("user", self._show(answer)),), done, reward=reward)

    async def _call(self, call: ToolCall) -> Answer:
        """Raises ToolError or ProtocolError for wrong arguments."""
        self._toolbox.check(call)
        if call.name == ACT and list(self._toolbox.specs) == [ACT]:
            return await self._take(call.arguments)
        return await self._take({"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)})

    async def _take(self, action: Mapping[str, Any]) -> Answer:
        """Never retried: a step whose answer was lost may have been applied."""
        assert self._connection is not None, "reset comes first"
        answer = await self._connection.ask("step", action)
        if problem := answer.get("observation", {}).get("error") if "tool_name" in action else None:
            raise ToolError(problem.get("message", str(problem)) if isinstance(problem, dict) else str(problem))
        return answer

    def _reward(self, answer: Answer) -> list[float]:
        reward = answer.get("reward")
        rewards = [] if reward is None else [float(reward)]
        self._rewards += rewards
        return rewards

    def _turn_reward(self, rewards: Sequence[float]) -> float | None:
        return sum(rewards) if rewards and self._factory.score == "turns" else None

    def _show(self, answer: Answer) -> str:
        observation = answer.get("observation", {})
        if self._factory.shown_field is not None:
            shown = observation.get(self._factory.shown_field, "")
        elif "tool_name" in observation:
            shown = _result(observation.get("result"))
        else:
            empty: tuple[Any, ...] = (None, "", [], {})
            fields = {name: each for name, each in observation.items() if name != "metadata" and each not in empty}
            shown = next(iter(fields.values())) if len(fields) == 1 else fields or ""
        return shortened(as_text(shown), MAX_CHARS)


def _result(result: Any) -> Any:
    """A tool's result. FastMCP's results are objects with the value in `data`, or texts in `content`."""
    if not isinstance(result, dict) or "content" not in result:
        return result
    if result.get("data") is not None:
        return result["data"]
    return "\n".join(str(each.get("text", f"[{each.get('type')}]")) for each in result["content"])
