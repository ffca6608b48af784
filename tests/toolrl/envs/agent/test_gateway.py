"""The gateway with the official SDKs on the other side, in one event loop: four APIs, one ledger."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from pydantic import BaseModel

from tests.toolrl.benchmarks.runner.eval_play import chat
from tests.toolrl.envs.agent.play import CALL, ScriptedPolicy, check_exact, observations, session
from toolrl.envs.agent.api.chat import read_chat
from toolrl.envs.agent.api.messages import read_anthropic
from toolrl.envs.agent.api.responses import read_responses
from toolrl.envs.agent.gateway import APIS, Gateway
from toolrl.envs.agent.requests import ApiError
from toolrl.envs.agent.sampling import OnSampling, differing, honored
from toolrl.envs.agent.session import Session
from verl.rollout.engine import Sampling
from verl.types import Message, Score, StopReason

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ANSWER = "It is cold."
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
CHAT, RESPONSES, MESSAGES, GENERATE = APIS
LEAST = {CHAT: {"messages": HELLO}, RESPONSES: {"input": "Hello"}, MESSAGES: {"messages": HELLO}}
LEAST[GENERATE] = {"input_ids": [5]}


@dataclass
class Open:
    """A session behind a running gateway."""

    gateway: Gateway
    session: Session
    policy: ScriptedPolicy

    @property
    def url(self) -> str:
        return self.gateway.url(self.session)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """Responses have to fit the SDK's models, of which it tolerates gaps by default."""
        strict: Any = {"_strict_response_validation": True, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.session.key, **strict)

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        strict: Any = {"_strict_response_validation": True, **options}
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.session.key, **strict)

    def plain(self) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.session.key}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=60)


@asynccontextmanager
async def opened(*texts: str, **options: Any) -> AsyncIterator[Open]:
    gateway = Gateway()
    await gateway.start()
    made, policy = session(*texts, **options)
    try:
        with gateway.serving(made):
            yield Open(gateway, made, policy)
    finally:
        await made.close()
        await gateway.close()


async def chat_loop(door: Open, stream: bool) -> str | None:
    """A tool loop of two requests, as its documentation writes it; returns the answer."""
    client, messages = door.openai(), [{"role": "user", "content": "How is Oslo?"}]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    while True:
        if stream:
            options = {"include_usage": True}
            async with client.chat.completions.stream(
                model="any", messages=messages, tools=tools, stream_options=options
            ) as events:
                done = await events.get_final_completion()
        else:
            done = await client.chat.completions.create(model="any", messages=messages, tools=tools)
        assert done.usage is not None and done.usage.completion_tokens > 0
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            return message.content
        assert done.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) == {"city": "Oslo"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "-3"})


async def responses_loop(door: Open, stream: bool) -> str | None:
    client, items = door.openai(), [{"role": "user", "content": "How is Oslo?"}]
    request: Any = {"model": "any", "tools": [{"type": "function", **FUNCTION}], "instructions": "Be brief."}
    while True:
        if stream:
            async with client.responses.stream(input=items, **request) as events:
                done = await events.get_final_response()
        else:
            done = await client.responses.create(input=items, **request)
        assert done.status == "completed"
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in done.output]
        calls = [item for item in done.output if item.type == "function_call"]
        if not calls:
            return done.output_text
        for call in calls:
            assert json.loads(call.arguments) == {"city": "Oslo"}
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "-3"})


async def messages_loop(door: Open, stream: bool) -> str | None:
    client, messages = door.anthropic(), [{"role": "user", "content": "How is Oslo?"}]
    tool = {"name": "weather", "description": "Of a city.", "input_schema": PARAMETERS}
    request: Any = {"model": "any", "max_tokens": 100, "tools": [tool], "system": "Be brief."}
    while True:
        if stream:
            async with client.messages.stream(messages=messages, **request) as events:
                done = await events.get_final_message()
        else:
            done = await client.messages.create(messages=messages, **request)
        messages.append({"role": "assistant", "content": done.content})
        calls = [block for block in done.content if block.type == "tool_use"]
        if not calls:
            assert done.stop_reason == "end_turn"
            return "".join(block.text for block in done.content)
        assert done.stop_reason == "tool_use" and all(call.input == {"city": "Oslo"} for call in calls)
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "-3"} for call in calls]
        messages.append({"role": "user", "content": results})


class Weather(BaseModel):
    city: str


async def parsed_chat_loop(door: Open, stream: bool) -> str | None:
    """The SDK reads the arguments, and the program appends its objects as they are."""
    client, messages = door.openai(), [{"role": "user", "content": "How is Oslo?"}]
    request: Any = {"model": "any", "tools": [openai.pydantic_function_tool(Weather, name="weather")]}
    while True:
        if stream:
            async with client.chat.completions.stream(messages=messages, **request) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.parse(messages=messages, **request)).choices[0].message
        messages.append(message)  # type: ignore[arg-type]
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            assert call.function.parsed_arguments == Weather(city="Oslo")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "-3"})


async def anthropics_own_loop(door: Open, stream: bool) -> str | None:
    """The SDK runs the tools; it asks for a thread first."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Of a city."""
        assert city == "Oslo"
        return "-3"

    runner = door.anthropic().beta.messages.tool_runner(
        model="any", max_tokens=100, tools=[weather], messages=[{"role": "user", "content": "How?"}], stream=stream
    )
    return "".join(getattr(block, "text", "") for block in (await runner.until_done()).content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("loop", [chat_loop, parsed_chat_loop, responses_loop, messages_loop, anthropics_own_loop])
@pytest.mark.parametrize("before", ["", "I look. "])
async def test_a_tool_loop_is_one_segment_through_every_api(
    loop: Callable[[Open, bool], Awaitable[str | None]], stream: bool, before: str
) -> None:
    async with opened(before + CALL, ANSWER) as door:
        assert await loop(door, stream) == ANSWER
        (segment,) = door.session.ledger.segments
        assert len(segment.turns) == 2 and segment.turns[0].responses[0].content == "-3"
        check_exact(door.session, door.policy)
        await door.session.close()
        assert len(door.session.ledger.turns) == 2  # both arrived


@pytest.mark.parametrize("loop", [chat_loop, responses_loop, messages_loop])
async def test_parallel_calls_arrive_and_are_answered(loop: Callable[[Open, bool], Awaitable[str | None]]) -> None:
    async with opened(f"{CALL}\n{CALL}", ANSWER) as door:
        assert await loop(door, False) == ANSWER
        (segment,) = door.session.ledger.segments
        assert [each.tool_call_id for each in segment.turns[0].responses] == ["call00000", "call00001"]


async def test_stop_and_max_tokens_have_the_shape_of_each_api() -> None:
    async with opened("one END", "one two three", "one END", "one two three", "one two three") as door:
        messages: Any = [{"role": "user", "content": "Count"}]
        create = door.openai().chat.completions.create
        stopped = (await create(model="any", messages=messages, stop="END")).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == ("one ", "stop")
        cut = (await create(model="any", messages=messages, max_completion_tokens=2)).choices[0]
        assert cut.finish_reason == "length"
        write = door.anthropic().messages.create
        ended = await write(model="any", messages=messages, max_tokens=50, stop_sequences=["END"])
        assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", "END")
        assert (await write(model="any", messages=messages, max_tokens=2)).stop_reason == "max_tokens"
        short = await door.openai().responses.create(model="any", input="Count", max_output_tokens=2)
        assert short.status == "incomplete" and short.incomplete_details is not None


async def test_errors_are_those_of_the_sdks() -> None:
    async with opened("one", max_turns=1) as door:
        messages: Any = [{"role": "user", "content": "Hello"}]
        create, write = door.openai().chat.completions.create, door.anthropic().messages.create
        for wrong in ({"n": 2}, {"response_format": {"type": "json_object"}}, {"logprobs": True}, {"stop": 1}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))) as refused:
                await create(model="any", messages=messages, **wrong)  # type: ignore[call-overload]
            assert refused.value.param == next(iter(wrong))
        with pytest.raises(openai.BadRequestError, match="messages"):
            await create(model="any", messages=[*messages, {"role": "assistant", "content": "Well"}])
        with pytest.raises(anthropic.BadRequestError, match="is of type 'image'; expected text"):
            block: Any = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
            await write(model="any", max_tokens=5, messages=[{"role": "user", "content": [block]}])
        with pytest.raises(openai.BadRequestError, match="whole input"):
            await door.openai().responses.create(model="any", input="a", previous_response_id="resp_1")
        assert not door.policy.saw
        await create(model="any", messages=messages)
        with pytest.raises(openai.BadRequestError) as over:
            await create(model="any", messages=messages)
        assert over.value.code == "max_turns"
        with pytest.raises(anthropic.BadRequestError, match="max_turns"):
            await write(model="any", max_tokens=5, messages=messages)


@pytest.mark.parametrize("value", [None, "no"])
async def test_fields_added_by_litellm_are_no_edit_of_a_response(value: str | None) -> None:
    async with opened("one", "two") as door:
        create, asked = door.openai().chat.completions.create, {"role": "user", "content": "Hello"}
        await create(model="any", messages=[asked])  # type: ignore[list-item]

        def again(text: str) -> Any:
            fields = {"function_call": None, "provider_specific_fields": {"refusal": value}}
            return create(model="any", messages=[asked, {"role": "assistant", "content": text, **fields}, asked])  # type: ignore[list-item]

        if value is not None:  # in a conversation of its own the field would be dropped
            with pytest.raises(openai.BadRequestError, match="provider_specific_fields"):
                await again("edited")
        await again("one")
        assert [len(each.turns) for each in door.session.ledger.segments] == [2]


DEFAULTS: dict[str, dict[str, Any]] = {  # what SDKs and frameworks send without a choice of their user
    CHAT: {
        "n": 1,
        "store": False,
        "metadata": {"run": "1"},
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "logprobs": False,
        "top_logprobs": 0,
        "stream_options": {"include_usage": True},
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "temperature": 1.0,
        "user": "me",
        "stop": None,
        "reasoning_effort": None,
        "prompt_cache_key": "run",
        "prompt_cache_retention": "24h",
        "functions": [],
        "prediction": None,
    },
    RESPONSES: {
        "store": True,
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"session_id": "a"},
        "parallel_tool_calls": True,
        "truncation": "disabled",
        "reasoning": {},
        "text": {"format": {"type": "text"}},
        "top_logprobs": 0,
        "metadata": {},
        "conversation": None,
        "previous_response_id": None,
        "prompt_cache_options": {"mode": "auto"},
        "temperature": 1.0,
        "tool_choice": "auto",
    },
    MESSAGES: {
        "cache_control": {"type": "ephemeral"},
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "speed": "standard",
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto"},
        "mcp_servers": [],
        "container": None,
        "system": [],
        "stop_sequences": [],
        "output_config": {},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
    },
}
_TYPED = {RESPONSES: {"type": "function"}}
TEXT_PART = {"type": "text", "text": "How is Oslo?"}


def given_tools(path: str, parameters: Any) -> list[Any]:
    schema = "input_schema" if path == MESSAGES else "parameters"
    function = {"name": "f", schema: parameters}
    return [{"type": "function", "function": function} if path == CHAT else function | _TYPED.get(path, {})]


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, fields in DEFAULTS.items() for name in fields])
def test_defaults_of_sdks_change_nothing(path: str, name: str) -> None:
    body, read = {**LEAST[path], "tools": given_tools(path, PARAMETERS)}, APIS[path].read
    given = read({**body, name: DEFAULTS[path][name]})
    assert differing(given.sampling, Sampling(1)) == []
    assert replace(given, sampling={}) == read(body)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"role": "user", "content": [TEXT_PART]}, Message("user", "How is Oslo?")),
        (
            {"role": "user", "content": [{**TEXT_PART, "cache_control": {"type": "ephemeral"}, "annotations": []}]},
            Message("user", "How is Oslo?"),
        ),
        ({"role": "user", "content": [TEXT_PART, TEXT_PART]}, Message("user", "How is Oslo?\nHow is Oslo?")),
        ({"role": "developer", "content": "Be brief."}, Message("system", "Be brief.")),
        ({"role": "assistant", "content": None}, Message("assistant", "")),
        (
            {
                "role": "assistant",
                "content": ANSWER,
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "tool_calls": [],
                "reasoning_content": "",
                "reasoning_details": [],
                "thinking_blocks": None,
                "images": [],
                "cache_control": {"type": "ephemeral"},
            },
            Message("assistant", ANSWER),
        ),
    ],
)
def test_messages_of_sdks_are_read_without_what_no_model_sees(given: Any, expected: Message) -> None:
    first, _ = read_chat({"messages": [given, {"role": "user", "content": "And?"}]}).messages
    assert first == expected


@pytest.mark.parametrize("nulls", [False, True])
async def test_a_response_with_the_empty_fields_of_an_sdk_continues_its_segment(nulls: bool) -> None:
    async with opened(CALL, ANSWER, ANSWER) as door:
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Oslo?"}]
        tools: Any = [{"type": "function", "function": FUNCTION}]
        for _ in range(2):
            done = await door.openai().chat.completions.create(model="any", messages=messages, tools=tools)
            message = done.choices[0].message
            messages.append({**message.model_dump(exclude_none=not nulls), "annotations": [], "reasoning": ""})
            calls = [{"role": "tool", "tool_call_id": each.id, "content": "-3"} for each in message.tool_calls or ()]
            messages += calls or [{"role": "user", "content": [TEXT_PART]}]
        await door.openai().chat.completions.create(model="any", messages=messages, tools=tools)
        assert len(door.session.ledger.segments) == 1
        check_exact(door.session, door.policy)


def test_anthropics_blocks_are_read_without_what_no_model_sees() -> None:
    unseen = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Oslo?", **unseen, "citations": None}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}, **unseen}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "-3", **unseen}]},
    ]
    plain = [{**each, "content": [_without_unseen(block) for block in each["content"]]} for each in messages]  # type: ignore[attr-defined]
    system = [{"type": "text", "text": "Be brief.", **unseen}]
    read = read_anthropic({"system": system, "messages": messages})
    assert read == read_anthropic({"system": "Be brief.", "messages": plain})
    assert [each.role for each in read.messages] == ["system", "user", "assistant", "tool"]


def test_a_system_message_may_stand_between_others() -> None:
    note = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    read = read_anthropic({"messages": [note, {"role": "user", "content": "Hello"}]})
    assert read.messages == (Message("system", "Be brief."), Message("user", "Hello"))


def _without_unseen(block: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in block.items() if name not in ("cache_control", "citations")}


@pytest.mark.parametrize("strict", [True, False, None])
def test_strict_tools_would_constrain_the_policy_and_count_as_sampling(strict: bool | None) -> None:
    message: dict[str, Any] = {"role": "user", "content": "Hello"}
    tool = {"name": "weather", "description": "Of a city.", "input_schema": PARAMETERS, "strict": strict}
    plain = read_chat({"messages": [message], "tools": [{"type": "function", "function": FUNCTION}]})
    function = {"type": "function", "function": {**FUNCTION, "strict": strict}}
    given = (
        read_chat({"messages": [message], "tools": [function]}),
        read_responses({"input": "Hello", "tools": [{"type": "function", **FUNCTION, "strict": strict}]}),
        read_anthropic({"messages": [message], "tools": [tool]}),
    )
    for each in given:
        assert each.tools == plain.tools and each.sampling == ({"strict": True} if strict else {})


def test_marks_of_a_cache_are_no_part_of_a_tool() -> None:
    """Clients move them from request to request."""
    messages, mark = [{"role": "user", "content": "Hello"}], {"cache_control": {"type": "ephemeral"}}
    (plain,) = read_chat({"messages": messages, "tools": [TOOL]}).tools
    assert plain.schema == TOOL
    for tool in ({**TOOL, **mark}, {**TOOL, "function": {**FUNCTION, **mark}}):
        assert read_chat({"messages": messages, "tools": [tool]}).tools == (plain,)
    (own,) = given_tools(MESSAGES, PARAMETERS)
    assert read_anthropic({"messages": messages, "tools": [own | mark]}) == read_anthropic(
        {"messages": messages, "tools": [own]}
    )


def test_settings_of_effort_count_as_sampling() -> None:
    message = {"role": "user", "content": "Hello"}
    assert read_chat({"messages": [message], "reasoning_effort": "low"}).sampling == {"reasoning_effort": "low"}
    assert read_responses({"input": "Hello", "text": {"verbosity": "low"}}).sampling == {"verbosity": "low"}
    effort = {"effort": "low"}
    assert read_anthropic({"messages": [message], "output_config": effort}).sampling == {"output_config": effort}


def test_fields_against_parallel_calls_count_as_sampling() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    assert "parallel_tool_calls" in read_chat({**body, "parallel_tool_calls": False}).sampling
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert "disable_parallel_tool_use" in read_anthropic({**body, "tool_choice": choice}).sampling


async def test_a_key_opens_its_own_session_alone() -> None:
    async with opened("one") as door:
        other, _ = session("two")
        with door.gateway.serving(other):
            for key, path in ((other.key, door.url), (door.session.key, door.gateway.url(other)), ("", door.url)):
                client = openai.AsyncOpenAI(base_url=f"{path}/v1", api_key=key or "none")
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
                with pytest.raises(anthropic.AuthenticationError):
                    await anthropic.AsyncAnthropic(base_url=path, api_key=key or "none").messages.create(
                        model="any", max_tokens=5, messages=[{"role": "user", "content": "a"}]
                    )
        assert [each.id async for each in await door.openai().models.list()] == ["policy"]
        with pytest.raises(openai.AuthenticationError):  # its session is over
            await openai.AsyncOpenAI(base_url=f"{door.gateway.url(other)}/v1", api_key=other.key).models.list()
        assert door.url.startswith("http://127.0.0.1:")


async def test_tokens_are_counted_before_a_request() -> None:
    async with opened("one", "two") as door:
        claude, messages = door.anthropic(), [{"role": "user", "content": "Hello"}]
        tool: Any = {"name": "weather", "description": "Of a city.", "input_schema": PARAMETERS}
        request: Any = {"model": "any", "messages": messages, "tools": [tool], "system": "Be brief."}
        counts = [await claude.messages.count_tokens(**request), await claude.beta.messages.count_tokens(**request)]
        done = await claude.beta.messages.create(max_tokens=5, **request)  # with ?beta=true, as Claude Code asks
        assert [each.input_tokens for each in counts] == [done.usage.input_tokens] * 2
        counted = await door.openai().responses.input_tokens.count(
            model="any", input="Hello", instructions="Be brief.", tools=[{"type": "function", **FUNCTION}]
        )
        assert counted.input_tokens == done.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="must be a list"):
            await claude.messages.count_tokens(model="any", messages="Hello")  # type: ignore[arg-type]
        assert door.session.counts["requests"] == len(door.session.ledger.turns) == 1


async def test_models_have_the_shape_of_their_sdk() -> None:
    async with opened() as door:
        assert [each.id async for each in door.anthropic().models.list()] == ["policy"]
        assert (await door.anthropic().models.retrieve("claude-9")).id == "claude-9"
        assert (await door.openai().models.retrieve("org/model")).id == "org/model"


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, True])
@pytest.mark.parametrize("name", ["enable_thinking", "skip_special_tokens", "min_tokens", "no_such_field"])
def test_null_alone_counts_as_left_out(path: str, value: Any, name: str) -> None:
    body = {**LEAST[path], name: value}
    if value is None:
        assert APIS[path].read(body) == APIS[path].read(LEAST[path])
        return
    with pytest.raises(ApiError, match=f"{name} cannot be used here") as refused:
        APIS[path].read(body)
    assert refused.value.field == name


def asked(*blocks: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": list(blocks)}]


CITED = {"type": "text", "text": "a", "citations": [{"type": "page_location"}]}
CALLED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
NONSENSE: list[tuple[str, dict[str, Any], str]] = [  # (path, fields, the field that the error names)
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": asked({**TEXT_PART, "annotations": [{"type": "url_citation"}]})}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_calls": 0}]}, "messages[0].tool_calls"),
    (CHAT, {"stop": {}}, "stop"),
    (CHAT, {"stop": 0}, "stop"),
    (CHAT, {"stop": ["a", 5]}, "stop[1]"),
    (CHAT, {"stop": ["a", ""]}, "stop[1]"),
    (CHAT, {"stream": "false"}, "stream"),
    (CHAT, {"stream": 0}, "stream"),
    (CHAT, {"stream_options": 5}, "stream_options"),
    (CHAT, {"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    (CHAT, {"stream_options": {"more": 1}}, "stream_options.more"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"temperature": float("nan")}, "temperature"),
    (CHAT, {"seed": 1.5}, "seed"),
    (CHAT, {"n": "1"}, "n"),
    (CHAT, {"model": {"name": "a"}}, "model"),
    (CHAT, {"metadata": 5}, "metadata"),
    (CHAT, {"tools": given_tools(CHAT, {}), "tool_choice": "banana"}, "tool_choice"),
    (CHAT, {"tools": given_tools(CHAT, {}), "tool_choice": 7}, "tool_choice"),
    (CHAT, {"tools": given_tools(CHAT, {}), "tool_choice": {"type": "none"}}, "tool_choice"),
    (
        CHAT,
        {"tools": given_tools(CHAT, {}), "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
    (CHAT, {"tools": given_tools(CHAT, {"properties": {"a": 5}})}, "tools[0].function.parameters.properties.a"),
    (RESPONSES, {"input": [{"role": "user", "content": "a", "name": "Bob"}]}, "input[0].name"),
    (RESPONSES, {"input": [{"role": "wizard", "content": "a"}]}, "input[0].role"),
    (RESPONSES, {"input": [{"type": [], "role": "user", "content": "a"}]}, "input[0]"),
    (RESPONSES, {"input": asked({"type": "refusal", "refusal": "no"})}, "input[0].content[0].type"),
    (RESPONSES, {"input": [CALLED | {"call_id": ["a"]}]}, "input[0].call_id"),
    (RESPONSES, {"input": [*HELLO, CALLED | {"arguments": "[1]"}]}, "input[1].arguments"),
    (RESPONSES, {"input": [*HELLO, CALLED]}, "input"),  # nothing follows the call
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": {}}, "input"),
    (RESPONSES, {"instructions": 5}, "instructions"),
    (RESPONSES, {"include": [{}]}, "include[0]"),
    (RESPONSES, {"stream_options": 5}, "stream_options"),
    (RESPONSES, {"reasoning": "low"}, "reasoning"),
    (RESPONSES, {"stop": "x"}, "stop"),
    (RESPONSES, {"tools": given_tools(RESPONSES, [])}, "tools[0].parameters"),
    (
        RESPONSES,
        {"tools": given_tools(RESPONSES, {}), "tool_choice": {"type": "function", "name": "no"}},
        "tool_choice",
    ),
    (MESSAGES, {"system": {}}, "system"),
    (MESSAGES, {"system": 0}, "system"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system[0]"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [{"role": "user", "content": "a", "more": 1}]}, "messages[0].more"),
    (MESSAGES, {"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role"),
    (MESSAGES, {"messages": asked({"type": "text", "text": "a", "more": 1})}, "messages[0].content[0].more"),
    (MESSAGES, {"messages": asked(CITED)}, "messages[0].content[0].citations"),
    (MESSAGES, {"messages": asked({"type": "text", "text": 5})}, "messages[0].content[0].text"),
    (MESSAGES, {"messages": asked({"type": ["text"], "text": "a"})}, "messages[0].content[0]"),
    (
        MESSAGES,
        {"messages": asked({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]})},
        "messages[0].content[0].content[0]",
    ),
    (
        MESSAGES,
        {"messages": asked({"type": "tool_use", "id": "a", "name": "f", "input": []}, role="assistant")},
        "messages[0].content[0].input",
    ),
    (MESSAGES, {"stop_sequences": "x"}, "stop_sequences"),
    (MESSAGES, {"stop_sequences": ["x", 5]}, "stop_sequences[1]"),
    (MESSAGES, {"tools": given_tools(MESSAGES, 5)}, "tools[0].input_schema"),
    (MESSAGES, {"tools": given_tools(MESSAGES, {"properties": {"a": 5}})}, "tools[0].input_schema.properties.a"),
    (MESSAGES, {"tools": given_tools(MESSAGES, {}), "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice"),
    (MESSAGES, {"tools": given_tools(MESSAGES, {}), "tool_choice": {"type": ["any"]}}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (MESSAGES, {"tool_choice": {}}, "tool_choice"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"audio": {"voice": "a"}}, "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"prediction": {"type": "content", "content": "a"}}, "prediction"),
    (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    (CHAT, {"moderation": {"model": "any"}}, "moderation"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    (CHAT, {"ignore_eos": True}, "ignore_eos"),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include[0]"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "text.format"),
    (RESPONSES, {"text": {"format": {"type": "text"}, "style": "dry"}}, "text.style"),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, "conversation"),
    (RESPONSES, {"max_tool_calls": 1}, "max_tool_calls"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0]"),
    (
        RESPONSES,
        {"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]},
        "input[0].content[0].type",
    ),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": "http://a", "name": "a"}]}, "mcp_servers"),
    (
        MESSAGES,
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
    ),
    (MESSAGES, {"tools": [{"name": "a", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash", "input_schema": {}}]}, "tools[0].type"),
    (
        MESSAGES,
        {"messages": asked({"type": "redacted_thinking", "data": "a"}, role="assistant")},
        "messages[0].content[0]",
    ),
    (GENERATE, {"input_ids": [1.0]}, "input_ids[0]"),
    (GENERATE, {"temperature": "hot"}, "temperature"),
    (GENERATE, {"stop": 0}, "stop"),
]


@pytest.mark.parametrize(("path", "fields", "field"), NONSENSE)
def test_fields_outside_of_an_api_are_refused_by_their_own_names(path: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as refused:
        APIS[path].read({**LEAST[path], **fields})
    assert refused.value.field == field and str(refused.value).startswith(f"{field} "), refused.value


def test_choices_of_tools_that_there_are_count_as_sampling() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    chosen: list[tuple[str, Any]] = [
        (CHAT, "required"),
        (CHAT, named),
        (CHAT, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}),
        (RESPONSES, {"type": "function", "name": "f"}),
        (RESPONSES, {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}),
        (MESSAGES, {"type": "any"}),
        (MESSAGES, {"type": "tool", "name": "f"}),
    ]
    for path, choice in chosen:
        read = APIS[path].read({**LEAST[path], "tools": given_tools(path, {}), "tool_choice": choice})
        assert list(read.sampling) == ["tool_choice"] and read.reads_calls, choice


def test_a_place_in_the_prompt_has_the_requests_own_name() -> None:
    items = [*HELLO, CALLED, {"type": "function_call_output", "call_id": "a", "output": "1"}]
    blocks: list[Any] = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [TEXT_PART, {"type": "tool_result", "tool_use_id": "a", "content": "1"}]},
    ]
    asked = read_responses({"input": items, "instructions": "Be brief."})
    assert [asked.place(f"prompt[{number}].tool_calls[0]") for number in range(4)] == [
        "instructions",
        "input[0]",
        "input[1]",
        "input[2]",
    ]
    written = read_anthropic({"messages": [*HELLO, *blocks], "system": "Be brief."})
    places = ["system", "messages[0]", "messages[1]", "messages[2].content[1]", "messages[2]"]
    assert [written.place(f"prompt[{number}]") for number in range(5)] == places
    assert read_chat({"messages": HELLO}).place("prompt[0].name") == "messages[0].name"
    assert read_responses({"input": "Hello"}).place("prompt") == "input"


async def test_fields_that_no_template_shows_are_refused_by_name() -> None:
    async with opened("one", longest=3) as door:
        create, again = door.openai().chat.completions.create, {"role": "assistant", "content": "a", "prefix": True}
        with pytest.raises(openai.BadRequestError, match=r"prefix is dropped.*Leave it out") as refused:
            await create(model="any", messages=[*HELLO, again, *HELLO])
        assert refused.value.param == "messages[1].prefix"
        with pytest.raises(openai.BadRequestError, match="no room") as long:
            await door.openai().responses.create(model="any", input="Hello")
        assert long.value.param == "input"


async def test_a_prompt_that_lists_tools_suits_no_other_tools() -> None:
    """As the rows of dataset/mini, which list theirs as text."""
    listing = "**Available Tools**\n1. Name: f\nDescription: \nParameters: {}"
    async with opened("one", "two", observations=observations("toolrl")) as door:
        create, messages = door.openai().chat.completions.create, [{"role": "system", "content": listing}, *HELLO]
        for tools in (openai.omit, given_tools(CHAT, {})):  # none, or one that is listed
            await create(model="any", messages=messages, tools=tools)
        problem = r"messages lists its own tools, but not weather, .* Remove .* tools of a request"
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            await create(model="any", messages=messages, tools=[{"type": "function", "function": FUNCTION}])
        assert refused.value.param == "messages"


async def test_a_request_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async with opened("one", longest=2000) as door, door.plain() as client:
        door.session.ledger.find = None  # type: ignore[method-assign, assignment]
        door.session.ledger.num_tokens = None  # type: ignore[method-assign, assignment]
        long = [{"role": "user", "content": "a " * (1 << 20)}]
        for path in (CHAT, MESSAGES, "/v1/messages/count_tokens"):
            refused = await client.post(path, json={"messages": long})
            assert refused.status_code == 400 and "context_length_exceeded" in refused.text, refused.text
        assert not door.session.failure.done() and door.session.limit is StopReason.LENGTH


@pytest.mark.parametrize("anthropic_version", [None, "2023-06-01"])
async def test_a_request_that_reaches_no_session_gets_an_error_in_the_shape_of_its_sdk(
    anthropic_version: str | None,
) -> None:
    async with opened() as door, door.plain() as client:
        headers = {} if anthropic_version is None else {"anthropic-version": anthropic_version}
        large = await client.post(CHAT, content=b" " * (33 << 20), headers=headers)
        error = large.json()["error"]
        problem = "the body has more than 32 MiB"
        if anthropic_version is None:
            own = {"type": "invalid_request_error", "param": None, "code": "request_too_large"}
        else:
            own, problem = {"type": "request_too_large"}, f"request_too_large: {problem}"
        assert large.status_code == 413 and error == {"message": problem, **own}
        host = await client.post(CHAT, json={}, headers={**headers, "host": "elsewhere.org"})
        assert host.status_code == 400 and "env.options.url" in host.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "stream": True, "stream_options": "usage"}, "stream_options"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [1]}, "tools"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": json.dumps([TOOL])}, "tools"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{**TOOL, "foo": 1}]}, "tools[0].foo"),
        ("/v1/chat/completions", {"messages": json.dumps(HELLO)}, "messages"),
        ("/v1/messages", {"messages": HELLO, "tool_choice": "auto"}, "tool_choice"),
        ("/v1/messages", {"messages": HELLO, "output_config": "low"}, "output_config"),
        ("/v1/messages", {"messages": HELLO, "tools": 7}, "tools"),
        ("/v1/messages", {"messages": "Hello"}, "messages"),
        ("/v1/messages", {}, "messages"),
        ("/v1/messages/count_tokens", {"messages": {"role": "user"}}, "messages"),
        ("/v1/responses", {"input": "Hello", "text": "plain"}, "text"),
        ("/v1/responses", {"input": "Hello", "include": 5}, "include"),
        ("/v1/responses", {"input": "Hello", "tools": 5}, "tools"),
        ("/v1/responses", {}, "input"),
        ("/generate", {"input_ids": [1 << 40]}, "input_ids"),
    ],
)
async def test_fields_of_another_type_are_refused_by_name(path: str, body: dict[str, Any], field: str) -> None:
    async with opened("one") as door, door.plain() as client:
        refused = await client.post(path, json=body)
        assert refused.status_code == 400 and field in refused.text, refused.text
        assert not door.session.failure.done() and not door.policy.saw


async def test_text_that_no_tokenizer_takes_is_replaced() -> None:
    """Output of a command, which Python decodes with surrogates and writes as JSON."""
    async with opened("one", "two") as door, door.plain() as client:
        messages: list[Any] = [{"role": "user", "content": "a\udcffb"}]
        for _ in range(2):
            body = json.dumps({"messages": messages, "model": "\ud800"})
            done = await client.post("/v1/chat/completions", content=body.encode())
            assert done.status_code == 200, done.text
            messages += [done.json()["choices"][0]["message"], {"role": "user", "content": "\ud83d\udc4d \udcff"}]
        assert [len(each.turns) for each in door.session.ledger.segments] == [2]
        check_exact(door.session, door.policy)


@pytest.mark.parametrize("depth", [900, 3000, 100_000])
@pytest.mark.parametrize("inside", [b"1", rb'"\ud800"'])
async def test_a_body_that_is_nested_too_deep_is_refused(depth: int, inside: bytes) -> None:
    async with opened("one") as door, door.plain() as client:
        for path in ("/v1/chat/completions", "/reward"):
            body = b'{"reward":' + b"[" * depth + inside + b"]" * depth + b"}"
            refused = await client.post(path, content=body)
            assert refused.status_code == 400, refused.text
        assert not door.session.failure.done()


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 1.5},
        {"top_k": 0},
        {"repetition_penalty": 0},
        {"repetition_penalty": True},
    ],
)
def test_honored_settings_that_no_engine_takes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"{next(iter(wrong))} must be a number"):
        honored(wrong, list(wrong), Sampling(1))
    fine = {"temperature": 0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.2}
    assert honored(fine, list(fine), Sampling(1)) == Sampling(1, 0, repetition_penalty=1.2)


async def test_every_path_of_a_session_needs_its_key() -> None:
    async with opened() as door:
        async with httpx2.AsyncClient(base_url=door.url, headers={"x-api-key": "none"}) as client:
            paths = [*APIS, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/reward", "/runtime/run"]
            for path in paths:
                assert (await client.post(path, json={"reward": 1.0})).status_code == 401, path
            for path in ("/v1/models", "/v1/models/policy"):
                assert (await client.get(path)).status_code == 401, path
        assert door.session.score is None


async def test_unsupported_fields_are_refused_by_name() -> None:
    async with opened() as door, door.plain() as client:
        with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings is not served.*/v1/chat/completions"):
            await door.openai().embeddings.create(model="any", input="Hello")
        with pytest.raises(openai.NotFoundError, match="/v1/completions is not served"):
            await door.openai().completions.create(model="any", prompt="Hello")
        with pytest.raises(anthropic.NotFoundError, match=r"/v1/messages/batches is not served"):
            await door.anthropic().messages.batches.create(requests=[])
        assert (await client.get("/v1/messages")).status_code == 404
        assert (await client.head("")).status_code == 404


async def test_the_retry_of_a_timed_out_request_gets_its_response() -> None:
    async def until_the_retry() -> None:
        while not door.session.counts["retries"]:
            await asyncio.sleep(0.01)

    async with opened("one", "two", wait=until_the_retry) as door:
        client = door.openai(timeout=0.4, max_retries=20)  # several, where the machine is busy
        done = await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hello"}])
        assert done.choices[0].message.content == "one" and len(door.policy.saw) == 1
        assert door.session.counts["retries"] >= 1 and len(door.session.ledger.turns) == 1


@pytest.mark.parametrize("again", [True, False])
async def test_a_stream_cut_in_the_middle(again: bool) -> None:
    go_on = asyncio.Event()

    async def wait() -> None:
        await go_on.wait()

    async with opened("one", "two", wait=wait) as door, door.plain() as client:
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as cut:
            assert cut.status_code == 200
        while not all(each.abandoned for each in door.session._exchanges):
            await asyncio.sleep(0.01)
        go_on.set()
        if again:
            whole = (await client.post("/v1/chat/completions", json=body)).text
            assert '"content": "one"' in whole and whole.endswith("data: [DONE]\n\n")
        while not door.session.ledger.turns:
            await asyncio.sleep(0.01)
        await door.session.close()
        assert len(door.policy.saw) == 1
        assert len(door.session.ledger.turns) == again and door.session.counts["undelivered"] == (not again)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_has_the_same_error_with_a_stream(stream: bool) -> None:
    """Programs that shorten their conversation catch it by its class."""
    hello: Any = [{"role": "user", "content": "Hello"}]
    async with opened("one", longest=3) as door:
        for _ in range(2):  # it may be sent again
            with pytest.raises(openai.BadRequestError) as refused:
                await door.openai().chat.completions.create(model="any", messages=hello, stream=stream)
            assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError):
            await door.openai().responses.create(model="any", input="Hello", stream=stream)
        with pytest.raises(anthropic.BadRequestError, match="context_length_exceeded"):
            await door.anthropic().messages.create(model="any", messages=hello, max_tokens=9, stream=stream)
        assert not door.policy.saw and not door.session.ledger.turns


def test_events_are_lines_for_any_client() -> None:
    text = "a\u2028b\x85c\u2029d"
    for path, api in APIS.items():
        event = api.event({"type": "x", "text": text})
        assert all(line.startswith(("data: ", "event: ")) for line in event.strip().splitlines()), path
        assert json.loads(event.partition("data: ")[2])["text"] == text


async def test_errors_of_models_have_the_shape_of_their_sdk() -> None:
    async with opened("one") as door:
        for client in (door.openai(), door.anthropic()):
            client.api_key = "wrong"  # type: ignore[attr-defined]
            with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)) as refused:
                await client.models.list()  # type: ignore[attr-defined]
            assert refused.value.body is not None
        assert refused.value.body["type"] == "error"  # type: ignore[index]


async def test_sampling_settings_are_replaced_and_counted() -> None:
    async with opened("one", "two") as door:
        create = door.openai().chat.completions.create
        await create(model="any", messages=[{"role": "user", "content": "Hello"}], temperature=1.0, top_p=1)
        assert door.session.counts["sampling_overridden"] == 0  # as the run's
        await create(
            model="any", messages=[{"role": "user", "content": "Hey"}], temperature=0.1, seed=3, tool_choice="auto"
        )
        assert door.session.counts["sampling_overridden"] == 1
        assert door.session.overridden == {"temperature", "seed"}
        assert door.policy.sampled_with == [None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_tool_choice_never_constrains_the_policy(stream: bool) -> None:
    """A choice that demands a call is counted and has no effect; with none a call is text. All are one conversation."""
    async with opened(CALL, "I will not.", CALL, CALL) as door:
        tool = {"name": "weather", "description": "Of a city.", "input_schema": PARAMETERS}
        messages: list[Any] = [{"role": "user", "content": "How is Oslo?"}]
        found = []
        for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}, {"type": "none"}, {"type": "auto"}):
            request: Any = {"messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": 100}
            if stream:
                async with door.anthropic().messages.stream(model="any", **request) as events:
                    done = await events.get_final_message()
            else:
                done = await door.anthropic().messages.create(model="any", **request)
            found.append((done.stop_reason, [block.type for block in done.content]))
            calls = [block for block in done.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "-3"} for call in calls]
            messages += [
                {"role": "assistant", "content": done.content},
                {"role": "user", "content": results or "?"},
            ]
        called, answered = ("tool_use", ["tool_use"]), ("end_turn", ["text"])
        assert found == [called, answered, answered, called]
        assert door.session.counts["sampling_overridden"] == 2 and door.session.overridden == {"tool_choice"}
        assert len(door.session.ledger.segments) == 1
        door.session.on_sampling = OnSampling.REFUSE
        with pytest.raises(anthropic.BadRequestError, match=r"env.options.on_sampling=refuse"):
            await door.anthropic().messages.create(model="any", **{**request, "tool_choice": {"type": "any"}})


async def test_sampling_settings_are_refused_or_honored() -> None:
    async with opened("one", "two") as door:
        create, messages = door.openai().chat.completions.create, [{"role": "user", "content": "Hello"}]
        door.session.on_sampling = OnSampling.REFUSE
        with pytest.raises(openai.BadRequestError, match=r"env.options.on_sampling=refuse") as refused:
            await create(model="any", messages=messages, temperature=0.1)  # type: ignore[arg-type]
        assert refused.value.param == "temperature"
        door.session.on_sampling = OnSampling.HONOR
        for wrong in ({"seed": 1}, {"extra_body": {"temperature": "warm"}}):
            with pytest.raises(openai.BadRequestError):
                await create(model="any", messages=messages, **wrong)  # type: ignore[call-overload]
        await create(model="any", messages=messages, temperature=0.1)  # type: ignore[arg-type]
        await create(model="any", messages=messages)  # type: ignore[arg-type]
        own, none = door.policy.sampled_with
        assert own is not None and own.temperature == 0.1 and none is None
        first, second = (turn.completion.logprobs for turn in door.session.ledger.turns)
        assert all(value != value for value in first) and all(value == value for value in second)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_token_level_endpoint_continues_its_tokens(stream: bool) -> None:
    async with opened("one", "two END", "three") as door, door.plain() as client:

        async def generate(ids: Sequence[int], **fields: Any) -> dict[str, Any]:
            answer = await client.post("/generate", json={"input_ids": list(ids), "stream": stream, **fields})
            assert answer.status_code == 200, answer.text
            text = answer.text.split("\n\n")[0].removeprefix("data: ") if stream else answer.text
            return json.loads(text)  # type: ignore[no-any-return]

        prompt, more = chat().response_ids("Count")[0], chat().response_ids(" go on")[0]
        first = await generate(prompt)
        assert first["token_ids"] == list(door.policy.completions[0].token_ids) and first["stop_reason"] == "stop"
        assert len(first["logprobs"]) == len(first["versions"]) == len(first["token_ids"])
        await generate((*prompt, *first["token_ids"], *more), stop="END")
        (segment,) = door.session.ledger.segments
        assert tuple(segment.turns[1].context_ids) == more
        await generate(prompt, max_tokens=3)
        assert len(door.session.ledger.segments) == 2
        check_exact(door.session, door.policy)
        for wrong in ([], [-1], [10**6], "text", [True]):
            refused = await client.post("/generate", json={"input_ids": wrong})
            assert refused.status_code == 400 and "input_ids" in refused.text


async def test_the_token_level_endpoint_has_the_budgets_of_the_others() -> None:
    async with opened("one", max_turns=1, longest=10) as door, door.plain() as client:
        problems = []
        for ids in ([5] * 10, [5], [6]):
            answer = await client.post("/generate", json={"input_ids": ids, "max_tokens": 1000})
            problems.append((answer.json().get("error") or {}).get("code"))
        assert problems == ["context_length_exceeded", None, "max_turns"] and len(door.policy.saw) == 1
        door.session.on_sampling = OnSampling.REFUSE
        refused = await client.post("/generate", json={"input_ids": [5], "temperature": 0.1})
        assert refused.status_code == 400


async def test_a_reward_is_posted() -> None:
    async with opened() as door, door.plain() as client:
        for wrong in ({}, {"reward": "one"}, {"reward": True}, {"reward": 1, "score": 2}, {"parts": {"a": 1}}):
            assert (await client.post("/reward", json=wrong)).status_code == 400
        many = {str(number): 0.5 for number in range(65)}  # each name would be a metric
        for parts in ([], 0, {"a": True}, many, {"a" * 101: 0.5}):
            assert (await client.post("/reward", json={"reward": 1, "parts": parts})).status_code == 400
        assert (await client.post("/reward", content=b"[1]")).status_code == 400
        assert door.session.score is None
        assert (await client.post("/reward", json={"reward": 1, "parts": {"a": 0.5}})).json() == {"reward": 1.0}
        assert door.session.score == Score(1.0, {"a": 0.5})


async def test_a_lost_engine_is_a_server_error(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with caplog.at_level(logging.ERROR):
        async with opened() as door:
            door.policy.generate = fail  # type: ignore[method-assign, assignment]
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                await door.openai(max_retries=0).chat.completions.create(model="any", messages=HELLO)
            assert isinstance(door.session.failure.exception(), RuntimeError)
