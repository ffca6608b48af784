"""Episodes that a program drives: it requests responses of the policy, where other environments are stepped through.

The limits of the run, its clock, seeds and weight versions stay with the episode; the program gets `ProgramPolicy`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from verl.chat.observations import ObservationTokenizer
from verl.envs.base import Env, Observation, StepResult
from verl.errors import ConfigError, ServiceDownError
from verl.rollout.engine import Generator, Sampling
from verl.types import Completion, FinishReason, Message, StopReason, Turn

if TYPE_CHECKING:
    from verl.episodes.episode import EpisodeLimits

_NO_STEPS = "this environment is a program that requests responses itself: it cannot be stepped through"
SEEDS_BETWEEN_TURNS = 1_000_003_007  # seed offset, so that no two turns share random numbers


class ProgramTimer:
    """Time of the program itself: it does not run while a request waits for the policy.

    turn_s: limit between two requests; episode_s: limit of the sum
    """

    def __init__(self, turn_s: float, episode_s: float) -> None:
        self._turn_s, self._left_s = turn_s, episode_s
        self._timeout = asyncio.timeout(None)
        self._requests = 0
        self._since = 0.0
        self._finished = False
        self.late = StopReason.TURN_TIMEOUT  # the limit that is reached first

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Time the block. Raises TimeoutError past a limit."""
        try:
            async with self._timeout:
                self._resume()
                yield
        finally:
            self._finished = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the block, in any task."""
        self._requests += 1
        if self._requests == 1:
            self._left_s -= asyncio.get_running_loop().time() - self._since
            self._reschedule(None)
        try:
            yield
        finally:
            self._requests -= 1
            if self._requests == 0:
                self._resume()

    def _resume(self) -> None:
        self._since = asyncio.get_running_loop().time()
        self.late = StopReason.TURN_TIMEOUT if self._turn_s < self._left_s else StopReason.EPISODE_TIMEOUT
        self._reschedule(self._since + min(self._turn_s, self._left_s))

    def _reschedule(self, when: float | None) -> None:
        if not (self._finished or self._timeout.expired()):
            self._timeout.reschedule(when)


@dataclass(eq=False)
class ProgramPolicy:
    """The policy in one episode: tokens in, tokens out, within the limits of the run."""

    observations: ObservationTokenizer
    limits: EpisodeLimits
    sampling: Sampling
    engine: Generator
    seed: int | None
    timer: ProgramTimer = field(init=False)
    _num_requests: int = 0

    def __post_init__(self) -> None:
        self.timer = ProgramTimer(self.limits.turn_s, self.limits.episode_s)

    @property
    def max_turns(self) -> int:
        """Responses of an episode, in all its segments."""
        return self.limits.max_turns

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return self.limits.max_prompt_length + self.limits.max_tokens

    def room(self, prompt_length: int, num_tokens: int) -> int:
        """The length of the next response in a segment of `num_tokens` tokens, of which its first context has
        `prompt_length`. A segment is no longer than any other sample: it fits a pack."""
        limits = self.limits
        sample = self.longest - num_tokens
        room = min(sample, limits.max_tokens - (num_tokens - prompt_length))
        return min(room, limits.max_turn_tokens or room)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_strings: tuple[str, ...],
        sampling: Sampling | None = None,
    ) -> Completion:
        """The response to these tokens; requests may run concurrently. Raises ServiceDownError if it is aborted.

        sampling: in place of the run's
        """
        seed = None if self.seed is None else self.seed + self._num_requests * SEEDS_BETWEEN_TURNS
        self._num_requests += 1
        own = sampling or self.sampling
        sampling = replace(own, n=1, max_tokens=max_tokens, stop_strings=stop_strings, seed=seed)
        with self.timer.paused():
            (completion,) = await self.engine.generate(tuple(prompt_ids), sampling)
        if completion.finish_reason is FinishReason.ABORT:
            raise ServiceDownError("the rollout engine", "aborted a response")
        return completion


class ProgramEnv(Env, ABC):
    """An environment that is a program of its own, such as a user's agent. It may judge, like any environment."""

    @abstractmethod
    async def run(self, policy: ProgramPolicy) -> StopReason:
        """Run the program to its end; cancelled at a time limit. Raises ServiceDownError for a failure that is not the
        policy's."""

    @property
    @abstractmethod
    def turns(self) -> Sequence[Turn]:
        """The ledger, after `run` has ended in any way: in the order of time, each turn with its segment."""

    @property
    @abstractmethod
    def opening(self) -> tuple[Message, ...]:
        """The messages to which the first turn responds."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What to log of the episode, by the name of the metric; by default nothing."""
        return {}

    async def reset(self) -> Observation:
        raise ConfigError(_NO_STEPS)

    async def step(self, message: Message) -> StepResult:
        raise ConfigError(_NO_STEPS)
