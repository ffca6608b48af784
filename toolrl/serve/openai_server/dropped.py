"""Finds request content that a chat template would drop silently. Training refuses such rows; so does the server.

The model's chat template is rendered with trial conversations when its serving files are written. What it does not show
becomes an error of the serving template, in front of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from verl.chat.template import ChatTemplate
from verl.errors import ConfigError, DataError
from verl.formats.jinja import literal
from verl.types import Message, ToolCall, ToolSpec

_USER, _SYSTEM, _TEXT = Message("user", "a"), Message("system", "b"), Message("assistant", "c")
_TOOL = ToolSpec("trial", "", {"type": "object", "properties": {"text": {"type": "string"}}})
_ID = "call00000"  # nine letters and digits, which all chat templates accept
_CALL = Message("assistant", "", (ToolCall(_TOOL.name, {"text": "d"}, _ID),), calls_in_content=False)
_RESULT = Message("tool", "e", tool=_TOOL.name, tool_call_id=_ID)
_ROLES = "messages | map(attribute='role') | list"
_OPENINGS = {  # condition -> messages with which tools may be listed, and how they are named in an error
    f"({_ROLES} | first) != 'system'": ((_USER,), " without a system message"),
    f"({_ROLES} | first) == 'system'": ((_SYSTEM, _USER), " beside a system message"),
}
_WAY_OUT = (
    "serve it with a format that lists them itself, such as --tool-call-format toolrl, or with --option "
    "prompt_template=FILE, a text with {question} and {tools}"
)


def refusals(chat: ChatTemplate, template_tools: bool) -> str:
    """Jinja that raises an error for tools, calls and messages that the chat template does not show.

    template_tools: whether the template lists the tools and writes the calls
    """
    problems = [*(_tools(chat) if template_tools else []), *_messages(chat, template_tools)]
    return "".join(
        f"{{%- if {condition} -%}}{{{{ raise_exception({literal(problem)}) }}}}{{%- endif -%}}"
        for condition, problem in problems
    )


def _tools(chat: ChatTemplate) -> list[tuple[str, str]]:
    lacking = [(condition, how) for condition, (messages, how) in _OPENINGS.items() if not _lists(chat, messages)]
    if len(lacking) == len(_OPENINGS):
        lacking = [("true", "")]
    problem = "the model's chat template does not list tools{}, so the policy would not know them; {}"
    return [(f"tools and {condition}", problem.format(how, _WAY_OUT)) for condition, how in lacking]


def _lists(chat: ChatTemplate, messages: Sequence[Message]) -> bool:
    """Also true of a template that refuses such messages itself."""
    try:
        with suppress(DataError):
            chat.check_tools(messages, (_TOOL,))
    except ConfigError:
        return False
    return True


def _messages(chat: ChatTemplate, template_tools: bool) -> Iterator[tuple[str, str]]:
    tools = (_TOOL,) if template_tools else ()
    trials = [("system", (_SYSTEM, _USER)), ("assistant", (_USER, _TEXT, _USER))]
    for role, messages in (*trials, ("tool", (_USER, _CALL if template_tools else _TEXT, _RESULT))):
        dropped = _find_dropped(chat, messages, tools)
        if dropped.endswith(".content"):
            yield f"'{role}' in ({_ROLES})", f"the model's chat template drops messages with the role {role}"
        elif dropped:
            calls = "messages | selectattr('tool_calls', 'defined') | selectattr('tool_calls') | list"
            yield calls, "the model's chat template drops the calls of earlier turns"


def _find_dropped(chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
    """The field that the template drops; empty if it shows all, or refuses such messages itself."""
    try:
        chat.check_messages(messages, tools, "messages")
    except DataError as error:
        return error.field or ""
    return ""
