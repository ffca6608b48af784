"""The tool parser in vLLM's own machinery: whole responses, and streams of any chunks."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import need_vllm
from tests.test_docs import quickstart_files
from tests.toolrl.serve.openai_server.test_forced_calls import accepts
from toolrl.serve.openai_server.parsing import PARSER_NAME, ResponseReader
from toolrl.serve.openai_server.served_model import TrainedFormat
from toolrl.serve.openai_server.serving_files import TOOL_PARSER, serving_texts
from verl.embedded import embedded_path
from verl.errors import ConfigError
from verl.formats.base import TOOL_CALL_FORMATS, build_tool_call_format
from verl.formats.inline import InlineFormat
from verl.types import ToolCall

need_vllm()
pytestmark = pytest.mark.long
CALLED = {"name": "get_rain", "arguments": "{}"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {argument: {"type": "string"}}}},
    }
    for name, argument in (("get_rain", "city"), ("python", "code"), ("search", "query"))
]


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_path("embedded:model"))


def parser_class(name: str, folder: Path) -> Any:
    """Made by vLLM from the exported file."""
    from vllm.parser import ParserManager
    from vllm.tool_parsers import ToolParserManager

    text = serving_texts(Path(embedded_path("embedded:model")), TrainedFormat(name))[TOOL_PARSER]
    file = folder / f"parser_{Path(name).stem}.py"
    file.write_text(text)
    ToolParserManager.import_tool_parser(str(file))
    return ParserManager.get_parser(
        tool_parser_name=PARSER_NAME, enable_auto_tools=True, model_name="mini", tokenizer=tokenizer()
    )


def request(**fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], model="m", **{"tools": TOOLS, **fields})


def new_parser(parser: Any, asked: Any) -> Any:
    return parser(tokenizer(), asked.tools)


def streamed(parser: Any, asked: Any, text: str, ended: bool, chance: random.Random) -> tuple[str, list[Any]]:
    """The reassembled answer to a response that comes in chunks of random sizes."""
    used, content, calls = new_parser(parser, asked), "", {}
    ids = [tokenizer().eos_token_id] if ended else []
    pieces, rest = [], text
    while rest:
        size = chance.randint(1, 7)
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    for number, piece in enumerate(pieces or [""]):
        last = number >= len(pieces) - 1
        delta = used.parse_delta(piece, ids if last else [], asked, prompt_token_ids=[1], finished=last)
        if delta is None:
            continue
        content += delta.content or ""
        for call in delta.tool_calls or ():
            entry = calls.setdefault(call.index, ["", ""])
            entry[0] += call.function.name or ""
            entry[1] += call.function.arguments or ""
    return content, [(name, json.loads(arguments)) for _, (name, arguments) in sorted(calls.items())]


def responses(name: str) -> list[str]:
    """Calls as the policy writes them, with text around them, and malformed ones."""
    tool_call_format: Any = build_tool_call_format(name)
    if isinstance(tool_call_format, InlineFormat):
        calls = [ToolCall(tool_call_format.tool, {tool_call_format.argument: "print(1)"})]
    else:
        calls = [ToolCall("get_rain", {"city": "Kala"}), ToolCall("get_rain", {"city": "Möri <b>"})]
    if hasattr(tool_call_format, "render"):
        written = tool_call_format.render(calls)
    else:  # the quickstart's
        written = "\n".join(f"CALL {call.name} {json.dumps(call.arguments)}" for call in calls)
    thought = "<think> I look </think>\n"
    whole = [written, thought + written, f"Hello <you>.\n{written}", "Just text < b", thought, ""]
    return [*whole, written[:-3], f"{written} {written}", f"{thought}{written}\n<response> Wait. </response>"]


NOT_SERVED = {"openhands", "toolrl_published"}


@pytest.mark.parametrize("name", [*sorted(TOOL_CALL_FORMATS.keys() - NOT_SERVED - {"native"}), "quickstart"])
def test_every_format_is_parsed_and_streamed_alike(name: str, tmp_path: Path) -> None:
    if name == "quickstart":
        (tmp_path / "my_format.py").write_text(quickstart_files()["my_format.py"])
        name = f"{tmp_path / 'my_format.py'}:CallFormat"
    parser, asked, chance = parser_class(name, tmp_path), request(), random.Random(0)
    with_calls = 0
    for text in responses(name):
        answer = ResponseReader(build_tool_call_format(name)).read(text)
        expected = [(call.name, dict(call.arguments)) for call in answer.calls]
        _, content, calls = new_parser(parser, asked).parse(text, asked, enable_auto_tools=True)
        assert [(call.name, json.loads(call.arguments)) for call in calls or ()] == expected
        assert (content or "").strip() == answer.content.strip()
        with_calls += bool(expected)
        for ended in (True, False):
            assert streamed(parser, asked, text, ended, chance) == (answer.content, expected)
    assert with_calls >= 2  # for Llama a call is the whole response


@pytest.mark.parametrize("name", sorted(NOT_SERVED))
def test_a_format_whose_prompts_no_template_can_write_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Format cannot be written as a chat template"):
        parser_class(name, tmp_path)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
def test_without_tools_the_response_is_content_as_written(fields: dict[str, Any], tmp_path: Path) -> None:
    """Rows may list their tools as text; their calls are read by the client."""
    for name in ("toolrl", "search_r1"):
        parser, asked = parser_class(name, tmp_path), request(**fields)
        for text in responses(name):
            _, content, calls = new_parser(parser, asked).parse(text, asked, enable_auto_tools=True)
            assert (content or "", calls or []) == (text, [])
            assert streamed(parser, asked, text, True, random.Random(0)) == (text, [])


def test_requests_are_adjusted_to_the_format(tmp_path: Path) -> None:
    parser = parser_class("retool", tmp_path)
    adjusted = new_parser(parser, request(stop="END")).tool_parser.adjust_request(request(stop="END"))
    assert adjusted.stop == ["END", "</code>"] and adjusted.include_stop_str_in_output
    parser = parser_class("toolrl", tmp_path)
    adjusted = new_parser(parser, request()).tool_parser.adjust_request(request())
    assert not adjusted.skip_special_tokens and adjusted.structured_outputs is None


def test_unsupported_tool_choices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "my_format.py").write_text(quickstart_files()["my_format.py"])
    used = new_parser(parser_class(f"{tmp_path / 'my_format.py'}:CallFormat", tmp_path), request()).tool_parser
    with pytest.raises(ValueError, match="this tool-call format has no `render`"):
        used.adjust_request(request(tool_choice="required"))
    used = new_parser(parser_class("toolrl", tmp_path), request()).tool_parser
    with pytest.raises(ValueError, match="tool_choice names 'nosuch', which is not in tools"):
        used.adjust_request(request(tool_choice="required", allowed_tools=["nosuch", "python"]))
    used = new_parser(parser_class("search_r1", tmp_path), request()).tool_parser
    asked = request()
    asked.tools = asked.tools[:1]
    with pytest.raises(ValueError, match=r"trained with one tool, search\(query\), which is not in the request"):
        used.adjust_request(asked)


NAMED = {"type": "function", "function": {"name": "get_rain"}}
ALLOWED = [{"type": "function", "name": "get_rain"}]  # of Responses


def of_responses(choice: Any) -> Any:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    tools = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    return ResponsesRequest(input="a", model="m", tools=tools, tool_choice=choice)


@pytest.mark.parametrize(
    ("asked", "fits", "fits_not"),
    [
        (lambda: request(tool_choice="required"), ["python", "get_rain", "get_rain+python"], ["text", "nosuch"]),
        (lambda: request(tool_choice=NAMED), ["get_rain"], ["text", "python", "get_rain+get_rain"]),
        (
            lambda: request(tool_choice="required", parallel_tool_calls=False),
            ["python"],
            ["text", "get_rain+get_rain", "nosuch"],
        ),
        (
            lambda: request(tool_choice="required", allowed_tools=["get_rain"]),
            ["get_rain+get_rain"],
            ["python", "text"],
        ),
        (lambda: request(tool_choice="auto", allowed_tools=["get_rain"]), ["get_rain", "text"], ["python"]),
        (lambda: of_responses("required"), ["get_rain+python"], ["text"]),
        (lambda: of_responses({"type": "function", "name": "get_rain"}), ["get_rain"], ["text", "python"]),
        (
            lambda: of_responses({"type": "allowed_tools", "mode": "required", "tools": ALLOWED}),
            ["get_rain"],
            ["text", "python"],
        ),
        (
            lambda: of_responses({"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}),
            ["get_rain", "text"],
            ["python"],
        ),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "toolrl", "xml"])
def test_a_choice_of_tools_is_a_grammar_of_the_trained_format(
    name: str, asked: Any, fits: list[str], fits_not: list[str], tmp_path: Path
) -> None:
    """vLLM gets it as structured outputs, whatever the API."""
    made = asked()
    params = new_parser(parser_class(name, tmp_path), made).tool_parser.adjust_request(made).structured_outputs
    tool_call_format: Any = build_tool_call_format(name)

    def written(what: str) -> str:
        arguments = {"get_rain": {"city": "Kala"}, "python": {"code": "1 < 2"}, "nosuch": {"city": "Kala"}}
        calls = [ToolCall(tool, arguments[tool]) for tool in what.split("+")] if what != "text" else []
        return f"<think> a </think>\n{tool_call_format.render(calls) if calls else 'Just text.'}"

    tag = json.loads(params.structural_tag)
    assert [each for each in (*fits, *fits_not) if accepts(tag, written(each))] == fits


@pytest.mark.parametrize("name", ["toolrl", "retool", "search_r1"])
def test_the_end_token_is_no_content(name: str, tmp_path: Path) -> None:
    """Servers include it with stop strings, and where formats may have special tokens."""
    parser, asked = parser_class(name, tmp_path), request()
    for text in (responses(name)[2], "Just text < b"):
        answer = ResponseReader(build_tool_call_format(name)).read(text)
        _, content, calls = new_parser(parser, asked).parse(f"{text}<|im_end|>", asked, enable_auto_tools=True)
        assert ((content or "").strip(), len(calls or ())) == (answer.content.strip(), len(answer.calls))
        used, sent = new_parser(parser, asked), ""
        for piece, ids in ((text, []), ("<|im_end|>", [tokenizer().eos_token_id])):
            delta = used.parse_delta(piece, ids, asked, prompt_token_ids=[1], finished=bool(ids))
            sent += (delta.content or "") if delta else ""
        assert sent == answer.content


@pytest.mark.parametrize(
    ("conversation", "ids"),
    [
        ([], ["call00000", "call00001"]),
        ([{"role": "assistant", "tool_calls": [{"id": "call00003", "type": "function", "function": CALLED}]}], None),
        ([{"role": "assistant", "content": "Calling tools: [{'id': 'call00003', 'type': 'function'}]"}], None),
        ([{"role": "assistant", "content": "recall00009 call123"}], ["call00000", "call00001"]),
    ],
)
def test_calls_are_numbered_on_as_in_training(
    conversation: list[dict[str, Any]], ids: list[str] | None, tmp_path: Path
) -> None:
    """Some programs show the policy their ids, as text."""
    parser, asked = parser_class("hermes", tmp_path), request()
    asked.messages += conversation
    text = build_tool_call_format("hermes").render([ToolCall("get_rain", {"city": "Kala"})] * 2)  # type: ignore[attr-defined]
    _, _, calls = new_parser(parser, asked).parse(text, asked, enable_auto_tools=True)
    made = [call.id for call in calls]
    delta = new_parser(parser, asked).parse_delta(text, [2], asked, prompt_token_ids=[1], finished=True)
    assert made == [call.id for call in delta.tool_calls] == (ids or ["call00004", "call00005"])
