"""scripts/learn_calls.sh: its rows, and what it refuses before it trains."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import get_calls_data
from scripts.learn_calls import report
from scripts.learn_calls.make_data import NUM_FOLDS, Row, few_tools, fits, folds, main, masked, overlap, resolvable
from tests.conftest import ROOT, real_data
from tests.support.tiny import MINI
from toolrl.check.lab.__main__ import try_rewards
from toolrl.formats.hermes import HermesFormat
from verl.data.tasks import TaskSet
from verl.scoring.rewards import build_rewards
from verl.tracking.jsonl import read_jsonl, write_jsonl

APIS = ("weather", "stocks", "trains", "films", "books", "games")
PLACES = ("Oslo", "Rome", "Lima", "Bern", "Cairo", "Quito", "Delhi", "Paris")


def tool(name: str) -> dict[str, Any]:
    """In xLAM's form."""
    return {
        "name": name,
        "description": f"Looks up {name}",
        "parameters": {"place": {"type": "string", "description": f"Where the {name} are", "required": True}},
    }


def published(tmp_path: Path, unreadable: bool = False) -> Path:
    """A file of six APIs with eight rows each, which list two others."""
    rows = [
        {
            "query": f"Look up the {name} of {place}.",
            "tools": [tool(each) for each in (name, APIS[number - 1], APIS[number - 2])],
            "answers": [{"name": name, "arguments": {"place": place}}],
        }
        for number, name in enumerate(APIS)
        for place in PLACES
    ]
    if unreadable:
        rows[0]["answers"] = [{"name": "unlisted", "arguments": {}}]
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    return tmp_path / "mine.json"


def made(source: Path, out: Path, fold: int) -> dict[str, list[dict[str, Any]]]:
    given = ["--input", str(source), "--tokenizer", str(MINI / "tokenizer"), "--out", str(out), "--fold", str(fold)]
    assert main(given) == 0
    return {path.stem: read_jsonl(path) for path in out.glob("*.jsonl")}


def called(rows: Sequence[dict[str, Any]]) -> set[str]:
    return {call["function"]["name"] for row in rows for call in row["messages"][-1]["tool_calls"]}


def listed(rows: Sequence[dict[str, Any]]) -> set[str]:
    return {each["function"]["name"] for row in rows for each in row["tools"]}


def question(row: dict[str, Any]) -> str:
    text: str = row["messages"][0]["content"]
    return text


@pytest.mark.parametrize("source", ["made", "real"])
def test_every_row_is_held_out_once_from_models_that_have_not_seen_its_apis(source: str, tmp_path: Path) -> None:
    file = published(tmp_path) if source == "made" else real_data("toolcalls", "sealtools_test.json")
    held_out: list[str] = []
    for fold in range(NUM_FOLDS):
        files = made(file, tmp_path / str(fold), fold)
        new = called(files["held_out"])
        assert new and not new & listed(files["all"]) and not new & called(files["all"])
        assert files["all"] == [*files["demonstrations"], *files["train"]]
        sources = [row["data_source"] for row in files["train"]]
        assert {each.removeprefix(file.stem) for each in sources} == {"", "_others", "_masked"}
        assert sources.count(f"{file.stem}_masked") > 0.9 * sources.count(file.stem)
        held_out += map(question, files["held_out"])
        again = made(file, tmp_path / "again", fold)
        assert again == files
    if source == "made":
        assert len(set(held_out)) == len(held_out) == len(APIS) * len(PLACES)


@pytest.mark.parametrize("source", ["made", "real"])
def test_answers_of_all_rows_score_the_maximum_and_others_less(source: str, tmp_path: Path) -> None:
    """Composed ones, too."""
    file = published(tmp_path) if source == "made" else real_data("toolcalls", "toolalpaca_test.json")
    made(file, tmp_path / "rows", 0)
    tasks = TaskSet(str(tmp_path / "rows" / "all.jsonl"), 0.0)
    report = try_rewards(build_rewards("auto"), tasks, tool_call_format=HermesFormat())
    gold = report.stats["gold"]
    assert report.violations == [] and gold.responses == gold.at_maximum == len(tasks) > 60


def test_masking_renames_tools_and_parameters_everywhere() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
    schemas = {
        name: {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
        for name in ("now", "later")
    }
    calls = [{"id": "1", "type": "function", "function": {"name": "later", "arguments": {"city": "Oslo", "extra": 1}}}]
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "name": "later", "content": "no"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    row = masked(Row("mine", messages, schemas), random.Random(0))
    now, later = row.tools
    assert {now, later}.isdisjoint({"now", "later"}) and row.source == "mine_masked"
    city, unit = row.tools[later]["function"]["parameters"]["properties"]
    assert len({city, unit, "city", "unit"}) == 4
    assert [call["arguments"] for call in row.calls] == [{city: "Oslo", "extra": 1}] * 2
    assert [call["name"] for call in row.calls] == [later] * 2 and row.messages[2]["name"] == later
    assert row.tools[now]["function"]["name"] == now and row.tools[now]["function"]["description"] == "now"
    assert messages[2]["name"] == "later" and "city" in schema["properties"]  # what was given is as it was


def test_tools_are_left_out_until_a_row_is_short_and_never_its_own() -> None:
    names = ("first", "own", "third", "fourth")
    tools = {name: {"type": "function", "function": {"name": name, "parameters": {}}} for name in names}
    call = {"type": "function", "function": {"name": "own", "arguments": {}}}
    row = Row(
        "mine", [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [call]}], tools
    )
    for tokens, left in ((1, 3), (100, 2), (200, 1), (300, 1)):

        def count(text: str, tokens: int = tokens) -> int:
            return tokens if "parameters" in text else 1  # of a tool

        few = few_tools(row, count, random.Random(1))
        assert len(few.tools) == left and "own" in few.tools and list(few.tools) == [x for x in names if x in few.tools]
        assert fits(few, count) == (tokens < 300)


@given(st.lists(st.sets(st.integers(0, 12), min_size=1, max_size=3), min_size=1, max_size=40))
def test_rows_that_share_an_api_share_a_fold(apis: list[set[int]]) -> None:
    rows = [
        Row("s", [{"role": "assistant", "tool_calls": [{"function": {"name": str(name)}} for name in row]}], {})
        for row in apis
    ]
    found = folds(rows)
    for one, its in zip(apis, found, strict=True):
        assert all(other == its for more, other in zip(apis, found, strict=True) if one & more)
    if all(len(row) == 1 for row in apis) and len({*map(frozenset, apis)}) == len(apis):
        assert max(map(found.count, range(NUM_FOLDS))) - min(map(found.count, range(NUM_FOLDS))) <= 1


def test_what_a_fold_resolves_is_by_hand() -> None:
    def asks(text: str) -> Row:
        return Row("s", [{"role": "user", "content": text}], {})

    # the normal quantiles of 97.5 and 80 % are 1.960 and 0.842; the square root of 0.2 / 183 is 0.0331
    assert resolvable(183) == pytest.approx(0.0926, abs=1e-4)
    seen, new = "a b c d e f g h i", "A b c d e f g h j k"  # of three n-grams of eight terms one is known
    assert overlap([asks(seen)], [asks(new)]) == pytest.approx(1 / 3)
    assert overlap([asks(seen)], [asks("too short")]) == 0.0


def test_unusable_rows_are_named_and_too_few_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = published(tmp_path, unreadable=True)
    made(source, tmp_path / "rows", 1)
    shown = capsys.readouterr().out
    assert "left out: " in shown and "mine.json, row 0, field 'messages[1].tool_calls[0].function.name'" in shown
    assert "47 answers with calls, of which 47 are short enough" in shown
    source.write_text(json.dumps(json.loads(source.read_text())[1:3]))
    arguments = ["--input", str(source), "--tokenizer", str(MINI / "tokenizer"), "--out", str(tmp_path / "few")]
    assert main(arguments) == 2
    assert "too few answers with calls for 3 folds" in capsys.readouterr().err and not (tmp_path / "few").exists()
    arguments[3] = str(tmp_path / "no_tokenizer")
    assert main(arguments) == 2 and "--tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["dpo"], {}, "expected the arm grpo, sft or start, got 'dpo'"),
        (["3"], {}, "expected the fold 0, 1 or 2, got '3'"),
        (["grpo", "30"], {}, "expected the fold 0, 1 or 2, got '30'"),
        ([], {"STEPS": "0"}, "expected STEPS of 1 or more, got '0'"),
        ([], {"DTYPE": "half"}, "expected the DTYPE bfloat16 or float32, got 'half'"),
        ([], {"SAMPLES": "all"}, "expected SAMPLES of 0 or more, got 'all'"),
        ([], {"CALLS_DATA": "nowhere"}, "no rows in nowhere; fetch them with scripts/get_calls_data.py"),
    ],
)
def test_the_script_refuses_what_it_does_not_know(
    arguments: list[str], variables: dict[str, str], message: str
) -> None:
    command = ["bash", "scripts/learn_calls.sh", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)
    assert ended.returncode == 2 and message in ended.stderr and ended.stdout == ""


def test_published_rows_are_copied_if_they_are_the_published_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_hand = real_data("toolcalls")
    assert get_calls_data.main(["--folder", str(at_hand), "--out", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in at_hand.iterdir()}
    (tmp_path / "sealtools_test.json").write_text("[]")
    assert get_calls_data.main(["--folder", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert "sealtools_test.json" in shown and "has SHA-256" in shown and "--folder with a folder of sealtools" in shown
    assert get_calls_data.main(["--folder", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    assert "--folder with a folder of sealtools_test.json, toolalpaca_test.json" in capsys.readouterr().err


def evaluated(folder: Path, *written: tuple[str, float]) -> Path:
    """An evaluation's answers, as far as the report reads them. written: texts, and whether they are right"""
    gold = json.dumps([{"name": "find", "arguments": {"a": 1, "b": 2}}])
    rows = [
        {
            "task_id": f"held_out.jsonl#{number}",
            "data_source": "s",
            "index": 0,
            "responses": [{"role": "assistant", "content": text}],
            "answer": gold,
            "reward": 4.0 * right,
            "metric_value": right,
        }
        for number, (text, right) in enumerate(written)
    ]
    write_jsonl(folder / report.ANSWERS, rows)
    return folder


def test_the_report_counts_kinds_of_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def call(name: str, **arguments: int) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    texts = {
        "exact": call("find", a=1, b=2),
        "no readable call": "<tool_call>{",
        "other tools": call("look", a=1, b=2),
        "arguments missing": call("find", a=1),
        "arguments too many": call("find", a=1, b=2, c=3),
        "other values": call("find", a=1, b=3),
        "other": call("find", a=1, c=2),
    }
    assert tuple(texts) == report.KINDS
    one = evaluated(tmp_path / "start-step-000008", *((text, float(name == "exact")) for name, text in texts.items()))
    other = evaluated(tmp_path / "grpo-step-000024", (texts["exact"], 1.0), ("I cannot.", 0.0))
    assert report.main([str(one), str(other), "--out", str(tmp_path / "out.jsonl")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| answers | start | grpo |" and lines[1] == "| --- | ---: | ---: |"
    assert lines[2:4] == ["| exact | 1 | 1 |", "| no readable call | 1 | 1 |"]
    assert lines[4:] == [f"| {each} | 1 | 0 |" for each in report.KINDS[2:]]
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [row["kind"] for row in rows] == [*report.KINDS, "exact", "no readable call"]
    assert rows[0] == {
        "evaluation": "start",
        "id": "held_out.jsonl#0",
        "source": "s",
        "index": 0,
        "reward": 4.0,
        "kind": "exact",
        "response": texts["exact"],
    }
    again = evaluated(tmp_path / "grpo-step-000048", (texts["exact"], 1.0))
    assert report.main([str(other), str(again)]) == 0
    assert "| answers | grpo-step-000024 | grpo-step-000048 |" in capsys.readouterr().out
    assert report.main([str(tmp_path)]) == 2 and "the folder of an evaluation" in capsys.readouterr().err
