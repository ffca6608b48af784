"""Serves a corpus with Search-R1's protocol: `toolrl retrieval-server --corpus FILE [--port 8000]`.

POST /retrieve takes `{"queries": [..]}` or `{"query": ".."}`, and `topk` and `return_scores` with either.
"""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from toolrl.servers.serving import add_serving_arguments, new_app, serve, serving_config
from toolrl.tools.retrieval.bm25 import Bm25Retriever
from toolrl.tools.retrieval.search import MAX_QUERY_CHARS, Retriever
from verl.errors import VerlError
from verl.host.arguments import Arguments, positive_int

MAX_QUERIES = 1024
Query = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]


class RetrieveRequest(BaseModel):
    """The request body; SkyRL-gym's client sends a single `query`."""

    queries: list[Query] = Field([], max_length=MAX_QUERIES)
    query: Query | None = None
    topk: int | None = Field(None, ge=1, le=1000)
    return_scores: bool = False


def application(retriever: Retriever, topk: int) -> FastAPI:
    """The service; `topk` is the default for requests without one."""
    app = new_app("retrieval")

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        queries = request.queries if request.query is None else [request.query]
        if not queries:
            raise HTTPException(422, 'expected "queries", a list of texts, or "query", a text')
        result: list[list[dict[str, Any]]] = []
        for query in queries:  # sequentially, so that the rest can be canceled
            (passages,) = await retriever.search([query], request.topk or topk)
            documents: list[dict[str, Any]] = [{"id": passage.id, "contents": passage.contents} for passage in passages]
            if request.return_scores:
                scored = zip(documents, passages, strict=True)
                documents = [{"document": document, "score": passage.score} for document, passage in scored]
            result.append(documents)
        return {"result": result}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def arguments() -> Arguments:
    parser = Arguments("toolrl retrieval-server", __doc__)
    parser.add_argument("--corpus", required=True, help="JSON lines with id and contents, plain or .gz")
    add_serving_arguments(parser, port=8000, max_body_mib=1)
    parser.add_argument("--topk", type=positive_int, default=3, help="default for requests without topk")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns 2 if it cannot start."""
    options = arguments().read(argv)
    try:
        retriever = Bm25Retriever(options.corpus)
    except VerlError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return serve(application(retriever, options.topk), serving_config(options))


if __name__ == "__main__":
    sys.exit(main())
