"""Messages to tokens and back, with the model's own chat template.

An episode's tokens are append-only. Everything after a prompt is therefore tokenized separately, but as it is tokenized
in its place, because a tokenizer may put a space before the first word of a text: `response_ids` for the policy's own
text, `answer_ids` for messages of other roles, `continuation_ids` for text that continues the assistant's turn.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from verl.chat.bounds import RenderTimeoutError, check_growth, render_deadline
from verl.chat.dropped_fields import check_messages, tool_fault, tools_left_out
from verl.errors import ConfigError, DataError
from verl.formats.openai import as_openai
from verl.formats.prompt import function_schema
from verl.formats.toolrl_text import THINK, THINK_END
from verl.text import shared_start, utf8
from verl.types import Message, Task, ToolCall, ToolSpec

# two conversations that differ only in the assistant's message; their common suffix is what follows that message
_QUESTION, _RESPONSES = Message("user", "a"), (Message("assistant", "b"), Message("assistant", "c"))
_ANSWERS = ("Yes.", "7")  # to compare the tokens of turns
_HINT = "choose another tool-call format, or a tokenizer whose template supports them"
_OPENED = re.compile(rf"{THINK}\s*\Z")
_THOUGHT = re.compile(rf"{THINK}\s*({THINK_END}\s*)?\Z")  # a thought, open or empty
_TAIL = 16  # tokens at the end of a context in which it may open a thought
_BEFORE = ("\n", "a")  # texts that a continuation may follow; no tokenizer merges both of them with its first character

Encoded = tuple[tuple[int, ...], list[tuple[int, int]]]  # tokens, character span of each


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """What a chat template writes around the text of an assistant's turn.

    prompt: the whole rendering before it, with the generation prompt
    lead: between the prompt and an answer without a thought: nothing, white space, or an empty thought
    end: from the answer to the end of the rendering
    """

    prompt: str
    lead: str
    end: str

    @property
    def blank_lead(self) -> str:
        """White space between the prompt and a thought, as in GLM's turns."""
        text = self.lead.lstrip()
        return "" if text.startswith(THINK_END) else self.lead.removesuffix(text)


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with a chat template.

    more_stops: further end-of-turn tokens besides the tokenizer's eos_token
    max_prompt_tokens: longer prompts are truncated to their last tokens (data.truncation=left); None: no limit
    template_options: variables of the chat template, such as enable_thinking
    """

    tokenizer: Any
    more_stops: tuple[int, ...] = ()
    max_prompt_tokens: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = self._tokenizer_name
        if not self.tokenizer.is_fast:
            raise ConfigError(
                f"{where} is a slow tokenizer, which has no character offsets; "
                "add its tokenizer.json, or set model.tokenizer_path to a tokenizer that has one"
            )
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"{where} has no chat template; use the tokenizer of an instruction-tuned model")
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(f"{where} has no end-of-turn token (eos_token)")

    @property
    def where(self) -> str:
        """The chat template, for errors."""
        return f"the chat template of {self._tokenizer_name}"

    @property
    def _tokenizer_name(self) -> str:
        """For errors. A tokenizer that was made in memory has no path."""
        path = self.tokenizer.name_or_path
        return f"the tokenizer in {path!r}" if path else f"a {type(self.tokenizer).__name__} without a path"

    @cached_property
    def end_token_id(self) -> int:
        """The token with which the chat template ends the assistant's turn: added where the policy did not write it.

        It need not be the tokenizer's eos_token, as in base models; that one counts where the template writes none.
        """
        try:
            after = self.frame.end.lstrip()
        except (ConfigError, DataError):  # reported where the template is used
            after = ""
        added = {str(token): number for number, token in self.tokenizer.added_tokens_decoder.items()}
        ends = [token for token in added if after.startswith(token)]
        return int(added[max(ends, key=len)] if ends else self.tokenizer.eos_token_id)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end the assistant's turn."""
        return tuple(dict.fromkeys((self.end_token_id, int(self.tokenizer.eos_token_id), *self.more_stops)))

    @cached_property
    def frame(self) -> TurnFrame:
        """The frame of a turn that answers one user message.

        Raises ConfigError if the chat template does not begin such a turn, or begins it in other ways with and without
        its text; DataError if it rejects the messages.
        """
        prompt = self.rendered((_QUESTION,))
        one, other = (self.rendered((_QUESTION, response), (), False) for response in _RESPONSES)
        before, end = shared_start(one, other), shared_start(one[::-1], other[::-1])[::-1]
        thought = _THOUGHT.search(prompt)
        if one == other:
            raise ConfigError(f"{self.where} does not render the text of the assistant; {_HINT}")
        if before.startswith(prompt):
            lead = before.removeprefix(prompt)
        elif thought and before.startswith(header := prompt[: thought.start()]):
            # a finished turn has another empty thought, or none
            lead = "" if thought[1] else before.removeprefix(header).removeprefix(THINK) or f"\n{THINK_END}\n\n"
        else:
            raise ConfigError(
                f"{self.where} does not continue its own generation prompt, {prompt[-40:]!r}, with a response; {_HINT}"
            )
        if lead.strip() and prompt == self.rendered((_QUESTION,), (), False):
            raise ConfigError(
                f"{self.where} ignores add_generation_prompt, so the policy would have to begin its turn itself, with "
                f"{lead!r}; set model.tokenizer_path to a tokenizer whose template begins it"
            )
        return TurnFrame(prompt, lead, end)

    @property
    def question_ids(self) -> tuple[int, ...]:
        """The tokens of a shortest prompt."""
        return self.encoded(self.frame.prompt)[0]

    def check_turns(self) -> None:
        """Raises ConfigError if a turn of text has other tokens than the chat template's own, or another end."""
        prompt, frame = self.question_ids, self.frame
        end = frame.end.strip()
        if end and not end.startswith(str(self.tokenizer.convert_ids_to_tokens(self.end_token_id))):
            raise ConfigError(f"{self.where} ends an assistant's turn with {end!r} rather than with a token")
        for content in _ANSWERS:
            text, (ids, _) = self.response(prompt, content)
            whole = self.rendered((_QUESTION, Message("assistant", content)), (), False)
            if not whole.startswith(frame.prompt):  # the thought is taken out of finished turns
                whole = frame.prompt + text + frame.end
            theirs, own = self.encoded(whole)[0], (*prompt, *ids)
            if theirs[: len(prompt)] != prompt:
                continue  # no policy can write a turn whose first token is half in the prompt
            theirs = theirs[: len(own)] if end else (*theirs[: len(own) - 1], self.end_token_id)
            if theirs != own:
                raise ConfigError(
                    f"a turn has other tokens than in {self.where}: {self._shown(own[len(prompt) :])} for {text!r}, "
                    f"instead of {self._shown(theirs[len(prompt) :])}; set model.tokenizer_path to another tokenizer"
                )

    def _shown(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(list(ids)))

    def initial_ids(
        self, prompt: str | Sequence[Message], tools: Sequence[ToolSpec] = (), column: str = "prompt"
    ) -> tuple[int, ...]:
        """The prompt tokens of an episode, checked and truncated. prompt: messages, or a text without a template.

        A text gets the tokenizer's usual prefix (a bos_token, if any). `column`: the messages' column, for errors.
        Raises DataError if the template rejects the messages or drops parts of them, ConfigError if it drops tools or
        is invalid.
        """
        if isinstance(prompt, str):
            return self._truncated(self.encoded_ids(prompt, add_special_tokens=True))
        self.check_tools(prompt, tools)
        self.check_messages(prompt, tools, column)
        return self._truncated(self.prompt_ids(prompt, tools))

    def check_messages(self, messages: Sequence[Message], tools: Sequence[ToolSpec], column: str) -> None:
        """Raises DataError, with index and field, for parts of the messages that the chat template drops."""
        check_messages(self.rendered, messages, tools, column)

    def check_tools(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Raises ConfigError if the chat template does not list these tools with these messages."""
        if tools and (lacking := tools_left_out(self.rendered, messages, tools)):
            raise ConfigError(tool_fault(lacking, self.where))

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The messages under the chat template, with the generation prompt. Raises like `rendered`."""
        return self.encoded_ids(self.rendered(messages, tools))

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> str:
        """The messages rendered with the chat template.

        tools: tools for the template to list. Templates distinguish an empty list from None, so () is passed as None.
        Raises DataError if the template rejects the messages, ConfigError if it is invalid or does not terminate.
        """
        where = self.where
        given, schemas = list(map(as_openai, messages)), list(map(function_schema, tools))
        render = partial(
            self.tokenizer.apply_chat_template,
            tools=schemas or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.template_options,
        )
        try:
            with render_deadline():
                text = _rendered(render, given)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"{where} cannot be parsed (line {error.lineno}: {error.message}); correct it, or set "
                "model.tokenizer_path to another tokenizer"
            ) from error
        except RenderTimeoutError as error:
            raise ConfigError(f"{where}: {error}; set model.tokenizer_path to another tokenizer") from error
        except Exception as error:  # a template is a program: it may raise type errors or recurse
            roles = ", ".join(message.role for message in messages)
            reason = str(error) if isinstance(error, TemplateError | TypeError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"the chat template rejects messages with the roles {roles} ({reason})",
                hint="Change the messages, or set model.tokenizer_path to a tokenizer with another chat template",
            ) from error
        check_growth(text, (given, schemas), where)
        return text

    def answer_ids(self, messages: Sequence[Message], ended: bool) -> tuple[int, ...]:
        """Tokens that follow the assistant's turn: its end-of-turn text, these messages, the next generation prompt.

        Two conversations that differ only in the assistant's content are rendered; their common suffix is what the
        template writes after any response, whatever it does to the response itself (some strip thoughts from earlier
        turns). Responses are never tokenized again.

        Special-token strings in the messages are broken up, so that no observation can end its turn early.

        ended: the policy generated its end token; otherwise it is added here
        Raises ConfigError if the template does not end the assistant's turn with a stop token, or rejects or drops the
        messages.
        """
        messages = [replace(message, content=self._without_marks(message.content)) for message in messages]
        try:
            return self._answer_ids(messages, ended, _RESPONSES)
        except ConfigError:
            if all(message.role != "tool" for message in messages):
                raise
            answers, responses = _answers_to_calls(messages)  # some templates render results only after their calls
            with suppress(ConfigError):
                return self._answer_ids(answers, ended, responses)
            raise

    def _answer_ids(self, messages: Sequence[Message], ended: bool, responses: Sequence[Message]) -> tuple[int, ...]:
        """responses: two that differ, to the same question"""
        try:
            whole = [self.prompt_ids((_QUESTION, response, *messages)) for response in responses]
            by_role = {role: [each for each in messages if each.role == role] for role in _roles(messages)}
            dropped = [role for role, answers in by_role.items() if not self._renders(responses[0], answers)]
        except DataError as error:
            raise ConfigError(f"{error.problem}; {_HINT}") from error
        if dropped:
            raise ConfigError(f"the chat template drops messages with the roles {', '.join(dropped)}; {_HINT}")
        after = _common_end(*whole)
        end = self._place_of_stop(after)
        if end == len(after) or after[:end] != self._closing(responses):
            raise ConfigError(
                f"{self.where} ends an assistant's turn with "
                f"{self.tokenizer.decode(after[:8])!r} rather than with a stop token "
                f"({self.tokenizer.decode(self.stop_token_ids)}), which multi-turn episodes need"
            )
        return after[end + 1 :] if ended else after[end:]

    def _place_of_stop(self, ids: Sequence[int]) -> int:
        return next((place for place, token in enumerate(ids) if token in self.stop_token_ids), len(ids))

    def _closing(self, responses: Sequence[Message]) -> tuple[int, ...]:
        """What follows the difference of the responses in their own turn: the closing tag of a call, or nothing."""
        turns = [self.encoded(self.rendered((_QUESTION, each), (), False))[0] for each in responses]
        after = _common_end(*turns)
        closing = after[: self._place_of_stop(after)]
        has_text = responses == _RESPONSES and self.tokenizer.decode(closing).strip()
        return () if has_text else closing

    def _renders(self, response: Message, answers: Sequence[Message]) -> bool:
        """Whether the template renders these answers to a response: some skip unknown roles."""
        one, other = (
            self.rendered((_QUESTION, response, *(replace(answer, content=text) for answer in answers)))
            for text in ("d", "e")
        )
        return one != other

    @property
    def opens_thought(self) -> bool:
        """Whether the chat template itself opens a thought, so that responses begin inside it."""
        return _OPENED.search(self.rendered((_QUESTION,))) is not None

    def response(self, prompt_ids: Sequence[int], content: str, raw: bool = False) -> tuple[str, Encoded]:
        """(a turn as the policy writes it after this prompt, its tokens with the end token and their spans).

        A thought that the prompt opens is not opened again; an answer without a thought follows what the chat template
        puts there: the end of that thought, or an empty one. White space before it stays.
        raw: the prompt is no rendering of the chat template
        """
        opened, text = self._opened(prompt_ids), content
        if THINK_END not in content:
            text = content if raw else self.frame.lead + content
        elif opened and content.lstrip().startswith(THINK):
            text = content.lstrip().removeprefix(opened).removeprefix(THINK)
        elif not opened and not raw:
            text = self.frame.blank_lead + content
        if raw:
            (ids, spans), end = self._after(_BEFORE, text), int(self.tokenizer.eos_token_id)
        else:
            text += self.frame.end[: len(self.frame.end) - len(self.frame.end.lstrip())]
            (ids, spans), end = self.response_ids(text), self.end_token_id
        return text, ((*ids, end), [*spans, (len(text), len(text))])

    def continuation_ids(self, text: str) -> tuple[int, ...]:
        """A text that continues the assistant's turn; special-token strings in it are encoded as plain text."""
        splitting = _splitting(self.tokenizer)

        def encode(part: str) -> Encoded:
            return tuple(_encoded(splitting, part, add_special_tokens=False)["input_ids"]), []

        return self._after(_BEFORE, utf8(text), encode)[0]

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        marks = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")

    def control_tokens(self, text: str, raw: bool = False) -> list[str]:
        """Those in this text that end a turn or, if the prompt is no raw text, that the chat template puts around one;
        thoughts are no part of that."""
        ends = filter(None, self.tokenizer.convert_ids_to_tokens(self.stop_token_ids))  # a model may have more tokens
        return [token for token in dict.fromkeys((*ends, *(() if raw else self._around))) if token in text]

    @cached_property
    def _around(self) -> list[str]:
        found = self._marks.findall(self.frame.prompt + self.frame.end)
        return [token for token in found if token not in (THINK, THINK_END)]

    def _without_marks(self, text: str) -> str:
        """The text with a space after the first character of every special-token string."""
        return self._marks.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", utf8(text))

    def task_prompt_ids(self, task: Task) -> tuple[int, ...]:
        """The prompt of a single-turn task with its tools. Raises like `initial_ids`."""
        return self.initial_ids(task.prompt, task.tools)

    def _truncated(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if self.max_prompt_tokens is None else ids[-self.max_prompt_tokens :]

    def encoded(self, text: str) -> Encoded:
        """(tokens of a text, character span of each token), without added special tokens"""
        found = _encoded(self.tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(found["input_ids"]), [tuple(span) for span in found["offset_mapping"]]

    def encoded_ids(self, text: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        """The tokens alone: spans of a million tokens are made in one step, in which no other thread runs."""
        return tuple(_encoded(self.tokenizer, text, add_special_tokens=add_special_tokens)["input_ids"])

    def response_ids(self, text: str) -> Encoded:
        """(tokens of a text that follows the generation prompt, character span of each token)"""
        return self._after((self.frame.prompt, *_BEFORE), text)

    def _after(self, before: Sequence[str], text: str, encode: Callable[[str], Encoded] | None = None) -> Encoded:
        """The text as it is encoded behind the first of these texts that shares no token with it, else on its own."""
        encode = encode or self.encoded
        for each in before:
            (head, _), (whole, spans) = encode(each), encode(each + text)
            if whole[: len(head)] == head:
                own = [(start - len(each), end - len(each)) for start, end in spans[len(head) :]]
                return whole[len(head) :], own
        return encode(text)

    def response_text(self, token_ids: Sequence[int]) -> str:
        """The response with all special tokens, which formats may use, but without the token that ended it."""
        return str(self.tokenizer.decode(token_ids[:-1] if self.ended(token_ids) else token_ids))

    def decoded(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens, as other trainers decode it for rewards."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the policy ended its turn, rather than pausing at a stop string."""
        return len(token_ids) > 0 and token_ids[-1] in self.stop_token_ids

    def turn_of(
        self, context_ids: Sequence[int], token_ids: Sequence[int], before: Sequence[int] = ()
    ) -> tuple[Message, str]:
        """(the policy's turn, the token that ended it if that is not the chat template's): see `Message` and `Turn`.

        context_ids: the new tokens before the response; their end may open a thought
        before: what the policy wrote before a pause without an observation
        """
        strange = self.ended(token_ids) and token_ids[-1] != self.end_token_id
        other_end = str(self.tokenizer.decode([token_ids[-1]])) if strange else ""
        text = self.response_text((*before, *token_ids))[len(self.response_text(before)) :]
        return Message("assistant", self._opened(context_ids) + text), other_end

    def _opened(self, context_ids: Sequence[int]) -> str:
        """The end of a context that opens a thought, in which the response begins; empty if it opens none."""
        found = _OPENED.search(str(self.tokenizer.decode(context_ids[-_TAIL:])))
        return found[0] if found else ""


def _encoded(tokenizer: Any, text: str, **options: Any) -> Mapping[str, Any]:
    """Raises DataError for a text on which the tokenizer's Rust code panics, as on millions of spaces."""
    try:
        found: Mapping[str, Any] = tokenizer(text, return_attention_mask=False, return_token_type_ids=False, **options)
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise DataError(f"has {len(text)} characters, on which the tokenizer fails ({reason})") from None
    return found


@lru_cache(maxsize=4)
def _splitting(tokenizer: Any) -> Any:
    """A copy that encodes special tokens as plain text. A setting per call would change what other threads encode."""
    made = deepcopy(tokenizer)
    made.split_special_tokens = True
    return made


def _roles(messages: Sequence[Message]) -> list[str]:
    return list(dict.fromkeys(message.role for message in messages))


def _common_end(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
    return tuple(one[len(one) - len(list(alike)) :])


def _answers_to_calls(messages: Sequence[Message]) -> tuple[list[Message], tuple[Message, Message]]:
    """(the messages with call ids, two responses with different arguments that make these calls)"""
    answers, calls = [], []
    for number, message in enumerate(messages):
        if message.role == "tool":
            calls.append(ToolCall(message.tool or "tool", {}, message.tool_call_id or f"call{number:05}"))
            message = replace(message, tool=calls[-1].name, tool_call_id=calls[-1].id)
        answers.append(message)

    def response(text: str) -> Message:
        made = tuple(replace(call, arguments={"a": text}) for call in calls)
        return Message("assistant", "", made, calls_in_content=False)

    return answers, (response("b"), response("c"))


def _rendered(render: Callable[[Sequence[Mapping[str, Any]]], str], given: Sequence[Mapping[str, Any]]) -> str:
    """Render with null content for calls without text; retry with an empty text, which other templates expect."""
    try:
        return render(given)
    except (TemplateError, TypeError):
        if all(each["content"] is not None for each in given):
            raise
        return render([each if each["content"] is not None else {**each, "content": ""} for each in given])
