"""OpenAI-compatible servers that a reward or a simulated user asks: a judge, another model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import ServiceDownError
from verl.host.daemon import run_async

if TYPE_CHECKING:
    import httpx2  # imported by those who ask: rewards load without

_WAITS_S = (0.0, 0.2, 1.0)  # before each attempt
_SHOWN_CHARS = 300  # characters of a response quoted in an error


@dataclass(frozen=True, slots=True)
class ChatEndpoint:
    """An OpenAI-compatible endpoint. url: as http://host:8000/v1; key_variable: environment variable with its key"""

    url: str
    model: str
    key_variable: str | None = None

    def request(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """The arguments of httpx2's `post` for a greedy completion."""
        key = os.environ.get(self.key_variable) if self.key_variable else None
        return {
            "url": f"{self.url.rstrip('/')}/chat/completions",
            "json": {"model": self.model, "messages": list(messages), "temperature": 0.0},
            "headers": {} if key is None else {"Authorization": f"Bearer {key}"},
        }

    def ask(self, messages: Sequence[Mapping[str, str]], deadline_s: float, name: str) -> str:
        """The completion, after further attempts where these may help. deadline_s: for all of them

        name: of the endpoint, for the error. Raises ServiceDownError.
        """
        return run_async(self._ask(messages, deadline_s, name))

    async def _ask(self, messages: Sequence[Mapping[str, str]], deadline_s: float, name: str) -> str:
        import httpx2

        problem = ""
        try:
            async with asyncio.timeout(deadline_s), httpx2.AsyncClient(timeout=None) as client:
                for wait_s in _WAITS_S:
                    await asyncio.sleep(wait_s)
                    try:
                        return completion_text(await client.post(**self.request(messages)))
                    except ValueError as error:
                        problem = str(error)
                    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                        problem = f"{type(error).__name__}: {error}"
        except TimeoutError:
            problem = f"did not answer within {deadline_s:g} s"
        raise ServiceDownError(name, problem)


def completion_text(response: httpx2.Response) -> str:
    """A completion without its leading thought. Raises ValueError, quoting the response, if there is no text."""
    if response.is_error:
        raise ValueError(f"returned status {response.status_code}: {_short(response.text)}")
    try:
        choice = response.json()["choices"][0]
        content = choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"returned no completion: {_short(response.text)}") from error
    text = content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""
    if not text:
        raise ValueError(f"returned an empty completion (finish_reason {choice.get('finish_reason')})")
    return text


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARS] or "an empty body"
