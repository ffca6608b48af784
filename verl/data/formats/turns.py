"""Formats supported by the models' chat templates: calls end the turn, results are separate turns."""

from dataclasses import dataclass

from verl.data.formats.prompt import PromptTemplateMixin


@dataclass(frozen=True)
class TurnFormat(PromptTemplateMixin):
    """Base class of turn-based formats. A prompt template lists the tools if the chat template cannot.

    in_thought: the chat template opens `<think>` itself, so that a response without `</think>` is all thought
    """

    in_thought: bool = False

    @property
    def template_tools(self) -> bool:
        """True unless a prompt template lists the tools."""
        return self.prompt is None
