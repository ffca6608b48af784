"""Published layouts, from a file to a prompt and a scored gold turn. One row each in the publisher's fields, types and
syntax, with texts of our own:

xLAM       https://huggingface.co/datasets/Salesforce/xlam-function-calling-60k (card, "JSON Data Format"): query,
           tools and answers are texts, the latter two JSON; a parameter may be named `type`
Seal-Tools, ToolAlpaca   MadeAgents/Hammer, data/test/original: query, tools, answers as lists
ToolACE    https://huggingface.co/datasets/Team-ACE/ToolACE (rows as its users quote them): system, conversations
           [{from: user | assistant | tool, value}]; calls without arguments, names with brackets
APIGen-MT  https://huggingface.co/datasets/Salesforce/APIGen-MT-5k (card, "ShareGPT format"; viewer): conversations
           [{from: human | gpt | function_call | observation, value}], tools (JSON text), system; results may be empty
Hermes     https://huggingface.co/datasets/NousResearch/hermes-function-calling-v1 (card): conversations [{from:
           system | human | gpt | tool, value}], tools (JSON text or "null"), category, subcategory, task; calls as
           Python dicts, line breaks also as the letters \\n
ToolMind   https://huggingface.co/datasets/Nanbeige/ToolMind (viewer), neulab/agent-data-protocol f137bb2,
           datasets/toolmind/sample_raw.json: conversations [{role, content, tool_calls: [{function}]}], tools with
           `parameters` or `arguments`; the last turn begins with <think>
toolcall   huggingface/trl 0423cdb, scripts/generate_toolcall_dataset.py: messages, tools; `use_json` of datasets
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import real_data
from tests.support.tiny import save_tiny_model
from tests.verl.chat.test_chat import TEMPLATES
from toolrl.check.lab.__main__ import try_rewards
from toolrl.formats.hermes import HermesFormat
from verl.build.run import load_chat_template
from verl.chat.template import ChatTemplate
from verl.config.schema import ModelConfig
from verl.data.layouts import as_openai_row, layouts
from verl.data.report import RowReport
from verl.data.tasks import TaskSet
from verl.errors import DataError
from verl.scoring.rewards import build_rewards
from verl.sft.demonstrations import read_demonstrations

XLAM = {
    "id": 1,
    "query": "Find the sum of all the multiples of 3 and 5 between 1 and 1000.",
    "tools": json.dumps(
        [
            {
                "name": "sum_of_multiples",
                "description": "Find the sum of all multiples of specified numbers within a range.",
                "parameters": {
                    "lower_limit": {"type": "int", "description": "The start of the range"},
                    "multiples": {"type": "List[int]", "description": "The numbers"},
                    "type": {"description": "A type", "type": "str", "default": "all"},
                    "unit": {"type": "str, optional", "description": "A unit"},
                    "upper_limit": {"type": "int", "description": "The end", "default": 1000},
                },
            }
        ]
    ),
    "answers": json.dumps([{"name": "sum_of_multiples", "arguments": {"lower_limit": 1, "multiples": [3, 5]}}]),
}
SEAL_TOOLS = {
    "query": "Tell me the net income of a revenue of 0.29 and expenses of 40.7.",  # words: allowed
    "tools": [
        {
            "name": "calculateNetIncome",
            "description": "Calculate the net income of a business",
            "parameters": {
                "revenue": {"type": "float", "description": "r"},
                "expenses": {"type": "float", "description": "e"},
            },
            "required": ["revenue", "expenses"],
        }
    ],
    "answers": [{"tool": "calculateNetIncome", "parameters": {"revenue": 0.29, "expenses": 40.7}}],
}
TOOL_ALPACA = {
    "query": "Can you check if today is a public holiday in China?",
    "tools": [
        {
            "name": "IsTodayPublicHoliday",
            "description": "Is today a public holiday",
            "parameters": {
                "countryCode": {"type": "string", "description": "Two characters", "required": True},
                "countyCode": {"type": "string", "description": "", "required": False},
            },
        }
    ],
    "answers": [{"name": "IsTodayPublicHoliday", "arguments": {"countryCode": "CN"}}],
}
TOOLACE = {
    "system": "Today is 2024-09-15, Sunday. You are an expert in composing functions. Here is a list of functions "
    'in JSON format that you can invoke:\n[{"name": "Market Trends API", "description": "Get the market trends", '
    '"parameters": {"type": "dict", "properties": {"trend_type": {"description": "Type of market trend", "type": '
    '"string"}, "limit": {"description": "count", "type": "int"}}, "required": ["trend_type"]}, "required": null}, '
    '{"name": "User Feed (Video Posts) V2", "description": "Posts", "parameters": {"type": "dict", "properties": {}, '
    '"required": []}, "required": null}]. \n'
    "Should you decide to return the function call(s). \nPut it in the format of [func1(params_name=params_value)]",
    "conversations": [
        {"from": "user", "value": "What are the top trends in stocks?"},
        {"from": "assistant", "value": '[Market Trends API(trend_type="stock", limit=2)]'},
        {"from": "tool", "value": '[{"name": "Market Trends API", "results": {"trends": ["up"]}}]'},
        {"from": "assistant", "value": "Stocks go up."},
        {"from": "user", "value": "And the feed?"},
        {"from": "assistant", "value": '[User Feed (Video Posts) V2(), Market Trends API(trend_type="feed")]'},
    ],
}
BOOKING = {
    "name": "get_user_details",
    "description": "Get the details of an user.",
    "parameters": {"type": "object", "properties": {"user_id": {"type": "string"}}, "required": ["user_id"]},
}
THINK = {
    "name": "think",
    "description": "Append a thought to the log.",
    "parameters": {"type": "object", "properties": {"thought": {"type": "string"}}, "required": ["thought"]},
}
APIGEN = {
    "conversations": [
        {"from": "human", "value": "Please cancel my reservation."},
        {"from": "gpt", "value": "What is your user id?"},
        {"from": "human", "value": "mia_li_3668"},
        {"from": "function_call", "value": '{"name": "get_user_details", "arguments": {"user_id": "mia_li_3668"}}'},
        {"from": "observation", "value": '{"name": "Mia Li"}'},
        {"from": "function_call", "value": '{"name": "think", "arguments": {"thought": "It can be cancelled."}}'},
        {"from": "observation", "value": ""},
        {"from": "gpt", "value": "It is cancelled."},
        {"from": "human", "value": "Thanks."},
    ],
    "tools": json.dumps([BOOKING, THINK]),
    "system": "# Airline Agent Policy\nThe current time is 2024-05-15 15:00:00 EST.",
}
HERMES_SYSTEM = (
    "You are a careful AI model. Functions are in <tools> </tools>.\n<tools>\n[{'type': 'function'}]\n</tools>\nAnswer "
    "with <tool_call> </tool_call> as in\n<tool_call>\n{'arguments': <args-dict>, 'name': <name>}\n</tool_call>\n"
)
HERMES = {
    "id": "85f1d4c8",
    "conversations": [
        {"from": "system", "value": HERMES_SYSTEM},
        {"from": "human", "value": "Who is mia?"},
        {
            "from": "gpt",
            "value": "<tool_call>\n{'arguments': {'user_id': 'mia'}, 'name': 'get_user_details'}\n</tool_call>\n"
            '<tool_call>\\n{"name": "get_user_details", "arguments": {"user_id": "mia_2"}}\\n</tool_call>\\n',
        },
        {"from": "tool", "value": "<tool_response>\n{}\n</tool_response>\n<tool_response>\n[1]\n</tool_response>"},
        {"from": "gpt", "value": "No one."},
    ],
    "tools": json.dumps([{"type": "function", "function": BOOKING}]),
    "category": "Identity",
    "subcategory": "Users",
    "task": "Look up a user",
}
TOOL_MIND: dict[str, Any] = {
    "conversations": [
        {"role": "user", "content": "What's the current time in New York?"},
        {
            "tool_calls": [{"function": {"name": "get_current_time", "arguments": {"timezone": "America/New_York"}}}],
            "role": "assistant",
            "content": "",
        },
        {"role": "tool", "content": {"time": "06:22"}},
        {"role": "assistant", "content": "<think>\nThe user asks for New York.\n</think>\n\nIt is 06:22."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "type": "function",
                "function": {
                    "name": "get_current_time",
                    "description": "Get the current time",
                    "arguments": {
                        "timezone": {"type": "str", "description": "The timezone"},
                        "zone": {"type": "str", "description": "A zone", "default": "UTC"},
                    },
                },
            },
        }
    ],
}
TOOLCALL = {
    "messages": [
        {"role": "user", "content": "Set a timer for 10 minutes."},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "start_timer", "arguments": {"duration": 600}}}],
        },
        {"role": "tool", "name": "start_timer", "content": "600"},
        {"role": "assistant", "content": "Timer set for 10 minutes."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "start_timer",
                "description": "Starts a timer.",
                "parameters": {
                    "type": "object",
                    "properties": {"duration": {"type": "integer"}},
                    "required": ["duration"],
                },
            },
        }
    ],
}
# {layout: (row, the gold turn of every task: calls, or a text)}
PUBLISHED: Mapping[str, tuple[dict[str, Any], list[Any]]] = {
    "xlam": (XLAM, [[("sum_of_multiples", {"lower_limit": 1, "multiples": [3, 5]})]]),
    "seal-tools": (SEAL_TOOLS, [[("calculateNetIncome", {"revenue": 0.29, "expenses": 40.7})]]),
    "tool-alpaca": (TOOL_ALPACA, [[("IsTodayPublicHoliday", {"countryCode": "CN"})]]),
    "toolace": (
        TOOLACE,
        [
            [("Market Trends API", {"trend_type": "stock", "limit": 2})],
            "Stocks go up.",
            [("User Feed (Video Posts) V2", {}), ("Market Trends API", {"trend_type": "feed"})],
        ],
    ),
    "apigen-mt": (
        APIGEN,
        [
            "What is your user id?",
            [("get_user_details", {"user_id": "mia_li_3668"})],
            [("think", {"thought": "It can be cancelled."})],
            "It is cancelled.",
        ],
    ),
    "hermes": (
        HERMES,
        [[("get_user_details", {"user_id": "mia"}), ("get_user_details", {"user_id": "mia_2"})], "No one."],
    ),
    "toolmind": (
        TOOL_MIND,
        [[("get_current_time", {"timezone": "America/New_York"})], TOOL_MIND["conversations"][-1]["content"]],
    ),
    "trl toolcall": (TOOLCALL, [[("start_timer", {"duration": 600})], "Timer set for 10 minutes."]),
}
# {layout: the tools' parameters}
PARAMETERS: Mapping[str, Any] = {
    "xlam": {
        "type": "object",
        "properties": {
            "lower_limit": {"type": "integer", "description": "The start of the range"},
            "multiples": {"type": "array", "description": "The numbers"},
            "type": {"type": "string", "description": "A type", "default": "all"},
            "unit": {"type": "string", "description": "A unit"},
            "upper_limit": {"type": "integer", "description": "The end", "default": 1000},
        },
        "required": ["lower_limit", "multiples"],
    },
    "seal-tools": {
        "type": "object",
        "properties": {
            "revenue": {"type": "number", "description": "r"},
            "expenses": {"type": "number", "description": "e"},
        },
        "required": ["revenue", "expenses"],
    },
    "tool-alpaca": {
        "type": "object",
        "properties": {
            "countryCode": {"type": "string", "description": "Two characters"},
            "countyCode": {"type": "string", "description": ""},
        },
        "required": ["countryCode"],
    },
    "toolace": {
        "type": "object",
        "properties": {
            "trend_type": {"description": "Type of market trend", "type": "string"},
            "limit": {"description": "count", "type": "integer"},
        },
        "required": ["trend_type"],
    },
    "toolmind": {
        "type": "object",
        "properties": {
            "timezone": {"type": "string", "description": "The timezone"},
            "zone": {"type": "string", "description": "A zone", "default": "UTC"},
        },
        "required": ["timezone"],
    },
}
SYSTEMS = {"toolace": "Today is 2024-09-15, Sunday.", "apigen-mt": APIGEN["system"]}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    """With Qwen2.5's chat template, which lists tools."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text((TEMPLATES / "qwen2.5.jinja").read_text())
    return load_chat_template(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("layout", PUBLISHED)
def test_a_published_row_goes_from_its_file_to_a_prompt_and_a_reward(
    layout: str, chat: ChatTemplate, tmp_path: Path
) -> None:
    given, golds = PUBLISHED[layout]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(given))
    tasks = TaskSet(str(path))
    found = [task.gold for task in tasks]
    assert [
        [(call.name, dict(call.arguments)) for call in gold.tool_calls] or gold.content for gold in found if gold
    ] == golds
    read = as_openai_row(given)
    for task in tasks:
        before = [_plain(each) for each in read["messages"][: len(task.prompt)]]
        expected = chat.tokenizer.apply_chat_template(
            before, tools=read["tools"], add_generation_prompt=True, tokenize=False
        )
        assert chat.tokenizer.decode(chat.task_prompt_ids(task)) == expected
        assert "<tools> [{" not in expected and "composing functions" not in expected
    report = try_rewards(build_rewards("auto"), tasks, tool_call_format=HermesFormat())
    gold = report.stats["gold"]
    assert report.violations == [] and gold.responses == gold.at_maximum == len(golds)
    assert len(read_demonstrations(str(path))[0].trained) == len(golds)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as the template gets it: a call without text has no content."""
    return {"content": None, **message}


@pytest.mark.parametrize("layout", PARAMETERS)
def test_the_parameters_become_a_json_schema(layout: str) -> None:
    tool, *_ = as_openai_row(PUBLISHED[layout][0])["tools"]
    assert tool["function"]["parameters"] == PARAMETERS[layout]


@pytest.mark.parametrize("layout", PUBLISHED)
def test_system_text_is_kept_without_its_call_instructions(layout: str) -> None:
    first = as_openai_row(PUBLISHED[layout][0])["messages"][0]
    assert first == {"role": "system", "content": SYSTEMS[layout]} if layout in SYSTEMS else first["role"] == "user"


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        (HERMES_SYSTEM, []),
        (f"Be brief.\n{HERMES_SYSTEM}", ["Be brief."]),
        (f"{HERMES_SYSTEM}\nToday is Monday.", ["Today is Monday."]),
        ("Other text. <tools> [] </tools>", ["Other text."]),
        ("<tools> [] </tools>", []),
        ("Without a list.", ["Without a list."]),
    ],
)
def test_system_text_beside_the_tools_of_hermes_is_kept(system: str, kept: list[str]) -> None:
    turns = HERMES["conversations"][1:]
    for row in (
        {"conversations": [{"from": "system", "value": system}, *turns]},
        {"conversations": turns, "system": system},
    ):
        messages = as_openai_row(HERMES | row)["messages"]
        assert [each["content"] for each in messages if each["role"] == "system"] == kept


INSTRUCTIONS = "without the instructions about tools in their system text"
END = "without the turns after the last one of the assistant"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([XLAM, TOOL_MIND, TOOLCALL], "3 rows with 5 tasks, 5 used, 0 dropped"),
        ([TOOLACE, HERMES, HERMES], f"3 rows with 7 tasks, 7 used (3 {INSTRUCTIONS}), 0 dropped"),
        ([APIGEN], f"1 rows with 4 tasks, 4 used (1 {END}), 0 dropped"),
        ([TOOLACE, APIGEN, {}], f"3 rows with 8 tasks, 7 used (1 {INSTRUCTIONS}; 1 {END}), 1 dropped"),
    ],
)
def test_the_report_counts_the_rows_whose_texts_are_left_out(rows: list[Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks, demonstrations = TaskSet(str(path), 1).report, RowReport(str(path))
    assert str(tasks).startswith(f"rows.jsonl: {message}")
    read_demonstrations(str(path), 1, demonstrations)
    assert demonstrations.notes == tasks.notes


def test_a_row_without_tools_is_read_and_what_is_around_a_function_is_kept() -> None:
    chat = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello!"}]
    assert as_openai_row(HERMES | {"tools": "null", "conversations": chat})["tools"] == []
    (tool,) = as_openai_row(TOOL_MIND | {"tools": [{**TOOL_MIND["tools"][0], "output": "a time"}]})["tools"]
    assert tool["output"] == "a time" and tool["function"]["name"] == "get_current_time"


def test_trls_parquet_holds_json_texts(tmp_path: Path) -> None:
    """As `push_to_hub` of its script writes it: messages of several keys are JSON texts, of Arrow's type for them."""
    datasets = pytest.importorskip("datasets")
    other = json.loads(json.dumps(TOOLCALL).replace("start_timer", "set_alarm").replace("duration", "seconds"))
    other["messages"][1]["tool_calls"][0]["function"]["arguments"]["label"] = None
    rows = {key: [TOOLCALL[key], other[key]] for key in TOOLCALL}
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_dict(rows, on_mixed_types="use_json").to_parquet(str(path))
    tasks = list(TaskSet(str(path)))
    assert [dict(call.arguments) for task in tasks if task.gold for call in task.gold.tool_calls] == [
        {"duration": 600},
        {"seconds": 600, "label": None},
    ]
    assert [tool.schema for tool in tasks[2].tools] == other["tools"]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (XLAM | {"answers": "[{"}, "answers", "is not JSON"),
        (XLAM | {"answers": '[{"name": "f", "name": "g"}]'}, "answers[0]", "has the key 'name' twice"),
        (XLAM | {"answers": [{"arguments": {}}]}, "answers[0]", "a call without a name"),
        (XLAM | {"tools": '"x"'}, "tools", "is of type str"),
        (XLAM | {"tools": ["x"]}, "tools[0]", "is of type str"),
        (TOOLACE | {"system": "[{"}, "system", "invalid JSON"),
        (
            TOOLACE | {"conversations": [{"from": "assistant", "value": "[f(1)]"}]},
            "conversations[0].value",
            "cannot be read",
        ),
        (
            APIGEN | {"conversations": [{"from": "no one", "value": "x"}]},
            "conversations[0]",
            "is no turn; expected {from:",
        ),
        (APIGEN | {"conversations": [{"from": "function_call", "value": "{"}]}, "conversations[0].value", "not JSON"),
        (
            APIGEN | {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": NaN}}'}]},
            "conversations[0].value.arguments.x",
            "NaN is not a number",
        ),
        (
            HERMES | {"conversations": [{"from": "gpt", "value": "<tool_call>{}"}]},
            "conversations[0].value",
            "without an end",
        ),
        (XLAM | {"query": 3}, "", "query (int), tools (str), answers (str), which are no known layout"),
        ({}, "", "data.columns={theirs: ours}, or convert rows with data.map=file.py:function"),
    ],
)
def test_a_row_of_a_known_layout_that_cannot_be_read_is_named(change: Any, field: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        as_openai_row(change)
    assert caught.value.field == field and message in str(caught.value) and caught.value.hint


def test_a_call_after_a_text_belongs_to_the_same_turn() -> None:
    calls = [{"from": "function_call", "value": '{"name": "get_user_details", "arguments": {"user_id": "a"}}'}] * 2
    turns = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "Let me see."}, *calls]
    _, turn = as_openai_row(APIGEN | {"system": "", "conversations": turns})["messages"]
    assert turn["content"] == "Let me see." and len(turn["tool_calls"]) == 2


def test_every_layout_is_named_once() -> None:
    assert len({each.name for each in layouts()}) == len(layouts())


@pytest.mark.parametrize(
    ("file", "used"), [("sealtools_test", 294), ("toolalpaca_test", 108), ("glaive_toolcall_en", 957)]
)
def test_whole_published_files(file: str, used: int) -> None:
    """Six rows of ToolAlpaca call tools that they do not list."""
    tasks = TaskSet(str(real_data("toolcalls", f"{file}.json")), max_bad_share=0.06)
    assert len(tasks) == used and all(task.gold is not None for task in tasks)
    assert all(error.field.endswith("function.name") for error in tasks.report.bad)
