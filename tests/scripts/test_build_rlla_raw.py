"""The raw file from its sources: hand-made rows in each source's form."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from scripts.build_rlla_raw import main
from scripts.raw import toolace, xlam
from scripts.raw.decision import flat_parameters, instruction_like, own_instruction
from scripts.raw.rlla import CALL_THOUGHT, RESPONSE_THOUGHT, ListedTool, to_row
from tests.conftest import real_data
from verl.data.rows import read_rows
from verl.data.tasks import to_task
from verl.errors import DataError
from verl.formats.toolrl_text import parse_gold

FUNCTION = {
    "name": "Market Trends API",
    "description": "Trends (all) of a market",
    "parameters": {
        "type": "dict",
        "properties": {"trend_type": {"type": "string", "description": "Which"}, "limit": {"type": "int"}},
        "required": ["trend_type"],
    },
    "required": None,
}
TOOLACE_ROW = {
    "system": f"You can call functions.\nHere they are:\n{json.dumps([FUNCTION])}\nShould you decide to call [..]",
    "conversations": [
        {"from": "user", "value": "What moves?"},
        {"from": "assistant", "value": '[Market Trends API(trend_type="a, (b)", limit=2), Market Trends API()]'},
        {"from": "tool", "value": '[{"name": "Market Trends API", "results": {"up": 3}}]'},
        {"from": "assistant", "value": "Three are up."},
        {"from": "user", "value": "Thanks"},
        {"from": "assistant", "value": "Welcome."},
    ],
}
XLAM_ROW = {
    "id": 0,
    "query": "Live giveaways?",
    "tools": json.dumps(
        [
            {
                "name": "giveaways",
                "description": "Live ones",
                "parameters": {"kind": {"type": "str", "default": "game"}},
            },
            {"name": "other", "description": "", "parameters": {}},
        ]
    ),
    "answers": json.dumps([{"name": "giveaways", "arguments": {"kind": "beta"}}]),
}


def test_a_toolace_dialogue_is_split_into_single_decisions() -> None:
    first, second, third = toolace.decisions(TOOLACE_ROW, own_instruction)
    assert (
        'Parameters: {"trend_type": {"description": "Which", "type": "string", "default": ""}' in first["instruction"]
    )
    assert first["input"] == "**Dialogue Records History**\n<user> What moves? </user>"
    assert parse_gold(first["output"]).calls == [
        {"name": "Market Trends API", "parameters": {"trend_type": "a, (b)", "limit": 2}},
        {"name": "Market Trends API", "parameters": {}},
    ]
    assert second["input"] == (
        f'{first["input"]}\n\n{first["output"]}\n<obs> [{{"name": "Market Trends API", "results": {{"up": 3}}}}] </obs>'
    )
    assert second["output"] == f"<think> {RESPONSE_THOUGHT} </think>\n<response> Three are up. </response>"
    assert third["input"] == f"{second['input']}\n\n{second['output']}\n\n<user> Thanks </user>"
    for example in (first, second, third):
        to_task(to_row(example, "train", 0), "x")  # passes the checks at the door


def test_text_that_looks_like_a_call_is_never_an_answer() -> None:
    assert toolace.read_calls("Plain text (with brackets).", ["f"]) is None
    assert toolace.read_calls("[1] and [2]", ["f"]) is None
    assert toolace.read_calls("[f(a=1)]", ["f"]) == [{"name": "f", "parameters": {"a": 1}}]
    for text in ("[f(1)]", "[g(a=1)]", "[note: see f(x=1)]"):
        with pytest.raises(DataError, match="cannot be read, or of functions that are not listed"):
            toolace.read_calls(text, ["f"])


def test_an_xlam_row_is_one_decision() -> None:
    (example,) = xlam.decisions(XLAM_ROW, own_instruction)
    assert 'Parameters: {"kind": {"description": "", "type": "str", "default": "game"}}' in example["instruction"]
    assert example["input"].endswith("<user> Live giveaways? </user>")
    assert example["output"].startswith(f"<think> {CALL_THOUGHT} </think>\n<tool_call>\n")
    assert parse_gold(example["output"]).calls == [{"name": "giveaways", "parameters": {"kind": "beta"}}]
    to_task(to_row(example, "train", 0), "x")


def test_masking_renames_tools_and_parameters_alike() -> None:
    examples = [next(xlam.decisions(XLAM_ROW, own_instruction, xlam.masker(random.Random(seed)))) for seed in (1, 1, 2)]
    assert examples[0] == examples[1] != examples[2]
    text = examples[0]["instruction"] + examples[0]["output"]
    assert "giveaways" not in text and '"kind"' not in text and "Live ones" in text
    (call,) = parse_gold(examples[0]["output"]).calls or []
    assert list(call["parameters"].values()) == ["beta"]
    to_task(to_row(examples[0], "train", 0), "x")  # the call's new name is the listed one


@pytest.mark.parametrize(
    ("decisions", "bad", "message"),
    [
        (toolace.decisions, {"system": "none", "conversations": []}, "lists no functions"),
        (toolace.decisions, {"system": "[{"}, "field 'conversations': is missing"),
        (
            toolace.decisions,
            TOOLACE_ROW | {"conversations": [{"from": "tool", "value": "x"}]},
            "has a turn that is not",
        ),
        (xlam.decisions, {"query": "x", "tools": "[]"}, "field 'answers': is missing"),
        (xlam.decisions, XLAM_ROW | {"tools": "{"}, "field 'tools': is not JSON"),
        (xlam.decisions, XLAM_ROW | {"tools": [{"name": None}]}, "has a name that is not a text"),
        (xlam.decisions, XLAM_ROW | {"answers": [1]}, "not a list of objects"),
        (xlam.decisions, XLAM_ROW | {"answers": [{"name": "giveaways", "arguments": "x"}]}, "that are not an object"),
    ],
)
def test_rows_of_another_form_are_refused(decisions: Any, bad: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(decisions(bad, own_instruction))


def test_masking_refuses_a_name_that_is_listed_twice() -> None:
    twice = XLAM_ROW | {"tools": json.loads(str(XLAM_ROW["tools"])) * 2}
    with pytest.raises(DataError, match="lists a name twice"):
        list(xlam.decisions(twice, own_instruction, xlam.masker(random.Random(0))))


def test_masks_never_collide() -> None:
    tools = [ListedTool(f"tool {number}", "", {f"key {number}": {}}) for number in range(400)]

    class FewNames(random.Random):
        def choices(self, population: Any, *args: Any, k: int = 1, **kwargs: Any) -> Any:
            return super().choices("ab0", *args, k=k, **kwargs)

    masked, _ = xlam.masker(FewNames(0))(tools, [])
    names = [name for tool in masked for name in (tool.name, *tool.parameters)]
    assert len(set(names)) == len(names) == 800


def test_a_flat_parameter_may_be_called_properties() -> None:
    assert flat_parameters({"properties": {"type": "str"}}).keys() == {"properties"}
    assert flat_parameters({"type": "object", "properties": {"a": {"type": "str"}}}).keys() == {"a"}


BROKEN_ROWS = [
    XLAM_ROW | {"query": None},
    XLAM_ROW | {"tools": json.loads(str(XLAM_ROW["tools"])) * 2},
    XLAM_ROW | {"answers": [{"name": "giveaways", "arguments": None}]},
    XLAM_ROW | {"tools": [{"name": "giveaways", "parameters": [1]}]},
    XLAM_ROW | {"tools": "[" * 50_000},
    XLAM_ROW | {"answers": [{"name": "stranger", "arguments": {}}]},
    XLAM_ROW | {"query": "   "} | {"answers": 3},
    TOOLACE_ROW | {"system": None},
    TOOLACE_ROW | {"conversations": None},
    TOOLACE_ROW | {"conversations": [{"role": "user", "content": "x"}]},
    TOOLACE_ROW | {"conversations": [{"from": "user", "value": None}]},
    TOOLACE_ROW | {"conversations": [{"from": "assistant", "value": "Use <tool_call> here."}]},
    TOOLACE_ROW | {"conversations": [{"from": "user", "value": "x"}, {"from": "assistant", "value": "[Nope(a=1)]"}]},
    "text",
]


def test_broken_rows_of_any_kind_are_dropped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = sources(tmp_path, 8)
    for name in ("toolace.json", "xlam.jsonl"):
        path = tmp_path / name
        rows = list(read_rows(str(path))) + BROKEN_ROWS
        path.write_text(json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows)))
    out = tmp_path / "raw.json"
    numbers = ["--num-toolace", "24", "--num-hammer", "4", "--num-xlam", "4"]
    assert main([*arguments, *numbers, "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())) == 32
    assert "not of the expected form" in capsys.readouterr().err
    for example in read_rows(str(out)):
        to_task(to_row(example, "train", 0), "x")


def test_the_wording_can_be_a_published_files() -> None:
    instruction = instruction_like(str(real_data("toolrl", "rlla_sft.json")))([ListedTool("mine", "Does it")])
    assert "1. Name: mine\nDescription: Does it\nParameters: {}\n\n**Steps for Each Turn**" in instruction
    assert "2. Name:" not in instruction


def sources(folder: Path, rows: int) -> list[str]:
    (folder / "toolace.json").write_text(json.dumps([TOOLACE_ROW] * rows))
    many = [XLAM_ROW | {"query": f"Query {number}"} for number in range(rows)]
    (folder / "xlam.jsonl").write_text("\n".join(map(json.dumps, [*many, XLAM_ROW | {"answers": []}, {"query": 1}])))
    return ["--toolace", str(folder / "toolace.json"), "--xlam", str(folder / "xlam.jsonl")]


def test_the_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--num-toolace", "6", "--num-hammer", "3", "--num-xlam", "4", "--out"]
    for name in ("one.json", "two.json"):
        assert main([*sources(tmp_path, 8), *numbers, str(tmp_path / name)]) == 0
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    examples = json.loads((tmp_path / "one.json").read_text())
    queries = [example["input"] for example in examples if "Query" in example["input"]]
    assert len(examples) == 13 and len(set(queries)) == len(queries) == 7  # no query both masked and plain
    assert sum("Query" in example["input"] and "giveaways" not in example["output"] for example in examples) == 3
    output = capsys.readouterr().err
    assert "no call" in output and "tools is missing" in output


def test_hammers_own_file_is_masked_whole_and_the_mix_is_shuffled(tmp_path: Path) -> None:
    (tmp_path / "hammer.jsonl").write_text("\n".join(json.dumps(XLAM_ROW | {"query": f"Masked {n}"}) for n in range(9)))
    numbers = ["--num-toolace", "0", "--num-hammer", "5", "--num-xlam", "5", "--out", str(tmp_path / "raw.json")]
    arguments = [*sources(tmp_path, 9)[2:], "--toolace", "gone.json", "--hammer", str(tmp_path / "hammer.jsonl")]
    assert main([*arguments, *numbers]) == 0  # what is not asked for is not read
    examples = json.loads((tmp_path / "raw.json").read_text())
    kinds = ["Masked" in example["input"] for example in examples]
    assert kinds == ["giveaways" not in example["output"] for example in examples]
    assert sum(kinds) == 5 and kinds not in (sorted(kinds), sorted(kinds, reverse=True))
    assert [e["input"] for e in examples if "Query" in e["input"]] != [f"Query {n}" for n in range(5)]


def test_too_few_rows_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*sources(tmp_path, 2), "--out", str(tmp_path / "raw.json")]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "xlam.jsonl: yields 2 usable rows; expected at least 2000" in output
    assert not (tmp_path / "raw.json").exists()
