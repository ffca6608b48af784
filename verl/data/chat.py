"""Messages to tokens and back: the model's own chat template, applied once.

An episode's tokens only grow. What follows a turn of the policy is therefore tokenised by itself: `answer_ids` where
others speak next, `continuation_ids` where the policy's own turn goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from verl.data.bounds import RenderTimeoutError, check_growth, render_deadline
from verl.data.formats.prompt import function_schema
from verl.data.messages import as_openai
from verl.data.template import check_messages, tool_fault, tools_left_out
from verl.errors import ConfigError, DataError
from verl.types import Message, Task, ToolSpec

# two dialogues that differ in nothing but what the assistant says; what follows that is alike
_QUESTION, _SAID = Message("user", "a"), (Message("assistant", "b"), Message("assistant", "c"))
_MEND = "choose another codec, or a tokenizer whose template has them"


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with a chat template.

    more_stops: tokens that end the assistant's turn as the tokenizer's eos_token does, where the model has several
    max_prompt_tokens: of a longer prompt of an episode the last ones are kept (data.truncation=left); None: all are
    template_options: variables of the chat template, such as enable_thinking
    """

    tokenizer: Any
    more_stops: tuple[int, ...] = ()
    max_prompt_tokens: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"the tokenizer in {self.tokenizer.name_or_path!r}"
        if not self.tokenizer.is_fast:
            raise ConfigError(
                f"{where} is a slow one, which cannot say what characters a token covers; "
                "add its tokenizer.json, or name a tokenizer that has one with model.tokenizer_path"
            )
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"{where} has no chat template; give a tokenizer of an instruction-tuned model")
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(f"{where} has no end-of-turn token (eos_token)")

    @property
    def end_token_id(self) -> int:
        """The token that ends a turn which the policy did not write itself."""
        end: int = self.tokenizer.eos_token_id
        return end

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every token at which the assistant's turn is over."""
        return tuple(dict.fromkeys((self.end_token_id, *self.more_stops)))

    def initial_ids(
        self, opening: str | Sequence[Message], tools: Sequence[ToolSpec] = (), column: str = "prompt"
    ) -> tuple[int, ...]:
        """The prompt of an episode as its format made it: messages, or a text that takes no template.

        A text gets what the tokenizer puts before every text (a bos_token, if any). `column`: that the messages are
        of, for errors. Raises DataError if the template refuses the messages or leaves out something of them,
        ConfigError if it leaves out tools or is none.
        """
        if isinstance(opening, str):
            return self._cut(tuple(self.tokenizer(opening)["input_ids"]))
        self.check_tools(opening, tools)
        self.check_messages(opening, tools, column)
        return self._cut(self.prompt_ids(opening, tools))

    def check_messages(self, messages: Sequence[Message], tools: Sequence[ToolSpec], column: str) -> None:
        """Raises DataError, with index and field, for what the chat template leaves out of the messages."""
        check_messages(self.rendered, messages, tools, column)

    def check_tools(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Raises ConfigError where the chat template does not list these tools beside these messages."""
        if tools and (lacking := tools_left_out(self.rendered, messages, tools)):
            where = f"the chat template of the tokenizer in {self.tokenizer.name_or_path!r}"
            raise ConfigError(tool_fault(lacking, where))

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The messages under the chat template, with the head of the assistant's turn. Raises as `rendered` does."""
        return self.response_ids(self.rendered(messages, tools))[0]

    def rendered(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), add_generation_prompt: bool = True
    ) -> str:
        """What the chat template makes of the messages.

        tools: those that the template is to tell of. Templates tell an empty list from none, so none is passed.
        Raises DataError if the template refuses them, ConfigError if it is none, or does not come to an end.
        """
        where = f"the chat template of the tokenizer in {self.tokenizer.name_or_path!r}"
        given, schemas = [as_openai(message) for message in messages], [function_schema(tool) for tool in tools]
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
                f"{where} cannot be read (line {error.lineno}: {error.message}); correct it, or name another with "
                "model.tokenizer_path"
            ) from error
        except RenderTimeoutError as error:
            raise ConfigError(f"{where}: {error}; name another with model.tokenizer_path") from error
        except Exception as error:  # a template is a program: it may add up what does not go together, or recurse
            roles = ", ".join(message.role for message in messages)
            reason = str(error) if isinstance(error, TemplateError | TypeError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"the chat template refuses messages of the roles {roles} ({reason})",
                hint="Change the row, or name a tokenizer with another template with model.tokenizer_path",
            ) from error
        check_growth(text, (given, schemas), where)
        return text

    def answer_ids(self, messages: Sequence[Message], ended: bool) -> tuple[int, ...]:
        """What follows the assistant's turn when others spoke: the rest of its end, their turns, the head of its next.

        Two dialogues that differ in the assistant's words alone are put through the chat template; their common end
        is what the template writes after such words, whatever it does to the words themselves (some take thoughts
        out of earlier turns). Nothing that the policy wrote is tokenised again.

        Marks of special tokens in the messages are broken up, so that nobody ends a turn from inside of it.

        ended: the policy wrote its end token; otherwise it is added here
        Raises ConfigError if the template does not end the assistant's turn with a stop token, or refuses the messages
        or leaves them out.
        """
        messages = [replace(message, content=self._without_marks(message.content)) for message in messages]
        try:
            one, other = (self.prompt_ids((_QUESTION, said, *messages)) for said in _SAID)
            unheard = [role for role in dict.fromkeys(message.role for message in messages) if not self._hears(role)]
        except DataError as error:
            raise ConfigError(f"{error.problem}; {_MEND}") from error
        if unheard:
            raise ConfigError(f"the chat template leaves out messages of the roles {', '.join(unheard)}; {_MEND}")
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
        after = one[len(one) - len(list(alike)) :]
        end = next((place for place, token in enumerate(after) if token in self.stop_token_ids), len(after))
        if end == len(after) or self.tokenizer.decode(after[:end]).strip():
            raise ConfigError(
                f"the chat template of the tokenizer in {self.tokenizer.name_or_path!r} ends an assistant's turn with "
                f"{self.tokenizer.decode(after[:8])!r} rather than with a stop token "
                f"({self.tokenizer.decode(self.stop_token_ids)}); episodes of several turns need one that does"
            )
        return after[end + 1 :] if ended else after[end:]

    def _hears(self, role: str) -> bool:
        """Whether what the role says after the assistant makes a difference: some templates skip unknown roles."""
        one, other = (self.prompt_ids((_QUESTION, _SAID[0], Message(role, text))) for text in ("d", "e"))
        return one != other

    @property
    def opens_thought(self) -> bool:
        """Whether the chat template itself opens a thought, so that responses begin inside of it."""
        prompt: str = self.tokenizer.decode(self.prompt_ids((_QUESTION,)))
        return prompt.rstrip().endswith("<think>")

    def continuation_ids(self, text: str) -> tuple[int, ...]:
        """A text that goes on in the assistant's own turn; marks of special tokens in it are text like any other."""
        encoded = self.tokenizer(_writable(text), add_special_tokens=False, split_special_tokens=True)
        return tuple(encoded["input_ids"])

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        marks = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")

    def _without_marks(self, text: str) -> str:
        """The text with a space behind the first character of every mark of a special token."""
        return self._marks.sub(lambda found: f"{found[0][:1]} {found[0][1:]}", _writable(text))

    def task_prompt_ids(self, task: Task) -> tuple[int, ...]:
        """The task's prompt and tools, where an episode is one response. Raises as `initial_ids` does."""
        return self.initial_ids(task.prompt, task.tools)

    def _cut(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if self.max_prompt_tokens is None else ids[-self.max_prompt_tokens :]

    def response_ids(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """(tokens of a text, the characters that each of them covers), without any that are put around texts."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]

    def response_text(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, without special tokens and without the one that ended it."""
        ended = len(token_ids) > 0 and token_ids[-1] in self.stop_token_ids
        text: str = self.tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=True)
        return text


def _writable(text: str) -> str:
    """The text with "?" for halves of surrogate pairs, which tools can put out and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def _rendered(render: Callable[[Sequence[Mapping[str, Any]]], str], given: Sequence[Mapping[str, Any]]) -> str:
    """Some templates know calls without a text by null, others by an empty one."""
    try:
        return render(given)
    except (TemplateError, TypeError):
        if all(each["content"] is not None for each in given):
            raise
        return render([each if each["content"] is not None else {**each, "content": ""} for each in given])
