"""Health checks of the services that a run needs, and the token for our own servers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from verl.errors import ConfigError, ServiceDownError

if TYPE_CHECKING:
    import httpx2  # functions that need it import it: rewards load without

ANSWER_S = 5.0
CHECK_S = 10.0  # timeout of all health checks together
_SHOWN_CHARS = 300  # characters of a response quoted in an error
TOKEN_VARIABLE = "VERL_SERVICE_TOKEN"  # for sandbox servers, environment servers and retrievers
GATEWAYS = (502, 503, 504)  # status codes of a gateway whose service does not answer
log = logging.getLogger(__name__)


@runtime_checkable
class NeedsServices(Protocol):
    """A tool, environment factory, sandbox or reward that can check its services."""

    async def check_services(self) -> None:
        """Raises ServiceDownError within seconds, with a hint."""


async def check_services(things: Iterable[object]) -> None:
    try:
        async with asyncio.timeout(CHECK_S):
            await asyncio.gather(*(each.check_services() for each in things if isinstance(each, NeedsServices)))
    except TimeoutError as error:
        raise ServiceDownError("a service", f"health check timed out after {CHECK_S:g} s") from error


def service_token() -> str | None:
    """The token in the environment. Raises ConfigError if it is not valid in a header."""
    token = os.environ.get(TOKEN_VARIABLE)
    return checked_token(token.strip(), f"${TOKEN_VARIABLE}") if token else None


def checked_token(token: str, place: str) -> str:
    """The token. Raises ConfigError, which names only the place, if it is not valid in a header."""
    if not (token.isascii() and token.isprintable() and token) or " " in token:
        raise ConfigError(f"{place} is not a valid token: expected ASCII letters, digits, punctuation and no spaces")
    return token


def service_headers() -> dict[str, str]:
    """Headers for requests to our own servers; others ignore them."""
    token = service_token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


async def check_urls(
    service: str, urls: Sequence[str], hint: str, trust_env: bool = True, headers: Mapping[str, str] | None = None
) -> None:
    """Raises ServiceDownError if none of the URLs answers, with any content. trust_env: use the environment's proxy"""
    import httpx2

    async with httpx2.AsyncClient(timeout=ANSWER_S, trust_env=trust_env, headers=dict(headers or {})) as client:

        async def problem(url: str) -> str:
            try:
                status = (await client.get(url)).status_code
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                return f"{url}: {type(error).__name__}: {error}"
            if status == 401:
                return f"{url} returned status 401: set ${TOKEN_VARIABLE} to the token of the server"
            return f"{url} returned status {status}" if status in GATEWAYS else ""

        problems = [found for found in await asyncio.gather(*map(problem, urls)) if found]
    if len(problems) == len(urls):
        raise ServiceDownError(service, f"not reachable. {'; '.join(problems)}. {hint}")
    if problems:
        log.warning("%s: skipped while they are down: %s", service, "; ".join(problems))


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
