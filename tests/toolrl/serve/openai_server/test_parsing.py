"""Responses as content and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.test_docs import quickstart_files
from tests.toolrl.envs.agent.play import WEATHER, ask, chat, session, user
from tests.verl.chat.test_chat import TEMPLATES, with_template
from tests.verl.chat.test_native import QWEN_RESPONSES, native
from toolrl.envs.agent.requests import ChatResponse
from toolrl.serve.openai_server.parsing import AssistantMessage, ResponseReader
from verl.chat.observations import ObservationTokenizer
from verl.formats.base import TOOL_CALL_FORMATS, Calls, Parsed, build_tool_call_format
from verl.formats.inline import InlineFormat
from verl.types import ToolCall, ToolSpec

RAIN = ToolCall("get_rain", {"city": "Kala"})
RAIN_LINE = '{"name": "get_rain", "parameters": {"city": "Kala"}}'
TAGS = ["think", "tool_call", "code", "search", "answer", "python"]
pieces = st.sampled_from(
    [
        *(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")),
        *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<|python_tag|>"),
        *("```python\n", "\n```\n", "```output", "x = 1", " ", "\n", "<", "[", "]", "Hello"),
        *('{"name": "f", ', '"arguments": {"a": 1}}', '"parameters": {}}', RAIN_LINE),
    ]
)


def reader(name: str) -> ResponseReader:
    return ResponseReader(build_tool_call_format(name))


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("toolrl", f"<think> I look. </think>\n<tool_call>\n{RAIN_LINE}\n</tool_call>", "<think> I look. </think>"),
        (
            "toolrl",
            f"<think> a </think>\n<tool_call>\n{RAIN_LINE}\n</tool_call>\n<response> Wait. </response>",
            "<think> a </think>\n<response> Wait. </response>",
        ),
        (
            "tool_n1",
            '<think> a </think>\n<tool_call>\n[{"name": "get_rain", "arguments": {"city": "Kala"}}]\n</tool_call>',
            "<think> a </think>",
        ),
        ("hermes", 'Yes.\n<tool_call>\n{"name": "get_rain", "arguments": {"city": "Kala"}}\n</tool_call>', "Yes."),
        ("xml", "<function=get_rain>\n<parameter=city>\nKala\n</parameter>\n</function>", ""),
        ("llama3_json", f"<think>a</think>{RAIN_LINE}", "<think>a</think>"),
    ],
)
def test_text_around_the_calls_is_content(name: str, text: str, answer: str) -> None:
    assert reader(name).read(text) == AssistantMessage(answer, (RAIN,))


def test_text_after_native_calls_is_content_where_the_template_closes_them() -> None:
    chat = with_template((TEMPLATES / "qwen2.5.jinja").read_text())
    chat.tokenizer.response_template = QWEN_RESPONSES
    used = ResponseReader(native(chat))
    calls = '<tool_call>\n{"name": "get_rain", "arguments": {"city": "Kala"}}\n</tool_call>'
    text = f"Yes.\n{calls}\n{calls}\nI wait."
    assert used.read(text) == AssistantMessage("Yes.\nI wait.", (RAIN, RAIN))
    assert [used.certain_content(text[:end]) for end in (4, 20, len(text))] == ["Yes.", "Yes.", "Yes."]


@pytest.mark.parametrize(
    ("name", "text", "content", "code"),
    [
        ("retool", "Let me. <code>\n```python\nprint(1)\n```\n</code>", "Let me. ", "print(1)"),
        ("fence", "A ```python\nprint(1)\n```\n```output\nmade up", "A ", "print(1)"),
        ("fence", "A ```output\n b ```python\nprint(1)\n```\n```output", "A ```output\n b ", "print(1)"),
        ("zerotir", "A\n```python\nprint(1)\n```\n```output\n1\n```\nand ```python\n2\n```", "A\n", "print(1)"),
    ],
)
def test_a_format_that_pauses_has_one_call_and_its_content_as_written(
    name: str, text: str, content: str, code: str
) -> None:
    assert reader(name).read(text) == AssistantMessage(content, (ToolCall("python", {"code": code}),))


@pytest.mark.parametrize("text", ["Wait. <code>", "<code>\n", "<code>1</code> and <code>"])
def test_retools_opening_tag_is_content_until_it_has_a_call(text: str) -> None:
    found = reader("retool").read(text)
    assert found.content == ("" if found.calls else text)


@pytest.fixture
def quickstart(tmp_path: Path) -> str:
    """The name of the format of docs/quickstart/tool_call_format.md."""
    file = tmp_path / "my_format.py"
    file.write_text(quickstart_files()["my_format.py"])
    return f"{file}:CallFormat"


def streamed(used: ResponseReader, text: str) -> str:
    """The content that a server has sent before the response is complete. It never takes a character back."""
    sent = ""
    for end in range(len(text) + 1):
        certain = used.certain_content(text[:end])
        assert certain.startswith(sent)
        sent = certain
    return sent


CALL_LINE = 'CALL rain {"city": "Oslo"}'
RAIN_IN_OSLO = ToolCall("rain", {"city": "Oslo"})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I will look it up.\n{CALL_LINE}", "I will look it up.", 1),
        (f"{CALL_LINE}\nI wait.", "I wait.", 1),
        (f"One.\n{CALL_LINE}\n{CALL_LINE}\n\nTwo {{}}.\n", "One.\nTwo {}.", 2),
        ("CALL rain {", "CALL rain {", 0),
        ("No CALL rain {}.", "No CALL rain {}.", 0),
        (f"<think>a</think>\n  \n{CALL_LINE}", "<think>a</think>", 1),
    ],
)
def test_a_format_of_ones_own_is_split_by_its_parser(text: str, content: str, calls: int, quickstart: str) -> None:
    used = reader(quickstart)
    assert used.read(text) == AssistantMessage(content, (RAIN_IN_OSLO,) * calls)
    assert content.startswith(streamed(used, text))


def test_a_format_without_a_base_class_is_split_too(quickstart: str) -> None:
    own = build_tool_call_format(quickstart)

    class Bare:
        def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
            return own.parse(written, tools)

        def stop_strings(self, written: str) -> tuple[str, ...]:
            return ()

    used = ResponseReader(Bare())  # type: ignore[arg-type]
    assert used.read(f"Yes.\n{CALL_LINE}") == AssistantMessage("Yes.", (RAIN_IN_OSLO,))
    assert used.certain_content("Yes.") == "" and used.stop_strings == () and used.single_tool is None


@pytest.mark.parametrize("name", [*sorted(TOOL_CALL_FORMATS.keys() - {"native"}), "quickstart"])
def test_an_agent_gets_the_text_and_the_calls_of_every_format(name: str, quickstart: str) -> None:
    """Through a session's tokens, as through a server."""
    style = build_tool_call_format(quickstart if name == "quickstart" else name)
    call = style.call("print(1)") if isinstance(style, InlineFormat) else ToolCall("weather", {"city": "Oslo"})
    written = 'CALL weather {"city": "Oslo"}' if name == "quickstart" else style.render((call,))
    text = written if name == "llama3_json" else f"I look.\n{written}"  # its calls are the whole response
    used, opening = ResponseReader(style), "```python"
    before, _, rest = text.partition(opening)
    pieces = (before + opening, rest) if style.turns_per_call == 2 else (text,)  # zerotir pauses twice

    async def asked() -> ChatResponse:
        observations = ObservationTokenizer(chat(), style, 64)
        own, _ = session(*pieces, observations=observations)
        tools = () if style.template_tools or isinstance(style, InlineFormat) else (WEATHER,)
        try:
            return await ask(own, user("Hello"), tools=tools)
        finally:
            await own.close()

    answer = asyncio.run(asked())
    assert [replace(each, id=None) for each in answer.calls] == [call] == list(used.read(text).calls)
    assert answer.content == used.read(text).content
    assert answer.content.strip() == ("" if name == "llama3_json" else "I look.")
    assert answer.content.startswith(streamed(used, text))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(TOOL_CALL_FORMATS.keys() - {"native"}))  # which needs a tokenizer
@settings(max_examples=200)
@given(text=st.lists(pieces, max_size=10).map("".join))
@example(text="<think>Hello<function=f>")
def test_streamed_content_is_the_beginning_of_the_answer(name: str, text: str) -> None:
    """Whatever was streamed at any prefix of the response remains true; nothing but calls is lost."""
    used = reader(name)
    answer = used.read(text)
    assert answer.content.startswith(streamed(used, text))
    parsed = used.tool_call_format.parse(text)
    if not isinstance(used.tool_call_format, InlineFormat):
        assert answer.calls == (parsed.calls if isinstance(parsed, Calls) else ())
    if not answer.calls:
        assert answer.content == text


def test_stop_strings_are_those_that_do_not_depend_on_the_text() -> None:
    assert reader("retool").stop_strings == ("</code>",)
    assert reader("search_r1").stop_strings == ("</search>", "</answer>")
    assert reader("fence").stop_strings == ("```output",)
    assert reader("zerotir").stop_strings == ()
    assert reader("toolrl").stop_strings == ()
