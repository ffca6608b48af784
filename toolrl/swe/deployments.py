"""Runtimes in containers, by deployments of SWE-ReX (docker, Modal, ..): a fresh one of the task's image for each.

DeployedRuntimes -> Deployments -> inside/deploy.py, in a Python with swe-rex, whose pins are not the trainer's
                 -> RemoteRuntime -> the deployment's server
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from toolrl.servers.endpoints import Endpoint
from toolrl.servers.health import HealthWatch
from toolrl.servers.line_process import Line, LineProcess
from toolrl.swe import wire
from toolrl.swe.image import make_base
from toolrl.swe.local import LocalRuntimes, set_up
from toolrl.swe.remote import RemoteRuntime, RemoteRuntimes
from toolrl.swe.runtime import BASE_GIT, CommandFailedError, RuntimeLostError, Runtimes, checked
from toolrl.swe.tasks import SweTask
from verl.errors import ConfigError, DataError, ServiceDownError

PROGRAM = Path(__file__).parent / "inside" / "deploy.py"
EXPECTED = "{python: an interpreter with swe-rex, type: docker | modal | fargate, ..}, without `image`"
HEALTH_TIMEOUT_S = 30.0


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
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        command = (self._python, "-I", str(PROGRAM))
        self._process = LineProcess("deployments", command, "id", None, end_s=None, stderr=self._output)

    async def start(self, image: str) -> Deployment:
        """Raises RuntimeLostError."""
        number = next(self._numbers)
        starting = asyncio.ensure_future(self._ask(number, settings={**self._settings, "image": image}))
        try:
            done = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda _: self._process.send(id=number))
            raise
        return Deployment(number, done["url"], done["token"])

    async def stop(self, number: int) -> None:
        """Raises RuntimeLostError."""
        await self._ask(number)

    async def open(self) -> None:
        """Start the process. Raises RuntimeLostError if it has no SWE-ReX."""
        try:
            await self._process.start()
        except ServiceDownError as error:
            raise RuntimeLostError(
                f"{self._python} starts no deployments: {self._printed().splitlines()[-1:]}"
            ) from error

    async def close(self) -> None:
        """Stop all deployments."""
        await self._process.close()
        self._output.close()

    async def _ask(self, number: int, **request: Any) -> Line:
        """The answer to a request. Raises RuntimeLostError."""
        await self.open()
        answer = await (await self._process.open(number, id=number, **request)).get()
        self._process.forget(number)
        if "failed" in answer:
            raise RuntimeLostError(f"the process of the deployments ended: {self._printed()}")
        if "problem" in answer:
            raise RuntimeLostError(answer["problem"])
        return answer

    def _printed(self) -> str:
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
            if task.bug_patch:
                await checked(runtime, ["git", "-c", "safe.directory=*", "apply", "-"], task.bug_patch.encode())
            if task.setup:
                await set_up(runtime, task)
            if task.image_tests:
                await checked(runtime, ["rm", "--", *task.image_tests])
            # The history of a task folder's image is its author's: part of the task.
            await make_base(runtime, task, BASE_GIT, hide_history=task.harbor is None)
        except CommandFailedError as error:
            await runtime.close()
            raise RuntimeLostError(f"{task.image} cannot be the base of patches: {error}") from error
        except BaseException:
            await runtime.close()
            raise
        return runtime

    async def close(self) -> None:
        await self._deployments.close()


def runtimes_at(urls: Sequence[str], deployment: Mapping[str, Any] | None, *, require_cgroup: bool = False) -> Runtimes:
    """On servers of ours, in containers, or, without both, on this machine. Raises ConfigError."""
    if urls and deployment:
        raise ConfigError("environment 'swe': give urls or deployment, not both")
    if deployment:
        return DeployedRuntimes(deployment)
    return RemoteRuntimes(urls) if urls else LocalRuntimes(require_cgroup=require_cgroup)
