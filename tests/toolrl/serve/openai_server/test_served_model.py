"""The format of a trained model, from the record of its run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import real_data
from tests.toolrl.serve.openai_server.test_serve import SETTINGS, make_run
from toolrl.serve.openai_server.served_model import TrainedFormat, TrainedModel, find_model, trained_format
from verl.data.rows import read_rows
from verl.embedded import embedded_path
from verl.errors import ConfigError
from verl.formats.prompt import numbered_tools
from verl.types import ToolSpec

TOOL = re.compile(r"^\d+\. Name: (.*?)\nDescription: (.*?)\nParameters: (.*?)$(?=\n\d+\. Name: |\n\n|\Z)", re.M | re.S)
TEMPLATES = Path(__file__).parents[3] / "verl" / "chat" / "templates"


def of(settings: dict[str, Any], chat_template: str = "") -> TrainedFormat:
    return trained_format(TrainedModel(Path("m"), settings), chat_template)


def test_a_run_a_checkpoint_and_its_model_are_the_same_model(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    checkpoint = run / "checkpoints" / "step-000048"
    found = [find_model(str(each)) for each in (run, checkpoint, checkpoint / "hf")]
    assert {each.folder for each in found} == {checkpoint / "hf"}
    assert all(each.settings == SETTINGS for each in found)
    assert find_model("embedded") == find_model("embedded:model") == TrainedModel(Path(embedded_path("embedded:model")))


def test_the_best_checkpoint_is_the_one_that_its_pointer_names(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "checkpoints" / "step-000048").rename(run / "checkpoints" / "step-000024")
    (run / "checkpoints" / "best.json").write_text(json.dumps({"folder": "step-000024"}))
    assert find_model(str(run), "best").folder.parent.name == "step-000024"
    with pytest.raises(ConfigError, match=r"latest.json names step-000048, which has no model"):
        find_model(str(run))


@pytest.mark.parametrize("source", ["embedded:train.parquet", "toolrl/rlla_test.parquet"])
def test_the_prompt_of_the_rows_gives_back_their_system_messages(source: str) -> None:
    """Of every row: its own list of tools, as OpenAI's schemas, under the template that was found in the first rows."""
    file = source if source.startswith("embedded:") else str(real_data(*source.split("/")))
    found = of({"data.train_files": [file], "env.tool_call_format": None})
    assert found.name == "toolrl" and found.prompt is not None
    count = 0
    for row in read_rows(embedded_path(file)):
        system = row["prompt"][0]["content"]
        listed = TOOL.findall(system)
        specs = [ToolSpec(name, text, {"properties": json.loads(values)}) for name, text, values in listed]
        assert found.prompt.fill("", numbered_tools(specs)) == system
        count += 1
    assert count >= 80


def test_rows_with_several_prompts_are_refused(tmp_path: Path) -> None:
    listing = "**Available Tools**\n1. Name: f\nDescription: F.\nParameters: {}"
    rows = [{"prompt": [{"role": "system", "content": f"{head}\n{listing}"}]} for head in ("A.", "B.")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="several system prompts around their tools; choose one"):
        of({"data.train_files": [str(tmp_path / "rows.jsonl")]})


def test_the_record_comes_first_then_rows_then_reward_then_chat_template(tmp_path: Path) -> None:
    assert of(
        {
            "env.tool_call_format": "tags",
            "env.tool_call_format_options": {"call_tag": "py"},
            "env.name": "tool",
            "data.prompt_template": "retool",
            "model.chat_template_options": {"enable_thinking": False},
        }
    ) == TrainedFormat(
        "tags", {"call_tag": "py", "prompt_template": "retool"}, None, {"enable_thinking": False}, separate_turns=True
    )
    tools = '<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>'
    row = {"prompt": [{"role": "system", "content": f"Use\n{tools}\nwell."}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    found = of({"data.train_files": [str(tmp_path / "rows.jsonl")], "reward.name": "rlla"})
    assert found.prompt is not None
    assert (found.name, found.prompt.text) == ("tool_n1", "Use\n<tools>\n{tools}\n</tools>\nwell.")
    assert of({"reward.name": "tool_n1", "data.train_files": ["gone.parquet"]}).name == "tool_n1"
    assert of({}, (TEMPLATES / "qwen2.5.jinja").read_text()).name == "hermes"
    llama = '{{ tools }} {"name": function name, "parameters": dictionary of argument name and its value}'
    assert of({}, llama).name == "llama3_json"
    with pytest.raises(ConfigError, match=r"its chat template lists no tools, .*; set --tool-call-format"):
        of({"reward.name": "math"}, "{{ messages }}")


def test_demonstrations_name_the_format_too(tmp_path: Path) -> None:
    """SFT has no env.tool_call_format: its record has the format of the schemas, and texts that list tools have
    theirs."""
    model = TrainedModel(Path("m"), {"data.train_files": ["gone.jsonl"]}, {"tool_call_format": "native"})
    assert trained_format(model, "{{ tools }}").name == "native"
    listing = "**Available Tools**\n1. Name: f\nDescription: F.\nParameters: {}"
    for row in (
        {"instruction": listing, "input": "a", "output": "b"},
        {"messages": [{"role": "system", "content": listing}, {"role": "user", "content": "a"}]},
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        assert of({"data.train_files": [str(tmp_path / "rows.jsonl")]}, "{{ tools }} <tool_call>").name == "toolrl"
