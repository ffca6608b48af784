"""A client of Search-R1's retrieval service.

It posts `{queries, topk, return_scores}` and receives `{result: [[{document: {id, contents}, score}]]}`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from toolrl.servers.endpoints import Endpoint, EndpointPool
from toolrl.tools.retrieval.search import Passage


class HttpRetriever(EndpointPool):
    """Round robin over the servers; a server that fails is skipped. Retries are up to the caller.

    urls: full routes, such as http://127.0.0.1:8000/retrieve; one, or several that serve the same corpus
    """

    def __init__(self, urls: str | Sequence[str], timeout_s: float = 10.0, health_timeout_s: float = 30.0) -> None:
        hint = "Start it (docs/tools.md), or correct the tool's urls"
        options = {"timeout": timeout_s, "trust_env": True}
        super().__init__("retriever", urls, hint, health_timeout_s, "", "", **options)  # any response is one
        self._turns = itertools.count()

    async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        request = {"queries": list(queries), "topk": k, "return_scores": True}

        async def ask(server: Endpoint) -> list[list[Passage]]:
            async with server.asked(ValueError, KeyError, TypeError):  # malformed response
                answer = (await self.client.post(server.url, json=request)).raise_for_status().json()
                results = [list(map(_passage, passages)) for passages in answer["result"]]
                if len(results) != len(queries):
                    raise ValueError(f"{len(results)} results for {len(queries)} queries")
            return results

        return await self.first_answer(next(self._turns), ask)


def _passage(record: dict[str, Any]) -> Passage:
    """A passage with its score, if the server returns one."""
    document = record.get("document", record)
    score = record.get("score")
    return Passage(str(document["id"]), str(document["contents"]), None if score is None else float(score))
