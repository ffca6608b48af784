"""Multi-turn tool use: the policy calls tools until it sends a message without a call.

A row may list a subset of the tools with its own descriptions (`Task.tools`): its episodes then offer only these.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from verl.envs.base import Observation, StepResult
from verl.envs.tools.arguments import check_schema
from verl.envs.tools.base import EpisodeTool, Tool
from verl.envs.tools.runner import ToolRunner
from verl.errors import ConfigError, DataError
from verl.host.services import check_services
from verl.types import Message, Task, ToolSpec

log = logging.getLogger(__name__)

CLOSE_S = 10.0  # time for a tool to release its resources


class ToolEnv:
    """One episode: starts with the task's prompt, answers calls, ends with the first message without a call."""

    def __init__(self, task: Task, tools: Sequence[Tool | EpisodeTool], runner: ToolRunner) -> None:
        self._task, self._offered, self._runner = task, tools, runner
        self._shared = {tool.spec.name: tool for tool in tools if not isinstance(tool, EpisodeTool)}
        self._opened: dict[str, Tool] = {}

    async def reset(self) -> Observation:
        for tool in self._offered:
            if isinstance(tool, EpisodeTool):
                self._opened[tool.spec.name] = await self._runner.open(tool, self._task)
        return initial_observation(self._task, self._offered)

    async def step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return StepResult(done=True)
        tools = {**self._shared, **self._opened}
        answers = await self._runner.run(message.tool_calls, tools, in_order=self._opened)
        return StepResult(tuple(answer for answer, _ in answers), tool_uses=tuple(use for _, use in answers))

    async def close(self) -> None:
        await _close(self._opened)


def initial_observation(task: Task, tools: Iterable[Tool | EpisodeTool]) -> Observation:
    return Observation(task.prompt, task.tools or tuple(tool.spec for tool in tools))


class ToolEnvFactory:
    """Creates the episodes of a run and owns its tools. Raises ConfigError for duplicate tool names."""

    def __init__(self, tools: Sequence[Tool | EpisodeTool], runner: ToolRunner) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.spec.name for tool in tools]
            raise ConfigError(f"two tools have the same name; the tools are {', '.join(sorted(names))}")
        for tool in tools:
            check_schema(tool.spec)
        self._runner = runner

    def initial_observation(self, task: Task) -> Observation:
        """Raises DataError for unknown tools."""
        return initial_observation(task, self._offered(task))

    def _offered(self, task: Task) -> tuple[Tool | EpisodeTool, ...]:
        for listed in task.tools:
            own = self._tools.get(listed.name)
            if own is None:
                known = f"one of {', '.join(self._tools)}"
                raise DataError(f"lists {listed.name!r}, which env.tools does not offer", known, field="tools")
            names, wanted = (set(spec.parameters.get("properties") or {}) for spec in (listed, own.spec))
            if names != wanted:
                raise DataError(
                    f"lists {listed.name!r} with the parameters {', '.join(sorted(names)) or 'none'}",
                    f"those of env.tools: {', '.join(sorted(wanted)) or 'none'}",
                    field="tools",
                )
        return tuple(self._tools[listed.name] for listed in task.tools) or tuple(self._tools.values())

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._tools.values())

    async def check_services(self) -> None:
        await check_services(self._tools.values())

    def __call__(self, task: Task) -> ToolEnv:
        return ToolEnv(task, self._offered(task), self._runner)

    async def close(self) -> None:
        await _close(self._tools)


async def _close(tools: Mapping[str, Tool | EpisodeTool]) -> None:
    """Closes all tools; one that fails or times out is logged and does not keep the others open."""

    async def one(name: str, tool: Tool | EpisodeTool) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await tool.close()
        except TimeoutError:
            log.warning("tool %r did not close within %g s", name, CLOSE_S)
        except Exception as error:  # noqa: BLE001  users' code may raise anything
            log.warning("tool %r did not close: %s: %s", name, type(error).__name__, error)

    await asyncio.gather(*(one(name, tool) for name, tool in tools.items()))
