"""The data scripts: rows in each published form, by hand, and the real files where they are."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from scripts import build_rlla_raw, make_env_tasks
from scripts.data import (
    inject_bugs,
    math_problems,
    openai_rows,
    quixbugs,
    retool_sft,
    search_qa,
    tool_n1,
    tool_n1_sft,
)
from tests.conftest import real_data
from tests.toolrl.check.lab.lab import try_reward
from tests.toolrl.papers.test_recipe_rewards import episode
from verl.data.rows import read_rows
from verl.data.tasks import TaskSet
from verl.errors import DataError
from verl.formats.prompt import load_template
from verl.sft.demonstrations import _QUOTED_OUTPUT, read_demonstrations
from verl.types import Task
from verl.utils.reward_score import LabReward, build_reward

Main = Callable[[Sequence[str]], int]


def made_by(main: Main, tmp_path: Path, rows: list[Any], *argv: str) -> list[Task]:
    """The tasks that a script makes of these rows."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("\n".join(map(json.dumps, rows)))
    assert main(["--input", str(source), "--output", str(output), *argv]) == 0
    return list(TaskSet(str(output)))


def violations(name: str, tasks: Sequence[Task], **options: Any) -> list[Any]:
    reward = build_reward(name, options)
    assert isinstance(reward, LabReward)
    return try_reward(reward, tasks).violations


def test_math_in_both_forms(tmp_path: Path) -> None:
    torl = {
        "data_source": "aime24",
        "prompt": [{"role": "system", "content": "ignored"}, {"role": "user", "content": "How many?"}],
        "reward_model": {"ground_truth": "204", "stype": "rule"},
        "extra_info": {"id": 7, "split": "test"},
    }
    rows = [{"id": "a", "problem": "1 + 1?", "answer": "2"}, torl, {"id": "b", "problem": "x?", "answer": ["1", "$3$"]}]
    tasks = made_by(math_problems.main, tmp_path, rows, "--data-source", "mine")
    assert [(each.data_source, each.prompt[-1].content, each.answer) for each in tasks] == [
        ("mine", "1 + 1?", "2"),
        ("aime24", "How many?", "204"),
        ("mine", "x?", "1, $3$"),
    ]
    assert [[message.role for message in each.prompt] for each in tasks] == [["user"]] * 3
    assert [each.extra["id"] for each in tasks] == ["a", "7", "b"]
    assert violations("torl", tasks) == []
    (instructed, *_) = made_by(math_problems.main, tmp_path, rows, "--instruction", "Box it.")
    assert [(message.role, message.content) for message in instructed.prompt] == [
        ("system", "Box it."),
        ("user", "1 + 1?"),
    ]


def test_a_bad_row_stops_or_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": "a", "problem": "1 + 1?", "answer": ""}, {"id": "b", "problem": "1 + 2?", "answer": "3"}, 5]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    argv = ["--input", str(source), "--output", str(tmp_path / "out.parquet")]
    assert math_problems.main(argv) == 2
    output = capsys.readouterr().err
    assert "row 0, field 'answer': is empty or no text" in output and "--skip-bad-rows" in output
    assert not (tmp_path / "out.parquet").exists()
    assert math_problems.main([*argv, "--skip-bad-rows"]) == 0
    assert "not of the expected form" in capsys.readouterr().err
    assert [row["extra_info"]["id"] for row in read_rows(str(tmp_path / "out.parquet"))] == ["b"]


def test_the_split_is_seeded_and_loses_nothing(tmp_path: Path) -> None:
    rows = [{"id": str(number), "problem": f"{number}?", "answer": "1"} for number in range(40)]

    def split(seed: str) -> list[list[str]]:
        made_by(math_problems.main, tmp_path, rows, "--test-fraction", "0.25", "--seed", seed)
        files = (tmp_path / "out.parquet", tmp_path / "out_test.parquet")
        return [[row["extra_info"]["id"] for row in read_rows(str(file))] for file in files]

    first = split("1")
    assert [len(ids) for ids in first] == [30, 10]
    assert sorted(first[0] + first[1], key=int) == [str(number) for number in range(40)]
    assert split("1") == first != split("2")
    test = next(read_rows(str(tmp_path / "out_test.parquet")))
    assert test["extra_info"]["split"] == "test"


def test_questions_to_search_for(tmp_path: Path) -> None:
    rows = [{"id": "q", "question": "Which?", "golden_answers": ["A", "Ä"]}, {"Question": "Who?", "Answer": "B"}]
    tasks = made_by(search_qa.main, tmp_path, rows, "--data-source", "nq")
    assert [(each.prompt[0].content, each.answer) for each in tasks] == [("Which?", '["A", "Ä"]'), ("Who?", '["B"]')]
    assert violations("search_r1", tasks, with_form=True) == []


def test_questions_cut_from_passages_are_labelled_so(tmp_path: Path) -> None:
    passages = {
        "Spring (1937 film)": "Spring is a 1937 British film directed by Herbert Brenon. It was long.",
        "Herbert Brenon": "Herbert Brenon (13 January 1880 – 21 June 1958) was an Irish film director.",  # noqa: RUF001
        "Two": "Two is a film directed by Ann Lee and Bo Lee.",
        "Late": "Late is a film directed by Joe Lynch and starring Erica Leerhsen.",
        "Painter": "Some Painter (1 May 1900) painted.",
    }
    rows = [
        {"id": str(number), "title": title, "contents": f'"{title}"\n{body}'}
        for number, (title, body) in enumerate(passages.items())
    ]
    tasks = made_by(search_qa.main, tmp_path, rows, "--passages")
    assert [(each.prompt[0].content, each.answer) for each in tasks] == [
        ("Who directed the film Spring?", '["Herbert Brenon"]'),
        ("When was the director of the film Spring born?", '["13 January 1880"]'),
        ("Who directed the film Late?", '["Joe Lynch"]'),
    ]
    assert {each.data_source for each in tasks} == {search_qa.TEMPLATED}


TOOL = {"name": "Get Weather", "description": "", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "Get Weather", "arguments": {"city": "Oslo", "days": 1}}
FORMS = {
    "xLAM": {"query": "hi", "tools": json.dumps([TOOL]), "answers": json.dumps([CALL])},
    "ToolACE": {
        "system": f"You may use:\n{json.dumps([TOOL])}\nand nothing else.",
        "conversations": [
            {"from": "user", "value": "hi"},
            {"from": "assistant", "value": '[Get Weather(city="Oslo", days=1)]'},
            {"from": "tool", "value": "rain"},
            {"from": "assistant", "value": "It rains."},
        ],
    },
    "ShareGPT": {
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "It rains."},
        ],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_tool_n1_reads_each_form(form: str, tmp_path: Path) -> None:
    (only,) = made_by(tool_n1.main, tmp_path, [FORMS[form]])
    assert json.loads(only.answer) == [CALL]
    assert [message.role for message in only.prompt] == ["system", "user"]
    assert '"name": "Get Weather"' in only.prompt[0].content and only.prompt[-1].content == "hi"
    assert violations("tool_n1", [only]) == []


def test_tool_n1_sees_what_came_before_and_only_offered_tools(tmp_path: Path) -> None:
    again = FORMS["ShareGPT"]["conversations"] * 2  # type: ignore[operator]
    first, second = made_by(tool_n1.main, tmp_path, [FORMS["ShareGPT"] | {"conversations": again}])
    assert len(first.prompt) == 2
    assert [message.role for message in second.prompt] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert second.prompt[2].content == f"<tool_call>{json.dumps([CALL])}</tool_call>"
    stranger = FORMS["xLAM"] | {"answers": [CALL | {"name": "other"}]}
    broken = FORMS["xLAM"] | {"answers": "[{"}
    tasks = made_by(tool_n1.main, tmp_path, [stranger, FORMS["xLAM"], broken], "--skip-bad-rows")
    assert len(tasks) == 1


CALLED = f"<tool_call>{json.dumps([CALL])}</tool_call>"
TRACE = {  # in the published form, whose prompt names the tags before it uses them
    "system_prompt": "Functions are within <tools></tools> tags:\n<tools>\n"
    + json.dumps({"type": "function", "function": TOOL})
    + "\n</tools>\nIn each action step, you MUST: think",
    "query": "hi",
    "output": f"<think>It is about weather.</think>\n{CALLED} and then it rains <tool_call>[]</tool_call>",
    "instruction": "",
}


def mixed(tmp_path: Path, rows: list[Any], *argv: str) -> list[Any]:
    source, output = tmp_path / "traces.json", tmp_path / "out.parquet"
    source.write_text(json.dumps(rows))
    assert tool_n1_sft.main(["--input", str(source), "--output", str(output), *argv]) == 0
    return list(read_rows(str(output)))


def test_tool_n1s_traces_become_demonstrations_with_or_without_thoughts(tmp_path: Path) -> None:
    def contents(*argv: str) -> list[str]:
        (row,) = mixed(tmp_path, [TRACE], *argv)
        shown = read_demonstrations(str(tmp_path / "out.parquet"))[0].messages
        assert [message.role for message in shown] == ["system", "user", "assistant"]
        return [message["content"] for message in row["messages"]]

    system, query, response = contents()
    assert (query, response) == ("hi", f"<think>It is about weather.</think>\n{CALLED}")  # up to the first calls
    (only,) = made_by(tool_n1.main, tmp_path, [FORMS["xLAM"]])
    assert system == only.prompt[0].content  # the text of the rows that RL sees
    system, _, response = contents("--form", "no-reason")
    assert response == CALLED and "think" not in system and '"name": "Get Weather"' in system
    assert contents("--keep-system")[0] == TRACE["system_prompt"]


def test_tool_n1s_mix_has_no_query_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [TRACE | {"query": f"query {number}"} for number in range(60)]
    sft = {row["messages"][1]["content"] for row in mixed(tmp_path, rows, "--part", "0:0.5")}
    rl = mixed(tmp_path, rows, "--part", "0.5:1", "--form", "rl")
    assert sft | {row["prompt"][1]["content"] for row in rl} == {row["query"] for row in rows}
    assert len(sft) + len(rl) == 60 and 20 <= len(sft) <= 40
    tasks = list(TaskSet(str(tmp_path / "out.parquet")))
    assert {task.answer for task in tasks} == {json.dumps([CALL])} and violations("tool_n1", tasks) == []
    assert mixed(tmp_path, rows, "--part", "0:0.5", "--seed", "1") != mixed(tmp_path, rows, "--part", "0:0.5")
    for argv in (["--part", "0.5"], ["--part", "0.6:0.5"], ["--form", "no-reason", "--keep-system"]):
        with pytest.raises(SystemExit):
            mixed(tmp_path, rows, *argv)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output": CALLED}, "field 'output': has no thought"),
        ({"output": "<think>t</think> <tool_call>weather()</tool_call>"}, "has no calls that can be read"),
        ({"output": "<think>t</think>" + CALLED.replace("Get", "Set")}, "calls 'Set Weather', which is not offered"),
        ({"system_prompt": "no tools"}, "field 'system_prompt': lists no tools"),
        ({"query": ""}, "field 'query': is empty"),
    ],
)
def test_traces_that_are_not_verified_are_refused(
    changed: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "traces.jsonl"
    source.write_text(json.dumps(TRACE | changed) + "\n" + json.dumps(TRACE) + "\n")
    argv = ["--input", str(source), "--output", str(tmp_path / "out.parquet")]
    assert tool_n1_sft.main(argv) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert tool_n1_sft.main([*argv, "--skip-bad-rows"]) == 0


SOLUTION = "He sold 48/2 = <<48/2=24>>24 clips.\nThat is $<<24*0.35=8.4>>8.40 and 24+1=<<24+1=25>>25 in all.\n#### 25"


def test_a_solution_becomes_code_and_python_output_is_not_trained(tmp_path: Path) -> None:
    response = retool_sft.demonstration(SOLUTION, "25")
    assert response.startswith(
        "He sold 48/2 =\n<code>\n```python\nprint(48/2)\n```\n</code>\n<interpreter>\n24.0</interpreter>\n\n24 clips."
    )
    assert response.endswith("25 in all.\n<answer>\n\\boxed{25}\n</answer>")
    assert [found[0] for found in _QUOTED_OUTPUT.finditer(response)] == [
        f"<interpreter>\n{output}</interpreter>" for output in ("24.0", "8.399999999999999", "25")
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text(json.dumps({"problem": "How many?", "solution": SOLUTION, "answer": "25"}))
    assert retool_sft.main(["--input", str(source), "--output", str(output)]) == 0
    (shown,) = read_demonstrations(str(output))
    assert [message.content for message in shown.messages] == [load_template("retool").fill("How many?", ""), response]
    template = tmp_path / "prompt.txt"
    template.write_text("Solve: {question}\n")
    assert retool_sft.main(["--input", str(source), "--output", str(output), "--template", str(template)]) == 0
    assert read_demonstrations(str(output))[0].messages[0].content == "Solve: How many?\n"
    asked = Task("t", (), "25", "math")
    assert build_reward("retool").score(episode(asked, response), asked, 0).total == 1.0


@pytest.mark.parametrize(
    ("solution", "why"),
    [
        ("Nothing noted. #### 25", "notes no calculation"),
        ("<<5*5=26>>26 #### 25", "not Python's"),
        ("<<5*5>>25 <<5*5=25>> #### 25", "a note that cannot be read"),
        ("<<4+4=8>>8 #### 25", "does not calculate its answer"),
        ("<<__import__('os')=1>>1 #### 25", "not a calculation"),
        ("<<5**2=25>>25 #### 25", "not a calculation"),
        ("<<1/0=25>>25 #### 25", "not a calculation"),
    ],
)
def test_solutions_that_cannot_be_demonstrated(solution: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        retool_sft.demonstration(solution, "25")


@pytest.mark.parametrize("expression", ["48/2", "0.1+0.2", "(3-1)*4.5", "-7/2+10", "80/100*10"])
def test_the_calculator_agrees_with_python(expression: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(f"print({expression})")
    assert f"{retool_sft.calculated(expression)}\n" == printed.getvalue()


@pytest.mark.long
def test_real_files(tmp_path: Path) -> None:
    out = str(tmp_path / "out.parquet")
    assert math_problems.main(["--input", str(real_data("math", "amc23.jsonl")), "--output", out]) == 0
    assert violations("retool", TaskSet(out)) == []
    gsm8k = str(real_data("math", "gsm8k_train.jsonl.gz"))
    assert retool_sft.main(["--input", gsm8k, "--output", out, "--skip-bad-rows"]) == 0
    assert sum(1 for _ in read_rows(out)) > 7000
    wiki = str(real_data("search", "wiki_passages.jsonl.gz"))
    assert search_qa.main(["--input", wiki, "--output", out, "--passages"]) == 0
    tasks = TaskSet(out)
    assert len(tasks) > 1000 and violations("otc_grpo", tasks[:200]) == []
    glaive = str(real_data("toolcalls", "glaive_toolcall_en.json"))
    assert tool_n1.main(["--input", glaive, "--output", out, "--skip-bad-rows"]) == 0
    assert violations("tool_n1", TaskSet(out), version="v4") == []


def test_a_share_that_leaves_nothing_to_train_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--input", "x.jsonl", "--output", str(tmp_path / "x.parquet"), "--test-fraction", "2"]
    with pytest.raises(SystemExit):
        math_problems.main(argv)
    assert "2 is not a share in [0, 1)" in capsys.readouterr().err


def test_the_ending_of_an_output_is_its_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": str(number), "problem": f"{number}?", "answer": "1"} for number in range(8)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    for name in ("out.parquet", "out.jsonl"):
        argv = ["--input", str(source), "--output", str(tmp_path / name), "--test-fraction", "0.25"]
        assert math_problems.main(argv) == 0
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 6
    for name in ("out", "out_test"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert lines == list(read_rows(str(tmp_path / f"{name}.parquet"))), name


@pytest.mark.parametrize(
    ("main", "argv", "wrong", "endings"),
    [
        (math_problems.main, ["--input", "x.jsonl", "--output"], "x.json", ".parquet or .jsonl"),
        (search_qa.main, ["--input", "x.jsonl", "--output"], "x", ".parquet or .jsonl"),
        (openai_rows.main, ["--input", "x.jsonl", "--output"], "x.parquet", ".jsonl"),
        (inject_bugs.main, ["--repo", "x", "--output"], "x.parquet", ".jsonl"),
        (quixbugs.main, ["--input", "x.jsonl", "--output"], "x.json", ".jsonl"),
        (make_env_tasks.main, ["bfcl", "--out"], "x.parquet", ".jsonl"),
        (build_rlla_raw.main, ["--out"], "x.jsonl", ".json"),
    ],
)
def test_another_ending_is_refused_before_anything_is_read(
    main: Main, argv: list[str], wrong: str, endings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*argv, wrong])
    assert ended.value.code == 2 and f"{wrong!r} does not end in {endings}\n" in capsys.readouterr().err


def test_a_bad_row_moves_no_other_to_the_other_side(tmp_path: Path) -> None:
    """The held-out rows are chosen among all published ones, so that they stay out of training after a correction."""
    rows: list[Any] = [{"id": str(number), "problem": f"{number}?", "answer": "1"} for number in range(40)]

    def split(bad: set[int]) -> tuple[list[str], list[str]]:
        made_of = [5 if number in bad else row for number, row in enumerate(rows)]
        made_by(math_problems.main, tmp_path, made_of, "--test-fraction", "0.25", "--skip-bad-rows")
        train, test = (read_rows(str(tmp_path / name)) for name in ("out.parquet", "out_test.parquet"))
        return [row["extra_info"]["id"] for row in train], [row["extra_info"]["id"] for row in test]

    whole = split(set())
    for bad in ({0}, {39}, {3, 17, 22, 31}):
        for part, found in zip(whole, split(bad), strict=True):
            assert found == [id for id in part if int(id) not in bad]
