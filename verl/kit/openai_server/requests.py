"""Requests as vLLM's server does not check them: what it would drop without a word is an error, as in the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl.data.messages import read_arguments
from verl.errors import DataError
from verl.kit.openai_server.forced_calls import ALLOWED_TOOLS

_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_PATHS = (_CHAT, _RESPONSES, _MESSAGES, f"{_MESSAGES}/count_tokens")
_FORMER = {"functions": "tools", "function_call": "tool_choice"}  # OpenAI's fields before there were tools
_MODES = ("auto", "required")


class RequestError(ValueError):
    """A request that gets status 400."""


class CheckedRequests:
    """Middleware for `vllm serve --middleware`. It acts when the body is read, which is after the client's token."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, is_read = str(scope.get("path")), False

        async def receive_checked() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()  # a client that goes away
            is_read = True
            raw = await Request(scope, receive).body()
            return {"type": "http.request", "body": _checked_body(raw, path), "more_body": False}

        is_checked = scope["type"] == "http" and path in _PATHS
        await self._app(scope, receive_checked if is_checked else receive, send)


def _checked_body(raw: bytes, path: str) -> bytes:
    """Raises HTTPException, which vLLM's server answers in the shape of its errors."""
    try:
        body = json.loads(raw)
        return json.dumps(checked(body, path)).encode() if isinstance(body, dict) else raw
    except RequestError as error:
        raise HTTPException(400, str(error)) from error
    except (ValueError, RecursionError):  # vLLM's own error
        return raw


def checked(body: Mapping[str, Any], path: str = _CHAT) -> dict[str, Any]:
    """The request for vLLM. Raises RequestError."""
    for name, instead in _FORMER.items():
        if body.get(name) not in (None, []):
            raise RequestError(f"{name} cannot be used here; write {instead}")
    for field, arguments in _arguments(body, path):
        try:
            read_arguments(arguments, field)
        except DataError as error:
            raise RequestError(f"{field} {error.problem}; expected {error.expected or 'an object'}") from error
    found = dict(body)
    if isinstance(tools := body.get("tools"), list):
        found["tools"] = list(map(_shown, tools))
    if path == _MESSAGES:
        _check_choice(body)
    return found | (_allowed_tools(body.get("tool_choice")) if path == _CHAT else {})


def _shown(tool: Any) -> Any:
    """The tool without `strict`, which SDKs add, and which the policy has not seen in training."""
    if not isinstance(tool, Mapping):
        return tool
    inner = {name: _shown(each) for name, each in tool.items() if name == "function"}
    return {name: each for name, each in tool.items() if name != "strict"} | inner


def _arguments(body: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(place, arguments) of all calls of the history"""
    if path == _RESPONSES:
        for number, item in enumerate(_objects(body.get("input"))):
            if item.get("type") == "function_call":
                yield f"input[{number}].arguments", item.get("arguments")
        return
    for number, message in enumerate(_objects(body.get("messages"))):
        for place, call in enumerate(_objects(message.get("tool_calls"))):
            function = call.get("function")
            if isinstance(function, Mapping):
                yield f"messages[{number}].tool_calls[{place}].function.arguments", function.get("arguments")


def _objects(value: Any) -> Sequence[Mapping[str, Any]]:
    """The entries of a list, of which those that are no objects have no fields here: vLLM refuses them."""
    entries = value if isinstance(value, list) else []
    return [each if isinstance(each, Mapping) else {} for each in entries]


def _check_choice(body: Mapping[str, Any]) -> None:
    """Anthropic's choice of a call needs tools; of OpenAI's requests vLLM itself checks that."""
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") in ("any", "tool") and not body.get("tools"):
        raise RequestError("tool_choice demands a call, but there are no tools; add tools, or leave it out")


def _allowed_tools(choice: Any) -> dict[str, Any]:
    """The fields for a choice among some tools, which OpenAI's API has."""
    if not isinstance(choice, Mapping) or choice.get("type") != ALLOWED_TOOLS:
        return {}
    field = f"tool_choice.{ALLOWED_TOOLS}"
    given = choice.get(ALLOWED_TOOLS)
    if not isinstance(given, Mapping) or given.get("mode") not in _MODES:
        raise RequestError(f"{field} must be {{mode, tools}} with a mode of {' or '.join(_MODES)}")
    functions = [each.get("function") for each in _objects(given.get("tools"))]
    names = [each["name"] for each in functions if isinstance(each, Mapping) and isinstance(each.get("name"), str)]
    if not names or len(names) != len(functions):
        raise RequestError(f"{field}.tools must be a list of {{type: function, function: {{name}}}}")
    return {"tool_choice": given["mode"], ALLOWED_TOOLS: names}
