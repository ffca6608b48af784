"""OpenHands' format beside the expressions of its own converter, and the agents that are published with it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from tests.verl.formats.test_published_actions import TEXTS
from toolrl.envs.swe.env import STYLES, SweFactory
from verl.formats.base import Calls, Final, ParseError, build_tool_call_format
from verl.types import Message, ToolCall, ToolSpec

FORMAT = build_tool_call_format("openhands")
TOOL = ToolSpec(
    "edit",
    "Edits.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Which."},
            "how": {"type": "string", "enum": ["a", "b"]},
            "line": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "view": {"type": "array"},
        },
        "required": ["path"],
    },
)
SCRAPS = (
    "<function=", "<function=edit>", "<function=edit>\n", "</function>", "</", "<parameter=path>", "</parameter>",
    "<parameter=line>7</parameter>", "<parameter=view> [1, 2]\n</parameter>", "<parameter=", ">", "<tool_call>",
    "<think>", "</think>\n", "<function=edit>\n<parameter=path>\n a\n b \n</parameter>\n</function>",
)  # fmt: skip


def converted(text: str) -> tuple[str, dict[str, Any]] | None:
    """OpenHands' converter: a single function is closed, the first one that matches counts, values are stripped."""
    if text.count("<function=") == 1:
        text = text.rstrip() + "function>" if text.endswith("</") else text + "\n</function>"
    found = re.search(r"<function=([^>]+)>\n(.*?)</function>", text, re.DOTALL)
    if found is None:
        return None
    arguments: dict[str, Any] = {}
    for key, value in re.findall(r"<parameter=([^>]+)>(.*?)</parameter>", found[2], re.DOTALL):
        arguments[key] = value.strip()
        if found[1] == "edit" and key in ("line", "view"):
            arguments[key] = json.loads(value)
    return found[1], arguments


def test_the_call_is_that_of_openhands() -> None:
    rng, num_calls = random.Random("openhands"), 0
    for _ in range(4000):
        pieces = [rng.choice(SCRAPS if rng.random() < 0.6 else TEXTS) for _ in range(rng.randint(1, 9))]
        text, parsed = "".join(pieces), FORMAT.parse("".join(pieces), [TOOL])
        try:
            expected = converted(text)
        except ValueError:
            assert isinstance(parsed, ParseError), text
            continue
        assert parsed == (Final() if expected is None else Calls((ToolCall(*expected),))), text
        num_calls += expected is not None
    assert num_calls > 1000


def test_calls_and_results_are_written_as_by_openhands() -> None:
    call = ToolCall("edit", {"path": "a\n b", "line": 7})
    text = "<function=edit>\n<parameter=path>\na\n b\n</parameter>\n<parameter=line>7</parameter>\n</function>"
    assert FORMAT.render([call]) == text and FORMAT.parse(f"I edit.\n{text}", [TOOL]) == Calls((call,))
    results = (Message("tool", "done", tool="edit"), Message("tool", "no call"), Message("user", "Go on."))
    assert FORMAT.observation(results, text) == (
        Message("user", "EXECUTION RESULT of [edit]:\ndone"),
        Message("user", "no call"),
        Message("user", "Go on."),
    )


def test_functions_are_listed_as_by_openhands() -> None:
    system, user = FORMAT.render_prompt((Message("system", "Be brief."), Message("user", "Fix it.")), [TOOL])
    assert isinstance(system, Message) and user == Message("user", "Fix it.")
    assert (
        system.content.startswith("Be brief.\n")
        and (
            "---- BEGIN FUNCTION #1: edit ----\nDescription: Edits.\n"
            "Parameters:\n  (1) path (string, required): Which.\n"
            "  (2) how (string, optional): \nAllowed values: [`a`, `b`]\n  (3) line (integer, optional): \n"
            "  (4) view (array, optional): \n---- END FUNCTION #1 ----\n"
        )
        in system.content
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("execute_bash", {"command": "ls"}),
        ("execute_bash", {"command": "", "is_input": "true"}),
        ("finish", {}),
        ("finish", {"message": "Solved.", "task_completed": "partial"}),
        ("str_replace_editor", {"command": "view", "path": "/testbed/a.py", "view_range": [1, -1]}),
        ("str_replace_editor", {"command": "insert", "path": "/testbed/a.py", "insert_line": 0, "new_str": "x = 1"}),
    ],
)
def test_published_agents_find_their_functions(name: str, arguments: dict[str, Any]) -> None:
    factory = SweFactory(style="skyrl")
    assert tuple(factory.toolbox.specs) == STYLES["skyrl"].tools == ("execute_bash", "finish", "str_replace_editor")
    parsed = FORMAT.parse(FORMAT.render([ToolCall(name, arguments)]), list(factory.toolbox.specs.values()))
    assert parsed == Calls((ToolCall(name, arguments),))
    factory.toolbox.check(parsed.calls[0])
