"""A policy that writes what a test wants, for sessions without an engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tests.toolrl.benchmarks.runner.eval_play import chat
from toolrl.envs.agent.ledger import Draft, Ledger, Segment
from toolrl.envs.agent.requests import ChatRequest, ChatResponse
from toolrl.envs.agent.session import Session, received
from verl.chat.observations import ObservationTokenizer
from verl.formats.base import build_tool_call_format
from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason, Message, ToolSpec

WEATHER = ToolSpec("weather", "", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def observations(tool_call_format: str = "hermes", **options: object) -> ObservationTokenizer:
    return ObservationTokenizer(chat(), build_tool_call_format(tool_call_format, options), 16)


async def no_wait() -> None: ...


@dataclass
class ScriptedPolicy:
    """Answers with these texts in turn, each with its end token, and remembers what it saw."""

    texts: Iterator[str]
    wait: Callable[[], Awaitable[None]] = no_wait  # before each answer
    max_turns: int = 1000
    longest: int = 100_000
    observations: ObservationTokenizer = field(default_factory=observations)
    sampling: Sampling = field(default_factory=lambda: Sampling(1))
    saw: list[tuple[tuple[int, ...], tuple[str, ...]]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    sampled_with: list[Sampling | None] = field(default_factory=list)

    def room(self, prompt_length: int, num_tokens: int) -> int:
        return self.longest - num_tokens

    async def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_strings: tuple[str, ...],
        sampling: Sampling | None = None,
    ) -> Completion:
        self.sampled_with.append(sampling)
        self.saw.append((tuple(prompt_ids), stop_strings))
        text, number = next(self.texts), len(self.saw)
        await self.wait()
        ids = (*chat().response_ids(text)[0], chat().end_token_id)
        stopped = (
            count
            for count in range(1, len(ids))
            if any(stop in chat().tokenizer.decode(ids[:count]) for stop in stop_strings)
        )
        ids = ids[: next(stopped, len(ids))]
        reason = FinishReason.LENGTH if len(ids) > max_tokens else FinishReason.STOP
        done = Completion(
            array("i", ids[:max_tokens]), array("f", [-number] * min(len(ids), max_tokens)), reason, number
        )
        self.completions.append(done)
        return done


def session(*texts: str, **options: object) -> tuple[Session, ScriptedPolicy]:
    """In the event loop."""
    policy = ScriptedPolicy(iter(texts), **options)  # type: ignore[arg-type]
    return Session(policy), policy


def user(text: str) -> Message:
    return Message("user", text)


async def ask(session: Session, *messages: Message, retried: bool = False, **fields: object) -> ChatResponse:
    """A request whose response arrives."""
    request = ChatRequest(messages, **fields)  # type: ignore[arg-type]
    exchange = session.exchange(request, repr(request).encode(), retried)
    response = await session.response(exchange)
    exchange.delivered = True
    return response


async def lost(session: Session, *messages: Message) -> None:
    """A request whose connection is lost before the response arrives."""
    request = ChatRequest(messages)
    exchange = session.exchange(request, repr(request).encode(), False)
    waiting = asyncio.create_task(session.response(exchange))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])


def placed(ledger: Ledger, *messages: Message) -> Draft:
    return ledger.place(ledger.find(messages, ()))


def answered(*messages: Message, by: ChatResponse) -> tuple[Message, ...]:
    """The conversation with its response, as a program repeats it."""
    return (*messages, received(by))


def tokens(segment: Segment) -> tuple[int, ...]:
    pieces = ((*turn.context_ids, *turn.completion.token_ids) for turn in segment.turns)
    return tuple(chain.from_iterable(pieces))


def check_exact(session: Session, policy: ScriptedPolicy) -> None:
    """Every request showed the policy the tokens before its response in the ledger, and nothing was sampled twice."""
    shown = []
    for segment in session.ledger.segments:
        before: tuple[int, ...] = ()
        for turn in segment.turns:
            before += tuple(turn.context_ids)
            shown.append((before, turn.completion))
            before += tuple(turn.completion.token_ids)
    asked = [
        (policy.saw[completion.weight_version - 1][0], completion) for completion in policy.completions
    ]  # numbered from 1
    assert len(policy.saw) == len(policy.completions)
    assert sorted(shown, key=_number) == sorted(asked, key=_number)


def _number(entry: tuple[tuple[int, ...], Completion]) -> int:
    return entry[1].weight_version
