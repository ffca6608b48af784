"""Pulls tasks from a trainer's gateway, and runs a command for each: for agents on other machines or in containers.

    python puller.py http://trainer:8100 python agent.py {task_json}

The command finds the same variables as one that the trainer starts (docs/agents.md). Standard library only: copy this
file to where the agent lives. $VERL_SERVICE_TOKEN is the token of the gateway. Ends when the gateway has been gone for
a minute, and its program with it, or with SIGTERM.
"""

import ctypes
import errno
import http.client
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator  # noqa: UP035  agents may need an old interpreter

_PATIENCE_S = 60.0
_TIMEOUT_S = 60.0
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_REWARD_BYTES = 1 << 20
_SHOWN_CHARS = 600  # shown of a failed command's output
_READ_BYTES = 1 << 13  # read from its end, which may be white space


class Gateway:
    """The routes of the gateway below /tasks."""

    def __init__(self, url: str) -> None:
        token = os.environ.get("VERL_SERVICE_TOKEN")
        self._url, self._headers = url.rstrip("/"), {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def call(self, path: str, body: Any = None, method: str = "POST") -> "tuple[int, Any]":
        """Status and content. Raises OSError after a minute without any answer; errors of servers are none."""
        data = None if method == "GET" else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/tasks/{path}", data, self._headers, method=method)
        until = None  # since the first failure
        while True:
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                    text = answer.read()
                    return answer.status, json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code not in (429, 500, 502, 503, 504) or is_over(until):
                    return error.code, error.read().decode(errors="replace")
            except (OSError, http.client.HTTPException):
                if is_over(until):
                    raise
            until = until or time.monotonic() + _PATIENCE_S
            time.sleep(1.0)


def is_over(until: "float | None") -> bool:
    return until is not None and time.monotonic() > until


def run(gateway: Gateway, leased: Any, command: "list[str]") -> None:
    """One task, from its lease to its report."""
    with episode_folder() as folder:
        (folder / "task.json").write_text(json.dumps(leased["task"]), encoding="utf-8")
        arguments = [each.replace("{task_json}", str(folder / "task.json")) for each in command]
        variables = {**os.environ, **leased["variables"], "REWARD_FILE": str(folder / "reward.json")}
        variables.pop("VERL_SERVICE_TOKEN", None)
        with (folder / "output.txt").open("wb") as output:
            program = subprocess.Popen(
                arguments,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: control(_DEATH_SIGNAL, signal.SIGKILL),
            )
        try:
            if held(gateway, leased, program):
                status, problem = gateway.call(f"{leased['lease']}/done", report(folder, program.returncode))
                if status == 400:  # an invalid reward
                    gateway.call(f"{leased['lease']}/done", {"error": problem})
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            end_children()


def control(option: int, value: int) -> None:
    """prctl of this process, on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def end_children() -> None:
    """Kill and collect what the program has left: it falls to this process, also from a session of its own."""
    with suppress(ChildProcessError):  # none is left
        while True:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            for file in Path("/proc").glob("[0-9]*/stat"):
                with suppress(OSError):  # it has ended
                    if int(file.read_text(errors="replace").rpartition(")")[2].split()[1]) == os.getpid():
                        os.kill(int(file.parent.name), signal.SIGKILL)
            os.wait()


def held(gateway: Gateway, leased: Any, program: "subprocess.Popen[bytes]") -> bool:
    """Send heartbeats until the program has ended; False if the lease ends before."""
    while True:
        try:
            program.wait(timeout=leased["lease_s"] / 4)
            return True
        except subprocess.TimeoutExpired:
            if gateway.call(f"{leased['lease']}/heartbeat")[0] != 200:
                return False


def report(folder: Path, code: int) -> "dict[str, Any]":
    """The program's reward, or its error. The file of a program that failed does not count."""
    if code != 0:
        return {"error": f"exit status {code}: {output_end(folder / 'output.txt')}"}
    try:
        return {"reward": json.loads(left_in(folder / "reward.json", _REWARD_BYTES).decode())}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        return {"error": f"reward.json is not JSON ({error})"}


def output_end(file: Path) -> str:
    try:
        return left_in(file, _READ_BYTES, end=True).decode(errors="replace").strip()[-_SHOWN_CHARS:]
    except OSError as error:
        return str(error)


def left_in(file: Path, most: int, end: bool = False) -> bytes:
    """A file that the program wrote; end: only its last bytes. Raises OSError for a link, a pipe, a device or more"""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or (status.st_size > most and not end):
            raise OSError(errno.EINVAL, f"no regular file of its own with at most {most} bytes", str(file))
        opened.seek(max(0, status.st_size - most))
        return opened.read(most)


@contextmanager
def episode_folder() -> "Iterator[Path]":
    folder = tempfile.mkdtemp(prefix="agent-")
    try:
        yield Path(folder)
    finally:  # `rm` nests as deep as the program did
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def main(url: str, *command: str) -> int:
    """Pull until the gateway is gone."""
    gateway = Gateway(url)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    control(_SUBREAPER, 1)
    while True:
        try:
            status, leased = gateway.call("next", method="GET")
            if status == 200:
                run(gateway, leased, list(command))
            elif status != 204:
                sys.stderr.write(f"{url} returned status {status}: {leased}\n")
                return 1
        except (OSError, http.client.HTTPException) as error:
            sys.stderr.write(f"{url}: {error}\n")
            return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
