"""Runs the calls of a message: schema checks, deadlines, retries. Tools implement none of these."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from verl.envs.clock import acquire_slot
from verl.envs.tools.arguments import ArgumentChecker
from verl.envs.tools.base import EpisodeTool, Tool, ToolError, ToolTimeoutError
from verl.errors import ConfigError, ServiceDownError, VerlError
from verl.registry import nearest
from verl.text import shortened
from verl.types import Message, Task, ToolCall, ToolStatus, ToolUse

log = logging.getLogger(__name__)

Answer = tuple[ToolStatus, str, float]  # outcome, text, duration in seconds

MAX_CHARS = 2**16  # per answer: tokenizing a giant one would block all episodes. Observations are cut in verl.chat
GRACE_S = 1.0  # for a canceled call to clean up


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits per tool. Raises ConfigError for invalid values."""

    deadline_s: float = 30.0  # per attempt; time queued for a slot is not counted
    max_concurrent: int = 64  # calls in flight, over all episodes
    retries: int = 2  # if the service is down
    backoff_s: float = 0.5  # before the first retry; doubles with each

    def __post_init__(self) -> None:
        for name, value, least in (
            ("deadline_s", self.deadline_s, 0.001),
            ("max_concurrent", self.max_concurrent, 1),
            ("retries", self.retries, 0),
            ("backoff_s", self.backoff_s, 0),
        ):
            if value < least:
                raise ConfigError(f"limits of a tool: {name}={value} must be at least {least}")


class ToolRunner:
    """Runs the calls of concurrent episodes and classifies each outcome."""

    def __init__(self, limits: ToolLimits, per_tool: Mapping[str, ToolLimits] | None = None) -> None:
        self._limits, self._per_tool = limits, dict(per_tool or {})
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._arguments = ArgumentChecker()
        self._abandoned: defaultdict[str, set[asyncio.Task[str]]] = defaultdict(set)

    @property
    def num_abandoned(self) -> int:
        return sum(map(len, self._abandoned.values()))

    async def open(self, tool: EpisodeTool, task: Task) -> Tool:
        """The episode's own instance. Raises ServiceDownError if opening fails or times out."""
        service, deadline_s = f"tool {tool.spec.name!r}", self._limits_of(tool.spec.name).deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await tool.open(task)
        except VerlError:
            raise
        except TimeoutError as error:
            raise ServiceDownError(service, f"did not open within {deadline_s:g} s") from error
        except Exception as error:
            raise ServiceDownError(service, f"raised {type(error).__name__}: {error}") from error

    async def run(
        self, calls: Sequence[ToolCall], tools: Mapping[str, Tool], in_order: Collection[str] = ()
    ) -> list[tuple[Message, ToolUse]]:
        """The answers in order. Calls run concurrently, those of the tools `in_order` one after the other.

        Raises ServiceDownError, and cancels pending calls, if a service stays down or a tool itself raises.
        """
        turns: dict[str, AbstractAsyncContextManager[None]] = {name: asyncio.Lock() for name in in_order}
        running = [asyncio.create_task(self._answer(call, tools, turns)) for call in calls]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(
        self, call: ToolCall, tools: Mapping[str, Tool], turns: Mapping[str, AbstractAsyncContextManager[None]]
    ) -> tuple[Message, ToolUse]:
        try:
            async with turns.get(call.name) or nullcontext():
                status, text, seconds = await self._checked(call, tools)
        except VerlError:
            raise
        except Exception as error:  # a bug in a tool is an infrastructure fault, not the policy's
            problem = f"raised {type(error).__name__}: {error}"
            raise ServiceDownError(f"tool {call.name!r}", problem, tool=call.name) from error
        return Message("tool", shortened(text, MAX_CHARS), tool=call.name), ToolUse(call.name, status, seconds)

    async def _checked(self, call: ToolCall, tools: Mapping[str, Tool]) -> Answer:
        tool = tools.get(call.name)
        if tool is None:
            known = nearest(call.name, list(tools)) if tools else "there are no tools"
            return ToolStatus.USER_ERROR, f"There is no tool {call.name!r}; {known}", 0.0
        if problem := self._arguments.problem(tool.spec, call.arguments):
            return ToolStatus.USER_ERROR, problem, 0.0
        return await self._attempts(tool, call)

    async def _attempts(self, tool: Tool, call: ToolCall) -> Answer:
        limits, service = self._limits_of(call.name), f"tool {call.name!r}"
        slot = self._slots.setdefault(call.name, asyncio.Semaphore(limits.max_concurrent))
        for retries_left in reversed(range(limits.retries + 1)):
            try:
                async with acquire_slot(slot):
                    return await self._attempt(tool, call, limits.deadline_s)
            except ServiceDownError as error:
                if not retries_left:
                    raise ServiceDownError(service, str(error), tool=call.name) from error
                log.warning("%s: %s; %d retries left", service, error, retries_left)
            await asyncio.sleep(limits.backoff_s * 2 ** (limits.retries - retries_left))
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, tool: Tool, call: ToolCall, deadline_s: float) -> Answer:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            status, text = ToolStatus.SUCCESS, await self._within(deadline_s, tool, call)
        except ToolTimeoutError as error:
            status, text = ToolStatus.TIMEOUT, str(error)
        except ToolError as error:
            status, text = ToolStatus.USER_ERROR, str(error)
        return status, text, clock() - started

    async def _within(self, deadline_s: float, tool: Tool, call: ToolCall) -> str:
        """The tool's answer. Not asyncio.timeout, which waits for calls that ignore cancellation."""
        task = asyncio.create_task(_call(tool, call))
        try:
            await asyncio.wait({task}, timeout=deadline_s)
            if task.cancelled():
                raise RuntimeError("it cancelled itself")
            if task.done():
                return task.result()
        finally:
            await self._stop(task, call.name)
        raise ToolTimeoutError(f"The call of {call.name!r} was stopped after {deadline_s:g} s.")

    async def _stop(self, task: asyncio.Task[str], name: str) -> None:
        """Cancels a call. A call that ignores this is abandoned, and counted until it ends."""
        if task.done():
            return
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # or asyncio logs the exception
        await asyncio.wait({task}, timeout=GRACE_S)
        if not task.done():
            if name not in self._abandoned:
                log.warning("tool %r ignores cancellation; abandoning its call", name)
            self._abandoned[name].add(task)
            task.add_done_callback(self._abandoned[name].discard)

    def _limits_of(self, name: str) -> ToolLimits:
        return self._per_tool.get(name, self._limits)


async def _call(tool: Tool, call: ToolCall) -> str:
    try:
        text = await tool.call(call.arguments)
    except SystemExit as error:  # would terminate the process
        raise RuntimeError(f"SystemExit({error.code})") from error
    if not isinstance(text, str):
        raise TypeError(f"it answered an object of {type(text).__name__} instead of a str")
    return text
