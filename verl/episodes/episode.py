"""Runs one episode, of one turn or many: tokens on the policy side, messages on the environment side.

Observations and responses are appended to the ledger (`Turn`) and never changed, truncated or tokenized again.
Every resource has a limit; reaching one ends the episode, and `Trajectory.stop_reason` names it. An environment that
judges is asked for its verdict at the end, whatever the stop reason.
The clock runs only while the environment works: waiting for the engine or for a slot of a tool depends on the load, and
has timeouts of its own (`trainer.stall_timeout_s`, `env.tool_timeout_s`).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from verl.chat.observations import ObservationTokenizer, SharedPrompt
from verl.chat.template import ChatTemplate
from verl.data.lengths import prompt_excess
from verl.envs.base import Env, EnvFactory, HasSnapshot, Judge, Observation, StepResult
from verl.envs.clock import EnvTimer
from verl.envs.sandbox import Sandbox
from verl.envs.task_envs import check_offered
from verl.episodes.program import SEEDS_BETWEEN_TURNS, ProgramEnv, ProgramPolicy
from verl.errors import DataError, EpisodeLostError, JudgeError, ServiceDownError, VerlError
from verl.formats.base import Calls, Continue, Final, ParseError, at_end
from verl.formats.response import parsed_response
from verl.host.services import check_services
from verl.rollout.engine import Generator, Sampling
from verl.rollout.finite import finite_number, finite_score
from verl.scoring.pool import Fault
from verl.types import (
    FinishReason,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolSpec,
    ToolStatus,
    ToolUse,
    Trajectory,
    Turn,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_CLOSE_S = 30.0
_NOT_RUN = "This call was not made: no more tool calls are allowed."
_SCORED = (StopReason.STOP, StopReason.MAX_TURNS, StopReason.MAX_TOOL_CALLS, StopReason.MALFORMED)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode. Tools are disabled in the last turn: the policy has to answer."""

    max_turns: int = 9  # requests to the engine: assistant turns, counting each pause of a format as one
    max_tool_calls: int = 8
    max_tokens: int = 1024  # total tokens of all turns, including observations, excluding the prompt
    max_prompt_length: int = 2048
    max_turn_tokens: int | None = None  # response tokens per turn
    turn_s: float = 300.0  # environment time per step or reset
    episode_s: float = 1200.0  # total environment time
    judge_s: float = 300.0  # time for the final verdict
    retries: int = 1  # retries of an episode after a service failure
    feedback_on_parse_error: bool = True  # report an unreadable call to the policy; False: end the episode


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Runs episodes; the task and the engine are passed to `run`."""

    envs: EnvFactory
    observations: ObservationTokenizer
    limits: EpisodeLimits
    sandbox: Sandbox | None = None  # runs the tools' code

    @property
    def chat(self) -> ChatTemplate:
        return self.observations.chat

    def for_group(self) -> EpisodeRunner:
        """The runner of several episodes of one task, which tokenizes their prompt once."""
        own = self.observations
        shared = SharedPrompt(**{each.name: getattr(own, each.name) for each in fields(own)})
        return replace(self, observations=shared)

    async def check_services(self) -> None:
        """Raises ServiceDownError if a service that the episodes need does not answer."""
        await check_services([self.envs, self.sandbox])

    async def close(self) -> None:
        await self.envs.close()
        if self.sandbox is not None:
            await self.sandbox.close()

    async def run(
        self, engine: Generator, sampling: Sampling, task: Task, index: int, seed: int | None
    ) -> Trajectory | Fault:
        """Runs one episode; restarts it after a service failure and returns a Fault when the retries are used up."""
        problem = ""
        lost: list[ToolUse] = []
        for repeats in range(1 + self.limits.retries):
            attempt = _Episode(self, engine, sampling, task, index, seed)
            try:
                return replace(await attempt.run(), lost_uses=tuple(lost), repeats=repeats)
            except ServiceDownError as error:
                problem = str(error)
                lost += attempt.uses
            except JudgeError as error:
                return Fault(task.id, index, str(error), (*lost, *attempt.uses))
            except DataError as error:
                return Fault(task.id, index, str(error), tuple(lost))
        return Fault(task.id, index, problem, tuple(lost))


class _LateError(Exception):
    """The environment exceeded a time limit."""

    def __init__(self, stop_reason: StopReason) -> None:
        super().__init__(stop_reason)
        self.stop_reason = stop_reason


class _Episode:
    """One attempt at an episode. Raises ServiceDownError and JudgeError for failures that are not the policy's."""

    def __init__(
        self, runner: EpisodeRunner, engine: Generator, sampling: Sampling, task: Task, index: int, seed: int | None
    ) -> None:
        self._envs, self._observations, self._limits = runner.envs, runner.observations, runner.limits
        # No other episode that runs has this number. Single turns have none, as those of a group are one request.
        number = id(self) if self._limits.max_turns > 1 else None
        self._engine, self._sampling = engine, replace(sampling, episode=number)
        self._task, self._index, self._seed = task, index, seed
        self._turns: list[Turn] = []
        self._ledger: list[int] = []  # all tokens of the turns
        self._context: Sequence[int] = ()  # prompt or observation tokens of the next turn
        self._opening: tuple[Message, ...] = ()
        self._prompt_length = 0
        self._since_observation: list[int] = []  # response tokens since the last observation
        self._stops: tuple[str, ...] = ()  # stop strings of the current turn
        self._tools: list[ToolSpec] = []  # tools offered so far
        self.uses: list[ToolUse] = []
        self._num_calls = 0
        self._num_malformed = 0
        self._env_s = 0.0  # environment time so far

    async def run(self) -> Trajectory:
        with _attributed("the factory"):
            env = self._envs(self._task)
        try:
            stop_reason = await (self._run_program(env) if isinstance(env, ProgramEnv) else self._run_turns(env))
            score = await self._verdict(env)
            environment = env.snapshot() if isinstance(env, HasSnapshot) else b""
        finally:
            await _close(env)
        episode = Trajectory(
            self._task,
            self._index,
            tuple(self._turns),
            stop_reason,
            Outcome.SCORED if stop_reason in _SCORED or score is not None else Outcome.MODEL_FAULT,
            tuple(self.uses),
            score,
            self._num_malformed,
            opening=self._opening,
            counts=env.counts if isinstance(env, ProgramEnv) else {},
            tools=tuple(tool.name for tool in self._tools),
            environment=environment,
        )
        return replace(episode, decoded=self._observations.chat.decoded(episode.response_ids))

    async def _run_program(self, env: ProgramEnv) -> StopReason:
        policy = ProgramPolicy(self._observations, self._limits, self._sampling, self._engine, self._seed)
        try:
            async with policy.timer.running():
                with _attributed("run"):
                    stop_reason = await env.run(policy)
        except TimeoutError:
            stop_reason = policy.timer.late
        self._turns, self._opening = list(env.turns), env.opening
        self._num_malformed = sum(turn.parsed is not None and turn.parsed.error is not None for turn in self._turns)
        if not self._turns:
            ends = {StopReason.STOP: "ended", StopReason.LENGTH: "ended; its first prompt is too long"}
            end = ends.get(stop_reason, f"was stopped ({stop_reason})")
            raise ServiceDownError("the program", f"{end} without a response of the policy")
        return stop_reason

    async def _run_turns(self, env: Env) -> StopReason:
        try:
            initial = _of_type(Observation, await self._timed(env.reset(), "reset"), "reset")
        except _LateError as late:
            raise ServiceDownError("the environment", "reset took longer than env.turn_timeout_s") from late
        check_offered(self._task, initial, self._task.env or "the run's")
        self._opening = initial.messages
        self._context = self._observations.prompt_ids(initial)
        self._tools = list(initial.tools)
        self._prompt_length = len(self._context)
        if problem := prompt_excess(self._prompt_length, self._limits.max_prompt_length):
            raise DataError(problem)
        stop_reason = None
        while stop_reason is None:
            try:
                stop_reason = await self._turn(env)
            except _LateError as late:  # the policy's own action is in the ledger and took too long
                stop_reason = late.stop_reason
        return stop_reason

    async def _turn(self, env: Env) -> StopReason | None:
        """One response and the environment's answer. Returns the stop reason if the episode is over, else None."""
        limits = self._limits
        calls_left = limits.max_tool_calls - self._num_calls
        last = self._last_reason(calls_left)
        message, finish = await self._generate(last is not None)
        if finish is FinishReason.LENGTH:
            return StopReason.LENGTH
        ended = self._observations.chat.ended(self._since_observation)
        text = self._observations.chat.response_text(self._since_observation)
        text = text if ended else _until(self._stops, text)
        style = self._observations.tool_call_format
        parsed = style.parse(text, self._tools)
        if ended:
            parsed = at_end(parsed)
        self._turns[-1] = replace(self._turns[-1], parsed=parsed_response(style, text, parsed))
        if last is not None:
            await self._step(env, message)
            return StopReason.STOP if isinstance(parsed, Final) else last
        if isinstance(parsed, Continue):
            return self._out_of_room()
        unanswered: tuple[Message, ...] = ()
        match parsed:
            case ParseError(problem):
                self._num_malformed += 1
                if limits.feedback_on_parse_error:
                    if ended and getattr(style, "one_text", False):
                        self._drop_end_token()
                    return self._observe((Message("tool", problem),), text, ended)
                await self._step(env, message)
                return StopReason.MALFORMED
            case Calls(calls):
                made, refused = calls[:calls_left], calls[calls_left:]
                self._num_calls += len(made)  # counted here: not every environment reports its tool uses
                message = replace(message, tool_calls=made)
                self._turns[-1] = replace(self._turns[-1], message=message)
                unanswered = tuple(Message("tool", _NOT_RUN, tool=call.name) for call in refused)
        result = await self._step(env, message)
        if result.done:
            return StopReason.STOP
        return self._observe((*result.messages, *unanswered), text, ended, result.tools)

    def _drop_end_token(self) -> None:
        """The response goes on in the same text, without its end token, unless that is all there is."""
        made = self._turns[-1].completion
        if len(made.token_ids) > 1:
            kept = replace(
                made,
                token_ids=made.token_ids[:-1],
                logprobs=made.logprobs[:-1],
                token_versions=made.token_versions[:-1],
            )
            self._turns[-1] = replace(self._turns[-1], completion=kept, other_end="")
            self._ledger.pop()

    def _last_reason(self, calls_left: int) -> StopReason | None:
        """The stop reason if this turn is the last one, else None."""
        if calls_left <= 0:
            return StopReason.MAX_TOOL_CALLS
        return StopReason.MAX_TURNS if len(self._turns) + 1 >= self._limits.max_turns else None

    async def _generate(self, last: bool) -> tuple[Message, FinishReason]:
        """Generate one response and append it to the ledger. The last turn stops only at the end of an answer."""
        room = self._room
        longest = min(room, self._limits.max_turn_tokens or room)
        style, chat = self._observations.tool_call_format, self._observations.chat
        written = chat.response_text(self._since_observation)
        self._stops = stops = style.final_stop_strings if last else style.stop_strings(written)
        seed = None if self._seed is None else self._seed + len(self._turns) * SEEDS_BETWEEN_TURNS
        sampling = replace(self._sampling, n=1, max_tokens=longest, stop_strings=stops, seed=seed)
        (completion,) = await self._engine.generate((*self._ledger, *self._context), sampling)
        if completion.finish_reason is FinishReason.ABORT:
            raise ServiceDownError("the rollout engine", "aborted a response")
        message, other_end = chat.turn_of(self._context, completion.token_ids, self._since_observation)
        self._turns.append(Turn(self._context, completion, message, other_end=other_end))
        self._ledger += [*self._context, *completion.token_ids]
        self._since_observation += completion.token_ids
        self._context = ()
        return message, completion.finish_reason

    def _observe(
        self, answers: tuple[Message, ...], written: str, ended: bool, tools: Sequence[ToolSpec] = ()
    ) -> StopReason | None:
        """Append the answers as an observation. Returns LENGTH if no token is left for the next response."""
        self._turns[-1] = replace(self._turns[-1], responses=answers)
        self._context = array("i", self._observations.answer_ids(answers, written, ended, tools))
        self._since_observation = []
        return self._out_of_room()

    def _out_of_room(self) -> StopReason | None:
        """LENGTH if the token budget is used up, else None."""
        return StopReason.LENGTH if self._room < 1 else None

    @property
    def _room(self) -> int:
        """Remaining response tokens."""
        observed = len(self._context) if self._turns else 0
        return self._limits.max_tokens - max(0, len(self._ledger) - self._prompt_length) - observed

    async def _step(self, env: Env, message: Message) -> StepResult:
        before_s = self._env_s
        try:
            result = _of_type(StepResult, await self._timed(env.step(message), "step"), "step")
        except ServiceDownError as error:
            if message.tool_calls:
                tool = error.tool or message.tool_calls[0].name
                self.uses.append(ToolUse(tool, ToolStatus.UNAVAILABLE, self._env_s - before_s))
            raise
        self.uses += result.tool_uses
        self._tools += result.tools
        if result.reward is not None:
            try:
                self._turns[-1] = replace(self._turns[-1], reward=finite_number(result.reward))
            except ValueError as error:
                problem = f"step returned reward {result.reward!r}, not a finite number"
                raise ServiceDownError("the environment", problem) from error
        return result

    async def _verdict(self, env: Env) -> Score | None:
        """The environment's own score of the episode; None if it does not judge."""
        if not isinstance(env, Judge):
            return None
        limit_s = self._limits.judge_s
        try:
            async with EnvTimer(limit_s).running():
                with _attributed("judge"):
                    score = await env.judge()
        except TimeoutError as error:
            raise JudgeError(f"the environment: judge exceeded env.turn_timeout_s={limit_s:g}") from error
        except EpisodeLostError:
            raise
        except ServiceDownError as error:
            raise JudgeError(str(error)) from error
        if score is None:
            return None
        try:
            return finite_score(score)
        except ValueError as error:
            raise JudgeError(f"the environment: judge returned {score!r}, not a Score of finite numbers") from error

    async def _timed(self, answer: Awaitable[_T], method: str) -> _T:
        """Await the environment under its time limits. Raises _LateError past one of them."""
        left_s = self._limits.episode_s - self._env_s
        clock = EnvTimer(min(self._limits.turn_s, left_s))
        try:
            async with clock.running():
                with _attributed(method):
                    return await answer
        except TimeoutError as error:
            late = StopReason.TURN_TIMEOUT if self._limits.turn_s < left_s else StopReason.EPISODE_TIMEOUT
            raise _LateError(late) from error
        finally:
            self._env_s += clock.seconds


def _until(stops: Sequence[str], text: str) -> str:
    """The text up to the stop string that ended it. The last token may extend past it (`>.`): the token is trained, but
    the text after the stop string is ignored. Whitespace is kept, because answers depend on it."""
    end = max((text.rfind(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    return text[:end] if text[end:].strip() else text


def _of_type(kind: type[_T], value: object, method: str) -> _T:
    """An environment's return value, checked at run time: environments are user code, perhaps without type checks."""
    if not isinstance(value, kind):
        expected = f"verl.envs.base.{kind.__name__}"
        raise ServiceDownError("the environment", f"{method} returned {value!r:.80}, not a {expected}")
    return value


@contextmanager
def _attributed(method: str) -> Iterator[None]:
    """An exception of the environment becomes a ServiceDownError, which ends one episode and not the training step."""
    try:
        yield
    except VerlError:
        raise
    except Exception as error:
        raise ServiceDownError("the environment", f"{method} raised {type(error).__name__}: {error}") from error


async def _close(env: Env) -> None:
    """Close the environment; a failure to close must not discard the finished episode."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await env.close()
    except Exception as error:  # noqa: BLE001  whatever it is, the episode is over
        _log.warning("an environment could not be closed: %s: %s", type(error).__name__, error)
