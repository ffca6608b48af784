"""Messages to tokens and back: the model's own chat template, applied once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from verl.errors import ConfigError, DataError
from verl.types import Message, Task


@dataclass(frozen=True)
class ChatCodec:
    """A tokenizer with a chat template.

    more_stops: tokens that end the assistant's turn as the tokenizer's eos_token does, where the model has several
    """

    tokenizer: Any
    more_stops: tuple[int, ...] = ()

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

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The messages under the chat template, with the head of the assistant's turn.

        Raises DataError if the template refuses them, ConfigError if it is none.
        """
        try:
            ids = self.tokenizer.apply_chat_template(
                [asdict(message) for message in messages], add_generation_prompt=True, return_dict=False
            )
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template of the tokenizer in {self.tokenizer.name_or_path!r} cannot be read "
                f"(line {error.lineno}: {error.message}); correct it, or name another with model.tokenizer_path"
            ) from error
        except (TemplateError, TypeError) as error:  # the second where a template adds up what does not go together
            roles = ", ".join(message.role for message in messages)
            raise DataError(
                f"the chat template refuses messages of the roles {roles} ({error})",
                mend="Change the row, or name a tokenizer with another template with model.tokenizer_path",
            ) from error
        return tuple(ids)

    def task_prompt_ids(self, task: Task) -> tuple[int, ...]:
        """The task's prompt; an error names the task."""
        try:
            return self.prompt_ids(task.prompt)
        except DataError as error:
            raise error.at(file=task.id) from error

    def opening_ids(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        return self.prompt_ids(messages)

    def continuation_ids(self, text: str) -> tuple[int, ...]:
        """A text that goes on in the assistant's own turn."""
        return self.reply_ids(text)[0]

    def answer_ids(self, messages: Sequence[Message], ended: bool) -> tuple[int, ...]:
        raise NotImplementedError

    def reply_ids(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """(tokens of an assistant's text, the characters that each of them covers), without special tokens."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, without special tokens and without the one that ended it."""
        ended = len(token_ids) > 0 and token_ids[-1] in self.stop_token_ids
        text: str = self.tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=True)
        return text
