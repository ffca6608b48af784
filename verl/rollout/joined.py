"""Sampling several responses to one prompt as one request, for callers that each want one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from verl.rollout.engine import Generator, Sampling, each_of
from verl.types import Completion


class JoinedRequests(Generator):
    """An engine that gets concurrent requests as one if they differ only in consecutive seeds.

    Engines then compute the prompt once. The episodes of a group start together, and in the order of their seeds.
    """

    def __init__(self, engine: Generator) -> None:
        self._engine = engine
        self._waiting: dict[tuple[tuple[int, ...], Sampling], tuple[list[Sampling], asyncio.Task[list[Completion]]]]
        self._waiting = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        """The response to a request with n=1."""
        key = tuple(prompt_ids), replace(sampling, seed=None)
        if key not in self._waiting:
            samplings: list[Sampling] = []
            self._waiting[key] = samplings, asyncio.create_task(self._send(*key, samplings))
        samplings, sent = self._waiting[key]
        place = len(samplings)
        samplings.append(sampling)
        return ((await sent)[place],)

    async def _send(
        self, prompt_ids: tuple[int, ...], unseeded: Sampling, samplings: list[Sampling]
    ) -> list[Completion]:
        """Runs once all callers of this turn of the event loop have added their request."""
        del self._waiting[prompt_ids, unseeded]
        joined = replace(samplings[0], n=len(samplings))
        if each_of(joined) == samplings:
            return list(await self._engine.generate(prompt_ids, joined))
        answers = await asyncio.gather(*(self._engine.generate(prompt_ids, each) for each in samplings))
        return [completion for (completion,) in answers]
