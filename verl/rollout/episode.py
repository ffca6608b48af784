"""One episode: the policy and an environment take turns, in tokens on this side and in messages on that.

What is put before the policy and what it writes is appended to the ledger (`Turn`) and never changed, cut or tokenised
again. Everything has a limit; what runs into one ends the episode, and `Trajectory.stop_reason` names it. However it
ended, an environment that judges is asked for its verdict then.
Seconds are counted while the environment answers alone. How long a response waits for the engine, and a call for a free
place of its tool, is the load's doing, not the episode's; an engine that is lost has a limit of its own
(`trainer.call_timeout_s`), and so has every call before that has a place (`env.tool_timeout_s`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from verl.data.formats.base import Calls, Continue, Final, ParseError
from verl.data.observation_tokenizer import ObservationTokenizer
from verl.envs.base import Env, EnvFactory, Judge, Observation, StepResult
from verl.envs.clock import EnvTimer
from verl.envs.task_envs import check_offered
from verl.errors import DataError, JudgeError, ServiceDownError, VerlError
from verl.rollout.engine import RolloutEngine, Sampling
from verl.rollout.finite import finite_number, finite_score
from verl.rollout.scoring import Fault
from verl.sandbox.base import Sandbox
from verl.services import check_services
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
_SEEDS_BETWEEN_TURNS = 1_000_003_007  # so that no turn draws what another one drew
_CLOSE_S = 30.0
_NOT_RUN = "This call was not made: no more tool calls are allowed."
_SCORED = (StopReason.STOP, StopReason.MAX_TURNS, StopReason.MAX_TOOL_CALLS, StopReason.MALFORMED)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an episode may use. In the last turn that is left no tool is run: the policy has to answer."""

    max_turns: int = 9  # assistant turns
    max_tool_calls: int = 8
    max_tokens: int = 1024  # of all turns together, observations included, the prompt not
    max_prompt_tokens: int = 2048
    max_turn_tokens: int | None = None  # that the policy writes in one turn
    turn_s: float = 300.0  # for the environment to answer one turn, or to open
    episode_s: float = 1200.0  # for all of its answers
    judge_s: float = 300.0  # for its verdict at the end
    retries: int = 1  # of a whole episode that a broken service ended
    feedback_on_parse_error: bool = (
        True  # whether the policy hears that a call cannot be read, or the episode ends there
    )


@dataclass(frozen=True, slots=True)
class EpisodeRunner:
    """Everything that episodes of several turns need but the task and the engine."""

    envs: EnvFactory
    observations: ObservationTokenizer
    budgets: EpisodeLimits
    sandbox: Sandbox | None = None  # that tools run code in

    async def check_services(self) -> None:
        """Raises ServiceDownError where something that the episodes need does not answer."""
        await check_services([self.envs, self.sandbox])

    async def close(self) -> None:
        """End what the environments share."""
        await self.envs.close()
        if self.sandbox is not None:
            await self.sandbox.close()

    async def run(
        self, engine: RolloutEngine, sampling: Sampling, task: Task, index: int, seed: int | None
    ) -> Trajectory | Fault:
        """One episode; begun anew when a service fails, and a fault when it keeps failing."""
        problem = ""
        lost: list[ToolUse] = []
        for _ in range(1 + self.budgets.retries):
            attempt = _Episode(self, engine, sampling, task, index, seed)
            try:
                return replace(await attempt.run(), lost_uses=tuple(lost))
            except ServiceDownError as error:
                problem = str(error)
                lost += attempt.uses
            except JudgeError as error:
                return Fault(task.id, index, str(error), (*lost, *attempt.uses))
            except DataError as error:
                return Fault(task.id, index, str(error), tuple(lost))
        return Fault(task.id, index, problem, tuple(lost))


class _LateError(Exception):
    """The environment did not answer in time."""

    def __init__(self, stop_reason: StopReason) -> None:
        super().__init__(stop_reason)
        self.stop_reason = stop_reason


class _Episode:
    """An attempt. Raises ServiceDownError and JudgeError for faults that are not the policy's."""

    def __init__(
        self,
        setting: EpisodeRunner,
        engine: RolloutEngine,
        sampling: Sampling,
        task: Task,
        index: int,
        seed: int | None,
    ) -> None:
        self._envs, self._observations, self._budgets = setting.envs, setting.observations, setting.budgets
        self._engine, self._sampling = engine, sampling
        self._task, self._index, self._seed = task, index, seed
        self._turns: list[Turn] = []
        self._ledger: list[int] = []  # all tokens of the turns
        self._context: tuple[int, ...] = ()  # what the next turn begins with
        self._prompt_length = 0
        self._since_observation: list[int] = []  # what the policy wrote since it was last answered
        self._stops: tuple[str, ...] = ()  # stop strings of the turn
        self._tools: list[ToolSpec] = []  # that are offered
        self.uses: list[ToolUse] = []
        self._num_calls = 0
        self._num_malformed = 0
        self._answering_s = 0.0  # that the environment took

    async def run(self) -> Trajectory:
        env = self._guarded_make()
        try:
            stop_reason = await self._play(env)
            score = await self._verdict(env)
        finally:
            await _close(env)
        return Trajectory(
            self._task,
            self._index,
            tuple(self._turns),
            stop_reason,
            Outcome.SCORED if stop_reason in _SCORED or score is not None else Outcome.MODEL_FAULT,
            tuple(self.uses),
            score,
            self._num_malformed,
        )

    async def _play(self, env: Env) -> StopReason:
        try:
            opening = _of_type(Observation, await self._answered(env.reset(), "reset"), "reset")
        except _LateError as late:
            raise ServiceDownError("the environment", f"did not open within env.{late.stop_reason}_s") from late
        check_offered(self._task, opening, self._task.env or "the run's")
        self._context = self._observations.prompt_ids(opening)
        self._tools = list(opening.tools)
        self._prompt_length = len(self._context)
        if self._prompt_length > self._budgets.max_prompt_tokens:
            raise DataError(
                f"the episode opens with {self._prompt_length} tokens, more than data.max_prompt_length="
                f"{self._budgets.max_prompt_tokens}"
            )
        stop_reason = None
        while stop_reason is None:
            try:
                stop_reason = await self._turn(env)
            except _LateError as late:  # what the policy asked for is in the ledger, and is what is to blame
                stop_reason = late.stop_reason
        return stop_reason

    async def _turn(self, env: Env) -> StopReason | None:
        """The policy writes and is answered. Returns why the episode is over, or None."""
        budgets = self._budgets
        calls_left = budgets.max_tool_calls - self._num_calls
        last = self._last_reason(calls_left)
        message, finish = await self._write(last is not None)
        if finish is FinishReason.LENGTH:
            return StopReason.LENGTH
        ended = self._observations.ended(self._since_observation)
        text = self._observations.written(self._since_observation)
        text = text if ended else _until(self._stops, text)
        parsed = self._observations.tool_call_format.parse(text, self._tools)
        if isinstance(parsed, Continue) and not ended:  # in the last turn: at an answer's tag inside a thought
            return self._out_of_room()
        if last is not None:
            await self._step(env, message)
            return StopReason.STOP if isinstance(parsed, Final | Continue) else last
        unanswered: tuple[Message, ...] = ()
        match parsed:
            case ParseError(problem):
                self._num_malformed += 1
                if budgets.feedback_on_parse_error:
                    return self._observe((Message("tool", problem),), text, ended)
                await self._step(env, message)
                return StopReason.MALFORMED
            case Calls(calls):
                made, refused = calls[:calls_left], calls[calls_left:]
                self._num_calls += len(made)  # not every environment tells of its tool uses
                message = replace(message, tool_calls=made)
                self._turns[-1] = replace(self._turns[-1], message=message)
                unanswered = tuple(Message("tool", _NOT_RUN, tool=call.name) for call in refused)
        result = await self._step(env, message)
        if result.done:
            return StopReason.STOP
        return self._observe((*result.messages, *unanswered), text, ended, result.tools)

    def _last_reason(self, calls_left: int) -> StopReason | None:
        """Why this turn is the last one, if it is."""
        if calls_left <= 0:
            return StopReason.MAX_TOOL_CALLS
        return StopReason.MAX_TURNS if len(self._turns) + 1 >= self._budgets.max_turns else None

    async def _write(self, last: bool) -> tuple[Message, FinishReason]:
        """The policy's next tokens, put into the ledger. The last turn stops nowhere but where its answer ends."""
        room = self._room
        longest = min(room, self._budgets.max_turn_tokens or room)
        tool_call_format, written = (
            self._observations.tool_call_format,
            self._observations.written(self._since_observation),
        )
        self._stops = stops = tool_call_format.final_stop_strings if last else tool_call_format.stop_strings(written)
        seed = None if self._seed is None else self._seed + len(self._turns) * _SEEDS_BETWEEN_TURNS
        sampling = replace(self._sampling, n=1, max_tokens=longest, stop_strings=stops, seed=seed)
        (completion,) = await self._engine.generate((*self._ledger, *self._context), sampling)
        if completion.finish_reason is FinishReason.ABORT:
            raise ServiceDownError("the rollout engine", "broke a reply off")
        message = Message("assistant", self._observations.chat.response_text(completion.token_ids))
        self._turns.append(Turn(self._context, completion, message))
        self._ledger += [*self._context, *completion.token_ids]
        self._since_observation += completion.token_ids
        self._context = ()
        return message, completion.finish_reason

    def _observe(
        self, answers: tuple[Message, ...], written: str, ended: bool, tools: Sequence[ToolSpec] = ()
    ) -> StopReason | None:
        """Put the answers before the policy, if there is room for them and for a word after them."""
        self._turns[-1] = replace(self._turns[-1], responses=answers)
        self._context = self._observations.answer_ids(answers, written, ended, tools)
        self._since_observation = []
        return self._out_of_room()

    def _out_of_room(self) -> StopReason | None:
        """Why the policy cannot write on, if it cannot."""
        return StopReason.LENGTH if self._room < 1 else None

    @property
    def _room(self) -> int:
        """Tokens that the policy may still write."""
        observed = len(self._context) if self._turns else 0
        return self._budgets.max_tokens - max(0, len(self._ledger) - self._prompt_length) - observed

    async def _step(self, env: Env, message: Message) -> StepResult:
        begun_s = self._answering_s
        try:
            result = _of_type(StepResult, await self._answered(env.step(message), "step"), "step")
        except ServiceDownError as error:
            if message.tool_calls:
                tool = error.tool or message.tool_calls[0].name
                self.uses.append(ToolUse(tool, ToolStatus.UNAVAILABLE, self._answering_s - begun_s))
            raise
        self.uses += result.tool_uses
        self._tools += result.tools
        if result.reward is not None:
            self._turns[-1] = replace(self._turns[-1], reward=_checked(result.reward))
        return result

    async def _verdict(self, env: Env) -> Score | None:
        """The environment's own score of the episode, where it judges."""
        if not isinstance(env, Judge):
            return None
        limit_s = self._budgets.judge_s
        try:
            async with EnvTimer(limit_s).running():
                score = await _guarded(env.judge(), "judge")
        except TimeoutError as error:
            raise JudgeError(f"the environment: did not judge within env.judge_timeout_s={limit_s:g}") from error
        except ServiceDownError as error:
            raise JudgeError(str(error)) from error
        if score is None:
            return None
        try:
            return finite_score(score)
        except ValueError as error:
            raise JudgeError(f"the environment: judge gave {score!r}, not a Score of finite numbers") from error

    async def _answered(self, answer: Awaitable[_T], doing: str) -> _T:
        """What the environment gives. Raises _LateError past a limit."""
        left_s = self._budgets.episode_s - self._answering_s
        clock = EnvTimer(min(self._budgets.turn_s, left_s))
        try:
            async with clock.running():
                return await _guarded(answer, doing)
        except TimeoutError as error:
            late = StopReason.TURN_TIMEOUT if self._budgets.turn_s < left_s else StopReason.EPISODE_TIMEOUT
            raise _LateError(late) from error
        finally:
            self._answering_s += clock.seconds

    def _guarded_make(self) -> Env:
        try:
            return self._envs(self._task)
        except VerlError:
            raise
        except Exception as error:
            raise _broken("making it", error) from error


def _until(stops: Sequence[str], text: str) -> str:
    """The text up to the stop string that it paused at. The token that ends one may go on (`>.`): it is trained whole,
    but what lies behind the stop string means nothing. White space stays, for it decides where an answer begins."""
    end = max((text.rfind(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    return text[:end] if text[end:].strip() else text


def _checked(reward: float) -> float:
    try:
        return finite_number(reward)
    except ValueError as error:
        raise ServiceDownError("the environment", f"step gave the reward {reward!r}, not a finite number") from error


def _of_type(kind: type[_T], given: object, doing: str) -> _T:
    """What an environment gave. Environments are users' code, which no type checker has seen."""
    if not isinstance(given, kind):
        raise ServiceDownError("the environment", f"{doing} gave {given!r:.80}, not a verl.envs.base.{kind.__name__}")
    return given


async def _guarded(step: Awaitable[_T], doing: str) -> _T:
    """What an environment raises is a fault of its own, and ends one episode, not the step."""
    try:
        return await step
    except VerlError:
        raise
    except Exception as error:
        raise _broken(doing, error) from error


def _broken(doing: str, error: Exception) -> ServiceDownError:
    return ServiceDownError("the environment", f"{doing} raised {type(error).__name__}: {error}")


async def _close(env: Env) -> None:
    """An environment that cannot be closed must not take the episode with it."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await env.close()
    except Exception as error:  # noqa: BLE001  whatever it is, the episode is over
        _log.warning("an environment could not be closed: %s: %s", type(error).__name__, error)
