"""examples/agents: each program as it is, in its own environment, with a scripted policy and with SmolLM2."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, smollm2
from tests.support.local_run import local_trainer
from tests.support.service import free_port, service
from tests.toolrl.benchmarks.runner.eval_play import chat
from tests.toolrl.envs.agent.play import observations
from tests.toolrl.envs.agent.test_agent import TextEngine, episodes, runner
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.test_harbor import folder_of
from toolrl.envs.agent.agent import AgentFactory
from verl.build.env import build_episode_runner
from verl.config.load import load_config
from verl.data.tasks import TaskSet
from verl.episodes.episode import EpisodeRunner
from verl.errors import ConfigError
from verl.rollout.engine import Generator, Sampling
from verl.scoring.pool import DirectScorer, Fault
from verl.trainer.ppo import PPOTrainer
from verl.types import Completion, Message, Score, Task, Trajectory
from verl.utils.reward_score.base import build_reward

EXAMPLES = ROOT / "examples" / "agents"
FOLDER = Path(os.environ.get("TOOLRL_TEST_AGENTS", ROOT / ".agents"))  # one environment per agent
PRODUCT = Task("product#0", (Message("user", "What is 7 times 8?"),), "56", "products")
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 7, "b": 8}}\n</tool_call>'
LOOPS = ("openai_loop", "anthropic_loop", "langgraph_agent", "agents_sdk", "node_loop")  # multiply with a tool
PROGRAMS = (
    *LOOPS,
    "litellm_loop",
    "pydantic_ai_agent",
    "pydantic_ai_agent:run_with_output_type",
    "smolagents_agent",
)
NUM_STEPS = 3
Request = tuple[tuple[int, ...], tuple[int, ...]]  # tokens in front of a response, and the response


@pytest.fixture(autouse=True)
def node_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_PATH", str(FOLDER / "node_loop" / "node_modules"))


def environment(name: str) -> Path:
    """The agent's environment, or a skip that names how to make it."""
    folder = FOLDER / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}; make it with scripts/agents/prepare.sh {name}, or set TOOLRL_TEST_AGENTS")
    return folder


def python_of(name: str) -> str:
    """The agent's interpreter: of its own environment, or ours, which has the SDKs of the loops as vLLM needs them."""
    sdk = {"openai_loop": "openai", "anthropic_loop": "anthropic"}.get(name, "")
    if sdk and not (FOLDER / name).is_dir() and find_spec(sdk):
        return sys.executable
    return str(environment(name) / "bin" / "python")


def program(name: str) -> dict[str, str]:
    """The settings of the environment `agent` for this example."""
    if name == "node_loop":
        environment(name)
        return {"command": f"node {EXAMPLES / name}.cjs {{task_json}}"}
    file, _, function = name.partition(":")
    return {"agent": f"{EXAMPLES / file}.py:{function or 'run'}", "python": python_of(file)}


def in_ledger(found: Trajectory) -> list[Request]:
    """What the policy saw and wrote by the ledger, request by request."""
    before: dict[int, tuple[int, ...]] = defaultdict(tuple)
    requests = []
    for turn in found.turns:
        shown = before[turn.segment] + tuple(turn.context_ids)
        requests.append((shown, tuple(turn.completion.token_ids)))
        before[turn.segment] = (*shown, *turn.completion.token_ids)
    return requests


def played(name: str, *scripts: Sequence[str], **options: object) -> list[tuple[Trajectory, TextEngine]]:
    """An episode for each script of responses, one after another, by one interpreter of the program.

    options: of the format
    """

    async def run() -> list[tuple[Trajectory, TextEngine]]:
        setting = replace(runner(AgentFactory(**program(name))), observations=observations("hermes", **options))
        found = []
        try:
            for texts in scripts:
                engine = TextEngine(*texts)
                sampling = Sampling(1, stop_token_ids=chat().stop_token_ids)
                episode = await setting.run(engine, sampling, PRODUCT, 0, None)
                assert isinstance(episode, Trajectory), episode
                found.append((episode, engine))
            return found
        finally:
            await setting.close()

    return asyncio.run(run())


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer(name: str) -> str:
    """How the policy gives the answer 56 to this program."""
    tools = {
        "pydantic_ai_agent:run_with_output_type": call("final_result", value=56),
        "smolagents_agent": call("final_answer", answer="It is 56."),
    }
    return tools.get(name, "It is 56.")


def thoughtful(name: str) -> list[str]:
    """A policy that thinks, calls in parallel, makes a wrong call, and answers."""
    turns = (f"I look.\n{CALL}\n{call('multiply', a=2, b=3)}", call("multiply", a="seven", b=8), answer(name))
    return [f"<think>\nStep  {number}.\n</think>\n\n{turn}" for number, turn in enumerate(turns)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["openai_loop", "node_loop"])
def test_a_loop_is_the_same_in_the_sandbox(name: str) -> None:
    need_bubblewrap()
    given = program(name)
    if "command" in given:  # no variable of the trainer is there
        given["command"] = f"env NODE_PATH={FOLDER / name / 'node_modules'} {given['command']}"
    readable = [str(EXAMPLES), str(FOLDER if FOLDER.is_dir() else Path(sys.prefix))]
    found = [
        *episodes(AgentFactory(**given), TextEngine(CALL, "It is 56."), PRODUCT),
        *episodes(AgentFactory(**given, sandbox=True, readable=readable), TextEngine(CALL, "It is 56."), PRODUCT),
    ]
    outside, inside = (each for each in found if isinstance(each, Trajectory))
    assert in_ledger(outside) == in_ledger(inside) and outside.score == inside.score is not None


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_one_segment_of_what_the_engine_saw(name: str) -> None:
    """Also with thoughts, parallel calls and wrong ones; a call of an unknown tool is the policy's failure."""
    unknown = [CALL.replace("multiply", "add"), *[answer(name)] * 3]
    thinking, plain, wrong = played(name, thoughtful(name), [CALL, answer(name)], unknown)
    for found, engine in (thinking, plain, wrong):
        assert [shown for shown, _ in in_ledger(found)] == engine.asked
        segments = [turn.segment for turn in found.turns]
        assert (
            segments == [*range(len(segments))] if name == "smolagents_agent" else [0] * len(segments)
        )  # rewrites all
    assert len(thinking[0].turns) == 3 and len(plain[0].turns) == 2
    best = 1.0 if ":" in name else 1 - len("It is 56.") / 1000
    assert plain[0].score == Score(best, {}) and thinking[0].score is not None and thinking[0].score.total > 0.9
    assert wrong[0].score is not None and wrong[0].score.total <= best
    if name in (*LOOPS, "litellm_loop"):  # which leave thoughts in the text that they score
        assert thinking[0].score.total == 1 - len(thoughtful(name)[-1]) / 1000
        (result,) = plain[0].turns[0].responses
        assert (result.role, result.content) == ("tool", "56")


CODING = {  # its tool for commands, and the argument
    "claude_code": ("Bash", {"command": "sed -i s/2/3/ f.py", "description": "fix"}),
    "codex": ("exec_command", {"cmd": "sed -i s/2/3/ f.py"}),
    "opencode": ("bash", {"command": "sed -i s/2/3/ f.py", "description": "fix"}),
}


@pytest.mark.long
@pytest.mark.parametrize("sandbox", [False, True])
@pytest.mark.parametrize("name", CODING)
def test_a_coding_agent_repairs_a_repository_in_one_segment(
    name: str, sandbox: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the sandbox: node and native programs, their threads, the policy's command and the test."""
    if sandbox:
        need_bubblewrap()
        tmp_path.chmod(0o755)  # for the sandbox's user
    options: Any = {"sandbox": True, "readable": [str(FOLDER)]} if sandbox else {}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"install it with: bash scripts/agents/prepare.sh {name}"):
        AgentFactory(agent=name)
    environment(name)
    (tmp_path / ".agents").symlink_to(FOLDER)
    tests = {"test_f.py": "from f import f\nassert f() == 3\n"}
    extra = {"files": {"f.py": "def f():\n    return 2\n"}, "tests": tests, "test": "python3 test_f.py"}
    task = Task("r#0", (Message("user", "Make f() return 3 in f.py."),), "", "repositories", extra=extra)
    tool, arguments = CODING[name]
    room, scores = {"max_tokens": 40_000, "max_prompt_length": 40_000}, []
    for texts in (("It is done.",), (f"<think>\nI look.\n</think>\n\n{call(tool, **arguments)}", "Done.")):
        engine = TextEngine(*texts)
        (found,) = episodes(AgentFactory(agent=name, **options), engine, task, **room)
        assert isinstance(found, Trajectory) and found.score is not None, found
        assert [shown for shown, _ in in_ledger(found)] == engine.asked
        assert {turn.segment for turn in found.turns} == {0}
        scores.append(found.score.total)
    assert scores == [0.0, 1.0]


@pytest.fixture
def sandbox_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    need_bubblewrap()
    port = free_port()
    with service("-m", "toolrl.sandbox.server", "--port", str(port), url=f"http://127.0.0.1:{port}/v1/ping"):
        monkeypatch.setenv("SANDBOX_URL", f"http://127.0.0.1:{port}")
        yield


@pytest.mark.long
def test_mini_swe_agent_repairs_a_program_in_the_sandbox(sandbox_server: None, tmp_path: Path) -> None:
    tasks = {task.extra["name"]: task for task in TaskSet(str(EXAMPLES / "quixbugs.jsonl"))}
    mark = tmp_path / "mark"
    shell = (
        "sed -i 's/gcd(a % b, b)/gcd(b, a % b)/' program.py",
        f"touch {mark}",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    )
    engine = TextEngine(*(f"```bash\n{command}\n```" for command in shell))
    (found,) = episodes(AgentFactory(**program("mini_swe")), engine, tasks["gcd"])
    assert isinstance(found, Trajectory), found
    assert found.score == Score(1 + 0.1 * 5 / 6, {"passed": 1.0, "commands": 5 / 6})  # three commands, two that work
    assert [turn.segment for turn in found.turns] == [0, 0, 0]
    assert [shown for shown, _ in in_ledger(found)] == engine.asked
    assert "<returncode>1" in found.turns[1].responses[0].content and not mark.exists()  # nothing runs here


@pytest.mark.long
def test_mini_swe_agent_without_a_command_repairs_nothing(sandbox_server: None) -> None:
    tasks = {task.extra["name"]: task for task in TaskSet(str(EXAMPLES / "quixbugs.jsonl"))}
    engine = TextEngine("I do not know.")
    (found,) = episodes(AgentFactory(**program("mini_swe")), engine, tasks["to_base"])
    assert isinstance(found, Trajectory) and found.score is not None, found
    assert found.score.total == found.score.parts["passed"] < 1  # what passes with the bug
    assert [turn.segment for turn in found.turns] == [0, 1, 2]  # the package drops a response without a command
    assert [shown for shown, _ in in_ledger(found)] == engine.asked


@pytest.mark.long
def test_a_loop_solves_a_task_folder_and_its_own_tests_score_it(tmp_path: Path) -> None:
    """Nothing that it writes for the verifier counts."""
    python = python_of("openai_loop")
    need_bubblewrap()
    folder = folder_of(tmp_path)
    (task,) = TaskSet(str(folder))
    scores = []
    for shell in ('echo "6 $UNIT" > sum.txt', "echo 1 > /logs/verifier/reward.txt; echo 5 > sum.txt"):
        engine = TextEngine(f"```bash\n{shell}\n```", "Done.")
        factory = AgentFactory(agent=f"{EXAMPLES / 'harbor.py'}:run", python=python, runtime=True)
        (found,) = episodes(factory, engine, task)
        assert isinstance(found, Trajectory) and found.score is not None, found
        assert [shown for shown, _ in in_ledger(found)] == engine.asked
        scores.append((found.score.total, found.score.parts["swe/resolved"]))
    assert scores == [(1.0, 1.0), (0.25, 0.0)]


@pytest.mark.long
@pytest.mark.parametrize("first", ["<code>print(7*8)</code>", "<code>1/0</code>", "I know: "])
def test_the_tool_loop_is_that_of_the_environment_tool(first: str, sandbox_server: None) -> None:
    """The same policy sees the same tokens, and has the same reward."""
    own = ["env.name=agent", "env.tools=[]", "env.max_tool_calls=null"]
    own += [
        f"env.agent={EXAMPLES / 'tool_loop.py'}:run",
        f"env.options.python={python_of('openai_loop')}",
    ]
    length = ["data.max_prompt_length=1000", "data.max_response_length=1000"]

    async def played(*overrides: str) -> tuple[list[Request], Score | Fault]:
        runner = build_episode_runner(load_config(["recipe=tool_loop", *length, *overrides]), chat())
        try:
            engine = TextEngine(first, "\\boxed{56}")
            found = await runner.run(engine, Sampling(1000), PRODUCT, 0, None)
            assert isinstance(found, Trajectory), found
            return in_ledger(found), await DirectScorer(build_reward("retool")).score(found, PRODUCT, 0)
        finally:
            await runner.close()

    expected = asyncio.run(played())
    assert asyncio.run(played(*own)) == expected
    assert expected[1] == Score(-1.0 if first == "I know: " else 1.0, {"correct": float(first != "I know: ")})


class Overheard:
    """An engine, and every request to it."""

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self.requests: list[Request] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        done = await self._engine.generate(prompt_ids, sampling)
        self.requests += [(tuple(prompt_ids), tuple(each.token_ids)) for each in done]
        return done


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOOPS, "mini_swe"])
def test_three_steps_train_it_with_smollm2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Every step has a group with different rewards, and episodes that use the tool."""
    if name == "mini_swe":
        request.getfixturevalue("sandbox_server")
    seen: list[tuple[Any, list[Request]]] = []
    run = EpisodeRunner.run

    async def overheard(self: EpisodeRunner, engine: Generator, *given: Any) -> Any:
        engine = Overheard(engine)
        seen.append((await run(self, engine, *given), engine.requests))
        return seen[-1][0]

    async def train(trainer: PPOTrainer) -> list[float]:
        try:
            return [(await trainer.train_step()).metrics["actor/grad_norm"] for _ in range(NUM_STEPS)]
        finally:
            await trainer.rollouts.close()

    monkeypatch.setattr(EpisodeRunner, "run", overheard)
    config = load_config(
        [*train_overrides(name, tmp_path), *(f"env.{key}='{each}'" for key, each in program(name).items())]
    )
    started = time.monotonic()
    with local_trainer(config) as trainer:
        assert min(asyncio.run(train(trainer))) > 0
    steps: dict[int, list[Trajectory]] = defaultdict(list)
    for found, requests in seen:
        assert isinstance(found, Trajectory) and found.score is not None, found
        assert sorted(in_ledger(found)) == sorted(requests)
        steps[found.turns[0].completion.weight_version].append(found)
    assert sorted(steps) == list(range(NUM_STEPS))
    for step, episodes_of_step in sorted(steps.items()):
        scores: dict[str, set[float]] = defaultdict(set)
        for found in episodes_of_step:
            assert found.score is not None
            scores[found.task.id].add(found.score.total)
        spread = sum(len(each) > 1 for each in scores.values())
        num_requests = sum(len(found.turns) for found in episodes_of_step)
        num_calls = sum(map(tool_calls, episodes_of_step))
        print(f"step {step}: {num_requests} requests, {num_calls} calls, {spread} of {len(scores)} groups with spread")
        assert spread and num_calls
    print(f"{name}: {len(seen)} episodes, {time.monotonic() - started:.0f} s")


def tool_calls(found: Trajectory) -> int:
    """Calls that were answered; those of mini-swe-agent are text, and the answer is a message of the user."""
    answers = [message for turn in found.turns for message in turn.responses]
    return sum(message.role == "tool" or "<returncode>" in message.content for message in answers)


def train_overrides(name: str, folder: Path) -> list[str]:
    """Three short steps of SmolLM2 on the CPU."""
    data = EXAMPLES / ("quixbugs.jsonl" if name == "mini_swe" else "products.jsonl")
    prompts, n = (2, 4) if name == "mini_swe" else (1, 8)  # of a step
    listed = [] if name == "mini_swe" else [f"data.prompt_template={EXAMPLES / 'system.txt'}"]
    return [
        *(f"data={data}", f"model={smollm2()}", "model.compute_dtype=float32", "trainer.device=cpu", "rollout.name=hf"),
        *("reward.name=env", "env.name=agent", "env.tool_call_format=tool_n1", "env.max_turns=4", *listed),
        *(f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={prompts}", f"rollout.n={n}"),
        *("data.max_prompt_length=1024", "data.max_response_length=512", f"trainer.default_local_dir={folder}"),
        *("trainer.total_epochs=2", f"trainer.total_training_steps={NUM_STEPS}"),
        *("trainer.save_freq=0", "trainer.test_freq=0", "actor.optim.lr=1e-5"),
    ]
