"""The model's own tool-call format: its chat template renders tools, calls and results; a library parses its calls.

The parser is the tokenizer's response template (transformers) if it has one, else a tool parser of vLLM: the one that
`vllm serve` uses for the model. No family is parsed here. When the format is built, calls rendered by the chat template
are parsed once, so a parser of another family is an error.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar

from verl.chat.template import ChatTemplate
from verl.errors import ConfigError, DataError
from verl.formats.base import Calls, Final, Parsed, ParseError
from verl.formats.prompt import function_schema
from verl.formats.response import spoken
from verl.formats.split import Split, content_before
from verl.formats.text import BadCallError, find_spoken, read_whole_json, speech_start, to_call
from verl.formats.toolrl_text import THINK_END
from verl.registry import nearest
from verl.text import shared_start
from verl.types import Message, ToolCall, ToolSpec

Read = Callable[[str, Sequence[ToolSpec]], list[ToolCall]]  # raises BadCallError

# marker of a family in its chat template -> vLLM's parser; the first one found counts
_VLLM_PARSERS = {
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "<|tool_call>": "gemma4",
    "<|tool_call_start|>": "lfm2",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    '"parameters": dictionary of argument name and its value': "llama3_json",
}
_OWN_FORMATS = {"hermes": "hermes", "qwen3_coder": "xml", "llama3_json": "llama3_json"}  # by vLLM's parser
_QUESTION = Message("user", "a")
_ANSWERS = (Message("assistant", "b"), Message("assistant", "c"))
_TRIAL_TOOL = ToolSpec("trial", "", {"type": "object", "properties": {"text": {"type": "string"}}})
_TRIAL_CALLS = (ToolCall("trial", {"text": "b"}), ToolCall("other", {"text": "c"}))
_LAST_TAG = re.compile(r"<[^<>]+>$")
_OPTION = "set env.tool_call_format_options={parser: NAME}"


@dataclass(frozen=True)
class NativeFormat:
    """The format before the tokenizer is known; `bound` completes it.

    parser: name of one of vLLM's tool parsers, in place of the tokenizer's response template or of the family's parser
    """

    template_tools: ClassVar[bool] = True
    final_stop_strings: ClassVar[tuple[str, ...]] = ()
    turns_per_call: ClassVar[int] = 1
    parallel_calls: ClassVar[bool] = True
    parser: str | None = None

    def bound(self, chat: ChatTemplate) -> "BoundNativeFormat":
        """Raises ConfigError if no parser is known for the chat template, or if the parser does not read its calls."""
        try:
            if self.parser is None and getattr(chat.tokenizer, "response_template", None) is not None:
                made = BoundNativeFormat(None, chat=chat, read=_template_reader(chat))
            else:
                name = self.parser or _family_of(chat)
                made = BoundNativeFormat(name, chat=chat, read=_vllm_reader(name, chat))
            made.check()
        except DataError as error:
            raise ConfigError(f"env.tool_call_format=native: {error.problem}; choose another format") from error
        return made

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        return tuple(messages)

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return ()  # a call ends with the turn

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        raise _needs_tokenizer()

    def observation(self, results: Sequence[Message], written: str) -> Sequence[Message]:
        return tuple(results)

    def render(self, calls: Sequence[ToolCall]) -> str:
        raise _needs_tokenizer()


def own_format(chat_template: str) -> str | None:
    """The format of ours in which a chat template writes calls; None if it lists no tools, or writes others."""
    return _OWN_FORMATS.get(_family(chat_template) or "") if "tools" in chat_template else None


def _needs_tokenizer() -> ConfigError:
    return ConfigError("the tool-call format native needs the model's tokenizer, which is not given here")


@dataclass(frozen=True)
class BoundNativeFormat(NativeFormat):
    """The format of a tokenizer. `read` is its parser."""

    chat: ChatTemplate = field(kw_only=True)
    read: Read = field(kw_only=True)

    @cached_property
    def in_thought(self) -> bool:
        return self.chat.opens_thought

    @cached_property
    def mark(self) -> str:
        """The text with which every call begins, such as a tag: a response with it, but without a call, is malformed"""
        begin = shared_start(*(self.render([call]) for call in _TRIAL_CALLS)).rpartition(THINK_END)[2].strip()
        return begin.partition("{")[0].strip() or begin

    @cached_property
    def end_mark(self) -> str:
        """The tag with which every call ends, such as </tool_call>; empty: calls end otherwise"""
        reversed_end = shared_start(*(self.render([call])[::-1] for call in _TRIAL_CALLS))
        found = _LAST_TAG.search(reversed_end[::-1].rstrip())
        return found[0] if found else ""

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        try:
            calls = self.read(written, tools)
        except BadCallError as error:
            return ParseError(str(error))
        attempted = spoken(written, self.in_thought).count(self.mark) - _quoted(self.mark, calls, written)
        if attempted > len(calls) and (not calls or self.mark.startswith("<")):  # other marks also occur in arguments
            return ParseError("A call cannot be parsed, or its tool is unknown.")  # some parsers drop such calls
        return Calls(tuple(calls)) if calls else Final()

    def split(self, text: str, tools: Sequence[ToolSpec] = ()) -> Split:
        """By the marks, because some parsers read calls that are not closed."""
        parsed = self.parse(text, tools)
        if not isinstance(parsed, Calls):
            return Split(text)
        start = find_spoken(text, self.mark, speech_start(text, self.in_thought))
        end = text.rfind(self.end_mark) + len(self.end_mark) if self.end_mark and self.end_mark in text else len(text)
        return Split(text[: max(start, 0)].rstrip(), parsed.calls, text[end:].strip())

    def certain_content(self, text: str) -> str:
        if not self.mark.startswith("<"):  # a text that content may have, too
            return ""
        start = find_spoken(text, self.mark, speech_start(text, self.in_thought))
        return content_before(text, start, (self.mark,)).rstrip()

    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls as the chat template writes them, without the end of the turn. Raises DataError if it does not."""
        text = _rendered_turn(self.chat, calls)[0]
        return f"\n{THINK_END}\n\n{text}" if self.in_thought and THINK_END not in text else text

    def check(self) -> None:
        """Raises ConfigError if the parser does not read a call that the chat template renders."""
        call = _TRIAL_CALLS[0]
        text = self.render([call])
        found = self.parse(text, (_TRIAL_TOOL,))
        if found != Calls((call,)):
            parser = f"vLLM's parser {self.parser}" if self.parser else "the tokenizer's response template"
            raise ConfigError(
                f"env.tool_call_format=native: {parser} does not read the calls of {self.chat.where}, such as "
                f"{text!r}; {_OPTION}, or choose another format"
            )


def _quoted(mark: str, calls: Sequence[ToolCall], written: str) -> int:
    """How often the arguments of the calls quote the mark, as text or in JSON."""
    texts = [text for call in calls for text in _texts(call.arguments) if mark in text]
    return sum(text.count(mark) for text in texts if text in written or json.dumps(text)[1:-1] in written)


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def _rendered_turn(chat: ChatTemplate, calls: Sequence[ToolCall]) -> tuple[str, str]:
    """(calls as the policy writes them, how the template ends the turn). Raises DataError if it renders no calls."""
    numbered = tuple(replace(call, id=f"call{number:05}") for number, call in enumerate(calls))
    turn = Message("assistant", "", numbered, calls_in_content=False)
    whole, prompt = chat.rendered((_QUESTION, turn), (), False), chat.rendered((_QUESTION,))
    head = prompt
    if not whole.startswith(prompt):  # it opens a thought, which the template drops from whole turns
        head = shared_start(*(chat.rendered((_QUESTION, answer), (), False) for answer in _ANSWERS))
    if not whole.startswith(head) or not all(call.name in whole for call in calls):
        raise DataError(f"{chat.where} does not render calls")
    text = whole.removeprefix(head)
    ends = [text.rfind(str(chat.tokenizer.decode([stop]))) for stop in chat.stop_token_ids]
    place = max(ends) if max(ends) >= 0 else len(text)
    return text[:place].rstrip("\n"), text[place:]


def _template_reader(chat: ChatTemplate) -> Read:
    """transformers' parser with the tokenizer's response template."""
    prefix, (_, end) = chat.rendered((_QUESTION,)), _rendered_turn(chat, _TRIAL_CALLS[:1])

    def read(written: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        try:
            schemas = list(map(function_schema, tools))
            message = chat.tokenizer.parse_response(written + end, prefix=prefix, tools=schemas)
            functions = [call["function"] for call in message.get("tool_calls") or ()]
        except Exception as error:  # the response template is data of the model's author
            raise BadCallError(_problem(error)) from error
        return [to_call(each, "arguments") for each in functions]

    return read


def _problem(error: Exception) -> str:
    return f"The call cannot be parsed: {' '.join(str(error).split())[:200].rstrip('.')}."


def _family(chat_template: str) -> str | None:
    """The name of vLLM's parser for a chat template; None if it is not known."""
    return next((name for mark, name in _VLLM_PARSERS.items() if mark in chat_template), None)


def _family_of(chat: ChatTemplate) -> str:
    """Raises ConfigError for an unknown one."""
    if name := _family(str(chat.tokenizer.chat_template)):
        return name
    raise ConfigError(
        f"env.tool_call_format=native: {chat.where} is of no known family, and the tokenizer has no response "
        f"template; {_OPTION} with one of vLLM's tool parsers, or choose another format"
    )


def _vllm_reader(name: str, chat: ChatTemplate) -> Read:
    """vLLM's tool parser of this name, on the text after the thought. Raises ConfigError."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(
            f"env.tool_call_format=native: {chat.where} has no response template, and vLLM, whose parser {name} "
            f"reads its calls, cannot be imported ({error}); install vLLM, or choose another format"
        ) from error
    known = ToolParserManager.list_registered()
    if name not in known:
        hint = nearest(name, known)
        raise ConfigError(f"env.tool_call_format_options: vLLM has no tool parser {name!r}; {hint}")
    make = ToolParserManager.get_tool_parser(name)
    logging.getLogger(make.__module__).setLevel(logging.CRITICAL)  # it logs every malformed call with a traceback

    takes_tools = "tools" in signature(make).parameters  # not in all versions
    in_thought = chat.opens_thought

    def read(written: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
        offered = [ChatCompletionToolsParam.model_validate(function_schema(tool)) for tool in tools]
        request = ChatCompletionRequest(messages=[], tools=offered or None)
        parser = make(chat.tokenizer, offered) if takes_tools else make(chat.tokenizer)  # has the state of one response
        try:
            found = parser.extract_tool_calls(spoken(written, in_thought), request)
        except Exception as error:  # a parser of free text, of many authors
            raise BadCallError(_problem(error)) from error
        values = [(call.function.name, read_whole_json(call.function.arguments)) for call in found.tool_calls]
        return [to_call({"name": name, "arguments": arguments}, "arguments") for name, arguments in values]

    try:
        read("", ())
    except Exception as error:  # such as special tokens that the tokenizer lacks
        raise ConfigError(
            f"env.tool_call_format=native: vLLM's parser {name} does not support {chat.where}: {error}"
        ) from error
    return read
