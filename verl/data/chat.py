"""Messages to tokens and back: the model's own chat template, applied once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from verl.errors import ConfigError
from verl.types import Message


@dataclass(frozen=True)
class ChatCodec:
    """A tokenizer with a chat template.

    more_stops: tokens that end the assistant's turn as the tokenizer's eos_token does, where the model has several
    """

    tokenizer: Any
    more_stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokenizer.chat_template is None:
            raise ConfigError("model.tokenizer has no chat template; give a tokenizer of an instruction-tuned model")
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("model.tokenizer has no end-of-turn token (eos_token)")

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
        """The messages under the chat template, with the head of the assistant's turn."""
        ids = self.tokenizer.apply_chat_template(
            [asdict(message) for message in messages], add_generation_prompt=True, return_dict=False
        )
        return tuple(ids)

    def reply_ids(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """(tokens of an assistant's text, the characters that each of them covers), without special tokens."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, without special tokens and without the one that ended it."""
        ended = len(token_ids) > 0 and token_ids[-1] in self.stop_token_ids
        text: str = self.tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=True)
        return text
