"""ToolRL's reward: hand-worked numbers, the published scores, an independent implementation, and hostile text."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT, TOGGLES, real_data
from tests.verl.utils.reward_score.toolrl_oracle import oracle_score
from toolrl.check.lab.__main__ import as_trajectory
from verl.errors import ConfigError, DataError
from verl.formats.toolrl_text import final_turn, gold_shape, matches_shape, render_response
from verl.types import Message, Task
from verl.utils.reward_score import build_reward
from verl.utils.reward_score.matching import Pair
from verl.utils.reward_score.rlla import (
    Matching,
    RllaOptions,
    _warn_of_strictmatch,
    calls_score,
    compute_score,
    correctness_range,
    format_range,
    full_length,
)

pytestmark = pytest.mark.usefixtures("small_heap")
A = {"name": "A", "parameters": {"p": 1, "q": "z"}}
B: dict[str, Any] = {"name": "B", "parameters": {}}
C = {"name": "C", "parameters": {"x": 1}}
GOLD = render_response("t", [A, B])
DEFAULT = RllaOptions()
VARIANTS = {
    "default": DEFAULT,
    "refined": RllaOptions(refined=True),
    "intermediate": RllaOptions(intermediate=True),
    "coarse": RllaOptions(coarse=True),
}
STEPS = (0, 1, 29, 30, 75, 104, 105, 149, 150, 151, 400)


def score(response: str, answer: str = GOLD, step: int = 0, options: RllaOptions = DEFAULT) -> float:
    return compute_score(response, answer, step, options)[0]


# S_max = 1 + (1 + 2) + (1 + 0) = 5; total = 1 + 6 * points / 5 - 3
@pytest.mark.parametrize(
    ("response", "default", "refined", "intermediate", "coarse"),
    [
        (render_response("t", [A, B]), 4.0, 4.0, 4.0, 4.0),
        (render_response("t", [{"name": "A", "parameters": {"q": "z", "p": 1}}, B]), 4.0, 4.0, 4.0, 4.0),
        (render_response("t", [B, A]), 4.0, 2.8, 4.0, -2.0),
        (render_response("t", [{"name": "A", "parameters": {"p": 2, "q": "z"}}, B]), 2.8, 2.8, 2.0, -2.0),
        (render_response("t", [A]), 2.2, 1.6, 1.0, -2.0),
        (render_response("t", [A, B, C]), 3.6, 2.8, 1 + 6 * (2 / 3 + 2) / 3 - 3, -2.0),
        (render_response("t", [A, {"name": "B", "parameters": {"s": 1}}]), 2.8, 2.8, 2.0, -2.0),
        ("<think> t </think>\n<tool_call>\n{bad\n</tool_call>", -2.0, -2.0, -2.0, -2.0),
        ("<think> t </think>\n<tool_call>\n\n</tool_call>", -2.0, -2.0, -2.0, -2.0),
        ("no tags", -3.0, -3.0, -3.0, -3.0),
        ("", -3.0, -3.0, -3.0, -3.0),
    ],
)
def test_worked_numbers(response: str, default: float, refined: float, intermediate: float, coarse: float) -> None:
    wanted = (default, refined, intermediate, coarse)
    got = [score(response, options=options) for options in VARIANTS.values()]
    assert got == pytest.approx(wanted, abs=1e-12)


def test_key_that_does_not_overlap_earns_the_name_only() -> None:
    gold = render_response("t", [{"name": "A", "parameters": {"p": 1}}])
    # S_max = 3: name 1 point, keys disjoint 0, value 0
    assert score(render_response("t", [{"name": "A", "parameters": {"r": 1}}]), gold) == pytest.approx(1 + 6 / 3 - 3)


def test_a_parameter_that_is_null_in_the_gold_is_not_matched_by_its_absence() -> None:
    gold = render_response("t", [{"name": "A", "parameters": {"p": None}}])
    # S_max = 3: name 1 point, and 2 more if the parameter is there and null
    assert score(render_response("t", [{"name": "A", "parameters": {"p": None}}]), gold) == 4.0
    assert score(render_response("t", [{"name": "A", "parameters": {}}]), gold) == pytest.approx(1 + 6 / 3 - 3)
    assert score(render_response("t", [{"name": "A", "parameters": {"q": 1}}]), gold) == pytest.approx(1 + 6 / 3 - 3)


def test_a_space_for_the_newline_costs_the_format_point_alone() -> None:
    assert compute_score(GOLD.replace("</think>\n", "</think> "), GOLD, 0, DEFAULT) == (3.0, 0.0, 3.0, 0.0)


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>"])
def test_a_tag_that_occurs_twice_costs_the_format_point(tag: str) -> None:
    """In a thought, so that the blocks are still those of the gold, from the first character to the last."""
    gold = render_response("t", [A])
    assert compute_score(gold, gold, 0, DEFAULT)[1] == 1.0
    assert compute_score(render_response(f"t {tag}", [A]), gold, 0, DEFAULT)[1] == 0.0


def test_blank_line_between_calls_is_the_minimum() -> None:
    assert score(GOLD.replace("}\n{", "}\n\n{")) == -2.0


def test_a_name_that_is_no_text_fails_only_where_toolrl_compares_it_as_a_key() -> None:
    """Refined names are compared as lists, which any value survives; multisets need values that can be hashed."""
    gold, odd = render_response("t", [A]), {"name": ["x"], "parameters": {}}
    response = render_response("t", [A, odd])
    assert score(response, gold) == -2.0
    assert score(response, gold, options=VARIANTS["refined"]) == pytest.approx(1 + 6 * (0 + 1 + 2) / 4 - 3)


def test_the_maximum_is_exact_and_sums_are_rounded_as_in_toolrl() -> None:
    gold = [{"name": "A", "parameters": dict.fromkeys("abcdefg", 0)}]  # S_max = 1 + 8
    given = {"name": "A", "parameters": {"a": 0, "b": 0, "x": 0}}  # names 1, keys 2/8, values 2
    for end in (3.0, 1.0):
        options = RllaOptions(correct_max_1=end == 1.0)
        assert calls_score(gold, gold, options, 0) == end
        assert calls_score(gold, [given], options, 0) == 2 * end * ((1.0 + 2.25) / 9.0) - end
    # 0.1 + 0.2 + 0.3 from the left is 0.6000000000000001, and from the right 0.6
    pairs = [Pair(place, place, points) for place, points in enumerate((0.1, 0.2, 0.3))]
    assert Matching(0.0, pairs, 1.0).agreement == (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)
    for step in range(0, 300, 7):  # both ends of a schedule are floats that do not add up
        options = RllaOptions(schedule_reward=True)
        assert (
            calls_score(gold, [dict(reversed(gold[0].items()))], options, step) == correctness_range(options, step).high
        )


def nested(depth: int) -> str:
    return f'{{"name": "A", "parameters": {{"p": {"[" * depth}1{"]" * depth}, "q": "z"}}}}'


@pytest.mark.parametrize("depth", [10, 200, 900, 1000, 5000, 100_000])
def test_calls_nested_at_any_depth_are_scored(depth: int) -> None:
    answer = render_response("t", [A])
    response = f"<think> t </think>\n<tool_call>\n{nested(depth)}\n</tool_call>"
    total = score(response, answer)
    assert total == (1 + 6 * 3 / 4 - 3 if depth <= 200 else total) and total in (2.5, -2.0)
    assert depth < 5000 or total == -2.0  # Python's reader gives up, as in ToolRL's code


def test_the_response_is_stripped_and_a_task_needs_a_gold_turn_in_toolrls_format() -> None:
    task = Task("t#0", (Message("user", "?"),), GOLD, "rlla")
    reward = build_reward("rlla")
    assert reward.score(as_trajectory(task, f"\n {GOLD}\n\n"), task, 0).total == 4.0
    for answer in ("", "plain"):
        with pytest.raises(DataError, match="does not end with a turn in ToolRL's format"):
            reward.check_task(replace(task, answer=answer, gold=Message("assistant", answer)))
    with pytest.raises(DataError, match=r"t, row 0: has no gold.*set reward\.name to a reward that needs none"):
        reward.check_task(replace(task, answer="", gold=None))
    reward.check_task(task)
    reward.check_task(replace(task, answer="plain"))  # a gold answer that is no conversation's


def test_greedy_and_optimal_matching_part_ways() -> None:
    first, second = {"name": "A", "parameters": {"p": 1, "q": 2}}, {"name": "A", "parameters": {"p": 1}}
    gold = render_response("t", [second, first])
    # Greedy: `second` takes the first prediction at 0.5 + 1 (a tie would be needed to leave it), `first` gets the rest.
    response = render_response(
        "t", [{"name": "A", "parameters": {"p": 1, "q": 2}}, {"name": "A", "parameters": {"p": 3}}]
    )
    greedy = 1 + (0.5 + 1) + 0.5  # names, second with the first prediction, first with the second one
    optimal = 1 + 1 + 3  # second with {"p": 3}: key 1, value 0; first with its equal: 1 + 2
    assert score(response, gold) == pytest.approx(1 + 6 * greedy / 6 - 3)
    assert score(response, gold, options=RllaOptions(matching="optimal")) == pytest.approx(1 + 6 * optimal / 6 - 3)


def test_of_equally_similar_predictions_the_first_is_taken() -> None:
    gold = [{"name": "A", "parameters": {"p": p, "q": q}} for p, q in ((1, 2), (7, 8))]
    response = [{"name": "A", "parameters": {"p": p, "q": q}} for p, q in ((1, 9), (7, 2))]
    # Both have the keys and one value of the first gold call; the second one is left for the other, with a value, too.
    points = 1 + (1 + 1) + (1 + 1)
    assert score(render_response("t", response), render_response("t", gold)) == pytest.approx(1 + 6 * points / 7 - 3)


def test_refined_ignores_order_is_the_papers_set_equality() -> None:
    options = RllaOptions(refined=True, refined_ignores_order=True)
    assert score(render_response("t", [B, A]), options=options) == 4.0
    assert score(render_response("t", [A]), options=options) == score(
        render_response("t", [A]), options=VARIANTS["refined"]
    )


# Published schedule: step -> (format high, format low, correctness high)
@pytest.mark.parametrize(
    ("step", "high", "low", "top"),
    [
        (0, 2.0, -2.0, 2.0),
        (1, 1.9933, -1.9867, 2.0067),
        (29, 1.8067, -1.6133, 2.1933),
        (75, 1.5, -1.0, 2.5),
        (104, 1.3067, -1.0, 2.6933),
        (150, 1.0, -1.0, 3.0),
        (400, 1.0, -1.0, 3.0),
    ],
)
def test_scheduled_ranges(step: int, high: float, low: float, top: float) -> None:
    options = RllaOptions(schedule_reward=True)
    assert format_range(options, step) == pytest.approx((low, high), abs=5e-5)
    assert correctness_range(options, step) == pytest.approx((-top, top), abs=5e-5)


def test_two_stages() -> None:
    options = RllaOptions(two_stage=True)
    assert [score(GOLD, step=step, options=options) for step in (29, 30)] == [2.0, 3.5]
    assert [score("", step=step, options=options) for step in (29, 30)] == [-1.0, -3.0]


def test_length_schedules_unclamped_as_published_and_clamped_on_request() -> None:
    published = RllaOptions(schedule_length=True)
    assert [full_length(published, step) for step in (0, 105, 210)] == [384.0, 640.0, 896.0]
    clamped = RllaOptions(schedule_length=True, schedule_steps=50)
    assert [full_length(clamped, step) for step in (0, 25, 50, 500)] == [384.0, 512.0, 640.0, 640.0]


def test_clamped_reward_schedule_is_symmetric_and_ends() -> None:
    options = RllaOptions(schedule_reward=True, schedule_steps=100)
    for step, end, top in ((-9, 2.0, 2.0), (0, 2.0, 2.0), (50, 1.5, 2.5), (100, 1.0, 3.0), (999, 1.0, 3.0)):
        assert format_range(options, step) == (-end, end)
        assert correctness_range(options, step) == (-top, top)


def test_the_length_part_measures_the_last_thought() -> None:
    response = render_response("w " * 128, [A, B])
    assert compute_score(response, GOLD, 0, RllaOptions(with_length=True)) == (4.25, 1.0, 3.0, 0.25)
    assert compute_score("no thought", GOLD, 0, RllaOptions(with_length=True))[3] == 0.0
    assert compute_score(render_response("w " * 9999, [A]), GOLD, 0, RllaOptions(with_length=True))[3] == 1.0


def test_schedule_length_alone_switches_the_length_reward_on() -> None:
    response = render_response("w " * 192, [A, B])
    assert compute_score(response, GOLD, 0, RllaOptions.from_env({"SCHEDULELENGTH": "1"}))[3] == 0.5


def test_unwanted_call_penalty() -> None:
    gold = render_response("t", response="hello")
    calling = render_response("t", [A], "hello")
    smuggled = gold.replace("hello", "<tool_call>\n{}\n</tool_call>")
    assert (score(calling, gold), score(smuggled, gold)) == (0.0, 1.0)
    penalized = RllaOptions(unwanted_call_penalty=2.0)
    assert [score(response, gold, options=penalized) for response in (calling, smuggled, gold)] == [-2.0, -1.0, 1.0]
    musing = gold.replace(" t ", " no <tool_call> needed ")
    assert score(musing, gold, options=penalized) == 1.0
    dodges = [f"<tool_call>\n{{}}\n</tool_call>{gold}", "<tool_call>{}</tool_call></think>", "<think> <tool_call>{}"]
    assert [score(response, gold, options=penalized) for response in dodges] == [-2.0, -2.0, -2.0]


def test_the_assistants_turn_is_found_from_the_markers() -> None:
    chatml = f"<|im_start|>system\nS <|start_header_id|><|im_end|>\n<|im_start|>assistant\n{GOLD}<|im_end|>\n"
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    llama = f"<|begin_of_text|>{header.format('system')}S <|im_start|>assistant<|eot_id|>"
    llama += f"{header.format('assistant')}{GOLD}<|eot_id|>"
    assert final_turn(chatml) == final_turn(llama) == final_turn(f"  {GOLD}\n") == GOLD
    earlier = f"<|im_start|>assistant\nno<|im_end|>\n{chatml}"
    assert final_turn(earlier) == GOLD
    assert final_turn(f"{GOLD}<|im_end|><|endoftext|>") == final_turn(f"{GOLD}<|eot_id|>") == GOLD


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{bad", "not JSON"),
        ("", "not JSON"),
        ("[" * 20_000, "not JSON"),
        ("7", "names no tool"),
        ('{"parameters": {}}', "names no tool"),
        ('{"name": "A", "parameters": [1]}', "no parameters object"),
    ],
)
def test_a_gold_that_cannot_be_read_is_a_data_error(block: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        compute_score(GOLD, f"<think> t </think>\n<tool_call>\n{block}\n</tool_call>", 0, DEFAULT)


def test_data_error_names_the_task() -> None:
    task = Task("train.parquet#7", (Message("user", "hi"),), "<tool_call>x</tool_call>", "rlla")
    with pytest.raises(DataError, match=r"train\.parquet#7: line 1 of the gold calls is not JSON"):
        build_reward("rlla").score(as_trajectory(task, GOLD), task, 0)


def test_published_scores() -> None:
    """800 responses scored by ToolRL's published code, all variants and both chat templates."""
    with gzip.open(real_data("parity", "reward_cases.json.gz"), "rt") as file:
        cases = json.load(file)
    assert len(cases) == 800
    for case in cases:
        got = compute_score(case["solution"], case["truth"], case["step"], RllaOptions.from_env(case["env"]))
        assert got == pytest.approx(case["want"], abs=1e-9), case


names = st.sampled_from("ab")
values = st.sampled_from([1, 1.0, True, "1", None, [1], {"k": 1}, float("nan"), "x"])
calls = st.fixed_dictionaries({"name": names, "parameters": st.dictionaries(st.sampled_from("pqr"), values)})
oddities = st.sampled_from(
    [1, "s", None, [1], {}, {"name": "a"}, {"parameters": {}}, {"name": ["a"], "parameters": {}}]
    + [{"name": "a", "parameters": bad} for bad in (None, [1], "p")]
    + [{"name": None, "parameters": {}}, {"name": "a", "parameters": {}, "more": 1}]
)
pieces = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<response>", "</response>", "\n", " ", "\r", "\u2028", "w"]
)


@st.composite
def answers(draw: st.DrawFn) -> str:
    made = draw(st.lists(calls, min_size=1, max_size=4))
    kind = draw(st.integers(0, 5))
    return render_response("t", made if kind < 4 else None, "r" if kind >= 3 else None)


@st.composite
def responses(draw: st.DrawFn, answer: str) -> str:
    """Near misses of the answer's calls in a response whose pieces were dropped, doubled or put in the wrong place."""
    made = draw(st.lists(calls | oddities, max_size=5))
    if "<tool_call>\n" in answer:
        gold = [json.loads(line) for line in answer.split("<tool_call>\n")[1].split("\n</tool_call>")[0].split("\n")]
        made = draw(st.permutations(draw(st.lists(st.sampled_from(gold), max_size=4)) + made[:2]))
    body = "\n".join(map(json.dumps, made))
    parts = ["<think>", "w", "</think>", "\n", "<tool_call>", "\n", body, "\n", "</tool_call>"]
    parts += ["\n", "<response>", "r", "</response>"] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(parts) - 1))
        parts[place : place + draw(st.integers(0, 1))] = draw(st.lists(pieces, max_size=1))
        parts = parts or [""]
    return "".join(parts)


@pytest.mark.long
@settings(max_examples=500)
@given(answers().flatmap(lambda answer: st.tuples(st.just(answer), responses(answer))), st.integers(0, 2**8 - 1))
def test_equals_the_plain_implementation(pair: tuple[str, str], bits: int) -> None:
    """At every step another set of toggles; drawing a response costs more than scoring it."""
    answer, response = pair
    for number, step in enumerate(STEPS):
        on = {name for place, name in enumerate(TOGGLES[:-1]) if (bits + 37 * number) >> place & 1}
        got = compute_score(response, answer, step, RllaOptions.from_env(dict.fromkeys(on, "1")))
        assert got == pytest.approx(oracle_score(response.strip(), answer, step, on), abs=1e-9)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
anything = st.text(st.characters()) | json_values.map(json.dumps) | st.lists(pieces).map("".join)


@pytest.mark.long
@settings(max_examples=500, deadline=None)
@given(anything, anything, st.booleans(), st.sampled_from([*VARIANTS.values(), RllaOptions(matching="optimal")]))
def test_no_response_raises(head: str, body: str, wrapped: bool, options: RllaOptions) -> None:
    response = f"<think>{head}</think>\n<tool_call>\n{body}\n</tool_call>" if wrapped else head + body
    total, *parts = compute_score(response, GOLD, 0, options)
    assert -3.0 <= total <= 4.0 and total == pytest.approx(sum(parts))


MEGABYTE = 1_000_000
SAME_NAME = "\n".join(json.dumps({"name": "A", "parameters": {"p": index, "q": 2}}) for index in range(5))
ANSWERS = {
    "call": f"<think> t </think>\n<tool_call>\n{SAME_NAME}\n</tool_call>",
    "both": f"<think> t </think>\n<tool_call>\n{SAME_NAME}\n</tool_call>\n<response> r </response>",
    "response": "<think> t </think>\n<response> r </response>",
    "thought": "<think> t </think>",
}


def filled(text: str) -> str:
    return text * (MEGABYTE // len(text))


def in_block(body: str) -> str:
    return f"<think></think>\n<tool_call>\n{body}\n</tool_call>"


HOSTILE = {
    "opened thoughts": filled("<think>"),
    "opened calls": filled("<tool_call>"),
    "near heads": "<think>" + filled("</think>\n<tool_call>\n"),
    "near responses": "<think>" + filled("</think>\n<response>"),
    "chat markers": filled("<|im_start|>assistant"),
    "nested 20,000 deep": in_block("[" * 20_000 + "]" * 20_000),
    "nested 500,000 deep": in_block("[" * 500_000 + "]" * 500_000),
    "a million digits": in_block("1" * MEGABYTE),
    "newlines": in_block("\n" * MEGABYTE),
    "many calls of the gold's name": in_block(filled('{"name":"A","parameters":{"p":9}}\n')[:-1]),
    "many keys": in_block('{"name":"A","parameters":{' + ",".join(f'"{key}":1' for key in range(90_000)) + "}}"),
    "NaN": in_block('{"name":"A","parameters":{"p":NaN}}'),
    "lone surrogate": in_block('{"name":"A","parameters":{"p":"\\ud800"}}') + "\ud800",
}


@pytest.mark.long
@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_is_never_quadratic(hostile: str) -> None:
    for answer in ANSWERS.values():
        for options in (RllaOptions(with_length=True), RllaOptions(refined=True), RllaOptions(intermediate=True)):
            started = time.process_time()
            compute_score(HOSTILE[hostile], answer, 0, options)
            assert time.process_time() - started < 10.0  # a quadratic scan takes minutes; figures: bench/reward.py


@pytest.mark.parametrize("answer", ANSWERS.values())
def test_shape_of_the_gold_is_matched_by_itself(answer: str) -> None:
    assert matches_shape(answer, gold_shape(answer))


def test_environment_chooses_the_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORRECTMAX1", "1")
    monkeypatch.setenv("COARSEREWARD", "true")  # only "1" counts
    assert compute_score(GOLD, GOLD)[0] == 2.0
    assert RllaOptions.from_env() == RllaOptions(correct_max_1=True)


def test_strictmatch_warns_once() -> None:
    _warn_of_strictmatch.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            RllaOptions.from_env({"STRICTMATCH": "0"})
    assert [str(warning.message) for warning in caught] == [
        "STRICTMATCH has no effect: ToolRL's scripts export it, its reward never reads it"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coars": True}, "did you mean 'coarse'"),
        ({"matching": "best"}, "greedy or optimal"),
        ({"coarse": "yes"}, "'coarse' must be of type bool, not 'yes'"),
        ({"schedule_steps": True}, "must be of type int or None"),
        ({"unwanted_call_penalty": True}, "must be of type float"),
        ({"unwanted_call_penalty": -1}, ">= 0"),
        ({"schedule_steps": 0}, ">= 1"),
        ({"schedule_steps": 10}, "no effect without"),
        ({"refined_ignores_order": True}, "no effect without refined"),
    ],
)
def test_bad_options_are_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward("rlla", options)


@pytest.mark.parametrize("module", ["verl", "verl.utils.reward_score.rlla"])
def test_import_needs_the_standard_library_alone(module: str) -> None:
    """-S leaves site-packages out, so anything beyond the standard library fails to import."""
    code = f"import sys; sys.path.insert(0, '.'); import {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, cwd=ROOT)


def test_copies_of_the_gold_call_cost_what_they_cost_in_toolrl() -> None:
    call = '{"name": "a", "parameters": {"x": 1}}'
    gold, many = (
        f"<think>t</think>\n<tool_call>\n{calls}\n</tool_call>" for calls in (call, "\n".join([call] * 10000))
    )
    assert compute_score(many, gold, 0, RllaOptions())[0] == pytest.approx(2.0002)
    assert compute_score(many, gold, 0, RllaOptions()) == pytest.approx(oracle_score(many, gold, 0, set()))
    assert compute_score(many, gold, 0, RllaOptions(coarse=True))[0] == -2.0
