"""Row 17: wall time of agents in repositories, one slot for a whole episode / three stages with slots of their own.

    python bench/swe_pipeline.py [--agents 4] [--scoring 16] [--episodes 64] [--rounds 1] [--case 0 1 2]

Both sides run the same episodes by the same code: real sandboxed runtimes of this machine, 20 turns of which 19 are
commands and edits in a persistent shell, the patch, and the verdict by hidden tests in a fresh runtime. Simulated are a
response of the engine (0.3 s) and, as delays before the real thing, a slow start (an image that must be pulled) and a
slow test suite. Both sides have --agents slots of the engine. The other side keeps an episode's slot from its start to
its verdict, as SkyRL-v0 and most systems do. Ours has as many again for starts, and --scoring for verdicts, where no
engine waits.

Cases: lognormal delays (start: median 2 s, tests: 3 s, sigma 1), the same without variance, and with starts ten times
cheaper. Printed with each: the bound by the busiest stage, the occupancy of the engine (episodes that wait for a
response, as a share of the slots), and the runtimes that start, run or are scored at a time, at most and on average.
The other side can use no more runtimes than it has slots. So a third run keeps as many slots as ours had runtimes at
most: stages save slots of the engine, not runtimes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, chdir
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, Result, median_ratio, medians, report
from transformers import AutoTokenizer

from scripts.swe.prepare import make_environment
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from toolrl.envs.swe.env import Stage, SweEnv, SweFactory
from toolrl.swe.local import LocalRuntimes
from toolrl.swe.runtime import Runtime
from toolrl.swe.scoring import PatchVerdict
from toolrl.swe.tasks import as_task_row
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.data.tasks import to_task
from verl.envs.base import Observation
from verl.envs.clock import paused
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.formats.base import build_tool_call_format
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.types import Completion, Score, Task, ToolCall
from verl.utils.reward_score.base import build_reward

TURNS, RESPONSE_S = 20, 0.3
GROUP = 4
FILES = {
    "calc/__init__.py": "",
    "calc/core.py": "def add(a, b):\n    return a - b\n",
}
HIDDEN = {"tests/test_core.py": "from calc.core import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"}


@dataclass(frozen=True)
class Case:
    """Distribution of the delays: medians in seconds, and the sigma of their logarithms."""

    name: str
    target: float
    start_s: float = 2.0
    tests_s: float = 3.0
    sigma: float = 1.0

    def delays(self, episodes: int) -> Iterator[tuple[float, float]]:
        """(start, tests) of each episode, the same on both sides."""
        draw = random.Random(0)
        for _ in range(episodes):
            yield (
                self.start_s * draw.lognormvariate(0.0, self.sigma),
                self.tests_s * draw.lognormvariate(0.0, self.sigma),
            )


CASES = (
    Case("lognormal starts and tests", 2.0),
    Case("the same without variance", 1.5, sigma=0.0),
    Case("starts ten times cheaper", 1.5, start_s=0.2),
)


class SlowStages(SweEnv):
    """The environment, with a delay before the start and the verdict."""

    def __init__(self, owner: Stages, task: Task) -> None:
        super().__init__(owner, task)
        self._start_s, self._tests_s = next(owner.delays)
        self._alive = owner.alive

    @asynccontextmanager
    async def _slot(self, stage: Stage) -> AsyncIterator[None]:
        async with super()._slot(stage), self._alive.counted(self):
            yield

    async def _start(self) -> Runtime:
        await asyncio.sleep(self._start_s)
        return await super()._start()

    async def _scored(self, patch: str) -> PatchVerdict:
        await asyncio.sleep(self._tests_s)
        return await super()._scored(patch)


class OneSlot(SlowStages):
    """An episode that keeps its slot from its start to its verdict."""

    def __init__(self, owner: Stages, task: Task) -> None:
        super().__init__(owner, task)
        self._episodes = owner.episodes

    async def reset(self) -> Observation:
        async with paused():
            await self._episodes.acquire()
        return await super().reset()

    async def judge(self) -> Score:
        try:
            return await super().judge()
        finally:
            self._episodes.release()


class Alive:
    """Counts the episodes with a runtime: one that starts, runs or is scored."""

    def __init__(self) -> None:
        self._episodes: Counter[object] = Counter()
        self.most = 0

    @asynccontextmanager
    async def counted(self, episode: object) -> AsyncIterator[None]:
        self._episodes[episode] += 1  # twice while it goes from one stage to the next
        self.most = max(self.most, len(+self._episodes))
        try:
            yield
        finally:
            self._episodes[episode] -= 1


class Stages(SweFactory):
    """Our side: `agents` slots for starts and for agents."""

    made = SlowStages

    def __init__(self, delays: Iterator[tuple[float, float]], agents: int, scoring: int) -> None:
        super().__init__(max_starting=agents, max_running=agents, max_scoring=scoring)
        self.delays, self.episodes, self.alive = delays, asyncio.Semaphore(agents), Alive()
        self.local = self.runtimes = LocalRuntimes()

    def __call__(self, task: Task) -> SweEnv:
        return self.made(self, task)


class OneSlotEach(Stages):
    """The other side: the stages bound nothing, the episodes have `agents` slots."""

    made = OneSlot


class TimedEngine(ScriptedEngine):
    """Answers after RESPONSE_S: a command each turn, the fix in the middle, `finish` in the last."""

    def __init__(self, chat: ChatTemplate) -> None:
        super().__init__(self._next)
        style = build_tool_call_format("xml")
        fix = "sed -i 's/a - b/a + b/' calc/core.py"
        commands = [fix if turn == TURNS // 2 else f"ls -la calc; echo {turn}" for turn in range(TURNS - 1)]
        made = [ToolCall("bash", {"command": command}) for command in commands]
        self._ids = [(*chat.response_ids(style.render([each]))[0],) for each in (*made, ToolCall("finish", {}))]
        self._ids = [(*ids, chat.end_token_id) for ids in self._ids]
        self._tokenizer = chat.tokenizer
        self.waited_s = 0.0

    def _next(self, prompt_ids: Sequence[int], _: int) -> Sequence[int]:
        return self._ids[str(self._tokenizer.decode(prompt_ids)).count("assistant\n") - 1]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        start = time.perf_counter()
        await asyncio.sleep(RESPONSE_S)
        self.waited_s += time.perf_counter() - start
        return await super().generate(prompt_ids, sampling)


def play(
    side: type[Stages], case: Case, task: Task, chat: ChatTemplate, agents: int, scoring: int, episodes: int
) -> dict[str, float]:
    """All episodes; each must score 1."""

    async def run() -> dict[str, float]:
        factory = side(case.delays(episodes), agents, scoring)
        engine = TimedEngine(chat)
        style = build_tool_call_format("xml")
        limits = EpisodeLimits(max_turns=TURNS + 1, max_tool_calls=TURNS + 1, max_tokens=30_000, max_prompt_length=8000)
        runner = EpisodeRunner(factory, ObservationTokenizer(chat, style, 512), limits)
        rollout = GroupRollout(engine, DirectScorer(build_reward("env")), Sampling(1000), runner)
        await factory.local.image(factory.swe_task(task))  # made once per task, outside of the measured time
        start = time.perf_counter()
        groups = await rollout.run_all([task] * (episodes // GROUP), GROUP)
        wall_s = time.perf_counter() - start
        scores = [score for group in groups for score in group.scores]
        await rollout.close()
        assert [score.total for score in scores] == [1.0] * episodes, [group.faults for group in groups]
        return figures(side, scores, wall_s, engine.waited_s, agents, scoring) | {"most runtimes": factory.alive.most}

    return asyncio.run(run())


def figures(
    side: type[Stages], scores: Sequence[Score], wall_s: float, engine_s: float, agents: int, scoring: int
) -> dict[str, float]:
    """Wall time, its bound by the busiest stage, and the share of the slots that wait for the engine."""

    def total(part: str) -> float:
        return sum(score.parts[f"swe/{part}_s"] for score in scores)

    work = {"starting": total("starting") - total("running_wait"), "running": total("running")}
    work["scoring"] = total("scoring")
    if side is OneSlotEach:
        bound_s = sum(work.values()) / agents
    else:
        bound_s = max(work["starting"] / agents, work["running"] / agents, work["scoring"] / scoring)
    return {
        "s": wall_s,
        "bound s": bound_s,
        "s / bound": wall_s / bound_s,
        "engine busy": engine_s / (agents * wall_s),
        "mean runtimes": sum(map(total, ("starting", "running", "scoring"))) / wall_s,
    }


def mini_chat() -> ChatTemplate:
    """The embedded tokenizer, with a template that lists tools."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "dataset/mini/tokenizer")
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + tokenizer.chat_template
    return ChatTemplate(tokenizer)


def row_of(folder: Path) -> dict[str, object]:
    """The task, with its repository and an environment with pytest in this folder."""
    for name, text in FILES.items():
        path = folder / "calc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {
        "instance_id": "calc",
        "problem_statement": "add subtracts",
        "repository": str(folder / "calc"),
        "environment": str(make_environment(folder / "environment", copy=["pytest"])),
        "FAIL_TO_PASS": ["tests/test_core.py::test_add"],
        "hidden_tests": HIDDEN,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--scoring", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--case", type=int, nargs="+", choices=range(len(CASES)), default=range(len(CASES)))
    given = parser.parse_args()
    chat = mini_chat()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # a row may name an environment of the working folder
        task = to_task(as_task_row(row_of(Path(folder))), "calc#0")
        size = f"{given.episodes} agents in repositories, {given.agents} engine slots: kept to the verdict / stages"
        for case in (CASES[number] for number in given.case):
            found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": [], "as many runtimes": []}
            for _ in range(given.rounds):
                for name, side in (("ours", Stages), ("theirs", OneSlotEach), ("as many runtimes", OneSlotEach)):
                    slots = int(found["ours"][-1]["most runtimes"]) if name == "as many runtimes" else given.agents
                    found[name].append(play(side, case, task, chat, slots, given.scoring, given.episodes))
            more = medians(found["as many runtimes"])
            report(
                Result(
                    row=17,
                    name=f"{size}; {case.name}",
                    ratio=median_ratio(*([each["s"] for each in found[name]] for name in ("theirs", "ours"))),
                    target=case.target,
                    ours=medians(found["ours"]),
                    theirs=medians(found["theirs"]),
                    note="theirs with as many slots of the engine as ours had runtimes at most: "
                    + ", ".join(f"{name} {value:.3g}" for name, value in more.items()),
                )
            )


if __name__ == "__main__":
    main()
