"""A command in the sandbox: the gateway is its only network, and the host's files are not its own."""

from __future__ import annotations

import re
import shlex
import socket
import sys
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.toolrl.envs.agent.test_agent import ASK, TASK, TextEngine, episodes
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.envs.agent.agent import AgentFactory
from verl.errors import ConfigError
from verl.scoring.pool import Fault
from verl.types import Score, StopReason, Trajectory

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _bubblewrap(tmp_path: Path) -> None:
    need_bubblewrap()
    tmp_path.chmod(0o755)  # for the sandbox's user


def confined(source: str, sandbox: Any = True, **options: Any) -> AgentFactory:
    command = f"{sys.executable} -c {shlex.quote(textwrap.dedent(ASK) + source)} {{task_json}}"
    return AgentFactory(command=command, sandbox=sandbox, **options)


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
    """The run's folder is below the working folder, which the command sees."""
    runs = tmp_path / "runs"
    (runs / "agent-other").mkdir(parents=True)
    (runs / "agent-other" / "task.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(runs))
    source = f"""
import glob
tasks = glob.glob({str(runs)!r} + "/*/task.json")
assert tasks == [] and sys.argv[1] == "/tmp/work/task.json", tasks
assert set(map(int, filter(str.isdigit, os.listdir("/proc")))) == {{os.getpid()}}
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


@pytest.mark.parametrize(
    ("limits", "source", "fault"),
    [
        ({"memory_mib": 128}, "x = bytearray(1 << 28)", "was killed: more than 128 MiB of memory .*sandbox.memory_mib"),
        (
            {"memory_mib": 64, "file_mib": 256},
            "open('/tmp/x', 'wb').write(bytes(1 << 27))",
            "more than 64 MiB of memory",
        ),
        (
            {"file_mib": 8},
            "open('/dev/shm/x', 'wb').write(bytes(1 << 24))",
            "sandbox.file_mib sets .*(File too large|No space left)",
        ),
        (
            {"file_mib": 8},
            "[open(f'/tmp/{n}', 'wb').write(bytes(1 << 22)) for n in range(4)]",
            "No space left on device",
        ),
        ({"file_mib": 8}, "[open(f'/tmp/{n}', 'w') and 0 for n in range(1 << 15)]", "file_mib sets .*No space left"),
        (
            {"processes": 8},
            "[os.fork() or time.sleep(9) for n in range(8)]",
            "processes sets .*temporarily unavailable",
        ),
        (
            {"processes": 8},
            "[Thread(target=time.sleep, args=[9]).start() for n in range(8)]",
            "processes sets the limit",
        ),
    ],
)
def test_a_limit_of_the_sandbox_is_named_in_the_fault(limits: dict[str, int], source: str, fault: str) -> None:
    given = confined(f"import time\nfrom threading import Thread\n{source}", limits)
    (found,) = episodes(given, TextEngine("one"), TASK)
    assert isinstance(found, Fault) and re.search(fault, found.problem, re.DOTALL), found


def test_the_end_of_a_long_output_is_in_the_fault() -> None:
    source = "for number in range(100_000): print('line', number)\nsys.exit(3)"
    (found,) = episodes(confined(source), TextEngine("one"), TASK)
    assert isinstance(found, Fault) and found.problem.endswith("line 99998\nline 99999"), found
    assert "exit status 3: " in found.problem and len(found.problem) < 1000


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
        (
            {"command": "ls", "sandbox": {"disk": 1}},
            "sandbox.disk is unknown; expected memory_mib, processes, file_mib",
        ),
        ({"command": "ls", "sandbox": {"memory_mib": 0}}, "sandbox.memory_mib must be from 1 to 16777216, got 0"),
        ({"command": "ls", "sandbox": {"processes": "8"}}, "sandbox.processes must be from 1 to 4194304, got '8'"),
        ({"command": "ls", "sandbox": True, "readable": ["/tmp"]}, "/tmp is private in a sandbox"),
        ({"command": "ls", "require_cgroup": True}, "without env.options.sandbox=true"),
    ],
)
def test_options_of_the_sandbox_that_cannot_be_used(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentFactory(**options)
