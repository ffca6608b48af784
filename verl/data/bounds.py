"""Bounds on what a chat template may cost: it is a program that comes with a model.

It runs in Jinja's sandbox, which keeps it from the interpreter, but lets it loop and write for as long as it likes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl.errors import ConfigError
from verl.timer import raising_after

RENDER_S = 10.0  # for one rendering; templates that are in use take a millisecond
FREE_CHARS = 1_000_000
_AGAIN_S = 0.1  # Python drops what a signal raises inside of a destructor or of the garbage collector
GROWTH = 20  # characters of the text for one of what it is made of


class RenderTimeoutError(Exception):
    """A template was still at work at its deadline."""


@contextmanager
def render_deadline(seconds: float = RENDER_S) -> Iterator[None]:
    """Raises RenderTimeoutError inside of the block. In the main thread alone, where a signal can break off a loop."""
    text = f"it did not end within {seconds:g} s"
    with raising_after(seconds, lambda: RenderTimeoutError(text), again_s=_AGAIN_S):
        yield


def check_growth(text: str, source: Sequence[Any], where: str) -> None:
    """Raises ConfigError for a text that is much longer than what it was made of; tokenizers abort on some of them.

    where: whose template it is
    """
    if len(text) > FREE_CHARS and len(text) > FREE_CHARS + GROWTH * (given := len(json.dumps(source))):
        raise ConfigError(f"{where} makes {len(text)} characters of {given}; name another with model.tokenizer_path")
