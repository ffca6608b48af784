"""Demonstrations: what is trained is what an assistant wrote, token for token, and nothing from a tool."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import real_data
from tests.verl.chat.test_chat import format_of, with_template
from verl.batch.samples import Sample
from verl.build.env import build_episode_runner, prompt_fn
from verl.chat.template import ChatTemplate
from verl.config.commands import SFT
from verl.config.load import load_config
from verl.data.report import RowReport
from verl.errors import ConfigError, DataError
from verl.formats.openai import as_openai
from verl.sft.demonstrations import Demonstration, read_demonstrations, sft_samples, to_demonstration
from verl.types import Message, Task, ToolCall


def conversation(*texts: str) -> tuple[Message, ...]:
    return tuple(Message(role, text) for role, text in zip(("user", "assistant") * len(texts), texts, strict=False))


def trained_text(sample: Sample, chat: ChatTemplate) -> str:
    chosen = [token for token, own in zip(sample.token_ids, sample.action_mask, strict=True) if own]
    text: str = chat.tokenizer.decode(chosen)
    return text


def test_every_assistant_turn_is_a_sample_in_the_tokens_of_a_rollout(chat: ChatTemplate) -> None:
    messages = conversation("Hi", "Hello there", "buy 3", "Done")
    one, two = sft_samples([Demonstration(messages)], chat, 1000)
    assert trained_text(one, chat) == "Hello there<|im_end|>" and trained_text(two, chat) == "Done<|im_end|>"
    for sample, before in ((one, messages[:1]), (two, messages[:3])):
        prompt = chat.prompt_ids(before)
        assert tuple(sample.token_ids[: len(prompt)]) == prompt and not any(sample.action_mask[: len(prompt)])
    assert one.group == two.group


def test_a_demonstration_ends_once_even_where_a_model_may_end_in_several_ways(chat: ChatTemplate) -> None:
    (sample,) = sft_samples([Demonstration(conversation("Hi", "Hello"))], replace(chat, more_stops=(5, 7)), 1000)
    assert trained_text(sample, chat) == "Hello<|im_end|>" and sample.action_mask[-1]


@pytest.mark.parametrize(
    ("response", "own"),
    [
        ("I look. <obs> 21 degrees </obs> It is warm.", "I look.  It is warm.<|im_end|>"),
        ("Run ```output\n42\n``` so 42", "Run  so 42<|im_end|>"),
        ("<search> x </search><information> y </information> z", "<search> x </search> z<|im_end|>"),
        ("no <obs> is closed", "no <obs> is closed<|im_end|>"),
    ],
)
def test_tool_output_inside_a_response_is_not_trained(response: str, own: str, chat: ChatTemplate) -> None:
    (sample,) = sft_samples([Demonstration(conversation("Hi", response))], chat, 1000)
    assert trained_text(sample, chat).split() == own.split()


def test_the_three_kinds_of_rows_agree() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    rows: list[dict[str, Any]] = [
        {"messages": [*messages, {"role": "assistant", "content": "A"}]},
        {"instruction": "S", "input": "U", "output": "A"},
        {"prompt": messages, "reward_model": {"ground_truth": "A", "style": "rule"}},
    ]
    read = [to_demonstration(row) for row in rows]
    assert {each.messages for each in read} == {
        (Message("system", "S"), Message("user", "U"), Message("assistant", "A"))
    }


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{"role": "user", "content": "U"}]}, "has no assistant turn"),
        ({"messages": []}, "is empty; expected a list"),
        ({"messages": "[{"}, "is not JSON"),
        ({"instruction": "S", "input": "U", "output": ""}, "field 'output': is missing or empty"),
        ({"text": "x"}, "has the columns ['text']"),
        (["x"], "is of type list"),
    ],
)
def test_bad_rows_name_their_fault(row: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        to_demonstration(row)
    assert problem in str(caught.value)
    if isinstance(row, dict):
        path = tmp_path / "rows.jsonl"
        good = {"messages": [as_openai(message) for message in conversation("Hi", "Ho")]}
        path.write_text("\n".join(map(json.dumps, [good, row])))
        with pytest.raises(DataError, match="row 1"):
            read_demonstrations(str(path))
        assert len(read_demonstrations(str(path), 1.0)) == 1


@pytest.mark.parametrize("max_bad_share", [0.0, 0.05])
def test_prompts_alone_are_refused_with_what_uses_them(max_bad_share: float, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' * 2)
    with pytest.raises(DataError, match=r"row 0, field 'messages': has no assistant turn.*toolrl train needs prompts"):
        read_demonstrations(str(path), max_bad_share)


def test_long_demonstrations_are_left_out_and_never_cut(chat: ChatTemplate) -> None:
    short, long = Demonstration(conversation("Hi", "Ho")), Demonstration(conversation("Hi", "Ho " * 200))
    assert len(sft_samples([short, long], chat, 60)) == 1
    with pytest.raises(DataError, match=r"has no usable row \(1 longer than 60 tokens\)"):
        sft_samples([long], chat, 60)


def test_toolrls_own_file_is_read() -> None:
    """All of it: golds that the reward could not read are demonstrations all the same."""
    report = RowReport("rlla_sft.json")
    found = read_demonstrations(str(real_data("toolrl", "rlla_sft.json")), report=report)
    assert str(report) == "rlla_sft.json: 400 rows, 400 used, 0 dropped"
    assert len(found) == 400 and all(each.messages[-1].role == "assistant" for each in found)


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": "Let me check.",
        "tool_calls": [CALL],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "<result> 21 </result>"},
    {"role": "assistant", "content": "It is 21 degrees."},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]


@pytest.mark.parametrize(
    ("template", "call", "answer"),
    [
        (
            "qwen2.5",
            'Let me check.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
            "It is 21 degrees.<|im_end|>",
        ),
        (
            "qwen3",  # which writes an empty thought into the last turn
            "<think>\n\n</think>\n\nLet me check.\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
            "<think>\n\n</think>\n\nIt is 21 degrees.<|im_end|>",
        ),
    ],
)
def test_turns_are_trained_as_the_template_writes_them(template: str, call: str, answer: str) -> None:
    chat = format_of(template)
    demonstration = to_demonstration({"messages": CALLS, "tools": TOOLS})
    one, two = sft_samples([demonstration], chat, 1000)
    assert trained_text(one, chat) == call and trained_text(two, chat) == answer
    dialogue = [*CALLS[:1], {**CALLS[1], "tool_calls": [with_object(CALLS[1]["tool_calls"][0])]}, *CALLS[2:]]
    render = partial(chat.tokenizer.apply_chat_template, tools=TOOLS, return_dict=False)
    assert (
        list(one.token_ids) == render(dialogue[:2])[: len(one.token_ids)]
    )  # the template ends turns with a line break
    assert len(render(dialogue[:2])) - len(one.token_ids) == 1
    head = render(dialogue[:3], add_generation_prompt=True)
    assert list(two.token_ids[: len(head)]) == head and not any(two.action_mask[: len(head)])
    assert '"name": "weather", "parameters"' in chat.tokenizer.decode(head)


@pytest.mark.parametrize("name", ["toolrl", "tool_n1"])
def test_a_tool_call_format_gives_the_prompts_of_training_and_its_calls(name: str, chat: ChatTemplate) -> None:
    """The embedded model's chat template lists no tools."""
    config = load_config(["model.path=embedded:model", f"env.tool_call_format={name}"], SFT)
    runner = build_episode_runner(config, chat)
    demonstration = to_demonstration({"messages": CALLS, "tools": TOOLS})
    one, two = sft_samples([demonstration], chat, 1000, observations=runner.observations)
    style, prompt_ids = runner.observations.tool_call_format, prompt_fn(runner)
    call = ToolCall("weather", {"city": "Rome"})
    assert trained_text(one, chat) == f"Let me check.\n{style.render([call])}<|im_end|>"
    assert trained_text(two, chat) == "It is 21 degrees.<|im_end|>"
    for sample, place in ((one, 1), (two, 3)):
        task = Task("t", demonstration.messages[:place], "", "d", tools=demonstration.tools)
        ids = list(prompt_ids(task))
        assert list(sample.token_ids[: len(ids)]) == ids and sample.action_mask[len(ids) :].all()


def with_object(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}


def test_arguments_may_hold_what_a_response_may_not_quote() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "<result>Rome</result>"}}}
    rows = {"messages": [CALLS[0], {"role": "assistant", "content": "See <obs> 3 </obs>", "tool_calls": [call]}]}
    (sample,) = sft_samples([to_demonstration(rows)], format_of("qwen2.5"), 1000)
    text = trained_text(sample, format_of("qwen2.5"))
    assert "<result>Rome</result>" in text and "obs" not in text and text.startswith("See")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("mini", r"rows.jsonl, row 3, field 'messages\[1\].tool_calls\[0\]': is dropped by the chat template"),
        ("llama3", r"rows.jsonl, row 3, field 'messages\[1\].content': is dropped by the chat template"),
        (
            "rewrites",
            r"row 3, field 'messages\[1\]': the chat template does not continue its own prompt",
        ),
        ("unended", r"row 3, field 'messages\[1\]': the chat template ends this turn with .* rather than with a stop"),
    ],
)
def test_templates_whose_turns_cannot_be_trained_are_errors_with_the_row(template: str, message: str) -> None:
    body = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    others = {
        "rewrites": "{{ messages | length }}{% for m in messages %}" + body + "<|im_end|>{% endfor %}",
        "unended": "{% for m in messages %}" + body + "\n{% endfor %}",
    }
    chat = with_template(others[template]) if template in others else format_of(template)
    demonstration = replace(to_demonstration({"messages": CALLS}), id="rows.jsonl#3")
    with pytest.raises(DataError, match=message):
        sft_samples([demonstration], chat, 1000)
    plain = Demonstration(conversation("Hi", "Ho"))
    if template == "rewrites":
        with pytest.raises(ConfigError, match="does not continue its own generation prompt"):
            sft_samples([plain], chat, 1000)
        return
    assert len(sft_samples([demonstration, plain], chat, 1000, max_bad_share=1.0)) == 1


def test_a_template_that_lists_no_tools_teaches_no_calls() -> None:
    demonstration = to_demonstration({"messages": CALLS[:1] + CALLS[3:], "tools": TOOLS})
    with pytest.raises(ConfigError, match=r"does not list tools, .* weather, weather\(city\)"):
        sft_samples([demonstration], format_of("mini"), 1000, max_bad_share=1.0)
