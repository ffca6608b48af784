"""reward.name=auto: the reward follows from `data_source`, as in the trainers that the rows were published for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolrl.papers.rows import with_box
from verl.data.tasks import to_task, to_tasks
from verl.episodes.written import as_trajectory
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.scoring.gold_check import BARE_THOUGHT, GoldScores, check_gold_wins, gold_scores, sample_rows
from verl.scoring.rewards import Rewards, build_rewards
from verl.types import Message, Task
from verl.utils.reward_score.base import REWARDS, build_reward
from verl.verl_compat.published import SOURCES, overlong_of, source_of

AUTO = build_rewards("auto")
SCORES = [json.loads(line) for line in Path(__file__).with_name("verl_scores.jsonl").read_text().splitlines()]
# Equal by math-verify, unequal as veRL's normalized texts.
BY_VALUE = {"Answer: 34.", "Answer: 034"}
CALLS = json.dumps([{"name": "get_time", "arguments": {"city": "Fes"}}])
OTHER_CALLS = CALLS.replace("Fes", "Rome")
TOOLRL = "<think> t </think>\n<tool_call>\n{}\n</tool_call>".format(json.dumps({"name": "get", "parameters": {"a": 1}}))


def row(data_source: str, ground_truth: Any, **extra: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "q"}]
    truth = {"style": "rule", "ground_truth": ground_truth}
    return {"data_source": data_source, "prompt": prompt, "reward_model": truth, "extra_info": {"index": 0, **extra}}


def task(data_source: str, ground_truth: Any, **extra: Any) -> Task:
    return to_task(row(data_source, ground_truth, **extra), "rows.jsonl#0")


def total(each: Task, response: str, rewards: Rewards = AUTO) -> float:
    return rewards.score(as_trajectory(each, response), each, 1).total


@pytest.mark.parametrize("source", sorted({each["data_source"] for each in SCORES}))
def test_responses_score_what_the_published_functions_give(source: str) -> None:
    """verl_scores.jsonl: figures of veRL 0.9.1's and Tool-N1's functions."""
    cases = [each for each in SCORES if each["data_source"] == source and each["solution"] not in BY_VALUE]
    assert len(cases) > 1
    for case in cases:
        each = task(source, case["ground_truth"], **case.get("extra_info", {}))
        assert total(each, case["solution"]) == pytest.approx(case["score"]), case


def test_equality_by_value_is_a_known_difference() -> None:
    each = task("math_dapo", "34")
    assert [total(each, text) for text in sorted(BY_VALUE)] == [1.0, 1.0]


BOX = "\\boxed{{{}}}".format


@pytest.mark.parametrize(
    ("rewards", "each", "right", "wrong", "scores"),
    [
        ("auto", row("rlla", TOOLRL), TOOLRL, TOOLRL.replace("1", "2"), (4.0, 2.0, -3.0)),
        ("auto", row("openai/gsm8k", "72"), "#### 72", "#### 71", (1.0, 0.0, 0.0)),
        (
            "auto",
            row("openai/gsm8k", "48+24=<<48+24=72>>72\n#### 72"),
            "#### 72",
            "#### 71",
            (1.0, 0.0, 0.0),
        ),  # as published
        ("auto", row("math_dapo", "34"), "Answer: 34", "Answer: 35", (1.0, -1.0, -1.0)),
        ("auto", row("aime2024", "34"), BOX(34), BOX(35), (1.0, -1.0, -1.0)),
        ("auto", row("DigitalLearningGmbH/MATH-lighteval", "x^2"), BOX("x^2"), BOX("x^3"), (1.0, 0.0, 0.0)),
        ("auto", row("numina_olympiads", "7"), BOX(7), BOX(8), (1.0, 0.0, 0.0)),
        ("auto", row("nq", {"target": ["Paris"]}), "<answer>Paris</answer>", "<answer>Rome</answer>", (1.0, 0.0, 0.0)),
        ("auto", row("searchR1_musique", {"target": ["a1"]}), "<answer>A1</answer>", "<answer>b</answer>", (1.0, 0, 0)),
        ("torl", row("math500", "7"), BOX(7), BOX(8), (1.0, -1.0, -1.0)),
        ("retool", row("math_dapo", "7"), BOX(7), BOX(8), (1.0, -1.0, -1.0)),
    ],
)
def test_a_right_answer_earns_more_than_a_wrong_one_and_a_bare_thought(
    rewards: str, each: dict[str, Any], right: str, wrong: str, scores: tuple[float, ...]
) -> None:
    made, found = to_task(each, "rows.jsonl#0"), build_rewards(rewards)
    assert [total(made, text, found) for text in (right, wrong, BARE_THOUGHT)] == list(scores)
    assert scores[0] > scores[1] >= scores[2]


@pytest.mark.parametrize(
    ("prompt_type", "scores"),
    [
        (None, (1.0, 0.0, 0.0)),
        ("qwen", (1.0, 0.0, 0.0)),
        ("qwen_lexico", (1.2, -0.2, 0.0)),  # published: a wrong call loses to none
        ("qwen_wo_reason", (1.0, 0.0, 0.0)),
        ("qwen_partial_reason", (1.0, 0.2, 0.2)),
        ("qwen_partial_reason_funcname", (1.0, 0.4, 0.2)),
        ("llama", (1.0, 0.0, 0.0)),
    ],
)
def test_the_rows_of_tool_n1_name_their_version(prompt_type: str | None, scores: tuple[float, ...]) -> None:
    each = task("toolcall", CALLS, **({} if prompt_type is None else {"prompt_type": prompt_type}))
    texts = [f"<think>a</think><tool_call>{calls}</tool_call>" for calls in (CALLS, OTHER_CALLS)]
    assert [total(each, text) for text in (*texts, BARE_THOUGHT)] == pytest.approx(list(scores))


def test_an_unknown_version_of_tool_n1_is_a_data_error() -> None:
    with pytest.raises(DataError, match=r"extra_info.prompt_type.* is 'qwen_new'.*one of qwen, qwen_lexico"):
        AUTO.of(task("toolcall", CALLS, prompt_type="qwen_new"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine", "data_source 'mine' names no reward, and the gold is not in ToolRL's format"),
        ("sums", "Set reward.name to one of api_bank, artist_math, .*torl, zerotir, or to path/to/file.py:function"),
        ("openai/gsm8k_", "names no reward"),
        ("codecontests", "has no reward here: veRL runs the answer's program on test cases"),
        ("hiyouga/geometry3k", "has no reward here: its prompts have images"),
        ("countdown-3", "has no reward here: TinyZero's"),
    ],
)
def test_a_source_without_a_reward_is_refused_by_name(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"rows.jsonl#0: .*{message}"):
        AUTO.of(task(source, "7"))


def test_a_gold_turn_or_tags_select_toolrls_rewards_whatever_the_source() -> None:
    assert AUTO.names(task("mine", TOOLRL)) == ("rlla",)
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (found,) = to_tasks({"messages": chat, "data_source": "mine"}, "rows.jsonl#0")
    assert AUTO.names(found) == ("calls",)


def test_a_choice_made_by_the_row_has_its_reason() -> None:
    assert (
        AUTO.choice(task("toolcall", CALLS, prompt_type="llama")) == "tool_n1 version=llama (by data_source toolcall)"
    )
    assert AUTO.choice(task("mine", TOOLRL)) == "rlla (by the tags of the gold)"
    assert build_rewards("torl").choice(task("mine", "7")) == "torl"


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("math_dapo", "math_dapo"),
        ("toolcall", "tool_n1"),
        ("nq", "search_r1"),
        ("lighteval/MATH", "math"),
        ("numina_cn_k12", "math"),
    ],
)
def test_a_gold_in_toolrls_format_under_a_source_of_another_reward_is_refused_with_both_ways_out(
    source: str, reward: str
) -> None:
    answered = "\n<think> t </think>\n<response> Done. </response>"
    for gold in (TOOLRL, answered, f"{TOOLRL}\n<response> Done. </response>"):
        for use in (AUTO.of, AUTO.names, AUTO.choice):
            with pytest.raises(ConfigError, match=rf"#0: .*'{source}' .*reward {reward}, .*=rlla .*={reward} if"):
                use(task(source, gold))
        assert build_rewards("rlla").names(task(source, gold)) == ("rlla",)
        assert build_rewards(reward).names(task(source, gold)) == (reward,)
        assert AUTO.names(to_task({**row(source, gold), "reward": "rlla"}, "rows.jsonl#0")) == ("rlla",)
    assert AUTO.names(task(source, "the <response> tag")) == (reward,)


def test_options_of_the_command_are_not_given_to_another_reward() -> None:
    rewards = build_rewards("auto", {"coarse": True})
    assert total(task("rlla", TOOLRL), TOOLRL.replace("1", "2"), rewards) == -2.0
    with pytest.raises(ConfigError, match=r"reward.options \(coarse\) are of reward.name=rlla.*set reward.name=gsm8k"):
        rewards.of(task("openai/gsm8k", "7"))


def test_every_source_has_a_reward_that_can_be_built_and_its_publishers_treatment_of_long_rows() -> None:
    for source in SOURCES:
        if source.reward is not None:
            assert source.reward in REWARDS
            for options in (source.options, *source.versions.values()):
                build_reward(source.reward, options)
        assert all(source_of(name.replace("*", "x")) is source for name in source.names)
    sources = ("rlla", "my_rlla_2", "toolcall", "openai/gsm8k", "unknown")
    assert [overlong_of(each) for each in sources] == ["left", "left", "drop", "drop", "drop"]


# --- the gold response must win


def scored(rewards: Rewards, *tasks: Task) -> list[GoldScores]:
    found = [gold_scores(rewards, each, lambda task, text: total(task, text, rewards)) for each in tasks]  # type: ignore[arg-type]
    return [each for each in found if each is not None]


def test_a_reward_of_other_rows_is_refused_with_the_three_scores() -> None:
    for each in (task("toolcall", CALLS), task("openai/gsm8k", "72"), task("mine", "34")):
        message = (
            r"rows.jsonl#0: reward 'rlla' gives the gold response 0, an empty one 0, a thought alone 1, .*reward.name"
        )
        with pytest.raises(ConfigError, match=message):
            check_gold_wins(scored(build_rewards("rlla"), each))
        if each.data_source != "mine":
            check_gold_wins(scored(AUTO, each))


def test_single_rows_may_tie_but_not_all_and_none_may_lose() -> None:
    rewards = build_rewards("tool_n1", {"version": "llama"})
    none, some = task("toolcall", "[]"), task("toolcall", CALLS)
    check_gold_wins(scored(rewards, none, some))
    with pytest.raises(ConfigError, match="gives the gold response 1, an empty one 1"):
        check_gold_wins(scored(rewards, none))
    lost = GoldScores("t", "mine", gold=0.0, empty=-1.0, thought=0.5)
    with pytest.raises(ConfigError, match="t: reward 'mine' gives"):
        check_gold_wins([lost, *(GoldScores(str(each), "mine", 1.0, 0.0, 0.0) for each in range(9))])


def test_rewards_without_a_gold_response_are_not_called(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def f(response, answer):\n    raise SystemExit('called')\n")
    assert scored(build_rewards(f"{mine}:f"), task("mine", "7")) == []
    check_gold_wins([])


def test_a_reward_that_fails_names_the_row() -> None:
    def fails(task: Task, response: str | Message) -> float:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ConfigError, match=r"the reward fails on rows.jsonl#0 \(ZeroDivisionError: by zero\)"):
        gold_scores(AUTO, task("rlla", TOOLRL), fails)


def test_some_rows_of_every_source_are_looked_at() -> None:
    tasks = [task("rlla", TOOLRL)] * 50 + [task("openai/gsm8k", "7")] * 3 + [task("toolcall", CALLS)]
    assert [each.data_source for each in sample_rows(AUTO, tasks)] == ["rlla"] * 8 + ["openai/gsm8k"] * 3 + ["toolcall"]


def test_calls_are_written_in_the_format_of_the_run() -> None:
    style, rewards = build_tool_call_format("hermes", {}), build_rewards("calls")
    call = {"type": "function", "function": {"name": "get", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    (each,) = to_tasks({"messages": turns, "data_source": "mine"}, "rows.jsonl#0")

    def score(task: Task, response: str | Message) -> float:
        return rewards.score(as_trajectory(task, response, style), task, 1).total

    found = gold_scores(rewards, each, score)
    assert found is not None and (found.gold, found.thought) == (4.0, -3.0)
    check_gold_wins([found])


# --- rows of ReTool's data set class


def test_a_prompt_that_demands_no_box_gets_the_demand_once() -> None:
    asked = with_box(row("math_dapo", "34"))
    assert asked["prompt"][-1]["content"].count("\\boxed") == 1
    assert with_box(asked) is asked and with_box(None) is None


@pytest.mark.parametrize("columns", [("Problem", "Answer"), ("problem", "answer")])
def test_rows_of_aime_become_tasks(columns: tuple[str, str]) -> None:
    made = to_task(with_box({columns[0]: "How many?", columns[1]: 34}), "rows.jsonl#0")
    assert made.answer == "34" and "\\boxed" in made.prompt[0].content and source_of(made.data_source) is not None
