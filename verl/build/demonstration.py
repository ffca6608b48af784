"""The prompts of a policy that teaches itself: with a right response as a demonstration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from verl.build.env import prompt_fn
from verl.episodes.episode import EpisodeRunner
from verl.episodes.written import written_response
from verl.errors import DataError
from verl.trainer.self_teacher import Demonstrate, Demonstration
from verl.types import Message, Task, Trajectory, TrajectoryGroup

_DEMONSTRATION = "\n\nThis is a right response:\n\n{response}\n\nNow give your own response to the same request."


def demonstrations(runner: EpisodeRunner, best_of_group: bool) -> Demonstrate:
    """The function group -> for each rollout, its prompt without and with the demonstration.

    The demonstration is the row's gold response, or the group's best rollout, for those that have a lower return.
    None for a row without a gold response, without a message of the user, or whose prompt cannot be rendered with it.
    Prompts are not truncated, so that a sample whose prompt was has no demonstration.
    """
    show, style = _show(runner), runner.observations.tool_call_format

    def of_gold(group: TrajectoryGroup) -> Sequence[Demonstration | None]:
        gold = written_response(group.task.gold or group.task.answer, style)
        return [show(group.task, gold)] * len(group.trajectories)

    def of_best(group: TrajectoryGroup) -> Sequence[Demonstration | None]:
        returns = group.returns
        best = max(returns, default=0.0)
        shown = show(group.task, _text(group.trajectories[returns.index(best)])) if len(set(returns)) > 1 else None
        return [shown if each < best else None for each in returns]

    return of_best if best_of_group else of_gold


def _text(trajectory: Trajectory) -> str:
    """What the policy wrote, and what it was answered."""
    return "\n".join(each.content for turn in trajectory.turns for each in (turn.message, *turn.responses))


def _show(runner: EpisodeRunner) -> Callable[[Task, str], Demonstration | None]:
    """The function that puts a response at the end of the last message of the user."""
    observations = runner.observations
    whole = replace(observations, chat=replace(observations.chat, max_prompt_tokens=None))
    prompt_ids = prompt_fn(replace(runner, observations=whole))

    def show(task: Task, response: str) -> Demonstration | None:
        place = _last_of_user(task.prompt)
        if not response.strip() or place is None:
            return None
        shown = task.prompt[place]
        fields = {name: each for name, each in shown.template_fields.items() if name != "content"}
        content = f"{shown.content}{_DEMONSTRATION.format(response=response)}"
        message = replace(shown, content=content, template_fields=fields)
        prompt = (*task.prompt[:place], message, *task.prompt[place + 1 :])
        try:
            return prompt_ids(task), prompt_ids(replace(task, prompt=prompt))
        except DataError:
            return None

    return show


def _last_of_user(prompt: Sequence[Message]) -> int | None:
    return max((place for place, each in enumerate(prompt) if each.role == "user"), default=None)
