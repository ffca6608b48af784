"""Plain classes as environments: TRL's contract, threads, faults."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.episodes import call, calls, play, respond
from toolrl.envs.class_env.class_env import as_answered_row, as_env_class, as_task_row
from verl.config.schema import DataConfig
from verl.data.tasks import TaskSet
from verl.envs.base import Judge
from verl.envs.registry import ClassFactory, build_env_factory
from verl.envs.task_envs import TaskEnvs
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.types import Message, Task, ToolCall, ToolStatus

# As TRL's documentation has it: no import of any library.
COUNTER = '''
class IncrementEnv:
    def reset(self, **row) -> str | None:
        self.counter, self.goal = 0, row["goal"]
        return f" Start at {self.counter}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: The value to add to the counter

        Returns:
            The updated counter value
        """
        if self.counter >= self.goal:
            raise ValueError("Game over.")
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return 1.0 if self.counter == self.goal else 0.0
'''
TASK = Task("a#0", (Message("system", "b"), Message("user", "Count.")), "none", "mine", extra={"goal": 3})


@pytest.fixture
def counter(tmp_path: Path) -> ClassFactory:
    path = tmp_path / "mine.py"
    path.write_text(COUNTER)
    factory = build_env_factory(f"{path}:IncrementEnv")
    assert isinstance(factory, ClassFactory)
    return factory


def played(env_class: Any, *messages: Message, task: Task = TASK) -> Any:
    return asyncio.run(play(env_class(task), messages))


def test_methods_are_tools_and_the_text_of_reset_is_appended(counter: ClassFactory) -> None:
    initial = asyncio.run(counter(TASK).reset())
    assert [message.content for message in initial.messages] == ["b", "Count. Start at 0."]
    (spec,) = initial.tools
    assert (spec.name, spec.description) == ("increment", "Increment the internal counter.")
    step = {"description": "The value to add to the counter", "type": "integer"}
    assert spec.parameters == {"additionalProperties": False, "properties": {"step": step}, "required": ["step"]} | {
        "type": "object"
    }
    assert counter.specs == initial.tools


def test_an_episode_is_played_and_judged(counter: ClassFactory) -> None:
    first, second, third, last = results = played(
        counter, call("increment", step=1), call("increment", step=2), call("increment", step=1), respond()
    )
    assert [each.messages[0].content for each in (first, second)] == ["1", "3"]
    assert third.messages == (Message("tool", "Error: Game over.", tool="increment"),)
    assert [each.tool_uses[0].status for each in (first, third)] == [ToolStatus.SUCCESS, ToolStatus.USER_ERROR]
    assert last.done and not first.done
    assert results.score is not None and results.score.parts == {} and results.score.total == 1.0


def test_calls_that_do_not_fit_are_the_policys_errors(counter: ClassFactory) -> None:
    ((result,),) = [
        played(counter, calls(ToolCall("incremnt", {}), ToolCall("increment", {}), ToolCall("get_reward", {})))
    ]
    texts = [message.content for message in result.messages]
    assert texts[0] == "Error: there is no function 'incremnt'; did you mean 'increment'?"
    assert "'step' is a required property" in texts[1] and "no function 'get_reward'" in texts[2]


def test_options_are_the_constructors(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class A:\n    def __init__(self, url='x'): self.url = url\n    def reset(self): return self.url\n")
    env = build_env_factory(f"{path}:A", {"url": "y"})(TASK)
    assert asyncio.run(env.reset()).messages[-1].content == "Count.y"
    with pytest.raises(ConfigError, match="has no option 'ur'; did you mean 'url'"):
        build_env_factory(f"{path}:A", {"ur": "y"})


def test_a_method_without_types_or_docstring_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class A:\n    def reset(self): ...\n    def f(self, a): 'F.'\n")
    with pytest.raises(ConfigError, match="tool 'f': parameter 'a' needs a type hint"):
        build_env_factory(f"{path}:A")


def test_step_may_be_a_tool_but_a_coroutine_is_an_environment(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("""
class A:
    def reset(self): ...
    def step(self, action: str) -> str:
        'Act.'
        return action
class B:
    def __init__(self, task): ...
    async def reset(self): ...
    async def step(self, message): ...
""")
    (result,) = played(build_env_factory(f"{path}:A"), call("step", action="go"))
    assert result.messages[0].content == "go"
    made = build_env_factory(f"{path}:B")
    assert isinstance(made, ClassFactory) and made.env_class.__name__ == "B" and made.specs == ()


class Slow:
    """Sync and async methods, inherited, static and private ones."""

    running = 0

    def reset(self) -> None:
        self.log: list[str] = []

    def wait(self, seconds: float) -> str:
        """Wait."""
        self.log.append(f"in {threading.current_thread() is threading.main_thread()}")
        time.sleep(seconds)
        self.log.append("out")
        return "waited"

    async def now(self) -> list[str]:
        """What has happened."""
        return self.log

    @staticmethod
    def helper() -> None:
        """No tool."""

    def _hidden(self) -> None:
        """No tool."""

    def close(self) -> None:
        self.log.append("closed")

    def get_reward(self) -> dict[str, float]:
        return {"score": float(len(self.log)), "calls": 2.0}


def test_sync_methods_run_in_a_thread_one_at_a_time() -> None:
    env_class = as_env_class(Slow)
    assert [spec.name for spec in env_class.specs] == ["now", "wait"]
    (result,) = results = played(
        env_class, calls(ToolCall("wait", {"seconds": 0.05}), ToolCall("wait", {"seconds": 0.0}), ToolCall("now", {}))
    )
    assert [each.content for each in result.messages] == ["waited"] * 2 + ['["in False", "out", "in False", "out"]']
    assert results.score.parts == {"calls": 2.0} and results.score.total == 4.0


async def test_the_verdict_waits_for_a_call_that_was_cut_off() -> None:
    """A thread cannot be stopped, and the object is not shared with it."""
    env = as_env_class(Slow)(TASK)
    await env.reset()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await env.step(call("wait", seconds=0.4))
    start = time.monotonic()
    assert isinstance(env, Judge)
    await env.judge()
    seconds, log = time.monotonic() - start, env._object.log
    assert seconds > 0.2 and log == ["in False", "out"]


class Broken:
    def reset(self, **row: Any) -> str:
        if row["goal"] == 3:
            raise RuntimeError("no connection")
        return 5  # type: ignore[return-value]

    def down(self) -> str:
        """Out of order."""
        raise ServiceDownError("shop", "is closed")


def test_a_service_that_is_down_is_no_error_of_the_policy() -> None:
    with pytest.raises(RuntimeError, match="no connection"):  # the episode runner makes it a fault
        asyncio.run(as_env_class(Broken)(TASK).reset())
    env = as_env_class(Broken)(TASK)
    env._object = Broken()
    with pytest.raises(ServiceDownError, match="is closed"):
        asyncio.run(env.step(call("down")))
    with pytest.raises(TypeError, match="object of int, neither a text nor None"):
        asyncio.run(as_env_class(Broken)(Task("a#0", TASK.prompt, "", "mine", extra={"goal": 4})).reset())


class Strict:
    def reset(self, goal: int, answer: str) -> str:
        return f"{goal} {answer}"


def test_reset_gets_the_columns_it_names() -> None:
    env = as_env_class(Strict)(TASK)
    assert asyncio.run(env.reset()).messages[-1].content == "Count.3 none"
    other = Task("a#0", TASK.prompt, "none", "mine")
    problem = "missing a required argument: 'goal'; expected a row with it; this one has prompt, answer, data_source"
    with pytest.raises(DataError, match=problem):
        as_env_class(Strict).check_task(other)
    as_env_class(Strict).check_task(TASK)


def test_only_a_class_with_get_reward_judges(counter: ClassFactory) -> None:
    TaskEnvs("mine", counter).check_judged(TASK, "env")
    with pytest.raises(DataError, match="does not judge"):
        TaskEnvs("mine", ClassFactory(as_env_class(Strict))).check_judged(TASK, "env")


def test_rows_as_trl_has_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Count.", "goal": 3}\n{"prompt": [{"role": "user", "content": "c"}], "answer": 4}\n')
    tasks = TaskSet(str(path), data=DataConfig(map="toolrl.envs.class_env.class_env:as_task_row"))
    assert [task.prompt[0].content for task in tasks] == ["Count.", "c"]
    assert [(task.answer, task.extra) for task in tasks] == [("none", {"goal": 3}), ("4", {"answer": 4})]
    complete = {"prompt": "x", "reward_model": {}}
    assert as_task_row(complete) is complete and as_task_row({"messages": []}) == {"messages": []}
    assert as_answered_row({"prompt": "x"}) == {"prompt": "x"}  # a reward that compares needs an answer
    assert as_answered_row({"prompt": "x", "answer": 4}) == as_task_row({"prompt": "x", "answer": 4})
