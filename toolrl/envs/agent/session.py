"""One agent's episode: its requests become responses of the policy, each recorded in the ledger once."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import nan
from typing import Protocol

from toolrl.envs.agent.ledger import Draft, Ledger
from toolrl.envs.agent.requests import ApiError, ChatRequest, ChatResponse, Finish, bad_request, refused
from toolrl.envs.agent.sampling import OnSampling, differing, honored
from toolrl.envs.agent.thoughts import OnThoughts
from toolrl.serve.openai_server.parsing import ResponseReader, numbered
from toolrl.servers.bounds import LargeWork
from toolrl.swe.harness import TaskSession
from verl.chat.observations import ObservationTokenizer
from verl.errors import ConfigError, DataError
from verl.formats.base import Calls, Continue, Final, ParseError
from verl.formats.response import parsed_response
from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason, Message, ParsedResponse, Score, StopReason, ToolCall

_LIMITS = {"max_turns": StopReason.MAX_TURNS, "context_length_exceeded": StopReason.LENGTH}  # by code of the error
_WAY_OUT = "send every assistant message back with its whole content"
_FREE_CHARS = 1_000_000  # of a request, however little of it the policy would see
_CHARS_PER_TOKEN = 16  # of a text that fits; more only where white space or old thoughts are dropped


class Policy(Protocol):
    """What a session needs of the episode that it belongs to (`verl.episodes.program.ProgramPolicy`)."""

    @property
    def observations(self) -> ObservationTokenizer: ...

    @property
    def max_turns(self) -> int: ...

    @property
    def longest(self) -> int:
        """Tokens of the longest segment."""

    def room(self, prompt_length: int, num_tokens: int) -> int:
        """Tokens that may follow a sequence whose first context has `prompt_length` of its `num_tokens` tokens."""

    @property
    def sampling(self) -> Sampling: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_strings: tuple[str, ...],
        sampling: Sampling | None = None,
    ) -> Completion:
        """The policy's response to these tokens. sampling: in place of the run's"""


@dataclass(eq=False)
class Exchange:
    """A request and the work on its response.

    waiting: connections that wait for it; decided: set once the request is with the engine, or refused
    """

    body: bytes
    request: ChatRequest
    work: asyncio.Task[ChatResponse] = field(init=False)
    draft: Draft | None = None
    waiting: int = 0
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: bool = False

    @property
    def abandoned(self) -> bool:
        """Whether the program lost the connection before it had the response."""
        return not self.delivered and self.waiting == 0


@dataclass(eq=False)
class Session:
    """The requests of one program. Responses are generated in tasks of their own, which a lost connection does not end:
    the SDK's next attempt gets the same response, and the ledger holds it once. Create it in the event loop.
    """

    policy: Policy
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}")  # opens this session alone
    score: Score | None = None  # as posted by the program
    limit: StopReason | None = None  # that a request reached
    cut: bool = False  # whether the last response is as long as the run allows
    counts: Counter[str] = field(default_factory=Counter)
    on_sampling: OnSampling = OnSampling.REPLACE
    on_thoughts: OnThoughts = OnThoughts.RESTORE
    overridden: set[str] = field(default_factory=set)  # names of settings that were replaced
    tokenizing: LargeWork = field(default_factory=LargeWork)  # of large requests; a gateway's sessions share one
    task: TaskSession | None = None  # where the program's commands run (env.options.runtime)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.policy.observations, self.on_thoughts)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # of the engine or the runtime
        self._reader = ResponseReader(self.policy.observations.tool_call_format)
        self._exchanges: list[Exchange] = []
        self._pauses = 0  # further requests to the engine within responses
        self._sent_before_limit: list[Exchange] = []  # requests that began before `limit` was set
        self._num_calls = 0
        self._closed = False
        self._placing = asyncio.Lock()  # a request is placed while no other one is

    def exchange(self, request: ChatRequest, body: bytes, retried: bool) -> Exchange:
        """The exchange of this request, or an earlier one with the same body if this is its retry.

        retried: the SDK marks it as a retry. Else it is one if the response to its predecessor never arrived. Of
        several, it is that of a client that went away, or else one without its response.
        """
        alike = [each for each in reversed(self._exchanges) if each.body == body and (retried or each.abandoned)]
        if alike:
            self.counts["retries"] += 1
            return max(alike, key=lambda each: (each.abandoned, not each.delivered))
        if self._closed:
            raise _over()
        self.counts["requests"] += 1
        exchange = Exchange(body, request)
        exchange.work = asyncio.create_task(self._respond(exchange))
        exchange.work.add_done_callback(lambda _: exchange.decided.set())
        self._exchanges.append(exchange)
        return exchange

    def connected(self, exchange: Exchange) -> asyncio.Task[ChatResponse]:
        """`response` as a task, for which the exchange has a connection even before it runs."""

        def leave(_: object) -> None:
            exchange.waiting -= 1

        exchange.waiting += 1
        waiting = asyncio.create_task(self.response(exchange))
        waiting.add_done_callback(leave)
        return waiting

    async def response(self, exchange: Exchange) -> ChatResponse:
        """Raises ApiError; the same request may then be sent again."""
        exchange.waiting += 1
        try:
            return await asyncio.shield(exchange.work)
        except asyncio.CancelledError:
            if exchange.work.cancelled():
                raise _over() from None
            raise
        except ApiError:
            if exchange in self._exchanges:
                self._exchanges.remove(exchange)
            raise
        finally:
            exchange.waiting -= 1

    async def count_tokens(self, request: ChatRequest) -> int:
        """Those that the request would show the policy. Raises ApiError."""
        self._check_size(request)
        with _refusing(request):
            count = partial(self.ledger.num_tokens, request.messages, request.tools)
            return await self.tokenizing.run(request.size, count)

    def fail(self, error: Exception) -> None:
        """Raise it where the episode waits: a part of the machinery is lost."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def metrics(self) -> dict[str, int]:
        """After the end, by name."""
        counted = ("requests", "retries", "undelivered", "sampling_overridden")
        return {f"agent/{name}": self.counts[name] for name in counted} | {"agent/segments": len(self.ledger.segments)}

    def rewriting(self) -> str:
        """Why no request continues an earlier one, and the way out; empty if one does, or if none has a history."""
        if not self.ledger.rewritten or len(self.ledger.segments) != self.ledger.rewritten + 1:
            return ""
        if not self.ledger.drops_thoughts:
            return f"changes the responses that it repeats; {_WAY_OUT} and its tool_calls"
        restores = self.on_thoughts is OnThoughts.RESTORE
        how = "which may be several responses" if restores else "which env.options.on_thoughts=restore puts back"
        return f"drops thoughts, {how}; {_WAY_OUT}"

    async def close(self) -> None:
        """Refuse further requests, end the running ones and drop responses that never reached the program."""
        self._closed = True
        running = [each.work for each in self._exchanges if not each.work.done()]
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for each in reversed(self._exchanges):
            if each.abandoned and each.draft is not None and self.ledger.drop(each.draft):
                self.counts["undelivered"] += 1
        if not self.failure.done():
            self.failure.cancel()

    async def _respond(self, exchange: Exchange) -> ChatResponse:
        try:
            return await self._recorded(exchange)
        except ApiError as error:
            if error.code in _LIMITS:
                self.limit, self._sent_before_limit = _LIMITS[error.code], list(self._exchanges)
            raise
        except Exception as error:
            self.fail(error)
            raise ApiError(503, "service_unavailable", str(error)) from error

    async def _recorded(self, exchange: Exchange) -> ChatResponse:
        request = exchange.request
        async with self._placing:
            if self._num_requests >= self.policy.max_turns:
                raise ApiError(400, "max_turns", f"env.max_turns={self.policy.max_turns} requests are used up")
            sampling = self._own_sampling(request)
            draft = await self._placed(request)
        try:
            left = self._left(draft, request)
            exchange.decided.set()
            pieces = await self._sample(draft, request, sampling, left)
        except BaseException:
            self.ledger.release(draft)
            raise
        response, parsed = self._read(draft, request, pieces)
        self.ledger.append(draft, pieces, received(response), parsed)
        exchange.draft = draft
        self.counts["responses"] += 1
        left = self.policy.room(draft.segment.prompt_length, len(draft.prompt_ids)) - response.completion_tokens
        self.cut = response.finish is Finish.LENGTH and left < 1
        if self.limit is StopReason.LENGTH and exchange not in self._sent_before_limit:  # a shorter conversation
            self.limit = None
        return response

    async def _placed(self, request: ChatRequest) -> Draft:
        """Raises ApiError."""
        self._check_size(request)
        with _refusing(request):
            if request.token_ids:
                return self.ledger.place_tokens(request.token_ids)
            find = partial(self.ledger.find, request.messages, request.tools)
            return self.ledger.place(await self.tokenizing.run(request.size, find))

    def _own_sampling(self, request: ChatRequest) -> Sampling | None:
        """The request's own sampling, if it differs from the run's and is honored. Raises ApiError."""
        names = differing(request.sampling, self.policy.sampling)
        if names and self.on_sampling is OnSampling.REPLACE:
            self.counts["sampling_overridden"] += 1
            self.overridden |= set(names)
        if not names or self.on_sampling is OnSampling.REPLACE:
            return None
        if self.on_sampling is OnSampling.REFUSE:
            raise bad_request("differs from the run's sampling (env.options.on_sampling=refuse)", names[0])
        self.counts["sampling_honored"] += 1
        return honored(request.sampling, names, self.policy.sampling)

    def _check_size(self, request: ChatRequest) -> None:
        """Refuse what is much longer than any text that fits. All characters count, also of what a template drops."""
        most = _FREE_CHARS + _CHARS_PER_TOKEN * self.policy.longest
        if request.size > most:
            raise self._too_long(f"{request.size} characters, of which at most {most} are read,", request)
        if len(request.token_ids) > self.policy.longest:
            raise self._too_long(f"{len(request.token_ids)} tokens", request)

    def _too_long(self, tokens: str, request: ChatRequest) -> ApiError:
        problem = f"{tokens} leave no room for a response (data.max_prompt_length, data.max_response_length)"
        return ApiError(400, "context_length_exceeded", problem, request.conversation)

    def _left(self, draft: Draft, request: ChatRequest) -> int:
        """Tokens of the longest possible response. Raises ApiError."""
        length = len(draft.prompt_ids)
        room = self.policy.room(draft.segment.prompt_length, length)
        if room < 1:
            raise self._too_long(f"{length} tokens", request)
        return room if request.max_tokens is None else min(room, request.max_tokens)

    async def _sample(
        self, draft: Draft, request: ChatRequest, sampling: Sampling | None, left: int
    ) -> list[Completion]:
        """The policy's response: several pieces if the format pauses without a call."""
        observations = self.policy.observations
        pieces: list[Completion] = []
        sampled: tuple[int, ...] = ()
        while True:
            stops = observations.tool_call_format.stop_strings(observations.chat.response_text(sampled))
            prompt_ids, every_stop = (*draft.prompt_ids, *sampled), (*stops, *request.stop)
            piece = await self.policy.generate(prompt_ids, left, every_stop, sampling)
            if sampling is not None:  # log-probs of another distribution than the run's stay out of the ratio
                piece = replace(piece, logprobs=array("f", [nan]) * len(piece.token_ids))
            pieces.append(piece)
            sampled, left = (*sampled, *piece.token_ids), left - len(piece.token_ids)
            written = observations.chat.response_text(sampled)
            paused = piece.finish_reason is FinishReason.STOP and not observations.chat.ended(sampled)
            stopped = any(stop in written for stop in request.stop)
            used_up = left < 1 or self._num_requests >= self.policy.max_turns
            if not paused or stopped or used_up or not self._continues(written, request):
                return pieces
            self._pauses += 1

    @property
    def _num_requests(self) -> int:
        """Requests to the engine so far, and those that responses in work begin with."""
        return self.counts["responses"] + self.ledger.num_running + self._pauses

    def _continues(self, written: str, request: ChatRequest) -> bool:
        return isinstance(self.policy.observations.tool_call_format.parse(written, request.tools), Continue)

    def _read(
        self, draft: Draft, request: ChatRequest, pieces: Sequence[Completion]
    ) -> tuple[ChatResponse, ParsedResponse | None]:
        observations = self.policy.observations
        style = observations.tool_call_format
        written = observations.chat.response_text([token for piece in pieces for token in piece.token_ids])
        content, stop = _until(request.stop, written)
        calls: tuple[ToolCall, ...] = ()
        parsed, finish = None, Finish.LENGTH
        if pieces[-1].finish_reason is not FinishReason.LENGTH or stop is not None:
            found = style.parse(content, request.tools) if request.reads_calls else Final()
            parsed, finish = parsed_response(style, content, found), Finish.STOP
            self.counts["malformed"] += isinstance(found, ParseError)
            if isinstance(found, Calls):
                message = self._reader.read(content, request.tools)
                content, calls, finish = message.content, self._numbered(message.calls), Finish.TOOL_CALLS
        made = ChatResponse(secrets.token_hex(12), content, calls, finish, len(draft.prompt_ids), tuple(pieces), stop)
        return made, parsed

    def _numbered(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        first, self._num_calls = self._num_calls, self._num_calls + len(calls)
        return numbered(calls, first)


def _over() -> ApiError:
    return ApiError(403, "episode_over", "the episode is over")


@contextmanager
def _refusing(request: ChatRequest) -> Iterator[None]:
    """Messages and tools that cannot be shown to the policy are the program's error. Raises ApiError."""
    try:
        yield
    except DataError as error:
        raise refused(error, request.place(error.field)) from error
    except ConfigError as error:
        raise ApiError(400, "invalid_value", str(error)) from error


def received(response: ChatResponse) -> Message:
    """The response as a program repeats it in its next request."""
    return Message("assistant", response.content, response.calls, calls_in_content=not response.calls)


def _until(stops: Sequence[str], text: str) -> tuple[str, str | None]:
    """(the text before the first stop string, that string)"""
    found = min(((text.index(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[1])
