"""What an environment server and its clients send each other: the JSON forms of tasks, messages and results.

pydantic reads and writes the dataclasses of verl/types.py and verl/envs/base.py as they are.

    POST /create  CreateRequest -> CreateReply     n episodes of one task
    POST /reset   EpisodeList   -> Answer ..       an observation for each: a line of JSON as soon as it is there
    POST /step    StepList      -> Answer ..       a result for each, in the same way
    POST /judge   EpisodeList   -> Answer ..       a verdict for each, in the same way
    POST /close   EpisodeList   -> Closed
    GET  /health                -> Health
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl.envs.base import Observation, StepResult
from verl.envs.tools.text import utf8
from verl.types import Message, Score, Task

MAX_ITEMS = 1024  # episodes in one request; clients send more in several


class CreateRequest(BaseModel):
    """So many episodes of one task."""

    task: Task
    count: int = Field(ge=1, le=MAX_ITEMS)


class CreateResponse(BaseModel):
    """Their names."""

    episodes: list[str]


class EpisodeList(BaseModel):
    """Episodes by name."""

    episodes: list[str] = Field(max_length=MAX_ITEMS)


class Step(BaseModel):
    """What the policy says in one episode."""

    episode: str
    message: Message


class StepList(BaseModel):
    """Steps of different episodes, taken side by side."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # as Python's json: a policy may write 1e999

    steps: list[Step] = Field(max_length=MAX_ITEMS)


class Verdict(BaseModel):
    """The score of an episode; None where its environment does not judge."""

    score: Score | None


class Fault(BaseModel):
    """Why an episode cannot go on: something is broken, and the policy is not to blame."""

    service: str
    problem: str


class Answer(BaseModel):
    """What came of one item of a request: exactly one of the four."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # a number that is none must not become null

    position: int  # of the item in the request
    observation: Observation | None = None
    result: StepResult | None = None
    verdict: Verdict | None = None
    fault: Fault | None = None

    @model_validator(mode="after")
    def _is_one_of_four(self) -> Self:
        if sum(found is not None for found in (self.observation, self.result, self.verdict, self.fault)) != 1:
            raise ValueError("an answer is an observation, a result, a verdict or a fault")
        return self


class Closed(BaseModel):
    """They are closed, if they were open."""


class Health(BaseModel):
    """That the server is there, what it serves and how many episodes are open."""

    env: str
    episodes: int


def sendable(message: Message) -> Message:
    """The message as UTF-8 can hold it: a policy may call a tool with half of a character ("\\ud83d")."""

    def clean(value: Any) -> Any:
        return json.loads(utf8(json.dumps(value, ensure_ascii=False)))

    calls = tuple(
        replace(call, name=utf8(call.name), arguments=clean(dict(call.arguments))) for call in message.tool_calls
    )
    return replace(message, content=utf8(message.content), tool_calls=calls)
