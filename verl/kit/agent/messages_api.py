"""Anthropic's messages: requests to conversations, responses to JSON and to events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from verl.kit.agent.chat_api import (
    MODEL,
    chat_request,
    check_fields,
    given_sampling,
    read_limit,
    read_list,
    read_object,
    read_stops,
)
from verl.kit.agent.requests import ApiError, ChatRequest, ChatResponse, Finish, bad_request

# Settings of how the policy samples: {name: the value that changes nothing}
_SAMPLING: Mapping[str, object] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "thinking": {"type": "disabled"},
    "output_config": {},  # how much effort
}
_READ = ("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "context_management")
_CLEAR_THINKING = "clear_thinking_"  # an edit without effect: no response has a block of thinking
_UNSEEN = (
    *("model", "metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id"),
    "diagnostics",
)
_TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
_EDITS = "context_management.edits"
_ROLES = ("user", "assistant", "system")
_STOP_REASONS = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.TOOL_CALLS: "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}


def read_anthropic(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError for a field that cannot be used."""
    check_fields(body, *_READ, *_UNSEEN, *_SAMPLING)
    if read_object(body, "output_config").get("format") is not None:
        raise bad_request("must be text", "output_config.format")
    for number, edit in enumerate(read_list(read_object(body, "context_management"), "edits")):
        if not (isinstance(edit, Mapping) and str(edit.get("type")).startswith(_CLEAR_THINKING)):
            raise bad_request("cannot be used here: the program edits its messages itself", f"{_EDITS}[{number}]")
    system = body.get("system")
    messages = [{"role": "system", "content": _text(system, "system")}] if system else []
    for number, message in enumerate(read_list(body, "messages")):
        messages += _openai(message, f"messages[{number}]")
    tools = [_tool(each, f"tools[{number}]") for number, each in enumerate(read_list(body, "tools"))]
    asked = read_object(body, "tool_choice")
    choice = asked.get("type", "auto")
    sampling = given_sampling(body, _SAMPLING)
    if asked.get("disable_parallel_tool_use"):
        sampling["disable_parallel_tool_use"] = True
    limit, stops = read_limit(body, "max_tokens"), read_stops(body.get("stop_sequences"), "stop_sequences")
    return chat_request(messages, tools, choice, sampling, limit, stops)


def _openai(message: Any, field: str) -> list[dict[str, Any]]:
    """The message in OpenAI's form: results of tools are messages of their own, in front of the user's text."""
    if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
        raise bad_request(f"must be an object with a role of {', '.join(_ROLES)}", field)
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(each, Mapping) for each in blocks):
        raise bad_request("must be a text or a list of blocks", f"{field}.content")
    texts = [each for each in blocks if each.get("type") == "text"]
    results = [each for each in blocks if each.get("type") == "tool_result" and message["role"] == "user"]
    calls = [each for each in blocks if each.get("type") == "tool_use" and message["role"] == "assistant"]
    read = (*texts, *results, *calls)
    if other := [each.get("type") for each in blocks if each not in read]:
        problem = f"has a block of type {other[0]!r}, which is neither text nor a tool's use or result"
        raise bad_request(problem, f"{field}.content")
    made: list[dict[str, Any]] = []
    for result in results:
        text = _text(result.get("content") or "", f"{field}.content")
        made.append({"role": "tool", "tool_call_id": result.get("tool_use_id"), "content": text})
    if calls:
        functions = [{"name": call.get("name"), "arguments": call.get("input")} for call in calls]
        listed = [{"id": call.get("id"), "function": each} for call, each in zip(calls, functions, strict=True)]
        made.append({"role": "assistant", "content": _text(texts, field) or None, "tool_calls": listed})
    elif texts or not results:
        made.append({"role": message["role"], "content": _text(texts, field)})
    return made


def _text(content: Any, field: str) -> str:
    """Of a text or of its blocks."""
    if isinstance(content, str):
        return content
    blocks = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
    texts = [str(each["text"]) for each in blocks if "text" in each]
    if not isinstance(content, list) or len(texts) < len(content):
        raise bad_request("must be a text or a list of text blocks", field)
    return "\n".join(texts)


def _tool(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        raise bad_request("must be a tool with a name and an input_schema", field)
    check_fields(tool, *_TOOL_FIELDS)
    names = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    given = {name: tool.get(theirs) for name, theirs in names.items()}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def anthropic_message(response: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    """The response as one JSON object."""
    return {
        **_head(response, body),
        "content": list(_blocks(response)),
        "stop_reason": "stop_sequence" if response.stop is not None else _STOP_REASONS[response.finish],
        "stop_sequence": response.stop,
        "usage": {"input_tokens": response.prompt_tokens, "output_tokens": response.completion_tokens},
    }


def _head(response: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    model = body.get("model") or MODEL
    return {"id": f"msg_{response.id}", "type": "message", "role": "assistant", "model": model}


def _blocks(response: ChatResponse) -> Iterator[dict[str, Any]]:
    if response.content:
        yield {"type": "text", "text": response.content}
    for call in response.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def anthropic_events(response: ChatResponse, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The response as the events of a stream, complete: the policy's tokens arrive together."""
    whole = anthropic_message(response, body)
    started = {"input_tokens": response.prompt_tokens, "output_tokens": 0}
    head = {**_head(response, body), "content": [], "stop_reason": None, "stop_sequence": None, "usage": started}
    yield {"type": "message_start", "message": head}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": response.completion_tokens}}
    yield {"type": "message_stop"}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The error as Anthropic's SDKs read it."""
    kind = _ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": f"{error.code}: {error.problem}"}}


def anthropic_model(name: str) -> dict[str, Any]:
    """The policy as an entry of the list of models."""
    unknown = "1970-01-01T00:00:00Z"
    return {"type": "model", "id": name, "display_name": name, "created_at": unknown, "lifecycle": "active"}
