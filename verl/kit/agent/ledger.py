"""The token ledger of an agent's episode: what a request shows the policy is exactly what is trained, token by token.

A request carries a whole conversation. If it continues one of the ledger's segments, only its new messages are
tokenized, and appended; the policy's own tokens stay as they were sampled. Any other conversation (context compaction,
an edited message, a sub-agent, a parallel call) opens a new segment, rendered from its messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from verl.chat.observations import ObservationTokenizer
from verl.envs.base import Observation
from verl.errors import ConfigError, DataError, VerlError
from verl.formats.history import with_calls_written
from verl.types import Completion, Message, ParsedResponse, ToolSpec, Turn


class LedgerError(VerlError):
    """Tokens would be trained in another context than the one in which they were sampled: an internal error."""


@dataclass(eq=False)
class Segment:
    """Turns of which each continues the one before; a training sample.

    opening: the messages of its first request; prompt_length: their tokens
    messages: the conversation that the tokens stand for, with the responses as the program received them
    busy: a request is in flight
    """

    opening: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    prompt_length: int
    messages: tuple[Message, ...]  # empty if its requests are tokens
    turns: list[Turn] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    written: str = ""  # the policy's text since the last context
    ended: bool = True  # whether the policy ended its turn
    busy: bool = False
    last: Draft | None = None  # of the last turn


@dataclass(frozen=True, eq=False)
class Draft:
    """A request on its way to the engine.

    messages: the whole conversation; added: what is new in it
    prompt_ids: all tokens; context_ids: the new ones
    place: number of turns before it in its segment
    """

    segment: Segment
    messages: tuple[Message, ...]
    added: tuple[Message, ...]
    context_ids: array[int]
    prompt_ids: array[int]
    place: int

    @property
    def opens(self) -> bool:
        """Whether it is the first request of its segment."""
        return self.place == 0


class Ledger:
    """Append-only, but for responses that never reached the program (`drop`)."""

    def __init__(self, observations: ObservationTokenizer) -> None:
        """observations: its limit on observations is not applied, because the program decides what it shows"""
        self._observations = observations.untruncated  # one object per group, whose episodes share their prompts
        self._segments: list[Segment] = []
        self._order: list[tuple[Segment, int]] = []  # the turns as they were completed

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Draft:
        """The segment that these messages continue, or a new one, with the tokens to send. `append` or `release` it.

        Raises DataError for messages that cannot be shown in full, ConfigError for tools that would not be listed.
        """
        messages, tools = tuple(messages), tuple(tools)
        segment, context = self._continued(messages, tools)
        if segment is not None:
            return self._draft(segment, messages, messages[len(segment.messages) :], context)
        segment = Segment(messages, tools, len(context), messages)
        self._segments.append(segment)
        return self._draft(segment, messages, messages, context)

    def num_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> int:
        """Those that such a request would show the policy. Raises like `place`."""
        segment, context = self._continued(tuple(messages), tuple(tools))
        return len(context) + (0 if segment is None else len(segment.token_ids))

    def _continued(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> tuple[Segment | None, array[int]]:
        """(the segment that the messages continue, the tokens of what is new); (None, all tokens) without one."""
        for segment in self._candidates(messages, tools):
            try:
                named = _with_tool_names(segment.messages, messages[len(segment.messages) :])
                return segment, array("i", self._observations.answer_ids(named, segment.written, segment.ended))
            except ConfigError:  # the chat template writes such messages only in front of the first response
                break
        ids = self._observations.prompt_ids(Observation(_with_tool_names((), messages), tools))
        return None, ids if isinstance(ids, array) else array("i", ids)

    def place_tokens(self, token_ids: Sequence[int]) -> Draft:
        """Like `place`, for a request that is the tokens themselves. Raises DataError for an id without a token."""
        if max(token_ids) >= len(self._observations.chat.tokenizer):
            raise DataError("is not in the vocabulary", field="input_ids")
        whole = array("i", token_ids)
        for segment in sorted(self._segments, key=lambda each: -len(each.token_ids)):
            length = len(segment.token_ids)
            if segment.turns and not segment.busy and length < len(whole) and segment.token_ids == whole[:length]:
                return self._draft(segment, (), (), whole[length:])
        segment = Segment((), (), len(whole), ())
        self._segments.append(segment)
        return self._draft(segment, (), (), whole)

    def _draft(
        self, segment: Segment, messages: tuple[Message, ...], added: tuple[Message, ...], context: array[int]
    ) -> Draft:
        segment.busy = True
        return Draft(segment, messages, added, context, segment.token_ids + context, len(segment.turns))

    def _candidates(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> Iterator[Segment]:
        """The segments that the messages continue: they know all up to the last response."""
        length = max((number for number, each in enumerate(messages, 1) if each.role == "assistant"), default=0)
        for segment in self._segments:
            is_open = bool(segment.turns) and not segment.busy and segment.tools == tools
            fits = is_open and 0 < len(segment.messages) == length < len(messages)
            if fits and self._is_repeated(segment.messages, messages[:length], tools):
                yield segment

    def _is_repeated(self, known: Sequence[Message], given: Sequence[Message], tools: Sequence[ToolSpec]) -> bool:
        """Whether a program has repeated the known messages: equal ones, or others that are rendered alike.

        So `name` or another id changes nothing if no chat template shows it. The policy's text and calls must be equal
        in any case, because templates drop parts of earlier responses.
        """
        pairs = [(a, b) for a, b in zip(known, given, strict=True) if a != b]
        changed = [(_without_spaces(a), _without_spaces(b)) for a, b in pairs]
        if all(a == b for a, b in changed):
            return True
        if any(_own(a) != _own(b) for a, b in changed):
            return False
        with suppress(DataError, ConfigError):
            return self._text(known, tools) == self._text(given, tools)
        return False

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """As the policy would see the messages at the start of an episode."""
        style, chat = self._observations.tool_call_format, self._observations.chat
        named = _with_tool_names((), list(map(_without_spaces, messages)))
        if style.template_tools:
            shown, listed = style.render_prompt(named, tools), tools
        else:
            shown, listed = style.render_prompt(with_calls_written(style, named), tools), ()
        return shown if isinstance(shown, str) else chat.rendered(shown, listed)

    def append(
        self, draft: Draft, pieces: Sequence[Completion], received: Message, parsed: ParsedResponse | None
    ) -> None:
        """Record the response to a request.

        pieces: what the engine sampled, in one piece unless the format pauses; each continues all tokens before it
        received: the policy's message as the program gets it, and will repeat it
        Raises LedgerError if the draft does not continue the recorded tokens.
        """
        segment = draft.segment
        recorded = chain.from_iterable((*turn.context_ids, *turn.completion.token_ids) for turn in segment.turns)
        if array("i", chain(recorded, draft.context_ids)) != draft.prompt_ids:
            raise LedgerError("a request does not continue the recorded tokens of its segment")
        if segment.turns:
            segment.turns[-1] = replace(segment.turns[-1], responses=draft.added)
        contexts = (draft.context_ids, *(array("i") for _ in pieces[1:]))
        chat, sampled = self._observations.chat, array("i")
        for context, completion in zip(contexts, pieces, strict=True):
            message, other_end = chat.turn_of(context, completion.token_ids, sampled)
            sampled.extend(completion.token_ids)
            self._order.append((segment, len(segment.turns)))
            segment.turns.append(Turn(context, completion, message, other_end=other_end))
            segment.token_ids += context + array("i", completion.token_ids)
        calls = () if parsed is None else parsed.calls
        message = replace(segment.turns[-1].message, tool_calls=calls)
        segment.turns[-1] = replace(segment.turns[-1], message=message, parsed=parsed)
        segment.written, segment.ended = chat.response_text(sampled), chat.ended(sampled)
        segment.messages = (*draft.messages, received) if draft.messages else ()
        segment.last, segment.busy = draft, False

    def release(self, draft: Draft) -> None:
        """Give up a request that got no response; the conversation may be sent again."""
        draft.segment.busy = False
        if draft.opens:
            self._segments.remove(draft.segment)

    def drop(self, draft: Draft) -> bool:
        """Remove a response that never reached the program. Returns whether nothing continues from it."""
        segment = draft.segment
        if segment.last is not draft:
            return False
        del segment.turns[draft.place :]
        self._order = [(each, place) for each, place in self._order if each is not segment or place < draft.place]
        if segment.turns:
            segment.turns[-1] = replace(segment.turns[-1], responses=())
        return True

    @property
    def num_running(self) -> int:
        """Requests without a response so far."""
        return sum(segment.busy for segment in self._segments)

    @property
    def segments(self) -> list[Segment]:
        """Those with turns, in the order of their first ones."""
        return list(dict.fromkeys(segment for segment, _ in self._order))

    @property
    def turns(self) -> tuple[Turn, ...]:
        """In the order of their completion, each with the number of its segment."""
        number = {segment: place for place, segment in enumerate(self.segments)}
        return tuple(replace(segment.turns[place], segment=number[segment]) for segment, place in self._order)

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages of the first request; empty without one."""
        return self._order[0][0].opening if self._order else ()


def _without_spaces(message: Message) -> Message:
    """A response without white space around it and `null` for its empty text: SDKs and frameworks change both."""
    if message.role != "assistant":
        return message
    fields = {key: each for key, each in message.template_fields.items() if key != "content"}
    return replace(message, content=message.content.strip(), template_fields=fields)


def _own(message: Message) -> tuple[str, str | None, list[tuple[str, Mapping[str, Any]]]]:
    """(the role, the text of a response, its calls)"""
    calls = [(call.name, call.arguments) for call in message.tool_calls]
    return message.role, message.content if message.role == "assistant" else None, calls


def _with_tool_names(before: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with the tool's name in every result: OpenAI's API has only the id of the call."""
    calls = (call for message in (*before, *messages) for call in message.tool_calls)
    names = {call.id: call.name for call in calls if call.id is not None}
    return tuple(
        replace(message, tool=names.get(message.tool_call_id or ""))
        if message.role == "tool" and message.tool is None
        else message
        for message in messages
    )
