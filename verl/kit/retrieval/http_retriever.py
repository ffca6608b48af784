"""A client of Search-R1's retrieval service.

It posts `{queries, topk, return_scores}` and receives `{result: [[{document: {id, contents}, score}]]}`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import httpx2

from verl.errors import ConfigError, ServiceDownError
from verl.kit.retrieval.search import Passage
from verl.net.health import HealthWatch
from verl.net.services import check_urls, service_headers

log = logging.getLogger(__name__)


class HttpRetriever:
    """Round robin over the servers; a server that fails is skipped. Retries are up to the caller.

    urls:      full routes, such as http://127.0.0.1:8000/retrieve; one, or several that serve the same corpus
    timeout_s: per request and server
    health_timeout_s: time without any response, after which requests to a server fail

    Raises ConfigError if there is no URL.
    """

    def __init__(self, urls: str | Sequence[str], timeout_s: float = 10.0, health_timeout_s: float = 30.0) -> None:
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        if not self._urls or not all(url.startswith(("http://", "https://")) for url in self._urls):
            raise ConfigError(f"urls of a retriever: {self._urls}; expected e.g. http://127.0.0.1:8000/retrieve")
        self._turns = itertools.count()
        self._client = httpx2.AsyncClient(timeout=timeout_s, headers=service_headers())
        self._watches = {
            url: HealthWatch(f"retriever {url}", url, health_timeout_s, self._client)  # any response counts
            for url in self._urls
        }

    async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        first = next(self._turns) % len(self._urls)
        problems = []
        for url in self._urls[first:] + self._urls[:first]:
            try:
                return await self._ask(url, queries, k)
            except (ServiceDownError, httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{url}: {type(error).__name__}: {error}")
                log.debug("retriever skipped: %s", problems[-1])
        raise ServiceDownError("retriever", "; ".join(problems))

    async def check_services(self) -> None:
        """Raises ServiceDownError if no server answers."""
        hint = "Start it (docs/tools.md), or correct the tool's urls"
        await check_urls("retriever", self._urls, hint, headers=service_headers())

    async def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        await self._client.aclose()

    async def _ask(self, url: str, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Raises ServiceDownError or httpx2.HTTPError; ValueError, KeyError or TypeError for a malformed response."""
        request = {"queries": list(queries), "topk": k, "return_scores": True}
        async with self._watches[url].guard():
            response = await self._client.post(url, json=request)
        answer = response.raise_for_status().json()
        found = [[_passage(one) for one in passages] for passages in answer["result"]]
        if len(found) != len(queries):
            raise ValueError(f"{len(found)} results for {len(queries)} queries")
        return found


def _passage(found: dict[str, Any]) -> Passage:
    """A passage with its score, if the server returns one."""
    document = found.get("document", found)
    score = found.get("score")
    return Passage(str(document["id"]), str(document["contents"]), None if score is None else float(score))
