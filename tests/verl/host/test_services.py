"""Services that are down are reported where a run starts: by name, with a hint, before anything heavy."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service import free_port
from tests.support.tiny import MINI
from toolrl.envs.openenv.remote import RemoteFactory
from toolrl.sandbox.client import RemoteSandbox
from toolrl.tools.retrieval.http_retriever import HttpRetriever
from verl.envs.registry import build_env_factory
from verl.errors import ServiceDownError
from verl.host.services import check_services, check_urls
from verl.trainer import main_generation, main_ppo


def dead() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def alive() -> Iterator[str]:
    """Answers 404 to everything, and 503 behind /gateway."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(503 if self.path.startswith("/gateway") else 404)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_failover_skips_endpoints_that_are_down(alive: str, caplog: pytest.LogCaptureFixture) -> None:
    gone = dead()
    asyncio.run(check_services([RemoteSandbox([alive]), RemoteFactory(alive), HttpRetriever(f"{alive}/retrieve"), 5]))
    assert not caplog.text
    asyncio.run(check_urls("sandbox", [gone, alive], "Start it"))
    assert gone in caplog.text and alive not in caplog.text
    with pytest.raises(ServiceDownError, match=r"gateway returned status 503; .*Start it"):
        asyncio.run(check_urls("sandbox", [f"{alive}/gateway", gone], "Start it"))


def test_a_missing_chat_user_endpoint_is_reported(tmp_path: Path) -> None:
    (tmp_path / "retail").mkdir()
    options = {"data": str(tmp_path), "user": "chat", "user_url": dead(), "user_model": "m"}
    with pytest.raises(ServiceDownError, match=r"simulated user at .*ConnectError.*correct user_url"):
        asyncio.run(check_services([build_env_factory("tau2", options)]))
    asyncio.run(check_services([build_env_factory("tau2", {"data": str(tmp_path)})]))


TOOLS = ["env.name=tool", "env.tool_call_format=toolrl"]


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        ([*TOOLS, "env.tools=[python]", "sandbox.urls=[URL]"], "or correct sandbox.urls"),
        ([*TOOLS, "env.tools=[{name: search, retriever: http, urls: URL}]"], "or correct the tool's urls"),
        (
            ["env.name=remote", "env.tool_call_format=hermes", "env.options={urls: URL}"],
            "or correct the environment's urls",
        ),
    ],
)
def test_commands_report_services_that_are_down_before_reading_data(
    overrides: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, url = tmp_path / "rows.jsonl", dead()
    data.write_text(json.dumps({"prompt": 5}) + "\n")
    overrides = [f"model.path={MINI / 'model'}", *(word.replace("URL", url) for word in overrides)]
    folder = f"trainer.default_local_dir={tmp_path}"
    assert main_ppo.main([*overrides, f"data.train_files=[{data}]", "trainer.device=cpu", folder]) == 1
    assert main_generation.main([*overrides, f"data.val_files=[{data}]", "rollout.name=hf", "trainer.device=cpu"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert output.count(hint) == 2 and output.count(url) >= 2 and "Traceback" not in output
