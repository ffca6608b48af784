"""Calls under deadlines: tools that hang, flood, fail or die cost one answer or are named, and block no other call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.virtual_clock import run_at_once
from verl.envs.base import StepResult
from verl.envs.tool_env import ToolEnv, ToolEnvFactory
from verl.envs.tools import runner
from verl.envs.tools.base import EpisodeTool, Tool, ToolError, ToolTimeoutError
from verl.envs.tools.function import tool
from verl.envs.tools.runner import MAX_CHARS, ToolLimits, ToolRunner
from verl.errors import ConfigError, ServiceDownError
from verl.text import NOTE_CHARS, shortened
from verl.types import Message, Task, ToolCall, ToolSpec, ToolStatus, ToolUse

LIMITS = ToolLimits(deadline_s=20, retries=2, backoff_s=0.001)
HASTY = replace(LIMITS, deadline_s=0.2)
TASK = Task("t", (Message("user", "?"),), "", "test")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"],
    "additionalProperties": False,
}


@dataclass
class Does:
    """A tool that does what a test wants."""

    act: Callable[[Mapping[str, Any]], Awaitable[str]]
    spec: ToolSpec = field(default_factory=lambda: ToolSpec("does", "Does.", {"type": "object"}))
    closed: bool = False

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self.act(arguments)

    async def close(self) -> None:
        self.closed = True


def raising(error: BaseException) -> Does:
    async def act(_: Mapping[str, Any]) -> str:
        raise error

    return Does(act)


async def hang(_: Mapping[str, Any]) -> str:
    await asyncio.Event().wait()
    return ""


def run(tools: Mapping[str, Tool], *calls: ToolCall, limits: ToolLimits = LIMITS) -> list[tuple[Message, ToolUse]]:
    return asyncio.run(ToolRunner(limits).run(calls, tools))


def one(tool: Tool, arguments: Mapping[str, Any] | None = None, limits: ToolLimits = LIMITS) -> tuple[str, ToolStatus]:
    ((message, use),) = run({"does": tool}, ToolCall("does", arguments or {}), limits=limits)
    assert message.role == "tool" and message.tool == use.name == "does"
    return message.content, use.status


async def test_answers_come_in_the_order_of_the_calls_and_calls_run_side_by_side() -> None:
    met = asyncio.Barrier(2)  # neither call can end before the other has started

    async def meet(arguments: Mapping[str, Any]) -> str:
        await met.wait()
        return str(arguments["who"])

    calls = [ToolCall("does", {"who": who}) for who in ("first", "second")]
    answers = await ToolRunner(LIMITS).run(calls, {"does": Does(meet)})
    assert [message.content for message, _ in answers] == ["first", "second"]
    assert [use.status for _, use in answers] == [ToolStatus.SUCCESS] * 2


def test_the_answer_to_an_unknown_tool_has_the_nearest_name() -> None:
    (message, use), = run({"does": raising(ToolError())}, ToolCall("dose", {}))  # fmt: skip
    assert message.content == "There is no tool 'dose'; did you mean 'does'?" and message.tool == "dose"
    assert use == ToolUse("dose", ToolStatus.USER_ERROR, 0.0)
    assert "there are no tools" in run({}, ToolCall("x", {}))[0][0].content


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "'a' is a required property"),
        ({"a": "x"}, "'x' is not of type 'integer' (at $.a)"),
        ({"a": 1, "b": ["x", 2]}, "2 is not of type 'string' (at $.b[1])"),
        ({"a": 1, "c": 1}, "Additional properties are not allowed ('c' was unexpected)"),
    ],
)
def test_wrong_arguments_are_described_in_the_answer(arguments: dict[str, Any], message: str) -> None:
    never = Does(raising(AssertionError()).act, ToolSpec("does", "", SCHEMA))
    assert one(never, arguments) == (f"Wrong arguments of 'does': {message}.", ToolStatus.USER_ERROR)


def test_a_text_that_cannot_be_encoded_reaches_no_tool() -> None:
    assert one(raising(AssertionError()), {"a": ["x", "\ud800"]})[0].endswith("a text that is not valid Unicode.")


def test_arguments_too_deep_or_too_large_to_quote_are_the_policys_fault() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for odd in (deep, 10**5000):
        text, status = one(raising(AssertionError()), {"a": odd})
        assert status is ToolStatus.USER_ERROR and "cannot be read" in text


def test_an_invalid_or_external_schema_is_a_fault_of_the_run() -> None:
    with pytest.raises(ConfigError, match="'does': its parameters are not a JSON schema"):
        ToolEnvFactory([Does(hang, ToolSpec("does", "", {"type": "thing"}))], ToolRunner(LIMITS))
    elsewhere = Does(hang, ToolSpec("does", "", {"$ref": "http://127.0.0.1:9/schema"}))
    with pytest.raises(ServiceDownError, match="tool 'does'"):
        one(elsewhere)


def test_errors_of_the_call_are_the_policys() -> None:
    assert one(raising(ToolError("no such city"))) == ("no such city", ToolStatus.USER_ERROR)
    assert one(raising(ToolTimeoutError("took 3 s"))) == ("took 3 s", ToolStatus.TIMEOUT)


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(2), TimeoutError(), asyncio.CancelledError()])
def test_any_other_exception_is_the_fault_of_the_tool(error: BaseException) -> None:
    with pytest.raises(ServiceDownError, match=r"tool 'does': raised") as raised:
        one(raising(error))
    assert raised.value.__cause__ is not None


def test_an_answer_that_is_no_text_is_the_tools_fault() -> None:
    async def number(_: Mapping[str, Any]) -> str:
        return 7  # type: ignore[return-value]

    with pytest.raises(ServiceDownError, match="an object of int instead of a str"):
        one(Does(number))


def test_a_service_that_is_down_is_tried_again_then_raised() -> None:
    tries: list[str] = []

    async def recovering(_: Mapping[str, Any]) -> str:
        tries.append("")
        if len(tries) < 3:
            raise ServiceDownError("http://x", "refused")
        return "back"

    assert one(Does(recovering)) == ("back", ToolStatus.SUCCESS) and len(tries) == 3
    tries.clear()
    with pytest.raises(ServiceDownError, match="tool 'does': http://x: refused"):
        one(Does(recovering), limits=ToolLimits(retries=1, backoff_s=0.001))
    assert len(tries) == 2


def test_a_hanging_call_is_stopped_and_blocks_no_other() -> None:
    async def fine(_: Mapping[str, Any]) -> str:
        return "fine"

    tools = {"hangs": Does(hang), "works": Does(fine)}
    (hung, use), (worked, _) = run(
        tools, ToolCall("hangs", {}), ToolCall("works", {}), limits=replace(HASTY, deadline_s=1)
    )
    assert hung.content == "The call of 'hangs' was stopped after 1 s." and use.status is ToolStatus.TIMEOUT
    assert use.seconds >= 1 and worked.content == "fine"


def test_a_stopped_call_may_release_its_resources() -> None:
    ended: list[str] = []

    async def tidy(_: Mapping[str, Any]) -> str:
        try:
            return await hang({})
        finally:
            await asyncio.sleep(0.01)
            ended.append("tidied")

    assert one(Does(tidy), limits=HASTY)[1] is ToolStatus.TIMEOUT and ended == ["tidied"]


async def test_a_call_that_ignores_cancellation_is_abandoned_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.05)
    release = asyncio.Event()

    async def deaf(_: Mapping[str, Any]) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        raise ValueError("no one sees it")

    made = ToolRunner(HASTY)
    for left in (1, 2):
        ((_, use),) = await made.run([ToolCall("does", {})], {"does": Does(deaf)})
        assert use.status is ToolStatus.TIMEOUT and made.num_abandoned == left
    release.set()
    while made.num_abandoned:
        await asyncio.sleep(0.01)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_sync_tool_that_waits_is_left_in_its_thread() -> None:
    release = threading.Event()

    @tool
    def does() -> str:
        """Waits."""
        release.wait(60)
        return ""

    assert one(does, limits=HASTY)[1] is ToolStatus.TIMEOUT and does.num_abandoned == 1
    release.set()


def test_waiting_for_a_place_is_not_charged() -> None:
    running: list[int] = []

    async def slow(_: Mapping[str, Any]) -> str:
        running.append(1)
        seen = len(running)
        await asyncio.sleep(0.4)
        running.pop()
        return str(seen)

    calls = [ToolCall("does", {})] * 5  # the last waits for 1.6 s
    answers = run_at_once(ToolRunner(ToolLimits(deadline_s=0.5, max_concurrent=1)).run(calls, {"does": Does(slow)}))
    assert [(message.content, use.status) for message, use in answers] == [("1", ToolStatus.SUCCESS)] * 5
    assert [use.seconds for _, use in answers] == pytest.approx([0.4] * 5)


async def test_a_dead_service_stops_the_other_calls_of_the_message() -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def long(_: Mapping[str, Any]) -> str:
        began.set()
        try:
            return await hang({})
        finally:
            stopped.set()

    async def dies(_: Mapping[str, Any]) -> str:
        await began.wait()
        raise ServiceDownError("x", "gone")

    calls = ToolRunner(ToolLimits(retries=0))
    with pytest.raises(ServiceDownError) as raised:
        await calls.run([ToolCall("long", {}), ToolCall("dies", {})], {"long": Does(long), "dies": Does(dies)})
    assert stopped.is_set() and raised.value.tool == "dies"


def test_flooded_output_is_truncated_before_it_is_shown() -> None:
    async def flood(_: Mapping[str, Any]) -> str:
        return "head" + "x" * 5_000_000 + "tail"

    content, status = one(Does(flood))
    assert len(content) <= MAX_CHARS and status is ToolStatus.SUCCESS
    assert content.startswith("headx") and content.endswith("xtail") and "4934532 characters left out" in content


@given(st.text(), st.integers(2 * NOTE_CHARS, 200), st.integers(1, 300))
def test_shortened_texts_fit_and_can_be_encoded(text: str, max_chars: int, times: int) -> None:
    cut = shortened(text * times + "\ud800", max_chars)
    assert len(cut) <= max_chars and cut.encode()


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_concurrent=0 must be at least 1"):
        ToolLimits(max_concurrent=0)


def test_limits_of_one_tool_stand_in_for_the_common_ones() -> None:
    async def slow(_: Mapping[str, Any]) -> str:
        await asyncio.sleep(0.2)
        return "done"

    calls = ToolRunner(LIMITS, {"hasty": replace(LIMITS, deadline_s=0.05)})
    asked = calls.run([ToolCall("hasty", {}), ToolCall("patient", {})], {"hasty": Does(slow), "patient": Does(slow)})
    assert [use.status for _, use in run_at_once(asked)] == [ToolStatus.TIMEOUT, ToolStatus.SUCCESS]


class Counter:
    """A counter of each episode."""

    def __init__(self) -> None:
        self.spec = ToolSpec("count", "Counts.", {"type": "object"})
        self.opened: list[Does] = []

    async def open(self, task: Task) -> Tool:
        calls: list[str] = []

        async def count(arguments: Mapping[str, Any]) -> str:
            seen = len(calls)
            await asyncio.sleep(0.01)  # side by side, both calls of a message would see the same
            calls.append("")
            return f"{task.id}: {seen + arguments.get('add', 0)}"

        self.opened.append(Does(count))
        return self.opened[-1]

    async def close(self) -> None:
        self.opened.clear()


def step_with(env: ToolEnv, *calls: ToolCall) -> Awaitable[StepResult]:
    return env.step(Message("assistant", "...", tool_calls=calls))


async def test_an_episode_ends_with_the_first_message_without_a_call() -> None:
    counter, never = Counter(), Does(hang)
    assert isinstance(counter, EpisodeTool) and not isinstance(never, EpisodeTool)
    factory = ToolEnvFactory([counter, never], ToolRunner(LIMITS))
    one, two = factory(TASK), factory(TASK)
    opening = await one.reset()
    assert opening == await two.reset()
    assert opening.messages == TASK.prompt and [spec.name for spec in opening.tools] == ["count", "does"]

    answer = await step_with(one, ToolCall("count", {}), ToolCall("count", {}), ToolCall("count", {"add": 10}))
    assert [message.content for message in answer.messages] == ["t: 0", "t: 1", "t: 12"] and not answer.done
    assert len(answer.tool_uses) == 3
    assert (await step_with(two, ToolCall("count", {}))).messages[0].content == "t: 0"  # a state of its own
    assert (await step_with(one)) == StepResult(done=True)

    await one.close()
    assert [opened.closed for opened in counter.opened] == [True, False] and not never.closed
    await two.close()
    await factory.close()
    assert not counter.opened and never.closed


async def test_a_tool_failing_to_open_is_a_fault_and_one_failing_to_close_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stuck(Counter):
        async def open(self, task: Task) -> Tool:
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            raise OSError("no")

    stuck, other = Stuck(), Does(hang)
    factory = ToolEnvFactory([stuck, other], ToolRunner(HASTY))
    with pytest.raises(ServiceDownError, match="tool 'count': did not open within"):
        await factory(TASK).reset()
    await factory.close()
    assert other.closed

    async def broken(_: Task) -> Tool:
        raise KeyError("files")

    stuck.open = broken  # type: ignore[method-assign]
    with pytest.raises(ServiceDownError, match="tool 'count': raised KeyError"):
        await factory(TASK).reset()
    assert "tool 'count' did not close: OSError: no" in caplog.text


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools have the same name"):
        ToolEnvFactory([Does(hang), Does(hang)], ToolRunner(LIMITS))
