"""Health checks of the services that a run needs, and the token for our own servers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from verl.errors import ConfigError, ServiceDownError

ANSWER_S = 5.0
CHECK_S = 30.0  # timeout of all health checks together: a busy machine takes long to start a sandbox or an interpreter
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
