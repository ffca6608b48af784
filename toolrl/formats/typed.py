"""Converts arguments written as plain text to the types of the tool's JSON schema."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.formats.text import BadCallError, read_whole_json
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
_MAX_DEPTH = 16  # nesting of references and alternatives in a schema, which may be recursive


def argument_types(tools: Sequence[ToolSpec], tool: str, argument: str) -> frozenset[str]:
    """The JSON types that a tool's schema allows for an argument; empty for an unknown tool or argument."""
    schema = next((each.parameters for each in tools if each.name == tool), {})
    properties = schema.get("properties")
    return _types(properties.get(argument), schema) if isinstance(properties, Mapping) else frozenset()


def typed(text: str, types: frozenset[str], argument: str) -> Any:
    """The value of a text: the text itself if a string is allowed or the type is unknown, else parsed as JSON.

    `null` is accepted for all other types, too: models write it for omitted arguments, and BFCL's gold calls have it.
    Raises BadCallError, with a message for the policy, for a text of another type.
    """
    literal = text.strip().lower()
    text_is_allowed = not types or "string" in types
    if literal == "null" and ("null" in types or not text_is_allowed):
        return None
    if text_is_allowed:
        return text
    if "boolean" in types and literal in ("true", "false"):  # also in Python's spelling
        return literal == "true"
    wrong = f"The parameter {argument[:80]!r} must be {' or '.join(_KINDS[each] for each in sorted(types))}"
    try:
        value = read_whole_json(text)
    except BadCallError as error:
        raise BadCallError(f"{wrong}, in JSON syntax.") from error
    found = _JSON_TYPES[type(value)]
    if found == "number" and "number" not in types and value.is_integer():
        value, found = int(value), "integer"
    if found in types or (found == "integer" and "number" in types):
        return value
    raise BadCallError(f"{wrong}, not {_KINDS[found]}.")


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """JSON types that a schema allows; empty if it does not specify any."""
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
    return _types(_dereferenced(schema.get("$ref"), root), root, depth + 1)


def _dereferenced(pointer: Any, root: Mapping[str, Any]) -> Any:
    """The target of `#/$defs/NAME`; references outside the schema are not followed."""
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    found: Any = root
    for step in pointer[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
