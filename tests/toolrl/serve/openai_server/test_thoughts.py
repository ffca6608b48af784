"""Thoughts that clients send back: a server shows them as the family's own template shows them, wherever they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.verl.chat.test_native import WEATHER, chat_of, native, needs_vllm
from tests.verl.chat.test_thinking import CASES, Case, conversation, rendered, written
from toolrl.serve.openai_server.chat_template import serving_chat_template
from toolrl.serve.openai_server.thoughts import thought_places
from verl.formats.openai import as_openai
from verl.formats.prompt import function_schema
from verl.types import Message

Sent = Mapping[str, Any]


def in_content(content: str, thought: str) -> Sent:
    """As our server answered it: the thought that the prompt opened has no opening tag."""
    return {"content": content}


def in_parts(content: str, thought: str) -> Sent:
    """As vLLM hands it to templates that take lists."""
    return {"content": [{"type": "text", "text": content}]}


def in_vllm_fields(content: str, thought: str) -> Sent:
    return {"content": without_thought(content), "reasoning": thought, "reasoning_content": thought}


def in_reasoning(content: str, thought: str) -> Sent:
    return {"content": without_thought(content), "reasoning": thought}


def without_thought(content: str) -> str:
    for closing in ("</think>", "<channel|>"):
        content = content.rpartition(closing)[2]
    return content.strip("\n")


@needs_vllm
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "muse_glimmer"], ids=str)
@pytest.mark.parametrize("sent", [in_content, in_parts, in_vllm_fields, in_reasoning])
def test_prompts_are_those_of_the_families_own_template(case: Case, sent: Callable[[str, str], Sent]) -> None:
    if sent is in_parts and case.name == "qwen3":
        return  # its template takes texts alone, so vLLM sends it texts
    chat, messages = case.chat, conversation(case)
    style = native(chat)
    template = serving_chat_template(
        style, str(chat.tokenizer.chat_template), options=case.options, thoughts=thought_places(chat)
    )
    history: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        if message.role != "assistant":
            history.append(as_openai(message))
            served = chat.tokenizer.apply_chat_template(
                history,
                tools=[function_schema(WEATHER)],
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
            )
            assert served == rendered(case, messages[: place + 1])
            continue
        answer = style.split(written(case, messages[: place + 1]), (WEATHER,)).before
        thought = str(message.template_fields.get(case.field, ""))
        plain = as_openai(replace(message, template_fields={}))
        history.append({**plain, **(sent(answer, thought) if case.thinks else {"content": message.content})})


@needs_vllm
def test_a_quoted_tag_is_no_thought() -> None:
    """The prompt opens none, and the answer begins none: its text stays as it is."""
    chat = replace(chat_of("qwen3_8"), template_options={"enable_thinking": False})
    places = thought_places(chat)
    assert '"opened": ""' in places and '"in_field": true' in places
    template = serving_chat_template(
        native(chat), str(chat.tokenizer.chat_template), options=chat.template_options, thoughts=places
    )
    history = (Message("user", "a"), Message("assistant", "It ends with </think>."), Message("user", "b"))
    served = chat.tokenizer.apply_chat_template(
        list(map(as_openai, history)), chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert served == chat.rendered(history)


def test_templates_without_thoughts_need_nothing() -> None:
    assert thought_places(chat_of("qwen2_5")) == thought_places(chat_of("llama3_1")) == ""
