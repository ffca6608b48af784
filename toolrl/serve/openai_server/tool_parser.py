"""A tool parser of vLLM for a tool-call format: `vllm serve --tool-parser-plugin tool_parser.py`.

The class is made from `ToolCallFormat.parse`, so a server reads the calls that training read. Content is streamed as it
is written; calls follow complete at the end of the response, when it is certain that all of them can be parsed. Calls
that a request demands are written in the format of the training, too, under a grammar of it (`forced_calls`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.abstract_tool_parser import (
    DeltaMessage,
    ExtractedToolCallInformation,
    ToolParser,
    ToolParserManager,
)
from xgrammar import Grammar

from toolrl.serve.openai_server.forced_calls import ALLOWED_TOOLS, call_grammar
from toolrl.serve.openai_server.parsing import PARSER_NAME, ResponseReader, next_number, numbered
from verl.errors import ConfigError
from verl.formats.base import build_tool_call_format
from verl.types import ToolCall, ToolSpec


def register_tool_parser(name: str, options: Mapping[str, Any], template_options: Mapping[str, Any] = {}) -> None:
    """Register the tool parser of this tool-call format with vLLM, under the name `toolrl`. Raises ConfigError.

    template_options: variables of the chat template that were set in training, for the format `native`
    """
    tool_call_format = build_tool_call_format(name, options)

    @cache
    def reader_of(tokenizer: Any) -> ResponseReader:
        if name != "native":
            return ResponseReader(tool_call_format)
        from verl.chat.native import NativeFormat  # transformers, which the other formats do not need
        from verl.chat.template import ChatTemplate
        from verl.pretrained import end_tokens

        assert isinstance(tool_call_format, NativeFormat)
        stops = end_tokens(tokenizer.name_or_path)
        return ResponseReader(tool_call_format.bound(ChatTemplate(tokenizer, stops, template_options=template_options)))

    parser = type("ToolRLParser", (FormatToolParser,), {"reader_of": staticmethod(reader_of)})
    ToolParserManager.register_module(PARSER_NAME, module=parser)


class FormatToolParser(ToolParser):  # type: ignore[misc]  # vLLM may not be installed
    """One instance per response; `reader_of` is set by `register_tool_parser`."""

    reader_of: Callable[[Any], ResponseReader]
    supports_required_and_named = False  # their calls are in the policy's format, not in vLLM's JSON
    engine_based_streaming = True  # so that `finish_streaming` is called

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self.reader = self.reader_of(tokenizer)
        self._text = ""
        self._streamed = ""  # content
        self._request: Any = None
        self._tools: list[ToolSpec] = []
        self._finished = False
        own = self.reader.tags
        self._ends = [mark for mark in self.model_tokenizer.all_special_tokens if mark not in own]

    def adjust_request(self, request: Any) -> Any:
        """Stop strings of the format, and the response text as the format reads it. Raises ValueError, which the server
        answers with status 400."""
        if not _may_call(request):
            return request
        self._constrain(request)
        request.skip_special_tokens = False  # some formats use them
        single = self.reader.single_tool
        if single is None:
            return request
        tool, argument = single
        if tool not in [each.name for each in _specs(request.tools)]:
            raise ValueError(f"this policy was trained with one tool, {tool}({argument}), which is not in the request")
        stops = request.stop or []
        request.stop = [*([stops] if isinstance(stops, str) else stops), *self.reader.stop_strings]
        request.include_stop_str_in_output = True  # end tokens, too
        return request

    def _constrain(self, request: Any) -> None:
        """Structured outputs for a request that names tools, or demands a call. Raises ValueError."""
        names, required, single = _chosen(request)
        if not names and not required:
            return
        tools = [each for each in _specs(request.tools) if not names or each.name in names]
        if unknown := sorted(set(names) - {each.name for each in tools}):
            raise ValueError(f"tool_choice names {unknown[0]!r}, which is not in tools")
        single = single or request.parallel_tool_calls is False
        try:
            grammar = call_grammar(
                self.reader.tool_call_format, tools, _is_known_schema, required=required, single=single
            )
        except ConfigError as error:
            raise ValueError(str(error)) from error
        request.structured_outputs = StructuredOutputsParams(structural_tag=json.dumps(grammar, ensure_ascii=False))

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        if not _may_call(request):
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        answer = self.reader.read(self._without_end(model_output), _specs(request.tools))
        return ExtractedToolCallInformation(
            tools_called=bool(answer.calls),
            tool_calls=_openai_calls(answer.calls, request),
            content=answer.content or None,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        if not _may_call(request):
            return DeltaMessage(content=delta_text) if delta_text else None
        self._text += delta_text
        self._request, self._tools = request, _specs(request.tools)
        if self.model_tokenizer.eos_token_id in delta_token_ids:  # older versions have no `finish_streaming`
            return self.finish_streaming()
        content = self.reader.certain_content(self._without_end(self._text))
        new = content[len(self._streamed) :]
        self._streamed += new
        return DeltaMessage(content=new) if new else None

    def finish_streaming(self) -> DeltaMessage | None:
        """The rest of the content, and the calls."""
        if self._finished or not self._text:
            return None
        self._finished = True
        answer = self.reader.read(self._without_end(self._text), self._tools)
        content = answer.content[len(self._streamed) :]
        openai_calls = _openai_calls(answer.calls, self._request)
        calls = [{"index": number, **call} for number, call in enumerate(openai_calls)]
        fields = {"content": content, "tool_calls": calls}
        return DeltaMessage(**{name: value for name, value in fields.items() if value}) if content or calls else None

    def _without_end(self, text: str) -> str:
        """Without the end token, which the server includes with stop strings."""
        return text.removesuffix(next((end for end in self._ends if text.endswith(end)), ""))


def _may_call(request: Any) -> bool:
    """Whether calls are read. Without tools the whole response is content: the client may read them itself."""
    return bool(request.tools) and request.tool_choice != "none"


def _chosen(request: Any) -> tuple[list[str], bool, bool]:
    """(the tools that may be called, if not all; whether one has to be; whether one at most)"""
    choice, allowed = request.tool_choice, getattr(request, ALLOWED_TOOLS, None)
    if allowed is not None:
        return allowed, choice == "required", False
    if choice in (None, "auto", "required"):
        return [], choice == "required", False
    if choice.type == "allowed_tools":  # the Responses API's
        return [each["name"] for each in choice.tools], choice.mode == "required", False
    return [getattr(choice, "function", choice).name], True, True


def _is_known_schema(schema: Mapping[str, Any]) -> bool:
    """Whether vLLM's structured outputs can follow this JSON schema."""
    try:
        Grammar.from_json_schema(json.dumps(schema))
    except (RuntimeError, ValueError):
        return False
    return True


def _specs(tools: Any) -> list[ToolSpec]:
    """The tools of a request: of Chat Completions, or of Responses, which has no `function` in between."""
    functions = [getattr(tool, "function", tool) for tool in tools or ()]
    return [ToolSpec(each.name, each.description or "", each.parameters or {}) for each in functions]


def _openai_calls(calls: Sequence[ToolCall], request: Any) -> list[dict[str, Any]]:
    shown = getattr(request, "messages", None) or getattr(request, "input", "")
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
        }
        for call in numbered(calls, next_number(str(shown)))
    ]
