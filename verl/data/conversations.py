"""OpenAI's rows {messages, tools}: which assistant turns are trained, and whether calls, results and tools agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.messages import read_messages, read_text, read_tools
from verl.errors import DataError
from verl.types import Message, Task, ToolCall, ToolSpec

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CHOICES = "auto, none, required, or {type: function, function: {name}}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row with messages.

    tools: those that the policy is offered
    turns: indices of the trained assistant turns; empty: the row ends with a prompt
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    turns: tuple[int, ...]


def read_conversation(row: Mapping[str, Any], split_turns: str = "all") -> Conversation:
    """Validates a row. Raises DataError with the message's index.

    split_turns: "all" trains every assistant turn, "last" the last one
    """
    messages, tools = read_messages(row["messages"], "messages"), read_tools(row.get("tools"))
    _check_roles(messages)
    _check_results(messages)
    if row.get("tools") is not None:
        _check_names(messages, tools)
    turns = _trained(messages)[-1 if split_turns == "last" else 0 :]
    for turn in turns:
        if all(message.role in ("system", "developer") for message in messages[:turn]):
            hint = "Remove the turn, or set data.split_turns=last to train the last one only"
            raise DataError("is an assistant turn without a prompt", "a user message before it", hint, field=_at(turn))
    return Conversation(messages, offered_tools(row, tools, {turn: messages[turn] for turn in turns}), turns)


def _at(number: int, field: str = "") -> str:
    return f"messages[{number}]{field}"


def _trained(messages: Sequence[Message]) -> tuple[int, ...]:
    if messages[-1].role != "assistant":
        return ()
    return tuple(number for number, message in enumerate(messages) if message.role == "assistant")


def _check_roles(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        if message.role not in _ROLES:
            hint = "data.map=file.py:function converts other names"
            raise DataError(f"is {message.role!r}", f"one of {', '.join(_ROLES)}", hint, field=_at(number, ".role"))
        if number and message.role in ("system", "developer"):
            hint = "Join it with the first message"
            problem = f"{message.role!r} is not the first message"
            raise DataError(problem, "one system message, the first", hint, field=_at(number, ".role"))
        if not (message.content.strip() or message.tool_calls or message.template_fields or message.role == "tool"):
            raise DataError("is empty", "a text", field=_at(number, ".content"))


def _check_results(messages: Sequence[Message]) -> None:
    """Every result must answer a call of the assistant turn before it, and every call with an id needs a result."""
    turn = 0  # the last message that is no result
    ids: list[str] = []  # ids of its calls
    open_ids: list[str] = []  # without a result so far
    for number, message in enumerate(messages):
        if message.role == "tool":
            if not messages[turn].tool_calls:
                hint = "Add the assistant turn with the call, or remove the result"
                raise DataError("is a result without a call", "a call before it", hint, field=_at(number))
            _check_result(message, number, turn, ids, open_ids)
            continue
        if open_ids:
            place, hint = _at(turn, ".tool_calls"), "Add the result, or end the row with the call"
            raise DataError(f"has no result for {open_ids[0]!r}", "a tool message for each id", hint, field=place)
        turn, ids = number, [call.id for call in message.tool_calls if call.id]
        open_ids = list(ids)
        if twice := [id for id in ids if ids.count(id) > 1]:
            raise DataError(f"has the id {twice[0]!r} twice", "one id per call", field=_at(turn, ".tool_calls"))


def _check_result(message: Message, number: int, turn: int, ids: list[str], open_ids: list[str]) -> None:
    """open_ids: of calls without a result so far; the message's is removed"""
    field, expected = _at(number, ".tool_call_id"), f"one of {', '.join(ids) or 'no ids'}, of {_at(turn)}"
    if message.tool_call_id is None:
        if ids:
            raise DataError("is missing", expected, "Copy the id of the call", field=field)
    elif message.tool_call_id in open_ids:
        open_ids.remove(message.tool_call_id)
    else:
        again = message.tool_call_id in ids
        problem = f"{message.tool_call_id!r} {'has a result already' if again else 'is the id of no call'}"
        raise DataError(problem, expected, "Copy the id of the call", field=field)


def _check_names(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
    names = [tool.name for tool in tools]
    for number, message in enumerate(messages):
        for place, call in enumerate(message.tool_calls):
            if call.name not in names:
                field = _at(number, f".tool_calls[{place}].function.name")
                expected = f"one of {', '.join(names)}" if names else "a tool of the column tools, which is empty"
                raise DataError(f"{call.name!r} is not in tools", expected, "Add its schema to tools", field=field)


def offered_tools(
    row: Mapping[str, Any], tools: tuple[ToolSpec, ...], golds: Mapping[int, Message]
) -> tuple[ToolSpec, ...]:
    """The tools that the policy is offered under the row's `tool_choice` and `parallel_tool_calls`.

    Engines are not forced to call: what a row demands is demanded of its gold turns, {index: message}, with which the
    reward compares. Raises DataError if they disagree with it, or if there are none.
    """
    choice, parallel = row.get("tool_choice"), row.get("parallel_tool_calls")
    if not isinstance(parallel, bool | None):
        raise DataError(f"is {parallel!r}", "true or false", field="parallel_tool_calls")
    is_free = choice in (None, "auto", "none")
    wanted = set() if is_free else _chosen(choice, tools)
    if not golds and not (is_free and parallel in (None, True)):
        name = "parallel_tool_calls" if is_free else "tool_choice"
        hint = "End the row with the assistant turn, or remove the column"
        problem = f"{row[name]!r} cannot be demanded of the policy"
        raise DataError(problem, "a gold turn to compare with", hint, field=name)
    for number, gold in golds.items():
        names = [call.name for call in gold.tool_calls]
        problem = ""
        if choice == "none" and names:
            problem = "calls under tool_choice none"
        elif not is_free and (not names or (wanted and set(names) != wanted)):
            problem = f"calls {', '.join(names) or 'nothing'} under tool_choice {', '.join(wanted) or 'required'}"
        elif parallel is False and len(names) > 1:
            problem = f"has {len(names)} calls under parallel_tool_calls false"
        if problem:
            hint = "Correct the row; data.split_turns=last trains the last turn only"
            raise DataError(problem, "what the row demands", hint, field=_at(number, ".tool_calls"))
    return () if choice == "none" else tools


def _chosen(choice: Any, tools: Sequence[ToolSpec]) -> set[str]:
    """The tool that must be called; empty: any. Raises DataError for an unknown choice."""
    names = [tool.name for tool in tools]
    if choice == "required":
        return set()
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise DataError(f"is {choice!r}", _CHOICES, field="tool_choice")
    name = read_text(function.get("name"), "tool_choice.function.name")
    if name not in names:
        expected = f"one of {', '.join(names) or 'the column tools, which is empty'}"
        raise DataError(f"{name!r} is not in tools", expected, field="tool_choice.function.name")
    return {name}


def violates_schema(task: Task) -> bool:
    """Whether a gold call lacks a required argument, or has one that its tool does not list."""
    schemas = {tool.name: tool.parameters for tool in task.tools}
    calls = task.gold.tool_calls if task.gold else ()
    return any(_violates(call, schemas[call.name]) for call in calls if call.name in schemas)


def _violates(call: ToolCall, schema: Mapping[str, Any]) -> bool:
    known, required = schema.get("properties"), schema.get("required") or ()
    lacking = [name for name in required if name not in call.arguments]
    more = isinstance(known, Mapping) and [name for name in call.arguments if name not in known]
    return bool(lacking or (more and not schema.get("additionalProperties")))
