"""OpenAI's chat completions: requests to conversations, responses to JSON and to events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from toolrl.envs.agent.api.conversation import Choice, constraints, conversation, given_sampling, listed_tools
from toolrl.envs.agent.api.fields import Count, Fields, First, No, Nothing, Stops, Text, only, read_fields, read_kind
from toolrl.envs.agent.requests import ApiError, ChatRequest, ChatResponse, bad_request
from verl.types import ToolCall

MODEL = "policy"
# Settings of how the policy samples: env.options.on_sampling decides. {name: the value that changes nothing}
_SAMPLING: Mapping[str, object] = {
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
_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
# Of messages that came from an SDK: {name: the value that means nothing, besides null}
_OFTEN_EMPTY: Mapping[str, object] = {
    "annotations": [],
    "audio": None,
    "images": [],
    "refusal": "",
    "tool_calls": [],
    "reasoning": "",
    "reasoning_content": "",
    "reasoning_details": [],
    "thinking_blocks": [],
}
_SHOWN = {"name", "description", "parameters"}  # of a function, to the policy
_PROVIDER_FIELDS = "provider_specific_fields"  # LiteLLM's, in messages


class OpenAIFields(Fields):
    """What OpenAI's two APIs have in common."""

    model: str = MODEL
    stream: bool = False
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, only(0)] = 0
    user: str = ""
    metadata: dict[str, Any] | None = None
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    prompt_cache_options: dict[str, Any] | None = None


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatFields(OpenAIFields):
    """A request; its messages are read like those of a row."""

    messages: list[Any]
    tools: list[Any] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Stops | None = None
    stream_options: StreamOptions = StreamOptions()
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_effort: str = ""
    verbosity: str = ""
    n: Annotated[int, only(1)] = 1
    logprobs: No = False
    modalities: Annotated[list[Any], only(["text"])] | None = None
    response_format: Annotated[dict[str, Any], only({"type": "text"})] | None = None
    functions: Nothing | None = None


class _Function(Fields):
    name: Text
    description: str | None = None
    parameters: Any = None
    strict: bool = False
    cache_control: dict[str, Any] | None = None


class _Tool(Fields):
    type: Literal["function"]
    function: _Function
    cache_control: dict[str, Any] | None = None


class _Name(Fields):
    name: Text


class _FunctionChoice(Choice):
    type: Literal["function"]
    function: _Name


class _AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_FunctionChoice], First]


class _AllowedChoice(Choice):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


_CHOICES: Mapping[str, type[Choice]] = {"function": _FunctionChoice, "allowed_tools": _AllowedChoice}


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError for a field that cannot be used, rather than dropping it."""
    given = read_fields(ChatFields, body)
    messages = conversation([_message_as_sent(each) for each in given.messages], "messages")
    for number, message in enumerate(messages):
        if message.role not in _ROLES:
            raise bad_request(f"must be one of {', '.join(_ROLES)}", f"messages[{number}].role")
    functions = [read_fields(_Tool, each, f"tools[{number}]").function for number, each in enumerate(given.tools or ())]
    shown = [each.model_dump(include=_SHOWN, exclude_unset=True) for each in functions]
    tools = listed_tools([{"type": "function", "function": each} for each in shown])
    choice = read_choice(given.tool_choice, _CHOICES)
    limits = [each for each in (given.max_tokens, given.max_completion_tokens) if each is not None]
    is_strict = any(each.strict for each in functions)
    sampling = given_sampling(body, _SAMPLING) | constraints(choice, tools, is_strict)
    reads_calls = bool(tools) and choice != "none"
    return ChatRequest(messages, tools, min(limits, default=None), tuple(given.stop or ()), reads_calls, sampling)


def read_choice(choice: object, choices: Mapping[str, type[Choice]]) -> str | Choice:
    """choices: its models, if it is an object. Raises ApiError."""
    if not isinstance(choice, str):
        return read_kind(choices, choice, "tool_choice")
    if choice not in ("none", "auto", "required"):
        raise bad_request("must be none, auto, required or an object", "tool_choice")
    return choice


def _message_as_sent(message: Any) -> Any:
    """The message without what SDKs add and no model sees; a developer's messages are the system's."""
    if not isinstance(message, Mapping):
        return message
    empty = (name for name, each in _OFTEN_EMPTY.items() if message.get(name) in (None, each))
    made = _without(message, "cache_control", *empty)
    if made.get("role") == "developer":
        made["role"] = "system"
    if made.get("role") == "assistant" and made.get("content") is None and made.get("tool_calls") is None:
        made["content"] = ""
    if isinstance(made.get("content"), list):
        made["content"] = [_part_as_sent(each) for each in made["content"]]
    if isinstance(made.get("tool_calls"), list):
        made["tool_calls"] = [_call_as_sent(each) for each in made["tool_calls"]]
    added = made.get(_PROVIDER_FIELDS)
    is_empty = isinstance(added, Mapping) and all(value is None for value in added.values())
    return _without(made, _PROVIDER_FIELDS) if is_empty else made


def _call_as_sent(call: Any) -> Any:
    """Without the place in a stream, and what the SDK has read of the arguments."""
    made = _without(call, "index")
    if isinstance(made, Mapping) and "function" in made:
        made = {**made, "function": _without(made["function"], "parsed_arguments")}
    return made


def _part_as_sent(part: Any) -> Any:
    has_annotations = isinstance(part, Mapping) and part.get("annotations") not in (None, [])
    return _without(part, "cache_control", *(() if has_annotations else ("annotations",)))


def _without(value: Any, *names: str) -> Any:
    return {name: each for name, each in value.items() if name not in names} if isinstance(value, Mapping) else value


def chat_completion(response: ChatResponse, body: Mapping[str, Any]) -> dict[str, Any]:
    """The response as one JSON object.

    Its null `reasoning` is that of vLLM's server: with it SDKs leave thoughts in the content, in training as later.
    """
    content = response.content or (None if response.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning": None}
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
