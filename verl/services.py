"""Services that a run needs: whether they are there, and the token that those of our own ask for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from verl.errors import ConfigError, ServiceDownError

if TYPE_CHECKING:
    import httpx2  # functions that need it import it: rewards load without

ANSWER_S = 5.0
CHECK_S = 10.0  # for a check as a whole
_SHOWN_CHARS = 300  # of what an endpoint answers
TOKEN_VARIABLE = "VERL_SERVICE_TOKEN"  # of sandbox servers, environment servers and retrievers
GATEWAYS = (502, 503, 504)  # what answers so stands before a service that does not
log = logging.getLogger(__name__)


@runtime_checkable
class NeedsServices(Protocol):
    """A tool, an environments' factory, a sandbox or a reward that can tell whether the services it needs are there."""

    async def check_services(self) -> None:
        """Raises ServiceDownError, within seconds, with the name of what does not answer and the mend."""


async def check_services(things: Iterable[object]) -> None:
    """Ask those that can tell. The loop that runs this may be another one than theirs later."""
    try:
        async with asyncio.timeout(CHECK_S):
            await asyncio.gather(*(each.check_services() for each in things if isinstance(each, NeedsServices)))
    except TimeoutError as error:
        raise ServiceDownError("a service", f"did not tell within {CHECK_S:g} s whether it is there") from error


def service_token() -> str | None:
    """The token in the environment. Raises ConfigError for what no header can hold."""
    token = os.environ.get(TOKEN_VARIABLE)
    return checked_token(token.strip(), f"${TOKEN_VARIABLE}") if token else None


def checked_token(token: str, place: str) -> str:
    """The token. Raises ConfigError, with the place but without the token, for what no header can hold."""
    if not (token.isascii() and token.isprintable() and token) or " " in token:
        raise ConfigError(f"{place} holds no token: expected ASCII letters, digits and punctuation in one word")
    return token


def service_headers() -> dict[str, str]:
    """What clients send to servers of ours; others ignore it."""
    token = service_token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


async def check_urls(
    service: str, urls: Sequence[str], hint: str, trust_env: bool = True, headers: Mapping[str, str] | None = None
) -> None:
    """Does anything answer there, whatever it says? Some may be down; raises ServiceDownError if all are.

    trust_env: whether a proxy that the environment names is used
    """
    import httpx2

    async with httpx2.AsyncClient(timeout=ANSWER_S, trust_env=trust_env, headers=dict(headers or {})) as client:

        async def problem(url: str) -> str:
            try:
                status = (await client.get(url)).status_code
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                return f"{url}: {type(error).__name__}: {error}"
            if status == 401:
                return f"{url} answers 401: it needs the token that its server was started with in ${TOKEN_VARIABLE}"
            return f"{url} answers {status}" if status in GATEWAYS else ""

        problems = [found for found in await asyncio.gather(*map(problem, urls)) if found]
    if len(problems) == len(urls):
        raise ServiceDownError(service, f"not reached. {'; '.join(problems)}. {hint}")
    if problems:
        log.warning("%s: passed over as long as they are down: %s", service, "; ".join(problems))


def completion_text(response: httpx2.Response) -> str:
    """What an OpenAI-compatible endpoint says, without the thought in front of it.

    Raises ValueError, in the endpoint's words, where that is an error, no completion, or nothing at all.
    """
    if response.is_error:
        raise ValueError(f"answers {response.status_code}: {_short(response.text)}")
    try:
        choice = response.json()["choices"][0]
        said = choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"answers no completion: {_short(response.text)}") from error
    text = said.rpartition("</think>")[2].strip() if isinstance(said, str) else ""
    if not text:
        raise ValueError(f"says nothing (finish_reason {choice.get('finish_reason')})")
    return text


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARS] or "an empty page"
