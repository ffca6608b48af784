"""Chat templates that render OpenAI requests as a policy was trained.

Training renders a row in two steps: the tool-call format rewrites the messages (`ToolCallFormat.render_prompt`), and
the model's chat template renders the result. A server knows a chat template alone, so the first step is written in
Jinja, too, in front of the model's own chat template, which stays as it is.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.formats.base import ToolCallFormat
from verl.formats.hermes import HermesFormat
from verl.formats.inline import InlineFormat
from verl.formats.llama3_json import Llama3JsonFormat
from verl.formats.prompt import PromptTemplate, PromptTemplateMixin
from verl.formats.toolrl import ToolRlFormat
from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END
from verl.formats.xml import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, XmlFormat
from verl.kit.papers.formats.fence import CLOSING, OPENING, OUTPUT, FenceFormat, ZeroTirFormat
from verl.kit.papers.formats.tags import ANSWER, ANSWER_END, ReToolFormat, TagsFormat
from verl.kit.papers.formats.tool_n1 import ToolN1Format

_FOLDER = Path(__file__).parent / "templates"
_LEADING_BLANKS = re.compile(r"^[ \t]+(?=\{[%#])")  # Jinja strips them, but only at the start of a line
_PLACES = re.compile(r"\{(question|tools)\}")
_TAGS = [THINK, THINK_END, TOOL_CALL, TOOL_CALL_END]
_XML_TAGS = [FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, TOOL_CALL, TOOL_CALL_END, THINK, THINK_END]
_BODIES: Mapping[type, str] = {
    HermesFormat: "question",
    Llama3JsonFormat: "question",
    XmlFormat: "question",
    ToolN1Format: "system",
    ToolRlFormat: "toolrl",
    ReToolFormat: "inline",
    TagsFormat: "inline",
    FenceFormat: "inline",
    ZeroTirFormat: "inline",
}


def serving_chat_template(
    tool_call_format: ToolCallFormat,
    base: str,
    *,
    prompt: PromptTemplate | None = None,
    options: Mapping[str, Any] | None = None,
    separate_turns: bool = False,
    bos_token: str = "",
) -> str:
    """The chat template that renders messages and tools as this format and the model's chat template do in training.

    base: the model's chat template
    prompt: that of the training rows, if it is not the format's own
    options: variables of the chat template that were set in training
    separate_turns: the policy was trained in episodes of several turns, not on rows with a history
    bos_token: put before prompts without a chat template
    Raises ConfigError for a format whose prompts cannot be written as a template.
    """
    variables = (f"{{%- set {key} = {_literal(value)} -%}}" for key, value in (options or {}).items())
    head = "".join([_file("common"), *variables])
    if tool_call_format.template_tools:
        return _before(head + _file("tools_only"), base)
    body = _BODIES.get(type(tool_call_format))
    if body is None or not isinstance(tool_call_format, PromptTemplateMixin):
        known = ", ".join(sorted(each.__name__ for each in _BODIES))
        raise ConfigError(
            f"the prompts of the tool-call format {type(tool_call_format).__name__} cannot be written as a chat "
            f"template, which a server needs; known: {known}, and formats whose tools the chat template lists"
        )
    head += _macro("calls_text(calls)", _calls_text(tool_call_format))
    head += _macro("tool_lines(tools)", "{{ tools | map('tojson') | join('\\n') }}")
    head += _macro("prompt_text(question, tools)", _filled(prompt or tool_call_format.prompt))
    head += f"{{%- set separate_turns = {_literal(separate_turns)} -%}}{_file('messages')}"
    if isinstance(tool_call_format, InlineFormat):
        head += _inline_macros(tool_call_format) + _file(body)
        if tool_call_format.raw:
            return f"{head}{_file('raw')}{{{{ {_literal(bos_token)} ~ messages[-1].content ~ inline_turn.text }}}}"
        return f"{_before(head, base)}{{{{ inline_turn.text }}}}"
    return _before(head + (_file("json") if body == "toolrl" else "") + _file(body), base)


def _before(head: str, base: str) -> str:
    """Both in one template. The empty expression keeps the trimming at the end of `head` from the beginning of `base`,
    and Jinja drops one line break at the end of a template."""
    return f"{head}{{{{ '' }}}}{_LEADING_BLANKS.sub('', base).removesuffix(chr(10))}"


def _file(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").strip("\n")


def _literal(value: Any) -> str:
    """A value of JSON as a Jinja literal."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _macro(signature: str, body: str) -> str:
    return f"{{%- macro {signature} -%}}{body}{{%- endmacro -%}}"


def _filled(prompt: PromptTemplate | None) -> str:
    if prompt is None:
        return "{{ question }}"
    parts = _PLACES.split(prompt.text)  # text, placeholder, text, ..
    texts = [part if number % 2 else _literal(part) for number, part in enumerate(parts)]
    return f"{{{{ {' ~ '.join(texts)} }}}}"


def _calls_text(tool_call_format: ToolCallFormat) -> str:
    """Jinja of `ToolCallFormat.render`."""
    match tool_call_format:
        case HermesFormat():
            return _each_call(_call_object("arguments"), f"{TOOL_CALL}\n", f"\n{TOOL_CALL_END}", "\n")
        case ToolRlFormat():
            calls = _each_call(_call_object("parameters"), "", "", "\n")
            return _around(f"{TOOL_CALL}\n", calls, f"\n{TOOL_CALL_END}")
        case ToolN1Format():
            return _around(
                f"{TOOL_CALL}\n[", _each_call(_call_object("arguments"), "", "", ", "), f"]\n{TOOL_CALL_END}"
            )
        case Llama3JsonFormat():
            return _each_call(_call_object("parameters", [THINK, THINK_END]), "", "", "; ")
        case XmlFormat():
            return _each_call(_XML_CALL, f"{TOOL_CALL}\n", f"\n{TOOL_CALL_END}", "\n")
        case TagsFormat() as tags:
            around = ("\n```python\n", "\n```\n") if tags.fenced else (" ", " ")
            opening, closing = f"<{tags.call_tag}>{around[0]}", f"{around[1]}</{tags.call_tag}>"
        case ZeroTirFormat():
            opening, closing = f"{OPENING}\n", f"\n{CLOSING}"
        case FenceFormat():
            opening, closing = f"{OPENING}\n", f"\n{CLOSING}\n{OUTPUT}"
    assert isinstance(tool_call_format, InlineFormat)
    argument = f"call.function.arguments[{_literal(tool_call_format.argument)}]"
    return _each_call(f"{{{{ {argument} }}}}", opening, closing, "\n")


def _around(opening: str, inside: str, closing: str) -> str:
    return f"{{{{ {_literal(opening)} }}}}{inside}{{{{ {_literal(closing)} }}}}"


def _each_call(one: str, opening: str, closing: str, between: str) -> str:
    start = f"{{{{ ('' if loop.first else {_literal(between)}) ~ {_literal(opening)} }}}}"
    return f"{{%- for call in calls -%}}{start}{one}{{{{ {_literal(closing)} }}}}{{%- endfor -%}}"


def _call_object(key: str, tags: list[str] = _TAGS) -> str:
    return f"{{{{ escaped({{'name': call.function.name, '{key}': call.function.arguments}}, {_literal(tags)}) }}}}"


_XML_CALL = (
    f"{{{{ {_literal(FUNCTION)} ~ call.function.name ~ '>' }}}}"
    "{%- for key, value in call.function.arguments.items() -%}"
    f"{{{{ {_literal(chr(10) + PARAMETER)} ~ key ~ '>\\n' }}}}"
    f"{{{{ value if value is string else escaped(value, {_literal(_XML_TAGS)}) }}}}"
    f"{{{{ {_literal(chr(10) + PARAMETER_END)} }}}}"
    "{%- endfor -%}"
    f"{{{{ {_literal(chr(10) + FUNCTION_END)} }}}}"
)


def _inline_macros(inline: InlineFormat) -> str:
    """Jinja of `InlineFormat.shown` and `InlineFormat.wrap`, and whether a question contains its own instructions."""
    last_line = f"{_literal(inline.last_line_of_errors)} and 'Error' in text"
    shown = (
        "{%- set text = output.strip('\\n') -%}"
        f"{{{{ {_literal(inline.empty)} if not text.strip() else text.rstrip().rpartition('\\n')[2] if {last_line} "
        "else text }}"
    )
    opening, closing = inline.delimiters("")
    explained = ""
    if isinstance(inline, TagsFormat):
        tags = [f"<{inline.call_tag}>", f"</{inline.call_tag}>", ANSWER, ANSWER_END]
        explained = f"{{%- if {' and '.join(f'{_literal(tag)} in question' for tag in tags)} -%}}yes{{%- endif -%}}"
    wrapped = f"{{{{ {_literal(opening)} ~ output ~ {_literal(closing)} }}}}"
    return (
        _macro("shown_output(output)", shown)
        + _macro("wrapped_output(output)", wrapped)
        + _macro("explained(question)", explained)
    )
