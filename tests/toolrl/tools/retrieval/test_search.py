"""Search: BM25 over a file, our server of Search-R1's protocol in a process of its own, and clients of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.conftest import real_data
from tests.support.service import free_port, service
from toolrl.envs.openenv import server as env_server
from toolrl.sandbox import server as sandbox_server
from toolrl.servers.serving import Gate, ServingConfig
from toolrl.tools.retrieval import server as retrieval_server
from toolrl.tools.retrieval.bm25 import Bm25Retriever
from toolrl.tools.retrieval.http_retriever import HttpRetriever
from toolrl.tools.retrieval.search import Passage, SearchTool, format_passages
from verl.envs.tools.base import ToolError
from verl.envs.tools.build import build_tools
from verl.errors import ConfigError, DataError, ServiceDownError

CORPUS = [
    {"id": "0", "contents": '"Rome"\nRome is the capital of Italy.'},
    {"id": 1, "contents": '"Bern"\nBern is the federal city of Switzerland.\nA river flows round it.'},
    {"id": "2", "contents": '"Po"\nThe Po is a river of Italy.'},
]
ROME = 'Doc 1(Title: "Rome") Rome is the capital of Italy.\n'


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in CORPUS).encode()))
    return path


@pytest.fixture(scope="module")
def url(corpus: Path) -> Iterator[str]:
    port = free_port()
    command = ("-m", "toolrl.tools.retrieval.server", "--corpus", str(corpus), "--port", str(port), "--topk", "1")
    with service(*command, url=f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}/retrieve"


def search(tool: SearchTool, query: str) -> str:
    async def once() -> str:
        try:
            return await tool.call({"query": query})
        finally:
            await tool.close()

    return asyncio.run(once())


def ask(retriever: HttpRetriever, *queries: str, times: int = 1, k: int = 1) -> list[list[Passage]]:
    async def in_turn() -> list[list[Passage]]:
        try:
            for _ in range(times):
                found = await retriever.search(queries, k)
            return found
        finally:
            await retriever.close()

    return asyncio.run(in_turn())


def test_passages_are_formatted_as_by_search_r1() -> None:
    passages = [Passage("0", '"Rome"\nCapital.\nOld.', 1.0), Passage("1", "Bern")]
    assert format_passages(passages) == 'Doc 1(Title: "Rome") Capital.\nOld.\nDoc 2(Title: Bern) \n'


def test_bm25_finds_passages_with_shared_terms(corpus: Path) -> None:
    (tool,) = build_tools([{"name": "search", "corpus": str(corpus), "topk": 2}])
    assert isinstance(tool, SearchTool) and tool.spec.name == "search"
    river = search(tool, "Which RIVER flows round Bern?")
    assert river.startswith('Doc 1(Title: "Bern") Bern is') and river.endswith(
        'Doc 2(Title: "Po") The Po is a river of Italy.\n'
    )
    assert search(tool, "quantum") == search(tool, "") == "Nothing was found."
    assert search(SearchTool(corpus=str(corpus), topk=50), "italy").count("Doc ") == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "the corpus is empty"),
        ('{"id": 1, "contents": "x"}\n{"id": 2}', "row 1: is not a passage; expected"),
        ('{"id": 1, "contents": "x"}\nnonsense', "row 1: line 2 is not JSON"),
        ("[1]", "row 0: is not a passage"),
        ('{"id": 1, "contents": "?"}\n{"id": 2, "contents": "a the"}', "no passage has a term; expected"),
    ],
)
def test_an_unusable_corpus_is_an_error_with_its_row(tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(rows)
    with pytest.raises(DataError, match=message):
        SearchTool(corpus=str(tmp_path / "bad.jsonl"))


def test_a_broken_archive_is_reported(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "half.jsonl.gz").write_bytes(corpus.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read as jsonl"):
        SearchTool(corpus=str(tmp_path / "half.jsonl.gz"))


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'index' for retriever 'bm25'.*corpus"):
        SearchTool(index="x")
    with pytest.raises(ConfigError, match="did you mean 'bm25'"):
        SearchTool("bm2")
    with pytest.raises(ConfigError, match="topk=0"):
        SearchTool(topk=0)
    with pytest.raises(ConfigError, match="names no retriever"):
        SearchTool("http", urls=["127.0.0.1"])


def test_the_server_speaks_both_dialects(url: str) -> None:
    def post(**asked: Any) -> Any:
        return httpx2.post(url, json=asked).raise_for_status().json()["result"]

    rome, river = post(queries=["capital", "river"], topk=2)
    assert rome == [CORPUS[0]] and [document["id"] for document in river] == ["2", "1"]
    ((scored,),) = post(query="capital", return_scores=True)
    assert scored["document"] == CORPUS[0] and scored["score"] > 0
    assert (
        httpx2.post(url, json={}).status_code == 422
        and httpx2.post(url, json={"query": "x", "topk": 0}).status_code == 422
    )


def test_queries_have_a_bound_each_and_together(url: str) -> None:
    for asked in ({"query": "a" * 10_001}, {"queries": ["a"] * 2000}, {"query": "river", "topk": 10**6}):
        answer = httpx2.post(url, json=asked)
        assert answer.status_code == 422 and len(answer.text) < 1000
    assert httpx2.post(url, json={"query": "a " * 5_000_000}).status_code == 413
    tool = SearchTool("http", urls=url)
    with pytest.raises(ToolError, match=r"The query has 20000 characters; at most 10000"):
        search(tool, "a " * 10_000)


@pytest.mark.parametrize(
    "asked",
    [
        '"query": 1',
        '"query": 1e999',
        '"query": true',
        '"query": ["Rome"]',
        '"queries": [1, 2]',
        '"queries": "Rome"',
        '"queries": {"Rome": 1}',
        '"query": "\\ud83d"',
        '"queries": ["Rome", "river \\ude00"]',
        f'"queries": {"[" * 1000}{"]" * 1000}',
    ],
)
def test_numbers_half_characters_and_nested_lists_are_no_queries(url: str, asked: str) -> None:
    answer = httpx2.post(url, content=f"{{{asked}}}", headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422) and len(answer.text) < 1000


async def test_queries_of_a_client_that_hangs_up_are_not_searched_for() -> None:
    class Slow:
        def __init__(self) -> None:
            self.asked = 0
            self.started = asyncio.Event()

        async def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            self.asked += len(queries)
            self.started.set()
            await asyncio.to_thread(time.sleep, 0.1)  # which cannot be cancelled
            return [[] for _ in queries]

        async def close(self) -> None:
            pass

    slow = Slow()
    gate = Gate(retrieval_server.application(slow, 1), ServingConfig("127.0.0.1", 0), None)
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": json.dumps({"queries": ["q"] * 1000}).encode()}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": headers, "query_string": b""}
    answering = asyncio.create_task(gate(scope, receive, send))
    await slow.started.wait()
    gone.set()
    await answering
    assert slow.asked < 100


def test_a_client_gets_what_the_index_itself_gives(url: str, corpus: Path) -> None:
    assert search(SearchTool("http", topk=1, urls=url), "capital") == ROME
    own = asyncio.run(Bm25Retriever(str(corpus)).search(["river", "capital of Italy", "?"], 3))
    assert ask(HttpRetriever(url), "river", "capital of Italy", "?", k=3) == own and own[2] == []


def test_failover_skips_servers_that_are_down_and_names_all_if_none_is_up(url: str) -> None:
    dead = f"http://127.0.0.1:{free_port()}/retrieve"
    for urls in ([dead, url], [url, dead]):
        assert ask(HttpRetriever(urls), "capital", times=3)[0][0].id == "0"
    with pytest.raises(ServiceDownError, match=f"retriever: {dead}: ConnectError"):
        ask(HttpRetriever(dead), "capital")
    with pytest.raises(ServiceDownError, match=r"HTTPStatusError.*404"):
        ask(HttpRetriever(url.replace("retrieve", "elsewhere")), "capital")


async def test_a_server_that_dies_is_reported(corpus: Path) -> None:
    port = free_port()
    command = ("-m", "toolrl.tools.retrieval.server", "--corpus", str(corpus), "--port", str(port))
    with service(*command, url=f"http://127.0.0.1:{port}/health") as process:
        retriever = HttpRetriever(f"http://127.0.0.1:{port}/retrieve")
        assert (await retriever.search(["capital"], 1))[0][0].id == "0"
        process.kill()
        process.wait()
        with pytest.raises(ServiceDownError, match=str(port)):
            await retriever.search(["capital"], 1)
        await retriever.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"result": []},
        {"result": [[{"score": 1}]]},
        {"results": [[]]},
        [],
    ],
)
def test_an_answer_of_another_form_is_the_servers_fault(answer: Any) -> None:
    retriever = HttpRetriever("http://x/retrieve")
    retriever.client = httpx2.AsyncClient(transport=httpx2.MockTransport(lambda _: httpx2.Response(200, json=answer)))
    with pytest.raises(ServiceDownError, match="http://x/retrieve"):
        ask(retriever, "q")


def test_the_command_reports_a_missing_corpus() -> None:
    command = [sys.executable, "-m", "toolrl.tools.retrieval.server", "--corpus", "nowhere.jsonl"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 2 and ended.stderr.startswith("error: nowhere.jsonl: there is no such file")


def test_the_command_reports_a_corpus_without_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text('{"id": 1, "contents": ""}')
    assert retrieval_server.main(["--corpus", str(tmp_path / "empty.jsonl")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/empty.jsonl: no passage has a term")


def test_an_unavailable_address_is_a_one_line_error_of_every_server(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70000):
            for ended in (
                retrieval_server.main(["--corpus", str(corpus), "--port", str(port)]),
                env_server.main(["--env", "shop", "--port", str(port)]),
                sandbox_server.main(["--isolation", "none", "--port", str(port)]),
            ):
                assert ended == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and all(line.startswith("error: cannot listen on 127.0.0.1 port") for line in lines)


def test_recall_on_real_questions() -> None:
    """Of the supporting titles of 100 HotpotQA questions .74 are among the first five, as BM25 should have it."""
    retriever = Bm25Retriever(str(real_data("search", "wiki_passages.jsonl.gz")))
    rows = [json.loads(line) for line in real_data("search", "hotpotqa_100.jsonl").read_text().splitlines()]
    found = asyncio.run(retriever.search([row["question"] for row in rows], 5))
    hits = [
        f'"{title}"' in {passage.contents.partition("\n")[0] for passage in passages}
        for row, passages in zip(rows, found, strict=True)
        for title in row["supporting_titles"]
    ]
    assert sum(hits) / len(hits) == pytest.approx(0.74, abs=0.01)
