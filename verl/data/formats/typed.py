"""Arguments that are written as plain texts, read as what the tool's JSON schema says that they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.data.formats.text import BadCallError, read_whole_json
from verl.types import ToolSpec

_KINDS: Mapping[str, str] = {
    "string": "a string",
    "array": "an array",
    "boolean": "true or false",
    "integer": "an integer",
    "null": "null",
    "number": "a number",
    "object": "an object",
}
_JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    dict: "object",
    float: "number",
    int: "integer",
    list: "array",
    str: "string",
    type(None): "null",
}
_MAX_DEPTH = 16  # of references and alternatives in a schema; a schema may refer to itself


def argument_types(tools: Sequence[ToolSpec], tool: str, argument: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows for an argument; empty for a tool or an argument that it has not."""
    schema = next((each.parameters for each in tools if each.name == tool), {})
    properties = schema.get("properties")
    return _types(properties.get(argument), schema) if isinstance(properties, Mapping) else frozenset()


def typed(text: str, types: frozenset[str], argument: str) -> Any:
    """The value that a text stands for: itself where a string is allowed or nothing is known, else as JSON.

    `null` is read as null for every other type, too: models write it for what they leave out, and BFCL's golds hold it.
    Raises BadCallError, with a message for the policy, for a text of another type.
    """
    word = text.strip().lower()
    text_is_allowed = not types or "string" in types
    if word == "null" and ("null" in types or not text_is_allowed):
        return None
    if text_is_allowed:
        return text
    if "boolean" in types and word in ("true", "false"):  # also as Python writes them
        return word == "true"
    wrong = f"The parameter {argument[:80]!r} must be {' or '.join(_KINDS[each] for each in sorted(types))}"
    try:
        value = read_whole_json(text)
    except BadCallError as error:
        raise BadCallError(f"{wrong}, as JSON writes it.") from error
    found = _JSON_TYPES[type(value)]
    if found == "number" and "number" not in types and value.is_integer():
        value, found = int(value), "integer"
    if found in types or (found == "integer" and "number" in types):
        return value
    raise BadCallError(f"{wrong}, not {_KINDS[found]}.")


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that a schema allows, as far as it names them; empty where it names none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(each for each in _JSON_TYPES.values() if each in named)
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(_JSON_TYPES[type(each)] for each in values if type(each) in _JSON_TYPES)
    found = [_types(each, root, depth + 1) for key in ("anyOf", "oneOf") for each in schema.get(key, ())]
    if found:
        return frozenset().union(*found) if all(found) else frozenset()
    narrowed = [types for each in schema.get("allOf", ()) if (types := _types(each, root, depth + 1))]
    if narrowed:
        return frozenset.intersection(*narrowed)
    return _types(_referred(schema.get("$ref"), root), root, depth + 1)


def _referred(pointer: Any, root: Mapping[str, Any]) -> Any:
    """What `#/$defs/NAME` stands for; nothing outside the schema is ever looked up."""
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    found: Any = root
    for step in pointer[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
