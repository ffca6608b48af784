"""Rows in OpenAI's form reach the chat template whole, or are refused with the field that cannot be used."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verl.chat.test_chat import format_of, text_of, with_template
from verl.chat.observations import ObservationTokenizer
from verl.data.messages import read_messages, read_tools
from verl.data.tasks import TaskSet, to_task
from verl.envs.base import Observation
from verl.envs.single_turn import SingleTurnEnv
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.formats.openai import as_openai
from verl.formats.prompt import numbered_tools
from verl.sft.demonstrations import read_demonstrations
from verl.types import Message, Task, ToolCall

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "default": None}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": null}'}}
DIALOGUE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
    {"role": "user", "content": "And in Bonn?"},
]


def row(prompt: Any = DIALOGUE, **more: Any) -> dict[str, Any]:
    return {"data_source": "mine", "prompt": prompt, "reward_model": {"ground_truth": "x"}, "tools": [WEATHER], **more}


def changed(number: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**message, **fields} if place == number else message for place, message in enumerate(DIALOGUE)]


def call(**function: Any) -> list[dict[str, Any]]:
    return [{**CALL, "function": {"name": "weather", "arguments": "{}", **function}}]


def test_a_dialogue_with_calls_keeps_all_its_content() -> None:
    task = to_task(row(), "rows.jsonl#0")
    system, user, asked, answered, _ = task.prompt
    assert (system, user) == (Message("system", "Be brief."), Message("user", "Weather in Rome?"))
    assert asked.tool_calls == (ToolCall("weather", {"city": "Rome", "days": None}, "c1"),) and asked.content == ""
    assert (answered.tool_call_id, answered.content) == ("c1", "21 degrees")
    assert task.tools[0].schema == WEATHER and task.tools[0].parameters == WEATHER["function"]["parameters"]
    arguments = {"name": "weather", "arguments": {"city": "Rome", "days": None}}
    assert as_openai(asked) == {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": arguments}]}


def test_a_dialogue_with_calls_is_kept_on_disk_and_rendered_by_the_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()) + "\n")
    (task,) = TaskSet(str(path))[:1]
    assert task == to_task(row(), "rows.jsonl#0")
    tool_call_format = format_of("qwen2.5")
    text = text_of(tool_call_format, tool_call_format.task_prompt_ids(task))
    assert text == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n"
        + json.dumps(WEATHER)
        + "\n</tools><|im_end|>\n<|im_start|>user\nWeather in Rome?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": null}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n21 degrees\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd in Bonn?<|im_end|>\n<|im_start|>assistant\n"
    )


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "arguments": (
        {"prompt": changed(2, tool_calls=call(arguments="{"))},
        "prompt[2].tool_calls[0].function.arguments",
        "not JSON",
    ),
    "arguments are a list": (
        {"prompt": changed(2, tool_calls=call(arguments="[1]"))},
        "prompt[2].tool_calls[0].function.arguments",
        "is of type list",
    ),
    "no name": (
        {"prompt": changed(2, tool_calls=call(name=None))},
        "prompt[2].tool_calls[0].function.name",
        "is missing",
    ),
    "another kind of call": (
        {"prompt": changed(2, tool_calls=[{**CALL, "type": "custom"}])},
        "prompt[2].tool_calls[0].type",
        "'custom'",
    ),
    "more in a call": (
        {"prompt": changed(2, tool_calls=[{**CALL, "index": 0}])},
        "prompt[2].tool_calls[0].index",
        "cannot be used",
    ),
    "more in a function": (
        {"prompt": changed(2, tool_calls=call(output="21"))},
        "prompt[2].tool_calls[0].function.output",
        "cannot be used",
    ),
    "a user's calls": ({"prompt": changed(4, tool_calls=[CALL])}, "prompt[4].tool_calls", "role user"),
    "a user's answer": ({"prompt": changed(4, tool_call_id="c1")}, "prompt[4].tool_call_id", "role user"),
    "an image": (
        {"prompt": changed(4, content=[{"type": "image_url", "image_url": {"url": "x"}}])},
        "prompt[4].content[0]",
        "type 'image_url'",
    ),
    "a part with more": (
        {"prompt": changed(4, content=[{"type": "text", "text": "x", "cache_control": {}}])},
        "prompt[4].content[0]",
        "cache_control",
    ),
    "no role": ({"prompt": changed(4, role=None)}, "prompt[4].role", "is missing"),
    "content is a number": ({"prompt": changed(4, content=3)}, "prompt[4].content", "is of type int"),
    "tools without a function": ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    "tools without a name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
    "another kind of tool": ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    "two tools of one name": ({"tools": [WEATHER, WEATHER]}, "tools[1]", "repeats the name"),
    "tools are a text": ({"tools": "weather"}, "tools", "not JSON"),
    "a schema as a text": (
        {"tools": [{"name": "f", "parameters": "{}"}]},
        "tools[0].parameters",
        "is a text",
    ),
    "a forced choice": ({"tool_choice": "required"}, "tool_choice", "expected a gold turn to compare with"),
    "the former form": ({"functions": [WEATHER["function"]]}, "functions", "Put the functions into the column tools"),
    "one call at a time": ({"parallel_tool_calls": False}, "parallel_tool_calls", "expected a gold turn"),
    "a form of the answer": ({"response_format": {"type": "json_object"}}, "response_format", "cannot be used"),
    "variables of the template": (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs",
        "Set model.chat_template_options",
    ),
    "a system text beside the prompt": ({"system": "Be brief."}, "system", "Make it the first message"),
    "pictures": ({"images": [{"path": "a.png"}]}, "images", "cannot be used"),
    "a weight in the loss": ({"weight": 0}, "weight", "expected 1"),
    "a mask of the loss": ({"loss_mask": [0, 1]}, "loss_mask", "cannot be used"),
    "a parameter without a schema": (
        {"tools": [{"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": None}}}]},
        "tools[0].parameters.properties.b",
        "is null",
    ),
    "messages": ({"prompt": None, "messages": DIALOGUE}, "prompt", "is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_unusable_fields_are_named(case: str) -> None:
    more, field, message = BAD[case]
    with pytest.raises(DataError) as caught:
        to_task({**row(), **more}, "rows.jsonl#0")
    assert caught.value.field == field and message in str(caught.value)


def test_empty_columns_and_metadata_do_no_harm() -> None:
    same = {"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "weight": 1.0}
    empty = {"functions": [], "chat_template_kwargs": {}, "system": "", "images": [], "videos": None}
    assert to_task({**row(), **same, **empty, "ability": "math", "level": 3}, "x") == to_task(row(), "x")


def test_demonstrations_name_message_and_field_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    bad = [*DIALOGUE, {"role": "assistant", "tool_calls": call(arguments="7")}]
    path.write_text(json.dumps({"messages": bad, "tools": [WEATHER]}))
    with pytest.raises(DataError, match=r"row 0, field 'messages\[5\].tool_calls\[0\].function.arguments': is of type"):
        read_demonstrations(str(path))
    path.write_text(json.dumps({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]}))
    with pytest.raises(DataError, match=r"row 0, field 'messages\[0\].content': is empty"):
        read_demonstrations(str(path))


def test_nulls_that_arrow_fills_in_are_absent_and_those_of_json_stay(tmp_path: Path) -> None:
    """Every struct of an Arrow column has all fields of the column; a JSON schema's default may be null."""
    other = {"name": "sum", "parameters": {"type": "object", "properties": {"terms": {"type": "array"}}}}
    second = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "sum"}}]}, DIALOGUE[4]]
    rows = [row(changed(1, content="Weather in Rome?")), row(second, tools=[{"type": "function", "function": other}])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    filled = pq.read_table(tmp_path / "rows.parquet")["tools"][1].as_py()
    assert filled[0]["function"]["parameters"]["properties"]["city"] is None  # what Arrow makes of it
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plain, arrow = TaskSet(str(tmp_path / "rows.jsonl")), TaskSet(str(tmp_path / "rows.parquet"))
    assert [task.prompt for task in plain] == [task.prompt for task in arrow]
    assert plain[1].tools == arrow[1].tools and arrow[1].tools[0].schema == {"type": "function", "function": other}
    assert plain[0].tools[0].schema == WEATHER  # with its default of null


def test_nulls_that_arrow_fills_into_answers_and_further_tools_are_absent(tmp_path: Path) -> None:
    """Gold calls of different tools share one struct, too; a null in one would be one argument too many."""
    gold = [[{"name": "sum", "arguments": {"a": 1}}], [{"name": "weather", "arguments": {"city": "Rome"}}]]
    more = [
        [{"name": "sum", "parameters": {"properties": {"a": {"type": "number"}}}}],
        [{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}],
    ]
    rows = [
        {
            **row(DIALOGUE[4:], tools=None),
            "reward_model": {"ground_truth": answer},
            "extra_info": {"tools": tools, "note": note},
        }
        for answer, tools, note in zip(gold, more, ("n", None), strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    tasks = TaskSet(str(tmp_path / "rows.parquet"))
    assert [json.loads(task.answer) for task in tasks] == gold
    first, second = (SingleTurnEnv.initial_observation(task).tools for task in tasks)
    assert (list(first[0].parameters["properties"]), [each.name for each in second]) == (["a"], ["weather"])
    assert tasks[1].extra["note"] is None  # what is metadata stays as it is read


def test_csv_files_hold_json_in_their_cells_and_nothing_in_empty_ones(tmp_path: Path) -> None:
    asked = row(DIALOGUE[:2], tools=[WEATHER])
    columns = ("data_source", "prompt", "tools", "reward_model", "extra_info", "env", "reward")
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(columns)
        cells = [json.dumps(asked[name]) for name in ("prompt", "tools", "reward_model")]
        lines.writerows(
            [[asked["data_source"], *cells, '{"index": 3}', "", "math"], ["x", cells[0], "", cells[2], *[""] * 3]]
        )
    first, second = TaskSet(str(tmp_path / "rows.csv"))
    expected = to_task(asked, "rows.csv#0")
    assert (first.prompt, first.tools, first.answer) == (expected.prompt, expected.tools, expected.answer)
    assert (first.extra, first.env, first.reward) == ({"index": 3}, None, "math")
    assert (second.tools, second.extra, second.env, second.reward) == ((), {}, None, None)


def test_a_parameter_that_may_be_anything_is_listed() -> None:
    tools = read_tools([{"name": "f", "parameters": {"properties": {"a": True}}}])
    assert '{"a": {"description": "", "type": "string", "default": ""}}' in numbered_tools(tools)


def test_a_tool_may_return_nothing() -> None:
    silent = changed(3, content="")[:4]
    task = to_task(row(silent), "x")
    assert text_of(format_of("qwen2.5"), format_of("qwen2.5").task_prompt_ids(task)).count("<tool_response>") == 1


def test_texts_of_json_are_read_as_what_they_hold() -> None:
    assert read_messages(json.dumps(DIALOGUE), "prompt") == read_messages(DIALOGUE, "prompt")
    assert read_tools(json.dumps([WEATHER["function"]])) == read_tools([WEATHER])  # a bare function, too
    assert read_tools(None) == read_tools([]) == ()


def test_texts_in_parts_are_lines_of_one() -> None:
    (message,) = read_messages([{"role": "user", "content": [{"type": "text", "text": each} for each in "ab"]}], "m")
    assert message == Message("user", "a\nb")


@pytest.mark.parametrize(
    ("template", "prompt", "field"),
    [
        ("qwen2.5", changed(4, weight=0, annotations=[]), "prompt[4].weight"),  # the second is empty
        ("qwen2.5", changed(2, reasoning_content="Hm."), "prompt[2].reasoning_content"),
        ("qwen2.5", changed(4, name="Ann"), "prompt[4].name"),
        ("qwen2.5", changed(0, role="developer"), "prompt[0].content"),
        ("qwen3", changed(3, role="function", tool_call_id=None, name="weather"), "prompt[3].content"),
        ("llama3", changed(2, content="Let me see."), "prompt[2].content"),
        ("mini", changed(2, content="Let me see."), "prompt[2].tool_calls[0]"),
    ],
)
def test_a_field_dropped_by_a_template_is_named(template: str, prompt: Any, field: str) -> None:
    task = to_task(row(prompt, tools=None), "rows.jsonl#7")
    with pytest.raises(DataError, match="is dropped by the chat template") as caught:
        format_of(template).task_prompt_ids(task)
    assert caught.value.field == field


def test_fields_used_by_a_template_are_passed_on_unchanged() -> None:
    thought = [DIALOGUE[1], {**DIALOGUE[2], "reasoning_content": "I have to look."}, DIALOGUE[3]]
    tool_call_format = format_of("qwen3")
    text = text_of(tool_call_format, tool_call_format.task_prompt_ids(to_task(row(thought), "x#0")))
    assert "<think>\nI have to look.\n</think>" in text
    with pytest.raises(DataError, match=r"rejects messages with the roles .*, tool, user .*single tool"):
        format_of("llama3").task_prompt_ids(to_task(row(changed(2, tool_calls=[CALL] * 2)), "x"))


def test_calls_without_a_text_are_null_or_empty_as_the_template_knows_them() -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    of_null = "{% for m in messages %}{{ m.role }}{{ 'none' if m.content is none else m.content }}" + calls
    of_texts = "{% for m in messages %}{{ m.role + m.content }}" + calls
    task = to_task(row(DIALOGUE, tools=None), "x")
    null, empty = (
        text_of(tool_call_format, tool_call_format.task_prompt_ids(task))
        for tool_call_format in map(with_template, (of_null, of_texts))
    )
    assert null.replace("none", "") == empty and 'assistantnone{"name": "weather"' in null


def test_a_template_that_lists_no_tools_is_refused_with_a_way_out() -> None:
    message = (
        r"tokenizer in '.*' does not list tools, so .* weather, weather\(city\), weather\(days\); "
        "set model.tokenizer_path .*toolrl"
    )
    with pytest.raises(ConfigError, match=message):
        format_of("mini").task_prompt_ids(to_task(row(DIALOGUE[:2]), "rows.jsonl#0"))


# --- formats that write tools and calls themselves


def opened(name: str, task: Task, options: dict[str, Any] | None = None) -> str:
    chat = format_of("mini")  # whose template knows neither tools nor calls
    observations = ObservationTokenizer(chat, build_tool_call_format(name, options), 100)
    return text_of(chat, observations.prompt_ids(Observation(task.prompt, task.tools)))


def test_formats_render_earlier_calls_in_their_own_syntax() -> None:
    task = to_task(row(), "rows.jsonl#0")
    rlla = opened("toolrl", task)
    assert "1. Name: weather\nDescription: Weather of a city\nParameters: " in rlla and "Be brief." in rlla
    assert (
        '<user> Weather in Rome? </user>\n\n<tool_call>\n{"name": "weather", "parameters": {"city": "Rome", "days": '
        'null}}\n</tool_call>\n<obs> [{"name": "weather", "results": "21 degrees"}] </obs>\n\n<user> And in Bonn?'
        in rlla
    )
    listed = opened("tool_n1", task)
    assert '<tool_call>\n[{"name": "weather", "arguments": {"city": "Rome", "days": null}}]\n</tool_call>' in listed
    assert json.dumps(WEATHER) in listed and "<|im_start|>tool\n21 degrees" in listed


def test_formats_refuse_what_they_cannot_render() -> None:
    with pytest.raises(DataError, match=r"'prompt\[2\].tool_calls': cannot be rendered by this env.tool_call_format"):
        opened("search_r1", to_task(row(tools=None), "x"))
    with pytest.raises(
        DataError, match=r"'prompt\[0\].role': 'developer' is not supported by this env.tool_call_format"
    ):
        opened("toolrl", to_task(row(changed(0, role="developer")), "x"))
    with pytest.raises(DataError, match=r"'prompt\[4\].name': is dropped by this env.tool_call_format"):
        opened("toolrl", to_task(row(changed(4, name="Ann")), "x"))
    with pytest.raises(DataError, match=r"'prompt\[1\]': cannot be part of a prompt without a chat template"):
        opened("fence", to_task(row([DIALOGUE[1], {"role": "assistant", "content": "?"}, DIALOGUE[4]]), "x"))
    own = "Use tools.\n**Available Tools**\n1. Name: clock\nDescription: Time\nParameters: {}"
    with pytest.raises(DataError, match="lists its own tools, but not weather"):
        opened("toolrl", to_task(row(changed(0, content=own)), "x"))


def test_a_prompt_template_without_a_place_for_tools_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("Answer: {question}")
    with pytest.raises(ConfigError, match=r"would not know weather; add \{tools\} to it"):
        opened("hermes", to_task(row(DIALOGUE[:2]), "x"), {"prompt_template": str(path)})


# --- any row

markers = st.integers(100_000, 999_999).map("w{}z".format)  # that stand for nothing else, and can be found again
arguments = st.dictionaries(markers, markers | st.none() | st.booleans() | st.lists(markers, max_size=2), max_size=2)
functions = st.fixed_dictionaries(
    {"name": markers, "description": markers},
    optional={
        "parameters": st.builds(
            lambda names: {"type": "object", "properties": {name: {"type": "string"} for name in names}},
            st.lists(markers, max_size=2),
        ),
        "strict": st.booleans(),
    },
)
schemas = st.fixed_dictionaries({"type": st.just("function"), "function": functions})
calls = st.builds(
    lambda name, arguments, id: {
        **({} if id is None else {"id": id}),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    markers,
    arguments,
    st.none() | markers,
)
more = st.dictionaries(
    st.sampled_from(["reasoning_content", "weight", "refusal", "name", "audio"]), markers, max_size=1
)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """One message, as a chat template should get it."""
    role = draw(
        st.sampled_from(["user", "user", "user", "assistant", "assistant", "assistant", "tool", "system", "developer"])
    )
    made: dict[str, Any] = {"role": role, "content": draw(markers)}
    if role == "assistant" and draw(st.booleans()):
        made["tool_calls"] = draw(st.lists(calls, min_size=1, max_size=2))
        made["content"] = draw(st.sampled_from([None, "", made["content"]]))
    if role == "tool" and draw(st.booleans()):
        made["tool_call_id"] = draw(markers)
    return made | (draw(more) if draw(st.integers(0, 4)) == 0 else {})


def spelled(draw: Any, message: dict[str, Any]) -> dict[str, Any]:
    """The same message as some row might have it."""
    made = {**message, **dict.fromkeys(draw(st.sets(st.sampled_from(["refusal", "audio", "tool_calls"]))) - {*message})}
    if isinstance(message["content"], str) and draw(st.booleans()):
        made["content"] = [{"type": "text", "text": message["content"], "image_url": None}]
    if message.get("tool_calls") and draw(st.booleans()):
        made["tool_calls"] = [
            {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
            for each in message["tool_calls"]
        ]
    return made


def texts_of(value: Any) -> list[str]:
    """All texts in it, of names and of values."""
    if isinstance(value, dict):
        return [text for pair in value.items() for each in pair for text in texts_of(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts_of(each)]
    return [value] if isinstance(value, str) and value.startswith("w") and value.endswith("z") else []


UNSHOWN = ("tool_call_id", "id", "name")  # of results and calls, which stand where they belong


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3"])
@settings(max_examples=120)
@given(data=st.data())
def test_any_row_reaches_the_template_unchanged_or_is_refused(name: str, data: st.DataObject) -> None:
    dialogue = data.draw(st.lists(messages(), min_size=1, max_size=5))
    tools = data.draw(st.lists(schemas, max_size=2, unique_by=lambda tool: tool["function"]["name"]))
    prompt = [spelled(data.draw, message) for message in dialogue]
    tool_call_format = format_of(name)
    try:
        task = to_task(row(prompt, tools=data.draw(st.sampled_from([tools, json.dumps(tools)]))), "rows.jsonl#0")
        again = to_task(row([as_openai(message) for message in task.prompt], tools=tools), "rows.jsonl#0")
        ids = tool_call_format.task_prompt_ids(task)
    except DataError as error:
        assert error.field.startswith("prompt[") or "chat template rejects" in error.problem
        return
    expected = tool_call_format.tokenizer.apply_chat_template(
        dialogue, tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    assert list(ids) == expected and again == task
    text = text_of(tool_call_format, ids)
    shown = [{key: value for key, value in each.items() if key not in UNSHOWN} for each in dialogue]
    for each in shown:
        each["tool_calls"] = [made["function"] for made in each.pop("tool_calls", [])]
    thoughts = {text for each in shown for text in texts_of(each.pop("reasoning_content", None))}
    lacking = [text_ for text_ in texts_of([shown, tools]) if text_ not in text]
    assert not lacking and all(
        each["role"] == "assistant" for each in dialogue if thoughts and "reasoning_content" in each
    )


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3"])
def test_rows_of_the_common_kind_are_not_refused(name: str) -> None:
    tool_call_format = format_of(name)
    dialogue = [
        DIALOGUE[0],
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": call(arguments={"city": "Rome"})},
        *DIALOGUE[3:],
    ]
    expected = tool_call_format.tokenizer.apply_chat_template(
        dialogue, tools=[WEATHER], add_generation_prompt=True, return_dict=False
    )
    spelled = [*dialogue[:2], {**dialogue[2], "tool_calls": call(arguments='{"city": "Rome"}')}, *dialogue[3:]]
    assert list(tool_call_format.task_prompt_ids(to_task(row(spelled), "x"))) == expected
    assert asdict(to_task(row(spelled), "x")) == asdict(to_task(row(dialogue), "x"))
