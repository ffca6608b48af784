"""The start check: what a policy should write goes through the tokens, texts, parser and reward of the run.

A tokenizer or a chat template may lose what a reward or a tool-call format needs: tags that are special tokens, a
thought that the prompt opens, the beginning of a text, the end of a turn. A run would then train on scores of other
texts than it sampled. The check takes a moment and needs no engine; rewards without a gold response are not called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from verl.chat.observations import ObservationTokenizer
from verl.episodes.episode import EpisodeRunner
from verl.episodes.written import as_trajectory, episode_of, written_response
from verl.errors import ConfigError, DataError, VerlError
from verl.formats.base import Calls
from verl.formats.inline import InlineFormat
from verl.host.daemon import run_async
from verl.scoring.gold_check import check_gold_wins, gold_scores, sample_rows
from verl.scoring.rewards import Rewards
from verl.text import shortened
from verl.types import Message, Task, ToolCall, ToolSpec, Trajectory
from verl.utils.reward_score.base import FIRST_STEP, LabReward
from verl.utils.reward_score.weighted import WeightedSum

_TOLERANCE = 1e-6
_SHOWN = 300  # characters of a response
_TRIAL = ToolSpec("trial", "", {"type": "object", "properties": {"text": {"type": "string"}}})


@dataclass(frozen=True, slots=True)
class _Scorer:
    """A reward with gold responses: of the run or of a row, or a part of a sum. setting: where another can be chosen"""

    reward: LabReward
    title: str
    setting: str = "reward.name"


@dataclass(frozen=True, slots=True)
class _Problem:
    """A gold response that does not earn the maximum. of_tokens: its text does"""

    problem: str
    hint: str
    of_tokens: bool = False

    def __str__(self) -> str:
        return f"{self.problem}; {self.hint}"


def check_gold_tokens(runner: EpisodeRunner, rewards: Rewards, task: Task) -> None:
    """Raises DataError if no policy can write a gold response of the row and earn its maximum: if it contains a control
    token of the chat, such as the one that ends a turn."""
    observations = runner.observations
    for scorer in _scorers(rewards, task):
        with _named(scorer, task):
            text = written_response(scorer.reward.gold(task, FIRST_STEP), observations.tool_call_format)
            tokens = observations.chat.control_tokens(text, observations.raw)
        if tokens and (problem := _problem(runner, scorer, task)):
            quoted = f"the gold response contains {tokens[0]!r}, a control token of the model"
            raise DataError(f"{quoted}: {problem.problem}", hint="Correct or drop the row")


def check_golds(runner: EpisodeRunner, rewards: Rewards, tasks: Iterable[Task]) -> None:
    """Raises ConfigError if gold responses of sample rows do not earn the maximum that their reward promises: one whose
    text earns it, or all of a reward; or if they do not score above an empty response and a bare thought.

    A row whose gold no policy can write is left out, as in training; DataError if there are no others."""
    rows, never = _writable(runner, rewards, sample_rows(rewards, tasks)), None
    for scorer, own in _by_scorer(rewards, rows):
        failed = [problem for task in own if (problem := _problem(runner, scorer, task))]
        if lost := [problem for problem in failed if problem.of_tokens]:
            raise ConfigError(str(lost[0]))
        if len(failed) == len(own):
            never = failed[0]
    found = []

    def score(task: Task, response: str | Message) -> float:
        return rewards.score(_episode(runner, task, response), task, FIRST_STEP).total

    for task in rows:
        with suppress(DataError):  # a row that cannot be scored is dropped in training, too
            found.append(gold_scores(rewards, task, score))
    check_gold_wins(scores for scores in found if scores is not None)
    if never:
        raise ConfigError(str(never))


def _writable(runner: EpisodeRunner, rewards: Rewards, tasks: Iterable[Task]) -> list[Task]:
    found, unusable = [], None
    for task in tasks:
        try:
            check_gold_tokens(runner, rewards, task)
        except DataError as error:
            unusable = error.of_row(task.id)
        else:
            found.append(task)
    if unusable and not found:
        raise unusable
    return found


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


def _problem(runner: EpisodeRunner, scorer: _Scorer, task: Task) -> _Problem | None:
    """None for a gold response that earns the maximum, and for a row that cannot be scored at all."""
    reward, style = scorer.reward, runner.observations.tool_call_format
    try:
        with _named(scorer, task):
            maximum, gold = reward.maximum(task, FIRST_STEP), reward.gold(task, FIRST_STEP)
            as_text = reward.score(as_trajectory(task, gold, style), task, FIRST_STEP).total
            episode = _episode(runner, task, gold)
            score = reward.score(episode, task, FIRST_STEP).total
            earned, earned_as_text = _reaches(score, maximum), _reaches(as_text, maximum)
    except DataError:
        return None
    if earned:
        return None
    wrote, read = shortened(written_response(gold, style), _SHOWN), shortened(episode.response, _SHOWN)
    scored = f"{scorer.title} gives the gold response of {task.id} {score:g} of {maximum:g}: "
    if not earned_as_text:
        return _Problem(f"{scored}{read!r}", f"check the rows with `toolrl lab`, or choose another {scorer.setting}")
    return _Problem(
        f"{scored}as text it earns all, but {wrote!r} is read as {read!r} from the tokens of the run",
        f"choose another tokenizer (model.tokenizer_path), {scorer.setting} or env.tool_call_format",
        of_tokens=True,
    )


@contextmanager
def _named(scorer: _Scorer, task: Task) -> Iterator[None]:
    """Raises ConfigError for a reward that fails."""
    try:
        yield
    except VerlError:
        raise
    except Exception as error:
        raise ConfigError(f"{scorer.title} fails on the gold response of {task.id} ({error!r})") from error


def _reaches(score: float, maximum: float) -> bool:
    return score >= maximum - _TOLERANCE  # false for NaN


def _scorers(rewards: Rewards, task: Task) -> list[_Scorer]:
    """The task's reward, or the parts of its sum, if they have gold responses."""
    own = rewards.of(task)
    if not isinstance(own, WeightedSum):
        return [_Scorer(own, f"reward {rewards.names(task)[0]!r}")] if isinstance(own, LabReward) else []
    return [
        _Scorer(term.reward, f"reward {term.name!r}, a part of the sum,", "entry of reward=[..]")
        for term in own.terms
        if isinstance(term.reward, LabReward)
    ]


def _by_scorer(rewards: Rewards, tasks: Iterable[Task]) -> Iterable[tuple[_Scorer, list[Task]]]:
    """Each with its rows of one data source."""
    found: dict[tuple[int, str], tuple[_Scorer, list[Task]]] = {}
    for task in tasks:
        for scorer in _scorers(rewards, task):
            found.setdefault((id(scorer.reward), task.data_source), (scorer, []))[1].append(task)
    return found.values()
