"""What vLLM's server would drop without a word is an error, with the request's own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from toolrl.serve.openai_server.requests import CheckedRequests, RequestError, checked

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = {"name": "get_rain"}


def history(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {**FUNCTION, "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}}


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (CHAT, {"functions": [FUNCTION]}, "functions cannot be used here; write tools"),
        (CHAT, {"function_call": "auto"}, "function_call cannot be used here; write tool_choice"),
        (CHAT, history("{oops"), "messages[1].tool_calls[0].function.arguments is not JSON"),
        (CHAT, history("[1]"), "messages[1].tool_calls[0].function.arguments is of type list"),
        (CHAT, history('{"a": NaN}'), "messages[1].tool_calls[0].function.arguments "),
        (
            RESPONSES,
            {"input": ["a", {"type": "function_call", "arguments": "oops"}]},
            "input[1].arguments is not JSON",
        ),
        (
            CHAT,
            allowed("always", {"type": "function", "function": FUNCTION}),
            "tool_choice.allowed_tools must be {mode",
        ),
        (CHAT, allowed("auto"), "tool_choice.allowed_tools.tools must be a list of"),
        (CHAT, allowed("auto", FUNCTION), "tool_choice.allowed_tools.tools must be a list of"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice demands a call, but there are no tools"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "a"}, "tools": []}, "tool_choice demands a call, but"),
    ],
)
def test_fields_that_would_be_dropped_are_an_error(path: str, body: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as found:
        checked(body, path)
    assert str(found.value).startswith(problem)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"functions": [], "function_call": None, "messages": "a", "input": 7},
        {"messages": [7, {"tool_calls": [7, {"function": 7}]}]},
        history('{"city": "Kala"}'),
        history({"city": "Kala"}),
        {"tool_choice": "required"},
        {"tool_choice": {"type": "none"}},
    ],
)
def test_valid_requests_and_errors_of_vllm_pass_unchanged(body: Mapping[str, Any]) -> None:
    assert checked(body, CHAT) == checked(body, RESPONSES) == checked(body, MESSAGES) == body


def test_allowed_tools_become_a_choice_that_vllm_knows_and_names() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    assert checked(allowed("required", *tools), CHAT) == {"tool_choice": "required", "allowed_tools": ["a", "b"]}
    assert checked(allowed("required", *tools), RESPONSES) == allowed("required", *tools)


@pytest.mark.parametrize("strict", [True, False, None])
def test_tools_are_shown_as_in_training(strict: bool | None) -> None:
    """SDKs add `strict`; a parameter of that name stays."""
    schema = {"type": "object", "properties": {"strict": {"type": "boolean"}}}
    function = {**FUNCTION, "parameters": schema}
    chat = {"tools": [{"type": "function", "function": {**function, "strict": strict}}]}
    assert checked(chat, CHAT) == {"tools": [{"type": "function", "function": function}]}
    flat = {"tools": [{"type": "function", **function, "strict": strict}]}
    assert checked(flat, RESPONSES) == {"tools": [{"type": "function", **function}]}
    assert checked({"tools": [{**FUNCTION, "input_schema": schema, "strict": strict}]}, MESSAGES) == {
        "tools": [{**FUNCTION, "input_schema": schema}]
    }
    assert checked({"tools": [7, {"function": 7}]}, CHAT) == {"tools": [7, {"function": 7}]}


async def test_the_body_is_checked_where_it_is_read() -> None:
    """Not before: the client's token is checked first."""

    async def echo(request: Request) -> JSONResponse:
        if "authorization" not in request.headers:
            return JSONResponse("who?", 401)
        return JSONResponse(json.loads(await request.body()))

    app = CheckedRequests(Starlette(routes=[Route(path, echo, methods=["POST"]) for path in (CHAT, "/other")]))
    former = {"functions": [FUNCTION]}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://a") as client:
        assert (await client.post(CHAT, json=former)).status_code == 401
        client.headers["authorization"] = "Bearer b"
        refused = await client.post(CHAT, json=former)
        assert (refused.status_code, refused.text) == (400, "functions cannot be used here; write tools")
        assert (await client.post("/other", json=former)).json() == former
        one = {"type": "function", "function": FUNCTION}
        made = await client.post(CHAT, json=allowed("auto", one))
        assert made.json() == {"tool_choice": "auto", "allowed_tools": ["get_rain"]}
        assert (await client.post(CHAT, content="[]")).json() == []
