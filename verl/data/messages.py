"""Parses chat messages and tools of a row in OpenAI's format; errors name the field that cannot be used.

The single reader for RL prompts, SFT demonstrations and all other data with chat messages. Its inverse is
`verl.formats.openai.as_openai`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import DataError
from verl.json_values import JsonError, check_values, read_json
from verl.types import Message, ToolCall, ToolSpec

_READ = ("role", "content", "tool_calls", "tool_call_id", "name")
_MESSAGE = "an object {role, content}"
_CALL = "{id, type: function, function: {name, arguments}}"
_TOOL = "{type: function, function: {name, description, parameters}}"
# unsupported columns of OpenAI requests and other trainers that would change the prompt or the loss:
# {name: (default value, which is accepted; hint)}
_UNUSED_COLUMNS: Mapping[str, tuple[Any, str]] = {
    "functions": (None, f"Put the functions into the column tools as {_TOOL}"),
    "function_call": (None, ""),
    "response_format": ({"type": "text"}, ""),
    "chat_template_kwargs": (None, "Set model.chat_template_options, which apply to all rows"),
    "system": (None, "Make it the first message, with the role system"),
    "images": (None, ""),
    "videos": (None, ""),
    "audios": (None, ""),
    "weight": (1, ""),
    "loss_mask": (None, ""),
}


def read_messages(value: Any, field: str) -> tuple[Message, ...]:
    """The messages of a column: a list or its JSON text. Raises DataError with index and field, e.g.
    `messages[3].tool_calls[0].function.arguments`."""
    messages = read_list(value, field, "a list of {role, content} messages")
    if not messages:
        raise DataError("is empty", "a list of {role, content} messages", field=field)
    return tuple(_message(each, f"{field}[{number}]") for number, each in enumerate(messages))


def read_tools(value: Any, field: str = "tools") -> tuple[ToolSpec, ...]:
    """The tools of a column: a list of OpenAI function schemas, or its JSON text; empty for null.

    A schema without the enclosing `function` is read as the function itself. Raises DataError.
    """
    if value is None:
        return ()
    given = read_list(value, field, f"[{_TOOL}]")
    tools = tuple(_tool(each, f"{field}[{number}]") for number, each in enumerate(given))
    names = set[str]()
    for number, tool in enumerate(tools):
        if tool.name in names:
            raise DataError(f"repeats the name {tool.name!r}", "one schema per name", field=f"{field}[{number}]")
        names.add(tool.name)
    return tools


def check_columns(row: Mapping[str, Any]) -> None:
    """Raises DataError for an unsupported column that would change the prompt or the loss."""
    for name, (default, hint) in _UNUSED_COLUMNS.items():
        value = row.get(name)
        if value not in (None, "", [], {}, default):
            expected = "" if default is None else str(default)
            raise DataError("cannot be used", expected, hint or "Remove or rename the column", field=name)


def _message(value: Any, field: str) -> Message:
    given = _object(value, field, _MESSAGE)
    role = read_text(given.get("role"), f"{field}.role")
    calls = _calls(given.get("tool_calls"), f"{field}.tool_calls")
    if calls and role != "assistant":
        raise DataError(f"is in a message with role {role}", "role assistant", field=f"{field}.tool_calls")
    if given.get("tool_call_id") is not None and role != "tool":
        raise DataError(f"is in a message with role {role}", "role tool", field=f"{field}.tool_call_id")
    if given.get("function_call") is not None:
        hint = "Write it as tool_calls, and role function as role tool"
        raise DataError("is OpenAI's former field", f"tool_calls: [{_CALL}]", hint, field=f"{field}.function_call")
    read = (*_READ, "weight") if role == "assistant" else _READ
    if role == "assistant" and given.get("weight") not in (None, 1):
        hint = "Remove it; data.split_turns=last trains the last turn only"
        raise DataError("cannot be used: every assistant turn is trained", "1", hint, field=f"{field}.weight")
    more = {key: each for key, each in given.items() if key not in read and each is not None}
    name = given.get("name")
    if name is not None:
        read_text(name, f"{field}.name")
        if role not in ("tool", "function"):
            more["name"], name = name, None
    content = given.get("content")
    if content is None and (calls or more):  # templates may distinguish null from an empty text
        more["content"], content = None, ""
    return Message(
        role,
        _content(content, f"{field}.content"),
        calls,
        name,
        None if given.get("tool_call_id") is None else read_text(given["tool_call_id"], f"{field}.tool_call_id"),
        calls_in_content=not calls,
        template_fields=more,
    )


def _content(value: Any, field: str) -> str:
    """The text; several text parts are joined by line breaks, as in vLLM's server."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "\n".join(_part(each, f"{field}[{number}]") for number, each in enumerate(value))
    raise _wrong_type(value, "a text, or a list of {type: text, text}", field)


def _part(value: Any, field: str) -> str:
    part = _object(value, field, "{type: text, text}")
    kind = part.get("type")
    more = sorted(key for key, each in part.items() if key not in ("type", "text") and each is not None)
    if kind != "text" or more:
        problem = f"is of type {kind!r}" if kind != "text" else f"has the fields {', '.join(more)}"
        raise DataError(problem, "{type: text, text}: only text can be used", field=field)
    text = part.get("text")
    if not isinstance(text, str):
        raise DataError(f"is of type {type(text).__name__}", "a text", field=f"{field}.text")
    return text


def _calls(value: Any, field: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    return tuple(_call(each, f"{field}[{number}]") for number, each in enumerate(read_list(value, field, f"[{_CALL}]")))


def _call(value: Any, field: str) -> ToolCall:
    given = _object(value, field, _CALL)
    _check_type(given, field)
    _only(given, ("id", "type", "function"), field, _CALL)
    function = _object(given.get("function"), f"{field}.function", "{name, arguments}")
    _only(function, ("name", "arguments"), f"{field}.function", "{name, arguments}")
    return ToolCall(
        read_text(function.get("name"), f"{field}.function.name"),
        read_arguments(function.get("arguments"), f"{field}.function.arguments"),
        None if given.get("id") is None else read_text(given["id"], f"{field}.id"),
    )


def read_arguments(value: Any, field: str) -> dict[str, Any]:
    """The object: the API has its JSON text, templates expect the object. Raises DataError.

    None or a blank text: no arguments, as proxies write the call of a function without parameters.
    """
    if isinstance(value, str) and not value.strip():
        value = None
    elif isinstance(value, str):
        value = _from_json(value, field, "an object, or its JSON text")
    else:
        _check_values(value, field)
    return dict(_object({} if value is None else value, field, "an object, or its JSON text"))


def has_blank_arguments(row: Any) -> bool:
    """Whether a call of this row, which could be read, has a blank text for its arguments."""
    messages = row.get("messages") if isinstance(row, Mapping) else None
    for message in messages if isinstance(messages, list) else ():
        for each in message.get("tool_calls") or ():
            given = each["function"].get("arguments")
            if isinstance(given, str) and not given.strip():
                return True
    return False


def _tool(value: Any, field: str) -> ToolSpec:
    given = _object(value, field, _TOOL)
    _check_type(given, field)
    if given.get("function") is None:
        if "name" not in given and "type" in given:
            raise DataError("is missing", "{name, description, parameters}", field=f"{field}.function")
        function, place = {key: each for key, each in given.items() if key != "type"}, field
        schema: dict[str, Any] = {"type": "function", "function": function}
    else:
        function, place = dict(_object(given["function"], f"{field}.function", _TOOL)), f"{field}.function"
        schema = dict(given)
    parameters = function.get("parameters")
    if isinstance(parameters, str):
        raise DataError("is a text", "a JSON schema as an object", field=f"{place}.parameters")
    parameters = {} if parameters is None else _object(parameters, f"{place}.parameters", "a JSON schema")
    properties = parameters.get("properties")
    if properties is not None:
        _object(properties, f"{place}.parameters.properties", "an object")
        for name, each in properties.items():
            if not isinstance(each, Mapping | bool):
                problem = "is null" if each is None else f"is of type {type(each).__name__}"
                raise DataError(problem, "a JSON schema", field=f"{place}.parameters.properties.{name}")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise DataError(f"is of type {type(description).__name__}", "a text", field=f"{place}.description")
    return ToolSpec(read_text(function.get("name"), f"{place}.name"), description or "", dict(parameters), schema)


def read_object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A column with an object, or its JSON text. Raises DataError, also if the column is missing."""
    value = row.get(name)
    return _object(_from_json(value, name, "an object") if isinstance(value, str) else value, name, "an object")


def read_list(value: Any, field: str, expected: str) -> Sequence[Any]:
    if isinstance(value, str):
        value = _from_json(value, field, expected)
    if not isinstance(value, list | tuple):
        raise DataError(f"is of type {type(value).__name__}", expected, field=field)
    return value


def _from_json(text: str, field: str, expected: str) -> Any:
    try:
        return read_json(text)
    except JsonError as error:
        raise error.in_data(field) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error})", expected, field=field) from error


def _check_values(value: Any, field: str) -> None:
    try:
        check_values(value)
    except JsonError as error:
        raise error.in_data(field) from error


def _object(value: Any, field: str, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(value, expected, field)
    return value


def _wrong_type(value: Any, expected: str, field: str) -> DataError:
    problem = "is missing" if value is None else f"is of type {type(value).__name__}"
    return DataError(problem, expected, field=field)


def _check_type(given: Mapping[str, Any], field: str) -> None:
    """The type of a call or a tool must be `function`, the only supported type of OpenAI's API."""
    if given.get("type") not in (None, "function"):
        raise DataError(f"is {given['type']!r}", "function", field=f"{field}.type")


def _only(given: Mapping[str, Any], known: Sequence[str], field: str, expected: str) -> None:
    for key, value in given.items():
        if key not in known and value is not None:
            raise DataError("cannot be used", expected, field=f"{field}.{key}")


def read_text(value: Any, field: str) -> str:
    """A text that is not empty. Raises DataError."""
    if not isinstance(value, str) or not value:
        raise DataError("is empty", "a text", field=field) if value == "" else _wrong_type(value, "a text", field)
    return value
