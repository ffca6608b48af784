"""Formats: every format against its corpus, what any text may not do to them, and how answers come back."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT, real_data
from verl.data.tasks import TaskSet
from verl.errors import ConfigError
from verl.formats.base import (
    TOOL_CALL_FORMATS,
    Calls,
    Continue,
    Final,
    Parsed,
    ParseError,
    ToolCallFormat,
    build_tool_call_format,
)
from verl.formats.inline import InlineFormat
from verl.formats.prompt import load_template
from verl.formats.toolrl_text import call_text, listed_tools, parse_calls
from verl.types import Message, ToolCall, ToolSpec

pytestmark = pytest.mark.usefixtures("small_heap")
CORPORA = sorted((ROOT / "tests" / "verl" / "formats" / "corpora").glob("*.jsonl"))
CASES = [
    pytest.param(path.stem, json.loads(line), id=f"{path.stem}: {json.loads(line)['case']}")
    for path in CORPORA
    for line in path.read_text(encoding="utf-8").splitlines()
]
NAMES = sorted(set(TOOL_CALL_FORMATS) - {"native"})  # tests/verl/chat/test_native.py has that one
STRUCTURED = ("hermes", "toolrl", "llama3_json", "xml", "tool_n1")
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<search>", "</search>", "<answer>", "</answer>", "<code>",
    "</code>", "<python>", "</python>", "<function=f>", "<function=", "</function>", "<parameter=a>", "</parameter>",
    "<|python_tag|>", "```python", "```python\n", "```", "\n```\n", "```output", "<obs>",
)  # fmt: skip
SCRAPS = (
    *TAGS, '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}', "{", "}", "[", '"', "\\", ";",
    "\n", " ", "1", "-", "NaN", "x",
)  # fmt: skip
QUESTION = (Message("system", "Be brief."), Message("user", "2+2? {tools}"))
TOOL = ToolSpec("add", "Adds {question}", {"type": "object", "properties": {"a": {"type": "integer"}}})


@cache
def format_of(name: str) -> ToolCallFormat:
    return build_tool_call_format(name)


def offered(tools: dict[str, dict[str, Any]]) -> list[ToolSpec]:
    return [ToolSpec(name, "", {"type": "object", "properties": arguments}) for name, arguments in tools.items()]


def as_case(parsed: Parsed) -> dict[str, Any]:
    match parsed:
        case Calls(calls):
            return {"calls": [[call.name, dict(call.arguments)] for call in calls]}
        case ParseError(problem):
            return {"malformed": problem}
        case Continue():
            return {"go_on": True}
        case Final():
            return {"final": True}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_corpus(name: str, case: dict[str, Any]) -> None:
    found = as_case(format_of(name).parse(case["text"], offered(case.get("tools", {}))))
    if "malformed" in case:
        assert case["malformed"] in found["malformed"]
    else:  # compared as JSON, where 1, 1.0 and true are not the same
        expected = {key: case[key] for key in case if key not in ("case", "text", "tools")}
        assert json.dumps(found) == json.dumps(expected)


def test_every_format_has_a_corpus() -> None:
    assert {path.stem for path in CORPORA} >= {*STRUCTURED, "fence", "zerotir", "search_r1", "retool"}
    for path in CORPORA:
        assert len(path.read_text(encoding="utf-8").splitlines()) >= 25, path.name


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from(SCRAPS), max_size=30).map("".join)))
def test_nothing_raises_and_problems_are_short(name: str, text: str) -> None:
    tool_call_format = format_of(name)
    parsed = tool_call_format.parse(text)
    assert isinstance(parsed, Calls | ParseError | Continue | Final) and parsed == tool_call_format.parse(text)
    assert all(tool_call_format.stop_strings(text))
    if isinstance(parsed, ParseError):
        assert 0 < len(parsed.problem) < 300 and parsed.problem.endswith(".")
    if isinstance(parsed, Calls):
        assert parsed.calls
    assert tool_call_format.observation((Message("tool", text),), text)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_megabyte_of_anything_is_read_in_linear_time(name: str) -> None:
    """A parser that is quadratic in any of these takes minutes rather than milliseconds."""
    tool_call_format = format_of(name)
    starts = (
        *TAGS,
        '<tool_call>{"',
        '<tool_call>{"a": "',
        "<tool_call>[",
        "[",
        '{"name": "',
        " ",
        "\n",
        "<tool_call> ",
        '"',
    )
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<function=f>\n</function>", "<think></think>"
    for scrap in (
        *starts,
        *good,
        "```python\nx\n```\n",
        "<think></think><tool_call>",
        '{"name": "f", "parameters": {}};',
    ):
        text = scrap * (1_000_000 // len(scrap))
        began = time.process_time()
        tool_call_format.parse(text)
        tool_call_format.stop_strings(text)
        tool_call_format.parse(text + "```output")
        assert time.process_time() - began < 10, scrap


def test_numbers_and_nesting_that_python_refuses_are_malformed() -> None:
    for value, problem in (("1" * 5000, "too many digits"), ("[" * 100_000, "too deeply")):
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>'
        assert problem in as_case(format_of("hermes").parse(text))["malformed"]


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(TAGS)
LOOKS_LIKE_JSON = st.sampled_from(["5", "true", '"x"', "\n", "\nx\n", " 1", "{}"])
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | LOOKS_LIKE_JSON,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
TOOL_NAMES = st.from_regex(r"[A-Za-z_./-]{1,8}( [a-z]{1,4})?", fullmatch=True)
CALLS = st.lists(
    st.builds(ToolCall, TOOL_NAMES, st.dictionaries(TOOL_NAMES, VALUES, max_size=3)), min_size=1, max_size=3
).map(tuple)


KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def with_tools(calls: tuple[ToolCall, ...]) -> tuple[tuple[ToolCall, ...], list[ToolSpec]]:
    """The calls under names of their own, and tools whose schemas their arguments fit."""
    named = tuple(replace(call, name=f"{call.name}{number}") for number, call in enumerate(calls))
    types = {
        call.name: {key: {"type": KINDS.get(type(value), "null")} for key, value in call.arguments.items()}
        for call in named
    }
    return named, offered(types)


def can_be_xml(calls: tuple[ToolCall, ...]) -> bool:
    """Whether no argument holds a tag that the format itself uses, which has no escapes."""
    texts = [value for call in calls for value in call.arguments.values() if isinstance(value, str)]
    return not any(tag in value for tag in ("</parameter>", "<think>", "</think>") for value in texts)


@pytest.mark.parametrize("name", STRUCTURED)
@settings(deadline=None, max_examples=60)
@given(calls=CALLS)
def test_rendered_calls_are_read_back(name: str, calls: tuple[ToolCall, ...]) -> None:
    tool_call_format = format_of(name)
    calls, tools = with_tools(calls)
    assume(name != "xml" or can_be_xml(calls))
    text = tool_call_format.render(calls)
    for written in (text, f"<think>I could {text}</think>\n{text}", f"so {text}</think>\n{text}"):
        assert json.dumps(as_case(tool_call_format.parse(written, tools))) == json.dumps(as_case(Calls(calls)))
    for written in (f"<think>{text}", f"<think>{text}</think>", f"{text}</think>"):
        assert tool_call_format.parse(written) == Final()


@pytest.mark.parametrize("name", STRUCTURED)
@settings(deadline=None, max_examples=25)
@given(calls=CALLS)
def test_the_beginning_of_calls_is_never_other_calls(name: str, calls: tuple[ToolCall, ...]) -> None:
    tool_call_format = format_of(name)
    calls, tools = with_tools(calls)
    assume(name != "xml" or can_be_xml(calls))
    text = tool_call_format.render(calls)
    for length in range(len(text)):
        parsed = tool_call_format.parse(text[:length], tools)
        if isinstance(parsed, Calls):
            assert parsed.calls == calls[: len(parsed.calls)]


PROGRAM = "import math\n\nfor n in [1, 2]:\n    print(f'{n} < {math.pi}')"


ONE_TOOL = set(NAMES) - {*STRUCTURED, "artist_tools", "openhands", "toolrl_published"}


@pytest.mark.parametrize("name", sorted(ONE_TOOL))
def test_rendered_programs_and_queries_are_read_back_whole_or_not_at_all(name: str) -> None:
    tool_call_format = format_of(name)
    search = name in ("search_r1", "otc_search")
    call = ToolCall("search", {"query": PROGRAM}) if search else ToolCall("python", {"code": PROGRAM})
    text = tool_call_format.render((call,))
    assert tool_call_format.parse(text) == tool_call_format.parse(f"First.\n{text}") == Calls((call,))
    assert text.endswith(
        tool_call_format.stop_strings("") if name != "zerotir" else tool_call_format.stop_strings("```python")
    )
    assert not any(isinstance(tool_call_format.parse(text[:length]), Calls) for length in range(len(text)))


@pytest.mark.parametrize("name", ["hermes", "xml", "llama3_json"])
def test_a_thought_that_the_template_opens_holds_no_calls(name: str) -> None:
    tool_call_format = build_tool_call_format(name, {"in_thought": True})
    text = tool_call_format.render((ToolCall("f", {}),))
    assert tool_call_format.parse(text) == Final()
    assert tool_call_format.parse(f"hm</think>{text}") == Calls((ToolCall("f", {}),))


def test_zerotir_stops_at_the_opening_fence_then_at_the_closing_one() -> None:
    tool_call_format = format_of("zerotir")
    for written, stop in (
        ("", "```python"),
        ("So ```python", "```"),
        ("So ```python\nprint(1)", "```"),
        ("So ```python\nprint(1)```", "```python"),
        ("<think> ```python", "```"),
    ):
        assert tool_call_format.stop_strings(written) == (stop,)
    outside = build_tool_call_format("zerotir", {"calls_in_thoughts": False})
    assert outside.stop_strings("<think> ```python") == ("```python",)


def observed(name: str, written: str, *results: str, **options: Any) -> str | Sequence[Message]:
    tool_call_format = build_tool_call_format(name, options)
    assert isinstance(tool_call_format, InlineFormat)
    return tool_call_format.observation(
        [Message("tool", tool_call_format.shown(each), tool="t") for each in results], written
    )


@pytest.mark.parametrize(
    ("name", "written", "result", "seen"),
    [
        ("fence", "```python\nx\n```\n```output", "4\n", "\n4\n```\n"),
        ("fence", "```python\nx\n```\n```output\n", "4\n", "4\n```\n"),
        ("fence", "..```output", "Traceback\n  File\nValueError: no\n", "\nValueError: no\n```\n"),
        ("fence", "..```output", "Traceback\nValueError: no\n  \n", "\nValueError: no\n```\n"),
        ("fence", "..```output", "\n", "\ntimeout_decorator.timeout_decorator.TimeoutError: 'Timed Out'\n```\n"),
        ("zerotir", "```python\nx\n```", "4", "\n```output\n4\n```\n\n\n"),
        ("zerotir", "```python\nx\n```\n", "4", "```output\n4\n```\n\n\n"),
        ("retool", "<code>x</code>", "4\n", "\n<interpreter>\n4</interpreter>\n\n"),
        ("retool", "<code>x</code>", "", "\n<interpreter>\nNone</interpreter>\n\n"),
        ("search_r1", "<search>x</search>", "Doc 1", "\n\n<information>Doc 1</information>\n\n"),
        ("search_r1", "x</search>", "That was no action.", "\nThat was no action.\n"),
        ("otc_search", "<search>x</search>", "Doc 1", "\n\n<observation>Doc 1</observation>\n\n"),
        ("retool", "<code>x</code>", "4" * 9999, f"\n<interpreter>\n{'4' * 9999}</interpreter>\n\n"),  # not cut here
        ("artist", "<python>x</python>", "4", "\n<output>\n4\n</output>\n"),
    ],
)  # fmt: skip
def test_answers_go_on_in_the_policys_turn(name: str, written: str, result: str, seen: str) -> None:
    assert observed(name, written, result) == seen


def test_after_an_ended_turn_the_answer_is_a_separate_turn() -> None:
    assert observed("artist", "<python>x", "never closed") == (Message("user", "never closed"),)
    assert observed("search_r1", "It is Lisbon.", "That was no action.") == "\nThat was no action.\n"
    follow_up = format_of("retool").observation([Message("user", "And 3+3?")], "<answer>4</answer>")
    assert follow_up == (Message("user", "And 3+3?"),)


def test_results_in_turns() -> None:
    results = (Message("tool", '{"t": 21}', tool="weather"), Message("tool", "sunny", tool="sky"))
    assert format_of("hermes").observation(results, "") == format_of("xml").observation(results, "") == results
    assert format_of("tool_n1").observation(results, "") == results
    assert [each.role for each in format_of("llama3_json").observation(results, "") if isinstance(each, Message)] == [
        "ipython",
        "ipython",
    ]
    observed = '<obs> [{"name": "weather", "results": {"t": 21}}, {"name": "sky", "results": "sunny"}] </obs>'
    assert format_of("toolrl").observation(results, "") == (Message("user", observed),)
    assert format_of("toolrl").observation((Message("user", "Hi"),), "") == (Message("user", "<user> Hi </user>"),)


def test_prompts_put_the_question_into_the_recipe_prompt() -> None:
    for name in ("retool", "search_r1", "otc_search", "artist", "artist_tools"):
        system, user = format_of(name).render_prompt(QUESTION, (TOOL,))
        assert system == QUESTION[0] and isinstance(user, Message)
        assert user.content.count(QUESTION[1].content) == 1 and "{question}" not in user.content.replace(
            "Adds {question}", ""
        )
    for name in ("fence", "zerotir"):
        text = format_of(name).render_prompt(QUESTION, ())
        assert isinstance(text, str) and QUESTION[1].content in text and QUESTION[0].content not in text
    assert format_of("hermes").render_prompt(QUESTION, (TOOL,)) == QUESTION and format_of("hermes").template_tools
    (_, message) = format_of("artist_tools").render_prompt(QUESTION, (TOOL,))
    assert (
        isinstance(message, Message)
        and '"name": "add"' in message.content
        and not format_of("artist_tools").template_tools
    )


def test_system_prompts_describe_the_tools() -> None:
    system, user = format_of("tool_n1").render_prompt(QUESTION, (TOOL,))
    assert isinstance(system, Message) and user == QUESTION[1]
    assert (
        system.content.startswith("Be brief.\n\n")
        and '{"type": "function", "function": {"name": "add"' in system.content
    )
    assert format_of("tool_n1").render_prompt(QUESTION, ()) == QUESTION
    dialogue = (*QUESTION, Message("assistant", "<tool_call>..</tool_call>"), Message("tool", "4", tool="add"))
    system, user = format_of("toolrl").render_prompt(dialogue, (TOOL,))
    assert isinstance(system, Message) and isinstance(user, Message)
    assert listed_tools((system,)) == ("add",)
    assert 'Parameters: {"a": {"description": "", "type": "integer", "default": ""}}' in system.content
    assert user.content == (
        "**Dialogue Records History**\n<user> 2+2? {tools} </user>\n\n<tool_call>..</tool_call>\n"
        '<obs> [{"name": "add", "results": 4}] </obs>'
    )


def test_toolrls_own_rows_stay_as_they_are_and_its_reward_reads_the_same_calls() -> None:
    tool_call_format, calls = format_of("toolrl"), 0
    for task in TaskSet(str(real_data("toolrl", "rlla_test.parquet")), max_bad_share=1.0):
        assert tool_call_format.render_prompt(task.prompt, (TOOL,)) == task.prompt
        parsed = tool_call_format.parse(task.answer)
        if isinstance(parsed, Calls):
            calls += 1
            read = parse_calls(call_text(task.answer) or "")
            assert as_case(parsed) == {"calls": [[call["name"], call["parameters"]] for call in read]}
        else:
            assert parsed == Final() and "<tool_call>" not in task.answer
    assert calls > 10


@settings(deadline=None, max_examples=60)
@given(text=st.lists(st.sampled_from(SCRAPS), max_size=20).map("".join))
def test_the_toolrl_reward_reads_every_call_that_the_format_reads(text: str) -> None:
    parsed = format_of("toolrl").parse(text)
    if isinstance(parsed, Calls) and "think>" not in text:
        assert [each["name"] for each in parse_calls(call_text(text) or "")] == [call.name for call in parsed.calls]


PROMPTS = {
    "artist_math": "71062112ea67ba55",
    "hermes_tools": "b44621b429561cbb",
    "openhands": "65f03069277a8acc",
    "artist_tools": "8ed065efc04754b6",
    "mini": "288d164a15e6291f",
    "otc_search": "d02769dee73b81bd",
    "retool": "c5a716823a267301",
    "search_r1": "d101bafc0cb5d525",
    "tool_n1": "50f1fa338063ad4f",
    "toolrl": "9a8ab601def3b6ae",
    "torl": "891ad0355fba649e",
    "zerotir": "e2cc2159ec6e6084",
}


def test_the_prompts_of_recipes_are_those_of_earlier_runs() -> None:
    """Another text is other tokens: a policy that was trained with the earlier one would see an unknown prompt."""
    folder = ROOT / "verl" / "formats" / "prompts"
    assert {path.stem: sha256(path.read_bytes()).hexdigest()[:16] for path in folder.glob("*.txt")} == PROMPTS
    assert all(load_template(name, "").sha256.startswith(digest) for name, digest in PROMPTS.items())


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n", " \n", "\u2028"])
def test_a_prompt_file_is_verbatim_to_its_last_line_end(end: str, tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(f"User: {{question}}\r\nAssistant:{end}".encode())
    tool_call_format = build_tool_call_format("fence", {"prompt_template": str(path)})
    assert tool_call_format.render_prompt((Message("user", "2+2?"),), ()) == f"User: 2+2?\r\nAssistant:{end}"


def test_templates(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("Q: {question} in \\boxed{}\n\n", encoding="utf-8")
    template = load_template(str(path))
    assert template.fill("a {tools} {question}", "T") == "Q: a {tools} {question} in \\boxed{}\n\n"
    assert template.sha256 == sha256(template.text.encode()).hexdigest()
    tool_call_format = build_tool_call_format("retool", {"prompt_template": str(path), "raw": True})
    assert tool_call_format.render_prompt(QUESTION, ()) == "Q: 2+2? {tools} in \\boxed{}\n\n"
    assert build_tool_call_format("retool", {"prompt_template": None}).render_prompt(QUESTION, ()) == QUESTION
    path.write_text("no place", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own.txt' lacks the placeholder \{question\}"):
        build_tool_call_format("fence", {"prompt_template": str(path)})
    path.write_bytes(b"\xff{question}")
    with pytest.raises(ConfigError, match="not in UTF-8"):
        load_template(str(path))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("herms", {}, "did you mean 'hermes'"),
        ("retool", {"emptty": "x"}, "no option 'emptty'; did you mean 'empty'"),
        ("retool", {"empty": 3}, "tool-call format 'retool': option 'empty' must be of type str, not 3"),
        ("retool", {"fenced": 1}, "must be of type bool"),
        ("fence", {"prompt_template": "trl"}, "did you mean 'torl'"),
        ("fence", {"prompt_template": None}, "raw=true skips the chat template"),
        ("verl.formats.base:TOOL_CALL_FORMATS", {}, "must be a class or a function"),
    ],
)
def test_bad_settings_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tool_call_format(name, options)
    assert message in str(caught.value)


def test_the_page_documents_every_format() -> None:
    page = (ROOT / "docs" / "tool_call_formats.md").read_text(encoding="utf-8")
    assert {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")} == set(TOOL_CALL_FORMATS)


EDITOR = {
    "command": {"type": "string", "enum": ["view", "create"]},
    "path": {"type": "string"},
    "file_text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "view_range": {"$ref": "#/$defs/Range"},
    "line": {"allOf": [{"$ref": "#/$defs/Line"}]},
    "again": {"$ref": "#/$defs/Loop"},
    "odd": {"type": 5},
}
DEFINITIONS = {
    "Range": {"type": "array", "items": {"type": "integer"}},
    "Line": {"type": "integer"},
    "Loop": {"$ref": "#/$defs/Loop"},
}


@pytest.mark.parametrize(
    ("argument", "text", "value"),
    [
        ("command", "create", "create"),
        ("path", "7", "7"),
        ("file_text", '{"a": 1}', '{"a": 1}'),
        ("file_text", "null", None),
        ("view_range", "[1, 2]", [1, 2]),
        ("line", "3", 3),
        ("again", "3", "3"),
        ("odd", "3", "3"),
    ],
)
def test_texts_are_read_by_the_schemas_of_real_tools(argument: str, text: str, value: Any) -> None:
    tools = [ToolSpec("edit", "", {"type": "object", "properties": EDITOR, "$defs": DEFINITIONS})]
    written = f"<function=edit>\n<parameter={argument}>\n{text}\n</parameter>\n</function>"
    assert format_of("xml").parse(written, tools) == Calls((ToolCall("edit", {argument: value}),))


@pytest.mark.parametrize("parameters", [{}, {"properties": []}, {"properties": {"a": None}}, {"properties": None}])
def test_a_schema_without_types_leaves_texts_unchanged(parameters: dict[str, Any]) -> None:
    written = "<function=f><parameter=a>1</parameter></function>"
    assert format_of("xml").parse(written, [ToolSpec("f", "", parameters)]) == Calls((ToolCall("f", {"a": "1"}),))
