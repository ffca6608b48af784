"""Responses that come back without their thoughts, or with them elsewhere, are the recorded ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.toolrl.envs.agent.play import CALL, WEATHER, ScriptedPolicy, ask, check_exact, observations, session, user
from toolrl.envs.agent.agent import AgentFactory
from toolrl.envs.agent.api.chat import read_chat
from toolrl.envs.agent.api.messages import read_anthropic
from toolrl.envs.agent.api.responses import read_responses
from toolrl.envs.agent.requests import ApiError, ChatRequest, ChatResponse
from toolrl.envs.agent.session import Session, received
from toolrl.envs.agent.thoughts import OnThoughts
from verl.errors import ConfigError
from verl.types import Message

HELLO = user("Hello")
THOUGHT = "\nIt  may rain.\n"
RESPONSE = f"<think>{THOUGHT}</think>\n\nI look.\n{CALL}"
CALLED = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "-3"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": dict(WEATHER.parameters)}}]

# How programs repeat the response `RESPONSE`
REPEATED: Mapping[str, Mapping[str, Any]] = {
    "without": {"content": "I look."},
    "LiteLLM": {"content": "\n\nI look.", "reasoning_content": THOUGHT},
    "another white space": {"content": "<think>\nIt  may rain.\n</think>\nI look.\n"},
    "stripped": {"content": "I look.", "reasoning_content": "It  may rain."},
    "vLLM": {"content": "I look.", "reasoning": THOUGHT},
    "Ollama": {"content": "I look.", "thinking": "It  may rain."},
    "Anthropic": {"content": "I look.", "thinking_blocks": [{"type": "thinking", "thinking": THOUGHT}]},
    "OpenRouter": {"content": "I look.", "reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}]},
    "twice": {"content": "I look.", "reasoning": THOUGHT, "reasoning_content": THOUGHT},
    "beside the content": {"content": RESPONSE.removesuffix(CALL), "reasoning_content": THOUGHT},
}


def as_chat(**assistant: Any) -> ChatRequest:
    """The second request of a program, with the response as it repeats it."""
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "tool_calls": [CALLED], **assistant}, RESULT]
    return read_chat({"messages": history, "tools": TOOLS})


async def go_on(made: Session, request: ChatRequest) -> ChatResponse:
    first = await ask(made, HELLO, tools=request.tools)
    assert first.content.startswith("<think>")
    exchange = made.exchange(request, b"second", False)
    return await made.response(exchange)


@pytest.mark.parametrize("style", ["hermes", "toolrl"])
@pytest.mark.parametrize("how", REPEATED)
async def test_a_response_with_its_thoughts_elsewhere_or_nowhere_is_the_recorded_one(how: str, style: str) -> None:
    text = RESPONSE if style == "hermes" else RESPONSE.replace('"arguments"', '"parameters"')
    made, policy = session(text, "Cold.", observations=observations(style))
    await go_on(made, as_chat(**REPEATED[how]))
    (segment,) = made.ledger.segments
    assert len(segment.turns) == 2 and policy.saw[1][0][: len(policy.saw[0][0])] == policy.saw[0][0]
    assert made.rewriting() == ""
    check_exact(made, policy)


@pytest.mark.parametrize(
    "changed",
    [
        {"content": "I look.", "reasoning_content": "It will not rain."},
        {"content": "I look", "reasoning_content": THOUGHT},
        {"content": "<think>Other</think>I look."},
        {"content": "I look.", "tool_calls": [{**CALLED, "function": {"name": "weather", "arguments": "{}"}}]},
    ],
)
async def test_another_thought_text_or_call_is_an_edit(changed: Mapping[str, Any]) -> None:
    own = observations("toolrl")
    made, policy = session(RESPONSE.replace('"arguments"', '"parameters"'), "Cold.", observations=own)
    await go_on(made, as_chat(**changed))
    assert [len(segment.turns) for segment in made.ledger.segments] == [1, 1]
    check_exact(made, policy)


async def test_anthropics_blocks_of_thinking_are_the_recorded_thoughts() -> None:
    tool = {"name": "weather", "input_schema": dict(WEATHER.parameters)}
    blocks = [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call00000", "name": "weather", "input": {"city": "Oslo"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "call00000", "content": "-3"}
    history = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    made, policy = session(RESPONSE, "Cold.")
    await go_on(made, read_anthropic({"messages": history, "tools": [tool], "max_tokens": 9}))
    assert [len(segment.turns) for segment in made.ledger.segments] == [2]
    check_exact(made, policy)


@pytest.mark.parametrize("text", [[], [{"type": "output_text", "text": "I look.", "annotations": []}]])
@pytest.mark.parametrize("kind", ["content", "summary", None])
async def test_items_of_reasoning_are_the_recorded_thoughts(kind: str | None, text: list[Any]) -> None:
    part = {"type": f"{'summary' if kind == 'summary' else 'reasoning'}_text", "text": THOUGHT}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], **({kind: [part]} if kind else {})}
    message = [{"type": "message", "role": "assistant", "content": text}] if text else []
    call = {"type": "function_call", "call_id": "call00000", "name": "weather", "arguments": '{"city": "Oslo"}'}
    result = {"type": "function_call_output", "call_id": "call00000", "output": "-3"}
    items = [{"role": "user", "content": "Hello"}, reasoning, *message, call, result]
    tools = [{"type": "function", "name": "weather", "parameters": dict(WEATHER.parameters)}]
    made, policy = session(RESPONSE if text else RESPONSE.replace("I look.\n", ""), "Cold.")
    await go_on(made, read_responses({"input": items, "tools": tools}))
    assert [len(segment.turns) for segment in made.ledger.segments] == [2]
    check_exact(made, policy)


async def test_call_ids_distinguish_equal_responses_without_thoughts() -> None:
    made, policy = await _two_alike(f"\n{CALL}")
    for answer in reversed(policy.answers):
        repeated = replace(received(answer), content="")
        result = Message("tool", "-3", tool_call_id=answer.calls[0].id)
        await ask(made, HELLO, repeated, result, tools=(WEATHER,))
        continued = made.ledger.segments[made.ledger.turns[-1].segment]
        assert continued.turns[0].message.content.startswith(answer.content)
    assert [len(segment.turns) for segment in made.ledger.segments] == [2, 2]
    assert made.rewriting() == ""
    check_exact(made, policy)


async def test_an_ambiguous_history_stays_as_the_program_sent_it() -> None:
    made, policy = await _two_alike("Yes.")
    history = (HELLO, Message("assistant", "Yes."), user("Sure?"))
    await ask(made, *history, tools=(WEATHER,))
    assert policy.saw[2][0] == policy.observations.chat.prompt_ids(history, (WEATHER,))
    assert [len(segment.turns) for segment in made.ledger.segments] == [1, 1, 1]
    check_exact(made, policy)


class _Policy(ScriptedPolicy):
    answers: list[ChatResponse]


async def _two_alike(text: str) -> tuple[Session, Any]:
    """Two parallel requests, whose responses differ in their thoughts alone."""
    started = asyncio.Barrier(2)

    async def both() -> None:
        if len(policy.saw) <= 2:
            await started.wait()

    made, policy = session(f"<think>a</think>{text}", f"<think>b</think>{text}", *["Yes."] * 3, wait=both)
    policy.answers = await asyncio.gather(*(ask(made, HELLO, tools=(WEATHER,)) for _ in range(2)))  # type: ignore[attr-defined]
    return made, policy


@pytest.mark.parametrize("how", ["dropped", "changed"])
async def test_a_changed_history_has_a_reason(how: str) -> None:
    policy = ScriptedPolicy(iter(["<think>a</think>One.", "<think>b</think>Two.", "Three."]))
    made = Session(policy, on_thoughts=OnThoughts.OMIT)
    history: tuple[Message, ...] = (HELLO,)
    for text in ("One.", "Two.", "Three."):
        await ask(made, *history)
        history = (*history, Message("assistant", text if how == "dropped" else text[:2]), user("Go on"))
    assert len(made.ledger.segments) == 3
    reason = "drops thoughts, which env.options.on_thoughts=restore puts back; send every assistant message back"
    assert made.rewriting().startswith(reason if how == "dropped" else "changes the responses that it repeats")
    check_exact(made, policy)


async def test_a_run_logs_dropped_thoughts_once(caplog: pytest.LogCaptureFixture) -> None:
    factory = AgentFactory(command="true", on_thoughts="omit")
    for _ in range(2):
        made = Session(ScriptedPolicy(iter(["<think>a</think>One.", "Two."])), on_thoughts=factory.on_thoughts)
        await ask(made, HELLO)
        await ask(made, HELLO, Message("assistant", "One."), user("Go on"))
        factory.note_rewriting(made)
    (line,) = caplog.messages
    assert line.startswith("segments/requests = 1: the program drops thoughts, ")


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.options\.on_thoughts must be restore or omit, got 'keep'"):
        AgentFactory(command="true", on_thoughts="keep")


async def test_a_program_with_sub_agents_of_one_request_each_is_no_such_program() -> None:
    made, _ = session("one", "two")
    for text in ("Do this", "Do that"):
        await ask(made, user(text))
    assert len(made.ledger.segments) == 2 and made.rewriting() == ""


async def test_thoughts_of_another_model_are_written_where_a_prompt_of_its_own_has_them() -> None:
    """Not where the chat template lists the tools, which may show the field or not."""
    example = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    history = [{"role": "user", "content": "a"}, example, {"role": "user", "content": "b"}]
    request = read_chat({"messages": history, "tools": TOOLS})
    made, policy = session("c", observations=observations("toolrl"))
    await made.response(made.exchange(request, b"", False))
    assert "<think>Hm.</think>Yes." in policy.observations.chat.tokenizer.decode(policy.saw[0][0])
    other, _ = session("c")
    with pytest.raises(ApiError, match=r"messages\[1\].reasoning_content is dropped by the chat template"):
        await other.response(other.exchange(request, b"", False))
