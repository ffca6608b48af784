"""The raw file to parquet: ToolRL's schema, shuffle and split; options; errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from scripts.preprocess_rlla import main
from scripts.raw.rlla import CALL_THOUGHT, SCHEMA, strip_thought
from tests.conftest import ROOT, real_data
from tests.verl.data.test_tasks import example
from verl.data.rows import read_rows
from verl.formats.toolrl_text import render_response


def raw_file(path: Path, examples: list[Any]) -> str:
    path.write_text(json.dumps(examples))
    return str(path)


def split_rows(folder: Path, split: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return rows


def test_schema_shuffle_and_split_are_toolrls(tmp_path: Path) -> None:
    examples = [example(f"city {number}") for number in range(250)]
    assert main(["--input", raw_file(tmp_path / "r.json", examples), "--local_dir", str(tmp_path)]) == 0
    shuffled = list(examples)
    np.random.seed(31415)
    np.random.shuffle(shuffled)
    assert pq.read_schema(tmp_path / "train.parquet").equals(SCHEMA)
    for split, wanted in (("train", shuffled[:245]), ("test", shuffled[245:])):
        rows = split_rows(tmp_path, split)
        assert [{key: row["extra_info"][key] for key in example()} for row in rows] == wanted
        assert [(row["extra_info"]["index"], row["extra_info"]["split"]) for row in rows] == [
            (index, split) for index in range(len(wanted))
        ]
    assert rows[0]["prompt"] == [
        {"role": "system", "content": wanted[0]["instruction"]},
        {"role": "user", "content": wanted[0]["input"]},
    ]
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": wanted[0]["output"]}
    assert (rows[0]["data_source"], rows[0]["ability"]) == ("rlla", "math")


def published_split(examples: list[Any]) -> dict[str, list[tuple[int, str]]]:
    """(index, input) of the rows of ToolRL's rlla.py, which drops none."""
    shuffled = list(examples)
    np.random.seed(31415)
    np.random.shuffle(shuffled)
    num_test = int(len(shuffled) * 0.02)
    parts = {"train": shuffled[:-num_test], "test": shuffled[-num_test:]}
    return {split: [(index, row["input"]) for index, row in enumerate(rows)] for split, rows in parts.items()}


@pytest.mark.parametrize("why", ["bad output", "occurs elsewhere", "too long"])
def test_dropped_rows_leave_the_split_order_and_index_of_the_others(why: str, tmp_path: Path) -> None:
    examples = [example(f"city {number}") for number in range(300)]
    dropped = {4, 77, 150, 199, 298}
    options = {
        "bad output": [],
        "occurs elsewhere": ["--drop-in", raw_file(tmp_path / "o.json", [examples[each] for each in sorted(dropped)])],
        "too long": ["--tokenizer", str(ROOT / "dataset/mini/tokenizer"), "--max-prompt-tokens", "500"],
    }[why]
    if why == "bad output":
        examples = [{**row, "output": "<tool_call>\n{\n"} if n in dropped else row for n, row in enumerate(examples)]
    if why == "too long":
        examples = [example(f"city {n} " * 300) if n in dropped else row for n, row in enumerate(examples)]
    source = raw_file(tmp_path / "r.json", examples)
    assert main(["--input", source, "--local_dir", str(tmp_path), *options]) == 0
    lost = {examples[each]["input"] for each in dropped}
    for split, rows in published_split(examples).items():
        found = [(row["extra_info"]["index"], row["extra_info"]["input"]) for row in split_rows(tmp_path, split)]
        assert found == [row for row in rows if row[1] not in lost]


def test_the_published_schema_is_ours() -> None:
    assert pq.read_schema(real_data("toolrl", "rlla_test.parquet")).equals(SCHEMA, check_metadata=False)


def test_a_small_file_keeps_all_its_training_rows(tmp_path: Path) -> None:
    main(["--input", raw_file(tmp_path / "r.json", [example()] * 10), "--local_dir", str(tmp_path)])
    assert (len(split_rows(tmp_path, "train")), len(split_rows(tmp_path, "test"))) == (10, 0)


def test_rows_that_occur_elsewhere_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = raw_file(tmp_path / "other.json", [example("Oslo")])
    source = raw_file(tmp_path / "r.json", [example("Rome"), example("Oslo")])
    assert main(["--input", source, "--drop-in", other, "--local_dir", str(tmp_path)]) == 0
    assert [row["extra_info"]["input"] for row in split_rows(tmp_path, "train")] == [example("Rome")["input"]]
    assert "1 dropped (1 that occur in" in capsys.readouterr().out


def test_strip_thoughts_makes_rl_rows_of_sft_rows() -> None:
    thought = "<think> I could use <tool_call> here. </think>"
    calls = '<tool_call>\n{"name": "a", "parameters": {}}\n</tool_call>'
    assert strip_thought(f"{thought}\n{calls}") == f"<think> {CALL_THOUGHT} </think>\n{calls}"


def test_real_sft_rows_become_rl_rows(tmp_path: Path) -> None:
    """399 of the 400: one is also a test row. The 17 thoughts that quote a tag no longer matter."""
    test = str(real_data("toolrl", "rlla_test.parquet"))
    source = str(real_data("toolrl", "rlla_sft.json"))
    arguments = ["--input", source, "--local_dir", str(tmp_path), "--test-fraction", "0"]
    assert main([*arguments, "--strip-thoughts", "--drop-in", test]) == 0
    rows = split_rows(tmp_path, "train")
    assert len(rows) == 399
    assert not {row["extra_info"]["input"] for row in rows} & {row["extra_info"]["input"] for row in read_rows(test)}


def test_every_published_row_is_used_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The 80 test rows in their raw form, and the SFT rows with the thoughts that quote a tag."""
    rows = [row["extra_info"] for row in read_rows(str(real_data("toolrl", "rlla_test.parquet")))]
    raw = raw_file(tmp_path / "rlla_rl.json", [{name: row[name] for name in example()} for row in rows])
    sft = str(real_data("toolrl", "rlla_sft.json"))
    reports = {
        raw: "rlla_rl.json: 80 rows, 80 used (1 with gold calls of unlisted tools, row 9), 0 dropped",
        sft: "rlla_sft.json: 400 rows, 383 used (1 with gold calls of unlisted tools, row 130), "
        "17 dropped (17 with a bad output, rows 10, 44, 73, ..: line 1 of the gold calls is not JSON",
    }
    for source, line in reports.items():
        assert main(["--input", source, "--local_dir", str(tmp_path)]) == 0
        assert line in " ".join(capsys.readouterr().out.split())
        numbers = [sum(1 for _ in split_rows(tmp_path, split)) for split in ("train", "test")]
        assert f"{sum(numbers)} used" in line
    assert main(["--input", sft, "--local_dir", str(tmp_path / "none"), "--max-bad-share", "0.04"]) == 2
    assert "17 of 400 rows cannot be used, more than max_bad_share=0.04" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


def test_long_prompts_are_dropped_under_the_tokenizers_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Path(__file__).parents[2] / "dataset/mini/tokenizer"
    source = raw_file(tmp_path / "r.json", [example("Rome"), example("Rome " * 300)])
    arguments = ["--input", source, "--local_dir", str(tmp_path), "--tokenizer", str(tokenizer)]
    assert main([*arguments, "--max-prompt-tokens", "500"]) == 0
    output = capsys.readouterr().out
    assert len(split_rows(tmp_path, "train")) == 1
    assert (
        "1 dropped (1 longer than 500 tokens)" in output
        and "prompt tokens: p50" in output
        and "prompt characters: p50" in output
    )


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"instruction": "a", "input": "b"}], "row 0, field 'output': is missing; expected a text"),
        ([example(), {**example(), "input": 3}], "row 1, field 'input': is of type int; expected a text"),
        ([example(), "text"], "row 1: is of type str"),
        (
            [{**example(), "output": "<tool_call>\n{\n</tool_call>"}],
            "row 0, field 'output': line 1 of the gold calls is not JSON",
        ),
        ([example(), {**example(), "input": " "}], "row 1, field 'input': is empty"),
        ([{**example(), "input": "\ud800"}], "row 0, field 'input': has a lone surrogate"),
        ([], "has no usable row"),
    ],
)
def test_bad_raw_rows_stop_with_their_place(
    examples: list[Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = raw_file(tmp_path / "r.json", examples)
    assert main(["--input", source, "--local_dir", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seed", "-1"],
        ["--seed", str(2**32)],
        ["--test-fraction", "1"],
        ["--max-prompt-tokens", "5"],
        ["--max-bad-share", "2"],
        ["--max-prompt-tokens", "0", "--tokenizer", "x"],
    ],
)
def test_options_are_checked_before_anything_is_read(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_bad_file_of_other_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = raw_file(tmp_path / "r.json", [example()]), raw_file(tmp_path / "other.json", [example(), {}])
    assert main(["--input", source, "--drop-in", other, "--local_dir", str(tmp_path)]) == 2
    assert "other.json, row 1, field 'instruction': is missing" in capsys.readouterr().err


def test_the_summary_counts_kinds_calls_and_brackets_in_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [{"name": "get_weather", "parameters": {}}, {"name": "get_time", "parameters": {}}]
    outputs = [render_response("t", calls), render_response("t", calls[:1], "r"), render_response("t", None, "r")]
    examples = [example() | {"output": output} for output in outputs for _ in range(len(output) % 3 + 1)]
    source, folder = raw_file(tmp_path / "r.json", examples), tmp_path / "o[/red]ut"
    assert main(["--input", source, "--local_dir", str(folder), "--test-fraction", "0.3"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for output, kind, number in zip(
        outputs, ("call only", "both", "response only"), ("2 calls", "1 call", "0 calls"), strict=True
    ):
        count = len(output) % 3 + 1
        assert f" {kind} {count} " in printed and f" {number} {count} " in printed
    assert len(split_rows(folder, "test")) == int(len(examples) * 0.3)


def test_bad_raw_rows_can_be_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = raw_file(tmp_path / "r.json", [example(), {"input": "b"}])
    assert main(["--input", source, "--local_dir", str(tmp_path), "--max-bad-share", "0.5"]) == 0
    message = "r.json: 2 rows, 1 used, 1 dropped (1 with a bad instruction, row 1: is missing)"
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_missing_input_names_the_scripts_that_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "rlla_rl.json: there is no such file" in output
    assert "scripts/get_toolrl_data.py" in output and "scripts/build_rlla_raw.py" in output


def test_an_unwritable_folder_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = raw_file(tmp_path / "r.json", [example()])
    (tmp_path / "train.parquet").mkdir()  # a folder stands where the file should go
    assert main(["--input", source, "--local_dir", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "train.parquet"]
