"""Agents as processes elsewhere: they pull tasks, keep their leases and report; one that dies gives its task back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from starlette.requests import Request

from tests.support.at_a_path import KINDS, SECRET, host_file, nested
from tests.support.service import free_port
from tests.toolrl.envs.agent.test_agent import ASK, TASK, TextEngine, command, episodes, runner
from toolrl.envs.agent import pull
from toolrl.envs.agent.agent import AgentFactory
from toolrl.envs.agent.inside import puller
from toolrl.envs.agent.launcher import output_end, read_reward_file
from toolrl.envs.agent.pull import PullLauncher
from verl.errors import ConfigError, ServiceDownError
from verl.host.services import TOKEN_VARIABLE
from verl.host.watcher import remove_tree
from verl.rollout.engine import Sampling
from verl.scoring.pool import Fault
from verl.types import Message, Score, StopReason, Task, Trajectory

WRITTEN = 'json.dump({"reward": len(text)}, open(os.environ["REWARD_FILE"], "w"))'
DIES = "os.kill(os.getppid(), 9)"
HEADERS = {"authorization": "Bearer a-token"}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token")


@contextmanager
def pulling(port: int, source: str) -> Iterator[subprocess.Popen[bytes]]:
    """An interpreter without our packages that runs the client, with this program as its command."""
    program = (sys.executable, "-I", "-c", textwrap.dedent(source), "{task_json}")
    command = (sys.executable, "-I", "-S", puller.__file__, f"http://127.0.0.1:{port}", *program)
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_an_agent_elsewhere_pulls_its_tasks() -> None:
    port = free_port()
    tasks = [Task(f"t#{number}", (Message("user", "Hello"),), "", "test") for number in range(3)]
    with pulling(port, ASK + WRITTEN), pulling(port, ASK + WRITTEN):
        found = episodes(AgentFactory(pull=True, port=port), TextEngine("twelve chars"), *tasks)
    for each in found:
        assert isinstance(each, Trajectory) and each.score == Score(12.0, {}) and len(each.turns) == 1, each
        assert each.stop_reason is StopReason.STOP


@pytest.mark.long
def test_the_task_of_a_killed_agent_begins_anew() -> None:
    """The first client dies with its task; the second one gets it after the end of the lease."""
    port, engine = free_port(), TextEngine("first", "second one")

    async def play() -> Any:
        setting = runner(AgentFactory(pull=True, port=port, lease_s=6.0), retries=1)
        running = asyncio.create_task(setting.run(engine, Sampling(1), TASK, 0, None))
        try:
            with pulling(port, f"{ASK}{DIES}") as killed:
                while killed.poll() is None:
                    await asyncio.sleep(0.05)
            assert len(engine.asked) == 1
            with pulling(port, ASK + WRITTEN):
                return await running
        finally:
            await setting.close()

    found = asyncio.run(play())
    assert isinstance(found, Trajectory), found
    assert found.score == Score(10.0, {}) and len(found.turns) == 1 and len(engine.asked) == 2


@pytest.mark.long
def test_the_error_of_an_agent_elsewhere_is_a_fault_with_its_output() -> None:
    port = free_port()
    with pulling(port, f"{ASK}raise KeyError('city')"):
        (found,) = episodes(AgentFactory(pull=True, port=port), TextEngine("one"), TASK)
    assert isinstance(found, Fault) and "KeyError: 'city'" in found.problem


@pytest.mark.long
def test_an_agent_waits_for_the_next_run(capfd: pytest.CaptureFixture[str]) -> None:
    """It waits for a task at the end of one gateway, and gets one of the next."""
    port = free_port()

    async def idle() -> None:
        factory = AgentFactory(pull=True, port=port)
        await factory.gateway()
        assert isinstance(factory.launcher, PullLauncher)
        while not factory.launcher._waits:
            await asyncio.sleep(0.05)
        await factory.close()

    with pulling(port, ASK + WRITTEN) as agent:
        asyncio.run(idle())
        (found,) = episodes(AgentFactory(pull=True, port=port), TextEngine("one"), TASK)
        assert isinstance(found, Trajectory) and found.score == Score(3.0, {}) and agent.poll() is None
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_an_agent_that_is_terminated_ends_its_program(tmp_path: Path) -> None:
    port, mark = free_port(), tmp_path / "pids"
    starts = "import subprocess; child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    source = f"{starts}open({str(mark)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); child.wait()"

    async def play() -> Any:
        setting = runner(AgentFactory(pull=True, port=port, lease_s=2.0))
        running = asyncio.create_task(setting.run(TextEngine("one"), Sampling(1), TASK, 0, None))
        try:
            with pulling(port, ASK + source) as agent:
                while not mark.exists() or len(mark.read_text().split()) < 2:
                    await asyncio.sleep(0.05)
                agent.terminate()
                while agent.poll() is None:
                    await asyncio.sleep(0.05)
                assert agent.returncode == 128 + signal.SIGTERM
                assert not any(map(psutil.pid_exists, map(int, mark.read_text().split())))
            return await running
        finally:
            await setting.close()

    found = asyncio.run(play())
    assert isinstance(found, Fault) and "sent no heartbeat" in found.problem


@pytest.mark.long
def test_an_invalid_reward_is_a_fault_here_and_elsewhere() -> None:
    port, source = free_port(), ASK + WRITTEN.replace('"reward": len(text)', '"reward": 1, "note": 2')
    problems = []
    with pulling(port, source):
        for factory in (AgentFactory(pull=True, port=port), command(source)):
            (found,) = episodes(factory, TextEngine("one"), TASK)
            assert isinstance(found, Fault)
            problems.append(found.problem)
    assert all("a reward with 'note'" in each for each in problems), problems


POSTED = 'post(os.environ["REWARD_URL"], {"reward": 0.5})'
ENDS = {  # {how the program ends: the reward of its episode, or None for a fault}
    WRITTEN: 3.0,
    f"{WRITTEN}; sys.exit(3)": None,
    f"{POSTED}; sys.exit(3)": 0.5,
    f"{POSTED}; {WRITTEN}; sys.exit(3)": 0.5,
    f"{POSTED}; {WRITTEN}": None,  # two that differ
}


@pytest.mark.long
@pytest.mark.parametrize("pulls", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_crash_after_a_reward_is_the_same_here_and_elsewhere(end: str, pulls: bool) -> None:
    port = free_port()
    with pulling(port, ASK + end) if pulls else nullcontext():
        factory = AgentFactory(pull=True, port=port) if pulls else command(ASK + end)
        (found,) = episodes(factory, TextEngine("one"), TASK)
    assert (found.score and found.score.total if isinstance(found, Trajectory) else None) == ENDS[end], found


def test_unparsable_code_is_an_error_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text("[" * 100_000)
    assert "is not JSON" in puller.report(tmp_path, 0)["error"]
    with pytest.raises(ServiceDownError, match="is not JSON"):
        read_reward_file(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "giant"])
def test_special_files_left_by_a_pulled_program_are_an_error_at_once(kind: str, tmp_path: Path) -> None:
    host = host_file(tmp_path / "host")
    (tmp_path / "theirs").mkdir()
    for name in ("reward.json", "output.txt"):
        KINDS[kind](tmp_path / "theirs" / name, host)
        if (tmp_path / "theirs" / "hop").is_symlink():
            (tmp_path / "theirs" / "hop").unlink()
    found = [puller.report(tmp_path / "theirs", code) for code in (0, 3)]
    remove_tree(tmp_path / "theirs")  # pytest cannot
    assert "4711" not in str(found) and host.read_text() == SECRET
    assert "reward.json is not JSON" in found[0]["error"] and "exit status 3: [Errno" in found[1]["error"]


def test_the_folder_of_a_pulled_program_is_removed_however_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with puller.episode_folder() as folder:
        nested(folder / "d")
    assert not list(tmp_path.iterdir())


def test_only_the_end_of_the_output_is_read(tmp_path: Path) -> None:
    with (tmp_path / "output.txt").open("wb") as output:
        output.truncate(1 << 41)  # of holes: more than any memory
        output.seek(0, 2)
        output.write(b"KeyError: 'city'")
    assert output_end(tmp_path).endswith("KeyError: 'city'") and len(output_end(tmp_path)) < 1000
    error = puller.report(tmp_path, 3)["error"]
    assert error.startswith("exit status 3: ") and error.endswith("KeyError: 'city'") and len(error) < 1000


async def test_the_protocol_of_a_lease_is_plain_http() -> None:
    port = free_port()
    setting = runner(AgentFactory(pull=True, port=port, lease_s=30.0), turn_s=4.0, episode_s=4.0)
    running = asyncio.create_task(setting.run(TextEngine("one"), Sampling(1), TASK, 0, None))
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, headers=HEADERS) as client:
        await asyncio.sleep(4.2)  # longer than the limits of an episode, which do not run yet
        assert (await client.get("/tasks/next", headers={"authorization": "Bearer none"})).status_code == 401
        assert (await client.post("/tasks/another/done", content=b"[" * 100_000)).status_code == 400
        given = (await client.get("/tasks/next")).json()
        assert given["task"]["prompt"] == [{"role": "user", "content": "Hello"}] and given["lease_s"] == 30
        variables = given["variables"]
        own = {"authorization": f"Bearer {variables['OPENAI_API_KEY']}"}
        request = {"messages": given["task"]["prompt"]}
        url = f"{variables['OPENAI_BASE_URL']}/chat/completions"
        assert (await client.post(url, json=request, headers=own)).status_code == 200
        lease = f"/tasks/{given['lease']}"
        assert (await client.post(f"{lease}/heartbeat")).json() == {"lease_s": 30}
        assert (await client.post("/tasks/another/heartbeat")).status_code == 410
        for wrong in ({"reward": "one"}, {"score": 1}, [1]):
            assert (await client.post(f"{lease}/done", json=wrong)).status_code == 400
        assert (await client.post(f"{lease}/done", json={"reward": 0.5})).status_code == 200
        assert (await client.post(f"{lease}/done", json={"reward": 0.5})).status_code == 410
    found = await running
    assert isinstance(found, Trajectory) and found.score == Score(0.5, {})
    await setting.close()


async def test_heartbeats_keep_a_lease_and_their_end_ends_it() -> None:
    port = free_port()
    factory = AgentFactory(pull=True, port=port, lease_s=4.0)
    setting = runner(factory)
    await factory.gateway()
    running = asyncio.create_task(setting.run(TextEngine("one"), Sampling(1), TASK, 0, None))
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, headers=HEADERS) as client:
        lease = f"/tasks/{(await client.get('/tasks/next')).json()['lease']}"
        for _ in range(5):
            await asyncio.sleep(0.9)
            assert (await client.post(f"{lease}/heartbeat")).status_code == 200
        found = await running
        assert isinstance(found, Fault) and "sent no heartbeat for 4 s" in found.problem
        assert (await client.post(f"{lease}/heartbeat")).status_code == 410
    await setting.close()


async def test_a_wait_that_ends_by_itself_may_meet_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "_WAIT_S", 0.01)
    launcher = PullLauncher(1.0)
    asked = asyncio.create_task(launcher._next(Request({"type": "http"})))
    await asyncio.sleep(0)
    (wait,) = launcher._waits
    while not wait.expired():
        await asyncio.sleep(0)
    await launcher.close()
    assert (await asked).status_code == 503


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pull": True, "command": "ls"}, "replace env.agent"),
        ({"pull": True, "lease_s": 0}, "lease_s must be positive"),
        ({"pull": True, "host": "0.0.0.0"}, "set env.options.url"),
        ({"command": "ls", "url": "trainer:8100"}, "must be as http"),
        ({"command": "ls", "port": 1 << 16}, "from 0 to 65535"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AgentFactory(**options)


def test_the_url_for_agents_is_the_advertised_one_and_its_name_is_accepted(tmp_path: Path) -> None:
    port = free_port()
    source = f"""{ASK}
assert os.environ["OPENAI_BASE_URL"].startswith("http://trainer.cluster:{port}/"), os.environ["OPENAI_BASE_URL"]
"""
    reached = source.replace('post(os.environ["OPENAI_BASE_URL"] + "/chat', 'post(local() + "/chat')
    local = f"""
def local():
    headers["Host"] = "trainer.cluster:{port}"
    return os.environ["OPENAI_BASE_URL"].replace("trainer.cluster", "127.0.0.1")
"""
    file = tmp_path / "agent.py"
    file.write_text(reached.replace("done = ", f"{local}\ndone = ") + WRITTEN)
    factory = AgentFactory(
        command=f"{sys.executable} {file} {{task_json}}", port=port, url=f"http://trainer.cluster:{port}/"
    )
    (found,) = episodes(factory, TextEngine("twelve chars"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(12.0, {}), found
