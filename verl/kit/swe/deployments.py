"""Runtimes in containers, by deployments of SWE-ReX (docker, Modal, ..): a fresh one of the task's image for each.

DeployedRuntimes -> Deployments -> inside/deploy.py, in a Python with swe-rex, whose pins are not the trainer's
                 -> RemoteRuntime -> the deployment's server
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2

from verl.errors import ConfigError, DataError
from verl.kit.serving.endpoints import Endpoint
from verl.kit.serving.health import HealthWatch
from verl.kit.swe import wire
from verl.kit.swe.local import LocalRuntimes, set_up
from verl.kit.swe.remote import RemoteRuntime, RemoteRuntimes
from verl.kit.swe.runtime import BASE_GIT, TESTBED, CommandFailedError, RuntimeLostError, Runtimes, checked
from verl.kit.swe.tasks import SweTask

PROGRAM = Path(__file__).parent / "inside" / "deploy.py"
EXPECTED = "{python: an interpreter with swe-rex, type: docker | modal | fargate, ..}, without `image`"
HEALTH_TIMEOUT_S = 30.0
# The base of patches: all that the image's repository holds when the agent starts, files that git ignores included.
MAKE_BASE = f"""
command -v git >/dev/null || {{ echo "the image has no git, which collects the patch" >&2; exit 1; }}
export GIT_DIR={BASE_GIT} GIT_WORK_TREE=$PWD GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent
git init -q && git -c core.autocrlf=false add -A -f -- . ${{0:+":(exclude)$0"}} &&
  git -c user.name=base -c user.email=base@localhost -c gc.auto=0 commit -q --allow-empty -m base
"""


@dataclass(frozen=True, slots=True)
class Deployment:
    number: int
    url: str
    token: str


class Deployments:
    """Starts deployments in a process of their own. settings: `python`, and SWE-ReX's own, whose `image` is the task's

    Raises ConfigError for settings without `python` or `type`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = {name: value for name, value in settings.items() if name != "python"}
        self._python = str(settings.get("python") or "")
        if not Path(self._python).is_file() or "type" not in settings or "image" in settings:
            raise ConfigError(f"deployment={dict(settings)} cannot be used; expected {EXPECTED}")
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._opening = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._output: IO[bytes] | None = None

    async def start(self, image: str) -> Deployment:
        """Raises RuntimeLostError."""
        number = next(self._numbers)
        starting = asyncio.ensure_future(self._ask(number, settings={**self._settings, "image": image}))
        try:
            done = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda _: self._send(number))
            raise
        return Deployment(number, done["url"], done["token"])

    async def stop(self, number: int) -> None:
        """Raises RuntimeLostError."""
        await self._ask(number)

    async def open(self) -> None:
        """Start the process. Raises RuntimeLostError if it has no SWE-ReX."""
        async with self._opening:
            if self._process is None:
                self._output = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    self._python,
                    "-I",
                    str(PROGRAM),
                    stdin=pipe,
                    stdout=pipe,
                    stderr=self._output,
                    start_new_session=True,
                )
                assert self._process.stdout is not None
                if not await self._process.stdout.readline():
                    await self._process.wait()
                    self._process = None
                    raise RuntimeLostError(f"{self._python} starts no deployments: {self._printed().splitlines()[-1:]}")
                self._reading = asyncio.create_task(self._read(self._process))

    async def close(self) -> None:
        """Stop all deployments."""
        process, reading = self._process, self._reading
        if process and process.stdin and reading:
            process.stdin.close()
            await reading
            await process.wait()
        if self._output:
            self._output.close()

    async def _ask(self, number: int, **request: Any) -> dict[str, Any]:
        await self.open()
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._send(number, **request)
        found = await answer
        if "problem" in found:
            raise RuntimeLostError(found["problem"])
        return found

    def _send(self, number: int, **request: Any) -> None:
        if self._process and self._process.stdin:
            self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            found = json.loads(line)
            answer = self._answers.pop(found["id"], None)
            if answer and not answer.done():
                answer.set_result(found)
        self._process = None
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"problem": f"the process of the deployments ended: {self._printed()}"})
        self._answers.clear()

    def _printed(self) -> str:
        assert self._output is not None
        self._output.seek(0)
        return self._output.read().decode(errors="replace").strip()[-1000:]


class DeployedRuntimes:
    """See Runtimes. settings: of Deployments"""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._deployments = Deployments(settings)

    async def check_services(self) -> None:
        await self._deployments.open()

    async def start(self, task: SweTask) -> RemoteRuntime:
        if not task.image:
            raise DataError(f"task {task.id} names no image", "an image, or runtimes without `deployment`")
        deployment = await self._deployments.start(task.image)
        client = httpx2.AsyncClient(trust_env=False, headers={wire.API_KEY: deployment.token})
        name = f"runtime of {task.image}"
        watch = HealthWatch(name, f"{deployment.url}/is_alive", HEALTH_TIMEOUT_S, client)

        async def end() -> None:
            watch.close()
            await client.aclose()
            with contextlib.suppress(RuntimeLostError):
                await self._deployments.stop(deployment.number)

        runtime = RemoteRuntime(client, Endpoint(name, deployment.url, watch), task.limits, None, end)
        try:
            if task.setup:
                await set_up(runtime, task)
            await _make_base(runtime, task)
        except BaseException:
            await runtime.close()
            raise
        return runtime

    async def close(self) -> None:
        await self._deployments.close()


async def _make_base(runtime: RemoteRuntime, task: SweTask) -> None:
    """Raises RuntimeLostError."""
    try:
        await checked(runtime, ["/bin/sh", "-c", MAKE_BASE, task.own_interpreter], cwd=task.workdir or TESTBED)
    except CommandFailedError as error:
        raise RuntimeLostError(f"{task.image}: no base for patches can be made: {error}") from error


def runtimes_at(urls: Sequence[str], deployment: Mapping[str, Any] | None, *, require_cgroup: bool = False) -> Runtimes:
    """On servers of ours, in containers, or, without both, on this machine. Raises ConfigError."""
    if urls and deployment:
        raise ConfigError("environment 'swe': give urls or deployment, not both")
    if deployment:
        return DeployedRuntimes(deployment)
    return RemoteRuntimes(urls) if urls else LocalRuntimes(require_cgroup=require_cgroup)
