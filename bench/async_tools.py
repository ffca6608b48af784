"""Row 8: wall time of episodes with slow tools, another rollout loop / ours.

    python bench/async_tools.py [--loop barrier|batches|serial] [--episodes 512] [--places 64] [--turns 3]
                                [--median-ms 60] [--rounds 3]

Both sides run the same episodes in the same number of slots (the capacity of a machine's sandboxes or of a search
server), with the same latency for the same call of the same episode: lognormal, sigma 1; in a second row one call in a
hundred takes ten times longer. The engine is scripted: no compute in between, so the ratio is that of the loops. All of
the others process one batch of slots after the other:

    barrier   one turn after the other, its calls in parallel: loops that call the engine with whole batches
    batches   the episodes of a batch independently, as veRL's agent loop (0.9.1, experimental/agent_loop)
    serial    one turn after the other, and its calls one after the other, as TRL (1.16, `_tool_call_loop`), which
              gathers only the asynchronous calls of one response

With as many episodes as slots, the gain over `barrier` is bounded by the sum of the turns' longest calls / the longest
episode, about 1.8. This bound is printed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from common import ROOT, Result, alternate, median_ratio, report

from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.envs.base import Observation, StepResult
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.formats.base import build_tool_call_format
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer
from verl.types import Message, Score, Task, ToolStatus, ToolUse, Trajectory

MINI = ROOT / "dataset/mini"
TARGETS = {  # by the share of slow calls (10 x)
    "barrier": {0.0: 2.0, 0.01: 4.0},
    "batches": {0.0: 1.0, 0.01: 1.0},
    "serial": {0.0: 2.0, 0.01: 4.0},
}
SLOWER = 10
Episodes = Sequence[Sequence[float]]  # seconds of each call
Loop = Callable[[Episodes], Awaitable[None]]
CALL, ANSWER = "<search> q </search>", "<answer> a </answer>"


@dataclass(frozen=True)
class Latencies:
    """Latency in seconds by episode and turn."""

    seconds: Episodes

    @classmethod
    def drawn(cls, episodes: int, turns: int, median_s: float, slow_share: float) -> Latencies:
        draw = random.Random(0)
        return cls(
            [
                [
                    median_s * draw.lognormvariate(0.0, 1.0) * (SLOWER if draw.random() < slow_share else 1)
                    for _ in range(turns)
                ]
                for _ in range(episodes)
            ]
        )

    def one_batch(self, places: int) -> float:
        """The upper bound of the ratio with as many episodes as slots."""
        batch = self.seconds[:places]
        return sum(max(turn) for turn in zip(*batch, strict=True)) / max(sum(episode) for episode in batch)


class SlowTool:
    """An environment with slow answers; its concurrency is limited by the slots."""

    def __init__(self, seconds: Sequence[float], places: asyncio.Semaphore) -> None:
        self._seconds, self._places, self._turn = seconds, places, 0

    async def reset(self) -> Observation:
        await self._places.acquire()
        return Observation((Message("user", "?"),))

    async def step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return StepResult(done=True)
        seconds = self._seconds[self._turn]
        self._turn += 1
        await asyncio.sleep(seconds)
        answer = Message("tool", "found", tool="search")
        return StepResult((answer,), tool_uses=(ToolUse("search", ToolStatus.SUCCESS, seconds),))

    async def close(self) -> None:
        self._places.release()


class SlowTools:
    """Environments by task number."""

    def __init__(self, latencies: Latencies, places: int) -> None:
        self._latencies, self._places = latencies, asyncio.Semaphore(places)

    def __call__(self, task: Task) -> SlowTool:
        return SlowTool(self._latencies.seconds[int(task.id)], self._places)

    async def close(self) -> None:
        """No-op: only the slots are shared."""


class CountsCalls:
    """A reward without cost."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(trajectory.num_tool_calls), {})


def ours(latencies: Latencies, places: int, chat: ChatTemplate, turns: int) -> int:
    """Independent episodes. Returns the number of calls."""
    ids = {text: (*chat.response_ids(text)[0],) for text in (CALL, ANSWER)}

    def script(prompt_ids: Sequence[int], number: int) -> Sequence[int]:
        calls = chat.tokenizer.decode(prompt_ids).count("<information>")
        return ids[CALL if calls < turns else ANSWER]

    async def run() -> int:
        observations = ObservationTokenizer(
            chat, build_tool_call_format("search_r1", {"prompt_template": None}), max_observation_tokens=64
        )
        limits = EpisodeLimits(max_turns=turns + 1, max_tool_calls=turns + 1)
        runner = EpisodeRunner(SlowTools(latencies, places), observations, limits)
        rollout = GroupRollout(ScriptedEngine(script), DirectScorer(CountsCalls()), Sampling(1), runner)
        tasks = [Task(str(number), (Message("user", "?"),), "a", "bench") for number in range(len(latencies.seconds))]
        groups = await asyncio.gather(*(rollout.run(task, 1, 0) for task in tasks))
        return sum(int(score.total) for group in groups for score in group.scores)

    return asyncio.run(run())


async def barrier(batch: Episodes) -> None:
    for turn in zip(*batch, strict=True):
        await asyncio.gather(*map(asyncio.sleep, turn))


async def batches(batch: Episodes) -> None:
    async def episode(turns: Sequence[float]) -> None:
        for seconds in turns:
            await asyncio.sleep(seconds)

    await asyncio.gather(*map(episode, batch))


async def serial(batch: Episodes) -> None:
    for turn in zip(*batch, strict=True):
        for seconds in turn:
            await asyncio.sleep(seconds)


LOOPS: Mapping[str, Loop] = {"barrier": barrier, "batches": batches, "serial": serial}


def theirs(loop: Loop, episodes: Episodes, places: int) -> int:
    """Sequential batches. Returns the number of calls."""

    async def run() -> None:
        for start in range(0, len(episodes), places):
            await loop(episodes[start : start + places])

    asyncio.run(run())
    return sum(map(len, episodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loop", choices=LOOPS, default="barrier", help="the other rollout loop")
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--median-ms", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    chat = ChatTemplate(AutoTokenizer.from_pretrained(MINI / "tokenizer"))
    for slow_share, target in TARGETS[arguments.loop].items():
        latencies = Latencies.drawn(arguments.episodes, arguments.turns, arguments.median_ms / 1000, slow_share)
        wanted = arguments.episodes * arguments.turns
        figures = alternate(
            {
                "ours": lambda latencies=latencies: ours(latencies, arguments.places, chat, arguments.turns),
                "theirs": lambda latencies=latencies: theirs(
                    LOOPS[arguments.loop], latencies.seconds, arguments.places
                ),
            },
            arguments.rounds,
            lambda work, wanted=wanted: timed(work, wanted),
        )
        size = f"{arguments.episodes} episodes in {arguments.places} slots"
        slow = f", {slow_share:.0%} of the calls {SLOWER} x slower" if slow_share else ""
        report(
            Result(
                row=8,
                name=f"{arguments.turns} turns with tools, {arguments.loop} / ours, {size}{slow}",
                ratio=median_ratio(figures["theirs"], figures["ours"]),
                target=target,
                ours={"s": min(figures["ours"])},
                theirs={"s": min(figures["theirs"])},
                note=f"one batch allows {latencies.one_batch(arguments.places):.2f}"
                if arguments.loop == "barrier"
                else "",
            )
        )


def timed(work: object, wanted: int) -> float:
    """Wall seconds of a round; asserts that all calls were made."""
    assert callable(work)
    started = time.perf_counter()
    made = work()
    assert made == wanted, f"{made} calls instead of {wanted}"
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
