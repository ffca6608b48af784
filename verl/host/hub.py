"""Look-ups on the model hub, which end within seconds where there is no network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from verl.errors import VerlError
from verl.text import in_short

_HUB_S = 10.0  # for the name's address, the connection and the whole answer
_READ_S = 30.0  # for each part of them, so that the thread which is left to itself ends; longer: one limit is reported
_T = TypeVar("_T")


class HubDownError(VerlError):
    """What is wrong with a name, as a clause: the hub does not answer; and what to do without it."""


def ask_hub(kind: str, name: str, revision: str | None = None) -> Any:
    """The hub's description of a repository: one request, no retries. kind: model or dataset

    Its libraries would repeat each of their own look-ups for a minute. Raises HubDownError; what the hub itself answers
    otherwise, such as that it has no such repository, is its library's HfHubHTTPError or HFValidationError.
    """
    from huggingface_hub import HfApi  # slow imports
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        return _within(_HUB_S, lambda: api.repo_info(name, repo_type=kind, revision=revision, timeout=_READ_S))
    except HFValidationError:
        raise
    except Exception as error:  # its HTTP client's
        response = error.response if isinstance(error, HfHubHTTPError) else None
        if response is not None and response.status_code < 500:
            raise
        problem = f"status {response.status_code}" if response is not None else in_short(error)
        get = f"hf download {name} --repo-type {kind} --local-dir FOLDER"
        raise HubDownError(
            f"is no file or folder, and the hub, {api.endpoint}, does not answer ({problem}). Without a network, give "
            f"a folder: `{get}` writes it where there is one"
        ) from error


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """The result of a call; a thread that takes longer is left to itself. Raises TimeoutError."""
    ended: Future[_T] = Future()

    def work() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised in the caller
            ended.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return ended.result(seconds)
    except TimeoutError as error:
        if ended.done():
            raise
        raise TimeoutError(f"nothing within {seconds:g} s") from error
