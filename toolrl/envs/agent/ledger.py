"""The token ledger of an agent's episode: what a request shows the policy is exactly what is trained, token by token.

A request carries a whole conversation. If it continues one of the ledger's segments, only its new messages are
tokenized, and appended; the policy's own tokens stay as they were sampled. Any other conversation (context compaction,
an edited message, a sub-agent, a parallel call) opens a new segment, rendered from its messages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from toolrl.envs.agent.thoughts import OnThoughts, in_fields, is_response, with_content
from verl.chat.observations import ObservationTokenizer
from verl.envs.base import Observation
from verl.errors import ConfigError, DataError, VerlError
from verl.formats.history import with_calls_written
from verl.formats.toolrl_text import THINK, THINK_END
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
    last: Draft | None = None  # the last turn's


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
        """True for the first request of its segment."""
        return self.place == 0


@dataclass(frozen=True, eq=False)
class Place:
    """A request's place in the ledger. segment: the one it continues; None: it opens one

    messages: with its responses as the policy wrote them; context: the tokens of what is new
    rewrites, drops_thoughts: see `Ledger`
    """

    segment: Segment | None
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    context: array[int]
    rewrites: bool
    drops_thoughts: bool


Candidate = tuple[Segment, tuple[Message, ...]]  # a segment, and the messages that continue it


class Ledger:
    """Append-only, but for responses that never reached the program (`drop`)."""

    def __init__(self, observations: ObservationTokenizer, on_thoughts: OnThoughts = OnThoughts.RESTORE) -> None:
        """observations: its limit on observations is not applied, because the program decides what it shows"""
        self._observations = observations.untruncated  # one object per group, whose episodes share their prompts
        self._on_thoughts = on_thoughts
        self._segments: list[Segment] = []
        self._thoughtful: list[Message] = []  # responses with thoughts, as the program received them
        self.rewritten = 0  # segments that begin with a history, although earlier responses could be repeated
        self.drops_thoughts = False  # whether one of these histories has a response without its thoughts
        self._order: list[tuple[Segment, int]] = []  # the turns as they were completed

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Place:
        """The place of these messages, with the tokens to send; in any thread, while no other request is placed.

        Raises DataError for messages that cannot be shown in full, ConfigError for tools that would not be listed.
        """
        messages, tools = self._as_sent(messages), tuple(tools)
        segment, messages, context = self._find_continued(messages, tools)
        repeats = segment is None and self._has_history(messages)
        thoughts = tuple(self._thoughtful) if repeats else ()
        drops = any(is_response(a, b, thoughtless=True) for a in thoughts for b in messages)
        return Place(segment, messages, tools, context, repeats, drops)

    def place(self, place: Place) -> Draft:
        """The segment that the messages continue, or a new one. `append` or `release` it."""
        segment, messages, context = place.segment, place.messages, place.context
        if segment is not None:
            return self._draft(segment, messages, messages[len(segment.messages) :], context)
        self.rewritten += place.rewrites
        self.drops_thoughts |= place.drops_thoughts
        segment = Segment(messages, place.tools, len(context), messages)
        self._segments.append(segment)
        return self._draft(segment, messages, messages, context)

    def num_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> int:
        """Number of tokens that such a request would show the policy. Raises like `place`."""
        segment, _, context = self._find_continued(self._as_sent(messages), tuple(tools))
        return len(context) + (0 if segment is None else len(segment.token_ids))

    def _find_continued(
        self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
    ) -> tuple[Segment | None, tuple[Message, ...], array[int]]:
        """(the segment that the messages continue, the messages with its responses, the tokens of what is new);
        (None, the messages, all tokens) without one."""
        for segment, repeated in self._candidates(messages, tools):
            try:
                named = _with_tool_names(segment.messages, repeated[len(segment.messages) :])
                new = array("i", self._observations.answer_ids(named, segment.written, segment.ended))
                return segment, repeated, new
            except ConfigError:  # the chat template writes such messages only in front of the first response
                break
        ids = self._observations.prompt_ids(Observation(_with_tool_names((), messages), tools))
        return None, messages, ids if isinstance(ids, array) else array("i", ids)

    def _as_sent(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with thoughts where the policy wrote them: SDKs put them into fields, or in other white space.

        Those of other models stay in their fields if the chat template may show these.
        """
        return tuple(self._with_thoughts(each) if each.role == "assistant" else each for each in messages)

    def _with_thoughts(self, message: Message) -> Message:
        beside = in_fields(message)
        if not beside and THINK not in message.content:
            return message
        for known in reversed(self._thoughtful):
            if is_response(known, message):
                return with_content(message, known.content)
        is_written = THINK_END in message.content or len(set(beside)) != 1
        if is_written or self._observations.tool_call_format.template_tools:
            return message
        return with_content(message, f"{THINK}{beside[0]}{THINK_END}{message.content}")

    def _has_history(self, messages: Sequence[Message]) -> bool:
        """Whether a program begins a segment with responses, in place of continuing one."""
        num_responses = sum(each.role == "assistant" for each in messages)
        return bool(self._order) and num_responses > sum(each.role == "assistant" for each in self.opening)

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

    def _candidates(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> list[Candidate]:
        """The segments that the messages continue: they know all up to the last response.

        Responses without their thoughts count if the calls' ids, or else their text, are those of one response alone.
        """
        length = max((number for number, each in enumerate(messages, 1) if each.role == "assistant"), default=0)
        fitting = [
            segment
            for segment in tuple(self._segments)  # the event loop may remove one meanwhile
            if segment.turns and not segment.busy and segment.tools == tools
            if 0 < len(segment.messages) == length < len(messages)
        ]

        def repeated(candidates: Iterable[Candidate]) -> list[Candidate]:
            return [each for each in candidates if self._is_repeated(each[0].messages, each[1][:length], tools)]

        exact = repeated((segment, messages) for segment in fitting)
        if exact or self._on_thoughts is OnThoughts.OMIT:
            return exact
        restored = repeated((segment, _restore(segment.messages, messages)) for segment in fitting)
        by_id = [each for each in restored if _call_ids(each[0].messages) == _call_ids(messages) != []]
        matching = by_id or restored
        return matching if all(_texts(each[1]) == _texts(matching[0][1]) for each in matching) else []

    def _is_repeated(self, known: Sequence[Message], sent: Sequence[Message], tools: Sequence[ToolSpec]) -> bool:
        """Whether a program has repeated the known messages: equal ones, or others that are rendered alike.

        So `name` or another id changes nothing if no chat template shows it. The policy's text and calls must be equal
        in any case, because templates drop parts of earlier responses.
        """
        pairs = [(a, b) for a, b in zip(known, sent, strict=True) if a != b]
        changed = [(_without_spaces(a), _without_spaces(b)) for a, b in pairs]
        if all(a == b for a, b in changed):
            return True
        if any(_own(a) != _own(b) for a, b in changed):
            return False
        with suppress(DataError, ConfigError):
            return self._text(known, tools) == self._text(sent, tools)
        return False

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """The messages as rendered at the start of an episode."""
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
        if draft.messages and THINK_END in received.content:
            self._thoughtful.append(received)
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
        """Segments with turns, ordered by their first turn."""
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


def _restore(known: Sequence[Message], sent: Sequence[Message]) -> tuple[Message, ...]:
    """The sent messages with the thoughts of known ones that they repeat without them, place by place."""
    pairs = zip(known, sent, strict=False)
    again = [with_content(b, a.content) if is_response(a, b, thoughtless=True) else b for a, b in pairs]
    return (*again, *sent[len(known) :])


def _call_ids(messages: Sequence[Message]) -> list[str | None]:
    return [call.id for message in messages for call in message.tool_calls]


def _texts(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages]


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
