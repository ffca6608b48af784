"""The environment `agent`: a program of the user's drives the episode and calls the policy through the gateway."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from toolrl.envs.agent.address import check_address
from toolrl.envs.agent.confined import Confinement, read_limits
from toolrl.envs.agent.gateway import Gateway
from toolrl.envs.agent.inside import coding
from toolrl.envs.agent.launcher import (
    READY,
    TASK,
    ProgramFailedError,
    Waiting,
    build_launcher,
    episode_folder,
    read_reward_file,
    ready_agent,
)
from toolrl.envs.agent.pull import NO_PROXY, PullLauncher
from toolrl.envs.agent.rewards import read_reward
from toolrl.envs.agent.sampling import OnSampling
from toolrl.envs.agent.session import Session
from toolrl.envs.agent.thoughts import OnThoughts
from toolrl.servers.serving import find_token
from toolrl.swe.harness import TaskRuntimes, TaskSession
from verl.envs.base import EnvFactory
from verl.episodes.program import ProgramEnv, ProgramPolicy
from verl.errors import ConfigError, ServiceDownError
from verl.formats.openai import as_openai
from verl.formats.prompt import function_schema
from verl.types import Message, Score, StopReason, Task, Turn

_log = logging.getLogger(__name__)
_CHECK_S = 8.0  # limit of the import before the run; below the limit of all services


class AgentFactory(EnvFactory):
    """The agents of a run: one gateway and one launcher for all of them.

    agent: file.py:function, called as `function(base_url, task)`, or a coding agent by name (READY); or command: a
        command line
    python: the interpreter with the agent's packages; default: the trainer's
    on_sampling: what happens to sampling settings of requests that differ from the run's
    on_thoughts: what happens to responses that the program repeats without their thoughts
    reward_at_limit: of an episode that ended at a limit without a reward; None: none
    max_concurrent: programs at a time; further episodes wait
    pull: agents elsewhere pull the tasks, in place of a program; lease_s: time without heartbeat that ends a lease
    sandbox: the program runs in the sandbox, with the gateway as its only network; or its limits: memory_mib, processes
        and file_mib; readable: further paths that it sees; require_cgroup: sandbox.isolation=strict sets it
    runtime: rows are tasks of env.name=swe, in whose runtimes the programs' commands run; or its options (TaskRuntimes)
    host, port: where the gateway listens (port 0: a free one); url: as agents see it, if it differs
    """

    def __init__(
        self,
        agent: str | None = None,
        command: str | None = None,
        python: str | None = None,
        on_sampling: str = OnSampling.REPLACE,
        on_thoughts: str = OnThoughts.RESTORE,
        reward_at_limit: float | None = None,
        max_concurrent: int = 256,
        pull: bool = False,
        lease_s: float = 60.0,
        sandbox: bool | Mapping[str, Any] = False,
        readable: Sequence[str] = (),
        require_cgroup: bool = False,
        runtime: bool | Mapping[str, Any] = False,
        host: str = "127.0.0.1",
        port: int = 0,
        url: str | None = None,
    ) -> None:
        """Raises ConfigError for a program that cannot be found, and for a gateway without an address."""
        confined = sandbox is not False
        if pull and (agent or command or python or confined):
            unused = "env.agent, env.command, env.options.python and env.options.sandbox"
            raise ConfigError(f"env.options.pull=true: agents elsewhere replace {unused}")
        if reward_at_limit is not None and runtime:
            raise ConfigError(
                "env.options.reward_at_limit has no effect with env.options.runtime: tests judge every task"
            )
        if on_sampling not in (known := tuple(OnSampling)):
            raise ConfigError(f"env.options.on_sampling must be {' or '.join(known)}, got {on_sampling!r}")
        if on_thoughts not in (known := tuple(OnThoughts)):
            raise ConfigError(f"env.options.on_thoughts must be {' or '.join(known)}, got {on_thoughts!r}")
        if agent in READY:
            agent = ready_agent(str(agent))
            readable = (*readable, coding.__file__) if confined else readable
        if require_cgroup and not confined:
            raise ConfigError("sandbox.isolation=strict has no effect on an agent without env.options.sandbox=true")
        if readable and not confined:
            raise ConfigError("env.options.readable needs env.options.sandbox=true")
        if confined and url is not None:
            raise ConfigError("env.options.url has no effect in a sandbox, which sees the gateway on its own loopback")
        self._address = check_address(host, port, url)
        confinement = None
        if confined:
            confinement = Confinement(readable, read_limits(sandbox), self._listen, require_cgroup=require_cgroup)
        self._pulls = PullLauncher(lease_s) if pull else None
        self.launcher = self._pulls or build_launcher(agent, command, python, confinement)
        self.tasks = _task_runtimes(runtime)
        self.on_sampling, self.on_thoughts = OnSampling(on_sampling), OnThoughts(on_thoughts)
        self.at_limit = None if reward_at_limit is None else _reward_at_limit(reward_at_limit)
        self._overridden: set[str] = set()  # named so far
        self._rewriting_noted = False
        self.slots = asyncio.Semaphore(max_concurrent)
        self._gateway: Gateway | None = None
        self._starting = asyncio.Lock()

    def __call__(self, task: Task) -> AgentEnv:
        return AgentEnv(task, self)

    def check_task(self, task: Task) -> None:
        if self.tasks is not None:
            self.tasks.read(task.extra)

    async def check_services(self) -> None:
        """Raises ConfigError if the program cannot be imported. The first episode waits for one that takes longer."""
        if self.tasks is not None:
            await self.tasks.check_services()
        try:
            async with asyncio.timeout(_CHECK_S):
                await self.launcher.check()
        except TimeoutError:
            _log.warning("the agent is not imported after %g s: its first episode waits for it", _CHECK_S)
        finally:
            await self.launcher.close()  # the episodes may run in another event loop

    def note_overridden(self, names: Set[str]) -> None:
        """Name each setting once."""
        if new := sorted(names - self._overridden):
            self._overridden |= names
            _log.warning("sampling settings of the agent are replaced by the run's: %s", ", ".join(new))

    def note_rewriting(self, session: Session) -> None:
        """Warn once of a program that continues nothing: every request is a training sample of its own."""
        if not self._rewriting_noted and (reason := session.rewriting()):
            self._rewriting_noted = True
            _log.warning("segments/requests = 1: the program %s", reason)

    async def gateway(self) -> Gateway:
        async with self._starting:
            if self._gateway is None:
                routes = [] if self._pulls is None else self._pulls.routes(find_token(self._address.serving))
                gateway = Gateway(self._address, routes)
                await gateway.start()
                if self._pulls is not None:
                    _log.info("agents pull their tasks from %s/tasks/next", gateway.base_url)
                self._gateway = gateway
            return self._gateway

    async def _listen(self, inside: socket.socket) -> asyncio.Server:
        return await (await self.gateway()).listen(inside)

    async def close(self) -> None:
        await self.launcher.close()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            await gateway.close()
        if self.tasks is not None:
            await self.tasks.close()


def _reward_at_limit(value: object) -> Score:
    """Raises ConfigError."""
    try:
        return read_reward(value)
    except ValueError as error:
        raise ConfigError(f"env.options.reward_at_limit: {error}") from error


def _task_runtimes(setting: bool | Mapping[str, Any]) -> TaskRuntimes | None:
    """Raises ConfigError."""
    options = {} if isinstance(setting, bool) else dict(setting)
    if unknown := sorted(options.keys() - {"urls", "deployment", "prepared"}):
        raise ConfigError(f"env.options.runtime.{unknown[0]} is unknown; expected urls, deployment or prepared")
    return None if setting is False else TaskRuntimes(**options)


class AgentEnv(ProgramEnv):
    """One episode of the agent."""

    def __init__(self, task: Task, factory: AgentFactory) -> None:
        self._task, self._factory = task, factory
        self._session: Session | None = None
        self._work: TaskSession | None = None
        self._score: Score | None = None
        self._at_limit = True  # until the program has ended by itself

    async def run(self, policy: ProgramPolicy) -> StopReason:
        with policy.timer.paused():
            await self._factory.slots.acquire()
        try:
            return await self._run_in_slot(policy)
        finally:
            self._factory.slots.release()

    async def _run_in_slot(self, policy: ProgramPolicy) -> StopReason:
        gateway = await self._factory.gateway()
        if self._factory.tasks is not None:
            with policy.timer.paused():
                self._work = await self._factory.tasks.open(self._task.extra)
        session = self._session = Session(
            policy,
            on_sampling=self._factory.on_sampling,
            on_thoughts=self._factory.on_thoughts,
            tokenizing=gateway.tokenizing,
            task=self._work,
        )
        try:
            with gateway.serving(session):
                async with episode_folder() as folder:
                    await self._run_program(session, gateway.url(session), folder, policy.timer.paused)
        finally:
            await session.close()
            self._factory.note_overridden(session.overridden)
            self._factory.note_rewriting(session)
        self._at_limit = session.limit is not None or session.cut
        return session.limit or (StopReason.LENGTH if session.cut else StopReason.STOP)

    async def judge(self) -> Score | None:
        posted = None if self._session is None else self._session.score
        if (score := self._score or posted) is not None:
            return score
        if self._work is not None:
            return await self._work.verdict()
        return self._factory.at_limit if self._at_limit else None

    async def close(self) -> None:
        if self._work is not None:
            await self._work.close()

    @property
    def turns(self) -> Sequence[Turn]:
        return () if self._session is None else self._session.ledger.turns

    @property
    def opening(self) -> tuple[Message, ...]:
        return () if self._session is None else self._session.ledger.opening

    @property
    def counts(self) -> Mapping[str, int]:
        return {} if self._session is None else self._session.metrics()

    async def _run_program(self, session: Session, url: str, folder: Path, waiting: Waiting) -> None:
        """Raises ServiceDownError for a failure of the program that no limit explains."""
        (folder / TASK).write_text(json.dumps(task_json(self._task), ensure_ascii=False), encoding="utf-8")
        variables = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            "REWARD_URL": f"{url}/reward",
            "REWARD_FILE": str(folder / "reward.json"),
        }
        variables |= dict.fromkeys(NO_PROXY, _without_proxy(url))
        if self._work is not None:
            variables["RUNTIME_URL"] = f"{url}/runtime"
        program = asyncio.ensure_future(self._factory.launcher.run(folder, variables, waiting))
        try:
            await asyncio.wait({program, session.failure}, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            try:
                await program
            except ProgramFailedError as error:
                if session.limit is None and not session.cut and session.score is None:
                    raise ServiceDownError("the agent", str(error)) from error
                return
            self._score = _one_reward(session.score, await asyncio.to_thread(read_reward_file, folder))
        finally:
            program.cancel()
            with suppress(asyncio.CancelledError, ProgramFailedError):
                await program


def _without_proxy(url: str) -> str:
    """The hosts that programs reach without a proxy: the gateway, too."""
    values = (os.environ.get(name) for name in NO_PROXY)
    return ",".join(filter(None, (next(filter(None, values), None), urlsplit(url).hostname)))


def _one_reward(posted: Score | None, written: object | None) -> Score | None:
    """Raises ServiceDownError for an invalid reward, and for two that differ."""
    if written is None:
        return posted
    try:
        score = read_reward(written)
    except ValueError as error:
        raise ServiceDownError("the agent", str(error)) from error
    if posted not in (None, score):
        raise ServiceDownError("the agent", f"posted the reward {posted}, but returned {score}")
    return score


def task_json(task: Task) -> Mapping[str, Any]:
    """The task as the program gets it."""
    return {
        "id": task.id,
        "prompt": [as_openai(message) for message in task.prompt],
        "tools": [function_schema(tool) for tool in task.tools],
        "answer": task.answer,
        "data_source": task.data_source,
        "extra": dict(task.extra),
    }
