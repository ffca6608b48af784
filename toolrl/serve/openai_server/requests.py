"""Requests as vLLM's server does not check them: what it would drop without a word is an error, as in the gateway."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from fastapi import HTTPException
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolrl.serve.openai_server.forced_calls import ALLOWED_TOOLS
from toolrl.servers.bounds import CONVERSATION, LARGE, LargeWork, TooMuchError, num_chars
from toolrl.servers.serving import BODIES_HELD, BODY_S, BoundedProtocol
from verl.data.messages import read_arguments
from verl.errors import DataError

_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_PATHS = (_CHAT, _RESPONSES, _MESSAGES, f"{_MESSAGES}/count_tokens")
_FORMER = {"functions": "tools", "function_call": "tool_choice"}  # OpenAI's fields before there were tools
_MODES = ("auto", "required")

MAX_REQUESTS = 1024  # at a time
MAX_BODY = 32 << 20
MAX_CHARS = 8_000_000  # of all texts: a context of a million tokens has about four million
# vLLM's models check a request in one step of its event loop. They try every kind of message on each entry: a valid one
# takes 3 to 60 microseconds, one that is of no kind up to 3 milliseconds, and so do 15 parts of it.
MAX_VALUES = 20_000  # of a request, besides token ids
MAX_TOKENS = 1 << 19
MAX_ITEMS = 500  # of `input`
MAX_ITEM_PARTS = 200
FEW = 20  # messages, which are left to vLLM
SERVED = replace(CONVERSATION, entries={**CONVERSATION.entries, "input": MAX_ITEMS, "prompt": MAX_TOKENS})
_log = logging.getLogger(__name__)


class RequestError(ValueError):
    """A request that gets status 400."""


class CheckedRequests:
    """Middleware for `vllm serve --middleware`. It acts when the body is read, which is after the client's token.

    Every body has the bounds of our servers, and so has every connection; requests of chats are checked, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._reading, self._checking = app, LargeWork(), LargeWork()
        self._num_requests = self._num_bytes = 0  # that are open, and of their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            _bound_connections(scope["app"].state)
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._post(scope, receive, send)
        finally:
            self._num_requests -= 1

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, is_read, held = str(scope.get("path")), False, 0

        def hold(length: int) -> None:
            nonlocal held
            held += length
            self._num_bytes += length
            if self._num_bytes > BODIES_HELD * MAX_BODY:
                raise _busy("too many large requests at a time")

        async def receive_checked() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()  # a client that goes away
            is_read = True
            if self._num_requests > MAX_REQUESTS:
                raise _busy(f"{MAX_REQUESTS} requests are in progress")
            request = Request(scope, receive)
            pieces, length = await _pieces(request, hold)
            with _refusing():
                raw, body = await self._reading.run(length, partial(_read, pieces, is_json=_is_json(request)))
                if path in _PATHS and isinstance(body, dict):
                    check = partial(_checked_body, raw, body, path, _model(scope))
                    raw = await self._checking.run(LARGE + 1, check)  # whatever its size
            return {"type": "http.request", "body": raw, "more_body": False}

        try:
            await self._app(scope, receive_checked, send)
        finally:
            self._num_bytes -= held


def _bound_connections(state: Any) -> None:
    """Gives connections the limits of our servers. vLLM opens them itself; its server, which it leaves in the state of
    its application, asks its configuration how, at each connection."""
    server = getattr(state, "server", None)
    if isinstance(server, uvicorn.Server):
        server.config.http_protocol_class = BoundedProtocol
    else:
        _log.warning("this vLLM does not show its server: connections have no time limits")


async def _pieces(request: Request, hold: Callable[[int], None]) -> tuple[list[bytes], int]:
    """The body and its length. Raises HTTPException for one that is too long, or too slow, and what `hold` raises for
    the length of a piece."""
    pieces: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                pieces.append(piece)
                hold(len(piece))
                if (length := length + len(piece)) > MAX_BODY:
                    raise HTTPException(
                        413, f"the body has more than {MAX_BODY >> 20} MiB: send a shorter conversation"
                    )
    except TimeoutError as error:
        raise HTTPException(408, f"the body took more than {BODY_S:g} s") from error
    return pieces, length


def _is_json(request: Request) -> bool:
    """Whether vLLM's server reads the body as JSON, and not as a form."""
    kind = request.headers.get("content-type", "")
    return not kind or "json" in kind.lower()


def _busy(problem: str) -> HTTPException:
    return HTTPException(429, problem, {"retry-after": "1"})


@contextmanager
def _refusing() -> Iterator[None]:
    """Raises HTTPException, which vLLM's server answers in the shape of its errors."""
    try:
        yield
    except TooMuchError as error:
        raise HTTPException(413, str(error)) from error
    except RequestError as error:
        raise HTTPException(400, str(error)) from error
    except RecursionError as error:
        raise HTTPException(400, "the JSON is nested too deep") from error


def _read(pieces: Sequence[bytes], *, is_json: bool) -> tuple[bytes, Any]:
    """(the body, its value). Small JSON that is none is None, which vLLM refuses itself; large JSON would hold up its
    event loop. Raises RequestError, TooMuchError, RecursionError."""
    raw = b"".join(pieces)
    try:
        body = SERVED.read(raw)
    except TooMuchError:
        raise
    except ValueError as error:
        if is_json and len(raw) > LARGE:
            raise RequestError(f"the body is no JSON: {error}") from error
        return raw, None
    if len(raw) > MAX_CHARS and (chars := num_chars(body)) > MAX_CHARS:
        raise TooMuchError(f"the texts have {chars} characters; at most {MAX_CHARS} are read: send less")
    given = {name: each for name, each in body.items() if name != "prompt"} if isinstance(body, dict) else body
    if (count := _num_values(given)) > MAX_VALUES:
        raise TooMuchError(f"the request has {count} values; at most {MAX_VALUES} are read: send less")
    return raw, body


def _num_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_num_values, value.values()))
    return 1 + sum(map(_num_values, value)) if isinstance(value, list) else 1


def _model(scope: Scope) -> type[BaseModel] | None:
    """That with which vLLM's server checks requests of this path."""
    for route in getattr(scope.get("app"), "routes", ()):
        body = getattr(route, "body_field", None)
        if body is not None and route.path == scope["path"]:
            found = body.field_info.annotation
            return found if isinstance(found, type) and issubclass(found, BaseModel) else None
    return None


def _checked_body(raw: bytes, body: Mapping[str, Any], path: str, model: type[BaseModel] | None) -> bytes:
    """Raises RequestError, TooMuchError, RecursionError."""
    made = checked(body, path)
    text = raw if made == body else json.dumps(made).encode()
    _check_entries(body, model)  # may change it
    return text


def _check_entries(body: Mapping[str, Any], model: type[BaseModel] | None) -> None:
    """Each message or item alone, up to the first error: all errors of all of them take vLLM minutes."""
    field = "messages" if isinstance(body.get("messages"), list) else "input"
    entries = body[field] if isinstance(body.get(field), list) else []
    for number, entry in enumerate(entries):
        for name, parts in entry.items() if isinstance(entry, Mapping) else ():
            _check_parts(parts, f"{field}[{number}].{name}", MAX_ITEM_PARTS if field == "input" else MAX_VALUES)
        if model is None or (field == "messages" and len(entries) <= FEW):
            continue
        try:
            model.model_validate({"model": "", "max_tokens": 1, field: [entry]})
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]["msg"]
            raise RequestError(f"{field}[{number}] is no message or item that is known here ({problem})") from error


def _check_parts(parts: Any, place: str, most: int) -> None:
    """Raises RequestError, TooMuchError."""
    if not isinstance(parts, list):
        return
    if len(parts) > most:
        raise TooMuchError(f"{place} has {len(parts)} entries; at most {most} are read: send fewer")
    for number, part in enumerate(parts):
        if not isinstance(part, str | Mapping):
            raise RequestError(f"{place}[{number}] must be an object")


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
