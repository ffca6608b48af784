"""The start check: what a policy should write goes through the tokens, texts, parser and reward of the run.

A tokenizer or a chat template may lose what a reward or a tool-call format needs: tags that are special tokens, a
thought that the prompt opens, the beginning of a text, the end of a turn. A run would then train on scores of other
texts than it sampled. The check takes a moment and needs no engine; rewards without a gold response are not called.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from verl.chat.observations import ObservationTokenizer
from verl.episodes.episode import EpisodeRunner
from verl.episodes.written import as_trajectory, episode_of, written_response
from verl.errors import ConfigError, DataError, VerlError
from verl.formats.base import Calls
from verl.formats.inline import InlineFormat
from verl.scoring.gold_check import check_gold_wins, gold_scores, sample_rows
from verl.scoring.rewards import Rewards
from verl.system.daemon import run_async
from verl.text import shortened
from verl.types import Message, Task, ToolCall, ToolSpec, Trajectory
from verl.utils.reward_score.base import LabReward
from verl.utils.reward_score.weighted import WeightedSum

_STEP = 1  # for rewards with a schedule
_TOLERANCE = 1e-6
_SHOWN = 300  # characters of a response
_TRIAL = ToolSpec("trial", "", {"type": "object", "properties": {"text": {"type": "string"}}})


def check_golds(runner: EpisodeRunner, rewards: Rewards, tasks: Iterable[Task]) -> None:
    """Raises ConfigError if gold responses of sample rows do not earn the maximum that their reward promises: one whose
    text earns it, or all of a reward; or if they do not score above an empty response and a bare thought."""
    rows, never = sample_rows(rewards, tasks), ""
    for reward, name, own in _by_reward(rewards, rows):
        failed = [each for task in own if (each := _problem(runner, reward, name, task))[1]]
        if lost := [problem for tokens, problem in failed if tokens]:
            raise ConfigError(lost[0])
        if len(failed) == len(own):
            never = failed[0][1]
    found = []

    def score(task: Task, response: str | Message) -> float:
        return rewards.score(_episode(runner, task, response), task, _STEP).total

    for task in rows:
        with suppress(DataError):  # a row that cannot be scored is dropped in training, too
            found.append(gold_scores(rewards, task, score))
    check_gold_wins(scores for scores in found if scores is not None)
    if never:
        raise ConfigError(never)


def check_turns(observations: ObservationTokenizer) -> None:
    """Raises ConfigError if turns have other tokens than the chat template's, or if a call of the format, written in
    tokens, is not read back."""
    chat, style = observations.chat, observations.tool_call_format
    if not observations.raw:
        chat.check_turns()
    call = style.call("1") if isinstance(style, InlineFormat) else ToolCall("trial", {"text": 'a < "b"'})
    if not hasattr(style, "render"):
        return
    try:
        content = style.render((call,))
    except DataError:  # some chat templates render no calls
        return
    text, (ids, _) = chat.response(() if observations.raw else chat.question_ids, content, observations.raw)
    read = chat.response_text(ids)
    if content and style.parse(read, (_TRIAL,)) != Calls((call,)):
        raise ConfigError(
            f"{chat.where} loses the calls of env.tool_call_format: {text!r} is read as {read!r}; choose another "
            "tool-call format or tokenizer"
        )


def _episode(runner: EpisodeRunner, task: Task, response: str | Message) -> Trajectory:
    return run_async(episode_of(runner, task, response))


def _problem(runner: EpisodeRunner, reward: LabReward, name: str, task: Task) -> tuple[bool, str]:
    """(whether the run's tokens are at fault, what is wrong); the latter is empty for a gold response that earns the
    maximum, and for a row that cannot be scored at all."""
    style = runner.observations.tool_call_format
    try:
        maximum, gold = reward.maximum(task, _STEP), reward.gold(task, _STEP)
        as_text = reward.score(as_trajectory(task, gold, style), task, _STEP).total
        episode = _episode(runner, task, gold)
        score = reward.score(episode, task, _STEP).total
        earned, earned_as_text = _reaches(score, maximum), _reaches(as_text, maximum)
    except DataError:
        return False, ""
    except VerlError:
        raise
    except Exception as error:
        raise ConfigError(f"reward {name!r} fails on the gold response of {task.id} ({error!r})") from error
    if earned:
        return False, ""
    wrote, read = shortened(written_response(gold, style), _SHOWN), shortened(episode.response, _SHOWN)
    problem = f"reward {name!r} gives the gold response of {task.id} {score:g} of {maximum:g}: "
    if not earned_as_text:
        return False, f"{problem}{read!r}; check the rows with `toolrl lab`, or choose another reward.name"
    hint = "choose another tokenizer (model.tokenizer_path), reward.name or env.tool_call_format"
    return True, f"{problem}as text it earns all, but {wrote!r} is read as {read!r} from the tokens of the run; {hint}"


def _reaches(score: float, maximum: float) -> bool:
    return score >= maximum - _TOLERANCE  # false for NaN


def _by_reward(rewards: Rewards, tasks: Iterable[Task]) -> Iterable[tuple[LabReward, str, list[Task]]]:
    """(a reward with gold responses, or such a part of a sum, its name, its rows of one data source)"""
    found: dict[tuple[int, str], tuple[LabReward, str, list[Task]]] = {}
    for task in tasks:
        own = rewards.of(task)
        parts = own.terms if isinstance(own, WeightedSum) else ()
        for name, reward in [(term.name, term.reward) for term in parts] or [(rewards.names(task)[0], own)]:
            if isinstance(reward, LabReward):
                found.setdefault((id(reward), task.data_source), (reward, name, []))[2].append(task)
    return found.values()
