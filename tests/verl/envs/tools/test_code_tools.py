"""Python and bash as tools, over a sandbox of real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.plain_sandbox import PlainSandbox
from toolrl.sandbox.python_tool import MAX_PARSED_CHARS, printing_last
from verl.envs.sandbox import Execution
from verl.envs.tool_env import ToolEnvFactory
from verl.envs.tools.build import build_tools
from verl.envs.tools.runner import ToolLimits, ToolRunner
from verl.errors import ConfigError, DataError
from verl.types import Message, Task, ToolCall, ToolStatus

Results = list[tuple[str, ToolStatus]]


def task(**extra: Any) -> Task:
    return Task("t", (Message("user", "?"),), "", "test", extra=extra)


def talk(tool: dict[str, Any], turns: Sequence[Sequence[str]], task: Task = task()) -> list[Results]:  # noqa: B008
    """What a tool answers to code, turn by turn, in one episode."""

    async def episode() -> list[Results]:
        sandbox = PlainSandbox()
        factory = ToolEnvFactory(build_tools([tool], sandbox), ToolRunner(ToolLimits(deadline_s=60, retries=0)))
        env = factory(task)
        try:
            spec = (await env.reset()).tools[0]
            (key,) = spec.parameters["properties"]
            found = []
            for turn in turns:
                calls = tuple(ToolCall(spec.name, {key: code}) for code in turn)
                result = await env.step(Message("assistant", "", tool_calls=calls))
                contents = [message.content for message in result.messages]
                found.append(list(zip(contents, [use.status for use in result.tool_uses], strict=True)))
            return found
        finally:
            await env.close()
            assert all(session.process is None for session in sandbox.sessions)
            await factory.close()

    return asyncio.run(episode())


def test_python_answers_what_was_printed_and_keeps_nothing() -> None:
    (first,), (second,) = talk({"name": "python"}, [["x = 3\nprint(x)"], ["print(x)"]])
    assert first == ("3\n", ToolStatus.SUCCESS)
    assert second[1] is ToolStatus.USER_ERROR and second[0].endswith("NameError: name 'x' is not defined")


def test_an_interpreter_of_the_episode_keeps_variables_in_order() -> None:
    tool = {"name": "python_session", "print_last": True}
    first, ((failed, _), (value, _)) = talk(tool, [["x = 3", "x += 1", "x"], ["1 / 0", "x * 2"]])
    assert first == [("", ToolStatus.SUCCESS), ("", ToolStatus.SUCCESS), ("4\n", ToolStatus.SUCCESS)]
    assert "ZeroDivisionError" in failed and value == "8\n"


@pytest.mark.parametrize("name", ["python", "python_session"])
def test_code_that_runs_too_long_is_stopped(name: str) -> None:
    stopped, after = talk({"name": name, "limits": {"wall_s": 5.0}}, [["while True: pass"], ["print('alive')"]])
    ((text, status),) = stopped
    assert "The code was stopped after " in text and status is ToolStatus.TIMEOUT
    assert after == [("alive\n", ToolStatus.SUCCESS)]


async def test_a_session_past_the_call_deadline_is_restarted() -> None:
    sandbox, runner = PlainSandbox(), ToolRunner(ToolLimits(deadline_s=1.5))
    factory = ToolEnvFactory(build_tools(["python_session"], sandbox), runner)
    env = factory(task())
    await env.reset()
    for code, status in (("while True: pass", ToolStatus.TIMEOUT), ("print(1)", ToolStatus.SUCCESS)):
        answer = await env.step(Message("assistant", "", tool_calls=(ToolCall("python", {"code": code}),)))
        assert answer.tool_uses[0].status is status
        runner._limits = ToolLimits(deadline_s=60)  # for the start of another interpreter
    first, second = sandbox.sessions
    assert first.process is None and second.process is not None
    await env.close()
    await factory.close()


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("1 + 1", "2\n"),
        ("x = 1", ""),
        ("print('a')", "a\n"),
        ("x = 2; x  # seen", "2\n"),
        ("'ä' * 2; (\n  'ö',\n  1)", "('ö', 1)\n"),
        ("s = 'ü'; s, s", "('ü', 'ü')\n"),
        ("if True:\n    5", ""),
        ("None", ""),
        ("[y for y in range(3)];", "[0, 1, 2]\n"),
        ("", ""),
    ],
)
def test_the_last_line_is_printed_if_it_has_a_value(code: str, printed: str) -> None:
    assert talk({"name": "python", "print_last": True}, [[code]]) == [[(printed, ToolStatus.SUCCESS)]]


@pytest.mark.parametrize("code", ["1 +", "(" * 9999, "-" * 9999 + "1", "x\0", "1 + " * MAX_PARSED_CHARS + "1"])
def test_code_that_cannot_be_read_or_is_long_stays_as_it_is(code: str) -> None:
    assert printing_last(code) == code


def test_the_shell_keeps_files_and_reports_exit_codes() -> None:
    files = {"src/a.txt": "one\n"}
    turns = [["cat src/a.txt; echo two > src/b.txt; X=1", "ls src; echo $X; pwd"], ["grep three src/*", "echo no >&2"]]
    first, second = talk({"name": "shell"}, turns, task(files=files))
    assert first[0] == ("one", ToolStatus.SUCCESS)
    assert first[1][0].startswith("a.txt\nb.txt\n\n/") and first[1][0].endswith("/workspace")
    assert second == [("[exit code 1]", ToolStatus.SUCCESS), ("no", ToolStatus.SUCCESS)]


def test_a_command_that_is_stopped_leaves_the_folder_as_it_was() -> None:
    tool = {"name": "shell", "limits": {"wall_s": 4}}
    (stopped,), (after,) = talk(tool, [["touch half; sleep 30"], ["ls; rm -rf ../after.tar"]])
    assert stopped[1] is ToolStatus.TIMEOUT and stopped[0].endswith("Files are as they were before this command.")
    assert after == ("", ToolStatus.SUCCESS)


def test_a_command_for_which_there_is_no_room_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PlainSandbox.run

    async def bounded(self: PlainSandbox, code: str, language: str, *, files: Any, **settings: Any) -> Execution:
        if (size := sum(map(len, files.values()))) > 1 << 20:
            raise DataError(f"files of {size} bytes", field="files")
        return await run(self, code, language, files=files, **settings)

    monkeypatch.setattr(PlainSandbox, "run", bounded)
    (refused,), (after,) = talk({"name": "shell"}, [["# " + "x" * (2 << 20)], ["ls"]])
    assert refused[1] is ToolStatus.USER_ERROR and "could not be run in its folder: files of " in refused[0]
    assert after == ("", ToolStatus.SUCCESS)


def test_a_folder_that_cannot_be_kept_is_an_error() -> None:
    (lost,), (after,) = talk({"name": "shell"}, [["touch a; mkdir ../after.tar"], ["ls"]])
    assert lost[1] is ToolStatus.USER_ERROR and "Files are as they were" in lost[0]
    assert after == ("", ToolStatus.SUCCESS)


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../b"])
def test_files_that_lead_out_of_the_folder_are_refused(path: str) -> None:
    with pytest.raises(DataError, match="task t: file"):
        talk({"name": "shell"}, [], task(files={path: ""}))


def test_code_needs_a_sandbox_and_limits_that_there_are() -> None:
    with pytest.raises(ConfigError, match="tool 'shell' runs code and needs a sandbox"):
        build_tools(["shell"])
    with pytest.raises(ConfigError, match=r"limits of code: .*'wall'"):
        talk({"name": "python", "limits": {"wall": 1}}, [])
    with pytest.raises(
        ConfigError, match=r"tool 'python' has no option 'stateful'; its options are print_last, limits"
    ):
        talk({"name": "python", "stateful": True}, [])
