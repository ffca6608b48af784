"""OpenAI's responses: requests to conversations, responses to JSON and to events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl.kit.agent.chat_api import (
    MODEL,
    UNSEEN,
    chat_request,
    check_fields,
    given_sampling,
    read_limit,
    read_list,
    read_object,
)
from verl.kit.agent.requests import ChatRequest, ChatResponse, Finish, bad_request

_PLAIN_TEXT = {"format": {"type": "text"}}
# Settings of how the policy samples: {name: the value that changes nothing}
_SAMPLING: Mapping[str, object] = {
    "temperature": None,
    "top_p": None,
    "reasoning": {},
    "parallel_tool_calls": True,
    "truncation": "disabled",
}
_READ = (
    *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "text", "stream_options"),
    "include",
)
_LOGPROBS = "message.output_text.logprobs"


def read_responses(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError for a field that cannot be used."""
    check_fields(body, *_READ, *UNSEEN, *_SAMPLING)
    if _LOGPROBS in read_list(body, "include"):  # the others add nothing here
        raise bad_request(f"cannot have {_LOGPROBS}", "include")
    text = read_object(body, "text")
    if (text.get("format") or {"type": "text"}) != {"type": "text"}:
        raise bad_request("must be text", "text.format")
    if other := sorted(text.keys() - {"format", "verbosity"}):
        raise bad_request("cannot be used here", f"text.{other[0]}")
    sampling = given_sampling(body, _SAMPLING)
    if text.get("verbosity") is not None:
        sampling["verbosity"] = text["verbosity"]
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise bad_request("must be a text or a list of items", "input")
    instructions = body.get("instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    tools = [_tool(each, f"tools[{number}]") for number, each in enumerate(read_list(body, "tools"))]
    limit = read_limit(body, "max_output_tokens")
    return chat_request(messages, tools, body.get("tool_choice") or "auto", sampling, limit)


def _add(messages: list[dict[str, Any]], item: Any, field: str) -> None:
    """Append the item; a call belongs to the assistant's message in front of it."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    last: dict[str, Any] = messages[-1] if messages else {"role": None}
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{field}.content")})
    elif kind == "function_call":
        if last["role"] != "assistant":
            messages.append(last := {"role": "assistant", "content": None})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{field}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    else:
        raise bad_request(f"is of type {kind!r}; expected a message, a function_call or its output", field)


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    kinds = ("input_text", "output_text", "text")
    parts = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
    texts = [str(each["text"]) for each in parts if each.get("type") in kinds and "text" in each]
    if not isinstance(content, list) or len(texts) < len(content):
        raise bad_request("must be a text, or a list of text parts", field)
    return "\n".join(texts)


def _tool(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise bad_request("must be of type function", field)
    return {"type": "function", "function": {key: each for key, each in tool.items() if key != "type"}}


def response_object(response: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    """The response as one JSON object."""
    cut = response.finish is Finish.LENGTH
    return {
        **_head(response, body),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(response)),
        "usage": {
            "input_tokens": response.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": response.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response.prompt_tokens + response.completion_tokens,
        },
    }


def _head(response: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{response.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or MODEL,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": [],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "max_output_tokens": body.get("max_output_tokens"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": _PLAIN_TEXT,
    }


def _items(response: ChatResponse) -> Iterator[dict[str, Any]]:
    status = "incomplete" if response.finish is Finish.LENGTH else "completed"
    if response.content or not response.calls:
        part = {"type": "output_text", "text": response.content, "annotations": []}
        head = {"type": "message", "id": f"msg_{response.id}", "status": status, "role": "assistant"}
        yield {**head, "content": [part]}
    for number, call in enumerate(response.calls):
        yield {
            "type": "function_call",
            "id": f"fc_{response.id}{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": status,
        }


def response_events(response: ChatResponse, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The response as the events of a stream, complete: the policy's tokens arrive together."""
    for number, event in enumerate(_events(response, body)):
        yield {**event, "type": f"response.{event['type']}", "sequence_number": number}


def _events(response: ChatResponse, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    whole, head = response_object(response, body), _head(response, body)
    yield {"type": "created", "response": head}
    yield {"type": "in_progress", "response": head}
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            yield _added(index, {**item, "status": "in_progress", "content": []})
            at["content_index"] = 0
            yield {"type": "content_part.added", **at, "part": {**part, "text": ""}}
            yield {"type": "output_text.delta", **at, "delta": part["text"], "logprobs": []}
            yield {"type": "output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "content_part.done", **at, "part": part}
        else:
            yield _added(index, {**item, "status": "in_progress", "arguments": ""})
            yield {"type": "function_call_arguments.delta", **at, "delta": item["arguments"]}
            yield {"type": "function_call_arguments.done", **at, "name": item["name"], "arguments": item["arguments"]}
        yield {"type": "output_item.done", "output_index": index, "item": item}
    yield {"type": "incomplete" if whole["status"] == "incomplete" else "completed", "response": whole}


def _added(index: int, item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "output_item.added", "output_index": index, "item": item}
