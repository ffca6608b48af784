"""Parts of chat templates in Jinja, with which a server renders calls as `ToolCallFormat.render` does in training.

They use the macro `escaped(value, tags)` and the variable `calls` of toolrl/serve/openai_server/templates.
"""

import json
from collections.abc import Sequence
from typing import Any

from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END


def literal(value: Any) -> str:
    """A value of JSON as a Jinja literal."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def around(opening: str, inside: str, closing: str) -> str:
    return f"{{{{ {literal(opening)} }}}}{inside}{{{{ {literal(closing)} }}}}"


def each_call(one: str, opening: str = "", closing: str = "", between: str = "\n") -> str:
    """one: Jinja of the variable `call`"""
    start = f"{{{{ ('' if loop.first else {literal(between)}) ~ {literal(opening)} }}}}"
    return f"{{%- for call in calls -%}}{start}{one}{{{{ {literal(closing)} }}}}{{%- endfor -%}}"


def call_object(key: str, tags: Sequence[str] = (THINK, THINK_END, TOOL_CALL, TOOL_CALL_END)) -> str:
    """A JSON object of name and arguments, the latter under `key`, without any of the tags, as `to_json` writes it."""
    return f"{{{{ escaped({{'name': call.function.name, '{key}': call.function.arguments}}, {literal(list(tags))}) }}}}"


def argument(name: str) -> str:
    """The text of a call's single argument."""
    return f"{{{{ call.function.arguments[{literal(name)}] }}}}"
