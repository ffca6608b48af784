"""OpenAI's responses: requests to conversations, responses to JSON and to events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from toolrl.envs.agent.api.chat import MODEL, OpenAIFields, read_choice
from toolrl.envs.agent.api.conversation import Choice, constraints, conversation, given_sampling, listed_tools
from toolrl.envs.agent.api.fields import Count, Fields, First, No, Nothing, Text, only, read_fields, read_kind
from toolrl.envs.agent.requests import ChatRequest, ChatResponse, Finish, bad_request, refused
from verl.data.messages import read_arguments
from verl.errors import DataError

_PLAIN_TEXT = {"format": {"type": "text"}}
# Settings of how the policy samples: {name: the value that changes nothing}
_SAMPLING: Mapping[str, object] = {
    "temperature": None,
    "top_p": None,
    "reasoning": {},
    "parallel_tool_calls": True,
    "truncation": "disabled",
}
_SHOWN = {"type", "name", "description", "parameters"}  # of a tool, to the policy
_Included = Literal[  # of items that there are not here
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class _TextSettings(Fields):
    format: Annotated[dict[str, Any], only({"type": "text"})] | None = None
    verbosity: str | None = None


class _Reasoning(Fields):
    effort: str = ""
    summary: str = ""
    generate_summary: str = ""
    context: str = ""
    mode: str = ""


class _StreamOptions(Fields):
    include_obfuscation: bool = False


class ResponsesFields(OpenAIFields):
    """A request."""

    input: Any = None
    instructions: str = ""
    tools: list[Any] | None = None
    max_output_tokens: Count | None = None
    stream_options: _StreamOptions = _StreamOptions()
    text: _TextSettings = _TextSettings()
    reasoning: _Reasoning = _Reasoning()
    truncation: Literal["auto", "disabled"] = "disabled"
    include: Annotated[list[_Included], First] | None = None
    background: No = False
    client_metadata: dict[str, Any] | None = None
    context_management: Nothing | None = None


class _Item(Fields):
    """id, status: of the response from which it comes"""

    id: str = ""
    status: str = ""


class _MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any = None


class _CallItem(_Item):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Any = None


class _OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Any = None
    name: Text | None = None


class _Part(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class _Tool(Fields):
    type: Literal["function"]
    name: Text
    description: str = ""
    parameters: Any = None
    strict: bool = False
    defer_loading: No = False


class _FunctionChoice(Choice):
    type: Literal["function"]
    name: Text


class _AllowedChoice(Choice):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_FunctionChoice], First]


class _ReasoningItem(_Item):
    """The thoughts of the response that follows."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None


class _ReasoningPart(Fields):
    type: Literal["reasoning_text", "summary_text"]
    text: str


_ITEMS: Mapping[str, type[_Item]] = {
    "message": _MessageItem,
    "reasoning": _ReasoningItem,
    "function_call": _CallItem,
    "function_call_output": _OutputItem,
}
_CHOICES: Mapping[str, type[Choice]] = {"function": _FunctionChoice, "allowed_tools": _AllowedChoice}


def read_responses(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError for a field that cannot be used."""
    given = read_fields(ResponsesFields, body)
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    if given.instructions:
        messages.append({"role": "system", "content": given.instructions})
        places.append("instructions")
    if isinstance(given.input, str):
        messages.append({"role": "user", "content": given.input})
        places.append("input")
    elif not isinstance(given.input, list) or not given.input:
        raise bad_request("must be a text or a list of items", "input")
    else:
        for number, item in enumerate(given.input):
            field = f"input[{number}]"
            _add(messages, read_kind(_ITEMS, item, field, "message"), field)
            places += [field] * (len(messages) - len(places))
    read, choice = conversation(messages, "input"), read_choice(given.tool_choice, _CHOICES)
    specs = [read_fields(_Tool, each, f"tools[{number}]") for number, each in enumerate(given.tools or ())]
    tools = listed_tools([each.model_dump(include=_SHOWN, exclude_unset=True) for each in specs])
    sampling = given_sampling(body, _SAMPLING)
    if given.text.verbosity is not None:
        sampling["verbosity"] = given.text.verbosity
    sampling |= constraints(choice, tools, any(each.strict for each in specs))
    reads_calls = bool(tools) and choice != "none"
    limit = given.max_output_tokens
    return ChatRequest(
        read, tools, limit, reads_calls=reads_calls, sampling=sampling, conversation="input", places=tuple(places)
    )


def _add(messages: list[dict[str, Any]], item: _Item, field: str) -> None:
    """Append the item; a call belongs to the assistant's message in front of it."""
    match item:
        case _MessageItem():
            role = "system" if item.role == "developer" else item.role
            before = messages.pop() if role == "assistant" and _is_thought(messages) else {}
            messages.append({**before, "role": role, "content": _text(item.content, f"{field}.content")})
        case _ReasoningItem():
            name = "content" if item.content else "summary"
            parts = enumerate(getattr(item, name) or ())
            read = [read_fields(_ReasoningPart, part, f"{field}.{name}[{number}]") for number, part in parts]
            if thought := "\n".join(part.text for part in read):
                messages.append({"role": "assistant", "content": None, "reasoning": thought})
        case _CallItem():
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            try:
                arguments = read_arguments(item.arguments, f"{field}.arguments")
            except DataError as error:
                raise refused(error, error.field) from error
            function = {"name": item.name, "arguments": arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        case _OutputItem():
            output = _text(item.output, f"{field}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output, "name": item.name})


def _is_thought(messages: list[dict[str, Any]]) -> bool:
    """Whether the last message has thoughts so far, and nothing else."""
    return bool(messages) and messages[-1].keys() == {"role", "content", "reasoning"} and not messages[-1]["content"]


def _text(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("must be a text, or a list of text parts", field)
    return "\n".join(read_fields(_Part, each, f"{field}[{number}]").text for number, each in enumerate(content))


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
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
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
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
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
