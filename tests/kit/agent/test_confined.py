"""A command in the sandbox: the gateway is its only network, and the host's files are not its own."""

from __future__ import annotations

import shlex
import socket
import sys
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.agent.test_agent import ASK, TASK, TextEngine, episodes
from tests.kit.sandbox.sandbox_host import need_bubblewrap
from verl.errors import ConfigError
from verl.kit.agent.agent import AgentFactory
from verl.scoring.pool import Fault
from verl.types import Score, StopReason, Trajectory

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


def confined(source: str, **options: Any) -> AgentFactory:
    command = f"{sys.executable} -c {shlex.quote(textwrap.dedent(ASK) + source)} {{task_json}}"
    return AgentFactory(command=command, sandbox=True, **options)


def test_a_confined_command_reaches_the_gateway_and_no_other_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "secret")
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        source = f"""
import socket
for address in (("127.0.0.1", {port}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=2)
    except OSError:
        pass
    else:
        sys.exit(f"{{address}} is reached")
assert "SECRET_OF_THE_TRAINER" not in os.environ
json.dump(len(text), open(os.environ["REWARD_FILE"], "w"))
"""
        (found,) = episodes(confined(source), TextEngine("twelve chars"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(12.0, {}), found


def test_a_confined_command_sees_what_is_readable_and_writes_nothing_else(tmp_path: Path) -> None:
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for each in (shown, hidden):
        each.write_text("one")
    source = f"""
assert open({str(shown)!r}).read() == "one" and not os.path.exists({str(hidden)!r})
for path in ({str(shown)!r}, "/usr/file", os.path.join(os.getcwd(), "file")):
    try:
        open(path, "w")
    except OSError:
        continue
    sys.exit(f"{{path}} is writable")
post(os.environ["REWARD_URL"], {{"reward": 1}})
"""
    (found,) = episodes(confined(source, readable=[str(shown)]), TextEngine("one"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(1.0, {}), found


def test_a_readable_link_is_there_with_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / "data" / "v1", tmp_path / "links" / "current"
    for folder in (target, link.parent):
        folder.mkdir(parents=True)
    (target / "file").write_text("one")
    link.symlink_to(target)
    source = f"""
assert [open(folder + "/file").read() for folder in ({str(link)!r}, {str(target)!r})] == ["one", "one"]
post(os.environ["REWARD_URL"], {{"reward": 1}})
"""
    (found,) = episodes(confined(source, readable=[str(link)]), TextEngine("one"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(1.0, {}), found


def test_a_confined_command_reaches_no_other_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder is below the working folder, which the command sees. The gateway's socket is of all episodes."""
    runs = tmp_path / "runs"
    (runs / "agent-other").mkdir(parents=True)
    (runs / "agent-other" / "task.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(runs))
    source = f"""
import glob
tasks = glob.glob({str(runs)!r} + "/*/task.json")
assert tasks == [sys.argv[1]], tasks
lines = [open(name, "rb").read().decode() for name in glob.glob("/proc/[0-9]*/cmdline")]
sockets = {{word for line in lines for word in line.split(chr(0)) if word.endswith("/socket")}}
assert len(sockets) == 1, lines
for path in sockets:
    for change in (os.remove, lambda path: os.rename(path, path + "2"), lambda path: os.chmod(path, 0)):
        try:
            change(path)
        except OSError:
            continue
        sys.exit(f"{{path}} is changed")
post(os.environ["REWARD_URL"], {{"reward": 1}})
"""
    tasks = [replace(TASK, id=f"t#{number}") for number in range(2)]
    for found in episodes(confined(source), TextEngine("one"), *tasks):
        assert isinstance(found, Trajectory) and found.score == Score(1.0, {}), found


def test_a_confined_command_that_fails_or_hangs() -> None:
    (found,) = episodes(confined("raise KeyError('city')"), TextEngine("one"), TASK)
    assert isinstance(found, Fault) and "KeyError: 'city'" in found.problem
    (found,) = episodes(confined("import time; time.sleep(600)"), TextEngine("one"), TASK, turn_s=3.0)
    assert isinstance(found, Trajectory) and found.stop_reason is StopReason.TURN_TIMEOUT


def test_a_program_that_the_sandbox_hides_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own_agent.py"
    file.write_text("def run(base_url, task): ...")
    for given in ({"agent": f"{file}:run"}, {"command": f"python {file} {{task_json}}"}, {"command": f"sh {file}"}):
        with pytest.raises(ConfigError, match=r"hides .*own_agent.py: add it to env.options.readable"):
            AgentFactory(**given, sandbox=True)
        AgentFactory(**given, sandbox=True, readable=[str(tmp_path)])


@pytest.mark.parametrize("body", ["return float(len(text))", "raise KeyError('city')"])
def test_a_confined_function_is_called_in_the_sandbox(body: str, tmp_path: Path) -> None:
    file = tmp_path / "own_agent.py"
    ask = textwrap.indent(textwrap.dedent(ASK).replace("json.load(open(sys.argv[1]))", "given"), "    ")
    file.write_text(
        f"import os\nasync def run(base_url, given):\n{ask}    assert os.getpid() < 10  # of the sandbox\n    {body}\n"
    )
    factory = AgentFactory(agent=f"{file}:run", sandbox=True, readable=[str(tmp_path)])
    (found,) = episodes(factory, TextEngine("twelve chars"), TASK)
    if "return" in body:
        assert isinstance(found, Trajectory) and found.score == Score(12.0, {}), found
    else:
        assert isinstance(found, Fault) and "KeyError: 'city'" in found.problem


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"command": "ls", "readable": ["/usr"]}, "needs env.options.sandbox"),
        ({"command": "ls", "sandbox": True, "readable": ["/nowhere"]}, "there is no '/nowhere'"),
        ({"command": "ls", "sandbox": True, "url": "http://trainer:1"}, "has no effect in a sandbox"),
        ({"pull": True, "sandbox": True}, "replace env.agent"),
    ],
)
def test_options_of_the_sandbox_that_cannot_be_used(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentFactory(**options)
