"""BFCL's multi-turn simulators: the gold wins, and nothing can be reached but documented functions."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest

from tests.support.episodes import Played, call, calls, play, respond, run
from toolrl.benchmarks.bfcl.env import _MODULES, MAX_STEPS, Api, BfclFactory, _documented
from toolrl.benchmarks.bfcl.tasks import CATEGORIES, FAULTY, Category, bfcl_tasks
from verl.envs.registry import build_env_factory
from verl.errors import ConfigError
from verl.types import Message, Score, Task, ToolCall, ToolStatus

pytest.importorskip("bfcl_eval", reason="needs the optional package bfcl-eval (pip install --no-deps bfcl-eval)")


def gold_turns(task: Task) -> list[list[ToolCall]]:
    env = BfclFactory()(task)
    return env._gold_turns


def gold_messages(task: Task) -> list[Message]:
    """Every turn's calls, two by two because a turn has few messages, and a word to the user at its end."""
    turns = [[turn[at : at + 2] for at in range(0, len(turn), 2)] for turn in gold_turns(task)]
    return [message for turn in turns for message in (*(calls(*made) for made in turn), respond())]


def final_score(results: Played) -> Score:
    assert results[-1].done and not any(result.done for result in results[:-1])
    assert results.score is not None
    return results.score


def task_of(id: str) -> Task:
    category = id.removeprefix("multi_turn_").rpartition("_")[0]
    return next(task for task in bfcl_tasks(category, "all", keep_faulty=True) if task.id == id)  # type: ignore[arg-type]


@pytest.mark.parametrize("category", CATEGORIES)
async def test_the_gold_wins_and_doing_nothing_loses(category: Category) -> None:
    factory, tasks = BfclFactory(), bfcl_tasks(category, "all")
    assert len(tasks) == 200 - sum(category in id for id in FAULTY)
    for task in tasks:
        won = final_score(await play(factory(task), gold_messages(task)))
        assert won.total == 1.0 and set(won.parts.values()) == {1.0}, task.id
        lost = final_score(await play(factory(task), [respond()] * len(gold_turns(task))))
        assert lost.total == 0.0 and lost.parts["functions"] == 0.0, task.id


@pytest.mark.parametrize("times", [0, 2])
def test_a_call_left_out_or_made_twice_is_judged_as_by_bfcls_own_checker(times: int) -> None:
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    verdicts = []
    for task in bfcl_tasks("base", limit=15):
        turns = gold_turns(task)
        gold = [[_python(made) for made in turn] for turn in turns]
        row = {"id": task.id, "initial_config": task.extra["initial_config"], "involved_classes": task.extra["classes"]}
        for number, place in [(number, place) for number, turn in enumerate(turns) for place in range(len(turn))]:
            played = [list(turn) for turn in turns]
            played[number][place : place + 1] = [turns[number][place]] * times
            texts = [[[_python(made) for made in turn]] for turn in played]
            name = f"variant_{times}_{number}_{place}"
            theirs = multi_turn_checker(texts, gold, row, "multi_turn_base", name)["valid"]
            messages = [message for turn in played for message in (*([calls(*turn)] if turn else []), respond())]
            verdicts.append((final_score(run(BfclFactory(), task, *messages)).total == 1.0, theirs))
    assert len(verdicts) > 50 and all(ours == theirs for ours, theirs in verdicts)
    assert False in {theirs for _, theirs in verdicts} and (times == 0 or True in {theirs for _, theirs in verdicts})


def _python(made: ToolCall) -> str:
    return f"{made.name}({', '.join(f'{key}={value!r}' for key, value in made.arguments.items())})"


def test_rows_that_are_left_out_cannot_be_won_by_their_gold() -> None:
    for id in FAULTY:
        score = final_score(run(BfclFactory(), task_of(id), *gold_messages(task_of(id))))
        assert score.total == 0.0, id


def test_a_spoiled_gold_loses_by_parts() -> None:
    task = bfcl_tasks("base", limit=1)[0]  # move a file, grep, sort, move and diff: 3 + 2 + 1 + 4 calls
    turns = gold_turns(task)
    assert [len(turn) for turn in turns] == [3, 2, 1, 4]
    without_sort = [*(calls(*turn) for turn in turns[:2]), *(calls(*turn) for turn in turns[3:])]
    messages = [without_sort[0], respond(), without_sort[1], respond(), respond(), without_sort[2], respond()]
    parts = final_score(run(BfclFactory(), task, *messages)).parts
    assert parts["success"] == 0.0 and parts["turns"] == 0.75  # `sort` changes nothing: later turns are right again
    assert parts["functions"] == 0.9
    artist = final_score(run(BfclFactory("artist"), task, *messages))
    assert artist.total == artist.parts["artist"] == 0.5 * parts["state"] + 0.45


def test_the_users_turns_come_one_by_one() -> None:
    task = bfcl_tasks("base", limit=1)[0]
    results = run(BfclFactory(), task, call("pwd"), respond(), respond())
    assert [message.role for message in results[0].messages] == ["tool"]
    assert [result.messages[0].content for result in results[1:]] == [
        turn[0]["content"] for turn in task.extra["turns"][:2]
    ]


def test_a_scenario_is_lost_by_calling_for_ever() -> None:
    task = bfcl_tasks("base", limit=1)[0]
    results = run(BfclFactory(), task, *[call("pwd")] * MAX_STEPS, respond(), *[call("pwd")] * (MAX_STEPS + 1))
    assert [result.done for result in results] == [False] * (2 * MAX_STEPS + 1) + [True]
    assert final_score(results).parts["success"] == 0.0 and results[-1].tool_uses == ()


def test_a_scenario_that_is_cut_off_is_judged_as_it_stands() -> None:
    """Its turn in progress counts as ended, and no scenario is won that did not come to its last turn."""
    task = bfcl_tasks("base", limit=1)[0]  # 3 + 2 + 1 + 4 calls; the last are to move a file and compare it
    won = gold_messages(task)
    assert run(BfclFactory(), task, *won[:-1]).score == run(BfclFactory(), task, *won).score  # without the last word
    parts = run(BfclFactory(), task, *won[: len(won) - 3]).score
    assert parts is not None and parts.parts["success"] == 0.0 and parts.parts["turns"] == 0.75
    assert parts.parts["functions"] == 0.6
    nothing = run(BfclFactory("artist"), task).score
    assert nothing is not None and nothing.parts["turns"] == nothing.parts["functions"] == 0.0
    assert nothing.total == 0.5 * nothing.parts["state"] < 0.5


def test_withheld_functions_appear_at_their_turn_and_excluded_ones_never() -> None:
    task = task_of("multi_turn_miss_func_0")
    assert (task.extra["withheld"], task.extra["excluded"]) == ({"3": ["sort"]}, ["cp"])
    sort = call("sort", file_name="final_report.pdf")
    opening = asyncio.run(BfclFactory()(task).reset())
    assert not {"sort", "cp"} & {spec.name for spec in opening.tools}
    results = run(
        BfclFactory(), task, sort, respond(), respond(), respond(), sort, call("cp", source="a", destination="b")
    )
    assert "there is no function 'sort'" in results[0].messages[0].content
    assert [[spec.name for spec in result.tools] for result in results[1:4]] == [[], [], ["sort"]]
    assert results[3].messages[0].role == "user" and "functions" in results[3].messages[0].content
    assert results[4].tool_uses[0].status is ToolStatus.SUCCESS
    assert results[5].tool_uses[0].status is ToolStatus.USER_ERROR


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__init__", {}),
        ("_load_scenario", {"scenario": {}}),
        ("__class__", {}),
        ("__eq__", {"value": 1}),
        ("root", {}),
        ("authenticate_travel", {}),  # of an API that is not part of this scenario
        ("cd", {"folder": 3}),
        ("cd", {}),
        ("cd", {"folder": "x", "extra": 1}),
        ("pwd", {"self": None}),
    ],
)
def test_nothing_else_can_be_called(name: str, arguments: dict[str, Any]) -> None:
    task = bfcl_tasks("base", limit=1)[0]
    (result, _) = run(BfclFactory(), task, call(name, **arguments), respond())
    assert result.tool_uses[0].status is ToolStatus.USER_ERROR
    assert result.messages[0].content.startswith("Error: ")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("power", {"base": 10, "exponent": 10**9}),
        ("square_root", {"number": 2, "precision": 10**9}),
        ("logarithm", {"value": 2, "base": 3, "precision": 10**9}),
        ("round_number", {"number": 2, "decimal_places": -(10**9)}),
    ],
)
def test_arithmetic_cannot_go_on_for_ever(name: str, arguments: dict[str, Any]) -> None:
    task = next(task for task in bfcl_tasks("base") if "MathAPI" in task.extra["classes"])
    (result,) = run(BfclFactory(), task, call(name, **arguments))
    assert result.tool_uses[0].status is ToolStatus.USER_ERROR


def test_an_exception_of_a_simulator_is_its_answer() -> None:
    task = next(task for task in bfcl_tasks("base") if "MathAPI" in task.extra["classes"])
    odd = call("mean", numbers=[10**400, 0.5]), call("multiply", a=10**4000, b=10**4000)  # too many digits to be shown
    results = run(BfclFactory(), task, *odd, *[respond()] * len(gold_turns(task)))
    assert all("rror" in result.messages[0].content for result in results[:2])
    assert final_score(results).total == 0.0


async def test_two_episodes_do_not_see_each_other() -> None:
    task = bfcl_tasks("base", limit=1)[0]
    before = json.dumps(task.extra)
    first, second = BfclFactory()(task), BfclFactory()(task)
    await first.step(call("mkdir", dir_name="new"))
    assert "new" not in (await second.step(call("ls"))).messages[0].content
    assert json.dumps(task.extra) == before


def test_every_documented_function_takes_what_its_schema_asks_for() -> None:
    for name in _MODULES:
        api = Api({"classes": [name], "initial_config": {}, "long_context": False})
        for spec in _documented(name).values():
            parameters = inspect.signature(getattr(api.objects[name], spec.name)).parameters
            needed = {key for key, value in parameters.items() if value.default is value.empty}
            assert needed <= set(spec.parameters["required"]) and set(spec.parameters["properties"]) == set(parameters)


def test_variants_of_a_scenario_are_on_the_same_side() -> None:
    def numbers(split: Any) -> list[set[int]]:
        return [{int(task.id.rpartition("_")[2]) for task in bfcl_tasks(category, split)} for category in CATEGORIES]

    assert max(set().union(*numbers("train"))) == 149 and min(set().union(*numbers("test"))) == 150
    assert [len(found) for found in numbers("train")] == [150, 149, 150, 150]
    assert [len(found) for found in numbers("test")] == [49] * 4


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="no BFCL category 'bas'"):
        bfcl_tasks("bas")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="score must be success or artist"):
        build_env_factory("bfcl", {"score": "half"})
