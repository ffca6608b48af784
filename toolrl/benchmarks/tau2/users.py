"""Simulated users: a script, or a language model behind an OpenAI-compatible endpoint, as in tau2-bench."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx2

from toolrl.servers.chat_endpoint import ChatEndpoint, completion_text
from verl.envs.clock import paused
from verl.errors import ConfigError, ServiceDownError
from verl.types import Message, Task

_GREETING = "Hello, how can I help you today?"
_STOP = "###STOP###"
_PAUSES_S = (0.5, 2.0)  # before each retry
_CHECK_S = 8.0  # limit of the startup check, below that of all service checks together
_ROLE = (
    "You are a customer who talks to an agent of a {domain} company. Your situation:\n"
    "{situation}\n\n"
    "Speak as that person would, a sentence or two at a time. Tell what the agent needs to know"  # words: allowed
    " as it is asked for; where\nyour situation does not say, you do not know. Do not invent"  # words: allowed
    " anything and do not quote these lines. Say {stop} and\nnothing else as soon as all you"  # words: allowed
    " wanted is done, you were handed over to somebody else, or the agent cannot help you."  # words: allowed
)
_log = logging.getLogger(__name__)


class User(Protocol):
    """The customer's side of a conversation."""

    async def opening(self, task: Task) -> str:
        """The first message; the same for every episode of a task."""

    async def answer(self, task: Task, dialogue: Sequence[Message]) -> str | None:
        """The next user message after `dialogue`, which ends with the agent's. None: the user hangs up."""

    async def close(self) -> None:
        return


class ScriptedUser(User):
    """Gives all information at once; answers a question with the known facts and a yes; else hangs up."""

    async def opening(self, task: Task) -> str:
        return scripted_opening(task.extra["instructions"])

    async def answer(self, task: Task, dialogue: Sequence[Message]) -> str | None:
        if "?" not in dialogue[-1].content:
            return None
        known = task.extra["instructions"]["known_info"] or ""
        return f"{known}\nYes, please go ahead with what I asked for.".lstrip()


class ChatUser:
    """A language model as the customer. Raises ServiceDownError without an answer, or if it hangs up at once."""

    def __init__(self, base_url: str, model: str, key_variable: str, timeout_s: float) -> None:
        self._endpoint = ChatEndpoint(base_url, model, key_variable)
        self._client = httpx2.AsyncClient(timeout=timeout_s)
        self._openings: dict[str, str] = {}

    async def opening(self, task: Task) -> str:
        """Requested once per task, so that all its episodes start alike."""
        if task.id not in self._openings:
            first = await self.answer(task, [Message("assistant", _GREETING)])
            if first is None:
                raise self._down(f"hangs up on {_GREETING!r}: it does not play its part")
            self._openings.setdefault(task.id, first)
        return self._openings[task.id]

    async def answer(self, task: Task, dialogue: Sequence[Message]) -> str | None:
        """One completion with swapped roles: the model plays the user."""
        situation = _situation(task.extra["instructions"])
        role = _ROLE.format(domain=task.extra["domain"], situation=situation, stop=_STOP)
        turned = [
            {"role": "user" if message.role == "assistant" else "assistant", "content": message.content}
            for message in dialogue
        ]
        text = await self._complete([{"role": "system", "content": role}, *turned])
        return None if _STOP in text else text

    async def check_services(self) -> None:
        """Requests one completion. Raises ServiceDownError if that fails; a timeout is only logged."""
        hint = "Start it, or correct user_url, user_model and user_key_variable"
        try:
            await self._ask([{"role": "user", "content": _GREETING}], _CHECK_S)
        except httpx2.ReadTimeout:
            _log.warning("simulated user at %s: no answer within %g s", self._endpoint.url, _CHECK_S)
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            raise self._down(f"{_describe(error)}. {hint}") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _complete(self, messages: list[dict[str, str]]) -> str:
        problem = ""
        for pause_s in (0.0, *_PAUSES_S):
            try:
                async with paused():  # the endpoint has its own timeout
                    await asyncio.sleep(pause_s)
                    return await self._ask(messages)
            except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
                problem = _describe(error)
        raise self._down(problem)

    async def _ask(self, messages: list[dict[str, str]], timeout_s: float | None = None) -> str:
        """timeout_s: overrides the client's"""
        timeout = self._client.timeout if timeout_s is None else timeout_s
        return completion_text(await self._client.post(**self._endpoint.request(messages), timeout=timeout))

    def _down(self, problem: str) -> ServiceDownError:
        return ServiceDownError(f"simulated user at {self._endpoint.url}", problem)


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def build_user(user: str, user_url: str, user_model: str, user_key_variable: str, user_timeout_s: float) -> User:
    """Raises ConfigError for an unknown user, a chat user without endpoint and model, a scripted one with either."""
    if user == "scripted":
        if user_url or user_model:
            raise ConfigError("environment 'tau2': user_url and user_model are of user=chat, but user is scripted")
        return ScriptedUser()
    if user != "chat":
        raise ConfigError(f"environment 'tau2': user must be scripted or chat, not {user!r}")
    if not user_url or not user_model:
        raise ConfigError("environment 'tau2': user=chat needs user_url (as http://host:8000/v1) and user_model")
    return ChatUser(user_url, user_model, user_key_variable, user_timeout_s)


def scripted_opening(instructions: Mapping[str, Any]) -> str:
    """Reason, known facts and wishes, verbatim from the task (which addresses the user as `you`)."""
    return f"My case, as it was written down for me:\n{_situation(instructions)}"


def _situation(instructions: Mapping[str, Any]) -> str:
    parts = (instructions["reason_for_call"], instructions["known_info"], instructions["task_instructions"])
    return "\n".join(part.strip() for part in parts if part)
