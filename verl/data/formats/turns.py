"""Formats that the chat templates of models know: calls end the turn, results are turns of their own."""

from __future__ import annotations

from dataclasses import dataclass

from verl.data.formats.prompt import PromptTemplateMixin


@dataclass(frozen=True)
class TurnFormat(PromptTemplateMixin):
    """What such formats share. A prompt template tells of the tools where the chat template cannot.

    in_thought: the chat template opens `<think>` itself, so that a response without `</think>` is all thinking
    """

    in_thought: bool = False

    @property
    def template_tools(self) -> bool:
        """Unless a prompt template tells of them."""
        return self.prompt is None
