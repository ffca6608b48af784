"""Observations as tokens: the tool-call format renders them as text, the chat template and tokenizer encode them."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Self

from verl.chat.template import ChatTemplate
from verl.envs.base import Observation
from verl.formats.base import ToolCallFormat
from verl.formats.history import check_shown, with_calls_written
from verl.formats.prompt import tool_lines
from verl.types import Message, ToolSpec

GAP = "\n[...]\n"
_NEW_TOOLS = "From now on these tools can be called, too:"
_TOO_LONG = "The result is too long to be shown; ask for less of it."


class Cut(StrEnum):
    """How to truncate an observation that is too long."""

    HEAD = "head"  # keep the beginning
    TAIL = "tail"  # keep the end
    MIDDLE = "middle"  # keep both and drop the middle
    REFUSE = "refuse"  # replace it with a message that it is too long


@dataclass(frozen=True)
class ObservationTokenizer:
    """Truncates, formats and tokenizes every observation, exactly once; nothing else cuts one, but for hard limits on
    the size of a tool's answer, which protect the process.

    max_observation_tokens, max_chars: limits for one message of the environment; gap: shown for what is cut
    """

    chat: ChatTemplate
    tool_call_format: ToolCallFormat
    max_observation_tokens: int
    cut: Cut = Cut.MIDDLE
    max_chars: int | None = None
    gap: str = GAP

    def prompt_ids(self, initial: Observation) -> Sequence[int]:
        """The prompt tokens. Raises DataError for messages that the chat template rejects or drops parts of,
        ConfigError if tools are not listed."""
        if self.tool_call_format.template_tools:
            prompt = self.tool_call_format.render_prompt(initial.messages, initial.tools)
            return self.chat.initial_ids(prompt, initial.tools)
        messages = with_calls_written(self.tool_call_format, initial.messages)
        shown = self.tool_call_format.render_prompt(messages, initial.tools)
        check_shown(self.tool_call_format, messages, initial.tools, shown)
        return self.chat.initial_ids(shown)

    @cached_property
    def raw(self) -> bool:
        """Whether prompts are plain texts, without the chat template."""
        return isinstance(self.tool_call_format.render_prompt((Message("user", "a"),), ()), str)

    @cached_property
    def untruncated(self) -> Self:
        """The same without limits, for text that a program has chosen itself."""
        chat = replace(self.chat, max_prompt_tokens=None)
        return replace(self, chat=chat, max_observation_tokens=sys.maxsize, max_chars=None)

    def answer_ids(
        self, answers: Sequence[Message], written: str, ended: bool, tools: Sequence[ToolSpec] = ()
    ) -> tuple[int, ...]:
        """The tokens after `written`: the answers and, if the policy gets a new turn, the generation prompt.

        tools: new tools; the prompt is fixed, so they are listed after the answers, and never truncated
        """
        messages = _with_tools([self._short(answer) for answer in answers], tools)
        shown = self.tool_call_format.observation(messages, written)
        if isinstance(shown, str):
            return self.chat.continuation_ids(shown)
        return self.chat.answer_ids(shown, ended)

    def _short(self, answer: Message) -> Message:
        text, shown = answer.content, getattr(self.tool_call_format, "shown", None)
        if shown is not None and answer.role == "tool":
            text = shown(text)
        if self.max_chars is not None:
            text = self._shortened(text, range(len(text)), self.max_chars)
        if self.max_observation_tokens < sys.maxsize:
            _, spans = self.chat.encoded(text)
            text = self._shortened(text, [start for start, _ in spans], self.max_observation_tokens)
        return replace(answer, content=text)

    def _shortened(self, text: str, starts: Sequence[int], room: int) -> str:
        """Truncate to `room` characters or tokens, which begin at `starts`, not counting the gap."""
        if len(starts) <= room:
            return text
        if self.cut is Cut.REFUSE:
            return _TOO_LONG
        tail = {Cut.HEAD: 0, Cut.TAIL: room, Cut.MIDDLE: room // 2}[self.cut]
        tail_start = starts[len(starts) - tail] if tail else len(text)
        return text[: starts[room - tail]] + self.gap + text[tail_start:]


class SharedPrompt(ObservationTokenizer):
    """Tokenizes the initial observation once for all episodes of a group, which begin with equal ones.

    They share one array: a step holds thousands of prompts, and sample packing compares those of a group.
    """

    @cached_property
    def _known(self) -> list[tuple[Observation, Sequence[int]]]:
        return []

    def prompt_ids(self, initial: Observation) -> Sequence[int]:
        for seen, token_ids in self._known:
            if seen == initial:
                return token_ids
        token_ids = array("i", super().prompt_ids(initial))
        self._known.append((initial, token_ids))
        return token_ids


def _with_tools(answers: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
    """The answers plus the list of new tools: in a user message after a tool result, else in the last message."""
    if not tools:
        return answers
    listing = f"{_NEW_TOOLS}\n{tool_lines(tools)}"
    if not answers or answers[-1].role == "tool":
        return (*answers, Message("user", listing))
    return (*answers[:-1], replace(answers[-1], content=f"{answers[-1].content}\n\n{listing}"))
