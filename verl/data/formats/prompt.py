"""Prompts as plain text files, with `{question}` and `{tools}` in the places that are filled in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from verl.errors import ConfigError
from verl.registry import nearest
from verl.types import Message, ToolSpec

_FOLDER = Path(__file__).parent / "prompts"
_PLACES = re.compile(r"\{(question|tools)\}")
TOOLS = "{tools}"  # the place of the list in a text


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A text with places to fill; `sha256` tells two of them apart in the record of a run."""

    text: str

    @property
    def sha256(self) -> str:
        """Digest of the text in UTF-8."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def fill(self, question: str, tools: str) -> str:
        """Each place is filled once; what is put in is never looked at again."""
        values = {"question": question, "tools": tools}
        return _PLACES.sub(lambda found: values[found[1]], self.text)


def load_template(path_or_name: str, place: str = "{question}") -> PromptTemplate:
    """One of this package's prompts by name, or any file by its path, without the newline at its end.

    Raises ConfigError if there is no such file, if it is no UTF-8, or if it does not have the `place`.
    """
    own = _FOLDER / f"{path_or_name}.txt"
    path = own if own.is_file() else Path(path_or_name)
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        known = nearest(path_or_name, [each.stem for each in _FOLDER.glob("*.txt")])
        raise ConfigError(f"no prompt template has the name or path {path_or_name!r}; {known}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt template {str(path)!r} is not in UTF-8 ({error})") from error
    if place not in text:
        raise ConfigError(f"the prompt template {str(path)!r} lacks {place}, which is replaced; put it where that goes")
    return PromptTemplate(text)


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """The tool as chat templates and OpenAI's interface expect it: as its row has it, where it is of a row."""
    if tool.schema is not None:
        return dict(tool.schema)
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def tool_lines(tools: Sequence[ToolSpec]) -> str:
    """One tool a line, as JSON."""
    return "\n".join(json.dumps(function_schema(tool), ensure_ascii=False) for tool in tools)


def numbered_tools(tools: Sequence[ToolSpec]) -> str:
    """ToolRL's list: name, description, and parameters as one flat object without JSON Schema around it."""
    return "\n".join(
        f"{number}. Name: {tool.name}\nDescription: {tool.description}\nParameters: {json.dumps(_flat(tool))}"
        for number, tool in enumerate(tools, 1)
    )


def _flat(tool: ToolSpec) -> dict[str, Any]:
    properties: Mapping[str, Any] = tool.parameters.get("properties") or {}
    common = {"description": "", "type": "string", "default": ""}
    # true is a schema, too, and allows anything
    return {name: {**common, **(schema if isinstance(schema, Mapping) else {})} for name, schema in properties.items()}


@dataclass(frozen=True)
class PromptTemplateMixin:
    """A format whose question can be put into words of the recipe's own.

    prompt_template: name or path of a text with `{question}`, which replaces the last user message
    """

    place: ClassVar[str] = "{question}"
    turns_per_call: ClassVar[int] = 1
    parallel_calls: ClassVar[bool] = True
    prompt_template: str | None = None

    def __post_init__(self) -> None:
        _ = self.prompt  # a bad file is told before the run begins

    @cached_property
    def prompt(self) -> PromptTemplate | None:
        """The text, read once."""
        return None if self.prompt_template is None else load_template(self.prompt_template, self.place)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str | Sequence[Message]:
        """The messages, with the question put into the recipe's words where there is a prompt template."""
        if self.prompt is None:
            return tuple(messages)
        last = _last_user(messages)
        text = self.prompt.fill(messages[last].content, tool_lines(tools))
        return (*messages[:last], Message("user", text), *messages[last + 1 :])

    def stop_strings(self, written: str) -> tuple[str, ...]:
        """None: calls end with the turn."""
        return ()

    @property
    def final_stop_strings(self) -> tuple[str, ...]:
        """None: an answer ends with the turn."""
        return ()

    def observation(self, results: Sequence[Message], written: str) -> str | Sequence[Message]:
        """The results as they are, side by side; the chat template puts them into one turn or several."""
        return tuple(results)

    def render_raw_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """The prompt template filled in, and nothing else."""
        assert self.prompt is not None
        return self.prompt.fill(messages[_last_user(messages)].content, tool_lines(tools))


@dataclass(frozen=True)
class SystemPromptTemplateMixin(PromptTemplateMixin):
    """A format that tells of its tools in the system message.

    prompt_template: name or path of a text with `{tools}`, which is put behind what the system message says
    """

    place: ClassVar[str] = TOOLS

    @property
    def template_tools(self) -> bool:
        """The system message tells of them."""
        return False

    def system(self, messages: Sequence[Message], tools: str) -> Message:
        """The one system message."""
        assert self.prompt is not None
        said = [message.content for message in messages if message.role == "system"]
        return Message("system", "\n\n".join([*said, self.prompt.fill("", tools)]))


def _last_user(messages: Sequence[Message]) -> int:
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    return users[-1] if users else len(messages) - 1
