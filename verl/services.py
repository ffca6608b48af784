"""Services that a run needs, asked at its start whether they are there; and how our own ones listen."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from verl.daemon import run_async
from verl.errors import ServiceDownError

if TYPE_CHECKING:
    import httpx2  # functions that need it import it: rewards load without

ANSWER_S = 5.0
CHECK_S = 10.0  # for a check as a whole
_SHOWN_CHARS = 300  # of what an endpoint answers
_GATEWAYS = (502, 503, 504)  # what answers so stands before a service that does not
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


async def check_urls(service: str, urls: Sequence[str], mend: str, trust_env: bool = True) -> None:
    """Does anything answer there, whatever it says? Some may be down; raises ServiceDownError if all are.

    trust_env: whether a proxy that the environment names is used
    """
    import httpx2

    async with httpx2.AsyncClient(timeout=ANSWER_S, trust_env=trust_env) as client:

        async def problem(url: str) -> str:
            try:
                status = (await client.get(url)).status_code
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                return f"{url}: {type(error).__name__}: {error}"
            return f"{url} answers {status}" if status in _GATEWAYS else ""

        problems = [found for found in await asyncio.gather(*map(problem, urls)) if found]
    if len(problems) == len(urls):
        raise ServiceDownError(service, f"not reached. {'; '.join(problems)}. {mend}")
    if problems:
        log.warning("%s: passed over as long as they are down: %s", service, "; ".join(problems))


def completion_text(reply: httpx2.Response) -> str:
    """What an OpenAI-compatible endpoint says, without the thought in front of it.

    Raises ValueError, in the endpoint's words, where that is an error, no completion, or nothing at all.
    """
    if reply.is_error:
        raise ValueError(f"answers {reply.status_code}: {_short(reply.text)}")
    try:
        choice = reply.json()["choices"][0]
        said = choice["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"answers no completion: {_short(reply.text)}") from error
    text = said.rpartition("</think>")[2].strip() if isinstance(said, str) else ""
    if not text:
        raise ValueError(f"says nothing (finish_reason {choice.get('finish_reason')})")
    return text


def _short(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARS] or "an empty page"


def serve(app: Any, host: str, port: int) -> int:
    """Serve an ASGI application until interrupted. Returns 2, after a line on stderr, for an address it cannot have."""
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"error: cannot listen on {host} port {port} ({error}); choose another --host or --port\n")
        return 2
    with listening, suppress(KeyboardInterrupt):
        config = uvicorn.Config(app, log_level="warning")
        run_async(uvicorn.Server(config).serve(sockets=[listening]), config.get_loop_factory())
    return 0
