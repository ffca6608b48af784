"""Environments of verifiers: with a scripted worker and, in slow tests, the package in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.verifiers.make_tasks import as_row, read
from tests.conftest import ROOT
from tests.support.episodes import call, calls, respond
from tests.support.foreign import foreign_python
from toolrl.envs.verifiers import process
from toolrl.envs.verifiers.env import FIELD, VerifiersEnv, VerifiersFactory, as_answer
from verl.data.tasks import to_task
from verl.envs.registry import build_env_factory
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.types import Message, Score, Task, ToolCall, ToolSpec, ToolStatus

USER = {"role": "user", "content": "Go."}
END = {"reward": 0.5, "parts": {"correct": 1.0}, "error": None}
OK = [[USER], END]


@pytest.fixture(autouse=True)
def scripted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "slow" not in request.keywords:
        monkeypatch.setattr(process, "WORKER", Path(__file__).with_name("fake_worker.py"))


def task(*script: Any) -> Task:
    return Task("t", (Message("user", "x"),), "", "x", extra={FIELD: {"script": list(script)}})


def factory(id: str = "fake", **options: Any) -> VerifiersFactory:
    return VerifiersFactory(id, sys.executable, **options)


async def _play(env: VerifiersEnv, messages: Sequence[Message]) -> tuple[list[Any], Score | None]:
    try:
        return [await env.reset(), *[await env.step(message) for message in messages]], await env.judge()
    finally:
        await env.close()


def play(script: Sequence[Any], *messages: Message) -> tuple[list[Any], Score | None]:
    async def run() -> tuple[list[Any], Score | None]:
        made = factory()
        try:
            return await asyncio.wait_for(_play(made(task(*script)), messages), 250)
        finally:
            await made.close()

    return asyncio.run(run())


def test_an_episode_of_one_turn() -> None:
    (opening, step), score = play([[{"role": "system", "content": "Rules."}, USER], END], respond("Done."))
    assert opening.messages == (Message("system", "Rules."), Message("user", "Go.")) and opening.tools == ()
    assert step.done and step.messages == ()
    assert score == Score(0.5, {"correct": 1.0})


def test_the_new_messages_of_a_request_are_the_observation() -> None:
    result = {"role": "tool", "content": "a jar", "tool_call_id": "c", "name": "look"}
    (opening, first, second), score = play(
        [[USER], [result, {"role": "user", "content": "And?"}], END], call("look"), respond()
    )
    assert [message.content for message in first.messages] == ["a jar", "And?"]
    assert first.messages[0].role == "tool" and first.messages[0].tool == "look"
    assert [use.name for use in first.tool_uses] == ["look"] and first.tool_uses[0].status is ToolStatus.SUCCESS
    assert [tool.name for tool in first.tools] == ["look"] and opening.tools == ()
    assert not first.done and second.done and score is not None


def test_the_answer_is_a_message_in_the_layout_of_openai() -> None:
    assert as_answer(respond("hi")) == {"role": "assistant", "content": "hi"}
    made = as_answer(calls(ToolCall("look", {"at": "a\ud83d"}), ToolCall("look", {})))
    assert [json.loads(each["function"]["arguments"]) for each in made["tool_calls"]] == [{"at": "a?"}, {}]
    assert len({each["id"] for each in made["tool_calls"]}) == 2


def test_an_episode_at_a_limit_is_judged_after_an_empty_answer() -> None:
    assert play(OK)[1] == Score(0.5, {"correct": 1.0})
    assert play([[USER], [USER], END])[1] == Score(0.5, {"correct": 1.0})
    with pytest.raises(ServiceDownError, match="does not end after empty answers"):
        play([[USER]] + [[USER]] * 5)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ([[USER], {**END, "error": "TaskError: odd"}], "TaskError: odd"),
        ([[USER], {**END, "reward": None}], "None"),
        ([END], "ended before the policy was asked"),
        ([[{"role": "user", "content": 3}]], "its request is unreadable"),
        ([[USER], "compact"], "replaced the context"),
        ([[USER], "die"], "has ended with code"),
        (["die"], "has ended with code"),
    ],
)
def test_any_failure_is_a_fault_of_the_service(script: Sequence[Any], problem: str) -> None:
    with pytest.raises(ServiceDownError, match=problem):
        play(script, respond())


def test_episodes_share_a_process_which_starts_again_after_its_end() -> None:
    async def run() -> None:
        made = factory()
        found = await asyncio.gather(*(_play(made(task(*OK)), [respond()]) for _ in range(20)))
        assert [score for _, score in found] == [Score(0.5, {"correct": 1.0})] * 20
        ends = await asyncio.gather(
            *(_play(made(task([USER], each)), [respond()]) for each in ("die", [USER], [USER])), return_exceptions=True
        )
        assert any(isinstance(each, ServiceDownError) for each in ends)
        _, score = await _play(made(task(*OK)), [respond()])
        assert score is not None
        await made.close()

    asyncio.run(asyncio.wait_for(run(), 250))


@pytest.mark.parametrize(
    ("id", "problem"), [("broken", "ModuleNotFoundError: broken"), ("silent", "ended while starting")]
)
def test_a_worker_that_does_not_start_is_a_fault(id: str, problem: str) -> None:
    async def run() -> None:
        made = factory(id)
        with pytest.raises(ServiceDownError, match=problem):
            await made(task(*OK)).reset()
        await made.close()

    asyncio.run(asyncio.wait_for(run(), 250))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "x", "python": "/no/such/python"}, "prepare.sh"),
        ({"id": "x"}, "python"),
        ({"id": "x", "python": sys.executable, "size": 3}, "no option 'size'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_env_factory("verifiers", options)


def test_a_row_without_the_data_of_a_task_is_named() -> None:
    with pytest.raises(DataError, match=FIELD):
        VerifiersFactory.check_task(Task("t", (), "", "x"))
    VerifiersFactory.check_task(task(*OK))


@pytest.mark.parametrize("prompt", ["Hi.", None, [{"role": "user", "content": "Hi."}]])
def test_rows_hold_the_tasks_of_a_taskset(prompt: Any) -> None:
    rows = asyncio.run(read("fake", sys.executable, {"prompt": prompt}, 10))
    made = [to_task(row, "r") for row in rows]
    assert [each.extra[FIELD]["idx"] for each in made] == [0, 1]
    expected = "(the environment fake opens the conversation)" if prompt is None else "Hi."
    assert made[0].prompt == (Message("system", "Rules."), Message("user", expected))
    assert as_row("fake", {"prompt": "Hi."})["data_source"] == "verifiers/fake"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The package's interpreter, with the modules of tests/toolrl/envs/verifiers/environments installed."""
    base = foreign_python(ROOT / "scripts" / "verifiers" / "requirements.txt")
    (packages,) = base.parents[1].glob("lib/python*/site-packages")
    for module in Path(__file__).with_name("environments").glob("*.py"):
        (packages / module.name).write_text(module.read_text())
    return str(base)


def real(id: str, python: str, *episodes: Sequence[Message], **taskset: Any) -> list[Any]:
    """Episodes at the same time; an exception where one has failed."""

    async def run() -> list[Any]:
        (row, *_) = await read(id, python, taskset, 1)
        made = VerifiersFactory(id, python, taskset)
        each = [_play(made(to_task(row, "r")), messages) for messages in episodes]
        found = await asyncio.gather(*each, return_exceptions=True)
        await made.close()
        return found

    return asyncio.run(asyncio.wait_for(run(), 400))


@pytest.mark.slow
def test_a_taskset_of_single_turns(python: str) -> None:
    right, wrong, none, odd = real(
        "sums_v1", python, [respond("It is 2.")], [respond("No idea.")], [], [respond("raise")]
    )
    (opening, step), score = right
    assert opening.messages == (Message("system", "Be brief."), Message("user", "0 + 2 = ?")) and step.done
    assert score == Score(0.5, {"correct": 1.0, "length": 8.0})
    assert wrong[1] == Score(0.0, {"correct": 0.0, "length": 8.0})
    assert none[1] == Score(0.0, {"correct": 0.0, "length": 0.0})
    assert isinstance(odd, ServiceDownError) and "odd answer" in str(odd)


@pytest.mark.slow
def test_an_environment_of_several_turns(python: str) -> None:
    ((found, score), (_, lost)) = real("higher_v1", python, [respond("3"), respond("9"), respond("7")], [respond("3")])
    assert [step.messages for step in found[1:]] == [(Message("user", "higher"),), (Message("user", "lower"),), ()]
    assert score is not None and score.total == 1.0
    assert lost is not None and lost.total == 0.0  # at a limit after its first guess


@pytest.mark.slow
def test_a_published_environment_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A game of verifiers' own package. NLTK's list of terms, which it would download, has one term here."""
    corpus = tmp_path / "corpora" / "words"  # words: allowed
    corpus.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (corpus / name).write_text("light\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    python = foreign_python(Path(__file__).with_name("textarena.txt"))
    won, lost = real(
        "textarena",
        str(python),
        [respond("[L]"), respond("I guess [LIGHT]")],
        [respond("[X]"), respond("[Y]")],
        game="Hangman-v0",
    )
    (opening, first, last), score = won
    assert opening.messages[0].role == "system" and "You are playing Hangman" in opening.messages[1].content
    assert "L   _" in first.messages[0].content and not first.done
    assert last.done and score == Score(1.0, {"game_reward": 1.0})
    assert lost[1] == Score(0.0, {"game_reward": 0.0})


@pytest.mark.slow
def test_a_program_with_commands_needs_a_container(python: str) -> None:
    async def start(harness: str) -> None:
        made = VerifiersFactory("higher_v1", python, env={"player": {"harness": {"id": harness}, "max_turns": 3}})
        try:
            await made(task(*OK)).reset()
        finally:
            await made.close()

    with pytest.raises(ServiceDownError, match=r"bash would run commands .* env\.options\.env\.player\.runtime"):
        asyncio.run(asyncio.wait_for(start("bash"), 100))
    with pytest.raises(ServiceDownError, match="secret"):  # started; the task lacks its data
        asyncio.run(asyncio.wait_for(start("null"), 100))


@pytest.mark.slow
def test_tools_of_a_taskset(python: str) -> None:
    asked = calls(ToolCall("stock_tools_price", {"item": "jam"}), ToolCall("fly", {}))
    ((opening, first, last), score) = real("stock_v1", python, [asked, respond("It costs 5.")])[0]
    (tool,) = opening.tools
    assert isinstance(tool, ToolSpec) and tool.name == "stock_tools_price"
    assert [message.content for message in first.messages] == ["5", "error: unknown tool 'fly'"]
    assert last.done and score is not None and score.total == 1.0


@pytest.mark.slow
def test_the_script_writes_a_file(python: str, tmp_path: Path) -> None:
    script, out = str(ROOT / "scripts" / "verifiers" / "make_tasks.py"), tmp_path / "tasks.jsonl"
    arguments = ["--id", "sums_v1", "--python", python, "--taskset", "size=3", "--out", str(out)]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(out.read_text().splitlines()) == 3
    arguments[arguments.index("sums_v1")] = "no_such_v1"
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "no_such_v1" in done.stderr
