"""The prompts of a policy that teaches itself: with the row's gold response as a demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from verl.build.env import prompt_fn
from verl.episodes.episode import EpisodeRunner
from verl.episodes.written import written_response
from verl.errors import DataError
from verl.trainer.self_teacher import Demonstrate
from verl.types import Message, Task

_DEMONSTRATION = "\n\nThis is a right response:\n\n{gold}\n\nNow give your own response to the same request."


def demonstrations(runner: EpisodeRunner) -> Demonstrate:
    """The function task -> its prompt without and with the demonstration, which ends the last message of the user.

    None for a row without a gold response, without a message of the user, or whose prompt cannot be rendered with it.
    Prompts are not truncated, so that a sample whose prompt was has no demonstration.
    """
    observations = runner.observations
    whole = replace(observations, chat=replace(observations.chat, max_prompt_tokens=None))
    prompt_ids, style = prompt_fn(replace(runner, observations=whole)), observations.tool_call_format

    def demonstrate(task: Task) -> tuple[Sequence[int], Sequence[int]] | None:
        gold = written_response(task.gold or task.answer, style)
        place = _last_of_user(task.prompt)
        if not gold.strip() or place is None:
            return None
        shown = task.prompt[place]
        fields = {name: each for name, each in shown.template_fields.items() if name != "content"}
        content = f"{shown.content}{_DEMONSTRATION.format(gold=gold)}"
        message = replace(shown, content=content, template_fields=fields)
        prompt = (*task.prompt[:place], message, *task.prompt[place + 1 :])
        try:
            return prompt_ids(task), prompt_ids(replace(task, prompt=prompt))
        except DataError:
            return None

    return demonstrate


def _last_of_user(prompt: Sequence[Message]) -> int | None:
    return max((place for place, each in enumerate(prompt) if each.role == "user"), default=None)
