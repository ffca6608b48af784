"""Customer service: an agent with a policy and tools talks to a user and must leave the database in the right state.

The reward is tau2-bench's for these domains, without LLM judges: 1 if the database equals the one after the gold
actions and the agent has communicated all required information, else 0.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolrl.benchmarks.tau2.airline import AirlineTools
from toolrl.benchmarks.tau2.common import ServiceTools
from toolrl.benchmarks.tau2.database import Database
from toolrl.benchmarks.tau2.retail import RetailTools
from toolrl.benchmarks.tau2.tasks import GoldOutcome, Tau2Extra, read_database
from toolrl.benchmarks.tau2.users import User, build_user, scripted_opening
from verl.envs.base import Env, EnvFactory, Observation, StepResult
from verl.envs.rows import check_row
from verl.envs.tools.base import ToolError
from verl.envs.tools.functions import Toolbox, answer_calls
from verl.errors import ConfigError
from verl.formats.toolrl_text import shown_text
from verl.host.services import check_services
from verl.types import Message, Score, Task, ToolCall

_TOOLS: dict[str, type[ServiceTools]] = {"retail": RetailTools, "airline": AirlineTools}


@dataclass(frozen=True, slots=True)
class Domain:
    """Shared by the episodes of a domain. `base` is read-only."""

    tools: type[ServiceTools]
    toolbox: Toolbox
    base: dict[str, dict[str, Any]]

    def open(self) -> tuple[Database, ServiceTools]:
        database = Database(self.base)
        return database, self.tools(database)


class Tau2Env(Env):
    """One conversation. Score.parts: db and communicate, each 1 or 0."""

    def __init__(self, task: Task, domain: Domain, user: User, max_user_turns: int) -> None:
        self._task, self._domain, self._user, self._max_user_turns = task, domain, user, max_user_turns
        self._database, self._tools = domain.open()
        self._dialogue: list[Message] = []

    async def reset(self) -> Observation:
        opening = Message("user", await self._user.opening(self._task))
        self._dialogue = [opening]
        return Observation((self._task.prompt[0], opening), tuple(self._domain.toolbox.specs.values()))

    async def step(self, message: Message) -> StepResult:
        """Answers calls; a message without calls goes to the user, who answers or hangs up."""
        if message.tool_calls:
            return answer_calls(message.tool_calls, lambda call: self._domain.toolbox.call(self._tools, call))
        self._dialogue.append(replace(message, content=shown_text(message.content)))
        if len(self._dialogue) // 2 >= self._max_user_turns:
            return StepResult(done=True)
        answer = await self._user.answer(self._task, self._dialogue)
        if answer is None:
            return StepResult(done=True)
        self._dialogue.append(Message("user", answer))
        return StepResult((self._dialogue[-1],))

    async def judge(self) -> Score:
        """Scores the current database and dialogue, also if a limit truncated the conversation."""
        gold = json.loads(self._task.answer)
        expected, _ = run_actions(self._domain, [ToolCall(**action) for action in gold["actions"]])
        sent = [_plain(message.content) for message in self._dialogue if message.role == "assistant"]
        parts = {
            "db": float(self._database.changes() == expected.changes()),
            "communicate": float(all(any(_plain(info) in text for text in sent) for info in gold["communicate"])),
        }
        return Score(parts["db"] * parts["communicate"], parts)


class Tau2Factory(EnvFactory):
    """Creates conversations over the data in the folder `data`.

    user:               scripted, or chat: an OpenAI-compatible endpoint at `user_url` that serves `user_model`
    user_key_variable:  the environment variable with the endpoint's key, if it needs one
    max_user_turns:     the user hangs up after this many agent messages
    """

    def __init__(
        self,
        data: str,
        user: str = "scripted",
        user_url: str = "",
        user_model: str = "",
        user_key_variable: str = "OPENAI_API_KEY",
        user_timeout_s: float = 60.0,
        max_user_turns: int = 10,
    ) -> None:
        self._data, self._max_user_turns = data, max_user_turns
        self._user = build_user(user, user_url, user_model, user_key_variable, user_timeout_s)
        if not any((Path(data) / name).is_dir() for name in _TOOLS):
            raise ConfigError(f"environment 'tau2': data={data!r} has no folder {' or '.join(_TOOLS)}")
        self._domains: dict[str, Domain] = {}

    def __call__(self, task: Task) -> Tau2Env:
        return Tau2Env(task, self.domain(task.extra["domain"]), self._user, self._max_user_turns)

    def check_task(self, task: Task) -> None:
        """Raises DataError for a task of another environment, ConfigError for a domain without data."""
        check_row("tau2", task, Tau2Extra, GoldOutcome)
        self.domain(task.extra["domain"])

    def initial_observation(self, task: Task) -> Observation:
        """The initial observation with the scripted user; a chat user's first message is not known in advance."""
        opening = Message("user", scripted_opening(task.extra["instructions"]))
        return Observation((task.prompt[0], opening), tuple(self.domain(task.extra["domain"]).toolbox.specs.values()))

    def domain(self, name: str) -> Domain:
        if name not in self._domains:
            tools = _TOOLS[name]
            self._domains[name] = Domain(tools, Toolbox.of(tools), read_database(self._data, name))
        return self._domains[name]

    async def check_services(self) -> None:
        await check_services([self._user])

    async def close(self) -> None:
        await self._user.close()


def run_actions(domain: Domain, actions: list[ToolCall]) -> tuple[Database, list[str]]:
    """The database after these actions, and the errors of those that failed (some gold actions do)."""
    database, tools = domain.open()
    failures = []
    for action in actions:
        try:
            domain.toolbox.call(tools, action)
        except ToolError as error:
            failures.append(str(error))
    return database, failures


def _plain(text: str) -> str:
    """Normalize text for comparison as tau2-bench does: lower case, no thousands separators."""
    return text.lower().replace(",", "")
