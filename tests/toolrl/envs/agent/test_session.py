"""Requests of an agent become turns: what the policy saw is what is trained, whatever the program does."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toolrl.benchmarks.runner.eval_play import chat
from tests.toolrl.envs.agent.play import (
    CALL,
    WEATHER,
    ScriptedPolicy,
    answered,
    ask,
    check_exact,
    lost,
    observations,
    placed,
    session,
    tokens,
    user,
)
from toolrl.envs.agent.launcher import episode_folder
from toolrl.envs.agent.ledger import Ledger, LedgerError
from toolrl.envs.agent.requests import ApiError, ChatRequest, Finish
from toolrl.envs.agent.session import Session
from verl.chat.observations import SharedPrompt
from verl.errors import ServiceDownError
from verl.types import Completion, Message, StopReason, ToolCall

HELLO = user("Hello")


async def test_a_conversation_that_continues_is_one_segment_whose_new_messages_alone_are_tokenized() -> None:
    made, policy = session(CALL, "It is cold.")
    first = await ask(made, HELLO, tools=(WEATHER,))
    assert first.calls == (ToolCall("weather", {"city": "Oslo"}, "call00000"),)
    assert (first.content, first.finish) == ("", Finish.TOOL_CALLS)
    result = Message("tool", "-3", tool_call_id="call00000")
    second = await ask(made, *answered(HELLO, by=first), result, tools=(WEATHER,))
    assert (second.content, second.finish) == ("It is cold.", Finish.STOP)
    (segment,) = made.ledger.segments
    observed = policy.observations.answer_ids((replace(result, tool="weather"),), CALL, True)
    assert tuple(segment.turns[1].context_ids) == observed
    assert tokens(segment) == (*policy.saw[1][0], *policy.completions[1].token_ids)
    assert policy.saw[1][0] == (*policy.saw[0][0], *policy.completions[0].token_ids, *observed)
    assert made.ledger.turns[0].responses == (result,) and made.ledger.opening == (HELLO,)
    check_exact(made, policy)


def test_the_episodes_of_a_group_share_the_tokens_of_their_prompt() -> None:
    own = observations()
    group = SharedPrompt(own.chat, own.tool_call_format, own.max_observation_tokens)
    first, second = (placed(Ledger(group), HELLO) for _ in range(2))
    assert first.context_ids is second.context_ids and len(first.context_ids) > 0


async def test_the_ledger_keeps_the_sampled_tokens_where_the_text_would_be_tokenized_otherwise() -> None:
    made, policy = session("ab", "c")
    a, b = (chat().response_ids(text)[0] for text in "ab")

    async def spelled(*_: object) -> Completion:  # two tokens that the tokenizer would never write for this text
        policy.saw.append((tuple(_[0]), ()))  # type: ignore[arg-type]
        policy.completions.append(Completion((*a, *b), (-1.0,) * len((*a, *b)), "stop", len(policy.saw)))  # type: ignore[arg-type]
        return policy.completions[-1]

    policy.generate = spelled  # type: ignore[method-assign]
    first = await ask(made, HELLO)
    await ask(made, *answered(HELLO, by=first), user("go on"))
    (segment,) = made.ledger.segments
    assert tokens(segment)[len(policy.saw[0][0]) :][: len((*a, *b))] == (*a, *b)
    check_exact(made, policy)


@pytest.mark.parametrize(
    "changed",
    [
        lambda messages: (user("A summary"), *messages[2:]),  # context compaction
        lambda messages: (user("Hello!"), *messages[1:]),  # an edited message
        lambda messages: (messages[0], Message("assistant", "other text"), *messages[2:]),
        lambda messages: (messages[0], *messages[2:]),
    ],
)
async def test_a_changed_history_opens_a_segment_with_its_whole_context(
    changed: Callable[[tuple[Message, ...]], tuple[Message, ...]],
) -> None:
    made, policy = session("one", "two", "three")
    first = await ask(made, HELLO)
    history = (*answered(HELLO, by=first), user("go on"))
    await ask(made, *changed(history))
    original, new = made.ledger.segments
    assert len(original.turns) == len(new.turns) == 1
    assert policy.saw[1][0] == chat().prompt_ids(changed(history)) == tuple(new.turns[0].context_ids)
    await ask(made, *history)  # the original can still be continued
    assert len(original.turns) == 2 and [turn.segment for turn in made.ledger.turns] == [0, 1, 0]
    check_exact(made, policy)


TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "FIELDS{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMED = {"name": "Ada"}
RENAMED: dict[str, Callable[[tuple[Message, ...]], tuple[Message, ...]]] = {
    "a user's name": lambda messages: (replace(messages[0], template_fields=NAMED), *messages[1:]),
    "the policy's name": lambda messages: (
        messages[0],
        replace(messages[1], content=f" {messages[1].content}", template_fields=NAMED),
        *messages[2:],
    ),
    "the tool's name": lambda messages: (*messages[:2], replace(messages[2], tool="weather"), *messages[3:]),
    "other ids": lambda messages: (
        messages[0],
        replace(messages[1], tool_calls=tuple(replace(call, id="mine") for call in messages[1].tool_calls)),
        replace(messages[2], tool_call_id="mine"),
        *messages[3:],
    ),
}


@pytest.mark.parametrize("shows_names", [False, True])
@pytest.mark.parametrize("what", RENAMED)
async def test_fields_that_no_chat_template_shows_open_no_segment(what: str, shows_names: bool) -> None:
    own = observations()
    tokenizer = deepcopy(own.chat.tokenizer)
    shown = "{{ m.name }}{{ m.tool_call_id }}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}" if shows_names else ""
    tokenizer.chat_template = TEMPLATE.replace("FIELDS", shown)
    own = replace(own, chat=replace(own.chat, tokenizer=tokenizer))
    made, policy = session(CALL, "cold", "yes", observations=own)
    first = await ask(made, HELLO, tools=(WEATHER,))
    history = (*answered(HELLO, by=first), Message("tool", "-3", tool_call_id="call00000"))
    second = await ask(made, *history, tools=(WEATHER,))
    await ask(made, *RENAMED[what](answered(*history, by=second)), user("Sure?"), tools=(WEATHER,))
    is_shown = shows_names and what != "the tool's name"  # which the ledger knows by the call
    assert [len(each.turns) for each in made.ledger.segments] == ([2, 1] if is_shown else [3])
    check_exact(made, policy)


async def test_counted_tokens_are_those_that_the_policy_sees() -> None:
    made, policy = session("one", "two", "three")
    counted = [await made.count_tokens(ChatRequest((HELLO,)))]
    first = await ask(made, HELLO)
    for history in ((*answered(HELLO, by=first), user("go on")), (user("A summary"),)):
        counted.append(await made.count_tokens(ChatRequest(history)))
        await ask(made, *history)
    assert counted == [len(ids) for ids, _ in policy.saw] and made.counts["requests"] == 3
    with pytest.raises(ApiError, match="dropped"):
        await made.count_tokens(ChatRequest((replace(HELLO, template_fields=NAMED),)))


async def test_other_tools_open_a_segment() -> None:
    made, policy = session("one", "two")
    first = await ask(made, HELLO)
    await ask(made, *answered(HELLO, by=first), user("go on"), tools=(WEATHER,))
    assert len(made.ledger.segments) == 2
    check_exact(made, policy)


async def test_parallel_requests_with_one_history_are_two_segments_and_interleaved_sub_agents_keep_theirs() -> None:
    started = asyncio.Barrier(2)
    made, policy = session("one", "two", "three", "four", wait=lambda: started.wait())  # type: ignore[return-value]
    pair = await asyncio.gather(ask(made, HELLO), ask(made, HELLO))
    assert {each.content for each in pair} == {"one", "two"}
    histories = [(*answered(HELLO, by=each), user(f"go on from {each.content}")) for each in pair]
    await asyncio.gather(*(ask(made, *history) for history in histories))
    assert [len(segment.turns) for segment in made.ledger.segments] == [2, 2]
    check_exact(made, policy)


async def test_a_retry_gets_the_recorded_response() -> None:
    made, policy = session("one", "two")
    first, again = await ask(made, HELLO), await ask(made, HELLO, retried=True)
    assert again is first and len(policy.saw) == 1 and made.counts["retries"] == 1
    assert (await ask(made, HELLO)).content == "two"  # no retry: the program samples once more
    assert [len(segment.turns) for segment in made.ledger.segments] == [1, 1]


@pytest.mark.parametrize("gone", [0, 1])
async def test_the_retry_of_one_of_two_equal_requests_gets_the_response_of_the_client_that_went_away(gone: int) -> None:
    go_on = asyncio.Event()
    made, _ = session("one", "two", wait=lambda: go_on.wait())  # type: ignore[return-value]
    pair, clients = [], []
    for _ in range(2):
        pair.append(made.exchange(ChatRequest((HELLO,)), b"body", False))
        clients.append(made.connected(pair[-1]))
    assert pair[0] is not pair[1]  # no time passes between them
    await asyncio.sleep(0)
    clients[gone].cancel()
    await asyncio.wait([clients[gone]])
    assert made.exchange(ChatRequest((HELLO,)), b"body", True) is pair[gone]
    go_on.set()
    await clients[not gone]
    pair[not gone].delivered = True
    for each in pair:
        each.waiting += 1  # as if the loss were not noticed
    assert made.exchange(ChatRequest((HELLO,)), b"body", True) is pair[gone]


async def test_a_request_after_a_lost_connection_gets_the_response_of_the_first() -> None:
    made, policy = session("one")
    await lost(made, HELLO)
    assert (await ask(made, HELLO)).content == "one"
    await made.close()
    assert len(policy.saw) == len(made.ledger.turns) == 1 and made.counts["undelivered"] == 0


async def test_a_response_that_never_arrived_is_not_trained() -> None:
    made, policy = session("one", "two")
    first = await ask(made, HELLO)
    await lost(made, *answered(HELLO, by=first), user("go on"))
    while len(made.ledger.turns) < 2:
        await asyncio.sleep(0)
    assert len(policy.completions) == 2
    await made.close()
    (turn,) = made.ledger.turns
    assert turn.completion == policy.completions[0] and turn.responses == () and made.counts["undelivered"] == 1


async def test_stop_strings_and_max_tokens_of_a_request_are_honored() -> None:
    made, policy = session("one END two", "one two three", "four")
    stopped = await ask(made, HELLO, stop=("END",))
    assert (stopped.content, stopped.stop, stopped.finish) == ("one ", "END", Finish.STOP)
    assert "two" not in chat().tokenizer.decode(policy.completions[0].token_ids)
    cut = await ask(made, *answered(HELLO, by=stopped), user("go on"), max_tokens=2)
    assert (cut.completion_tokens, cut.finish) == (2, Finish.LENGTH)
    assert made.ledger.turns[-1].parsed is None
    before = (HELLO, *answered(HELLO, by=stopped)[1:], user("go on"))
    await ask(made, *answered(*before, by=cut), user("and on"))
    (segment,) = made.ledger.segments  # a cut response is continued: its turn is ended for it
    assert segment.turns[1].context_ids[0] == segment.turns[2].context_ids[0] == chat().end_token_id
    check_exact(made, policy)


async def test_limits_are_errors_for_the_program() -> None:
    made, _ = session("one", max_turns=1)
    first = await ask(made, HELLO)
    with pytest.raises(ApiError, match=r"env.max_turns=1 requests") as refused:
        await ask(made, *answered(HELLO, by=first), user("go on"))
    assert (refused.value.code, made.limit) == ("max_turns", StopReason.MAX_TURNS)
    made, policy = session("one", longest=3)
    with pytest.raises(ApiError, match="no room") as refused:
        await ask(made, HELLO)
    assert (refused.value.code, made.limit) == ("context_length_exceeded", StopReason.LENGTH)
    assert not policy.saw and not made.ledger.turns
    await made.close()
    with pytest.raises(ApiError, match="over"):
        await ask(made, HELLO)


async def test_a_shortened_conversation_is_at_no_limit_and_a_response_of_all_that_fits_is_cut() -> None:
    made, policy = session("one", "two " * 50, longest=60)
    with pytest.raises(ApiError, match="no room"):
        await ask(made, user("word " * 100))
    assert made.limit is StopReason.LENGTH
    await ask(made, HELLO)
    assert made.limit is None and not made.cut
    assert (await ask(made, user("a"), max_tokens=2)).finish is Finish.LENGTH
    assert not made.cut  # the program asked for no more
    policy.texts = iter(["two " * 50])
    assert (await ask(made, user("b"))).finish is Finish.LENGTH
    assert made.cut
    await made.close()


@pytest.mark.parametrize("running", [False, True])
async def test_a_request_during_the_end_of_the_episode_is_refused(running: bool) -> None:
    made, _ = session("one", wait=asyncio.Event().wait)  # type: ignore[arg-type]
    exchange = made.exchange(ChatRequest((HELLO,)), b"body", False)
    waiting = made.connected(exchange)
    await asyncio.sleep(0.01 * running)
    await made.close()
    with pytest.raises(ApiError, match="the episode is over"):
        await waiting
    assert exchange.decided.is_set()


async def test_a_response_that_was_asked_for_before_a_limit_does_not_lift_it() -> None:
    go_on = asyncio.Event()
    made, policy = session("one", "two", longest=60, wait=lambda: go_on.wait())  # type: ignore[return-value]
    before = asyncio.ensure_future(ask(made, HELLO))
    while not policy.saw:
        await asyncio.sleep(0)
    with pytest.raises(ApiError, match="no room"):
        await ask(made, user("word " * 100))
    go_on.set()
    assert (await before).content == "one" and made.limit is StopReason.LENGTH
    await ask(made, user("a"))
    assert made.limit is None


async def test_a_call_is_read_only_where_tools_are_offered() -> None:
    made, _ = session(CALL, "<tool_call>\nnothing", CALL)
    plain = await ask(made, HELLO, tools=(WEATHER,), reads_calls=False)
    assert (plain.content, plain.calls, plain.finish) == (CALL, (), Finish.STOP)
    malformed = await ask(made, HELLO, tools=(WEATHER,))
    assert malformed.content == "<tool_call>\nnothing" and made.counts["malformed"] == 1
    called = await ask(made, user("Again"), tools=(WEATHER,))
    assert [call.id for call in called.calls] == ["call00000"]


@pytest.mark.parametrize("max_turns", [1, 2, 3])
async def test_pauses_count_against_the_limit_on_requests(max_turns: int) -> None:
    style = observations("tags", calls_in_thoughts=False)
    made, policy = session(*["<think> </code>"] * 9, observations=style, max_turns=max_turns)
    response = await ask(made, HELLO, tools=(WEATHER,))
    assert len(policy.saw) == max_turns and response.content.count("</code>") == max_turns
    with pytest.raises(ApiError, match="are used up"):
        await ask(made, *answered(HELLO, by=response), user("go on"), tools=(WEATHER,))


async def test_a_pausing_format_continues_until_it_calls() -> None:
    style = observations("tags", calls_in_thoughts=False)
    made, policy = session("<think> <code></code>", "</think><code>1</code>", "done", observations=style)
    called = await ask(made, HELLO, tools=(WEATHER,))
    assert [call.arguments for call in called.calls] == [{"code": "1"}]
    assert [len(turn.context_ids) > 0 for turn in made.ledger.turns] == [True, False]
    history = answered(HELLO, by=called)
    await ask(made, *history, Message("tool", "1", tool_call_id="call00000"), tools=(WEATHER,))
    check_exact(made, policy)
    assert len(made.ledger.segments) == 1


async def test_a_lost_engine_fails_the_session() -> None:
    made, policy = session()

    async def fail(*_: object) -> Completion:
        raise ServiceDownError("the rollout engine", "aborted a response")

    policy.generate = fail  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="aborted") as refused:
        await ask(made, HELLO)
    assert refused.value.status == 503 and isinstance(made.failure.exception(), ServiceDownError)


async def test_folders_of_episodes_are_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tempfile.gettempdir()  # which the process remembers
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with episode_folder() as folder:
        assert folder.parent == tmp_path
    assert not list(tmp_path.iterdir())


async def test_the_ledger_refuses_a_response_to_other_tokens() -> None:
    made, _ = session("one")
    await ask(made, HELLO)
    (segment,) = made.ledger.segments
    first = placed(made.ledger, user("Other"))
    foreign = replace(first, segment=segment)
    with pytest.raises(LedgerError, match="does not continue"):
        made.ledger.append(foreign, segment.turns[0:0] or [segment.turns[0].completion], HELLO, None)


class Program:
    """A program whose steps hypothesis chooses: each acts on one of its conversations."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.histories: list[tuple[Message, ...]] = [(HELLO,)]

    async def step(self, action: str, place: int) -> None:
        place %= len(self.histories)
        history = self.histories[place]
        if action == "branch":
            self.histories.append(history)
        elif action == "edit":
            self.histories[place] = (user(f"{history[0].content}?"), *history[1:])
        elif action == "compact":
            self.histories[place] = (user("A summary"),)
        elif action == "rename":
            self.histories[place] = tuple(replace(each, template_fields=NAMED) for each in history)
        elif action == "lose":
            await lost(self.session, *history)
        else:
            try:
                response = await ask(self.session, *history, retried=action == "retry")
            except ApiError as refused:  # a new segment, of which the chat template would drop the names
                assert "name" in refused.problem and any(each.template_fields for each in history)
                self.histories[place] = tuple(replace(each, template_fields={}) for each in history)
                return
            if action == "retry":
                assert response == await ask(self.session, *history, retried=True)
            more = Message("assistant", f" {response.content}\n") if action == "strip" else answered(by=response)[0]
            self.histories[place] = (*history, more, user("go on"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "strip", "retry", "branch", "edit", "compact", "lose", "rename"]),
            st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_for_any_program_the_trained_tokens_are_those_the_policy_saw(actions: list[tuple[str, int]]) -> None:
    async def test() -> None:
        policy = ScriptedPolicy(cycle(["one", "two terms", "<think>three"]))
        program = Program(Session(policy))
        for action, place in actions:
            await program.step(action, place)
        await asyncio.sleep(0)
        check_exact(program.session, policy)
        before = program.session.ledger.turns
        await program.session.close()
        kept = program.session.ledger.turns
        assert len(before) - len(kept) == program.session.counts["undelivered"]
        assert {id(turn.completion) for turn in kept} <= {id(turn.completion) for turn in before}

    asyncio.run(test())
