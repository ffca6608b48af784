"""Search as a tool: retrieved passages in Search-R1's format (arXiv 2503.09516)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

from verl.envs.tools.base import ToolError
from verl.errors import ConfigError
from verl.host.services import check_services
from verl.registry import resolve
from verl.types import ToolSpec

MAX_QUERY_CHARS = 10_000  # time is linear in the query: ten million characters take minutes
RETRIEVERS: Mapping[str, str] = {
    "bm25": "toolrl.tools.retrieval.bm25:Bm25Retriever",
    "http": "toolrl.tools.retrieval.http_retriever:HttpRetriever",
}


@dataclass(frozen=True, slots=True)
class Passage:
    """The first line of `contents` is its title. Higher scores are better."""

    id: str
    contents: str
    score: float | None = None  # if requested


class Retriever(Protocol):
    async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Up to `k` passages per query, best first. Raises ServiceDownError on failure."""

    async def close(self) -> None:
        """Release its resources. By default a no-op."""
        return


class SearchTool:
    """Answers a query with the top-k passages.

    retriever: a name of RETRIEVERS, or a user's own class, built with the other options (`corpus` or `urls`, ...)

    Raises ConfigError for an invalid name or options, DataError for an unreadable corpus.
    """

    def __init__(self, retriever: str = "bm25", topk: int = 3, **options: Any) -> None:
        if topk < 1:
            raise ConfigError(f"tool 'search': topk={topk} must be at least 1")
        query = {"type": "string", "description": "What to look for."}
        schema = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        self.spec = ToolSpec("search", "Searches a collection of texts.", {**schema, "additionalProperties": False})
        self._topk = topk
        made_by = resolve("retriever", retriever, RETRIEVERS)
        try:
            signature(made_by).bind_partial(**options)  # report unknown options before missing ones
            signature(made_by).bind(**options)
        except TypeError as error:
            takes = ", ".join(f"{name}: .." for name in signature(made_by).parameters)
            hint = f"write env.tools=[{{name: search, retriever: {retriever}, {takes}}}]"
            raise ConfigError(f"tool 'search': {error} for retriever {retriever!r}; {hint}") from error
        self._retriever: Retriever = made_by(**options)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        query = arguments["query"]
        if len(query) > MAX_QUERY_CHARS:
            raise ToolError(f"The query has {len(query)} characters; at most {MAX_QUERY_CHARS} are searched for.")
        (passages,) = await self._retriever.search([query], self._topk)
        return format_passages(passages) or "Nothing was found."

    async def check_services(self) -> None:
        await check_services([self._retriever])

    async def close(self) -> None:
        await self._retriever.close()


def format_passages(passages: Sequence[Passage]) -> str:
    """Search-R1's format, one line per passage: `Doc 1(Title: "Rome") Rome is ...`."""
    parted = (passage.contents.partition("\n") for passage in passages)
    return "".join(f"Doc {number}(Title: {title}) {text}\n" for number, (title, _, text) in enumerate(parted, start=1))
