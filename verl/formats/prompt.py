"""Prompt templates: plain text files with the placeholders `{question}` and `{tools}`."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.formats.split import content_before
from verl.formats.text import find_spoken, speech_start
from verl.registry import nearest
from verl.text import shared_start
from verl.types import Message, ToolCall, ToolSpec

_FOLDER = Path(__file__).parent / "prompts"
TOOLS = "{tools}"  # placeholder of the tool list


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with placeholders; `sha256` identifies it in the record of a run."""

    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def fill(self, question: str, tools: str) -> str:
        return filled(self.text, question=question, tools=tools)


def filled(text: str, **values: str) -> str:
    """The text with the placeholders `{name}` of these names filled once; inserted text is not expanded again."""
    return re.sub(rf"\{{({'|'.join(values)})\}}", lambda found: values[found[1]], text)


def load_template(path_or_name: str, place: str = "{question}") -> PromptTemplate:
    """One of this package's prompts by name, or any file by path, verbatim.

    Raises ConfigError if there is no such file, if it is not UTF-8, or if it lacks the placeholder `place`.
    """
    own = _FOLDER / f"{path_or_name}.txt"
    path = own if own.is_file() else Path(path_or_name)
    try:
        text = path.read_bytes().decode()  # as text, line ends would be translated
    except OSError as error:
        known = nearest(path_or_name, [each.stem for each in _FOLDER.glob("*.txt")])
        raise ConfigError(f"there is no prompt template with the name or path {path_or_name!r}; {known}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt template {str(path)!r} is not in UTF-8 ({error})") from error
    if place not in text:
        raise ConfigError(f"the prompt template {str(path)!r} lacks the placeholder {place}")
    return PromptTemplate(text)


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """The tool in OpenAI's format, as chat templates expect it; for a tool of a row, the row's own schema."""
    if tool.schema is not None:
        return dict(tool.schema)
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def tool_lines(tools: Sequence[ToolSpec]) -> str:
    return "\n".join(json.dumps(function_schema(tool), ensure_ascii=False) for tool in tools)


_COMMON = {"description": "", "type": "string", "default": ""}  # defaults of parameters in ToolRL's rows


def numbered_tools(tools: Sequence[ToolSpec], common: Mapping[str, str] = _COMMON) -> str:
    """ToolRL's list: name, description, and parameters as one flat object without JSON Schema around it.

    common: fields that a parameter has if its schema has no others
    """
    return "\n".join(
        f"{number}. Name: {tool.name}\nDescription: {tool.description}\nParameters: {json.dumps(_flat(tool, common))}"
        for number, tool in enumerate(tools, 1)
    )


def _flat(tool: ToolSpec, common: Mapping[str, str]) -> dict[str, Any]:
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    # true is a valid schema that allows any value
    return {name: {**common, **(schema if isinstance(schema, Mapping) else {})} for name, schema in properties.items()}


@dataclass(frozen=True)
class PromptTemplateMixin:
    """A format with an optional prompt template of the recipe.

    prompt_template: name or path of a text with `{question}`; the filled text replaces the last user message
    """

    place: ClassVar[str] = "{question}"
    serving_template: ClassVar[str | None] = (
        "question"  # a name in toolrl/serve/openai_server/templates; None: cannot be served
    )
    turns_per_call: ClassVar[int] = 1
    parallel_calls: ClassVar[bool] = True
    prompt_template: str | None = None

    def __post_init__(self) -> None:
        _ = self.prompt  # raises early if the file is invalid

    @cached_property
    def prompt(self) -> PromptTemplate | None:
        return None if self.prompt_template is None else load_template(self.prompt_template, self.place)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """The messages, with the question inserted into the recipe's prompt template if there is one."""
        if self.prompt is None:
            return tuple(messages)
        last = _last_user(messages)
        text = self.prompt.fill(messages[last].content, tool_lines(tools))
        return (*messages[:last], Message("user", text), *messages[last + 1 :])

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return ()  # a call ends with the turn

    @property
    def final_stop_strings(self) -> tuple[str, ...]:
        return ()  # an answer ends with the turn

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """The results unchanged; the chat template renders them as one turn or several."""
        return tuple(results)

    @property
    def openings(self) -> tuple[str, ...]:
        """The texts with which calls begin: what all rendered ones share. Empty if they share nothing."""
        render = getattr(self, "render", None)
        shared = shared_start(*(render([call]) for call in self.trial_calls)) if render else ""
        return tuple(shared.split()[:1])

    @property
    def trial_calls(self) -> tuple[ToolCall, ToolCall]:
        """Two calls of this format that share nothing."""
        return ToolCall("a", {}), ToolCall("b", {})

    def certain_content(self, text: str) -> str:
        """The text before the first tag outside thoughts that begins a call; none without known tags."""
        if not self.openings:
            return ""
        position = speech_start(text, getattr(self, "in_thought", False))
        found = [start for tag in self.openings if (start := find_spoken(text, tag, position)) >= 0]
        return content_before(text, min(found, default=-1), self.openings).rstrip()

    def calls_jinja(self) -> str:
        """`render` in Jinja, for servers: see verl/formats/jinja.py. By default earlier calls are refused."""
        return '{{ raise_exception("earlier calls cannot be rendered: the tool-call format has no calls_jinja") }}'

    def render_raw_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        assert self.prompt is not None
        return self.prompt.fill(messages[_last_user(messages)].content, tool_lines(tools))


@dataclass(frozen=True)
class SystemPromptTemplateMixin(PromptTemplateMixin):
    """A format that lists its tools in the system message.

    prompt_template: name or path of a text with `{tools}`; the filled text is appended to the system message
    """

    place: ClassVar[str] = TOOLS
    template_tools: ClassVar[bool] = False

    def system(self, messages: Sequence[Message], tools: str) -> Message:
        assert self.prompt is not None
        contents = [message.content for message in messages if message.role == "system"]
        return Message("system", "\n\n".join([*contents, self.prompt.fill("", tools)]))


def _last_user(messages: Sequence[Message]) -> int:
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    return users[-1] if users else len(messages) - 1


@dataclass(frozen=True)
class TurnFormat(PromptTemplateMixin):
    """Base class of formats of chat templates: calls end the turn, results are separate turns.

    in_thought: the chat template opens `<think>` itself, so that a response without `</think>` is all thought
    """

    in_thought: bool = False

    @property
    def template_tools(self) -> bool:
        return self.prompt is None  # a prompt template lists them if the chat template cannot
