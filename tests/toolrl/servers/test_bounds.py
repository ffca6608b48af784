"""Large requests: within the bounds they are read, rendered and tokenized off the event loop; beyond them, refused."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.support.loop_watch import watched_loop
from tests.toolrl.envs.agent.play import check_exact, observations
from tests.toolrl.envs.agent.test_gateway import CHAT, MESSAGES, TOOL, Open, opened
from tests.verl.host.test_unpacking import FILE, FOLDER, packed
from toolrl.serve.openai_server.requests import MAX_CHARS, CheckedRequests
from toolrl.servers.serving import Gate, ServingConfig
from toolrl.swe import wire
from toolrl.swe.leases import Leases
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.server import make_app

LONG = "It is cold in Oslo. " * 3000
RESPONSES, COUNT, INPUT_TOKENS = "/v1/responses", "/v1/messages/count_tokens", "/v1/responses/input_tokens"

ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1] * 200_000}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def posted(door: Open, client: httpx2.AsyncClient, path: str, body: Any) -> httpx2.Response:
    return await client.post(path, content=json.dumps(body).encode())


async def test_the_gateway_reads_and_tokenizes_large_requests_off_its_loop() -> None:
    async with opened(*["One."] * 9) as door, door.plain() as client:
        messages = [user(LONG)]
        with watched_loop():
            for _ in range(2):  # the second continues the first
                done = await posted(door, client, CHAT, {"messages": messages, "tools": [TOOL]})
                assert done.status_code == 200, done.text
                messages += [done.json()["choices"][0]["message"], user(LONG + "!")]
            for path, body in {
                MESSAGES: {"messages": [user(LONG)]},
                RESPONSES: {"input": LONG},
                COUNT: {"messages": [user(LONG)]},
                INPUT_TOKENS: {"input": LONG},
                "/generate": {"input_ids": [1] * 20_000},
            }.items():
                done = await posted(door, client, path, body)
                assert done.status_code == 200, done.text
        assert [len(each.turns) for each in door.session.ledger.segments] == [2, 1, 1, 1]
        check_exact(door.session, door.policy)


async def test_large_requests_of_one_session_are_placed_one_after_the_other() -> None:
    """While one is in the thread, others of the session are not: two continue no segment at a time."""
    async with opened(*["One."] * 9, max_turns=4) as door, door.plain() as client:
        first = await posted(door, client, CHAT, {"messages": [user(LONG)]})
        history = [user(LONG), first.json()["choices"][0]["message"]]
        bodies = [{"messages": [*history, user(f"{number}" * (30_000 * (number % 2) + 1))]} for number in range(4)]
        done = await asyncio.gather(*(posted(door, client, CHAT, body) for body in bodies))
        assert sorted(each.status_code for each in done) == [200, 200, 200, 400]  # a fifth turn is too many
        assert [len(each.turns) for each in door.session.ledger.segments] == [2, 1, 1]
        check_exact(door.session, door.policy)


@pytest.mark.parametrize(
    ("path", "body", "status", "problem"),
    [
        (CHAT, {"messages": [user("a")] * 10_001}, 413, "messages has 10001 entries; at most 10000 are read"),
        (COUNT, {"messages": [user("a")] * 10_001}, 413, "messages has 10001 entries"),
        (RESPONSES, {"input": [user("a")] * 10_001}, 413, "input has 10001 entries"),
        (CHAT, {"messages": [user("a")], "tools": [TOOL] * 1025}, 413, "tools has 1025 entries; at most 1024"),
        (CHAT, {"messages": [user("a")], "stop": ["a"] * 65}, 413, "stop has 65 entries; at most 64"),
        (MESSAGES, {"messages": [user("a")], "stop_sequences": ["a"] * 65}, 413, "stop_sequences has 65 entries"),
        (
            CHAT,
            {"messages": [user("a")], "logit_bias": dict.fromkeys(map(str, range(10_001)), 1)},
            413,
            "logit_bias has",
        ),
        ("/reward", {"reward": 1, "parts": dict.fromkeys(map(str, range(10_001)), 1)}, 413, "parts has 10001"),
        (CHAT, {"messages": [user(" " * 1_100_000)]}, 400, "characters, of which at most 1032000 are read"),
        (COUNT, {"messages": [user("\n" * 1_100_000)]}, 400, "characters, of which at most"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "a" * 1_100_000}, user("b")]},
            400,
            "characters, of which",
        ),
        ("/generate", {"input_ids": [1] * 2001}, 400, "2001 tokens leave no room for a response"),
        ("/generate", {"input_ids": ["a"] * 50_000}, 400, "input_ids[0] must be a whole number"),
        (CHAT, {"messages": [user("a")], "tool_choice": ALLOWED}, 400, "must be"),
    ],
)
async def test_beyond_a_bound_nothing_is_tokenized(path: str, body: dict[str, Any], status: int, problem: str) -> None:
    async with opened("one", longest=2000) as door, door.plain() as client:
        door.session.ledger.find = None  # type: ignore[method-assign, assignment]
        door.session.ledger.num_tokens = None  # type: ignore[method-assign, assignment]
        door.session.ledger.place_tokens = None  # type: ignore[method-assign, assignment]
        refused = await posted(door, client, path, body)
        assert refused.status_code == status and problem in refused.text, refused.text
        assert not door.session.failure.done() and not door.policy.saw


async def test_settings_for_long_contexts_are_accepted() -> None:
    """128 tools, 64 stop strings, hundreds of messages, and white space that the policy does not see."""
    async with opened("one", "two") as door, door.plain() as client:
        tools = [{"type": "function", "function": {**TOOL["function"], "name": f"f{n}"}} for n in range(128)]
        messages = [user("Hello"), {"role": "assistant", "content": "Hi"}] * 500 + [user("Go on" + " " * 30_000)]
        body = {"messages": messages, "tools": tools, "stop": [f"stop {number}" for number in range(64)]}
        done = await posted(door, client, CHAT, body)
        assert done.status_code == 200, done.text


def test_a_text_on_which_the_tokenizer_panics_is_a_bad_request(caplog: pytest.LogCaptureFixture) -> None:
    own = observations()

    class Panics(type(own.chat.tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **options: Any) -> Any:
            if "panic" in text:
                self._tokenizer.encode("one two three").truncate(1, stride=5)  # a PanicException of Rust
            return super().__call__(text, **options)

    tokenizer = deepcopy(own.chat.tokenizer)
    tokenizer.__class__ = Panics

    async def test() -> None:
        given = replace(own, chat=replace(own.chat, tokenizer=tokenizer))
        async with opened("one", observations=given) as door, door.plain() as client:
            for text in ("panic", "panic " * 5000):
                for path in (CHAT, MESSAGES, COUNT):
                    refused = await posted(door, client, path, {"messages": [user(text)]})
                    assert refused.status_code == 400 and "on which the tokenizer fails" in refused.text, refused.text
            assert not door.session.failure.done()
            assert (await posted(door, client, CHAT, {"messages": [user("Hello")]})).status_code == 200

    asyncio.run(test())
    assert not caplog.records


def asked(app: Any, **request: Any) -> httpx2.Response:
    async def once() -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            with watched_loop():
                return await client.request(**request)

    return asyncio.run(once())


def test_vllms_server_gets_large_requests_that_were_read_off_its_loop() -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await Response(str(len(await Request(scope, receive).body())))(scope, receive, send)

    app = CheckedRequests(echo)
    given = json.dumps({"messages": [user(LONG)]}).encode()
    assert asked(app, method="POST", url=CHAT, content=given).text == str(len(given))
    for path in (CHAT, "/v1/completions"):
        for body, problem in {
            b'{"prompt": "' + b" " * (MAX_CHARS + 1) + b'"}': f"at most {MAX_CHARS} are read",
            b'{"messages": [' + b'"a",' * 10_000 + b'"a"]}': "messages has 10001 entries",
            b"[" * 1000 + b"," * 30_000: "nested too deep",
            b" " * ((32 << 20) + 1): "more than 32 MiB",
        }.items():
            refused = asked(_answering(app), method="POST", url=path, content=body)
            assert refused.status_code in (400, 413) and problem in refused.text, refused.text


def _answering(app: Any) -> Any:
    """With HTTPException as an answer, as in vLLM's server."""
    from fastapi import FastAPI

    made = FastAPI()

    @made.post("/{path:path}")
    async def echo(request: Request) -> int:
        return len(await request.body())

    return type(app)(made)


def test_the_runtime_server_reads_images_and_json_off_its_loop(tmp_path: Path) -> None:
    leases = Leases(LocalRuntimes(tmp_path), 1, 1, 60.0, None, 64, 1.0)
    assert leases.images is not None  # made when the server starts
    gate = Gate(make_app(leases), ServingConfig("127.0.0.1", 0, max_body_mib=64), None)
    image = packed([(".git", FOLDER, ""), (".git/HEAD", FILE, "a" * 40), ("file", FILE, "x" * 100_000)])
    image.seek(0)
    put = {"method": "PUT", "url": f"/image/{'a' * 40}", "content": image.read(), "headers": {"content-type": wire.TAR}}
    assert asked(gate, **put).status_code == 200
    write = {"path": "/x", "content": LONG}
    assert asked(gate, method="POST", url="/write_file", json=write, headers={wire.LEASE: "b"}).status_code == 410
    many = {"command": ["a"] * 300_000}
    refused = asked(gate, method="POST", url="/execute", json=many, headers={wire.LEASE: "b"})
    assert refused.status_code == 413 and "more than 250000 values" in refused.text
