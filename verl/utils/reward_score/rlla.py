"""ToolRL's rule-based reward (arXiv 2504.13958): format + correctness (+ length), between -3 and 4 by default.

    format       1 if the response has exactly the blocks that the gold answer has, else 0
    correctness  -3 .. 3 by agreement of the calls with the gold calls (matching.py); 0 if the gold has no call
    length       0 .. 1 by the word count of the think block, if enabled

Scores equal ToolRL's published code for every response, variant and step, with these deliberate exceptions:
    - the assistant's turn is found by the chat markers in the text, not by an experiment's name; a bare response is
      scored as it is;
    - SCHEDULELENGTH=1 alone enables the length reward, as documented;
    - nothing is printed;
    - a gold answer with calls that cannot be parsed raises DataError. ToolRL crashes in json; for JSON that is not a
      call, it gives the minimum to every response except an identical one.
No response raises an exception, whatever its text.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from verl.errors import ConfigError, DataError
from verl.formats.toolrl_text import (
    RESPONSE,
    THINK,
    THINK_END,
    TOOL_CALL,
    Gold,
    call_text,
    cutting_mark,
    final_turn,
    matches_shape,
    parse_calls,
    parse_gold,
    thought_word_count,
)
from verl.registry import check_options
from verl.types import GROUND_TRUTH, Score, Task, Trajectory
from verl.utils.reward_score.base import FIRST_STEP, Mutation, no_gold
from verl.utils.reward_score.matching import (
    Agreement,
    Call,
    Pair,
    all_in_any_order,
    all_in_order,
    greedy_pairs,
    multiset_jaccard,
    optimal_pairs,
    parameter_similarity,
    set_jaccard,
    whole_call_similarity,
)
from verl.utils.reward_score.rlla_mutations import corrupted_responses, lengthen_thought

# Exceptions of parsing or matching malformed calls of a response.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

# ToolRL's environment variables -> the options they switch on
TOGGLES: Mapping[str, str] = {
    "WITHLENGTH": "with_length",
    "SCHEDULELENGTH": "schedule_length",
    "CORRECTMAX1": "correct_max_1",
    "MAX1STEP30MAX3": "two_stage",
    "SCHEDULEREWARD": "schedule_reward",
    "REFINEDREWARD": "refined",
    "INTERMEDIATEREWARD": "intermediate",
    "COARSEREWARD": "coarse",
}


@dataclass(frozen=True, slots=True)
class RllaOptions:
    """The defaults are ToolRL's main experiment, the first eight its toggles, the others extensions."""

    with_length: bool = False  # add the length part, full at a word count of 512
    schedule_length: bool = False  # likewise, full at a word count of 384 at step 0 and 640 at step 105, then linear
    correct_max_1: bool = False  # correctness in [-1, 1]
    two_stage: bool = False  # correctness in [-1, 1] before step 30; afterwards in [-3, 3], with half the format
    schedule_reward: bool = False  # over 150 steps, format shrinks from [-2, 2] and correctness grows from [-2, 2]
    refined: bool = False  # tool names and parameter names must match completely, in order
    intermediate: bool = False  # a call must match completely
    coarse: bool = False  # the maximum for exactly the gold calls in order, else the minimum

    schedule_steps: int | None = None  # length of both schedules in steps, clamped afterwards; None: ToolRL's own
    matching: Literal["greedy", "optimal"] = "greedy"
    refined_ignores_order: bool = False  # with `refined`: the paper's set equality
    unwanted_call_penalty: float = 0.0  # subtracted if the response calls a tool and the gold does not

    def __post_init__(self) -> None:
        steps, penalty = self.schedule_steps, self.unwanted_call_penalty
        if steps is not None and steps < 1:
            raise ConfigError(f"reward option schedule_steps must be a number of steps >= 1 or none, got {steps!r}")
        if not 0.0 <= penalty < float("inf"):
            raise ConfigError(f"reward option unwanted_call_penalty must be a number >= 0, got {penalty!r}")
        if self.matching not in ("greedy", "optimal"):
            raise ConfigError(f"reward option matching must be greedy or optimal, got {self.matching!r}")
        if self.matching == "optimal" and find_spec("scipy") is None:
            raise ConfigError("reward option matching=optimal needs scipy: pip install scipy")
        if steps is not None and not (self.schedule_reward or self.schedule_length):
            raise ConfigError("reward option schedule_steps has no effect without schedule_reward or schedule_length")
        if self.refined_ignores_order and not self.refined:
            raise ConfigError("reward option refined_ignores_order has no effect without refined")

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] = os.environ, overrides: Mapping[str, Any] | None = None
    ) -> RllaOptions:
        """The variant that ToolRL's variables ("1": on) and `overrides` select. Raises ConfigError."""
        if "STRICTMATCH" in environ:
            _warn_of_strictmatch()
        toggled = _toggled(tuple(TOGGLES[name] for name in switches(environ)))
        if not overrides:
            return toggled
        check_options("reward", "rlla", cls, overrides)
        return replace(toggled, **overrides)

    @property
    def scores_length(self) -> bool:
        return self.with_length or self.schedule_length

    @property
    def follows_schedule(self) -> bool:
        return self.schedule_length or self.two_stage or self.schedule_reward


def switches(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """ToolRL's variables that are on."""
    return {name: environ[name] for name in TOGGLES if environ.get(name) == "1"}


@cache  # once per process, whatever the warning filters are
def _warn_of_strictmatch() -> None:
    warnings.warn("STRICTMATCH has no effect: ToolRL's scripts export it, its reward never reads it", stacklevel=3)


@cache  # called for each response by compute_score; there are 256 variants
def _toggled(names: tuple[str, ...]) -> RllaOptions:
    toggles: dict[str, Any] = dict.fromkeys(names, True)
    return RllaOptions(**toggles)


class Range(NamedTuple):
    """The lowest and highest value of one part of the score."""

    low: float
    high: float


def _progress(options: RllaOptions, step: int) -> float | None:
    """Progress of the clamped schedule in [0, 1]; None for ToolRL's own unclamped schedules."""
    return None if options.schedule_steps is None else min(max(step / options.schedule_steps, 0.0), 1.0)


def format_range(options: RllaOptions, step: int) -> Range:
    """Range of the format part: [0, 1], modified by the two-stage and scheduled variants.

    ToolRL's schedule leaves the lower end at -1 from step 75 on; the clamped one is symmetric, [-2 + p, 2 - p], as in
    the paper.
    """
    high = 0.5 if options.two_stage and step >= 30 else 1.0
    if options.schedule_reward:
        done = _progress(options, step)
        if done is not None:
            end = 2.0 - (2.0 - high) * done
            return Range(-end, end)
        return Range(min(-2.0 + 2.0 * step / 150, -1.0), max(2.0 - (2.0 - high) * step / 150, 1.0))
    return Range(0.0, high)


def correctness_range(options: RllaOptions, step: int) -> Range:
    """Range of the correctness part: [-3, 3], modified by the equal-maximum, two-stage and scheduled variants.

    As in ToolRL, an equal maximum under its unclamped schedule shrinks to 0 at step 300 and is negative afterwards.
    """
    end = 1.0 if options.correct_max_1 else 3.0
    if options.two_stage and step < 30:
        end /= 3
    if options.schedule_reward:
        done = _progress(options, step)
        end = min((end - 2.0) * (step / 150 if done is None else done) + 2.0, 3.0)
    return Range(-end, end)


def full_length(options: RllaOptions, step: int) -> float:
    """Word count of the thought that earns the whole length part."""
    if not options.schedule_length:
        return 512.0
    done = _progress(options, step)
    return 384.0 + 256.0 * (step / 105 if done is None else done)


class Matching(NamedTuple):
    """Which prediction answers which gold call, and the points: `names` for the tools' names, others for each pair."""

    names: float
    pairs: Sequence[Pair]
    maximum: float

    @property
    def agreement(self) -> float:
        """In [0, 1]"""
        points = 0.0
        for pair in self.pairs:  # in this order, whatever the precision of `sum`: ToolRL's rounding
            points += pair.points
        return (self.names + points) / self.maximum


def match_calls(gold: list[Call], predicted: list[Any], options: RllaOptions) -> Matching:
    """Raises TypeError, KeyError or AttributeError if a prediction is no call."""
    names: Agreement = multiset_jaccard
    keys: Agreement = set_jaccard
    if options.refined:
        names = keys = all_in_any_order if options.refined_ignores_order else all_in_order
    similarity = whole_call_similarity if options.intermediate else parameter_similarity(keys)
    same = names([call["name"] for call in gold], [call["name"] for call in predicted])
    pairs = (optimal_pairs if options.matching == "optimal" else greedy_pairs)(gold, predicted, similarity)
    return Matching(same, pairs, 1.0 + sum(map(partial(most_points, options), gold)))


def most_points(options: RllaOptions, gold: Call) -> float:
    """The points of a pair of equal calls."""
    return 1.0 if options.intermediate else 1.0 + len(gold["parameters"])


def call_agreement(gold: list[Call], predicted: list[Any], options: RllaOptions) -> float:
    """In [0, 1]: points / maximum. Raises TypeError, KeyError or AttributeError if a prediction is no call."""
    if gold == predicted:
        return 1.0
    return 0.0 if options.coarse else match_calls(gold, predicted, options).agreement


def _calls_a_tool(response: str) -> bool:
    if response.startswith(THINK):  # a thought may mention the tag
        thought, closing, rest = response.partition(THINK_END)
        return TOOL_CALL in (rest if closing else thought)
    return TOOL_CALL in response


def _correctness_score(response: str, gold: Gold, options: RllaOptions, step: int) -> float:
    if gold.calls is None:
        return -options.unwanted_call_penalty if options.unwanted_call_penalty and _calls_a_tool(response) else 0.0
    low, high = correctness_range(options, step)
    text = call_text(response)
    if text is None:
        return low
    if text == gold.call_text:  # identical text has identical calls; skip parsing
        return high
    try:
        return calls_score(gold.calls, parse_calls(text), options, step)
    except MALFORMED:
        return low


def calls_score(gold: list[Call], predicted: list[Any], options: RllaOptions, step: int) -> float:
    """The correctness part of these calls. Raises like `call_agreement`."""
    low, high = correctness_range(options, step)
    return (high - low) * call_agreement(gold, predicted, options) + low  # exactly `high` at 1.0, as low is -high


def length_score(response: str, options: RllaOptions, step: int) -> float:
    """The length part; 0 unless it is enabled."""
    count = thought_word_count(response) if options.scores_length else None
    return 0.0 if count is None else min(round(count / full_length(options, step), 2), 1.0)


def maximum_score(options: RllaOptions, step: int, has_calls: bool) -> float:
    """has_calls: the gold answer makes calls"""
    high = format_range(options, step).high + (correctness_range(options, step).high if has_calls else 0.0)
    return high + (1.0 if options.scores_length else 0.0)


class RllaScore(NamedTuple):
    """The total and its parts, in the order of ToolRL's return value."""

    score: float
    format: float
    correctness: float
    length: float


def score_response(response: str, answer: str, step: int, options: RllaOptions) -> RllaScore:
    """Score the policy's text against a gold answer; raises DataError if the gold calls cannot be parsed."""
    gold = parse_gold(answer)
    format_ends = format_range(options, step)
    form = format_ends.high if matches_shape(response, gold.shape) else format_ends.low
    correctness = _correctness_score(response, gold, options, step)
    length = length_score(response, options, step)
    return RllaScore(form + correctness + length, form, correctness, length)


def compute_score(
    solution_str: str, ground_truth: str, step: int = 0, options: RllaOptions | None = None
) -> tuple[float, float, float, float]:
    """(score, format, correctness, length) of a whole chat-templated sequence or of a bare response.

    `step` is the global training step, for the scheduled variants. With `options=None` environment variables select the
    variant (RllaOptions.from_env). Raises DataError if the gold answer has calls that cannot be parsed.
    """
    return score_response(final_turn(solution_str), ground_truth, step, options or RllaOptions.from_env())


class RllaReward:
    """The reward for the trainer and the lab. options: of RllaOptions, in place of the environment's toggles"""

    def __init__(self, **options: Any) -> None:
        self.options = RllaOptions.from_env(overrides=options)
        self.reads_step = self.options.follows_schedule

    def check_task(self, task: Task) -> None:
        """Raises DataError for a task without a gold, for gold calls that cannot be parsed, for a gold that quotes the
        mark of a turn, which cuts every response that reproduces it, and for a gold turn that is not in ToolRL's
        format: only the format of a thought would be scored."""
        if task.gold is None and not task.answer:
            raise no_gold().of_row(task.id)
        if task.gold is not None and not any(tag in task.answer for tag in (THINK, TOOL_CALL, RESPONSE)):
            raise DataError(
                "does not end with a turn in ToolRL's format, which reward.name=rlla compares responses with",
                f"{THINK}, {TOOL_CALL} or {RESPONSE} in its content",
                "Set reward.name=calls, which compares calls in any format",
                file=task.id,
                field="messages",
            )
        try:
            maximum, gold = self.maximum(task, FIRST_STEP), self.gold(task, FIRST_STEP)
        except DataError as error:
            raise error.at(field=GROUND_TRUTH) from error
        mark = cutting_mark(gold)
        if mark and score_response(final_turn(gold), task.answer, FIRST_STEP, self.options).score < maximum:
            raise DataError(
                f"the gold response contains {mark!r}, a mark of turns: ToolRL's reward reads no further",
                hint="Correct or drop the row",
                field=GROUND_TRUTH,
            )

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        """Score the last turn; raises DataError, naming the task, if its gold answer cannot be parsed.

        As ToolRL does, it reads the decoded sequence from the last assistant marker to the first end marker: control
        tokens that the policy writes belong to the text.
        """
        text = trajectory.response + (trajectory.turns[-1].other_end if trajectory.turns else "")
        try:
            total, *parts = score_response(final_turn(text), task.answer, step, self.options)
        except DataError as error:
            raise error.at(file=task.id) from error
        return Score(total, dict(zip(("format", "correctness", "length"), parts, strict=True)))

    def maximum(self, task: Task, step: int) -> float:
        return maximum_score(self.options, step, parse_gold(task.answer).calls is not None)

    def gold(self, task: Task, step: int) -> str:
        """The gold answer, with a long enough thought if length is rewarded."""
        if not self.options.scores_length:
            return task.answer
        return lengthen_thought(task.answer, full_length(self.options, step))

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        return corrupted_responses(task, self.gold(task, step))
