"""BFCL as a benchmark: every category can be won by its gold through every handler, and not by doing nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.episodes import play, respond
from tests.support.every import every
from tests.toolrl.benchmarks.bfcl.bfcl_oracle import gold_calls, with_calls
from tests.toolrl.benchmarks.runner.eval_play import chat, foretold, roomy
from toolrl.benchmarks.bfcl import tasks as bfcl_tasks
from toolrl.benchmarks.bfcl.benchmark import AGGREGATES, ANY, FAULTY, LIVE_AST, NO_CALL, NON_LIVE_AST, SINGLE_TURN, bfcl
from toolrl.benchmarks.bfcl.env import MAX_STEPS, Api
from toolrl.benchmarks.runner.benchmark import Benchmark, BenchmarkContext, Category
from toolrl.benchmarks.runner.handlers import env_of
from toolrl.benchmarks.runner.registry import build_benchmarks
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.build.env import build_episode_runner
from verl.envs.registry import build_env_factory
from verl.envs.tools.arguments import ArgumentChecker
from verl.errors import ConfigError, DataError
from verl.formats.base import Calls, ParseError, build_tool_call_format
from verl.rollout.engine import Sampling
from verl.types import StopReason, Task, ToolCall, ToolSpec, Trajectory
from verl.utils.reward_score import build_reward

pytest.importorskip("bfcl_eval", reason="needs the optional package bfcl-eval (pip install --no-deps bfcl-eval)")
SETTING = BenchmarkContext(Path("unused"))
HANDLERS = ("toolrl", "tool_n1", "hermes")
ROWS = {"simple_python": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "irrelevance": 240}
ROWS |= {"live_simple": 256, "live_multiple": 1050, "live_parallel": 16, "live_parallel_multiple": 24}
ROWS |= {"live_irrelevance": 884, "live_relevance": 16}
ROWS |= {f"multi_turn_{name}": 199 for name in bfcl_tasks.CATEGORIES} | {"multi_turn_miss_func": 198}


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    return bfcl(SETTING)


@pytest.fixture(scope="module")
def tasks(benchmark: Benchmark) -> dict[str, Sequence[Task]]:
    return {each.name.removeprefix("bfcl/"): each.tasks() for each in benchmark.categories}


def category(benchmark: Benchmark, name: str) -> Category:
    return next(each for each in benchmark.categories if each.name == f"bfcl/{name}")


def score_of(played: Category, trajectory: Trajectory, task: Task) -> float:
    return build_reward(played.episode.reward, played.episode.reward_options).score(trajectory, task, 0).total


def episode(played: Category, handler: str, task: Task, responses: Sequence[str]) -> Trajectory:
    """A policy that writes these texts, one after the other, in the driver of training."""
    tokenizer = chat().tokenizer
    written = iter(
        [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in responses
    )
    env, limit = env_of(played.episode, handler), 100_000
    episode_runner = build_episode_runner(roomy(env, limit), chat())
    assert episode_runner is not None
    engine = ScriptedEngine(lambda prompt, number: next(written))
    found = asyncio.run(episode_runner.run(engine, Sampling(max_tokens=limit), task, index=0, seed=None))
    assert isinstance(found, Trajectory)
    return found


def test_categories_and_their_rows(benchmark: Benchmark, tasks: dict[str, Sequence[Task]]) -> None:
    assert {name: len(found) for name, found in tasks.items()} == ROWS
    ids = [task.id for found in tasks.values() for task in found]
    assert len(set(ids)) == len(ids) and not {*FAULTY, *bfcl_tasks.FAULTY} & set(ids)
    notes = " ".join(benchmark.notes)
    assert every(id in notes for id in (*FAULTY, *bfcl_tasks.FAULTY))
    (only,) = build_benchmarks(["bfcl/parallel"], SETTING)
    assert [each.name for each in only.categories] == ["bfcl/parallel"]


def test_aggregates_are_made_of_categories_and_of_those_before_them(benchmark: Benchmark) -> None:
    known = {each.name for each in benchmark.categories}
    for aggregate in AGGREGATES:
        assert set(aggregate.members) <= known and aggregate.name not in known
        known.add(aggregate.name)
    formulas = {aggregate.name: aggregate for aggregate in AGGREGATES}
    assert {name for name, each in formulas.items() if each.over == "rows"} == {"bfcl/live_ast", "bfcl/live"}
    assert formulas["bfcl/overall"].members == ("bfcl/non_live", "bfcl/live", "bfcl/multi_turn")


@pytest.mark.long
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("name", SINGLE_TURN)
def test_gold_as_each_handler_writes_it_is_right_on_every_row(
    benchmark: Benchmark, tasks: dict[str, Sequence[Task]], name: str, handler: str
) -> None:
    tool_call_format, played = build_tool_call_format(handler), category(benchmark, name)
    for task in tasks[name]:
        nothing = score_of(played, with_calls(task, ()), task)
        assert nothing == float(name in NO_CALL), task.id
        if name in NO_CALL:
            continue
        gold = [ToolCall(task.extra["tools"][0]["name"], {})] if name in ANY else gold_calls(task)
        parsed = tool_call_format.parse(tool_call_format.render(gold))
        assert isinstance(parsed, Calls) and score_of(played, with_calls(task, parsed.calls), task) == 1.0, task.id


def test_untyped_texts_are_read_as_the_gold_by_the_published_schemas(tasks: dict[str, Sequence[Task]]) -> None:
    """Golds that fit the schemas of their own rows; some hold null or true where the schema has string."""
    tool_call_format, checker, found = build_tool_call_format("xml"), ArgumentChecker(), []
    for task in (task for name in (*NON_LIVE_AST, *LIVE_AST) for task in tasks[name][:30]):
        tools = {tool["name"]: ToolSpec(**tool) for tool in task.extra["tools"]}
        calls = tuple(gold_calls(task))
        if not any(checker.problem(tools[call.name], call.arguments) for call in calls):
            found.append(tool_call_format.parse(tool_call_format.render(calls), list(tools.values())) == Calls(calls))
    assert len(found) > 200 and all(found)


def test_no_message_is_lost_and_every_handler_shows_them(tasks: dict[str, Sequence[Task]]) -> None:
    found = [task for name in SINGLE_TURN for task in tasks[name]]
    roles = {tuple(message.role for message in task.prompt) for task in found}
    assert {("system", "user"), ("user", "assistant", "user"), ("user", "user")} <= roles
    for task in (task for task in found if len(task.prompt) > 1):
        tools = (ToolSpec("f", "", {"type": "object", "properties": {}}),)
        for handler in HANDLERS:
            opening = build_tool_call_format(handler).render_prompt(task.prompt, tools)
            shown = opening if isinstance(opening, str) else "\n".join(message.content for message in opening)
            assert all(message.content in shown for message in task.prompt), (handler, task.id)


def test_functions_are_described_as_json_schema(tasks: dict[str, Sequence[Task]]) -> None:
    types = {"string", "integer", "number", "boolean", "array", "object", None}

    def kinds(schema: dict[str, Any]) -> set[Any]:
        inside = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
        return {schema.get("type")}.union(*map(kinds, inside))

    seen = set()
    for number, tool in enumerate(tool for name in SINGLE_TURN for task in tasks[name] for tool in task.extra["tools"]):
        if number % 50 == 0:  # all are valid, in a minute
            Draft202012Validator.check_schema(tool["parameters"])
        seen |= kinds(tool["parameters"])
        assert tool["description"].endswith(" Note that the provided function is in Python 3 syntax.")
    assert seen == types


@pytest.mark.parametrize("name", bfcl_tasks.CATEGORIES)
def test_scenarios_are_lost_by_doing_nothing(benchmark: Benchmark, tasks: dict[str, Sequence[Task]], name: str) -> None:
    played, found = category(benchmark, f"multi_turn_{name}").episode, tasks[f"multi_turn_{name}"]
    factory = build_env_factory(played.env, dict(played.options))
    assert max(len(json.loads(task.answer)) for task in found) * (MAX_STEPS + 1) <= played.max_turns

    async def totals() -> list[float]:
        results = [await play(factory(task), [respond()] * len(json.loads(task.answer))) for task in found]
        return [each.score.total for each in results if each.score]

    assert asyncio.run(totals()) == [0.0] * len(found)


@pytest.mark.parametrize(
    ("response", "end"),
    [
        ("{gold}", (1.0, StopReason.STOP)),
        ("I would rather not.", (0.0, StopReason.STOP)),
        ("{unclosed}", (0.0, StopReason.MALFORMED)),
    ],
)
@pytest.mark.parametrize("handler", ["toolrl", "tool_n1"])
def test_an_episode_is_one_response_whose_calls_are_judged(
    benchmark: Benchmark, tasks: dict[str, Sequence[Task]], handler: str, response: str, end: tuple[float, StopReason]
) -> None:
    played, task, tool_call_format = (
        category(benchmark, "simple_python"),
        tasks["simple_python"][0],
        build_tool_call_format(handler),
    )
    gold = tool_call_format.render(gold_calls(task))
    text = response.format(gold=gold, unclosed=gold.partition("</tool_call>")[0])
    assert isinstance(tool_call_format.parse(text), ParseError) == (end[1] is StopReason.MALFORMED)
    trajectory = episode(played, handler, task, [text])
    assert len(trajectory.turns) == 1
    assert (score_of(played, trajectory, task), trajectory.stop_reason) == end


@pytest.mark.parametrize("name", ["multi_turn_base", "multi_turn_long_context"])
def test_a_scenario_is_won_in_an_episode_by_its_gold(
    benchmark: Benchmark, tasks: dict[str, Sequence[Task]], name: str
) -> None:
    played, task, tool_call_format = category(benchmark, name), tasks[name][0], build_tool_call_format("toolrl")
    api = Api(task.extra)
    turns = [[api.gold_call(made) for made in turn] for turn in json.loads(task.answer)]
    won = [text for turn in turns for text in (tool_call_format.render(turn), "Done.")]
    trajectory = episode(played, "toolrl", task, won)
    assert (score_of(played, trajectory, task), trajectory.stop_reason) == (1.0, StopReason.STOP)
    assert [len(trajectory.turns), trajectory.num_tool_calls] == [len(won), sum(map(len, turns))]
    lost = episode(played, "toolrl", task, [*won[:-2], "Done.", "Done."])
    assert (score_of(played, lost, task), lost.stop_reason) == (0.0, StopReason.STOP)


def test_a_missing_package_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfcl_tasks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps bfcl-eval==2026\.3\.23 mpmath"):
        bfcl(SETTING)


@pytest.mark.parametrize(
    ("file", "text", "place"),
    [
        ("BFCL_v4_parallel.json", '{"id": "a", "question": [[]], "function": []}\n{"id": ', "parallel.json, row 1"),
        ("BFCL_v4_parallel.json", '{"id": "a", "question": [[]]}', "parallel.json, row 0"),
        ("BFCL_v4_parallel.json", None, "BFCL_v4_parallel.json: cannot be read"),
        ("possible_answer/BFCL_v4_parallel.json", "[]", "possible_answer/BFCL_v4_parallel.json, row 0"),
        ("possible_answer/BFCL_v4_parallel.json", '{"id": "b", "ground_truth": []}', "has different ids"),
    ],
)
def test_a_file_of_the_package_that_is_not_as_expected_is_named(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, text: str | None, place: str
) -> None:
    (tmp_path / "possible_answer").mkdir()
    good = {
        "BFCL_v4_parallel.json": '{"id": "a", "question": [[]], "function": []}',
        "possible_answer/BFCL_v4_parallel.json": '{"id": "a", "ground_truth": []}',
    }
    monkeypatch.setattr(bfcl_tasks, "data_folder", lambda: tmp_path)
    for name, content in (good | {file: text}).items():
        if content is not None:
            (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=place):
        category(benchmark, "parallel").tasks()
    for name, content in good.items():
        (tmp_path / name).write_text(content)
    assert len(category(benchmark, "parallel").tasks()) == 1


@pytest.mark.parametrize("name", ["simple_python", "multi_turn_base", "multi_turn_miss_func"])
def test_the_length_of_a_prompt_is_known_before_it_is_put(
    name: str, benchmark: Benchmark, tasks: Mapping[str, Sequence[Task]]
) -> None:
    """With the functions, which are most of it: a prompt that is too long is a wrong answer and not a missing one."""
    assert all(foretold(category(benchmark, name), tool_call_format, tasks[name][-2:]) for tool_call_format in HANDLERS)
