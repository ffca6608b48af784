"""Row layouts of published data sets: xLAM, ShareGPT, ToolMind, ToolACE.

Instructions that list tools or describe a call syntax are left out: the chat template or the tool-call format writes
its own. The row has a note of it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolrl.layouts.python_calls import literal, looks_like_calls, parse_calls
from verl.data.layouts import ConvertedRow, Layout, Row
from verl.errors import DataError
from verl.json_values import JsonError, read_json, strict_decoder

_WITHOUT_INSTRUCTIONS = "without the instructions about tools in their system text"
_WITHOUT_END = "without the turns after the last one of the assistant"
_LIST = (list, tuple, str)  # or its JSON text
_ROLES: Mapping[str, str] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
}
_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("dict", "Dict"), "object"),
    **dict.fromkeys(("list", "List", "tuple", "Tuple", "set", "Set"), "array"),
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
}
_GAP = r"(?:\s|\\n)*"  # Hermes has line breaks as such, and as the letters \n
_CALL = re.compile(rf"{_GAP}<tool_call>{_GAP}(.*?){_GAP}</tool_call>{_GAP}", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_INSTRUCTIONS = re.compile(r"You are an? [^.\n]*\bAI model\..*<tools>.*</tool_call>", re.DOTALL)  # Hermes's
_LIST_OF_TOOLS = re.compile(r"<tools>.*?</tools>", re.DOTALL)
_DATE = re.compile(r"[^.\n]*\b(?:today|current (?:date|time))\b[^.\n]*\.", re.IGNORECASE)


def _query(row: Row) -> Row:
    """One query and its calls: xLAM {name, arguments}, Seal-Tools {tool, parameters}, ToolAlpaca."""
    messages: list[Row] = [{"role": "user", "content": row["query"]}]
    if calls := [_call(each, f"answers[{number}]") for number, each in enumerate(_listed(row["answers"], "answers"))]:
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    return _with(row, ("query", "answers"), messages, _tools(row["tools"]))


def _toolace(row: Row) -> Row:
    """Tools in the system text; calls as `[name(key=value)]`. Of the system text only the date is kept."""
    system = row["system"]
    start = system.find("[{")
    try:
        tools = strict_decoder().raw_decode(system, start)[0] if start >= 0 else []
    except ValueError as error:
        raise DataError(f"lists its functions in invalid JSON ({error})", "a JSON list", field="system") from error
    date = " ".join(found.strip() for found in _DATE.findall(system[: max(start, 0)]))
    messages: list[Row] = [{"role": "system", "content": date}] if date else []
    messages += _turns(row["conversations"], _python_calls)
    notes = (_WITHOUT_INSTRUCTIONS,) if system.strip() != date else ()
    return _with(row, ("system", "conversations"), messages, _tools(tools), notes)


def _sharegpt(row: Row) -> Row:
    """{from, value} turns: APIGen-MT and Glaive with turns from function_call, Hermes with calls in <tool_call>."""
    messages: list[Row] = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages += _turns(row["conversations"], _tagged_calls)
    return _with(row, ("system", "conversations"), messages, _tools(row["tools"]))


def _conversations(row: Row) -> Row:
    """OpenAI's messages under another name: ToolMind, whose results may be objects."""
    messages = [_with_text(each) for each in row["conversations"]]
    return _with(row, ("conversations",), messages, _tools(row["tools"]))


XLAM = Layout("xLAM", {"query": (str,), "tools": _LIST, "answers": _LIST}, _query)
SHAREGPT = Layout("ShareGPT", {"conversations.from": (str,), "tools": _LIST}, _sharegpt)
TOOL_MIND = Layout("ToolMind", {"conversations.role": (str,), "tools": _LIST}, _conversations)
TOOL_ACE = Layout("ToolACE", {"conversations.from": (str,), "system": (str,)}, _toolace)


def _with(
    row: Row, replaced: Sequence[str], messages: Sequence[Row], tools: Sequence[Row], notes: tuple[str, ...] = ()
) -> ConvertedRow:
    """The row with these messages and tools. Turns after the last one of the assistant demonstrate nothing."""
    kept = [each for message in messages for each in _without_instructions(message)]
    notes += (_WITHOUT_INSTRUCTIONS,) * (kept != list(messages))
    end = max((number for number, each in enumerate(kept, 1) if _role(each) == "assistant"), default=len(kept))
    notes += (_WITHOUT_END,) * (end < len(kept))
    rest = {key: value for key, value in row.items() if key not in replaced}
    made = ConvertedRow({**rest, "messages": kept[:end], "tools": tools})
    made.notes = notes
    return made


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _without_instructions(message: Row) -> list[Row]:
    """The message; a system text loses Hermes's instructions about tools, or of other wording the list alone."""
    text = message.get("content") if _role(message) == "system" else None
    if not isinstance(text, str):
        return [message]
    rest, count = _INSTRUCTIONS.subn("", text)
    rest = rest if count else _LIST_OF_TOOLS.sub("", text)
    if rest == text:
        return [message]
    return [{**message, "content": rest.strip()}] if rest.strip() else []


def _with_text(message: Any) -> Any:
    """The message; a result that is no text becomes its JSON text."""
    if _role(message) != "tool" or isinstance(message.get("content"), str):
        return message
    return {**message, "content": json.dumps(message.get("content"), ensure_ascii=False)}


def _turns(turns: Sequence[Any], read_calls: Callable[[str, str], tuple[str, list[Row]]]) -> list[dict[str, Any]]:
    """read_calls: (text, field) -> (the text without calls, the calls)"""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        field = f"conversations[{number}]"
        speaker, text = (turn.get("from"), turn.get("value")) if isinstance(turn, Mapping) else ("", None)
        role = _ROLES.get(str(speaker))
        if role is None or not isinstance(text, str):
            raise DataError("is no turn", f"{{from: {' | '.join(_ROLES)}, value: text}}", field=field)
        if role == "tool":
            messages += _results(text, messages)
        elif role == "assistant":
            content, calls = ("", _json_calls(text, field)) if speaker == "function_call" else read_calls(text, field)
            _add_assistant(messages, content, calls)
        else:
            messages.append({"role": role, "content": text})
    return messages


def _add_assistant(messages: list[dict[str, Any]], text: str, calls: list[Row]) -> None:
    """A turn; calls that directly follow a text or other calls belong to the same turn."""
    if calls and messages and messages[-1]["role"] == "assistant":
        before = messages[-1].get("tool_calls", [])
        messages[-1] |= {"content": messages[-1]["content"] or text or None, "tool_calls": [*before, *calls]}
    else:
        messages.append({"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {}))


def _results(text: str, messages: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Messages of tool results, with the tool's name if there was one call."""
    calls = messages[-1].get("tool_calls", []) if messages else []
    name = {"name": calls[0]["function"]["name"]} if len(calls) == 1 else {}
    for content in _RESULT.findall(text) or [text]:
        yield {"role": "tool", "content": content, **name}


def _tagged_calls(text: str, field: str) -> tuple[str, list[Row]]:
    calls = [_call(_json_or_python(found, f"{field}.value"), f"{field}.value") for found in _CALL.findall(text)]
    content = _CALL.sub("\n", text).strip() if calls else text
    if "<tool_call>" in content:
        raise DataError("has a <tool_call> without an end", "<tool_call> .. </tool_call>", field=f"{field}.value")
    return content, calls


def _python_calls(text: str, field: str) -> tuple[str, list[Row]]:
    if not looks_like_calls(text.strip()):
        return text, []
    calls = parse_calls(text.strip())
    if calls is None:
        raise DataError("has calls that cannot be read", "[name(key=value, ..), ..]", field=f"{field}.value")
    return "", [_call({"name": name, "arguments": arguments}, field) for name, arguments in calls]


def _json_calls(text: str, field: str) -> list[Row]:
    found = _json_or_python(text, f"{field}.value")
    return [_call(each, f"{field}.value") for each in (found if isinstance(found, list) else [found])]


def _json_or_python(text: str, field: str) -> Any:
    """JSON, or a Python literal as Hermes has it in places."""
    try:
        return read_json(text)
    except JsonError as error:
        raise error.in_data(field) from error
    except ValueError as error:
        try:
            return literal(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise DataError(f"has a call that is not JSON ({error})", "{name, arguments}", field=field) from error


def _call(value: Any, field: str) -> Row:
    given = value if isinstance(value, Mapping) else {}
    name = given.get("name", given.get("tool"))
    arguments = given.get("arguments", given.get("parameters"))
    if not isinstance(name, str):
        raise DataError("has a call without a name", "{name, arguments}", field=field)
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _listed(value: Any, field: str) -> Sequence[Any]:
    """A list, or its JSON text, which may be null."""
    try:
        found = read_json(value) if isinstance(value, str) else value
    except JsonError as error:
        raise error.in_data(field) from error
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", "a list of objects", field=field) from error
    if found is None:
        return []
    if not isinstance(found, list | tuple):
        raise DataError(f"is of type {type(found).__name__}", "a list of objects", field=field)
    return found


def _tools(value: Any) -> list[Row]:
    return [_tool(each, f"tools[{number}]") for number, each in enumerate(_listed(value, "tools"))]


def _tool(value: Any, field: str) -> Row:
    """OpenAI's schema of a function whose parameters may be a flat map {name: {type, description, required}}."""
    if not isinstance(value, Mapping):
        raise DataError(f"is of type {type(value).__name__}", "an object {name, description, parameters}", field=field)
    function: Row = value
    around: dict[str, Any] = {}
    while isinstance(function.get("function"), Mapping):  # ToolMind wraps some of them twice
        around |= {key: each for key, each in function.items() if key not in ("type", "function")}
        function = function["function"]
    dropped = ("type", "parameters", "arguments", "required")
    rest = {key: each for key, each in function.items() if key not in dropped and each is not None}
    parameters = function.get("parameters") or function.get("arguments") or {}
    if isinstance(parameters, Mapping):
        parameters = _json_schema(parameters, function.get("required") or ())
    return {**around, "type": "function", "function": {**rest, "parameters": parameters}}


def _json_schema(parameters: Row, required: Sequence[str]) -> Row:
    if isinstance(parameters.get("properties"), Mapping):
        return {**_typed(parameters), "type": "object"}
    flat = {name: dict(about) for name, about in parameters.items() if isinstance(about, Mapping)}
    marked = any("required" in about for about in flat.values())
    needed = [name for name, about in flat.items() if about.pop("required", not marked and _is_needed(about)) is True]
    return {"type": "object", "properties": _typed(flat), "required": list(required) or needed}


def _is_needed(parameter: Row) -> bool:
    """xLAM marks optional parameters by their type, as in `str, optional`, or by a default."""
    return "optional" not in str(parameter.get("type")) and "default" not in parameter


def _typed(schema: Any) -> Any:
    """Python's names of types replaced by JSON Schema's, at any depth."""
    if isinstance(schema, Mapping):
        return {
            key: _type_name(value) if key == "type" and isinstance(value, str) else _typed(value)
            for key, value in schema.items()
        }
    return [_typed(each) for each in schema] if isinstance(schema, list | tuple) else schema


def _type_name(name: str) -> str:
    plain = name.partition(",")[0].partition("[")[0].strip()
    return _TYPES.get(plain, plain if name != plain and plain in _TYPES.values() else name)
