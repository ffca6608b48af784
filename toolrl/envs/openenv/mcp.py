"""OpenEnv's JSON-RPC: the tools of a session as those of an MCP server, and sessions with an id (held.py).

    POST /mcp  {"jsonrpc": "2.0", "id": 1, "method": .., "params": {session_id: .., ..}}
        openenv/session/create -> {session_id}; a WebSocket with ?session_id= attaches to it, for reset and step
        openenv/session/close  -> {session_id, closed}
        tools/list             -> {tools: [{name, description, inputSchema}]}
        tools/call             -> {content, data, isError, _meta: {reward, done}}; params: name, arguments

The same messages go through a session's WebSocket, as {"type": "mcp", "data": ..}, without a session_id. Source:
mcp_client.py and http_server.py of openenv 0.10.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from toolrl.envs.openenv.wire import Action, ErrorCode, ProtocolError, Strict, problems_of
from verl.text import utf8

INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR, SERVER_ERROR = -32600, -32601, -32602, -32603, -32000
_log = logging.getLogger(__name__)


class RpcRequest(Strict):
    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


class RpcError(Exception):
    """A request that gets an error of this code."""

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code


Method = Callable[[RpcRequest], Awaitable[Mapping[str, Any]]]
Step = Callable[[Action], Awaitable[Mapping[str, Any]]]


async def tool_result(step: Step, request: RpcRequest) -> Mapping[str, Any]:
    """Result of tools/list or tools/call, by a step of a session. Raises RpcError, and what they raise."""
    params = {name: each for name, each in request.params.items() if name != "session_id"}
    match request.method:
        case "tools/list":
            listed = await step(Action(type="list_tools"))
            return {"tools": [_describe_tool(tool) for tool in listed["observation"]["tools"]]}
        case "tools/call":
            called = {"tool_name": params.pop("name", None), "arguments": params.pop("arguments", None) or {}}
            if params:
                raise RpcError(INVALID_PARAMS, f"unknown {', '.join(sorted(params))}; expected name and arguments")
            seen = await step(Action.model_validate({"type": "call_tool", **called}))
            text = seen["observation"]["result"]
            meta = {"reward": seen["reward"], "done": seen["done"]}
            return {"content": [{"type": "text", "text": text}], "data": text, "isError": False, "_meta": meta}
        case other:
            raise RpcError(METHOD_NOT_FOUND, f"there is no method {other!r}")


def _describe_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """In the layout of MCP."""
    return {"name": tool["name"], "description": tool["description"], "inputSchema": tool["input_schema"]}


async def rpc_response(body: Any, method: Method) -> dict[str, Any]:
    """The response to a JSON-RPC request; an error for whatever is raised."""
    id = None
    try:
        request = RpcRequest.model_validate(body)
        id = request.id
        return {"jsonrpc": "2.0", "id": id, "result": await method(request)}
    except RpcError as error:
        code, problem = error.code, str(error)
    except ValidationError as error:
        code, problem = INVALID_REQUEST if id is None else INVALID_PARAMS, problems_of(error)
    except ProtocolError as error:
        code, problem = SERVER_ERROR if error.code == ErrorCode.CAPACITY_REACHED else INVALID_PARAMS, str(error)
    except Exception as error:  # noqa: BLE001  user code may raise anything: an error of this episode
        _log.exception("an environment raised")
        code, problem = INTERNAL_ERROR, f"{type(error).__name__}: {error}"
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": utf8(problem)}}
