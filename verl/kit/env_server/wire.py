"""The wire format between environment server and clients: tasks, messages and results as JSON.

pydantic (de)serializes the dataclasses of verl/types.py and verl/envs/base.py directly.

    POST /create  CreateRequest -> CreateResponse  n episodes of one task
    POST /reset   EpisodeList   -> Answer ..       an observation for each, streamed as JSON lines
    POST /step    StepList      -> Answer ..       a result for each, likewise
    POST /judge   EpisodeList   -> Answer ..       a verdict for each, likewise
    POST /close   EpisodeList   -> {}              unknown episodes are ignored
    GET  /health                -> {"env": its name, "episodes": number of open ones}
"""

import json
from dataclasses import replace
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from verl.envs.base import Observation, StepResult
from verl.text import utf8
from verl.types import Message, Score, Task

MAX_ITEMS = 1024  # episodes per request; clients split larger batches


class CreateRequest(BaseModel):
    task: Task
    count: int = Field(ge=1, le=MAX_ITEMS)


class CreateResponse(BaseModel):
    episodes: list[str]


class EpisodeList(BaseModel):
    episodes: list[str] = Field(max_length=MAX_ITEMS)


class Step(BaseModel):
    episode: str
    message: Message


class StepList(BaseModel):
    """Steps of different episodes, run concurrently."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # like Python's json: a policy may write 1e999

    steps: list[Step] = Field(max_length=MAX_ITEMS)


class Verdict(BaseModel):
    """The score of an episode; None if its environment does not judge."""

    score: Score | None


class EnvFault(BaseModel):
    """An infrastructure fault: why an episode cannot continue."""

    service: str
    problem: str


class Answer(BaseModel):
    """The outcome of one item of a request: exactly one of the four."""

    model_config = ConfigDict(ser_json_inf_nan="constants")  # NaN must not become null

    position: int  # index of the item in the request
    observation: Observation | None = None
    result: StepResult | None = None
    verdict: Verdict | None = None
    fault: EnvFault | None = None

    @model_validator(mode="after")
    def _is_one_of_four(self) -> Self:
        if sum(found is not None for found in (self.observation, self.result, self.verdict, self.fault)) != 1:
            raise ValueError("an answer is an observation, a result, a verdict or a fault")
        return self


def sendable(message: Message) -> Message:
    """The message with lone surrogates replaced: a policy may call a tool with half a character ("\\ud83d")."""

    def clean(value: Any) -> Any:
        return json.loads(utf8(json.dumps(value, ensure_ascii=False)))

    calls = [replace(call, name=utf8(call.name), arguments=clean(dict(call.arguments))) for call in message.tool_calls]
    return replace(message, content=utf8(message.content), tool_calls=tuple(calls))
