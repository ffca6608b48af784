"""Scripted agents in repositories: the fix scores 1, idleness and cheats 0, and a lost runtime is a fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from scripts.data.quixbugs import convert
from tests.conftest import real_data
from tests.support.episodes import Played, call, calls, play, respond
from tests.toolrl.benchmarks.runner.eval_play import chat
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.repositories import GOLD, HIDDEN, calc_task, git, pytest_environment
from tests.toolrl.swe.test_swe_remote import TOKEN, free_port, serving
from toolrl.envs.swe import env
from toolrl.envs.swe.env import LoopDetector, SweEnv, SweFactory
from toolrl.swe.runtime import RuntimeLimits, RuntimeLostError, TaskFaultError
from toolrl.swe.scoring import PatchOutcome, PatchVerdict
from toolrl.swe.tasks import SweTask, as_task_row
from toolrl.swe.tools import SUBMIT
from verl.build.env import build_episode_runner
from verl.config.load import load_config
from verl.data.rows import read_rows
from verl.data.tasks import to_task
from verl.envs.base import StepResult
from verl.envs.registry import build_env_factory
from verl.episodes.group import GroupRollout
from verl.errors import ConfigError, DataError
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.trainer.metrics import tool_metrics
from verl.types import Completion, FinishReason, Message, Score, StopReason, Task, ToolCall, ToolStatus
from verl.utils.reward_score.base import build_reward

pytestmark = pytest.mark.long  # each starts runtimes

EDITOR = "str_replace_editor"
FIXING = call(EDITOR, command="str_replace", path="calc/core.py", old_str="a - b", new_str="a + b")
FINISH = call("finish")


def row_of(folder: Path, environment: str) -> dict[str, Any]:
    """Our row of the small repository."""
    task = calc_task(folder, environment)
    assert task.repository is not None
    return {
        "instance_id": task.id,
        "problem_statement": task.statement,
        "repository": task.repository.path,
        "environment": environment,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "hidden_tests": json.dumps(HIDDEN),
        "patch": GOLD,
        "test_timeout_s": 250,  # of a busy machine
        "limits": {"memory_mib": 512, "file_mib": 64},
    }


@dataclass
class Place:
    runner: asyncio.Runner
    factory: SweFactory
    environment: str
    row: dict[str, Any]

    @property
    def task(self) -> Task:
        return to_task(as_task_row(self.row), "calc#0")

    def play(self, *messages: Message, task: Task | None = None) -> Played:
        return self.runner.run(play(self.factory(task or self.task), messages))

    def answers(self, *messages: Message) -> list[str]:
        """What the agent sees; at most one call a message."""
        return [result.messages[0].content for result in self.play(*messages)]


@pytest.fixture(scope="module")
def place(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need_bubblewrap()
    folder = tmp_path_factory.mktemp("swe")
    environment = pytest_environment(folder)

    async def make() -> SweFactory:
        return SweFactory(command_timeout_s=20.0)  # one command waits for it

    factory = runner.run(make())
    yield Place(runner, factory, environment, row_of(folder, environment))
    folder = factory.runtimes.episodes  # type: ignore[attr-defined]
    runner.run(factory.close())
    assert not folder.exists()


@pytest.fixture
def quick_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict by the patch's text, where hidden tests are not the point."""

    async def scored(_: Any, __: Any, patch: str) -> PatchVerdict:
        return PatchVerdict(PatchOutcome.RESOLVED if "+    return a + b" in patch else PatchOutcome.UNRESOLVED)

    monkeypatch.setattr(env, "score_patch", scored)


def test_an_agent_that_fixes_the_bug_scores_one(place: Place) -> None:
    played = place.play(call("bash", command="cd calc && pwd"), call("bash", command="cat core.py"), FIXING, FINISH)
    assert played.score is not None and played.score.total == 1.0
    assert [result.messages[0].content for result in played[:1]] == ["/testbed/calc"]
    assert "return a - b" in played[1].messages[0].content and "return a + b" in played[2].messages[0].content
    assert [result.done for result in played] == [False, False, False, True]
    uses = [(use.name, use.status) for result in played for use in result.tool_uses]
    assert uses == [(name, ToolStatus.SUCCESS) for name in ("bash", "bash", EDITOR, "finish")]
    parts = played.score.parts
    assert (parts["swe/resolved"], parts["swe/finished"], parts["swe/stuck"], parts["swe/nudges"]) == (1, 1, 0, 0)
    assert parts["swe/running_s"] > 0 and parts["swe/starting_s"] > 0 and parts["swe/scoring_s"] > 0
    assert 0 < parts["swe/engine_s"] < 0.1 * parts["swe/running_s"] and 0 < parts["swe/engine_share"] < 0.1


@pytest.mark.usefixtures("quick_scoring")
def test_the_fix_counts_without_finish_and_after_it_no_call_is_made(place: Place) -> None:
    score = place.play(FIXING).score
    assert score is not None and (score.total, score.parts["swe/finished"]) == (1.0, 0.0)
    spoil = ToolCall("bash", {"command": "rm -r /testbed/calc"})
    both = calls(ToolCall("finish", {}), spoil)
    played = place.play(FIXING, both)
    assert played.score is not None and played.score.total == 1.0
    assert len(played[1].messages) == len(played[1].tool_uses) == 1


def test_an_agent_that_does_nothing_scores_zero_and_is_asked_to_go_on(place: Place) -> None:
    played = place.play(respond("I see."), respond("Well."), respond("Hm."), respond("Done."))
    assert played.score is not None and played.score.total == 0.0
    assert (played.score.parts["swe/empty_patch"], played.score.parts["swe/nudges"]) == (1.0, 4.0)
    roles = {result.messages[0].role for result in played}
    nudges = [result.messages[0].content for result in played]
    assert roles == {"user"} and ["finish" in nudge for nudge in nudges] == [False, False, True, True]


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("rm -rf /testbed/* /testbed/.git", "unresolved"),
        ("printf 'def pytest_runtest_makereport(item, call):\\n    pass\\n' > conftest.py", "empty_patch"),
        ("printf 'import os\\nos._exit(0)\\n' >> calc/core.py", "no_report"),
        ("mkdir hidden; find / -name test_calc.py 2>/dev/null | grep -q . && sed -i 's/a - b/a + b/' calc/core.py",
         "empty_patch"),
        ("git log --all -p | grep -q 'a + b' && sed -i 's/a - b/a + b/' calc/core.py", "empty_patch"),
        ("rm -rf /testbed 2>/dev/null; mount 2>/dev/null; kill -9 -1", "unresolved"),
    ],
)  # fmt: skip
def test_cheats_score_zero(place: Place, command: str, outcome: str) -> None:
    score = place.play(call("bash", command=command), FINISH).score
    assert score is not None and score.total == 0.0
    assert [name for name in PatchOutcome if score.parts[f"swe/{name}"]] == [outcome]


EVERYTHING = """
for folder in .git /base.git; do
  git --git-dir=$folder log --all -p; git --git-dir=$folder reflog --all -p; git --git-dir=$folder fsck --lost-found
  git --git-dir=$folder cat-file --batch-all-objects --batch
done
find / -name '*.pack' 2>/dev/null
"""


@pytest.mark.parametrize("revision", ["", "HEAD", "main~1"])
def test_the_history_that_holds_the_fix_is_out_of_reach(place: Place, revision: str) -> None:
    """The repository has it on a branch and in a stash, whether the row names a revision or the folder as it is."""
    source = Path(place.row["repository"])
    assert "+    return a + b" in git(source, "log", "-p", "main") and "a + b" in git(source, "stash", "show", "-p")
    row = {**place.row, "repository": {"path": str(source), "revision": revision}}
    counts = "; ".join(f"grep -ac '{text}' /tmp/found" for text in ("a + b", "[.]pack", "a - b"))
    (played,) = place.play(
        call("bash", command=f"({EVERYTHING}) > /tmp/found 2>/dev/null; git log --all --oneline | wc -l; {counts}"),
        task=to_task(as_task_row(row), "calc#0"),
    )
    commits, fixes, packs, bugs = map(int, played.messages[0].content.split())
    assert (commits, fixes, packs) == (1, 0, 0) and bugs >= 4


def test_an_empty_patch_waits_for_no_verdict(place: Place) -> None:
    async def main() -> Played:
        factory = SweFactory(max_scoring=1)
        await factory.slots["scoring"].acquire(0)  # for ever
        try:
            return await asyncio.wait_for(play(factory(place.task), [FINISH]), 60)
        finally:
            await factory.close()

    score = asyncio.run(main()).score
    assert score is not None and score.parts["swe/empty_patch"] == 1.0


def test_an_agent_that_repeats_itself_is_stopped(place: Place) -> None:
    again = call("bash", command="ls")
    played = place.play(again, again, again, again)
    assert [result.done for result in played] == [False, False, False, True]
    assert played.score is not None and played.score.parts["swe/stuck"] == 1.0


@pytest.mark.parametrize(
    ("steps", "stuck"), [("aaaa", True), ("aaabaaa", False), ("ababab", True), ("abcabc", False), ("xababab", True)]
)
def test_loops(steps: str, stuck: bool) -> None:
    detector = LoopDetector()
    assert [detector.add(step) for step in steps] == [False] * (len(steps) - 1) + [stuck]


def test_the_shell_keeps_its_state_and_shows_how_a_command_ended(place: Place) -> None:
    seen = place.answers(
        call("bash", command="cd /tmp; x=7"),
        call("bash", command="echo $x; pwd; (exit 3)"),
        call("bash", command="exit 1"),
        call("bash", command="echo 1\0 $x"),
        call("bash", command="echo here; sh -c 'kill -SEGV $$'"),
        call("bash"),
        call("python", code="1"),
    )
    assert seen[0] == "" and seen[1] == "7\n/tmp\n[exit code 3]"
    assert "[killed: the shell has ended]" in seen[2] and "[a new shell" in seen[2]
    assert seen[3] == "1" and seen[4] == "here\n[exit code 139: SIGSEGV]"
    assert "command" in seen[5] and "there is no function 'python'" in seen[6]


def played_with(factory: Callable[[], SweFactory], task: Task, *messages: Message) -> Played:
    """By a factory of its own. It is made in the event loop."""

    async def main() -> Played:
        made = factory()
        try:
            return await play(made(task), messages)
        finally:
            await made.close()

    return asyncio.run(main())


def test_after_a_soft_time_out_the_agent_waits_or_interrupts(place: Place) -> None:
    """What a command waits for comes with the second message after it: it runs on, however busy the machine is."""
    waits = "until test -e /tmp/two; do sleep 0.01; done"
    played = played_with(
        lambda: SweFactory(command_timeout_s=200.0, soft_timeout_s=2.5),
        place.task,
        call("bash", command=f"echo one; {waits}; echo two"),
        call("bash", command="echo three"),
        call(EDITOR, command="create", path="/tmp/two", file_text=""),
        call("bash", command=""),
        call("bash", command="C-c"),
        call("bash", command="x=7; echo a; sleep 600"),
        call("bash", command="C-c"),
        call("bash", command="echo $x"),
    )
    seen = [result.messages[0].content for result in played]
    running = "[still running. Send an empty command to wait for it, or C-c to interrupt it.]"
    assert seen[0] == f"one\n{running}" and "still running" in seen[1] and "three" not in seen[1]
    assert seen[3] == "two" and "No command is running" in seen[4]
    assert seen[5:] == [f"a\n{running}", "[exit code 130: SIGINT]", "7"]
    statuses = [result.tool_uses[0].status for result in played]
    assert statuses[1] is statuses[4] is ToolStatus.USER_ERROR
    assert {statuses[0], statuses[2], *statuses[5:]} == {ToolStatus.SUCCESS}


def test_a_command_is_stopped_at_its_limit_also_after_soft_time_outs(place: Place) -> None:
    async def main() -> list[StepResult]:
        factory = SweFactory(command_timeout_s=4.0, soft_timeout_s=1.0)
        made = factory(place.task)
        await made.reset()
        played = [await made.step(call("bash", command="sleep 600"))]
        while "still running" in played[-1].messages[0].content:
            played.append(await made.step(call("bash", command="")))
        played.append(await made.step(call("bash", command="echo again")))
        await made.close()
        await factory.close()
        return played

    *running, stopped, again = asyncio.run(main())
    assert 1 <= len(running) <= 3 and stopped.tool_uses[0].status is ToolStatus.TIMEOUT  # 3 in 4 s; fewer if it is busy
    assert [each.messages[0].content for each in (stopped, again)] == ["[stopped after 4 s]", "again"]
    (stopped,) = played_with(
        lambda: SweFactory(command_timeout_s=3.0), place.task, call("bash", command="echo before; sleep 600")
    )
    assert stopped.messages[0].content == "before\n[stopped after 3 s]"


def test_a_soft_time_out_is_described_to_the_agent(place: Place) -> None:
    async def described() -> str:
        factory = SweFactory(command_timeout_s=4.0, soft_timeout_s=1.0)
        try:
            return factory.initial_observation(place.task).tools[0].description
        finally:
            await factory.close()

    assert "empty command" in asyncio.run(described())


def test_the_editor(place: Place) -> None:
    def edit(command: str, path: str = "notes.txt", **arguments: Any) -> Message:
        return call(EDITOR, command=command, path=path, **arguments)

    seen = place.answers(
        edit("create", file_text="one\ntwo\ntwo\nthree"),
        edit("create", file_text="again"),
        edit("view", view_range=[2, -1]),
        edit("str_replace", old_str="two", new_str="2"),
        edit("str_replace", old_str="one\ntwo", new_str="1\n2"),
        edit("insert", insert_line=4, new_str="four"),
        edit("view"),
        edit("undo_edit"),
        edit("undo_edit"),
        call("bash", command="cat notes.txt"),
        edit("undo_edit"),
        edit("undo_edit"),
        call("bash", command="ls notes.txt; printf '\\377' > bytes; mkfifo pipe; ln -s /dev/zero zero"),
        edit("view", "bytes"),
        edit("view", "zero"),
        edit("view", "pipe"),
        edit("view", "."),
        edit("view", "absent.py"),
        edit("view", "x" * 5000),
        edit("insert", "calc/core.py", insert_line=99, new_str="x"),
        edit("str_replace", "calc/core.py"),
        edit("view", "calc/core.py", view_range=[9, 1]),
        edit("create", "/proc/new/file", file_text="x"),
        edit("delete"),
    )
    assert seen[0] == "Created /testbed/notes.txt." and "exists" in seen[1]
    assert seen[2] == "     2\ttwo\n     3\ttwo\n     4\tthree"
    assert "occurs 2 times" in seen[3] and "     1\t1\n     2\t2\n     3\ttwo" in seen[4]
    assert seen[6].splitlines()[-2:] == ["     4\tthree", "     5\tfour"]
    assert seen[9] == "one\ntwo\ntwo\nthree" and "Reverted" in seen[10] and "no edit" in seen[11]
    assert "cannot access" in seen[12]
    assert "not text in UTF-8" in seen[13] and "more than 1048576 bytes" in seen[14] and "Stopped" in seen[15]
    assert "/testbed/calc/core.py" in seen[16] and ".git" not in seen[16]
    assert "No such file" in seen[17] and "4096" in seen[18] and "between 0 and" in seen[19]
    assert "needs `old_str`" in seen[20] and "outside of the file" in seen[21]
    assert all(each.startswith("Error") for each in seen[22:])


def test_the_editor_keeps_line_ends_and_counts_lines_as_tools_do(place: Place) -> None:
    def edit(command: str, path: str, **arguments: Any) -> Message:
        return call(EDITOR, command=command, path=path, **arguments)

    seen = place.answers(
        call(
            "bash",
            command="printf 'a = 1\\n\\f\\nb = 2\\n' > feed; printf 'x\\r\\ny\\r\\nz\\r\\n' > dos; seq 200 > many",
        ),
        edit("view", "feed"),
        edit("insert", "feed", insert_line=3, new_str="c = 3"),
        edit("str_replace", "dos", old_str="x\ny", new_str="1\n2"),
        edit("insert", "dos", insert_line=1, new_str="between"),
        call("bash", command="cat -A dos feed"),
        edit("str_replace", "many", old_str="199", new_str="199"),
        edit("str_replace", "many", old_str="99", new_str="0"),
        edit("view", "many", view_range=[1, -5]),
        call("search", query="1", path="many"),
        edit("str_replace", "dos", old_str="2\r\nz", new_str="3\r\nz"),
        call("bash", command="cat -A dos"),
    )
    assert seen[11] == "1^M$\nbetween^M$\n3^M$\nz^M$"
    assert seen[1] == "     1\ta = 1\n     2\t\f\n     3\tb = 2" and "     4\tc = 3" in seen[2]
    assert "     1\t1\n     2\t2\n     3\tz" in seen[3] and "     2\tbetween" in seen[4]
    assert seen[5] == "1^M$\nbetween^M$\n2^M$\nz^M$\na = 1$\n^L$\nb = 2$\nc = 3$"
    assert "nothing would change" in seen[6] and "occurs 2 times: in lines 99, 199" in seen[7]
    assert "outside of the file" in seen[8] and seen[9].endswith("\n[only the first 100 are shown]")


async def test_one_edit_of_a_line_is_an_episode(place: Place) -> None:
    task = to_task(as_task_row({**place.row, "file": "calc/core.py"}), "calc#0")
    factory = SweFactory(style="line")
    factory.check_task(task)
    with pytest.raises(DataError, match="field 'file'"):
        factory.check_task(place.task)
    initial = factory.initial_observation(task)
    fixing = [respond(), call("edit_line", line=9, text="x"), call("edit_line", line=2, text="    return a + b")]
    fixed = await play(factory(task), fixing)
    spoiled = await play(factory(task), [call("edit_line", line=2, text="return a\n + b")])
    await factory.close()
    assert initial.messages[-1].content == task.prompt[-1].content
    assert [tool.name for tool in initial.tools] == ["edit_line"]
    assert [result.done for result in fixed] == [False, False, True]
    assert [result.messages[0].content for result in fixed] == [
        "Call edit_line.",
        "Error: `line` must be between 1 and 6.",
        "Line 2 is replaced.",
    ]
    assert fixed.score is not None and (fixed.score.total, fixed.score.parts["swe/finished"]) == (1.0, 1.0)
    assert spoiled.score is not None and spoiled.score.total == 0.0


def test_search(place: Place) -> None:
    seen = place.answers(
        call("search", query="def (add|name)"),
        call("search", query="def", path="README.md"),
        call("search", query="(", path="calc"),
        call("search", query="-x\0", path="calc"),
    )
    assert seen[0].splitlines() == ["/testbed/calc/core.py:1:def add(a, b):", "/testbed/calc/core.py:5:def name():"]
    assert seen[1] == seen[3] == "No line matches." and seen[2].startswith("Error: grep")


@pytest.mark.usefixtures("quick_scoring")
async def test_the_style_mini_offers_bash_alone_and_ends_with_a_command(place: Place) -> None:
    factory = SweFactory(style="mini")
    try:
        assert [tool.name for tool in factory.initial_observation(place.task).tools] == ["bash"]
        fixing = call("bash", command="sed -i 's/a - b/a + b/' calc/core.py")
        early = call("bash", command=f"echo {SUBMIT}; false")
        played = await play(
            factory(place.task), [fixing, early, FINISH, respond(), call("bash", command=f"echo {SUBMIT}")]
        )
    finally:
        await factory.close()
    assert [result.done for result in played] == [False] * 4 + [True]
    assert played[2].tool_uses[0].status is ToolStatus.USER_ERROR and "one command" in played[3].messages[0].content
    assert played.score is not None and (played.score.total, played.score.parts["swe/finished"]) == (1.0, 1.0)


def test_the_prompt_holds_the_issue_and_neither_tests_nor_the_fix(place: Place, tmp_path: Path) -> None:
    initial = place.factory.initial_observation(place.task)
    shown = json.dumps([message.content for message in initial.messages])
    assert "add subtracts" in shown and "/testbed" in shown and "a + b" not in shown and "test_add" not in shown
    own = tmp_path / "own.txt"
    own.write_text("Solve: {question}")
    factory = SweFactory(prompt=str(own))
    assert factory.initial_observation(place.task).messages == (Message("user", "Solve: add subtracts"),)
    asyncio.run(factory.close())


def test_a_bad_row_is_refused_before_the_start(place: Place) -> None:
    def problem(**changed: Any) -> str:
        with pytest.raises(DataError) as caught:
            place.factory.check_task(to_task(as_task_row({**place.row, **changed}), "calc#0"))
        return str(caught.value)

    place.factory.check_task(place.task)
    small = replace(place.task, extra={**place.row, "limits": {"memory_mib": 256}})
    assert place.factory.swe_task(small).limits == RuntimeLimits(memory_mib=256)
    assert "there is no /none" in problem(repository="/none") and "there is no no-env" in problem(environment="no-env")
    assert "names no test" in problem(FAIL_TO_PASS=[], PASS_TO_PASS=[])
    published = {name: value for name, value in place.row.items() if name != "repository"}
    with pytest.raises(DataError, match="the runtime of calc is missing"):
        place.factory.check_task(to_task(as_task_row(published), "calc#0"))
    prepared = SweFactory(prepared=str(Path(place.row["repository"]).parent))
    prepared.check_task(to_task(as_task_row(published), "calc#0"))
    asyncio.run(prepared.close())
    assert as_task_row({"prompt": "other"}) == {"prompt": "other"}
    for options in (
        {"style": "codeact"},
        {"max_scoring": 0},
        {"urls": ["ftp://x"]},
        {"soft_timeout_s": 120},
        {"command_timeout_s": 0},
        {"prepared": "/none"},
        {"prompt": "/none.txt"},
        {"require_cgroup": True, "urls": ["http://127.0.0.1:1"]},
        {"prepared": "/tmp", "deployment": {"python": sys.executable, "type": "docker"}},
    ):
        with pytest.raises(ConfigError):
            build_env_factory("swe", options)
    with pytest.raises(ConfigError, match="command_timeout_s=inf must be positive and finite"):
        build_env_factory("swe", {"command_timeout_s": math.inf})


class Losing(SweFactory):
    """Loses runtimes: the first ones that start, or the agent's after so many steps."""

    def __init__(self, starts: int = 0, step: int | None = None) -> None:
        super().__init__()
        self.starts, self.lost_step = starts, step
        self.runtimes.start, self._start = self._lossy, self.runtimes.start  # type: ignore[method-assign]

    async def _lossy(self, task: Any) -> Any:
        self.starts -= 1
        if self.starts >= 0:
            raise RuntimeLostError("the server is gone")
        return await self._start(task)

    def __call__(self, task: Task) -> SweEnv:
        made = super().__call__(task)
        step = made.step

        async def losing(message: Message) -> Any:
            if self.lost_step == 0:
                self.lost_step = None
                assert made._runtime is not None
                await made._runtime.close()
            elif self.lost_step is not None:
                self.lost_step -= 1
            return await step(message)

        made.step = losing  # type: ignore[method-assign]
        return made


class Speaker:
    """An engine: each episode writes these texts in turn, whatever it is answered."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        text = chat().tokenizer.decode(prompt_ids).count("assistant\n") - 1
        ids = (*chat().response_ids(self._texts[text])[0], chat().end_token_id)
        return (Completion(ids, (0.0,) * len(ids), FinishReason.STOP, 0),)


def rollout(factory: SweFactory, texts: Sequence[str], *settings: str) -> GroupRollout:
    """Episodes of training, with a scripted engine."""
    overrides = [
        "model.path=m",
        "data.train_files=[t]",
        "data.val_files=[v]",
        "env.name=swe",
        "env.tool_call_format=xml",
    ]
    room = ["data.max_response_length=20000", "data.max_prompt_length=8000"]
    config = load_config([*overrides, *room, "env.max_tool_calls=8", *settings])
    runner = build_episode_runner(config, chat())
    runner.envs._factories["swe"] = factory  # type: ignore[attr-defined]
    return GroupRollout(Speaker(texts), DirectScorer(build_reward("env")), Sampling(4000), runner)  # type: ignore[arg-type]


def xml(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{inside}</function>"


GOLD_TEXTS = [xml("bash", command="sed -i 's/a - b/a + b/' calc/core.py"), xml("finish")]


@pytest.mark.usefixtures("quick_scoring")
@pytest.mark.parametrize("losses", [{"starts": 1}, {"step": 1}])
async def test_after_a_lost_runtime_the_episode_starts_again(place: Place, losses: dict[str, int]) -> None:
    group = rollout(Losing(**losses), GOLD_TEXTS)
    (found,) = await group.run_all([place.task], 1)
    assert (found.rewards, found.faults) == ((1.0,), ())
    await group.close()


@pytest.mark.usefixtures("quick_scoring")
@pytest.mark.parametrize("lost", [2, 3])
async def test_an_episode_whose_runtime_is_lost_with_its_patch_starts_again(
    place: Place, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, left = env.collect_patch, [lost]

    async def losing(runtime: Any, task: Any) -> str:
        left[0] -= 1
        if left[0] >= 0:
            await runtime.close()
        return await collect(runtime, task)

    monkeypatch.setattr(env, "collect_patch", losing)
    factory = SweFactory()
    group = rollout(factory, GOLD_TEXTS)
    (found,) = await group.run_all([place.task], 1)
    if lost == 2:
        assert (found.rewards, found.faults) == ((1.0,), ())
        assert found.trajectories[0].repeats == 2 and tool_metrics([found])["tools/repeats"] == 2
        assert factory._kept == {} and next(factory._places) == 1  # with the place that it had
    else:
        assert found.rewards == () and "it is closed" in found.faults[0]
    await group.close()


@pytest.mark.usefixtures("quick_scoring")
async def test_an_episode_that_starts_again_keeps_its_place(place: Place) -> None:
    """One start at a time: the first fails, the second has the slot, and then the first one's group goes on."""
    starts: list[str] = []
    factory = SweFactory(max_starting=1)
    start = factory.runtimes.start

    async def first_fails(task: Any) -> Any:
        starts.append(task.id)
        if len(starts) == 1:
            await asyncio.sleep(0.2)  # the others wait meanwhile
            raise RuntimeLostError("gone")
        return await start(task)

    factory.runtimes.start = first_fails  # type: ignore[method-assign]
    group = rollout(factory, GOLD_TEXTS)
    rows = [{**place.row, "instance_id": name} for name in "abc"]
    found = await group.run_all([to_task(as_task_row(row), row["instance_id"]) for row in rows], 1)
    assert [each.rewards for each in found] == [(1.0,)] * 3
    await group.close()
    assert starts == ["a", "b", "a", "c"]


@pytest.mark.usefixtures("quick_scoring")
async def test_engine_time_is_measured_apart_from_tool_time(place: Place) -> None:
    """Responses of 0.2, 0.3 and 0.4 s, the last without a call; a command of 1 s."""
    made = place.factory(place.task)
    await made.reset()
    for seconds, command in ((0.2, "sleep 1"), (0.3, "sed -i 's/a - b/a + b/' calc/core.py")):
        await asyncio.sleep(seconds)
        await made.step(call("bash", command=command))
    await asyncio.sleep(0.4)
    score = await made.judge()
    await made.close()
    parts = score.parts
    assert 0.9 <= parts["swe/engine_s"] <= parts["swe/running_s"] - 1  # a busy machine may add to any of them
    assert parts["swe/engine_share"] == pytest.approx(parts["swe/engine_s"] / parts["swe/running_s"])


async def test_without_any_runtime_there_is_a_fault_and_no_score(place: Place) -> None:
    group = rollout(Losing(starts=100), GOLD_TEXTS)
    (found,) = await group.run_all([place.task], 2)
    assert found.rewards == () and len(found.faults) == 2 and "the server is gone" in found.faults[0]
    await group.close()


@pytest.mark.parametrize("lost", [2, 3])
def test_a_patch_is_scored_again_if_its_runtime_is_lost(
    place: Place, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [lost]

    async def scored(*_: Any) -> PatchVerdict:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeLostError("gone")
        return PatchVerdict(PatchOutcome.RESOLVED)

    monkeypatch.setattr(env, "score_patch", scored)
    if lost < env.SCORINGS:
        score = place.play(FIXING).score
        assert score is not None and score.total == 1.0
    else:
        with pytest.raises(RuntimeLostError):
            place.play(FIXING)


@pytest.mark.usefixtures("quick_scoring")
def test_with_a_task_at_fault_a_patch_is_scored_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[str] = []

    async def scored(_: Any, task: SweTask, *__: Any) -> PatchVerdict:
        tasks.append(task.id)
        raise TaskFaultError("the test patch does not apply")

    monkeypatch.setattr(env, "score_patch", scored)
    with pytest.raises(TaskFaultError):
        place.play(FIXING)
    assert tasks == ["calc"]


async def test_a_limit_ends_the_episode_and_the_patch_is_judged(place: Place) -> None:
    texts = [GOLD_TEXTS[0], *(xml("bash", command=f"echo {number}") for number in range(9))]
    group = rollout(SweFactory(), texts, "env.max_turns=3", "env.max_tool_calls=4")
    (found,) = await group.run_all([place.task], 1)
    (episode,) = found.trajectories
    assert (episode.stop_reason, found.rewards) == (StopReason.MAX_TURNS, (1.0,))
    await group.close()


async def test_tests_that_do_not_end_score_zero_whatever_a_turn_may_take(place: Place) -> None:
    """A verdict has limits of its own."""
    task = to_task(as_task_row({**place.row, "test_timeout_s": 5}), "calc#0")
    texts = [xml("bash", command="echo 'while True: pass' >> calc/core.py"), xml("finish")]
    group = rollout(SweFactory(command_timeout_s=2.0), texts, "env.turn_timeout_s=4")
    (found,) = await group.run_all([task], 1)
    assert (found.rewards, found.faults) == ((0.0,), ())
    assert found.scores[0].parts["swe/timeout"] == 1.0
    await group.close()


async def test_each_stage_has_slots_of_its_own(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six episodes two run at a time. No verdict comes before all agents are done: it holds no slot of theirs."""
    running, most, done, scoring = 0, 0, 0, 0
    factory = SweFactory(max_starting=1, max_running=2, max_scoring=3)
    pairs, threes, all_done = asyncio.Barrier(2), asyncio.Barrier(3), asyncio.Event()

    async def scored(*_: Any) -> PatchVerdict:
        nonlocal scoring
        scoring += 1
        await all_done.wait()
        await threes.wait()
        assert scoring <= 3
        scoring -= 1
        return PatchVerdict(PatchOutcome.RESOLVED)

    async def one() -> Score:
        nonlocal running, most, done
        made = factory(place.task)
        await made.reset()
        running, most = running + 1, max(most, running + 1)
        await made.step(FIXING)
        await pairs.wait()
        running, done = running - 1, done + 1
        if done == 6:
            all_done.set()
        score = await made.judge()
        await made.close()
        return score

    monkeypatch.setattr(env, "score_patch", scored)
    try:
        scores = await asyncio.gather(*(one() for _ in range(6)))
    finally:
        assert [factory.slots[stage].free for stage in ("starting", "running", "scoring")] == [1, 2, 3]
        await factory.close()
    assert most == 2 and [score.total for score in scores] == [1.0] * 6
    assert max(score.parts["swe/starting_wait_s"] for score in scores) > 0.1


@pytest.mark.parametrize("share", [True, False])
async def test_equal_patches_are_scored_once_if_they_may(
    place: Place, monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    calls = 0

    async def scored(*_: Any) -> PatchVerdict:
        nonlocal calls
        calls += 1
        return PatchVerdict(PatchOutcome.RESOLVED)

    monkeypatch.setattr(env, "score_patch", scored)
    factory = SweFactory(share_verdicts=share)
    totals = []
    for _ in range(2):
        made = factory(place.task)
        await made.reset()
        await made.step(FIXING)
        totals.append((await made.judge()).total)
        await made.close()
    await factory.close()
    assert totals == [1.0, 1.0]
    assert calls == (1 if share else 2)


@pytest.mark.long
def test_episodes_of_a_killed_server_begin_anew_on_the_other(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers, four agents; one server is killed while they work: all four score 1."""
    monkeypatch.setenv("VERL_SERVICE_TOKEN", TOKEN)
    options = ["--environments", str(Path(place.environment).parent), "--capacity", "8"]
    texts = [xml("bash", command="sleep 4"), *GOLD_TEXTS]

    async def main(urls: list[str], server: subprocess.Popen[bytes]) -> None:
        factory = SweFactory(urls=urls)
        group = rollout(factory, texts)
        playing = asyncio.create_task(group.run_all([place.task], 4))
        while min(each.in_flight for each in factory.runtimes.endpoints) < 2:  # type: ignore[attr-defined]
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        os.killpg(server.pid, signal.SIGKILL)
        (found,) = await playing
        assert (found.rewards, found.faults) == ((1.0,) * 4, ())
        assert [use.status for use in found.lost_uses] == [ToolStatus.UNAVAILABLE] * 2
        await group.close()

    with contextlib.ExitStack() as stack:
        ports = [free_port(), free_port()]
        servers = []
        for port in ports:
            command = [sys.executable, "-m", "toolrl.swe.server", "--port", str(port), *options]
            command += ["--folder", str(tmp_path / f"server{port}")]
            servers.append(stack.enter_context(serving(command, port, tmp_path / f"{port}.log")))
        monkeypatch.chdir(Path(place.environment).parent)  # the environment lies there; images are kept in outputs/
        asyncio.run(asyncio.wait_for(main([f"http://127.0.0.1:{port}" for port in ports], servers[0]), 240))


@pytest.mark.long
def test_agents_solve_quixbugs_and_idle_ones_do_not(place: Place, tmp_path: Path) -> None:
    rows = list(read_rows(str(real_data("swe", "quixbugs.jsonl"))))[1::8]  # no bug of these loops forever
    for number, raw in enumerate(rows):
        row = convert(raw, tmp_path / "tasks", place.environment)
        task = to_task(as_task_row(row), f"quixbugs#{number}")
        ((path, fixed),) = raw["fix"].items()
        edit = {"command": "str_replace", "path": path, "old_str": raw["files"][path], "new_str": fixed}
        solved = place.play(call(EDITOR, **edit), FINISH, task=task)
        touched = place.play(call("bash", command=f"echo '# seen' >> {shlex.quote(path)}"), FINISH, task=task)
        assert solved.score is not None and touched.score is not None
        assert (solved.score.total, touched.score.total) == (1.0, 0.0), row["instance_id"]
