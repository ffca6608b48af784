"""Responses that are being written when new weights come, over engines whose weights show in what they
write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.every import every
from tests.support.virtual_clock import run_at_once
from tests.verl.batch.test_packing import tiny_model
from toolrl.check.preflight.local_group import LocalGroup
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import HFEngine
from verl.rollout.pool import EnginePool, OnWeightSync, joined
from verl.rollout.stopping import tokens_to_stop
from verl.types import Completion, FinishReason


class Writes:
    """Writes the version of its weights, a token at a turn of the event loop, and remembers what it was asked."""

    def __init__(self) -> None:
        self.version, self.loading, self.interrupted = 0, False, False
        self.asked: list[tuple[int, ...]] = []
        self.running = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        self.asked.append(tuple(prompt_ids))
        self.interrupted = False
        self.running += 1
        written: list[int] = []
        while len(written) < sampling.max_tokens and not self.interrupted:
            assert not self.loading
            written.append(self.version)
            await asyncio.sleep(0.001)
        self.running -= 1
        reason = FinishReason.ABORT if len(written) < sampling.max_tokens else FinishReason.LENGTH
        return (Completion(tuple(written), (-1.0,) * len(written), reason, self.version),)

    async def interrupt(self) -> None:
        self.interrupted = True

    async def begin_weights(self, layouts: object) -> None:
        assert self.running == 0
        self.loading = True

    async def end_weights(self, version: int) -> None:
        self.version, self.loading = version, False


async def published_twice(pool: EnginePool, sampling: Sampling, wait_s: float = 0.02) -> list[Completion]:
    """Two responses, during which two versions are published."""
    responses = [asyncio.ensure_future(pool.generate((7, 7), sampling)) for _ in range(2)]
    for version in (1, 2):
        await asyncio.sleep(wait_s)
        await pool.begin_weights([])
        await pool.end_weights(version)
    return [completion for each in await asyncio.gather(*responses) for completion in each]


@pytest.mark.parametrize("on_weight_sync", list(OnWeightSync))
def test_every_token_carries_the_version_that_wrote_it(on_weight_sync: OnWeightSync) -> None:
    engine = Writes()
    pool = EnginePool(LocalGroup(engine), [[0]], on_weight_sync)
    done = run_at_once(published_twice(pool, Sampling(max_tokens=60, n=2)))
    assert len(done) == 4
    for completion in done:
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.versions == tuple(completion.token_ids) and len(completion.logprobs) == 60
        assert completion.weight_version == completion.versions[-1]
        found = {OnWeightSync.FINISH: {0}, OnWeightSync.CONTINUE: {0, 1, 2}, OnWeightSync.ABORT_AND_RETRY: {2}}[
            on_weight_sync
        ]
        assert set(completion.versions) == found and list(completion.versions) == sorted(completion.versions)
    if on_weight_sync is OnWeightSync.CONTINUE:
        assert every(asked[:2] == (7, 7) and set(asked[2:]) <= {0, 1} for asked in engine.asked)


class Recites:
    """Writes the same text whatever its weights, looks for stop strings in its own alone, and waits for a stop."""

    def __init__(self, pieces: Sequence[str], breaks: Sequence[int]) -> None:
        self.pieces, self.breaks = pieces, set(breaks)
        self.waits, self.broken = asyncio.Event(), asyncio.Event()
        self.version = 0

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[number] for number in ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        _, *written = prompt_ids
        own: list[int] = []
        reason = FinishReason.LENGTH
        for number in range(len(written), len(written) + sampling.max_tokens):
            if number in self.breaks:
                self.breaks.remove(number)
                self.waits.set()
                await self.broken.wait()
                self.broken.clear()
                reason = FinishReason.ABORT
                break
            own.append(number)
            if any(stop in self.decode(own) for stop in sampling.stop_strings):
                reason = FinishReason.STOP
                break
        return (Completion(tuple(own), tuple(map(float, own)), reason, self.version),)

    async def interrupt(self) -> None:
        self.broken.set()

    async def begin_weights(self, layouts: object) -> None:
        """Anything will do."""

    async def end_weights(self, version: int) -> None:
        self.version = version


async def recited(pieces: Sequence[str], stops: Sequence[str], breaks: Sequence[int]) -> Completion:
    """The response, with a weight sync at each break."""
    engine = Recites(pieces, breaks)
    pool = EnginePool(LocalGroup(engine), [[0]], OnWeightSync.CONTINUE, engine.decode)
    sampling = Sampling(max_tokens=len(pieces), stop_strings=tuple(stops))
    response = asyncio.ensure_future(pool.generate((0,), sampling))
    waits = asyncio.ensure_future(engine.waits.wait())
    while not response.done():
        await asyncio.wait((response, waits), return_when=asyncio.FIRST_COMPLETED)
        if waits.done():
            engine.waits.clear()
            await pool.begin_weights([])
            await pool.end_weights(engine.version + 1)
            waits = asyncio.ensure_future(engine.waits.wait())
    waits.cancel()
    (done,) = response.result()
    return done


@given(
    pieces=st.lists(st.text("</a>", min_size=1, max_size=3), min_size=1, max_size=30),
    stops=st.lists(st.sampled_from(["</a>", "<<", "a>", "</</a", ">"]), max_size=2),
    breaks=st.lists(st.integers(0, 29), max_size=6, unique=True),
)
@example(pieces=["<", "/", "a", ">", "a"], stops=["</a>"], breaks=[1, 2, 3, 4])
@settings(deadline=None)
def test_a_response_in_pieces_stops_where_an_unbroken_one_would(
    pieces: list[str], stops: list[str], breaks: list[int]
) -> None:
    whole = run_at_once(recited(pieces, stops, ()))
    broken = run_at_once(recited(pieces, stops, breaks))
    assert tuple(broken.token_ids) == tuple(whole.token_ids) and tuple(broken.logprobs) == tuple(whole.logprobs)
    assert broken.finish_reason is whole.finish_reason
    versions = [sum(place <= number for place in breaks) for number in broken.token_ids]
    assert list(broken.versions) == versions  # no token is thrown away


def test_stop_strings_are_found_across_a_seam_in_a_character_of_several_tokens() -> None:
    umlaut = "ü".encode()

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    before, after = [*b"a" * 50, *b"t", umlaut[0]], [umlaut[1], *b">>"]
    assert tokens_to_stop(decode, before, after, ["tü>"]) == 2
    assert tokens_to_stop(decode, before, after, ["t>"]) is None


@pytest.mark.parametrize("on_weight_sync", list(OnWeightSync))
def test_a_canary_does_not_wait_for_requests_that_wait_for_weights(on_weight_sync: OnWeightSync) -> None:
    engine = Writes()
    pool = EnginePool(LocalGroup(engine), [[0]], on_weight_sync)

    async def probed() -> tuple[int, list[Completion]]:
        responses = [asyncio.ensure_future(pool.generate((number,), Sampling(max_tokens=20))) for number in range(3)]
        await asyncio.sleep(0.005)
        with pool.paused():
            await pool.begin_weights([])
            late = asyncio.ensure_future(pool.generate((3,), Sampling(max_tokens=20)))
            await pool.end_weights(1)
            place = len(engine.asked)
            ((canary,),) = await pool.probe((9,), Sampling(max_tokens=5))
            assert canary.versions == (1,) * 5 and len(engine.asked) == place + 1 and not late.done()
        return place, [each for (each,) in await asyncio.gather(*responses, late)]

    place, done = run_at_once(probed())
    assert engine.asked[place] == (9,) and done[-1].versions == (1,) * 20


def test_weights_that_are_refused_leave_the_old_ones_in_use() -> None:
    class Refuses(Writes):
        async def begin_weights(self, layouts: object) -> None:
            raise ValueError("other names")

    async def goes_on() -> list[Completion]:
        pool = EnginePool(LocalGroup(Refuses()), [[0]], OnWeightSync.CONTINUE)
        response = asyncio.ensure_future(pool.generate((1,), Sampling(max_tokens=30)))
        await asyncio.sleep(0.005)
        with pytest.raises(ValueError, match="other names"):
            await pool.begin_weights([])
        return list(await response)

    (done,) = run_at_once(goes_on())
    assert tuple(done.token_ids) == (0,) * 30 == done.versions


def test_an_engine_that_breaks_off_by_itself_is_not_asked_again() -> None:
    class Breaks(Writes):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
            return (Completion((1,), (0.0,), FinishReason.ABORT, 0),)

    pool = EnginePool(LocalGroup(Breaks()), [[0]], OnWeightSync.CONTINUE)
    (done,) = run_at_once(pool.generate((1,), Sampling(max_tokens=3)))
    assert done.finish_reason is FinishReason.ABORT


async def test_an_interrupted_response_of_the_hf_engine_has_unchanged_log_probs() -> None:
    model: Any = tiny_model("qwen2", tied=True, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    engine = HFEngine(model)
    sampling = Sampling(max_tokens=40, seed=5)
    (whole,) = await engine.generate((3, 4, 5), sampling)
    started = asyncio.ensure_future(engine.generate((3, 4, 5), sampling))
    for _ in range(9):
        await asyncio.sleep(0)
    await engine.interrupt()
    (first,) = await started
    length = len(first.token_ids)
    assert first.finish_reason is FinishReason.ABORT and 0 < length < 40
    assert first.token_ids == whole.token_ids[:length] and first.logprobs == whole.logprobs[:length]
    rest = replace(whole, token_ids=whole.token_ids[length:], logprobs=whole.logprobs[length:], weight_version=3)
    both = joined([first, rest])
    assert tuple(both.token_ids) == tuple(whole.token_ids) and tuple(both.logprobs) == tuple(whole.logprobs)
    assert both.versions == (0,) * length + (3,) * (40 - length)


async def test_tokens_are_counted_while_they_are_written() -> None:
    """Of seeded requests, one after the other: the sum never falls, and ends exact."""
    model: Any = tiny_model("qwen2", tied=True, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    engine = HFEngine(model)
    pool = EnginePool(LocalGroup(engine), [[0]])
    looks: list[int] = []

    async def look(until: asyncio.Future[Any]) -> None:
        while not until.done():
            looks.append(await pool.tokens_written())
            await asyncio.sleep(0)

    requests = [pool.generate((3, 4, 5), Sampling(max_tokens=tokens, seed=5)) for tokens in (4, 40, 8)]
    working = asyncio.gather(*requests)
    await look(working)
    assert await pool.tokens_written() == 52
    assert sum(len(each.token_ids) for completions in working.result() for each in completions) == 52
    assert looks == sorted(looks) and looks[0] == 0
    assert len({*looks}) > 9
