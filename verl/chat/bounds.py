"""Time and size limits for chat templates, which are programs shipped with a model.

Jinja's sandbox keeps a template from the interpreter, but does not bound its run time or output.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from verl.errors import ConfigError
from verl.host.timer import raising_after

RENDER_S = 10.0  # per rendering; real templates take a millisecond
FREE_CHARS = 1_000_000
_AGAIN_S = 0.1  # Python drops an exception that a signal raises in a destructor or in garbage collection
GROWTH = 20  # maximum output characters per input character


class RenderTimeoutError(Exception):
    """Rendering a template took too long."""


@contextmanager
def render_deadline(seconds: float = RENDER_S) -> Iterator[None]:
    """Raises RenderTimeoutError inside the block; only in the main thread, where a signal can interrupt a loop."""
    text = f"rendering took longer than {seconds:g} s"
    with raising_after(seconds, lambda: RenderTimeoutError(text), again_s=_AGAIN_S):
        yield


def check_growth(text: str, source: Sequence[Any], where: str) -> None:
    """Raises ConfigError if the text is much longer than its source; some of these make tokenizers abort.

    where: the template's owner, for the message
    """
    if len(text) > FREE_CHARS and len(text) > FREE_CHARS + GROWTH * (given := len(json.dumps(source))):
        problem = f"{where} renders {len(text)} characters from {given}"
        raise ConfigError(f"{problem}; set model.tokenizer_path to another tokenizer")
