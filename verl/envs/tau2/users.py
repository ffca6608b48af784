"""Who the agent talks to: a script, or a language model behind an OpenAI-compatible endpoint.

Results with the scripted user are not comparable with those of tau2-bench, whose user is a language model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx

from verl.errors import ConfigError, ServiceDownError
from verl.services import check_urls
from verl.types import Message, Task

_GREETING = "Hello, how can I help you today?"
_STOP = "###STOP###"
_ATTEMPTS = 3
_ROLE = """You are a customer who talks to an agent of a {domain} company. Your situation:
{situation}

Speak as that person would, a sentence or two at a time. Tell what the agent needs to know as it is asked for; where
your situation does not say, you do not know. Do not invent anything and do not quote these lines. Say {stop} and
nothing else as soon as all you wanted is done, you were handed over to somebody else, or the agent cannot help you."""


class User(Protocol):
    """Says what the customer says."""

    async def opening(self, task: Task) -> str:
        """The first words; the same for every episode of a task."""

    async def answer(self, task: Task, said: Sequence[Message]) -> str | None:
        """What comes after `said`: messages of agent and user in turns, the agent's last. None: the user hangs up."""

    async def close(self) -> None:
        """End what it holds."""


class ScriptedUser:
    """Tells everything at once; asked something, repeats what is known and says yes; otherwise hangs up."""

    async def opening(self, task: Task) -> str:
        """All that the task knows of the user."""
        return scripted_opening(task.extra["instructions"])

    async def answer(self, task: Task, said: Sequence[Message]) -> str | None:
        """The known facts and a yes, if the agent has asked."""
        if "?" not in said[-1].content:
            return None
        known = task.extra["instructions"]["known_info"] or ""
        return f"{known}\nYes, please go ahead with what I asked for.".lstrip()

    async def close(self) -> None:
        """Holds nothing."""


class ChatUser:
    """A language model that plays the customer. Raises ServiceDownError where the endpoint does not answer."""

    def __init__(self, base_url: str, model: str, key_variable: str, timeout_s: float) -> None:
        key = os.environ.get(key_variable)
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._client = httpx.AsyncClient(
            timeout=timeout_s, headers={"Authorization": f"Bearer {key}"} if key is not None else {}
        )
        self._openings: dict[str, str] = {}

    async def opening(self, task: Task) -> str:
        """Asked for once for a task, so that all its episodes begin alike."""
        if task.id not in self._openings:
            said = await self.answer(task, [Message("assistant", _GREETING)])
            self._openings.setdefault(task.id, said or scripted_opening(task.extra["instructions"]))
        return self._openings[task.id]

    async def answer(self, task: Task, said: Sequence[Message]) -> str | None:
        """One completion, with the roles turned round: the model plays the user."""
        situation = scripted_opening(task.extra["instructions"])
        role = _ROLE.format(domain=task.extra["domain"], situation=situation, stop=_STOP)
        turned = [
            {"role": "user" if message.role == "assistant" else "assistant", "content": message.content}
            for message in said
        ]
        text = await self._complete([{"role": "system", "content": role}, *turned])
        return None if _STOP in text else text

    async def check_services(self) -> None:
        """Raises ServiceDownError where nothing answers at the endpoint."""
        await check_urls("simulated user", [self._url], "Start it, or correct user_url")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _complete(self, messages: list[dict[str, str]]) -> str:
        body = {"model": self._model, "messages": messages, "temperature": 0.0}
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                reply = await self._client.post(self._url, json=body)
                reply.raise_for_status()
                return str(reply.json()["choices"][0]["message"]["content"])
            except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
                if attempt == _ATTEMPTS:
                    raise ServiceDownError(f"simulated user at {self._url}", problem) from error
        raise AssertionError("unreachable")


def build_user(user: str, user_url: str, user_model: str, user_key_variable: str, user_timeout_s: float) -> User:
    """The user called `user`. Raises ConfigError for an unknown one, or a chat user without endpoint and model."""
    if user == "scripted":
        return ScriptedUser()
    if user != "chat":
        raise ConfigError(f"environment 'tau2': user must be scripted or chat, not {user!r}")
    if not user_url or not user_model:
        raise ConfigError("environment 'tau2': user=chat needs user_url (as http://host:8000/v1) and user_model")
    return ChatUser(user_url, user_model, user_key_variable, user_timeout_s)


def scripted_opening(instructions: Mapping[str, Any]) -> str:
    """Reason, known facts and wishes, as the task words them (they address the user as `you`)."""
    parts = (instructions["reason_for_call"], instructions["known_info"], instructions["task_instructions"])
    return "My case, as it was written down for me:\n" + "\n".join(part.strip() for part in parts if part)
