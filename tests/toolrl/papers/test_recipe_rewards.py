"""The papers' rewards: hand-worked numbers, the edge cases of their published codes, and the reward lab."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import pi, sin, sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import real_data
from tests.support.every import every
from tests.toolrl.check.lab.lab import try_reward
from toolrl.papers.rewards.otc import fit, frugality
from toolrl.papers.rewards.tool_n1 import gold_calls, read_calls
from toolrl.papers.rewards.zerotir import format_penalty
from toolrl.reward_score.answers import accepted_answers, exact_match, follows_cycle, last_block, normalized
from toolrl.reward_score.math import last_box, math_correct
from toolrl.reward_score.math_equality import same_answer
from verl.errors import ConfigError, DataError
from verl.text import prompt_sha256
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolStatus,
    ToolUse,
    Trajectory,
    TrajectoryGroup,
    Turn,
)
from verl.utils.reward_score import LabReward, build_reward
from verl.utils.reward_score.base import REWARDS, GroupReward, written

pytestmark = pytest.mark.usefixtures("small_heap")

OK, WRONG, LATE, DOWN = ToolStatus.SUCCESS, ToolStatus.USER_ERROR, ToolStatus.TIMEOUT, ToolStatus.UNAVAILABLE


def task(answer: str, question: str = "How many?") -> Task:
    return Task("t#0", (Message("user", question),), answer, "test")


def episode(
    of: Task,
    *texts: str,
    uses: Sequence[ToolStatus] = (),
    seen: str = "seen",
    finish: FinishReason = FinishReason.STOP,
    score: Score | None = None,
    tokens: int = 0,
) -> Trajectory:
    """The policy wrote these texts, and `seen` was put before it between them."""
    done = Completion((0,) * tokens, (0.0,) * tokens, finish, 0)
    last = len(texts) - 1
    turns = tuple(
        Turn((), done, Message("assistant", text), (Message("tool", seen),) if number < last else ())
        for number, text in enumerate(texts)
    )
    used = tuple(ToolUse("python", status, 0.1) for status in uses)
    return Trajectory(of, 0, turns, StopReason(finish), Outcome.SCORED, used, score=score)


def total(name: str, trajectory: Trajectory, **options: Any) -> float:
    return build_reward(name, options).score(trajectory, trajectory.task, 0).total


FIVE = task("5")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{7} and \boxed{8", "7"),  # one that never closes is none
        (r"\boxed {7}", "7"),
        (r"boxed{7} } { \boxed{", None),
        ("", None),
    ],
)
def test_the_last_closed_box(text: str, inside: str | None) -> None:
    assert last_box(text) == inside


@settings(deadline=None)
@given(st.text(alphabet="{}\\boxed x", max_size=60))
def test_any_text_has_a_box_or_none(text: str) -> None:
    found = last_box(text)
    assert found is None or f"{{{found}}}" in text


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        ("0.5", "1/2", True),
        (r"\frac12", "0.5", True),
        (r"\sqrt{12}", r"2\sqrt{3}", True),
        ("025", "25", True),
        ("1,000", "1000", True),
        ("5.", "5", True),
        ("x=5", "5", True),
        ("(1,2)", "(2,1)", False),  # a pair has an order,
        ("2,1", "1,2", True),  # a list of values has none
        ("$8$, 221", "$221,$8$", True),
        ("1,1", "1,2", False),
        ("1,2,3", "1,2", False),
        ("1,2", "12", False),
        ("", "", False),
        ("9" * 600, "9", False),
    ],
)
def test_same_answers(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["aime24.jsonl", "aime25.jsonl", "amc23.jsonl", "math500.jsonl", "olympiadbench.jsonl", "gsm8k_test.jsonl"]
)
def test_the_gold_answer_of_published_problems_is_right_and_a_wrong_one_is_not(name: str) -> None:
    rows = [json.loads(line) for line in real_data("math", name).read_text().splitlines()]
    golds = [row["answer"] if isinstance(row["answer"], str) else ",".join(row["answer"]) for row in rows]
    assert every(math_correct(rf"Thus $x$ is \boxed{{{gold}}}", gold) for gold in golds)
    assert not any(math_correct(rf"\boxed{{{gold}, -987654321}}", gold) for gold in golds[:100])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"target": ["a"], "target": ["b"]}', "has the key 'target' twice"),
        ("[NaN]", r"\[0\]'?: is not valid JSON: NaN is not a number"),
        ('[{"name": "f", "arguments": {"x": 1e400}}]', r"\[0\].arguments.x'?: is not valid JSON: 1e400"),
    ],
)
def test_a_gold_answer_that_programs_read_differently_is_refused(text: str, message: str) -> None:
    for read in (accepted_answers, gold_calls):
        with pytest.raises(DataError, match=f"'reward_model.ground_truth.*{message}"):
            read(text)
    assert accepted_answers("[sic] NaN") == ["[sic] NaN"]  # a text


def test_observations_are_not_attributed_to_the_policy() -> None:
    trajectory = episode(FIVE, "I ask.", "No answer.", seen=r"\boxed{5}", uses=[OK])
    assert written(trajectory) == "I ask.\nNo answer."
    assert total("torl", trajectory) == total("retool", trajectory) == -1.0


@pytest.mark.parametrize(
    ("text", "uses", "options", "value"),
    [
        (r"\boxed{5}", [], {}, 1.0),
        (r"\boxed{6}", [], {}, -1.0),
        ("five", [], {}, -1.0),
        (r"\boxed{6}", [], {"wrong_box": -0.5}, -0.5),
        ("five", [], {"wrong_box": -0.5}, -1.0),
        (r"\boxed{5}", [], {"executability_penalty": 0.5}, 1.0),  # no code was run: published code takes 0.5 off
        (r"\boxed{5}", [WRONG, OK], {"executability_penalty": 0.5}, 0.5),  # published code sees the last round alone
        (r"\boxed{6}", [OK, LATE], {"executability_penalty": 0.5}, -1.5),
        (r"\boxed{5}", [DOWN, OK], {"executability_penalty": 0.5}, 1.0),  # never the policy's fault
        (r"\boxed{5}", [WRONG], {}, 1.0),
    ],
)
def test_torl(text: str, uses: list[ToolStatus], options: dict[str, float], value: float) -> None:
    assert total("torl", episode(FIVE, text, uses=uses), **options) == value


@pytest.mark.parametrize(("rounds", "shaped"), [(0, -1.0), (1, -0.9), (3, -0.7), (4, -0.6), (9, -0.6)])
def test_retool_and_its_shaped_form(rounds: int, shaped: float) -> None:
    wrong = episode(FIVE, *["print(1)"] * rounds, r"\boxed{6}")
    assert total("retool", wrong) == -1.0
    assert total("retool", wrong, shaped=True) == pytest.approx(shaped)
    assert total("retool", episode(FIVE, *["print(1)"] * rounds, r"\boxed{5}"), shaped=True) == 1.0


def test_otc_by_hand() -> None:
    assert [frugality(m, 4.0) for m in (0, 1, 2)] == pytest.approx([1.0, sqrt(3) / 2, sqrt(2) / 2])  # pi/6, pi/4
    assert [fit(m, 1, 4.0) for m in (0, 1, 2)] == pytest.approx([0.0, 1.0, sqrt(3) / 2], abs=1e-12)  # 0, pi/2, 2pi/3
    assert fit(0, 0, 4.0) == 1.0 and fit(1, 0, 4.0) == frugality(1, 4.0)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 30))
def test_otc_fits_best_at_the_fewest_calls(calls: int, fewest: int) -> None:
    harmonic = 2 * fewest * calls / (calls + fewest)  # the paper's f
    assert fit(calls, fewest, 4.0) == pytest.approx(sin(harmonic * pi / (2 * fewest)), abs=1e-12)
    assert fit(calls, fewest, 4.0) <= fit(fewest, fewest, 4.0) == pytest.approx(1.0)


def test_otc_ppo_pays_right_answers_alone() -> None:
    right, wrong = r"\boxed{5}", r"\boxed{6}"
    options = {"answers": "math", "max_calls": 4, "scale": 2.0}
    assert total("otc_ppo", episode(FIVE, right, uses=[OK]), **options) == pytest.approx(sqrt(3))
    assert total("otc_ppo", episode(FIVE, wrong), **options) == 0.0
    with pytest.raises(ConfigError, match="answers must be search, math or number"):
        build_reward("otc_ppo", {"answers": "maths"})


def test_otcs_format_factor() -> None:
    """r_phi = correct + 0.5 of good form, times r_tool: cos(pi/6) after one call, cos(0) without any."""
    options = {"format": 0.5, "max_calls": 4}
    right, wrong, bare = ANSWER.format("Paris"), ANSWER.format("Rome"), "<answer>Paris</answer>"
    searched = episode(PARIS, SEARCH, right, uses=[OK])
    assert total("otc_ppo", searched, **options) == pytest.approx(1.5 * sqrt(3) / 2)
    assert [total("otc_ppo", episode(PARIS, text), **options) for text in (right, wrong, bare)] == [1.5, 0.5, 1.0]
    assert total("otc_ppo", searched) == pytest.approx(sqrt(3) / 2)
    assert total("otc_ppo", episode(FIVE, r"\boxed{6}"), answers="math", format=0.5) == 0.5
    assert total("otc_ppo", episode(FIVE, "6"), answers="math", format=0.5) == 0.0
    with pytest.raises(ConfigError, match="format must be 0 or more"):
        build_reward("otc_grpo", {"format": -0.1})

    reward = build_reward("otc_grpo", {"answers": "math", "format": 0.5})
    assert isinstance(reward, GroupReward)
    none_right = group(FIVE, (False, 0), (False, 2), format=0.5)
    assert reward.shape(none_right, {}) == ((0.5, 0.5), {})  # none was right yet: form alone, whatever the calls
    rewards, _ = reward.shape(group(FIVE, (True, 2), (False, 1), format=0.5), {})
    assert rewards == pytest.approx((1.5, 0.5 * sin(pi / 3)))


def test_otc_reads_numbers_as_the_reward_of_numbers_does() -> None:
    """The last one of the last turn, in an episode that ended by itself; r_tool is cos(pi/3) after the only call."""
    options = {"answers": "number", "max_calls": 1, "format": 0.5}
    called = episode(FIVE, "Look: 7", "It is 5.", uses=[OK])
    assert total("otc_ppo", called, **options) == pytest.approx(0.5 * 1.5)
    assert total("otc_ppo", episode(FIVE, "It is 5."), **options) == 1.5
    assert total("otc_ppo", episode(FIVE, "It is 5, or 6."), **options) == 0.5
    assert total("otc_ppo", episode(FIVE, "5", "No idea."), **options) == 0.0
    assert total("otc_ppo", replace(called, stop_reason=StopReason.MAX_TOOL_CALLS), **options) == pytest.approx(0.25)
    reward = build_reward("otc_grpo", {"answers": "number"})
    with pytest.raises(DataError, match="a number, such as 1234"):
        reward.check_task(PARIS)
    reward.check_task(FIVE)


def group(of: Task, *outcomes: tuple[bool, int], **options: Any) -> TrajectoryGroup:
    """Trajectories that are right or not after so many calls, scored."""
    reward = build_reward("otc_grpo", {"answers": "math", **options})
    each = tuple(episode(of, rf"\boxed{{{5 if right else 6}}}", uses=[OK] * calls) for right, calls in outcomes)
    scores = tuple(reward.score(trajectory, of, 0) for trajectory in each)
    return TrajectoryGroup(of, each, scores, tuple(score.total for score in scores))


def test_otc_grpo_remembers_the_fewest_calls_of_a_right_answer() -> None:
    reward = build_reward("otc_grpo", {"answers": "math"})
    assert isinstance(reward, GroupReward)
    key, state = prompt_sha256(FIVE.prompt), {"another": 0}

    none_right, after = reward.shape(group(FIVE, (False, 0), (False, 2)), state)
    assert (none_right, after) == ((0.0, 0.0), state)  # there is no n yet

    rewards, second = reward.shape(group(FIVE, (True, 2), (True, 4), (False, 1)), after)
    assert rewards == pytest.approx((1.0, sqrt(3) / 2, 0.0))  # n = 2: a wrong answer's single call is not counted
    assert second == {"another": 0, key: 2} and state == {"another": 0}

    rewards, third = reward.shape(group(FIVE, (True, 4), (True, 6)), second)
    assert rewards == pytest.approx((sqrt(3) / 2, sqrt(2) / 2))  # n stays 2 where this group needed 4
    assert third == second
    rewards, fourth = reward.shape(group(FIVE, (True, 0), (True, 2)), json.loads(json.dumps(third)))
    assert fourth == {"another": 0, key: 0}
    assert rewards == pytest.approx((1.0, sqrt(2) / 2))  # n = 0: the cosine with c = 4

    assert prompt_sha256(task("5", "Another?").prompt) != key == prompt_sha256(replace(FIVE, id="other#1").prompt)


CALLS = '[{"name": "f", "arguments": {"a": 1, "b": {"c": [2], "d": null}}}, {"name": "g", "arguments": {}}]'
SWAPPED = '[{"arguments": {}, "name": "g"}, {"name": "f", "arguments": {"b": {"d": null, "c": [2]}, "a": 1}}]'
NAMES = '[{"name": "f", "arguments": {"a": 2}}, {"name": "g", "arguments": {}}]'


@pytest.mark.parametrize(
    ("text", "values"),  # of v0, v1, v2, v3, v4, llama
    [
        (f"<think>t</think><tool_call>{SWAPPED}</tool_call>", [1, 1.2, 1, 1, 1, 1]),
        (f"<tool_call>{SWAPPED}</tool_call></think><think>", [1, 1.2, 1, 1, 1, 1]),  # presence, not order
        (f"<tool_call>{CALLS}</tool_call>", [0, 1.0, 1, 0.8, 0.8, 0]),
        (f"<think>t</think><tool_call>{NAMES}</tool_call>", [0, -0.2, 0, 0.2, 0.4, 0]),
        (f"<tool_call>{NAMES}</tool_call>", [0, 0, 0, 0, 0.2, 0]),
        (f"<think>t</think><tool_call>{CALLS.replace('1', '1.0')}</tool_call>", [0, -0.2, 0, 0.2, 0.4, 0]),
        (f"<think>t</think><tool_call>x</tool_call><tool_call>{CALLS}</tool_call>", [1, 1.2, 1, 1, 1, 1]),
        (f"<think>t</think><tool_call>{CALLS}</tool_call><tool_call>[]</tool_call>", [0, -0.2, 0, 0.2, 0.2, 0]),
        ("<think>t</think><tool_call>7</tool_call>", [0, -0.2, 0, 0.2, 0.2, 0]),  # published code raises
        ("<think>t</think>", [0, 0, 0, 0.2, 0.2, 0]),
        ("", [0, 0, 0, 0, 0, 0]),
    ],
)
def test_tool_n1(text: str, values: list[float]) -> None:
    versions = ("v0", "v1", "v2", "v3", "v4", "llama")
    got = [total("tool_n1", episode(task(CALLS), text), version=version) for version in versions]
    assert got == pytest.approx(values)


def test_tool_n1_without_calls() -> None:
    nothing = task("[]")
    assert total("tool_n1", episode(nothing, "<think>t</think><tool_call>[]</tool_call>")) == 1.0
    assert total("tool_n1", episode(nothing, "<think>t</think> Hello.")) == 0.0
    assert total("tool_n1", episode(nothing, "<think>t</think> Hello."), version="llama") == 1.0
    with pytest.raises(DataError, match=r"t#0.*gold calls cannot be parsed"):
        total("tool_n1", episode(task("f(1)"), "hi"))
    with pytest.raises(ConfigError, match="known: llama, v0"):
        build_reward("tool_n1", {"version": "v9"})


def test_tool_n1_reads_what_is_published() -> None:
    assert read_calls('{"name": "f", "arguments": {}}') == [("f", "{}")]
    assert read_calls(json.dumps(CALLS)) == read_calls(CALLS)  # a JSON text of a JSON list
    for bad in ("[1]", '["f"]', "[[]]", "null", '[{"name": "f"}]', '[{"name": 1, "arguments": {}}]', "[" * 99999):
        assert read_calls(bad) is None
    assert last_block("<tool_call>a</tool_call><tool_call>b", "<tool_call>", "</tool_call>") == "a"


@settings(deadline=None)
@given(st.text(alphabet="<>/tool_cal{}[]", max_size=80))
def test_tool_n1_never_raises_for_any_response(text: str) -> None:
    assert total("tool_n1", episode(task(CALLS), text)) == 0.0


PARIS = task('["Paris", "City of Light"]')


@pytest.mark.parametrize("answer", ['{"answer": ["x"]}', '{"target": []}', '{"target": [true]}', '{"target": null}'])
@pytest.mark.parametrize("reward", ["search_r1", "qa", "otc_grpo"])
def test_an_answer_without_targets_is_a_fault_rather_than_always_wrong(reward: str, answer: str) -> None:
    with pytest.raises(DataError, match=r"field 'reward_model.ground_truth': is .*; expected .*target"):
        total(reward, episode(task(answer), "<answer>x</answer>"))


def test_squad_normalization() -> None:
    assert normalized("  The  Quick, (brown) fox's a  tail!") == "quick brown foxs tail"
    assert accepted_answers('["a", "b"]') == ["a", "b"]
    assert accepted_answers("[1999, 2.5]") == ["1999", "2.5"] and accepted_answers("[x") == ["[x"]
    assert accepted_answers('{"target": [1999, "two"]}') == ["1999", "two"]
    assert accepted_answers('{"target": "x"}') == ["x"] and accepted_answers('{"target": 2.5}') == ["2.5"]
    assert exact_match("<answer>the city of LIGHT.</answer>", PARIS.answer)
    assert exact_match("<answer>Rome</answer> no, <answer>Paris</answer>", PARIS.answer)
    assert not exact_match("<answer>Paris, France</answer>", PARIS.answer)
    assert not exact_match("Paris", PARIS.answer)
    for nothing in ("", "the", "..."):  # SQuAD's normalisation leaves nothing of these golds, either
        assert not exact_match(f"<answer>{nothing}</answer>", '["A+", "!!!", "The The"]')
    assert exact_match("<answer>a+</answer>", "A+") and exact_match("<answer> !!! </answer>", "!!!")


SEARCH = "<think>I search.</think> <search>capital</search>"
ANSWER = "<think>Now I know.</think>\n<answer>{}</answer>"


@pytest.mark.parametrize(
    ("texts", "values"),  # exact match, with form
    [
        ([SEARCH, ANSWER.format("Paris")], [1, 1]),
        ([ANSWER.format("Paris")], [1, 1]),  # one answer block is enough
        (["<search>capital</search>", ANSWER.format("Paris")], [1, 0.8]),
        ([ANSWER.format("Paris") + " bye"], [1, 0.8]),
        ([SEARCH + "<information>Paris</information>" + ANSWER.format("Paris")], [1, 0.8]),  # information of its own
        ([SEARCH, ANSWER.format("Rome")], [0, 0.2]),
        (["<answer>Rome</answer>"], [0, 0.1]),
        ([SEARCH], [0, 0]),
        (["<think>t</think>", ANSWER.format("Paris")], [1, 0.8]),  # an observation without a query
    ],
)
def test_search_r1(texts: list[str], values: list[float]) -> None:
    trajectory = episode(PARIS, *texts)
    assert total("search_r1", trajectory) == values[0]
    assert total("search_r1", trajectory, with_form=True) == pytest.approx(values[1])


def test_an_answer_in_an_observation_is_not_the_policys() -> None:
    assert total("search_r1", episode(PARIS, SEARCH, "<think>t</think>", seen="<answer>Paris</answer>")) == 0.0


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "x", " "])))
def test_form_is_a_cycle(pieces: list[str]) -> None:
    text = "".join(pieces)
    if follows_cycle(episode(PARIS, text), "search", "information"):
        assert text.count("<answer>") == text.count("</answer>") == 1
        assert text.count("<think>") == text.count("</think>") == 1 and "<search>" not in text


GOOD = r"I think.</think> <answer>\boxed{5}</answer>"


@pytest.mark.parametrize(
    ("text", "penalty"),
    [
        (GOOD, 0.0),
        (GOOD + " one two three four five", 0.0),
        (GOOD + " one two three four five six", -0.5),  # +0.5 in the published code
        (GOOD + GOOD, -1.0),
        (GOOD.replace("</think>", ""), -1.0),
        ("</think> <answer>5</answer>", -2.0),
        (r"</think> \boxed{5}", -3.0),
    ],
)
def test_zerotir_form(text: str, penalty: float) -> None:
    assert format_penalty(text) == penalty
    assert total("zerotir", episode(FIVE, text)) == float(penalty == 0.0)
    assert total("zerotir", episode(FIVE, text), format_penalties=True) == (penalty or 1.0)
    assert format_penalty(GOOD.replace("</think>", ""), loose=True) == 0.0


def test_zerotir_options() -> None:
    assert total("zerotir", episode(FIVE, GOOD, finish=FinishReason.LENGTH)) == 0.0
    fails = {"failing_code_penalty": 0.1}
    assert total("zerotir", episode(FIVE, "x", GOOD, uses=[WRONG, LATE]), **fails) == pytest.approx(0.9)
    assert total("zerotir", episode(FIVE, "x", GOOD, uses=[WRONG]), **fails) == 1.0  # more than one
    assert total("zerotir", episode(FIVE, "x", GOOD, uses=[WRONG, OK]), **fails) == 1.0
    assert total("zerotir", episode(FIVE, GOOD, tokens=800), longest=1000, margin=400) == 0.5


def test_artist_math() -> None:
    code = "<think>t</think><python>print(5)</python>"
    good = episode(FIVE, code, "<think>t</think><answer>5</answer>", uses=[OK])
    assert total("artist_math", good) == 3.5
    assert total("artist_math", replace(good, tool_uses=(*good.tool_uses, ToolUse("python", WRONG, 0.1)))) == 3.0
    idle = episode(FIVE, r"<think>t</think><answer>\boxed{5}</answer>")
    assert total("artist_math", idle) == 2.5 and total("artist_math", idle, no_calls=1.0) == 3.5
    assert total("artist_math", episode(FIVE, "<answer>6</answer>")) == 0.125  # one tag of two, no order
    assert total("artist_math", episode(FIVE, "")) == 0.0


def test_artist_tools_uses_the_score_of_the_environment() -> None:
    judged = Score(0.0, {"state": 0.5, "functions": 0.25})
    trajectory = episode(FIVE, "<think>t</think> f()", "no thought", score=judged)
    assert total("artist_tools", trajectory) == 0.5 * 0.5 + 0.5 * 0.25 + 0.5 * 0.5
    for score in (None, Score(1.0, {})):
        with pytest.raises(ConfigError, match="environment whose score has parts"):
            total("artist_tools", replace(trajectory, score=score))


MATH_GOLDS = ["5", r"\frac{1}{2}", "1,2", r"\text{Evelyn}", r"(-\infty, 3]"]
LABS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("torl", {}, MATH_GOLDS),
    ("torl", {"wrong_box": -0.5}, MATH_GOLDS),
    ("retool", {"shaped": True}, MATH_GOLDS),
    ("otc_ppo", {"answers": "math", "scale": 2.0}, MATH_GOLDS),
    ("otc_grpo", {}, ["Paris", PARIS.answer]),
    ("otc_grpo", {"answers": "number", "format": 0.5}, ["5", "-1,200.50"]),
    ("otc_ppo", {"format": 0.5}, ["Paris", PARIS.answer]),
    ("zerotir", {"format_penalties": True}, MATH_GOLDS),
    ("zerotir", {"loose": True}, MATH_GOLDS),
    ("search_r1", {}, ["Paris", PARIS.answer]),
    ("search_r1", {"with_form": True}, ["Paris", PARIS.answer]),
    *(("tool_n1", {"version": version}, [CALLS, NAMES, "[]"]) for version in ("v0", "v1", "v2", "v3", "v4", "llama")),
]


@pytest.mark.parametrize(("name", "options", "golds"), LABS, ids=str)
def test_the_lab_reports_no_violation(name: str, options: dict[str, Any], golds: list[str]) -> None:
    reward = build_reward(name, options)
    assert isinstance(reward, LabReward)
    report = try_reward(reward, [task(gold) for gold in golds])
    assert report.violations == [] and len(report.stats) > 5


def test_the_lab_on_published_problems() -> None:
    with gzip.open(real_data("math", "math_train.jsonl.gz"), "rt") as lines:
        tasks = [task(json.loads(line)["answer"]) for _, line in zip(range(60), lines, strict=False)]
    reward = build_reward("zerotir")
    assert isinstance(reward, LabReward) and try_reward(reward, tasks).violations == []


def test_every_known_reward_can_be_made(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.toml"
    rubric.write_text('[criteria]\nright = "It gives the gold answer."\n')
    options = {
        "sum": {"terms": ["rlla"]},
        "judge": {"rubric": str(rubric), "url": "http://127.0.0.1:9/v1", "model": "judge"},
    }
    for name in REWARDS:
        build_reward(name, options.get(name, {}))


def test_expressions_that_sympy_never_finishes_are_wrong_without_a_hang() -> None:
    assert not same_answer("-987654321", r"\frac{\log 2}{\log 2-\log 3}")
    assert not math_correct("\\boxed{" * 50_000 + "5" + "}" * 50_000, "6")


def test_answers_are_compared_in_threads_too() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(same_answer, "0.5", "1/2").result()
