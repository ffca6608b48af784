"""OpenAI's chat completions: requests to conversations, responses to JSON and to events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl.data.messages import read_messages, read_tools
from verl.errors import DataError
from verl.kit.agent.requests import ApiError, ChatRequest, ChatResponse, bad_request
from verl.types import Message, ToolCall, ToolSpec

MODEL = "policy"
# Settings of how the policy samples: the run's count instead (env.on_sampling). {name: the value that changes nothing}
SAMPLING: Mapping[str, object] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": 0,
    "seed": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": None,
    "logit_bias": {},
    "reasoning_effort": None,
    "verbosity": None,
    "parallel_tool_calls": True,
}
# Fields without effect on the response, in OpenAI's two APIs.
UNSEEN = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
_HINTS = {  # by the name of a refused field
    "previous_response_id": "; send the whole input",
    "chat_template_kwargs": "; set model.chat_template_options",
}
_PROVIDER_FIELDS = "provider_specific_fields"  # LiteLLM's, in messages
_READ = (
    *("messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"),
    *("n", "response_format", "logprobs", "top_logprobs", "modalities"),
)
# Of messages that came from an SDK; without a value they mean nothing.
_OFTEN_EMPTY = (
    *("annotations", "audio", "images", "refusal", "tool_calls"),
    *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"),
)
_UNSEEN_PART_FIELDS = ("cache_control", "annotations")  # of text parts


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError for a field that cannot be used, rather than dropping it."""
    check_fields(body, *_READ, *UNSEEN, *SAMPLING)
    read_object(body, "stream_options")
    _only(body, "n", 1)
    _only(body, "logprobs", False)
    _only(body, "top_logprobs", 0)
    _only(body, "modalities", ["text"])
    _only(body, "response_format", {"type": "text"})
    return chat_request(
        body.get("messages"),
        body.get("tools"),
        body.get("tool_choice") or "auto",
        given_sampling(body, SAMPLING),
        read_limit(body, "max_completion_tokens") or read_limit(body, "max_tokens"),
        read_stops(body.get("stop"), "stop"),
    )


def check_fields(body: Mapping[str, Any], *known: str) -> None:
    """Raises ApiError for another field with a value."""
    for name, value in body.items():
        if name not in known and value not in (None, False, [], {}):
            raise bad_request(f"cannot be used here{_HINTS.get(name, '')}", name)


def given_sampling(body: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, object]:
    """The sampling settings of the request. settings: {name: the value that changes nothing}"""
    return {name: body[name] for name in settings if body.get(name) not in (None, settings[name])}


def chat_request(
    messages: Any,
    tools: Any,
    tool_choice: Any,
    sampling: Mapping[str, object],
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
) -> ChatRequest:
    """The request with messages and tools in OpenAI's format. Raises ApiError.

    A choice of tools other than auto or none, and `strict` of a tool, would need constrained decoding, whose log-probs
    are not the policy's: they are sampling settings.
    """
    given, is_strict = _without_strict(tools)
    read, offered = _conversation(messages, given)
    constraints = {} if tool_choice in ("auto", "none") else {"tool_choice": tool_choice}
    constraints |= {"strict": True} if is_strict else {}
    reads_calls = bool(offered) and tool_choice != "none"
    return ChatRequest(read, offered, max_tokens, stop, reads_calls, {**sampling, **constraints})


def _without_strict(tools: Any) -> tuple[Any, bool]:
    """(the tools without `strict`, whether it is set anywhere)"""
    if not isinstance(tools, list):
        return tools, False
    functions = [each.get("function") if isinstance(each, Mapping) else None for each in tools]
    given = [
        {**tool, "function": _without(function, "strict")} if isinstance(function, Mapping) else tool
        for tool, function in zip(tools, functions, strict=True)
    ]
    return given, any(isinstance(each, Mapping) and each.get("strict") for each in functions)


def _conversation(messages: Any, tools: Any) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    try:
        read, offered = read_messages(_as_sent(messages), "messages"), read_tools(tools)
    except DataError as error:
        expected = f"; expected {error.expected}" if error.expected else ""
        raise bad_request(f"{error.problem}{expected}", error.field) from error
    if read[-1].role == "assistant":
        raise bad_request("ends with an assistant message, which cannot be continued", "messages")
    return read, offered


def _as_sent(messages: Any) -> Any:
    """The messages without what SDKs add and no model sees; a developer's messages are the system's."""
    return [_message_as_sent(each) for each in messages] if isinstance(messages, list) else messages


def _message_as_sent(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    made = {name: value for name, value in message.items() if value or name not in _OFTEN_EMPTY}
    made.pop("cache_control", None)
    if made.get("role") == "developer":
        made["role"] = "system"
    if made.get("role") == "assistant" and made.get("content") is None and "tool_calls" not in made:
        made["content"] = ""
    for name, unseen in (("content", _UNSEEN_PART_FIELDS), ("tool_calls", ("index",))):  # index: kept from a stream
        if isinstance(made.get(name), list):
            made[name] = [_without(each, *unseen) for each in made[name]]
    added = made.get(_PROVIDER_FIELDS)
    is_empty = isinstance(added, Mapping) and all(value is None for value in added.values())
    return _without(made, _PROVIDER_FIELDS) if is_empty else made


def _without(value: Any, *names: str) -> Any:
    return {name: each for name, each in value.items() if name not in names} if isinstance(value, Mapping) else value


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty if the field is left out. Raises ApiError for another type."""
    return _of_type(dict, body.get(name), name) or {}


def read_list(body: Mapping[str, Any], name: str) -> list[Any]:
    """Empty if the field is left out. Raises ApiError for another type."""
    return _of_type(list, body.get(name), name) or []


def _of_type(kind: type[Any], value: Any, name: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise bad_request(f"must be {'an object' if kind is dict else 'a list'}", name)
    return value


def read_limit(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise bad_request("must be a whole number of at least 1", name)
    return value


def read_stops(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise bad_request("must be a text, or a list of texts", name)
    return tuple(stops)


def _only(body: Mapping[str, Any], name: str, value: object) -> None:
    if body.get(name) not in (None, value):
        raise bad_request(f"must be {json.dumps(value)}", name)


def chat_completion(response: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    """The response as one JSON object."""
    message: dict[str, Any] = {"role": "assistant", "content": response.content or (None if response.calls else "")}
    if response.calls:
        message["tool_calls"] = [_call(call) for call in response.calls]
    choice = {"index": 0, "message": message, "finish_reason": response.finish}
    return {**_head(response, body, "chat.completion"), "choices": [choice], "usage": _usage(response)}


def chat_chunks(response: ChatResponse, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The response as the events of a stream, complete: the policy's tokens arrive together."""
    head = _head(response, body, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": response.content or (None if response.calls else "")})
    if response.calls:
        yield chunk({"tool_calls": [{"index": place, **_call(call)} for place, call in enumerate(response.calls)]})
    yield chunk({}, response.finish)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _usage(response)}


def _head(response: ChatResponse, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{response.id}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _usage(response: ChatResponse) -> dict[str, int]:
    prompt, completion = response.prompt_tokens, response.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chat_error(error: ApiError) -> dict[str, Any]:
    """The error as OpenAI's SDKs read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.problem, "type": kind, "param": error.field, "code": error.code}}


def openai_model(name: str) -> dict[str, Any]:
    """The policy as an entry of the list of models."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "toolrl"}
