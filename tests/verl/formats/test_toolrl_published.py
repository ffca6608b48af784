"""ToolRL's handler for BFCL: dialogues and responses beside a transcription of its rules."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.formats.base import Calls, Final, ParseError, build_tool_call_format
from verl.formats.prompt import load_template, numbered_tools
from verl.formats.split import Split, split
from verl.types import Message, ToolCall, ToolSpec

PROMPT = """Be brief. {tools} as {"name": ..}
**Dialogue Records History**
<user> {question}
Call None if no tool fits. </user>
<obs> {tool} returned {result} </obs>

<user> Are you done? </user>
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "ratio": {"type": "number", "description": "{question}"},
        "where": {"type": "array", "items": {"type": "object", "properties": {"type": {"type": "number"}}}},
        "any": {"description": "No type."},
    },
    "required": ["ratio"],
}
TOOL = ToolSpec("cut", "Cuts.", SCHEMA)
LISTED = {
    "ratio": {"type": "float", "description": "{question}"},
    "where": {"type": "array", "items": {"type": "dict", "properties": {"type": {"type": "float"}}}},
    "any": {"description": "No type."},
}
DIALOGUE = (
    Message("system", "Of the row."),
    Message("user", " Cut it. {tools}\n"),
    Message("assistant", "<think> a </think>\n"),
    Message("tool", " done ", tool="cut "),
)
F, G = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "parameters": {"b": [1.0, "x"]}}'
PIECES = (
    "<tool_call>", "</tool_call>", "\n", "<think>", "</think>", " ", F, G, "[1]", "3", "null", '"x"', "{", "NaN",
    '{"name": "None", "parameters": {}}', '{"name": " NONE ", "parameters": {"why": 1}}', '{"name": "f"}',
    '{"parameters": {}}', '{"name": 3, "parameters": {}}', '{"name": "f", "parameters": [1]}',
    '{"name": "f", "parameters": null}', '{"name": "f", "parameters": {"a": NaN}}', "\r\n", "\u2028", "[" * 3000,
    '{"name": "f", "parameters": {"a": 1, "a": 2}}', '{"name": "", "parameters": {}}', "9" * 5000,
    '{"name": "None", "parameters": 4}', "<response> Yes. </response>", "<tool_call",
)  # fmt: skip


def decoded(text: str) -> list[dict[str, Any]]:
    """Its rule, with BFCL's own: calls without an object of parameters make a response one without calls."""
    if "<tool_call>" not in text:
        return []
    calls = []
    for line in text.split("<tool_call>")[-1].split("</tool_call>")[0].strip().split("\n"):
        try:
            call = json.loads(line)
            if call["name"].strip().lower() != "none":
                calls.append({call["name"]: call["parameters"]})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return calls if all(isinstance(value, dict) for call in calls for value in call.values()) else []


def test_the_calls_are_those_of_the_handler() -> None:
    style, rng, num_calls = build_tool_call_format("toolrl_published"), random.Random("toolrl"), 0
    for _ in range(4000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 8)))
        if rng.random() < 0.5:
            lines = "\n".join(rng.choice(PIECES) for _ in range(rng.randint(1, 5)))
            text = f"<think> t </think>\n<tool_call>\n{lines}\n</tool_call>"
        parsed = style.parse(text)
        calls = [{call.name: call.arguments} for call in parsed.calls] if isinstance(parsed, Calls) else []
        assert repr(calls) == repr(decoded(text)), text  # NaN equals no other
        num_calls += len(calls)
    assert num_calls > 500


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>\n{G}\n{F}\n</tool_call>", "gf"),
        (f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>", "g"),
        (f"<think> <tool_call>\n{F}", "f"),
        (f"<tool_call>\nI call\n{F}\n{{\n</tool_call>", "f"),
        (f'<tool_call>\n{F}\n{{"name": "none", "parameters": {{}}}}\n</tool_call>', "f"),
        (f"{F}\n</tool_call>", ""),
        (f"<tool_call>\n[{F}]\n</tool_call>", ""),
    ],
)
def test_order_last_block_skipped_lines_and_no_tool(text: str, calls: str) -> None:
    parsed = build_tool_call_format("toolrl_published").parse(text)
    assert "".join(call.name for call in parsed.calls) == calls if isinstance(parsed, Calls) else parsed == Final()


def test_an_unencodable_text_is_no_call_and_bad_parameters_are_reported() -> None:
    style = build_tool_call_format("toolrl_published")
    assert style.parse('<tool_call>{"name": "f", "parameters": {"a": "\\ud800"}}') == Final()
    assert style.parse(f'<tool_call>{F}\n{{"name": "g", "parameters": []}}') == ParseError(
        "\"parameters\" in the call of 'g' must be a JSON object."
    )


def test_text_around_the_last_block_is_content() -> None:
    style = build_tool_call_format("toolrl_published")
    (call,) = (ToolCall("f", {"a": 1}),)
    assert split(style, f"<think> <tool_call> </think> A\n<tool_call>{F}</tool_call>\nB") == Split(
        "<think> <tool_call> </think> A", (call,), "B"
    )
    assert split(style, f"A {F}") == Split(f"A {F}")
    assert style.certain_content(f"<think> a <tool_call>{F}") == "<think> a"


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "bfcl.txt"
    path.write_text(PROMPT)
    return path


def test_a_dialogue_is_one_message_with_the_sentences_of_the_file(prompt: Path) -> None:
    style = build_tool_call_format("toolrl_published", {"prompt_template": str(prompt)})
    system, user = style.render_prompt(DIALOGUE, [TOOL])
    listed = f"1. Name: cut\nDescription: Cuts.\nParameters: {json.dumps(LISTED)}"
    assert system == Message("system", f'Be brief. {listed} as {{"name": ..}}\n')
    assert user == Message(
        "user",
        "**Dialogue Records History**\n<user> Cut it. {tools}\nCall None if no tool fits. </user>\n\n"
        "<think> a </think>\n<obs> cut returned done </obs>\n\n<user> Are you done? </user>",
    )
    assert style.observation(DIALOGUE[3:], "") == (
        Message("user", "<obs> cut returned done </obs>\n\n<user> Are you done? </user>"),
    )
    assert style.observation((*DIALOGUE[3:], Message("user", "Next.")), "") == (
        Message("user", "<obs> cut returned done </obs>\n<user> Next.\nCall None if no tool fits. </user>"),
    )
    (empty, _) = style.render_prompt(DIALOGUE, [])
    assert isinstance(empty, Message) and empty.content == 'Be brief.  as {"name": ..}\n'
    row = (Message("system", "**Available Tools**\n1. Name: a"), Message("user", "b"))
    assert style.render_prompt(row, []) == row


def test_without_sentences_a_dialogue_has_its_messages_alone(tmp_path: Path) -> None:
    style = build_tool_call_format("toolrl_published")
    own, user = style.render_prompt(DIALOGUE, [TOOL])
    assert isinstance(user, Message) and user.content.endswith(
        "\n<user> Cut it. {tools} </user>\n\n<think> a </think>\n<obs> done </obs>"
    )
    assert isinstance(own, Message) and numbered_tools([TOOL]) not in own.content  # with ToolRL's defaults
    assert own.content.startswith(load_template("toolrl", "{tools}").text.partition("{tools}")[0])
    short = tmp_path / "short.txt"
    short.write_text(PROMPT.partition("<obs>")[0])
    short_style = build_tool_call_format("toolrl_published", {"prompt_template": str(short)})
    assert short_style.observation(DIALOGUE[3:], "") == (Message("user", "<obs> done </obs>"),)


@pytest.mark.parametrize("old", ["{question}", "<user> {q", "<obs>", "{result}", "{tools}"])
def test_a_file_that_lacks_a_part_is_refused(old: str, prompt: Path) -> None:
    prompt.write_text(PROMPT.replace(old, ""))
    with pytest.raises(ConfigError, match=r"must have <user> .* after \*\*Dial.*, not|lacks the placeholder \{tools\}"):
        build_tool_call_format("toolrl_published", {"prompt_template": str(prompt)})
