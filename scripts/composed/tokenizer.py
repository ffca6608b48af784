"""The tokenizer: as that of scripts/mini, with other fixed pieces. A value has the same tokens wherever it stands.

A name is two syllables, a number its digits; a space before them is a token of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer

from scripts.composed.rows import INSTRUCTION
from scripts.mini.tokenizer import train_tokenizer
from scripts.mini.values import SYLLABLES

VOCABULARY = 1280

_FIRST = f"[{''.join(sorted({each[0].upper() for each in SYLLABLES}))}][aeiou]"
_SECOND = f"[{''.join(sorted({each[0] for each in SYLLABLES}))}][aeiou]"
MERGE_UNITS = "|".join((f"{_FIRST}(?={_SECOND}(?![a-z]))", "[A-Z][a-z]*", r"[ _]?[a-z]+"))
_TYPES = ("str", "int", "bool")
FRAMES = (
    f"{INSTRUCTION}\n\n**Available Tools**\nIn your response, you can use the following tools:\n1. Name: ",
    *(f"\n{number}. Name: " for number in (2, 3, 4)),
    "\nDescription:",
    ".\nParameters: {}",
    '.\nParameters: {"',
    '": {"description": "',
    *(f'", "type": "{kind}", "default": ""}}{end}' for kind in _TYPES for end in (', "', "}")),
    "**Dialogue Records History**\n",
    '{"name": "',
    '", "parameters": {}}',
    '", "parameters": {"',
    '": "',
    '": ',
    '", "',
    ', "',
    '"}}',
    "}}",
    ":00",
)


def train(texts: Iterable[str]) -> Tokenizer:
    """Train on chat-templated rows."""
    return train_tokenizer(texts, FRAMES, MERGE_UNITS, VOCABULARY)
