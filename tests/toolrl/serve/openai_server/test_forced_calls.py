"""The grammar of a format, by xgrammar: it takes the calls that the format renders, and nothing that it would not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.verl.chat.test_native import FAMILIES, SINGLE, chat_of, needs_vllm
from toolrl.serve.openai_server.forced_calls import call_grammar
from verl.chat.native import NativeFormat
from verl.errors import ConfigError
from verl.formats.base import TOOL_CALL_FORMATS, Calls, build_tool_call_format
from verl.formats.inline import InlineFormat
from verl.types import ToolCall, ToolSpec

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar comes with vLLM")
FORMATS = sorted(TOOL_CALL_FORMATS.keys() - {"native"})
QUOTED = ("lfm2_2_5", "gemma4")  # their texts are quoted, numbers are not


def schema(*required: str, **properties: Any) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


DAYS = {"type": "integer"}
UNIT = {"type": "string", "enum": ["mm", "in"]}
TOOLS = (
    ToolSpec("get_rain", "", schema("city", city={"type": "string"}, days=DAYS, unit=UNIT)),
    ToolSpec("now", "", schema()),
    ToolSpec("add", "", schema("numbers", numbers={"type": "array", "items": {"type": "integer"}})),
    ToolSpec("old", "", schema("city", city={"type": "str"})),  # a type of ToolRL's rows
)
FIT = (
    ToolCall("get_rain", {"city": "Kala <b>", "days": 3, "unit": "in"}),
    ToolCall("get_rain", {"city": "Möri"}),
    ToolCall("now", {}),
    ToolCall("add", {"numbers": [1, -2]}),
    ToolCall("old", {"city": "Kala"}),
)
FIT_NOT = (
    ToolCall("get_rain", {"days": 3}),
    ToolCall("get_rain", {"city": "Kala", "unit": "km"}),
    ToolCall("get_rain", {"city": "Kala", "days": "three"}),
    ToolCall("nosuch", {}),
    ToolCall("add", {"numbers": ["one"]}),
)


def accepts(tag: Mapping[str, Any], text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    return bool(_is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(json.dumps(tag)), text))


def is_valid(given: Mapping[str, Any]) -> bool:
    try:
        xgrammar.Grammar.from_json_schema(json.dumps(given))
    except RuntimeError:
        return False
    return True


def thought_of(tool_call_format: Any) -> str:
    """What such a response begins with."""
    if getattr(tool_call_format, "in_thought", False):
        return "I look.\n</think>\n\n"
    return "<think> I look. </think>\n" if getattr(tool_call_format, "needs_thought", False) else ""


def check_calls(tool_call_format: Any, several: bool = True) -> None:
    thought, grammar = thought_of(tool_call_format), call_grammar(tool_call_format, TOOLS, is_valid)
    single = call_grammar(tool_call_format, TOOLS, is_valid, single=True)

    def written(*calls: ToolCall) -> str:
        rendered = tool_call_format.render(calls)
        return str(rendered if "</think>" in rendered else thought + rendered)

    for call in FIT:
        assert accepts(grammar, written(call)) and accepts(single, written(call)), written(call)
        assert tool_call_format.parse(written(call), TOOLS) == Calls((call,))
    if several:
        assert accepts(grammar, written(*FIT)) and not accepts(single, written(*FIT))
    assert [call for call in FIT_NOT if accepts(grammar, written(call))] == []
    for text in ("", "No.", thought, f"{thought}No.", f"{written(FIT[0])} No.", written(FIT[0])[:-1]):
        assert not accepts(grammar, text)
    few = call_grammar(tool_call_format, TOOLS[:1], is_valid, required=False)
    assert accepts(few, "No.") and accepts(few, f"I look.\n{written(FIT[0])}") and not accepts(few, written(FIT[2]))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "openhands"])
def test_calls_of_a_format_fit_and_nothing_else(name: str) -> None:
    tool_call_format: Any = build_tool_call_format(name)
    if not isinstance(tool_call_format, InlineFormat):
        check_calls(tool_call_format)
        if hasattr(tool_call_format, "in_thought"):
            check_calls(replace(tool_call_format, in_thought=True))
        return
    call = ToolCall(tool_call_format.tool, {tool_call_format.argument: "print(1 < 2)"})
    grammar, written = call_grammar(tool_call_format, (), is_valid), tool_call_format.render([call])
    assert accepts(grammar, written) and accepts(grammar, f"I look:\n{written}")
    assert tool_call_format.parse(written) == Calls((call,))
    assert not any(accepts(grammar, text) for text in ("", "No.", f"{written} No.", written[:-1]))


@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_a_models_own_format_fit_and_nothing_else(family: str) -> None:
    bound = NativeFormat(FAMILIES[family]).bound(chat_of(family))
    if family in QUOTED:
        with pytest.raises(ConfigError, match="have no simple grammar"):
            call_grammar(bound, TOOLS, is_valid)
    else:
        check_calls(bound, several=family not in SINGLE)


def test_a_format_that_renders_no_calls_has_no_grammar() -> None:
    class Silent:
        pass

    with pytest.raises(ConfigError, match="has no `render`"):
        call_grammar(Silent(), TOOLS, is_valid)  # type: ignore[arg-type]


def test_a_format_whose_texts_are_quoted_has_no_grammar() -> None:
    class Python:
        def render(self, calls: Sequence[ToolCall]) -> str:
            written = [f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in calls]
            return f"[{', '.join(written)}]"

    with pytest.raises(ConfigError, match="have no simple grammar"):
        call_grammar(Python(), TOOLS, is_valid)  # type: ignore[arg-type]
