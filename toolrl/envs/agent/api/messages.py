"""Anthropic's messages: requests to conversations, responses to JSON and to events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from toolrl.envs.agent.api.chat import MODEL
from toolrl.envs.agent.api.conversation import Choice, constraints, conversation, given_sampling, listed_tools
from toolrl.envs.agent.api.fields import Count, Fields, First, Nothing, Text, read_fields, read_kind
from toolrl.envs.agent.requests import ApiError, ChatRequest, ChatResponse, Finish, bad_request

# Settings of how the policy samples: {name: the value that changes nothing}
_SAMPLING: Mapping[str, object] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "thinking": {"type": "disabled"},
    "output_config": {},
}
_CLEAR_THINKING = "clear_thinking_"  # an edit without effect: no response has a block of thinking
_EDITS = "context_management.edits"
# The SDK's own tool loop begins with a thread, and goes on with whole conversations after this error.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_STOP_REASONS = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.TOOL_CALLS: "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class _Thinking(Fields):
    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str = ""


class _OutputConfig(Fields):
    effort: str = ""
    task_budget: dict[str, Any] | None = None


class _ContextManagement(Fields):
    edits: Annotated[list[dict[str, Any]], First] | None = None


class MessagesFields(Fields):
    """A request."""

    messages: list[Any]
    system: Any = ""
    tools: list[Any] | None = None
    tool_choice: Any = {"type": "auto"}  # noqa: RUF012  frozen
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[Text], First] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig = _OutputConfig()
    context_management: _ContextManagement = _ContextManagement()
    mcp_servers: Nothing | None = None
    model: str = MODEL
    metadata: dict[str, Any] | None = None
    service_tier: str = ""
    cache_control: dict[str, Any] | None = None
    inference_geo: str = ""
    speed: str = ""
    user_profile_id: str = ""
    diagnostics: dict[str, Any] | None = None


class _Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Any = None


class _Block(Fields):
    cache_control: dict[str, Any] | None = None


class _TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: Nothing | None = None


class _ThinkingBlock(Fields):
    """signature: of Anthropic's own models"""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Any = ""
    is_error: bool = False


class _Tool(_Block):
    type: Literal["custom"] = "custom"
    name: Text
    description: str | None = None
    input_schema: Any
    strict: bool = False
    eager_input_streaming: bool = False


class _Choice(Choice):
    disable_parallel_tool_use: bool = False


class _ChosenTool(_Choice):
    name: Text


_TEXT: Mapping[str, type[Fields]] = {"text": _TextBlock}
_BLOCKS: Mapping[str, Mapping[str, type[Fields]]] = {  # by role
    "system": _TEXT,
    "user": {**_TEXT, "tool_result": _ToolResult},
    "assistant": {**_TEXT, "thinking": _ThinkingBlock, "tool_use": _ToolUse},
}
_CHOICES: Mapping[str, type[_Choice]] = {"auto": _Choice, "any": _Choice, "none": _Choice, "tool": _ChosenTool}


def read_anthropic(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError for a field that cannot be used."""
    given = read_fields(MessagesFields, body)
    for number, edit in enumerate(given.context_management.edits or ()):
        if not str(edit.get("type")).startswith(_CLEAR_THINKING):
            raise bad_request("cannot be used here: the program edits its messages itself", f"{_EDITS}[{number}]")
    system = _text(given.system, "system")
    placed = [("system", {"role": "system", "content": system})] if system else []
    for number, message in enumerate(given.messages):
        placed += _openai(message, f"messages[{number}]")
    read = conversation([message for _, message in placed], "messages")
    specs = [read_fields(_Tool, each, f"tools[{number}]") for number, each in enumerate(given.tools or ())]
    tools = listed_tools([_function(each) for each in specs], "input_schema")
    choice = read_kind(_CHOICES, given.tool_choice, "tool_choice")
    sampling = given_sampling(body, _SAMPLING)
    sampling |= constraints(choice, tools, any(each.strict for each in specs))
    if choice.disable_parallel_tool_use:
        sampling["disable_parallel_tool_use"] = True
    reads_calls = bool(tools) and choice.type != "none"
    stops, places = tuple(given.stop_sequences or ()), tuple(place for place, _ in placed)
    return ChatRequest(read, tools, given.max_tokens, stops, reads_calls, sampling, places=places)


def _openai(message: Any, field: str) -> list[tuple[str, dict[str, Any]]]:
    """(place, message in OpenAI's form): results of tools are messages of their own, in front of the user's text."""
    given = read_fields(_Message, message, field)
    where = f"{field}.content"
    blocks = _blocks_of(given.content, where, _BLOCKS[given.role])
    texts = [block.text for block in blocks if isinstance(block, _TextBlock)]
    calls = [block for block in blocks if isinstance(block, _ToolUse)]
    thought = "\n".join(block.thinking for block in blocks if isinstance(block, _ThinkingBlock))
    beside = {"thinking": thought} if thought else {}
    made: list[tuple[str, dict[str, Any]]] = []
    for number, block in enumerate(blocks):
        if isinstance(block, _ToolResult):
            place = f"{where}[{number}]"
            text = _text(block.content, f"{place}.content")
            made.append((place, {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}))
    if calls:
        listed = [{"id": call.id, "function": {"name": call.name, "arguments": call.input}} for call in calls]
        made.append((field, {"role": "assistant", "content": "\n".join(texts) or None, "tool_calls": listed, **beside}))
    elif texts or not made:
        made.append((field, {"role": given.role, "content": "\n".join(texts), **beside}))
    return made


def _blocks_of(content: Any, field: str, models: Mapping[str, type[Fields]]) -> list[Fields]:
    if isinstance(content, str):
        return [_TextBlock(type="text", text=content)]
    if not isinstance(content, list):
        raise bad_request("must be a text or a list of blocks", field)
    return [read_kind(models, each, f"{field}[{number}]") for number, each in enumerate(content)]


def _text(content: Any, field: str) -> str:
    return "\n".join(block.text for block in _blocks_of(content, field, _TEXT) if isinstance(block, _TextBlock))


def _function(tool: _Tool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {name: value for name, value in given.items() if value is not None}


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
    made = {"type": _ERRORS.get(error.status, "api_error"), "message": f"{error.code}: {error.problem}"}
    details = {"details": _NO_THREADS} if error.field == "thread" else {}
    return {"type": "error", "error": made | details}


def anthropic_model(name: str) -> dict[str, Any]:
    """The policy as an entry of the list of models."""
    unknown = "1970-01-01T00:00:00Z"
    return {"type": "model", "id": name, "display_name": name, "created_at": unknown, "lifecycle": "active"}
