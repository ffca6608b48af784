"""Agents as processes: they call the policy through the gateway with the official SDK; their episodes are scored."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.at_a_path import SECRET, host_file
from tests.support.local_run import local_trainer
from tests.toolrl.benchmarks.runner.eval_play import chat
from tests.toolrl.envs.agent.play import CALL, observations
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.envs.agent.agent import AgentFactory
from toolrl.envs.agent.inside import programs
from toolrl.envs.agent.launcher import CommandLauncher, FunctionLauncher, ProgramFailedError
from toolrl.envs.agent.sampling import OnSampling
from verl.build.env import build_episode_runner
from verl.config.load import load_config
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.errors import ConfigError
from verl.rollout.engine import Sampling, SingleEngine
from verl.scoring.pool import DirectScorer, Fault
from verl.types import Completion, FinishReason, Message, Outcome, Score, StopReason, Task, Trajectory
from verl.utils.reward_score.base import build_reward

pytestmark = pytest.mark.long
PROGRAMS = Path(__file__).with_name("programs_of_tests.py")
TASK = Task("t#0", (Message("user", "Hello"),), "", "test")


class TextEngine(SingleEngine):
    """Writes these texts in turn, for any caller."""

    def __init__(self, *texts: str) -> None:
        self._texts = cycle(texts)
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, prompt_ids: Any, sampling: Sampling) -> tuple[Completion, ...]:
        self.asked.append(tuple(prompt_ids))
        text = next(self._texts)
        paused = any(stop in text for stop in sampling.stop_strings)
        ids = (*chat().response_ids(text)[0], *(() if paused else (chat().end_token_id,)))
        return (Completion(ids, (-1.0,) * len(ids), FinishReason.STOP, 0),)


def runner(factory: AgentFactory, **limits: Any) -> EpisodeRunner:
    given = {"max_tokens": 4000, "max_prompt_length": 4000, "retries": 0, **limits}
    return EpisodeRunner(factory, observations(), EpisodeLimits(**given))


def play(name: str, engine: TextEngine, *tasks: Task, **limits: Any) -> list[Trajectory | Fault]:
    """The episodes of this function for the tasks."""
    return episodes(AgentFactory(agent=f"{PROGRAMS}:{name}"), engine, *tasks, **limits)


def episodes(factory: AgentFactory, engine: TextEngine, *tasks: Task, **limits: Any) -> list[Trajectory | Fault]:
    """One of each task, at the same time."""

    async def run() -> list[Trajectory | Fault]:
        setting = runner(factory, **limits)
        await setting.check_services()
        try:
            sampling = Sampling(1, stop_token_ids=chat().stop_token_ids)
            return await asyncio.gather(*(setting.run(engine, sampling, task, 0, None) for task in tasks))
        finally:
            await setting.close()

    return asyncio.run(run())


def one(name: str, engine: TextEngine, **limits: Any) -> Trajectory | Fault:
    (found,) = play(name, engine, TASK, **limits)
    return found


def test_an_agent_on_the_official_sdk_is_an_episode_with_its_own_reward() -> None:
    engine = TextEngine(CALL, "It is cold.")
    found = one("two_turns", engine)
    assert isinstance(found, Trajectory), found
    assert found.stop_reason is StopReason.STOP and found.score == Score(0.11, {"length": 11.0})
    assert [turn.segment for turn in found.turns] == [0, 0] and found.prompt == TASK.prompt
    first, second = found.turns
    assert [call.name for call in first.message.tool_calls] == ["weather"]
    assert first.responses == (Message("tool", "-3", tool_call_id="call00000"),)
    before = (*first.context_ids, *first.completion.token_ids)
    assert engine.asked == [tuple(first.context_ids), (*before, *second.context_ids)]


def test_a_stream_has_the_whole_response() -> None:
    found = one("streamed", TextEngine("twelve chars"))
    assert isinstance(found, Trajectory) and found.score == Score(12.0, {})


def test_parallel_requests_are_segments_of_one_episode() -> None:
    found = one("best_of_two", TextEngine("one", "three"))
    assert isinstance(found, Trajectory) and found.score == Score(5.0, {})
    assert [turn.segment for turn in found.turns] == [0, 1]
    zeros = {f"agent/{name}": 0 for name in ("retries", "undelivered", "sampling_overridden")}
    assert found.counts == {"agent/requests": 2, "agent/segments": 2, **zeros}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("crash", "RuntimeError: this agent has a bug"),
        ("never_calls", "without a response of the policy"),
    ],
)
def test_a_program_that_fails_is_a_fault_and_never_a_zero(name: str, problem: str) -> None:
    found = one(name, TextEngine("one"))
    assert isinstance(found, Fault) and problem in found.problem


def test_a_killed_agent_costs_its_episode_alone() -> None:
    tasks = [Task(f"killed#{number}", TASK.prompt, "", "test") for number in range(3)]
    killed, *others = play("killed", TextEngine("one"), *tasks)
    assert isinstance(killed, Fault) and "signal SIGKILL" in killed.problem
    assert [each.score for each in others if isinstance(each, Trajectory)] == [Score(1.0, {})] * 2


def test_modules_of_ours_shadow_no_package_of_the_agent() -> None:
    found = one("imports_requests", TextEngine("one"))
    assert isinstance(found, Trajectory) and found.score == Score(1.0, {}), found


def test_an_agent_without_a_reward_leaves_the_score_to_the_reward_function() -> None:
    found = one("no_reward", TextEngine("one"))
    assert isinstance(found, Trajectory) and found.score is None and found.outcome is Outcome.SCORED


def test_reward_env_makes_a_missing_reward_a_fault() -> None:
    found = one("no_reward", TextEngine("one"))
    assert isinstance(found, Trajectory)
    scored = asyncio.run(DirectScorer(build_reward("env")).score(found, TASK, 0))
    assert isinstance(scored, Fault) and "its agent ended without a reward" in scored.problem


def test_the_death_of_the_agents_interpreter_is_a_fault_and_the_next_episode_starts_another() -> None:
    async def run() -> tuple[Any, Any]:
        factory = AgentFactory(agent=f"{PROGRAMS}:hangs")
        setting, engine, sampling = runner(factory, turn_s=20.0), TextEngine("one"), Sampling(1)
        try:
            first = asyncio.create_task(setting.run(engine, sampling, TASK, 0, None))
            while not engine.asked:
                await asyncio.sleep(0.05)
            launcher = factory.launcher
            assert isinstance(launcher, FunctionLauncher) and launcher.pid is not None
            os.kill(launcher.pid, signal.SIGKILL)
            lost = await first
            again = asyncio.create_task(setting.run(engine, sampling, TASK, 0, None))
            while len(engine.asked) < 2:
                await asyncio.sleep(0.05)
            again.cancel()
            return lost, await asyncio.gather(again, return_exceptions=True)
        finally:
            await setting.close()

    lost, _ = asyncio.run(run())
    assert isinstance(lost, Fault) and "the agent's interpreter ended with signal SIGKILL" in lost.problem


def test_an_episode_whose_folder_is_gone_ends_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        launcher = FunctionLauncher(f"{PROGRAMS}:never_calls", None)
        with pytest.raises(ProgramFailedError, match="No such file"):
            await launcher.run(tmp_path / "gone", {}, nullcontext)
        await launcher.close()

    asyncio.run(test())
    assert "Traceback" not in capfd.readouterr().err


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_run_that_a_signal_ends_leaves_no_agent_behind_and_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """The event loop cancels everything at once: episodes, the reader of the agent's interpreter, open requests."""
    pids: list[int] = []

    class Stuck(TextEngine):
        async def generate(self, prompt_ids: Any, sampling: Sampling) -> tuple[Completion, ...]:
            self.asked.append(tuple(prompt_ids))
            await asyncio.sleep(3600)
            raise AssertionError

    async def ended() -> None:
        factory, engine = AgentFactory(agent=f"{PROGRAMS}:two_turns"), Stuck()
        setting = runner(factory)
        playing = asyncio.create_task(setting.run(engine, Sampling(1), TASK, 0, None))
        while not engine.asked:
            await asyncio.sleep(0.05)
        assert isinstance(factory.launcher, FunctionLauncher) and factory.launcher.pid is not None
        pids.extend(
            [
                factory.launcher.pid,
                *(each.pid for each in psutil.Process(factory.launcher.pid).children(recursive=True)),
            ]
        )
        assert not playing.done()
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(ended())
    assert time.monotonic() - began < 20 and len(pids) == 3  # the interpreter, the guard, the program
    while any(map(_runs, pids)):
        assert time.monotonic() - began < 20
        time.sleep(0.05)
    assert "Traceback" not in capfd.readouterr().err


def test_programs_wait_for_a_slot_without_time_limit() -> None:
    tasks = [Task(f"t#{number}", TASK.prompt, "", "test") for number in range(8)]  # the last one waits for 3.5 s
    factory = AgentFactory(command="sh -c 'sleep 0.5; exit 3'", max_concurrent=1)
    found = episodes(factory, TextEngine("one"), *tasks, turn_s=3.3, episode_s=3.3)
    assert all(isinstance(each, Fault) and "exit status 3" in each.problem for each in found), found


def test_an_agent_that_hangs_is_ended_and_keeps_its_turns() -> None:
    found = one("hangs", TextEngine("one"), turn_s=4.0)
    assert isinstance(found, Trajectory) and len(found.turns) == 1
    assert (found.stop_reason, found.outcome) == (StopReason.TURN_TIMEOUT, Outcome.MODEL_FAULT)


def test_a_limit_is_an_error_for_the_program_and_the_stop_reason_of_the_episode() -> None:
    found = one("too_many", TextEngine("one"), max_turns=3)
    assert isinstance(found, Trajectory) and found.score == Score(0.5, {"refused": 1.0})
    assert len(found.turns) == 3 and found.stop_reason is StopReason.MAX_TURNS


def test_an_episode_whose_last_response_is_cut_is_one_at_the_limit() -> None:
    """As with env.name=tool: clip ratios and the filter `truncated` read it."""

    class Cut(TextEngine):
        async def generate(self, prompt_ids: Any, sampling: Sampling) -> tuple[Completion, ...]:
            ids = (*chat().response_ids("word " * 50)[0],)[: sampling.max_tokens]
            return (Completion(ids, (-1.0,) * len(ids), FinishReason.LENGTH, 0),)

    (found,) = episodes(AgentFactory(agent=f"{PROGRAMS}:streamed"), Cut(), TASK, max_tokens=20)
    assert isinstance(found, Trajectory) and found.stop_reason is StopReason.LENGTH
    factory = AgentFactory(agent=f"{PROGRAMS}:no_reward", reward_at_limit=-1.0)
    (found,) = episodes(factory, Cut(), TASK, max_tokens=20)
    assert isinstance(found, Trajectory)
    assert asyncio.run(DirectScorer(build_reward("env")).score(found, TASK, 0)) == Score(-1.0, {})
    found = one("streamed", TextEngine("one"))
    assert isinstance(found, Trajectory) and found.stop_reason is StopReason.STOP


@pytest.mark.parametrize("options", [{}, {"reward_at_limit": -1.0}])
@pytest.mark.parametrize("name", ["unguarded", "hangs", "no_reward"])
def test_an_episode_at_a_limit_has_the_reward_of_the_option(name: str, options: dict[str, Any]) -> None:
    """`unguarded` crashes with the error of the limit, `hangs` reaches its time limit, `no_reward` reaches none."""
    factory = AgentFactory(agent=f"{PROGRAMS}:{name}", **options)
    (found,) = episodes(factory, TextEngine("one"), TASK, max_turns=2, turn_s=4.0)
    assert isinstance(found, Trajectory)
    scored = asyncio.run(DirectScorer(build_reward("env")).score(found, TASK, 0))
    if options and name != "no_reward":
        assert scored == Score(-1.0, {})
    else:
        assert isinstance(scored, Fault)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: AgentFactory(), "needs env.agent"),
        (lambda: AgentFactory(command="no_such_program -x"), "there is no program 'no_such_program'"),
        (lambda: AgentFactory(agent="nowhere.py:run"), "there is no file"),
        (lambda: AgentFactory(command="ls", reward_at_limit=float("nan")), "reward_at_limit: nan is not a reward"),
        (lambda: AgentFactory(command="ls", reward_at_limit=0.0, runtime=True), "reward_at_limit has no effect"),
        (lambda: AgentFactory(agent=str(PROGRAMS)), "must be file.py:function"),
        (lambda: AgentFactory(agent=f"{PROGRAMS}:run", python="/nowhere/python"), "is not an interpreter"),
        (lambda: AgentFactory(command="true", on_sampling="reject"), "on_sampling must be replace or refuse or honor"),
        (lambda: AgentFactory(agent=f"{PROGRAMS}:absent"), "absent"),
    ],
)
def test_an_agent_that_cannot_be_started_is_refused_before_the_run(
    make: Callable[[], AgentFactory], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        asyncio.run(make().check_services())


def test_the_first_episode_waits_for_a_module_that_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolrl.envs.agent.agent._CHECK_S", 0.3)
    (tmp_path / "slow.py").write_text(
        "import sys, time\ntime.sleep(0.6)\n"
        f"sys.path.append({str(PROGRAMS.parent)!r})\nfrom programs_of_tests import streamed\n"
    )
    (found,) = episodes(AgentFactory(agent=f"{tmp_path / 'slow.py'}:streamed"), TextEngine("Hello"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(5.0, {})


@pytest.mark.parametrize("key", ["env.agent=a.py:run", "env.command=ls"])
def test_keys_of_agents_need_the_environment(key: str) -> None:
    with pytest.raises(ConfigError, match=r"need env.name=agent; it is single_turn"):
        load_config(["recipe=mini_grpo", key])


@pytest.mark.parametrize("option", ["python=python", "on_sampling=honor"])
@pytest.mark.parametrize("name", ["tool", "remote", "swe"])
def test_options_of_agents_are_refused_by_other_environments(option: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.options\.\w+=\w+ has no effect"):
        load_config(["recipe=mini_grpo", f"env.options.{option}"])
    overrides = [f"env.name={name}", "env.tool_call_format=toolrl", f"env.options.{option}"]
    config = load_config(["recipe=mini_grpo", *overrides])
    with pytest.raises(ConfigError, match=r"has no option|is configured by env\.tools"):
        build_episode_runner(config, chat())


AGENT = ["recipe=mini_grpo", "env.name=agent", "env.tool_call_format=toolrl", "reward.name=env"]


@pytest.mark.parametrize(
    "key",
    [
        *("env.agent=a.py:run", "env.command=ls", "env.options.python=python", "env.options.on_sampling=refuse"),
        "env.max_turns=3",
        *("env.max_concurrent_calls=200", "env.turn_timeout_s=3", "env.train_on_observations=true"),
        *("env.max_turn_tokens=9", "env.tool_call_format=hermes"),
    ],
)
def test_keys_that_agents_read_are_accepted(key: str) -> None:
    load_config([*AGENT, key])


@pytest.mark.parametrize(
    "key",
    [
        *("env.on_parse_error=terminate", "env.observation_cut=refuse", "env.max_observation_tokens=7"),
        "env.tool_timeout_s=3",
    ],
)
def test_keys_that_no_agent_reads_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        load_config([*AGENT, key])


def test_options_of_an_agent_reach_its_factory() -> None:
    options = ["env.agent=tests/toolrl/envs/agent/programs_of_tests.py:run", "env.options.on_sampling=refuse"]
    config = load_config([*AGENT, *options, f"env.options.python={sys.executable}"])
    factory = build_episode_runner(config, chat()).envs.factory_of(TASK)
    assert isinstance(factory, AgentFactory)
    assert factory.on_sampling is OnSampling.REFUSE
    for option in ("python=/nowhere/python", "python=3", "on_sampling=Honor", "on_sampling=null", "on_samplin=honor"):
        with pytest.raises(ConfigError, match=option.partition("=")[0]):
            build_episode_runner(load_config([*AGENT, options[0], f"env.options.{option}"]), chat())


def test_honored_sampling_needs_log_probs_of_the_trainer() -> None:
    agent = ["recipe=mini_grpo", "env.name=agent", "env.command=ls", "env.tool_call_format=toolrl", "reward.name=env"]
    with pytest.raises(ConfigError, match=r"env.options.on_sampling=honor needs algorithm.old_logprobs=trainer"):
        load_config([*agent, "env.options.on_sampling=honor", "algorithm.old_logprobs=rollout"])
    with pytest.raises(ConfigError, match=r"env.max_turns limits its requests"):
        load_config([*agent, "env.max_tool_calls=3"])


def command(source: str, python: str | None = None) -> AgentFactory:
    """As env.command sets it: a Python program without our packages, which speaks HTTP itself."""
    return AgentFactory(command=f"{python or sys.executable} -c {shlex.quote(textwrap.dedent(source))} {{task_json}}")


ASK = """
import json, os, sys, urllib.request as http
task = json.load(open(sys.argv[1]))
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
def post(url, body):
    return json.load(http.urlopen(http.Request(url, json.dumps(body).encode(), headers)))
done = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": task["prompt"]})
text = done["choices"][0]["message"]["content"]
"""


@pytest.mark.parametrize(
    "reward",
    [
        'post(os.environ["REWARD_URL"], {"reward": len(text)})',
        'json.dump({"reward": len(text)}, open(os.environ["REWARD_FILE"], "w"))',
        'post(os.environ["REWARD_URL"], {"reward": len(text)}); sys.exit(3)',  # the reward was given before
    ],
)
def test_a_command_posts_its_reward_or_leaves_it_in_a_file(reward: str) -> None:
    (found,) = episodes(command(ASK + reward), TextEngine("twelve chars"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(12.0, {}), found


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("sys.exit(3)", "ended with exit status 3"),
        ("os.kill(os.getpid(), 9)", "ended with signal SIGKILL"),
        ('print("no way"); raise KeyError("city")', "KeyError: 'city'"),
        ('open(os.environ["REWARD_FILE"], "w").write("one")', "reward.json is not JSON"),
        ('open(os.environ["REWARD_FILE"], "w").write("true")', "is not a reward"),
        ('post(os.environ["REWARD_URL"], {"reward": 1}); open(os.environ["REWARD_FILE"], "w").write("2")', "returned"),
    ],
)
def test_a_command_that_fails_is_a_fault_with_its_output(source: str, problem: str) -> None:
    (found,) = episodes(command(ASK + source), TextEngine("one"), TASK)
    assert isinstance(found, Fault) and problem in found.problem, found


STARTS = """
import os, subprocess
for own_session in (False, True):
    child = subprocess.Popen(["sleep", "600"], start_new_session=own_session, env={{}} if own_session else None)
    with open({mark!r}, "a") as file:
        file.write(str(child.pid) + "\\n")
"""


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("kind", ["agent", "command"])
def test_a_program_ends_with_all_that_it_started(kind: str, hangs: bool, tmp_path: Path) -> None:
    """Also what has a session and an environment of its own, and outlives the program."""
    mark = tmp_path / "pids"
    source = STARTS.format(mark=str(mark)) + ("\nchild.wait()" if hangs else "")
    if kind == "agent":
        file = tmp_path / "own.py"
        file.write_text(f"def run(base_url, task):\n{textwrap.indent(source, '    ')}\n    return 1.0\n")
        factory = AgentFactory(agent=f"{file}:run")
    else:
        factory = command(source)
    (found,) = episodes(factory, TextEngine("one"), TASK, turn_s=3.0)
    assert isinstance(found, Fault) and "without a response" in found.problem
    assert ("turn_timeout" in found.problem) is hangs
    pids = list(map(int, mark.read_text().split()))
    assert len(pids) == 2 and not any(map(_runs, pids))


def test_a_guard_waits_for_processes_that_it_may_not_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user, such as one that sudo started."""

    def refuse(*_: int) -> None:
        raise PermissionError

    def work() -> None:
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.5; touch {tmp_path}/ended"], start_new_session=True)
        sys.exit(3)

    monkeypatch.setattr(os, "kill", refuse)
    with (tmp_path / "output.txt").open("w") as output:
        guard = programs.start(work, output.fileno(), [])
    _, status = os.waitpid(guard, 0)
    assert os.waitstatus_to_exitcode(status) == 3, (tmp_path / "output.txt").read_text()
    assert (tmp_path / "ended").exists()


WAITS = """
import asyncio, sys
from contextlib import nullcontext
from pathlib import Path
from toolrl.envs.agent.launcher import build_launcher
agent, command = (None if each == "-" else each for each in sys.argv[2:])
folder = Path(sys.argv[1])
(folder / "task.json").write_text("null")
variables = {"OPENAI_BASE_URL": "-"}
asyncio.run(build_launcher(agent, command, None).run(folder, variables, nullcontext))
"""


@pytest.mark.parametrize("kind", ["agent", "command"])
def test_programs_end_when_the_gateways_process_is_killed(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    source = f"{STARTS.format(mark=str(mark))}\nimport time; time.sleep(600)"
    (tmp_path / "own.py").write_text(f"def run(base_url, task):\n{textwrap.indent(source, '    ')}\n")
    (tmp_path / "plain.py").write_text(source)
    given = [f"{tmp_path / 'own.py'}:run", "-"] if kind == "agent" else ["-", f"python3 {tmp_path / 'plain.py'}"]
    process = subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path), *given])
    while not mark.exists() or mark.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.05)
    pids = list(map(int, mark.read_text().split()))
    assert all(map(_runs, pids))
    process.kill()
    process.wait()
    began = time.monotonic()
    while any(map(_runs, pids)):
        assert time.monotonic() - began < 20
        time.sleep(0.05)


def test_files_that_the_module_opens_are_the_programs(tmp_path: Path) -> None:
    """A log, whose descriptor no connection of the SDK gets."""
    file, log = tmp_path / "own.py", tmp_path / "own.log"
    file.write_text(
        "import logging\nfrom openai import OpenAI\n"
        f"logging.basicConfig(filename={str(log)!r}, level=logging.INFO)\n"
        "def run(base_url, task):\n"
        "    for _ in range(2):\n"
        "        logging.info('before')\n"
        "        OpenAI().chat.completions.create(model='any', messages=task['prompt'])\n"
        "    return 1.0\n"
    )
    (found,) = episodes(AgentFactory(agent=f"{file}:run"), TextEngine("one"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(1.0, {}), found
    assert log.read_text().count("before") == 2


def test_every_episode_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import random\nimport numpy\nfrom openai import OpenAI\n"
        "def run(base_url, task):\n"
        "    OpenAI().chat.completions.create(model='any', messages=task['prompt'])\n"
        "    return {'reward': 0.0, 'parts': {'a': random.random(), 'b': numpy.random.random()}}\n"
    )
    tasks = [Task(f"t#{number}", TASK.prompt, "", "test") for number in range(3)]
    found = episodes(AgentFactory(agent=f"{file}:run"), TextEngine("one"), *tasks)
    parts = [dict(each.score.parts) for each in found if isinstance(each, Trajectory) and each.score is not None]
    assert all(len({each[name] for each in parts}) == 3 for name in "ab")


SPAWNS = """
import multiprocessing
from openai import OpenAI
def double(number):
    return 2 * number
def run(base_url, task):
    OpenAI().chat.completions.create(model="any", messages=task["prompt"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return float(sum(pool.map(double, [4])))
"""


@pytest.mark.parametrize("stem", ["spawning", "json"])
def test_a_program_may_spawn_processes(stem: str, tmp_path: Path) -> None:
    """A file with the name of a module that is loaded already does not replace it."""
    file = tmp_path / f"{stem}.py"
    file.write_text(SPAWNS if stem == "spawning" else SPAWNS.replace('"spawn"', '"fork"'))
    (found,) = episodes(AgentFactory(agent=f"{file}:run"), TextEngine("one"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(8.0, {}), found


@pytest.mark.parametrize(
    ("end", "problem"),
    [("sys.exit(0)", "without a reward"), ("sys.exit(4)", "exit status 4"), ("sys.exit('no way')", "1: no way")],
)
def test_a_function_may_exit_like_a_script(end: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "exits.py"
    file.write_text(
        "import sys\nfrom openai import OpenAI\ndef run(base_url, task):\n"
        f"    OpenAI().chat.completions.create(model='any', messages=task['prompt'])\n    {end}\n"
    )
    (found,) = episodes(AgentFactory(agent=f"{file}:run"), TextEngine("one"), TASK)
    if isinstance(found, Trajectory):
        found = asyncio.run(DirectScorer(build_reward("env")).score(found, TASK, 0))  # type: ignore[assignment]
    assert isinstance(found, Fault) and problem in found.problem and "Traceback" not in found.problem, found


def test_the_gateway_needs_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    found = one("streamed", TextEngine("one"))
    assert isinstance(found, Trajectory) and found.score == Score(3.0, {}), found


async def test_a_program_that_is_ended_while_it_starts_ends(tmp_path: Path) -> None:
    launcher = CommandLauncher("sleep 600", None)
    await launcher.check()
    for number in range(20):
        running = asyncio.create_task(launcher.run(tmp_path, {}, nullcontext))
        await asyncio.sleep(0.001 * (number % 4))
        running.cancel()
        async with asyncio.timeout(10):
            await asyncio.wait([running])
    await launcher.close()


@pytest.mark.parametrize("kind", ["agent", "command"])
def test_the_agents_interpreter_is_that_of_env_python(kind: str, tmp_path: Path) -> None:
    python = tmp_path / "python"  # an interpreter that sees nothing of ours
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    file = tmp_path / "plain_agent.py"
    file.write_text(
        "import json, os, sys, urllib.request as http\n"
        "def run(base_url, task):\n"
        "    assert 'PYTHONPATH' not in os.environ and not any('site-packages' in each for each in sys.path)\n"
        "    headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    body = json.dumps({'messages': task['prompt']}).encode()\n"
        "    http.urlopen(http.Request(base_url + '/chat/completions', body, headers)).read()\n"
        "    json.dump(1, open(os.environ['REWARD_FILE'], 'w'))\n"
        "if __name__ == '__main__':\n"
        "    run(os.environ['OPENAI_BASE_URL'], json.load(open(sys.argv[1])))\n"
    )
    given = {"agent": f"{file}:run"} if kind == "agent" else {"command": f"python {file} {{task_json}}"}
    (found,) = episodes(AgentFactory(**given, python=str(python)), TextEngine("one"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(1.0, {}), found


def test_two_steps_train_an_agent_on_the_official_sdk(tmp_path: Path) -> None:
    config = load_config(
        [
            "recipe=mini_grpo",
            "env.name=agent",
            f"env.agent={PROGRAMS}:gold_lines",
            "env.tool_call_format=toolrl",
            "reward.name=env",
            "data.train_batch_size=2",
            "actor.ppo_mini_batch_size=2",
            "actor.optim.warmup_steps=0",
            "rollout.name=hf",
            "rollout.n=4",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.total_training_steps=2",
            f"trainer.default_local_dir={tmp_path}",
        ]
    )

    async def steps(trainer: Any) -> list[Any]:
        try:
            return [await trainer.train_step() for _ in range(2)]
        finally:
            await trainer.rollouts.close()

    with local_trainer(config) as trained:
        results = asyncio.run(steps(trained))
    for step, result in enumerate(results):
        (turns,) = {len(each.turns) for group in result.groups for each in group.trajectories}
        assert turns == 2 and result.metrics["actor/grad_norm"] > 0
        assert any(len(set(group.rewards)) > 1 for group in result.groups)
        assert (result.metrics["agent/requests"], result.metrics["agent/segments"]) == (2.0, 1.0)
        every_turn = [turn for group in result.groups for each in group.trajectories for turn in each.turns]
        assert {turn.completion.weight_version for turn in every_turn} == {step}


@pytest.mark.slow
def test_200_agents_at_once_have_an_exact_episode_each() -> None:
    tasks = [Task(f"t#{number}", (Message("user", f"Hello {number}"),), "", "test") for number in range(200)]
    engine = TextEngine(CALL)
    found = play("two_turns", engine, *tasks, turn_s=600.0, episode_s=600.0)
    shown = []
    for number, each in enumerate(found):
        assert isinstance(each, Trajectory) and each.task == tasks[number] and each.score is not None, each
        first, second = each.turns
        before = (*first.context_ids, *first.completion.token_ids)
        shown += [tuple(first.context_ids), (*before, *second.context_ids)]
    assert sorted(shown) == sorted(engine.asked)


LEFT = {  # as the program leaves it -> the fault
    "os.mkfifo(file)": "reward.json: is a pipe",
    'os.symlink("/dev/zero", file)': "reward.json: is a link",
    "os.symlink({host!r}, file)": "reward.json: is a link",
    'open(file, "w").close(); os.truncate(file, 3 << 30)': "reward.json: is too large",
    "os.remove(output); os.mkfifo(output); os._exit(3)": "exit status 3: .*output.txt: is a pipe",
    "os.remove(output); os.symlink({host!r}, output); os._exit(3)": "exit status 3: .*output.txt: is a link",
}


LEFT_INSIDE = {
    left: "sandbox.file_mib sets the limit" if "large" in fault else "reward.json: is no file of the working folder"
    for left, fault in LEFT.items()
    if "output" not in left
}


@pytest.mark.parametrize(
    ("left", "sandbox"), [*((each, False) for each in LEFT), *((each, True) for each in LEFT_INSIDE)]
)
def test_files_left_by_a_program_are_neither_followed_nor_waited_for(left: str, sandbox: bool, tmp_path: Path) -> None:
    """The event loop goes on meanwhile, so that another episode is not late."""
    if sandbox:
        need_bubblewrap()
    host = host_file(tmp_path)
    names = 'file = os.environ["REWARD_FILE"]; folder = os.path.dirname(file); output = folder + "/output.txt"\n'
    source = ASK + names + left.format(host=str(host))
    factory = AgentFactory(command=f"{sys.executable} -c {shlex.quote(source)} {{task_json}}", sandbox=sandbox)
    started = time.monotonic()
    (found,) = episodes(factory, TextEngine("one"), TASK)
    fault = (LEFT_INSIDE if sandbox else LEFT)[left]
    assert isinstance(found, Fault) and re.search(fault, found.problem), found
    assert "4711" not in found.problem and host.read_text() == SECRET and time.monotonic() - started < 30


@pytest.mark.parametrize("depth", [3000])
def test_a_folder_of_folders_is_removed_with_its_episode(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    source = f"""
os.chdir(os.path.dirname(os.environ["REWARD_FILE"]))
for _ in range({depth}):
    os.mkdir("d")
    os.chdir("d")
post(os.environ["REWARD_URL"], {{"reward": 1}})
"""
    (found,) = episodes(command(ASK + source), TextEngine("one"), TASK)
    assert isinstance(found, Trajectory) and found.score == Score(1.0, {}), found
    assert not list(tmp_path.glob("agent-*"))
