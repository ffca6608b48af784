"""Episodes of several turns: which tokens are trained, what ends an episode, and what a failure does to others."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from tests.support.virtual_clock import run_at_once
from tests.toolrl.benchmarks.runner.eval_play import chat as chat_that_lists_tools
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from toolrl.envs.shop.shop import ShopEnv, shop_tasks
from toolrl.papers.rewards.search_r1 import SearchR1Reward
from verl.batch.samples import to_batch
from verl.chat.observations import Cut, ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.envs.base import Observation, StepResult
from verl.envs.registry import ClassFactory
from verl.envs.tool_env import ToolEnvFactory
from verl.envs.tools.function import tool
from verl.envs.tools.runner import ToolLimits, ToolRunner
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.errors import DataError, EngineError, ServiceDownError
from verl.formats.base import Calls, Continue, Final, Parsed, ParseError, build_tool_call_format
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer, Fault
from verl.trainer.metrics import tool_metrics
from verl.types import (
    Completion,
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    ToolStatus,
    ToolUse,
    Trajectory,
    TrajectoryGroup,
)
from verl.utils.reward_score.base import build_reward

TASK = Task("t#0", (Message("user", "What is 1+1?"),), "2", "sums")
CALL = re.compile(r"<ask>(.*?)</ask>", re.DOTALL)


class AskFormat:
    """<ask>..</ask> is a call (several may follow one another), <pause> a pause, <ask> alone is malformed."""

    template_tools = False
    final_stop_strings = ()
    turns_per_call = 1
    parallel_calls = True

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        return messages[-1].content + "\n"

    def stop_strings(self, written: str) -> tuple[str, ...]:
        return ("</ask>\n", "<pause>")

    def parse(self, written: str, tools: Sequence[ToolSpec] = ()) -> Parsed:
        calls = tuple(ToolCall("echo", {"text": text}) for text in CALL.findall(written))
        if calls:
            return Calls(calls)
        if "<ask>" in written:
            return ParseError("close what you open")
        return Continue() if written.endswith("<pause>") else Final()

    def observation(self, results: Sequence[Message], written: str) -> str:
        return "".join(f"<got>{result.content}</got>\n" for result in results)


@dataclass
class Echo:
    """Answers a call with its text; done when there is none."""

    task: Task
    on_step: Callable[[int], Any] | None = None  # awaited with the number of the step
    closed: list[Task] = field(default_factory=list)
    steps: int = 0

    async def reset(self) -> Observation:
        return Observation(self.task.prompt)

    async def step(self, message: Message) -> StepResult:
        self.steps += 1
        if self.on_step is not None:
            await self.on_step(self.steps)
        if not message.tool_calls:
            return StepResult(done=True)
        uses = tuple(ToolUse("echo", ToolStatus.SUCCESS, 0.0) for _ in message.tool_calls)
        answers = tuple(Message("tool", call.arguments["text"], tool="echo") for call in message.tool_calls)
        return StepResult(answers, tool_uses=uses)

    async def judge(self) -> Score:
        return Score(1.0, {})

    async def close(self) -> None:
        self.closed.append(self.task)


@dataclass
class Echoes:
    """A factory that remembers which environments were closed."""

    on_step: Callable[[int], Any] | None = None
    closed: list[Task] = field(default_factory=list)

    def __call__(self, task: Task) -> Echo:
        return Echo(task, self.on_step, self.closed)

    async def close(self) -> None: ...


class Speaker:
    """An engine that writes one text after the other, stops at stop strings, and remembers what it was asked."""

    def __init__(
        self, chat: ChatTemplate, *texts: str, wait: Callable[[], Any] | None = None, beyond_stop: int = 0
    ) -> None:
        self.chat, self.texts, self.wait = chat, texts, wait
        self.beyond_stop = beyond_stop  # tokens that stand for the rest of the one in which a stop string ends
        self.asked: list[tuple[tuple[int, ...], Sampling]] = []
        self.completions: list[Completion] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        if self.wait is not None:
            await self.wait()
        turn = len(self.asked)
        self.asked.append((tuple(prompt_ids), sampling))
        text = self.texts[turn]
        ids = (*self.chat.response_ids(text)[0], self.chat.end_token_id)
        beginnings = ((count, self.chat.tokenizer.decode(ids[:count])) for count in range(1, len(ids)))
        stopped = (
            count + self.beyond_stop
            for count, beginning in beginnings
            if any(stop in beginning for stop in sampling.stop_strings)
        )
        ids = ids[: next(stopped, len(ids))]
        cut = ids[: sampling.max_tokens]
        reason = FinishReason.LENGTH if len(cut) < len(ids) else FinishReason.STOP
        done = Completion(cut, tuple(-0.1 * (turn + 1) for _ in cut), reason, weight_version=turn)
        self.completions.append(done)
        return (done,)


def episode_runner(chat: ChatTemplate, envs: Any, **budgets: Any) -> EpisodeRunner:
    return EpisodeRunner(envs, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits(**budgets))


def play(engine: Any, setting: EpisodeRunner, seed: int | None = None) -> Trajectory | Fault:
    return run_at_once(setting.run(engine, Sampling(1), TASK, 0, seed))


def finished(engine: Any, setting: EpisodeRunner, seed: int | None = None) -> Trajectory:
    trajectory = play(engine, setting, seed)
    assert isinstance(trajectory, Trajectory), trajectory
    return trajectory


THREE = ("think <ask>one</ask>\n", "more <ask>two</ask><ask>2b</ask>\n", "again <ask>three</ask>\n", "It is 2.")


def test_the_mask_is_exact_over_three_rounds_and_parallel_calls(chat: ChatTemplate) -> None:
    engine, envs = Speaker(chat, *THREE), Echoes()
    trajectory = finished(engine, episode_runner(chat, envs))
    assert (trajectory.stop_reason, trajectory.outcome) == (StopReason.STOP, Outcome.SCORED)
    assert trajectory.num_tool_calls == 4 and trajectory.score == Score(1.0, {}) and envs.closed == [TASK]
    sample = to_batch([TrajectoryGroup(TASK, (trajectory,), (Score(1, {}),), (1.0,))])
    text = chat.tokenizer.decode(sample.token_ids)
    assert text == (
        "What is 1+1?\nthink <ask>one</ask>\n<got>one</got>\nmore <ask>two</ask><ask>2b</ask>\n<got>two</got>\n"
        "<got>2b</got>\nagain <ask>three</ask>\n<got>three</got>\nIt is 2." + chat.tokenizer.eos_token
    )
    trained = [token for token, mine in zip(sample.token_ids, sample.action_mask, strict=True) if mine]
    assert trained == [token for each in engine.completions for token in each.token_ids]  # only what the engine wrote
    assert chat.tokenizer.decode(trained) == "".join(THREE) + chat.tokenizer.eos_token
    assert sample.rollout_logprobs == pytest.approx([value for each in engine.completions for value in each.logprobs])
    for turn, (asked, _) in enumerate(engine.asked):  # every request goes on from all tokens before it, unchanged
        pieces = [ids for each in trajectory.turns[:turn] for ids in (each.context_ids, each.completion.token_ids)]
        before = chain.from_iterable(pieces)
        assert asked == (*before, *trajectory.turns[turn].context_ids)
    assert [turn.completion.weight_version for turn in trajectory.turns] == [0, 1, 2, 3]


class Opening(Echo):
    """Its first message is not the row's."""

    async def reset(self) -> Observation:
        return Observation((Message("user", "Begin."),))


def test_the_opening_messages_of_the_environment_are_kept(chat: ChatTemplate) -> None:
    trajectory = finished(Speaker(chat, "It is 2."), episode_runner(chat, lambda task: Opening(task)))
    assert trajectory.prompt == (Message("user", "Begin."),)
    assert chat.tokenizer.decode(trajectory.turns[0].context_ids) == "Begin.\n"


def test_observations_are_trained_only_on_request(chat: ChatTemplate) -> None:
    trajectory = finished(Speaker(chat, *THREE), episode_runner(chat, Echoes()))
    group = TrajectoryGroup(TASK, (trajectory,), (Score(1, {}),), (1.0,))
    plain, world = to_batch([group]), to_batch([group], train_on_observations=True)
    assert world.rollout_logprobs is not None
    prompt = len(trajectory.turns[0].context_ids)
    assert world.token_ids.tolist() == plain.token_ids.tolist()
    assert world.action_mask.tolist() == [False] * prompt + [True] * (len(plain.token_ids) - prompt)
    unknown = np.isnan(world.rollout_logprobs).tolist()  # no one sampled them
    assert unknown == (~plain.action_mask[world.action_mask]).tolist()


def test_a_pause_without_a_call_goes_on_from_where_it_is(chat: ChatTemplate) -> None:
    setting = episode_runner(chat, Echoes())
    trajectory = finished(Speaker(chat, "well<pause>", " <ask>a</ask>\n", "done"), setting)
    assert [turn.responses for turn in trajectory.turns] == [(), (Message("tool", "a", tool="echo"),), ()]
    assert len(trajectory.turns[1].context_ids) == 0


def test_a_malformed_call_is_reported_to_the_policy(chat: ChatTemplate) -> None:
    trajectory = finished(Speaker(chat, "I <ask>never", "x</ask>\n"), episode_runner(chat, Echoes()))
    assert trajectory.turns[0].responses == (Message("tool", "close what you open"),)
    assert (trajectory.num_malformed_calls, trajectory.num_tool_calls) == (1, 0)
    assert trajectory.stop_reason is StopReason.STOP  # what stands before an answer is not read again


def test_a_malformed_call_may_end_the_episode(chat: ChatTemplate) -> None:
    trajectory = finished(Speaker(chat, "<ask>oh"), episode_runner(chat, Echoes(), feedback_on_parse_error=False))
    assert (trajectory.stop_reason, trajectory.num_malformed_calls) == (StopReason.MALFORMED, 1)


def test_in_the_last_turn_nothing_is_done_for_the_policy(chat: ChatTemplate) -> None:
    engine, envs = Speaker(chat, *THREE), Echoes()
    trajectory = finished(engine, episode_runner(chat, envs, max_turns=3))
    assert (trajectory.stop_reason, trajectory.num_tool_calls) == (StopReason.MAX_TURNS, 3)
    assert [sampling.stop_strings != () for _, sampling in engine.asked] == [True, True, False]
    trajectory = finished(Speaker(chat, *THREE), episode_runner(chat, Echoes(), max_tool_calls=2))
    assert (trajectory.stop_reason, trajectory.num_tool_calls) == (StopReason.MAX_TOOL_CALLS, 2)
    answers = [message.content for message in trajectory.turns[1].responses]
    assert answers == ["two", "This call was not made: no more tool calls are allowed."]
    never = finished(Speaker(chat, "<ask>a</ask>\n"), episode_runner(chat, Echoes(), max_tool_calls=0))
    assert (never.stop_reason, never.tool_uses) == (StopReason.MAX_TOOL_CALLS, ())


def test_the_share_of_episodes_at_their_limit_of_turns(chat: ChatTemplate) -> None:
    """By turns, by calls, by tokens, and by an answer."""
    limits: list[dict[str, Any]] = [{"max_turns": 3}, {"max_tool_calls": 2}, {"max_tokens": 20}, {}]
    played = [finished(Speaker(chat, *THREE), episode_runner(chat, Echoes(), **each)) for each in limits]
    assert [each.stop_reason for each in played] == ["max_turns", "max_tool_calls", "length", "stop"]
    group = TrajectoryGroup(TASK, tuple(played), (Score(1.0, {}),) * 4, (1.0,) * 4)
    assert tool_metrics([group])["tools/turn_limit_rate"] == 0.5


def test_calls_are_counted_whether_or_not_the_environment_reports_them(chat: ChatTemplate) -> None:
    class Silent(Echo):
        async def step(self, message: Message) -> StepResult:
            return replace(await super().step(message), tool_uses=())

    setting = EpisodeRunner(Silent, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits(max_tool_calls=2))  # type: ignore[arg-type]
    trajectory = finished(Speaker(chat, *THREE), setting)
    assert [len(turn.message.tool_calls) for turn in trajectory.turns] == [1, 1, 0]
    assert trajectory.stop_reason is StopReason.MAX_TOOL_CALLS


@pytest.mark.parametrize("max_tokens", [3, 12, 20, 30, 45])
def test_tokens_are_never_more_than_allowed(chat: ChatTemplate, max_tokens: int) -> None:
    trajectory = finished(Speaker(chat, *THREE), episode_runner(chat, Echoes(), max_tokens=max_tokens))
    used = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
    used += sum(len(turn.context_ids) for turn in trajectory.turns[1:])
    assert used <= max_tokens
    assert trajectory.stop_reason is StopReason.LENGTH


def test_one_turn_can_have_a_limit_of_its_own(chat: ChatTemplate) -> None:
    trajectory = finished(Speaker(chat, *THREE), episode_runner(chat, Echoes(), max_turn_tokens=2))
    assert [len(turn.completion.token_ids) for turn in trajectory.turns] == [2]
    assert trajectory.stop_reason is StopReason.LENGTH


def test_long_answers_change_neither_the_trained_tokens_nor_their_number(chat: ChatTemplate) -> None:
    def sample(answer: str) -> tuple[list[int], int]:
        texts = (f"<ask>{answer}</ask>\n", "ok")
        trajectory = finished(Speaker(chat, *texts), episode_runner(chat, Echoes()))
        return [len(turn.completion.token_ids) for turn in trajectory.turns][1:], len(trajectory.turns[1].context_ids)

    (short, few), (long, many) = sample("a b"), sample("a b c d e f g h i j k l m n o p q r s t u v w x y z" * 3)
    assert short == long and few < many <= 16 + len(chat.response_ids("<got>\n[...]\n</got>\n")[0])


@pytest.mark.parametrize(
    ("cut", "shown"),
    [
        (Cut.HEAD, "zero one two three\n[...]\n"),
        (Cut.TAIL, "\n[...]\n six seven eight nine"),
        (Cut.MIDDLE, "zero one\n[...]\n eight nine"),
        (Cut.REFUSE, "The result is too long to be shown; ask for less of it."),
    ],
)
def test_truncation_happens_at_whole_tokens(chat: ChatTemplate, cut: Cut, shown: str) -> None:
    text = "zero one two three four five six seven eight nine"
    starts = [match.start() for match in re.finditer(r" ?\w+", text)]
    observations = replace(ObservationTokenizer(chat, AskFormat(), 4), cut=cut)
    assert observations._shortened(text, starts, 4) == shown


@pytest.mark.parametrize(
    ("name", "limit", "output", "seen"),
    [
        ("fence", 256, "a" * 256, "a" * 256),
        ("fence", 256, "a" * 200 + "b" * 200, "a" * 128 + "..." + "b" * 128),
        ("fence", 256, f"{'x' * 300}\nValueError: {'y' * 300}z", f"ValueError: {'y' * 116}...{'y' * 127}z"),
        ("fence", 256, "\n", "timeout_decorator.timeout_decorator.TimeoutError: 'Timed Out'"),
        ("retool", 400, "a" * 300 + "\n" + "b" * 300, "a" * 200 + "..." + "b" * 200),
        ("retool", 400, f"Traceback\n{'x' * 500}\nNameError: x", "NameError: x"),
    ],
)
def test_outputs_are_cut_in_characters_after_their_last_line_was_chosen(
    name: str, limit: int, output: str, seen: str, chat: ChatTemplate
) -> None:
    """The order and the places of ToRL's `postproc_observation` and of ReTool's `truncate`."""
    own = ObservationTokenizer(chat, build_tool_call_format(name), 4096, max_chars=limit, gap="...")
    written = "```python\nx\n```\n```output" if name == "fence" else "<code>x</code>"
    opening, closing = build_tool_call_format(name).delimiters(written)  # type: ignore[attr-defined]
    ids = own.answer_ids([Message("tool", output, tool="python")], written, ended=False)
    assert chat.tokenizer.decode(ids) == f"{opening}{seen}{closing}"


def test_seeds_differ_between_turns_and_repeat(chat: ChatTemplate) -> None:
    first, again = Speaker(chat, *THREE), Speaker(chat, *THREE)
    for engine in (first, again):
        finished(engine, episode_runner(chat, Echoes()), seed=7)
    seeds = [sampling.seed for _, sampling in first.asked]
    assert seeds[0] == 7 and len(set(seeds)) == 4 and seeds == [sampling.seed for _, sampling in again.asked]


def failing(times: int, error: BaseException) -> Callable[[int], Any]:
    left = [times]

    async def on_step(number: int) -> None:
        if number == 2 and left[0] > 0:
            left[0] -= 1
            raise error

    return on_step


def test_a_lost_service_begins_the_episode_anew_and_then_is_a_fault(chat: ChatTemplate) -> None:
    lost = ServiceDownError("search", "does not answer")
    envs = Echoes(failing(1, lost))
    engine = Speaker(chat, *THREE[:2], *THREE)
    trajectory = finished(engine, episode_runner(chat, envs))
    assert trajectory.num_tool_calls == 4 and len(envs.closed) == 2
    assert [turn.completion for turn in trajectory.turns] == engine.completions[
        2:
    ]  # nothing of the first attempt is left
    ended = [ToolStatus.SUCCESS, ToolStatus.UNAVAILABLE]  # .. but that it was
    assert [use.status for use in trajectory.lost_uses] == ended
    fault = play(Speaker(chat, *THREE[:2] * 2), episode_runner(chat, Echoes(failing(9, lost))))
    assert isinstance(fault, Fault) and [use.status for use in fault.lost_uses] == ended * 2
    assert str(fault) == "t#0, response 0: search: does not answer"
    broken = play(Speaker(chat, *THREE * 3), episode_runner(chat, Echoes(failing(9, KeyError("x")))))
    assert str(broken) == "t#0, response 0: the environment: step raised KeyError: 'x'"
    own = play(Speaker(chat, *THREE * 3), episode_runner(chat, Echoes(failing(9, TimeoutError("late")))))
    assert str(own) == "t#0, response 0: the environment: step raised TimeoutError: late"


def test_calls_that_a_lost_service_ended_are_counted_but_never_trained(chat: ChatTemplate) -> None:
    """Two of three rollouts live, one of them at its second attempt: 4 + 4 calls; lost are 1 + 1 and (1 + 1) * 2."""
    lost = ServiceDownError("service", "gone", tool="echo")
    attempts = {0: 1, 1: 2}  # rollout -> attempts that end early

    class Numbered(EpisodeRunner):
        async def run(self, engine: Any, sampling: Sampling, task: Task, index: int, seed: int | None) -> Any:
            own = replace(self, envs=Echoes(failing(attempts.get(index, 0), lost)))
            texts = THREE[:2] * attempts.get(index, 0) + THREE
            return await EpisodeRunner.run(own, Speaker(chat, *texts), sampling, task, index, seed)

    setting = Numbered(Echoes(), ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits())
    group = run_at_once(GroupRollout(Speaker(chat), DirectScorer(Length()), Sampling(1), setting).run(TASK, 3, 0))
    assert group.rewards == (4.0, 4.0) and len(group.faults) == 1
    assert len(to_batch([group])) == 2
    metrics = tool_metrics([group])
    assert metrics["tools/unavailable"] == pytest.approx(3 / 14)
    assert metrics["tools/success"] == pytest.approx(11 / 14)
    assert metrics["tools/calls_mean"] == 4


def test_a_dead_engine_ends_everything(chat: ChatTemplate) -> None:
    async def dead() -> None:
        raise EngineError("dead")

    with pytest.raises(EngineError, match="dead"):
        play(Speaker(chat, wait=dead), episode_runner(chat, Echoes()))


def test_an_overlong_prompt_is_a_fault_that_names_the_cause(chat: ChatTemplate) -> None:
    fault = play(Speaker(chat), episode_runner(chat, Echoes(), max_prompt_length=3))
    assert isinstance(fault, Fault) and "data.max_prompt_length=3" in fault.problem


async def _forever(_: int = 0) -> None:
    await asyncio.sleep(3600)


def test_a_hung_environment_runs_into_its_limits(chat: ChatTemplate) -> None:
    async def second(number: int) -> None:
        if number == 2:
            await _forever()

    for name, reason in (("turn_s", StopReason.TURN_TIMEOUT), ("episode_s", StopReason.EPISODE_TIMEOUT)):
        envs = Echoes(second)
        trajectory = finished(Speaker(chat, *THREE), episode_runner(chat, envs, **{name: 0.5}))
        assert trajectory.stop_reason is reason
        assert envs.closed == [TASK]
        # the calls that were never answered are in the ledger: they are to blame, and not those before them
        assert [len(turn.message.tool_calls) for turn in trajectory.turns] == [1, 2]
        assert trajectory.turns[1].responses == ()


def test_an_environment_that_does_not_open_is_a_fault(chat: ChatTemplate) -> None:
    class Shut(Echo):
        async def reset(self) -> Observation:
            await _forever()
            raise AssertionError

    fault = play(
        Speaker(chat),
        EpisodeRunner(Shut, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits(turn_s=0.05, retries=0)),
    )  # type: ignore[arg-type]
    assert fault == Fault("t#0", 0, "the environment: reset took longer than env.turn_timeout_s")


def test_waiting_for_the_engine_is_not_charged_to_the_episode(chat: ChatTemplate) -> None:
    async def busy() -> None:
        await asyncio.sleep(0.3)

    setting = episode_runner(chat, Echoes(), turn_s=0.25, episode_s=0.25, retries=0)
    assert finished(Speaker(chat, *THREE, wait=busy), setting).stop_reason is StopReason.STOP


def test_waiting_for_a_place_is_not_charged_to_the_episode_but_its_own_calls_are(chat: ChatTemplate) -> None:
    @tool
    async def echo(text: str) -> str:
        """Answers after a while."""
        await asyncio.sleep(0.2)
        return text

    async def together(*speakers: Speaker) -> list[StopReason]:
        setting = replace(
            episode_runner(chat, Echoes(), turn_s=0.5),
            envs=ToolEnvFactory([echo], ToolRunner(ToolLimits(max_concurrent=1))),
        )
        done = await asyncio.gather(*(setting.run(speaker, Sampling(1), TASK, 0, None) for speaker in speakers))
        return [each.stop_reason for each in done if isinstance(each, Trajectory)]

    one = ("<ask>a</ask>\n", "done")
    assert run_at_once(together(*(Speaker(chat, *one) for _ in range(5)))) == [StopReason.STOP] * 5  # the last: 0.8 s
    many = ("<ask>a</ask>" * 4 + "\n", "done")
    assert run_at_once(together(Speaker(chat, *many))) == [StopReason.TURN_TIMEOUT]


def test_tools_added_later_are_shown_to_the_policy(chat: ChatTemplate) -> None:
    added = ToolSpec("sort", "Sorts.", {"type": "object", "properties": {}})

    class Growing(Echo):
        async def step(self, message: Message) -> StepResult:
            result = await super().step(message)
            return replace(result, tools=(added,)) if self.steps == 1 else result

    class Shop(Echoes):
        def __call__(self, task: Task) -> Echo:
            return Growing(task)

    engine = Speaker(chat, *THREE)
    trajectory = finished(engine, episode_runner(chat, Shop()))
    asked = [chat.tokenizer.decode(prompt) for prompt, _ in engine.asked]
    assert ['"name": "sort"' in text for text in asked] == [False, True, True, True]
    assert asked[1].count("sort") == 1 and not any("sort" in turn.message.content for turn in trajectory.turns)


class Length:
    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(float(trajectory.num_tool_calls), {})


def test_episodes_do_not_wait_for_each_other_and_one_failure_is_its_own(chat: ChatTemplate) -> None:
    """The first episode may only end after all others have: a barrier between turns would wait for ever."""
    others = asyncio.Event()
    done: list[int] = []
    count = 6

    @dataclass
    class Waiting(Echo):
        number: int = 0

        async def step(self, message: Message) -> StepResult:
            if self.number == 0 and self.steps == 0:
                await others.wait()
            if self.number == 1:
                raise RuntimeError("only me")
            result = await super().step(message)
            if result.done:
                done.append(self.number)
                if len(done) == count - 2:
                    others.set()
            return result

    class Factory(Echoes):
        made = 0

        def __call__(self, task: Task) -> Echo:
            self.made += 1
            return Waiting(task, number=min(self.made - 1, count))

    def script(prompt_ids: Sequence[int], number: int) -> Sequence[int]:
        text = chat.tokenizer.decode(prompt_ids)
        asked = text.count("<got>")
        response = f"<ask>{asked}</ask>\n" if asked < 2 else "done"
        return [*chat.response_ids(response)[0], *([] if "</ask>" in response else [chat.end_token_id])]

    setting = episode_runner(chat, Factory(), retries=0, turn_s=20.0)
    rollout = GroupRollout(ScriptedEngine(script), DirectScorer(Length()), Sampling(1), setting)
    group = run_at_once(asyncio.wait_for(rollout.run(TASK, count, 0), 30))
    assert [trajectory.index for trajectory in group.trajectories] == [0, 2, 3, 4, 5]
    assert [score.total for score in group.scores] == [2.0] * 5 and done[-1] == 0
    assert group.faults == ("t#0, response 1: the environment: step raised RuntimeError: only me",)


def test_a_template_that_refuses_the_messages_is_a_fault(chat: ChatTemplate) -> None:
    class Refusing(AskFormat):
        def render_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
            raise DataError("no such role")

    setting = EpisodeRunner(Echoes(), ObservationTokenizer(chat, Refusing(), 16), EpisodeLimits())
    assert play(Speaker(chat), setting) == Fault("t#0", 0, "no such role")


PASSAGE = "Paris is the capital."
TAIL = "<answer>Paris</answer> tail <answer>Rome</answer>"


@tool
def search(query: str) -> str:
    """Finds passages."""
    return PASSAGE


def searched(chat: ChatTemplate, name: str, *texts: str, max_tool_calls: int = 1) -> Trajectory:
    """An episode of Search-R1's format or one like it, whose turns are just enough for its calls."""
    setting = EpisodeRunner(
        ToolEnvFactory([search], ToolRunner(ToolLimits())),
        ObservationTokenizer(chat, build_tool_call_format(name), 64),
        EpisodeLimits(max_turns=max_tool_calls + 1, max_tool_calls=max_tool_calls, max_tokens=4000),
    )
    return finished(Speaker(chat, *texts), setting)


@pytest.mark.parametrize("name", ["search_r1", "otc_search"])
def test_the_last_turn_stops_at_its_answer_like_every_other(chat: ChatTemplate, name: str) -> None:
    reward, task = SearchR1Reward(), replace(TASK, answer='["Paris"]')
    first = searched(chat, name, TAIL)
    last = searched(chat, name, "<search>capital</search>", TAIL)
    assert [use.name for use in last.tool_uses] == ["search"] and first.tool_uses == ()
    for trajectory in (first, last):
        assert trajectory.stop_reason is StopReason.STOP
        assert trajectory.turns[-1].message.content == "<answer>Paris</answer>"  # the tail is neither read nor trained
        assert reward.score(trajectory, task, 0).total == 1.0


@pytest.mark.parametrize(
    ("name", "texts", "shown", "written"),
    [
        (
            "search_r1",
            ("<search>a</search>. So", "<answer>Paris</answer>. So"),
            "\n\n<information>Paris is the capital.</information>\n\n",
            ["<search>a</search>.", "<answer>Paris</answer>."],
        ),
        (
            "zerotir",
            ("```python\nsearch", "a\n```. So", "Done."),
            "\n```output\nParis is the capital.\n```\n\n\n",
            ["<think>```python\n", "a\n```.", "Done."],  # its prompt opens the thought
        ),
    ],
)
def test_text_in_a_token_of_a_stop_string_is_trained_but_not_parsed(
    chat: ChatTemplate, name: str, texts: Sequence[str], shown: str, written: list[str]
) -> None:
    """Real vocabularies have tokens such as `>.` and `></`, on which an engine stops as a whole."""
    tool_call_format = build_tool_call_format(
        name, {"tool": "search", "argument": "query"} if name == "zerotir" else {}
    )
    setting = EpisodeRunner(
        ToolEnvFactory([search], ToolRunner(ToolLimits())),
        ObservationTokenizer(chat, tool_call_format, 64),
        EpisodeLimits(max_turns=len(texts), max_tool_calls=1, max_tokens=4000),
    )
    speaker = Speaker(chat, *texts, beyond_stop=1)
    trajectory = finished(speaker, setting)
    assert (trajectory.stop_reason, trajectory.num_tool_calls) == (StopReason.STOP, 1)
    assert shown in [chat.tokenizer.decode(turn.context_ids) for turn in trajectory.turns]
    assert [turn.message.content for turn in trajectory.turns] == written
    sample = to_batch([TrajectoryGroup(TASK, (trajectory,), (Score(1, {}),), (1.0,))])
    trained = [token for token, own in zip(sample.token_ids, sample.action_mask, strict=True) if own]
    assert trained == [token for each in speaker.completions for token in each.token_ids]


def test_the_last_turn_of_search_r1_stops_at_a_query_that_is_not_answered(chat: ChatTemplate) -> None:
    trajectory = searched(chat, "search_r1", "<search>a</search>", f"<search>b</search>{PASSAGE}{TAIL}")
    assert trajectory.turns[-1].message.content == "<search>b</search>"
    assert (trajectory.stop_reason, trajectory.num_tool_calls) == (StopReason.MAX_TOOL_CALLS, 1)


def test_an_answer_in_a_thought_ends_the_last_turn_unless_thoughts_hold_no_actions(chat: ChatTemplate) -> None:
    texts = "<think>between <answer> and </answer>", " it goes</think>"
    for before in ((), ("<search>a</search>",)):
        trajectory = searched(chat, "search_r1", *before, texts[0], texts[1] + TAIL)
        assert trajectory.response.endswith(texts[0]) and trajectory.stop_reason is StopReason.STOP
    tool_call_format = build_tool_call_format("search_r1", {"calls_in_thoughts": False})
    assert tool_call_format.parse(texts[0]) == Continue(tool_call_format.parse("it"))
    assert tool_call_format.final_stop_strings == () and tool_call_format.parse("".join(texts) + TAIL) == Final()


@pytest.mark.parametrize("name", ["retool", "artist", "fence", "zerotir", "hermes", "xml", "toolrl", "llama3_json"])
def test_the_last_turn_of_other_formats_runs_on_to_its_end(name: str) -> None:
    assert build_tool_call_format(name).final_stop_strings == ()


def test_a_typed_call_reaches_the_tool_with_the_types_of_its_schema() -> None:
    chat = chat_that_lists_tools()
    seen: list[Any] = []

    @tool
    def create(path: str, file_text: str, mode: int = 420) -> str:
        """Writes a file."""
        seen.append((path, file_text, mode))
        return "written"

    text = (
        '<function=create>\n<parameter=path>\n7\n</parameter>\n<parameter=file_text>\n{"a": 1}\n</parameter>\n'
        "<parameter=mode>\n{}\n</parameter>\n</function>"
    )
    envs = ToolEnvFactory([create], ToolRunner(ToolLimits()))
    setting = EpisodeRunner(
        envs, ObservationTokenizer(chat, build_tool_call_format("xml"), 64), EpisodeLimits(max_tokens=4000)
    )
    speaker = Speaker(chat, text.replace("{}", "high"), text.replace("{}", "384"), "Done.")
    trajectory = finished(speaker, setting)
    assert seen == [("7", '{"a": 1}', 384)] and trajectory.num_malformed_calls == 1
    assert "'mode' must be an integer" in trajectory.turns[0].responses[0].content


@dataclass
class Watched(Echo):
    """Judges by the number of steps that it has answered, and notes what it is asked."""

    asked: list[str] = field(default_factory=list)

    async def step(self, message: Message) -> StepResult:
        self.asked.append("step")
        return await super().step(message)

    async def judge(self) -> Score:
        self.asked.append("judge")
        return Score(float(self.steps), {"steps": float(self.steps)})

    async def close(self) -> None:
        self.asked.append("close")


async def _late(number: int) -> None:
    if number == 2:
        await _forever()


@pytest.mark.parametrize(
    ("budgets", "texts", "reason", "steps"),
    [
        ({}, THREE, StopReason.STOP, 4),
        ({"max_turns": 2}, THREE, StopReason.MAX_TURNS, 2),
        ({"max_tool_calls": 1}, THREE, StopReason.MAX_TOOL_CALLS, 2),
        ({"max_tokens": 3}, THREE, StopReason.LENGTH, 0),
        ({"max_turn_tokens": 20}, ("<ask>a</ask>\n", "I will go on and on " * 9), StopReason.LENGTH, 1),
        ({"max_tokens": 30}, ("<ask>a b c d e f g</ask>\n",), StopReason.LENGTH, 1),
        ({"feedback_on_parse_error": False}, ("<ask>a</ask>\n", "<ask>oh"), StopReason.MALFORMED, 2),
        ({"turn_s": 0.1}, THREE, StopReason.TURN_TIMEOUT, 2),
        ({"episode_s": 0.1}, THREE, StopReason.EPISODE_TIMEOUT, 2),
    ],
)
def test_an_environment_judges_once_however_the_episode_ends(
    budgets: dict[str, Any], texts: Sequence[str], reason: StopReason, steps: int, chat: ChatTemplate
) -> None:
    made: list[Watched] = []

    def envs(task: Task) -> Watched:
        made.append(Watched(task, _late if "turn_s" in budgets or "episode_s" in budgets else None))
        return made[-1]

    setting = EpisodeRunner(envs, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits(**budgets))  # type: ignore[arg-type]
    trajectory = finished(Speaker(chat, *texts), setting)
    assert (trajectory.stop_reason, trajectory.outcome) == (reason, Outcome.SCORED)
    assert trajectory.score == Score(float(steps), {"steps": float(steps)})
    assert [each.asked for each in made] == [["step"] * steps + ["judge", "close"]]


def test_without_a_judge_the_episode_is_left_to_a_reward(chat: ChatTemplate) -> None:
    class Undecided(Echo):
        async def judge(self) -> None:  # type: ignore[override]
            return None

    for env in (Undecided, ToolEnvFactory([search], ToolRunner(ToolLimits()))):
        setting = EpisodeRunner(env, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits(max_tokens=3))  # type: ignore[arg-type]
        trajectory = finished(Speaker(chat, *THREE), setting)
        assert (trajectory.outcome, trajectory.score) == (Outcome.MODEL_FAULT, None)


async def _raises() -> Score:
    raise KeyError("state")


async def _is_down() -> Score:
    raise ServiceDownError("tests", "do not answer")


async def _hangs() -> Score:
    await _forever()
    raise AssertionError


async def _is_no_number() -> Score:
    return Score(math.nan, {})


async def _is_no_score() -> Any:
    return 1.0


async def _is_nothing() -> Any:
    return Score(None, {})  # type: ignore[arg-type]


async def _has_a_part_that_is_text() -> Any:
    return Score(1.0, {"right": "yes"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("judge", "problem"),
    [
        (_raises, "the environment: judge raised KeyError: 'state'"),
        (_is_down, "tests: do not answer"),
        (_hangs, "the environment: judge exceeded env.turn_timeout_s=0.1"),
        (_is_no_number, "the environment: judge returned Score(total=nan, parts={}), not a Score of finite numbers"),
        (_is_no_score, "the environment: judge returned 1.0, not a Score of finite numbers"),
        (_is_nothing, "the environment: judge returned Score(total=None, parts={}), not a Score of finite numbers"),
        (
            _has_a_part_that_is_text,
            "the environment: judge returned Score(total=1.0, parts={'right': 'yes'}), not a Score of finite numbers",
        ),
    ],
)
def test_a_verdict_that_fails_is_a_fault_and_no_zero(
    judge: Callable[[], Any], problem: str, chat: ChatTemplate
) -> None:
    class Failing(Echo):
        async def judge(self) -> Score:
            return await judge()  # type: ignore[no-any-return]

    engine = Speaker(chat, *THREE)
    setting = EpisodeRunner(Failing, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits(judge_s=0.1))  # type: ignore[arg-type]
    fault = play(engine, setting)
    assert isinstance(fault, Fault) and fault.problem == problem
    assert len(engine.asked) == 4  # it is not played again
    assert [use.status for use in fault.lost_uses] == [ToolStatus.SUCCESS] * 4


def test_an_episode_that_a_service_ended_is_not_judged(chat: ChatTemplate) -> None:
    made: list[Watched] = []

    def envs(task: Task) -> Watched:
        made.append(Watched(task, failing(1, ServiceDownError("search", "gone")) if not made else None))
        return made[-1]

    setting = EpisodeRunner(envs, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits())  # type: ignore[arg-type]
    finished(Speaker(chat, *THREE[:2], *THREE), setting)
    assert [each.asked[-2:] for each in made] == [["step", "close"], ["judge", "close"]]


def test_the_state_that_an_episode_out_of_tokens_leaves_is_paid_for() -> None:
    """The shop: everything is bought and paid when the tokens run out."""
    chat = chat_that_lists_tools()
    (task,) = shop_tasks(1)
    tool_call_format = build_tool_call_format("hermes")
    wanted = [ToolCall("set_quantity", {"product_id": id, "quantity": n}) for id, n in json.loads(task.answer).items()]
    texts = (
        tool_call_format.render(wanted),
        tool_call_format.render([ToolCall("checkout", {})]),
        "So I have bought it. " * 99,
    )
    budgets = EpisodeLimits(max_turn_tokens=200, max_tokens=4000)
    setting = EpisodeRunner(ClassFactory(ShopEnv), ObservationTokenizer(chat, tool_call_format, 64), budgets)
    reward = build_reward("env")
    for written, total in ((texts, 1.0), ((texts[0], texts[2]), 0.0)):
        played = run_at_once(setting.run(Speaker(chat, *written), Sampling(1), task, 0, None))
        assert isinstance(played, Trajectory) and played.stop_reason is StopReason.LENGTH
        assert reward.score(played, task, 0) == Score(total, {"bought": total})


@dataclass
class Paying(Echo):
    """Gives 0.25 for the first turn that it answers, 0.5 for the second, nothing for the others."""

    async def step(self, message: Message) -> StepResult:
        result = await super().step(message)
        return replace(result, reward={1: 0.25, 2: 0.5}.get(self.steps))


def test_rewards_of_turns_reach_the_sample_at_their_last_tokens(chat: ChatTemplate) -> None:
    """A pause is part of the turn that goes on after it: the environment answers, and pays, once."""
    setting = EpisodeRunner(Paying, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits())  # type: ignore[arg-type]
    trajectory = finished(Speaker(chat, "well<pause>", " <ask>a</ask>\n", "<ask>b</ask>\n", "done"), setting)
    assert [turn.reward for turn in trajectory.turns] == [None, 0.25, 0.5, None] and trajectory.turn_rewards == 0.75
    group = TrajectoryGroup(TASK, (trajectory,), (Score(1, {}),), (1.0,))
    assert group.returns == (1.75,)
    for observed in (False, True):
        sample = to_batch([group], train_on_observations=observed)
        assert sample.rewards is not None
        paid = np.flatnonzero(sample.rewards)
        assert sample.rewards[paid].tolist() == [0.25, 0.5, 1.0] and paid[-1] == len(sample.rewards) - 1
        places = np.flatnonzero(sample.action_mask)[paid[:2]]
        until = [chat.tokenizer.decode(sample.token_ids[: place + 1]) for place in places]
        assert [text.rpartition("<ask>")[2] for text in until] == ["a</ask>\n", "b</ask>\n"]


def test_numbers_of_numpy_are_numbers(chat: ChatTemplate) -> None:
    class Numpy(Echo):
        async def step(self, message: Message) -> StepResult:
            return replace(await super().step(message), reward=np.float32(0.5))  # type: ignore[arg-type]

        async def judge(self) -> Score:
            return Score(np.float32(1.0), {"right": np.int64(1)})  # type: ignore[arg-type, dict-item]

    trajectory = finished(Speaker(chat, *THREE), episode_runner(chat, Numpy))
    assert trajectory.turn_rewards == 2.0
    assert json.loads(json.dumps(trajectory.score and trajectory.score.parts)) == {"right": 1.0}


def test_an_environment_that_answers_with_something_else_is_a_fault(chat: ChatTemplate) -> None:
    class Silent(Echo):
        async def step(self, message: Message) -> StepResult:
            return None  # type: ignore[return-value]

    class Unopened(Echo):
        async def reset(self) -> Observation:
            return "hello"  # type: ignore[return-value]

    for env, problem in (
        (Silent, "step returned None, not a verl.envs.base.StepResult"),
        (Unopened, "reset returned 'hello', not a verl.envs.base.Observation"),
    ):
        fault = play(Speaker(chat, *THREE), episode_runner(chat, env))
        assert isinstance(fault, Fault) and fault.problem == f"the environment: {problem}"


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1"])
def test_a_reward_of_a_turn_that_is_no_number_is_a_fault(reward: Any, chat: ChatTemplate) -> None:
    class Odd(Echo):
        async def step(self, message: Message) -> StepResult:
            return replace(await super().step(message), reward=reward)

    fault = play(
        Speaker(chat, *THREE * 2), EpisodeRunner(Odd, ObservationTokenizer(chat, AskFormat(), 16), EpisodeLimits())
    )  # type: ignore[arg-type]
    assert isinstance(fault, Fault) and fault.problem == (
        f"the environment: step returned reward {reward!r}, not a finite number"
    )
