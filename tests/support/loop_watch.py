"""Fails what has no place on an event loop: opening files, and reading or tokenizing what is large."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from toolrl.servers.bounds import LARGE

_EVENTS = ("open", "tarfile.open", "shutil.unpack_archive", "subprocess.Popen")  # reading and unpacking begin with one
_ENDINGS = (".py", ".pyc", ".so")  # of modules, which are imported once


class _Watched:
    """thread: of the loop, while it is watched"""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.found: list[str] = []

    def here(self) -> bool:
        return threading.get_ident() == self.thread

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and self.here() and not str(arguments[0]).endswith(_ENDINGS):
            self.found.append(f"{event} {arguments[0]}")

    def sized(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, whose last positional argument, or `text`, must be small here."""

        def watched(*given: Any, **named: Any) -> Any:
            text = named["text"] if "text" in named else given[-1]
            size = len(text) if isinstance(text, str | bytes) else sum(len(str(each)) for each in text)
            if self.here() and size > LARGE:
                self.found.append(f"{name} of {size}")
            return call(*given, **named)

        return watched


@cache
def _watch() -> _Watched:
    """One: a hook cannot be removed."""
    made = _Watched()
    sys.addaudithook(made.audit)
    return made


@contextmanager
def watched_loop() -> Iterator[None]:
    """In the thread of the event loop, which runs in the block."""
    watch = _watch()
    watch.found.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "loads", watch.sized("json.loads", json.loads))
        for name in ("_encode_plus", "apply_chat_template"):
            patch.setattr(PreTrainedTokenizerFast, name, watch.sized(name, getattr(PreTrainedTokenizerFast, name)))
        watch.thread = threading.get_ident()
        try:
            yield
        finally:
            watch.thread = None
    assert not watch.found, watch.found
