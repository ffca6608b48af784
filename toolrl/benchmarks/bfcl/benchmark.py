"""BFCL (gorilla.cs.berkeley.edu): single calls judged by an answer key, multi-turn scenarios by their final state.

Rows are those of the optional package bfcl-eval 2026.3.23 (version 4's files); scores are aggregated as in version 3,
which papers on tool-calling RL report.
"""

import json
from collections.abc import Mapping
from functools import partial

from toolrl.benchmarks.bfcl.env import MAX_STEPS
from toolrl.benchmarks.bfcl.reward import ANY_CALL
from toolrl.benchmarks.bfcl.tasks import CATEGORIES as MULTI_TURN
from toolrl.benchmarks.bfcl.tasks import FAULTY as FAULTY_SCENARIOS
from toolrl.benchmarks.bfcl.tasks import bfcl_rows, bfcl_tasks, data_folder, json_schema
from toolrl.benchmarks.runner.benchmark import Aggregate, Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.handlers import check_several_tools
from verl.types import Message, Task

NON_LIVE_AST = ("simple_python", "multiple", "parallel", "parallel_multiple")
LIVE_AST = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
NO_CALL = ("irrelevance", "live_irrelevance")
ANY = ("live_relevance",)
SINGLE_TURN = (*NON_LIVE_AST, NO_CALL[0], *LIVE_AST, NO_CALL[1], *ANY)

FAULTY: Mapping[str, str] = {
    "live_simple_106-63-0": "the key accepts no value for required parameters",
    "live_simple_112-68-0": "the key accepts no value for required parameters",
    "live_multiple_507-149-4": "the key accepts only an empty string for the airport that the user names",
    "live_multiple_862-181-3": "the key requires a parameter that the function does not have",
    "live_multiple_964-207-0": "the key has another name for the function's only parameter",
}

_HINT = " Note that the provided function is in Python 3 syntax."  # BFCL appends it to every description
_MAX_USER_TURNS = 8
_SINGLE = EpisodeConfig("bfcl", max_turns=2, max_tool_calls=64, feedback_on_parse_error=False)
_SCENARIO = EpisodeConfig(
    "env",
    env="bfcl",
    max_turns=_MAX_USER_TURNS * (MAX_STEPS + 1),
    max_tool_calls=10_000,  # BFCL has no limit
    max_observation_tokens=65_536,
    feedback_on_parse_error=False,
)


def bfcl(context: BenchmarkContext) -> Benchmark:
    """All Python categories without network. Raises ConfigError without the package or for a single-tool format."""
    check_several_tools("bfcl", context.tool_call_format)
    data_folder()
    single = [Category(f"bfcl/{name}", partial(single_turn_tasks, name), _SINGLE) for name in SINGLE_TURN]
    tasks = {f"bfcl/multi_turn_{name}": partial(bfcl_tasks, name, "all") for name in MULTI_TURN}
    scenarios = [Category(name, each, _SCENARIO) for name, each in tasks.items()]
    return Benchmark("bfcl", (*single, *scenarios), AGGREGATES, NOTES)


def bfcl_multi_turn(context: BenchmarkContext) -> Benchmark:
    """The multi-turn scenarios held out from the train split (150 to 199), for models trained on it."""
    check_several_tools("bfcl_multi_turn", context.tool_call_format)
    data_folder()
    name = "bfcl_multi_turn"
    scenarios = [Category(f"{name}/{each}", partial(bfcl_tasks, each, "test"), _SCENARIO) for each in MULTI_TURN]
    mean = Aggregate(f"{name}/mean", tuple(each.name for each in scenarios))
    note = f"{name}: scenarios 150 to 199 only; papers report all 200"
    return Benchmark(name, tuple(scenarios), (mean,), (note, *_SCENARIO_NOTES))


def single_turn_tasks(category: str) -> list[Task]:
    """Rows that are not faulty. answer: BfclReward's key; extra["tools"]: JSON Schemas. Raises DataError."""
    rows = bfcl_rows(category, ("function",), with_gold=category not in (*NO_CALL, *ANY))
    tasks = []
    for row, gold in rows:
        if row["id"] in FAULTY:
            continue
        prompt = tuple(Message(message["role"], message["content"]) for message in row["question"][0])
        tools = []
        for each in row["function"]:
            described = {"name": each["name"], "description": each["description"] + _HINT}
            tools.append({**described, "parameters": json_schema(each["parameters"])})
        answer = json.dumps(ANY_CALL if category in ANY else gold)
        tasks.append(Task(row["id"], prompt, answer, data_source=f"bfcl_{category}", extra={"tools": tools}))
    return tasks


def _aggregate(name: str, *members: str, by_rows: bool = False) -> Aggregate:
    return Aggregate(f"bfcl/{name}", tuple(f"bfcl/{each}" for each in members), "rows" if by_rows else "members")


AGGREGATES = (
    _aggregate("non_live_ast", *NON_LIVE_AST),
    _aggregate("non_live", *NON_LIVE_AST, "irrelevance"),
    _aggregate("live_ast", *LIVE_AST, by_rows=True),
    _aggregate("live", *LIVE_AST, "live_irrelevance", "live_relevance", by_rows=True),
    _aggregate("multi_turn", *(f"multi_turn_{name}" for name in MULTI_TURN)),
    _aggregate("all_relevance", "live_relevance"),
    _aggregate("all_irrelevance", *NO_CALL),
    _aggregate("overall", "non_live", "live", "multi_turn"),
)

_SCENARIO_NOTES = tuple(f"bfcl: {id} is excluded: {reason}" for id, reason in FAULTY_SCENARIOS.items())
NOTES = (
    "bfcl: rows of bfcl-eval 2026.3.23 (BFCL v4), aggregated as in BFCL v3. No aggregate is directly comparable with a "
    "paper's or the leaderboard's score: v3's `simple` was the mean of Python, Java and JavaScript and is Python only "
    "here; v3's `non_live` also had four executable categories, which the package no longer has; rows have changed "
    "since.",
    "bfcl: v4 has irrelevance neither in non-live nor in live, and weights non-live (AST) 10, live (AST) 10, "
    "irrelevance 10, multi-turn 30 and agentic 40; non_live_ast, live_ast, all_irrelevance and multi_turn are its "
    "first four.",
    "bfcl: excluded are executable categories, Java, JavaScript, web search, memory and format sensitivity.",
    "bfcl: a parse error counts as no call and ends a scenario; BFCL continues with the user's next turn. Function "
    "names keep their dots. In multi-turn scenarios descriptions come without BFCL's note on Python 3, arguments must "
    "match the documented schema, and huge exponents and precisions are rejected.",
    *(f"bfcl: {id} is excluded: {reason}" for id, reason in FAULTY.items()),
    *_SCENARIO_NOTES,
)
