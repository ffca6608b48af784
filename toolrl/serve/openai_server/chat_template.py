"""Chat templates that render OpenAI requests as a policy was trained.

Training renders a row in two steps: the tool-call format rewrites the messages (`ToolCallFormat.render_prompt`), and
the model's chat template renders the result. A server knows a chat template alone, so the first step is written in
Jinja, too, in front of the model's own chat template, which stays as it is.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.formats.base import ToolCallFormat
from verl.formats.inline import InlineFormat
from verl.formats.jinja import literal
from verl.formats.prompt import PromptTemplate, PromptTemplateMixin

_FOLDER = Path(__file__).parent / "templates"
_LEADING_BLANKS = re.compile(r"^[ \t]+(?=\{[%#])")  # Jinja strips them, but only at the start of a line
_PLACES = re.compile(r"\{(question|tools)\}")


def serving_chat_template(
    tool_call_format: ToolCallFormat,
    base: str,
    *,
    prompt: PromptTemplate | None = None,
    options: Mapping[str, Any] | None = None,
    separate_turns: bool = False,
    bos_token: str = "",
    refusals: str = "",
    thoughts: str = "",
) -> str:
    """The chat template that renders messages and tools as this format and the model's chat template do in training.

    base: the model's chat template
    prompt: that of the training rows, if it is not the format's own
    options: variables of the chat template that were set in training
    separate_turns: the policy was trained in episodes of several turns, not on rows with a history
    bos_token: put before prompts without a chat template
    refusals: errors for what the model's chat template would drop (dropped.py)
    thoughts: where the model's chat template takes them from, if it lists the tools (thoughts.py)
    Raises ConfigError for a format whose prompts cannot be written as a template.
    """
    variables = (f"{{%- set {key} = {literal(value)} -%}}" for key, value in (options or {}).items())
    head = "".join([_file("common"), *variables])
    if tool_call_format.template_tools:
        moved = thoughts and thoughts + _file("thoughts")
        return _before(head + _file("tools_only") + moved + refusals, base)
    body = tool_call_format.serving_template if isinstance(tool_call_format, PromptTemplateMixin) else None
    if body is None:
        raise ConfigError(
            f"the prompts of the tool-call format {type(tool_call_format).__name__} cannot be written as a chat "
            "template, which a server needs; derive it from TurnFormat or InlineFormat, or let the chat template list "
            "the tools (template_tools)"
        )
    assert isinstance(tool_call_format, PromptTemplateMixin)
    head += _macro("calls_text(calls)", tool_call_format.calls_jinja())
    head += _macro("tool_lines(tools)", "{{ tools | map('tojson') | join('\\n') }}")
    head += _macro("prompt_text(question, tools)", _fill(prompt or tool_call_format.prompt))
    head += f"{{%- set separate_turns = {literal(separate_turns)} -%}}{_file('messages')}"
    if isinstance(tool_call_format, InlineFormat):
        head += _inline_macros(tool_call_format) + _file(body)
        if tool_call_format.raw:
            return f"{head}{_file('raw')}{{{{ {literal(bos_token)} ~ messages[-1].content ~ inline_turn.text }}}}"
        return f"{_before(head + refusals, base)}{{{{ inline_turn.text }}}}"
    return _before(head + (_file("json") if body == "toolrl" else "") + _file(body) + refusals, base)


def _before(head: str, base: str) -> str:
    """Both in one template. The empty expression keeps the trimming at the end of `head` from the beginning of `base`,
    and Jinja drops one line break at the end of a template."""
    return f"{head}{{{{ '' }}}}{_LEADING_BLANKS.sub('', base).removesuffix(chr(10))}"


def _file(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8").strip("\n")


def _macro(signature: str, body: str) -> str:
    return f"{{%- macro {signature} -%}}{body}{{%- endmacro -%}}"


def _fill(prompt: PromptTemplate | None) -> str:
    if prompt is None:
        return "{{ question }}"
    parts = _PLACES.split(prompt.text)  # text, placeholder, text, ..
    texts = [part if number % 2 else literal(part) for number, part in enumerate(parts)]
    return f"{{{{ {' ~ '.join(texts)} }}}}"


def _inline_macros(inline: InlineFormat) -> str:
    """Jinja of `InlineFormat.shown` and `InlineFormat.wrap`, and whether a question contains its own instructions."""
    last_line = f"{literal(inline.last_line_of_errors)} and 'Error' in text"
    shown = (
        "{%- set text = output.strip('\\n') -%}"
        f"{{{{ {literal(inline.empty)} if not text.strip() else text.rstrip().rpartition('\\n')[2] if {last_line} "
        "else text }}"
    )
    opening, closing = inline.delimiters("")
    known = " and ".join(f"{literal(tag)} in question" for tag in inline.instruction_tags)
    explained = f"{{%- if {known} -%}}yes{{%- endif -%}}" if known else ""
    wrapped = f"{{{{ {literal(opening)} ~ output ~ {literal(closing)} }}}}"
    return (
        _macro("shown_output(output)", shown)
        + _macro("wrapped_output(output)", wrapped)
        + _macro("explained(question)", explained)
    )
