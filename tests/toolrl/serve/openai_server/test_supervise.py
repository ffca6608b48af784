"""The process around vLLM's server: exit codes, signals, and that none outlives the other."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.service import free_port
from toolrl.serve.openai_server import supervise

SERVES = """
import os, signal, sys, time
signal.signal(signal.{name}, lambda *_: sys.exit({code}))
with open(sys.argv[1], "w") as file:  # closed here: an exception of a signal is lost in the end of an object
    file.write(str(os.getpid()))
time.sleep(60)
"""


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, supervise.__file__, sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


def server_of(file: Path) -> psutil.Process:
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return psutil.Process(int(file.read_text()))


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", 1), ("raise SystemExit(3)", 3), ("import os; os.abort()", 134)]
)
def test_a_server_that_ends_without_a_signal_has_failed(code: str, expected: int) -> None:
    process = started(code)
    _, output = process.communicate(timeout=20)
    assert process.returncode == expected
    assert ("without a signal" in output) is (expected == 1)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 0), ("SIGTERM", 0), ("SIGTERM", 5), ("SIGINT", 1)])
def test_a_signal_reaches_the_server(name: str, code: int, tmp_path: Path) -> None:
    process = started(SERVES.format(name=name, code=code), str(tmp_path / "pid"))
    server_of(tmp_path / "pid")
    process.send_signal(signal.Signals[name])
    _, output = process.communicate(timeout=20)
    assert (process.returncode, output) == (128 + signal.Signals[name] if code else 0, "")


def test_a_server_is_announced_when_it_answers(tmp_path: Path) -> None:
    """It listens at once, but answers 503 to the first request, as while it loads."""
    code = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 1 else 503)
        self.end_headers()
    def log_message(self, *_): print("asked", Handler.asked, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    port = free_port()
    ready = ["--ready", f"http://127.0.0.1:{port}/health", "ready: here"]
    command = [sys.executable, supervise.__file__, *ready, sys.executable, "-c", code, str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == ready[-1]:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert lines == ["asked 1", "asked 2", "ready: here"]


def test_a_slow_start_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server listens until two lines have been printed."""
    monkeypatch.setattr(supervise, "_POLL_S", 0.05)
    monkeypatch.setattr(supervise, "_PRINT_S", 0.2)
    port, printed = free_port(), ""
    waiting = threading.Thread(target=supervise.announce, args=(f"http://127.0.0.1:{port}/health", "ready: here"))
    waiting.start()
    while printed.count("\n") < 2:
        time.sleep(0.05)
        printed += capsys.readouterr().out
    (tmp_path / "health").touch()
    files = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.HTTPServer(("127.0.0.1", port), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        waiting.join(20)
        server.shutdown()
    *lines, ready = (printed + capsys.readouterr().out).splitlines()
    assert ready == "ready: here" and all(each.startswith("the server starts (") for each in lines)


def test_ctrl_c_in_a_terminal_reaches_the_server_once(tmp_path: Path) -> None:
    counts = SERVES.format(name="SIGINT", code=0).replace(
        "sys.exit(0)", "os.write(2, b'x') and time.sleep(1) or sys.exit(0)"
    )
    process = started(counts, str(tmp_path / "pid"))
    server_of(tmp_path / "pid")
    os.killpg(process.pid, signal.SIGINT)
    _, output = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "x")


def test_under_nohup_a_hang_up_is_no_request_to_end(tmp_path: Path) -> None:
    code = SERVES.format(name="SIGTERM", code=0)
    command = ["nohup", sys.executable, supervise.__file__, sys.executable, "-c", code, str(tmp_path / "pid")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    server = server_of(tmp_path / "pid")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None and server.is_running()
    server.terminate()  # it ends with 0, unasked
    process.communicate(timeout=20)
    assert process.returncode == 1


def test_a_server_does_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    process = started(SERVES.format(name="SIGTERM", code=0), str(tmp_path / "pid"))
    server = server_of(tmp_path / "pid")
    process.kill()
    psutil.wait_procs([server], timeout=20)
    assert not server.is_running()
