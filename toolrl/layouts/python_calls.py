"""Calls in Python's syntax, `[Function Name(key="value", other=1), ..]`, as ToolACE and BFCL's prompts write them."""

import ast
import json
import re
from typing import Any

# the name may contain brackets if another pair follows: `User Feed (Video Posts) V2(limit=3)`
_CALL = re.compile(r"(?P<name>[^()=,\[\]]+(?:\([^()=]*\)[^()=,\[\]]*)*)\((?P<arguments>.*)\)", re.DOTALL)
_LOOKS_LIKE_CALLS = re.compile(r"\[.*\(.*\)\s*\]", re.DOTALL)
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}


def looks_like_calls(text: str) -> bool:
    return _LOOKS_LIKE_CALLS.fullmatch(text) is not None


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """(name, arguments) of the calls in `[Name(key=value, ..), ..]`; None if the text has another format."""
    pieces = _split(text[1:-1])
    if pieces is None:
        return None
    calls = []
    for piece in pieces:
        call = _CALL.fullmatch(piece.strip())
        arguments = _arguments(call["arguments"]) if call else None
        if call is None or arguments is None:
            return None
        calls.append((call["name"].strip(), arguments))
    return calls or None


def _arguments(text: str) -> dict[str, Any] | None:
    """{key: value} of `key=value, ..`; keys may be Python keywords, values are Python or JSON literals."""
    pieces = _split(text) if text.strip() else []
    if pieces is None:
        return None
    arguments = {}
    for piece in pieces:
        key, equals, value = piece.partition("=")
        try:
            found = literal(value.strip())
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return None
        if not equals or not re.fullmatch(r"[\w.-]+", key.strip()) or key.strip() in arguments:
            return None
        arguments[key.strip()] = found
    return arguments


def literal(text: str) -> Any:
    """A Python literal that may contain JSON's true, false and null. Raises ValueError or SyntaxError."""
    try:
        tree = ast.parse(f"({text})", mode="eval")
    except SyntaxError:
        tree = ast.parse(text.replace("\n", "\\n"), mode="eval")  # a line break inside a string
    value = _value(tree.body)
    json.dumps(value, allow_nan=False)  # rejects infinities and sets
    return value


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_CONSTANTS:
        return _JSON_CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("unpacking is not a literal")
        found = {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True) if key}
        if len(found) < len(node.keys):
            raise ValueError("a key twice")
        return found
    return ast.literal_eval(node)


def _split(text: str) -> list[str] | None:
    """The text split at commas outside of quotes and brackets; None for an unclosed quote or bracket."""
    pieces, start, closers, quote, skip = [], 0, [], "", False
    for position, letter in enumerate(text):
        if skip:
            skip = False
        elif quote:
            skip = letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            closers.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter in ")]}":
            if not closers or closers.pop() != letter:
                return None
        elif letter == "," and not closers:
            pieces.append(text[start:position])
            start = position + 1
    return None if quote or closers else [*pieces, text[start:]]
