"""Names that are looked up on the hub that does not answer: one line after one look-up, for models and data sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from tests.conftest import ROOT
from tests.support.hub import UNAVAILABLE, Hub
from tests.support.service import free_port
from tests.support.until import until
from verl.host import hub
from verl.host.hub import HubDownError, ask_hub

HUBS: dict[str, tuple[Callable[[], Hub | None], str]] = {
    "silent": (Hub, "TimeoutError: nothing within 10 s"),
    "refusing": (lambda: None, "ConnectError: "),
    "503": (lambda: Hub(UNAVAILABLE), "status 503"),
}


@pytest.mark.long
@pytest.mark.parametrize("state", HUBS)
@pytest.mark.parametrize(
    ("argv", "start", "kind"),
    [
        (["plan", "model=me/name"], "ConfigError: model.path: 'me/name' ", "model"),
        (["lab", "data=me/name"], "DataError: me/name: ", "dataset"),
    ],
)
def test_without_a_hub_a_command_prints_one_line_with_a_hint(
    state: str, argv: list[str], start: str, kind: str
) -> None:
    start_hub, problem = HUBS[state]
    server = start_hub()
    address = server.address if server is not None else f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-m", "toolrl", *argv],
        env={**os.environ, "HF_ENDPOINT": address, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert server is None or server.connections in (1, 2)  # a client may connect twice; the libraries would more
    (message,) = [line for line in (done.stdout + done.stderr).splitlines() if "recipe=grpo" not in line]
    assert message.startswith(f"{start}is no file or folder, and the hub, {address}, does not answer ({problem}")
    assert message.endswith(
        "). Without a network, give a folder: "
        f"`hf download me/name --repo-type {kind} --local-dir FOLDER` writes it where there is one"
    )


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_all_of_a_look_up_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes byte by byte is within the timeouts of every read."""
    server = Hub(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + b" " * 900, every_s=0.05)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(hub, "_HUB_S", 0.5)
    with pytest.raises(HubDownError, match=r"TimeoutError: nothing within 0.5 s"):
        ask_hub(kind, "me/name")
    until(lambda: server.connections > 0)  # the thread that is left to itself may be slow
    assert server.connections == 1


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_answers_of_the_hub_itself_are_passed_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    with pytest.raises(HfHubHTTPError):
        ask_hub(kind, "me/name")


def test_without_a_network_by_choice_there_is_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubDownError, match=r"OfflineModeIsEnabled.*hf download me/name --repo-type dataset"):
        ask_hub("dataset", "me/name")
