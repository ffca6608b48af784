"""Agents on task folders: their commands run in the trainer's runtimes, over HTTP, from any interpreter."""

from __future__ import annotations

import asyncio
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.toolrl.envs.agent.test_agent import TASK, TextEngine, episodes
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.test_harbor import folder_of
from toolrl.envs.agent.agent import AgentFactory
from toolrl.swe.runtime import RuntimeLostError
from verl.data.tasks import TaskSet
from verl.errors import ConfigError, DataError
from verl.scoring.pool import Fault
from verl.types import Task, Trajectory

AGENT = """
import importlib.util, json, os, sys, urllib.error, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)

def refused(body):
    try:
        post(os.environ["RUNTIME_URL"] + "/run", body)
    except urllib.error.HTTPError as error:
        return error.code

def run(base_url, task):
    assert importlib.util.find_spec("verl") is importlib.util.find_spec("openai") is None
    done = post(base_url + "/chat/completions", {"messages": task["prompt"]})
    assert [refused(each) for each in ({}, {"command": 1}, {"command": "ls", "timeout_s": 0})] == [400] * 3
    result = post(os.environ["RUNTIME_URL"] + "/run", {"command": done["choices"][0]["message"]["content"]})
    assert result == {"output": "", "exit_code": 0, "status": "finished"}, result

if __name__ == "__main__":
    run(os.environ["OPENAI_BASE_URL"], json.load(open(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A program, and an environment that has no package at all."""
    folder = tmp_path_factory.mktemp("agent")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (folder / "plain.py").write_text(AGENT)
    return {"file": str(folder / "plain.py"), "python": str(folder / "venv" / "bin" / "python")}


def harbor_task(parent: Path) -> Task:
    (task,) = TaskSet(str(folder_of(parent)))
    return task


@pytest.mark.long
@pytest.mark.parametrize("kind", ["agent", "command"])
def test_any_program_is_the_harness_of_a_task_folder(kind: str, agent: dict[str, str], tmp_path: Path) -> None:
    need_bubblewrap()
    file = agent["file"]
    given = {"agent": f"{file}:run"} if kind == "agent" else {"command": f"python {file} {{task_json}}"}
    rewards = []
    for command in ('echo "6 $UNIT" > sum.txt', "echo 5 > sum.txt"):
        factory = AgentFactory(**given, python=agent["python"], runtime=True)  # type: ignore[arg-type]
        (found,) = episodes(factory, TextEngine(command), harbor_task(tmp_path))
        assert isinstance(found, Trajectory) and found.score is not None, found
        rewards.append((found.score.total, found.score.parts["swe/resolved"]))
    assert rewards == [(1.0, 1.0), (0.25, 0.0)]


@pytest.mark.long
def test_a_lost_runtime_is_a_fault(agent: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_bubblewrap()

    async def lost(*_: Any) -> None:
        raise RuntimeLostError("it is gone")

    monkeypatch.setattr("toolrl.swe.harness.TaskSession.run", lost)
    factory = AgentFactory(agent=f"{agent['file']}:run", python=agent["python"], runtime=True)
    (found,) = episodes(factory, TextEngine("ls"), harbor_task(tmp_path))
    assert isinstance(found, Fault) and "it is gone" in found.problem, found


def test_options_and_rows_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.options.runtime.url is unknown"):
        AgentFactory(command=sys.executable, runtime={"url": "http://a"})
    factory = AgentFactory(command=sys.executable, runtime=True)
    with pytest.raises(DataError):
        factory.check_task(TASK)
    AgentFactory(command=sys.executable).check_task(TASK)
    asyncio.run(factory.close())
