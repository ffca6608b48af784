"""Why a response has its score: which call matched which gold call, and what each part gave, for rlla and calls.

The arithmetic is the reward's own (verl/utils/reward_score). An explanation is given only if it leads to every recorded
part of the score: a row of the data may name another reward, or a schedule another step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolrl.analysis.report import rows
from toolrl.analysis.report.folder import RunFolder
from verl.errors import VerlError
from verl.formats.base import Calls, ToolCallFormat, build_tool_call_format
from verl.formats.toolrl_text import Gold, call_text, matches_shape, parse_calls, parse_gold, thought_word_count
from verl.text import counted
from verl.utils.reward_score.calls import calls_as_json
from verl.utils.reward_score.matching import Call
from verl.utils.reward_score.rlla import (
    MALFORMED,
    RllaOptions,
    calls_score,
    correctness_range,
    format_range,
    full_length,
    length_score,
    match_calls,
    most_points,
    score_response,
)

_NAMES = ("auto", "rlla", "calls")
_TOLERANCE = 1e-6
_SHOWN_CHARS = 200
_FORM = {
    True: "parses, is complete, and calls tools as the gold turn does",
    False: "does not parse, is not complete, or does not call tools where the gold turn does",
}


@dataclass(frozen=True, slots=True)
class Reasons:
    """The explanations of a run whose reward is rlla, calls or auto."""

    options: RllaOptions
    tool_call_format: ToolCallFormat | None

    def of(self, rollout: Mapping[str, Any]) -> list[str]:
        """Lines; empty where the score cannot be explained. rollout: a line of a transcript"""
        score = rollout.get("score")
        parts = score.get("parts", {}) if isinstance(score, dict) else {}
        recorded = {name: value for name, each in parts.items() if (value := rows.number(each)) is not None}
        if "correctness" not in recorded or not isinstance(rollout.get("answer"), str):
            return []
        for step in (rollout["step"], rollout["step"] - 1):
            for explain in (self._texts, self._calls):
                lines, explained = explain(rollout, step)
                pairs = ((explained.get(name, each), each) for name, each in recorded.items())
                if lines and all(math.isclose(one, two, abs_tol=_TOLERANCE) for one, two in pairs):
                    return lines
        return []

    def _texts(self, rollout: Mapping[str, Any], step: int) -> tuple[list[str], dict[str, float]]:
        """As rlla scores it: the last turn's text."""
        response = _turns(rollout)[-1]["content"].strip()
        try:
            gold = parse_gold(rollout["answer"])
            score = score_response(response, rollout["answer"], step, self.options)
        except VerlError:
            return [], {}
        lines = [_format(response, gold, score.format)]
        if gold.calls is None:
            lines.append(f"correctness {score.correctness:g}: the gold answer calls no tool")
        elif (text := call_text(response)) is None:
            lines.append(f"correctness {score.correctness:g}, the minimum: the response has no <tool_call> block")
        else:
            try:
                predicted = parse_calls(text)
                lines += self._matches(gold.calls, predicted, score.correctness, step)
            except MALFORMED as error:
                lines.append(f"correctness {score.correctness:g}: the calls cannot be read ({_cut(str(error))})")
        return [*lines, *self._length(response, step)], score._asdict()

    def _calls(self, rollout: Mapping[str, Any], step: int) -> tuple[list[str], dict[str, float]]:
        """As the reward calls scores it: the first turn's calls. Its format is one of two values, the recorded one."""
        turn, ends = _turns(rollout)[0], format_range(self.options, step)
        recorded = rows.number(rollout["score"]["parts"].get("format"))
        fits = recorded is None or math.isclose(recorded, ends.high, abs_tol=_TOLERANCE)
        points = ends.high if fits else ends.low
        lines = [] if recorded is None else [f"format {points:g}: the response {_FORM[fits]}"]
        try:
            gold = [{"name": call["name"], "parameters": call["arguments"]} for call in json.loads(rollout["answer"])]
            if predicted := self._parse_calls(turn):
                correctness = calls_score(gold, predicted, self.options, step)
                lines += self._matches(gold, predicted, correctness, step)
            else:
                correctness = correctness_range(self.options, step).low
                lines.append(f"correctness {correctness:g}, the minimum: the response calls no tool")
        except MALFORMED:
            return [], {}
        length = length_score(turn["content"], self.options, step)
        terms = {"format": points, "correctness": correctness, "length": length}
        return [*lines, *self._length(turn["content"], step)], terms

    def _length(self, response: str, step: int) -> list[str]:
        """A line, if the reward has this part."""
        if not self.options.scores_length:
            return []
        count, points = thought_word_count(response), length_score(response, self.options, step)
        if count is None:
            return [f"length {points:g}: the response has no thought"]
        return [
            f"length {points:g}: the thought has {counted(count, 'word')}, "
            f"and {full_length(self.options, step):g} give 1 point"
        ]

    def _parse_calls(self, turn: Mapping[str, Any]) -> list[Call]:
        return calls_of(turn, self.tool_call_format)

    def _matches(self, gold: list[Call], predicted: list[Any], correctness: float, step: int) -> list[str]:
        if gold == predicted:
            return [f"correctness {correctness:g}, the maximum: the calls are the gold calls"]
        if self.options.coarse:
            return [f"correctness {correctness:g}, the minimum: the calls are not exactly the gold calls (coarse)"]
        matching = match_calls(gold, predicted, self.options)
        partner = {pair.gold: pair for pair in matching.pairs}
        lines = [f"names of the tools: {matching.names:g} of 1 point"]
        for number, call in enumerate(gold):
            most, pair = most_points(self.options, call), partner.get(number)
            if pair is None:
                lines.append(f"gold call {number + 1}, {_show(call)}: no call matches, 0 of {most:g} points")
            else:
                answer = predicted[pair.predicted]
                lines.append(
                    f"gold call {number + 1}, {_show(call)}: call {pair.predicted + 1}, {_show(answer)}, "
                    f"{pair.points:g} of {most:g} points{self._differing(call, answer)}"
                )
        used = {pair.predicted for pair in matching.pairs}
        lines += [
            f"call {number + 1}, {_show(call)}: matches no gold call"
            for number, call in enumerate(predicted)
            if number not in used
        ]
        low, high = correctness_range(self.options, step)
        points = matching.agreement * matching.maximum
        arithmetic = f"{low:g} + ({high:g} - {low:g}) * {points:.4g} / {matching.maximum:g} = {correctness:.4g}"
        return [*lines, f"correctness: {arithmetic}"]

    def _differing(self, gold: Call, predicted: Mapping[str, Any]) -> str:
        expected, actual = gold["parameters"], predicted["parameters"]
        kinds = {
            "missing": [key for key in expected if key not in actual],
            "not in the gold": [key for key in actual if key not in expected],
            "another value": [key for key in expected if key in actual and actual[key] != expected[key]],
        }
        return "".join(f"; {kind}: {', '.join(map(str, keys))}" for kind, keys in kinds.items() if keys)


def calls_of(turn: Mapping[str, Any], tool_call_format: ToolCallFormat | None) -> list[Call]:
    """The calls of an assistant turn: its native ones, or those that the format parses from its text."""
    if "tool_calls" in turn:
        return [{"name": call["name"], "parameters": call["arguments"]} for call in turn["tool_calls"]]
    parsed = tool_call_format.parse(turn["content"]) if tool_call_format else None
    return calls_as_json(parsed.calls) if isinstance(parsed, Calls) else []


@dataclass(frozen=True, slots=True)
class CallReader:
    """in_tags: the run names no format, so calls in ToolRL's tags are read"""

    tool_call_format: ToolCallFormat | None
    in_tags: bool

    def lines(self, turn: Mapping[str, Any]) -> list[str]:
        """The parsed calls of an assistant turn, a line each."""
        try:
            calls: Sequence[Any] = calls_of(turn, self.tool_call_format)
            text = call_text(turn["content"].strip()) if self.in_tags and not calls else None
            if text is not None:
                calls = parse_calls(text)
        except MALFORMED as error:
            return [f"calls: they cannot be read ({_cut(str(error))})"]
        return [f"call {number}: {_show(call)}" for number, call in enumerate(calls, 1)]


def call_reader(run: RunFolder) -> CallReader:
    """In ToolRL's tags also where the settings cannot be read."""
    try:
        env = run.config("env.tool_call_format").env
        built = (
            build_tool_call_format(env.tool_call_format, env.tool_call_format_options) if env.tool_call_format else None
        )
    except VerlError:  # also auto: a format that follows from the model
        return CallReader(None, run.settings.get("env.tool_call_format") is None)
    return CallReader(built, env.tool_call_format is None)


def lowest_correctness(run: RunFolder) -> Callable[[int], float] | None:
    """The lowest correctness by step; None if the run's reward is another one, or its options cannot be read."""
    if run.settings.get("reward.name") not in _NAMES:
        return None
    settings = {name: value for name, value in run.settings.items() if name.startswith("reward.options.")}
    try:
        options = RllaOptions.from_env(run.switches, {name.split(".", 2)[2]: value for name, value in settings.items()})
    except VerlError:
        return None
    return lambda step: correctness_range(options, step).low


def reasons_of(run: RunFolder) -> Reasons | None:
    """None if the run's reward is another one, or its settings cannot be read."""
    if run.settings.get("reward.name") not in _NAMES:
        return None
    try:
        config = run.config("env.tool_call_format")
        options = RllaOptions.from_env(run.switches, config.reward.options)
        name = config.env.tool_call_format
        built = build_tool_call_format(name, config.env.tool_call_format_options) if name else None
    except VerlError:
        return None
    return Reasons(options, built)


def _turns(rollout: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    written = [message for message in rollout["responses"] if message.get("role") == "assistant"]
    return written or [{"content": ""}]


def _format(response: str, gold: Gold, points: float) -> str:
    expected = {"THOUGHT": "a thought", "CALL": "a thought and calls", "ANSWER": "a thought and an answer"}
    shape = expected.get(gold.shape.name, "a thought, calls and an answer")
    fits = "exactly" if matches_shape(response, gold.shape) else "not"
    return f"format {points:g}: {fits} the blocks of the gold, {shape}"


def _show(call: Any) -> str:
    if not isinstance(call, dict):
        return _cut(str(call))
    return _cut(f"{call.get('name')}({json.dumps(call.get('parameters'), ensure_ascii=False)})")


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} .."
