"""Responses that a program writes in place of the policy: gold responses, corrupted ones, trial calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.chat.observations import ObservationTokenizer
from verl.envs.base import Env, Observation, StepResult
from verl.envs.task_envs import TaskEnvs
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.errors import ConfigError
from verl.formats.base import Calls, ToolCallFormat
from verl.formats.history import with_calls_written
from verl.formats.plain import PLAIN, PlainFormat
from verl.formats.response import parsed_response
from verl.formats.toolrl_text import THINK, THINK_END
from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason, Message, Outcome, StopReason, Task, Trajectory, Turn

_ANY_LENGTH = EpisodeLimits(max_tokens=sys.maxsize, max_prompt_length=sys.maxsize)


def written_response(response: str | Message, tool_call_format: ToolCallFormat) -> str:
    """The text of a response. Raises ConfigError for a message with calls if the format has none."""
    if isinstance(response, str):
        return response
    if response.tool_calls and isinstance(tool_call_format, PlainFormat):
        raise ConfigError(
            "the reward compares calls, so it needs the format that they are written in: set env.tool_call_format"
        )
    (message,) = with_calls_written(tool_call_format, [response])
    if getattr(tool_call_format, "needs_thought", False) and THINK not in message.content:
        return f"{THINK} I know what to do. {THINK_END}\n{message.content}"
    return message.content


def as_trajectory(task: Task, response: str | Message, tool_call_format: ToolCallFormat = PLAIN) -> Trajectory:
    """A finished single-turn episode in which the policy wrote `response`: text alone, where no model is given."""
    text = written_response(response, tool_call_format)
    parsed = tool_call_format.parse(text, task.tools)
    message = Message("assistant", text, tool_calls=parsed.calls if isinstance(parsed, Calls) else ())
    completion = Completion(token_ids=(), logprobs=(), finish_reason=FinishReason.STOP, weight_version=0)
    turn = Turn((), completion, message, parsed=parsed_response(tool_call_format, text, parsed))
    return Trajectory(task, 0, (turn,), StopReason.STOP, Outcome.SCORED, decoded=text)


async def episode_of(runner: EpisodeRunner, task: Task, response: str | Message) -> Trajectory:
    """An episode of the run in which the policy writes `response` and then nothing: its prompt, tokens, parser and
    texts, of any length. The environment is asked for nothing but the prompt, so no service and no tool is called.

    Raises DataError if the prompt cannot be rendered.
    """
    observations = runner.observations
    engine = _WriteOnce(observations, written_response(response, observations.tool_call_format))
    initial = runner.envs.known_initial_observation(task) if isinstance(runner.envs, TaskEnvs) else None
    alone = EpisodeRunner(_Prompt(initial), observations, replace(_ANY_LENGTH, max_turns=runner.limits.max_turns))
    finished = await alone.run(engine, Sampling(sys.maxsize), task, 0, None)
    if not isinstance(finished, Trajectory):
        raise ConfigError(f"the gold response cannot be tried: {finished}")
    return finished


@dataclass
class _WriteOnce:
    """A generator of one response; after it, every turn is empty."""

    observations: ObservationTokenizer
    content: str | None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """Ends at the first stop string, without the end token, or at a stop token inside the text."""
        chat, content, self.content = self.observations.chat, self.content, None
        ids: Sequence[int] = (chat.end_token_id,)
        if content is not None:
            ends = [place + len(stop) for stop in sampling.stop_strings if (place := content.find(stop)) >= 0]
            end = min(ends, default=None)
            _, (ids, _) = chat.response(prompt_ids, content[:end], self.observations.raw)
            ended = next(place for place, token in enumerate(ids) if token in chat.stop_token_ids)
            ids = ids[:-1] if end is not None and ended == len(ids) - 1 else ids[: ended + 1]
        return (Completion(tuple(ids), (0.0,) * len(ids), FinishReason.STOP, 0),)


@dataclass(frozen=True)
class _Prompt(Env):
    """As a factory and as its environment: a known initial observation, or the task's prompt; one turn."""

    initial: Observation | None

    def __call__(self, task: Task) -> _Prompt:
        return _Prompt(self.initial or Observation(task.prompt, task.tools))

    async def reset(self) -> Observation:
        assert self.initial is not None
        return self.initial

    async def step(self, message: Message) -> StepResult:
        return StepResult(done=True)
