"""The messages of OpenEnv, as spoken by openenv 0.10 and openenv-core 0.3. One WebSocket connection is one session.

    client                                    server
    {"type": "reset", "data": {seed: ..}}     {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": the action}      likewise
    {"type": "state"}                         {"type": "state", "data": {episode_id, step_count, ..}}
    {"type": "mcp", "data": JSON-RPC}         likewise (mcp.py)
    {"type": "close"}                         closes the connection
                                              {"type": "error", "data": {message, code}}

Between our server and `env.name=remote` (remote.py) episodes have tasks of the client and whole results:

    {"type": "toolrl/start", "data": Start}   {"type": "toolrl", "data": Started}
    {"type": "toolrl/step", "data": Step}     {"type": "toolrl", "data": Stepped}
    {"type": "toolrl/judge"}                  {"type": "toolrl", "data": Verdict}

Actions and observations are objects of the environment's own; those of MCP environments are `list_tools` and
`call_tool`. Source: openenv/core/env_server/types.py, mcp_types.py and http_server.py of the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from verl.envs.base import Observation, StepResult
from verl.types import Message, Score, Task, ToolCall, ToolSpec


class ErrorCode(StrEnum):
    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"


class ProtocolError(Exception):
    """A message that cannot be answered."""

    def __init__(self, problem: str, code: ErrorCode = ErrorCode.VALIDATION_ERROR) -> None:
        super().__init__(problem)
        self.code = code


def problems_of(error: ValidationError) -> str:
    """The first problems, each with its place."""
    problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors()[:5]]
    return "; ".join(problems)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ResetData(Strict):
    """Selects the task of an episode of ours: by number, by seed (modulo the number of tasks), or the next one.

    row: a task row of the client's own, as in data files
    """

    seed: int | None = Field(default=None, ge=0)
    index: int | None = Field(default=None, ge=0)
    row: dict[str, Any] | None = None
    episode_id: str | None = Field(default=None, max_length=255)

    @model_validator(mode="after")
    def _selects_once(self) -> Self:
        if sum(each is not None for each in (self.seed, self.index, self.row)) > 1:
            raise ValueError("seed, index and row each select the task: give one of them")
        return self


class Call(Strict):
    name: str
    arguments: dict[str, Any] = {}


class Action(Strict):
    """An action in our environments: a message of the policy with its calls, or an MCP action.

    tool_name, arguments: of `call_tool`
    metadata: part of every action of OpenEnv; has no effect here
    """

    type: Literal["message", "call_tool", "list_tools"] = "message"
    content: str = ""
    tool_calls: list[Call] = []
    tool_name: str | None = None
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        if (self.tool_name is not None) != (self.type == "call_tool"):
            raise ValueError("tool_name belongs to actions of type call_tool, which need it")
        if self.arguments and self.type != "call_tool":
            raise ValueError("arguments belong to actions of type call_tool, or to the calls in tool_calls")
        if (self.content or self.tool_calls) and self.type != "message":
            raise ValueError("content and tool_calls belong to actions of type message")
        return self

    def message(self) -> Message:
        """The action as a message of the policy."""
        calls = [ToolCall(each.name, each.arguments) for each in self.tool_calls]
        if self.tool_name is not None:
            calls = [ToolCall(self.tool_name, self.arguments)]
        return Message("assistant", self.content, tuple(calls))


def as_tool(spec: ToolSpec) -> dict[str, Any]:
    """A tool in OpenEnv's layout."""
    return {"name": spec.name, "description": spec.description, "input_schema": dict(spec.parameters)}


def observed(observation: Mapping[str, Any], reward: float | None = None, done: bool = False) -> dict[str, Any]:
    return {"observation": dict(observation), "reward": reward, "done": done}


class Own(BaseModel):
    """A message with our types, which pydantic reads and writes."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # like Python's json: a policy may write 1e999


class Start(Own):
    task: Task


class Started(Own):
    observation: Observation
    judges: bool  # whether the environment has verdicts


class Step(Own):
    message: Message


class Stepped(Own):
    result: StepResult


class Verdict(Own):
    score: Score | None


def as_json(message: BaseModel) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(message.model_dump_json())
    return data
