"""Thinking models over several turns: the tokens of an episode are those of the family's own template, or a run warns.

A policy writes what the template renders for its turn. The record of an episode is compared to the template's prompt
for the whole conversation: after results of tools, and after another message of the user.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import MINI
from tests.verl.chat.test_native import WEATHER, chat_of, trl_template
from verl.build.run import load_inputs
from verl.chat.history import check_history, rewriting
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.errors import ConfigError
from verl.formats.base import build_tool_call_format
from verl.formats.openai import as_openai
from verl.formats.prompt import function_schema
from verl.types import Message, ToolCall

OFF, PRESERVED, WHOLE = {"enable_thinking": False}, {"preserve_thinking": True}, {"truncate_history_thinking": False}
ON = {"enable_thinking": True}


@dataclass(frozen=True)
class Case:
    """name: of a template in TRL; thinks: whether the policy has thoughts; field: in which the template reads them
    keeps: roles of messages after which earlier turns stay as they were written; switch: with which all do
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    thinks: bool = True
    keeps: Sequence[str] = ("tool", "user")
    switch: Mapping[str, Any] = field(default_factory=dict)
    field: str = "reasoning_content"

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def chat(self) -> ChatTemplate:
        return replace(chat_of(self.name), template_options=self.options)


TOOL = ("tool",)
CASES = [
    Case("qwen3", keeps=TOOL),
    Case("qwen3", OFF, thinks=False, keeps=()),
    Case("qwen3_5_think", keeps=TOOL),
    Case("qwen3_5_think", OFF, thinks=False, keeps=TOOL),
    Case("qwen3_5_nothink", thinks=False, keeps=TOOL),
    Case("qwen3_5_nothink", ON, keeps=TOOL),
    Case("qwen3_6", keeps=TOOL, switch=PRESERVED),
    Case("qwen3_6", PRESERVED),
    Case("qwen3_6", OFF, thinks=False, keeps=TOOL, switch=PRESERVED),
    Case("qwen3_6", {**OFF, **PRESERVED}, thinks=False),
    Case("qwen3_8"),
    Case("qwen3_8", OFF, thinks=False),
    Case("qwen3_8", {"reasoning_effort": "low"}),
    Case("qwen3_8", {"reasoning_effort": "medium"}),
    Case("qwen3_8", {"preserve_thinking": False}, keeps=TOOL, switch=PRESERVED),
    Case("gemma4", thinks=False),
    Case("gemma4", ON, keeps=TOOL),
    Case("gemma4_v5", thinks=False),
    Case("gemma4_v5", ON, keeps=TOOL),
    Case("nemotron_3_nano", keeps=TOOL, switch=WHOLE),
    Case("nemotron_3_nano", WHOLE),
    Case("nemotron_3_nano", OFF, thinks=False),
    Case("nemotron_3_super", keeps=TOOL, switch=WHOLE),
    Case("nemotron_3_super", WHOLE),
    Case("nemotron_3_super", {"low_effort": True}, keeps=TOOL),
    Case("nemotron_3_ultra", WHOLE),
    Case("nemotron_3_ultra", OFF, thinks=False),
    Case("nemotron_3_ultra", {"medium_effort": True}, keeps=TOOL),
    Case("nemotron_3_5_lightning", keeps=TOOL, switch=WHOLE),
    Case("nemotron_3_5_lightning", WHOLE),
    Case("lfm2_v2", thinks=False),
    Case("lfm2_2_5", keeps=TOOL, switch=PRESERVED, field="thinking"),
    Case("lfm2_2_5", PRESERVED, field="thinking"),
    Case("lfm2_2_5_v2", keeps=TOOL, switch=PRESERVED),
    Case("glm4moe", keeps=TOOL),
    Case("glm4moe", OFF, thinks=False),
    Case("muse_glimmer", {"reasoning_strength": "low"}),
]


def turn(case: Case, thought: str, content: str, call: ToolCall | None = None) -> Message:
    fields = {case.field: thought} if case.thinks else {}
    return Message("assistant", content, (call,) if call else (), calls_in_content=False, template_fields=fields)


def conversation(case: Case) -> list[Message]:
    """Two calls and an answer, then another question with a call and an answer."""
    calls = [ToolCall("weather", {"city": city}, f"call0000{n}") for n, city in enumerate(("Rome", "Pisa", "Oslo"))]
    results = [Message("tool", f"2{n} degrees", tool="weather", tool_call_id=f"call0000{n}") for n in range(3)]
    return [
        Message("user", "Where is it warmest?"),
        turn(case, "I look.", "", calls[0]),
        results[0],
        turn(case, "Once more.", "", calls[1]),
        results[1],
        turn(case, "So it is.", "In Pisa."),
        Message("user", "And in Oslo?"),
        turn(case, "A third one.", "", calls[2]),
        results[2],
        turn(case, "Done.", "It has 22."),
    ]


def rendered(case: Case, messages: Sequence[Message], prompt: bool = True) -> str:
    """By transformers alone."""
    return str(
        chat_of(case.name).tokenizer.apply_chat_template(
            [as_openai(each) for each in messages],
            tools=[function_schema(WEATHER)],
            add_generation_prompt=prompt,
            tokenize=False,
            **case.options,
        )
    )


def written(case: Case, messages: Sequence[Message]) -> str:
    """What a policy writes for the last message, without the end of its turn."""
    chat, prompt, whole = case.chat, rendered(case, messages[:-1]), rendered(case, messages, prompt=False)
    assert whole.startswith(prompt)
    text = whole.removeprefix(prompt)
    ends = [text.rfind(str(chat.tokenizer.decode([stop]))) for stop in chat.stop_token_ids]
    return text[: max(ends)] if max(ends) >= 0 else text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_episode_has_the_tokens_of_the_families_own_template(case: Case) -> None:
    chat, messages = case.chat, conversation(case)
    observations = ObservationTokenizer(chat, build_tool_call_format("native"), 512)
    ledger = list(chat.initial_ids(messages[:1], (WEATHER,)))
    assert ledger == chat.tokenizer(rendered(case, messages[:1]), add_special_tokens=False)["input_ids"]
    seen = set()
    for place in range(1, len(messages) - 1, 2):
        text, following = written(case, messages[: place + 1]), messages[place + 1]
        ledger += [*chat.response_ids(text)[0], *observations.answer_ids([following], text, ended=False)]
        seen.add(following.role)
        theirs = chat.tokenizer(rendered(case, messages[: place + 2]), add_special_tokens=False)["input_ids"]
        assert (chat.tokenizer.decode(ledger) == chat.tokenizer.decode(theirs)) == seen.issubset(case.keeps)
        assert (ledger == theirs) == seen.issubset(case.keeps)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_reports_where_the_template_renders_turns_anew(case: Case) -> None:
    chat, observations = case.chat, ObservationTokenizer(case.chat, build_tool_call_format("native"), 512)
    result, question = conversation(case)[2], conversation(case)[6]
    for following in (result, question):
        found = rewriting(chat, (following,))
        assert (found is None) == (following.role in case.keeps)
        if found is not None:
            assert found.switch == case.switch
    if "tool" in case.keeps:
        assert check_history(observations, users=False) is None
    if "user" in case.keeps:
        assert check_history(observations, users=True) is None
    elif case.switch:
        ((name, value),) = case.switch.items()
        with pytest.raises(ConfigError, match=rf"chat_template_options=\{{{name}: {str(value).lower()}\}}"):
            check_history(observations, users=True)
    else:
        note = check_history(observations, users=True)
        assert note is not None and "shows the policy other prompts" in note


def test_results_as_messages_of_the_user_count_as_such() -> None:
    """ToolRL's own format shows results in the user's role, before which Qwen 3.6 leaves thoughts out."""
    observations = ObservationTokenizer(chat_of("qwen3_6"), build_tool_call_format("toolrl"), 512)
    with pytest.raises(ConfigError, match="a message of the role user follows"):
        check_history(observations, users=False)
    same_turn = ObservationTokenizer(chat_of("qwen3_6"), build_tool_call_format("search_r1"), 512)
    assert check_history(same_turn, users=False) is None


@pytest.mark.parametrize(("name", "role"), [("gemma4_v2", "tool"), ("deepseek_r1_distill", "user")])
def test_templates_that_never_show_a_thought_are_named(name: str, role: str) -> None:
    chat = replace(chat_of(name), template_options=ON)
    found = rewriting(chat, (Message(role, "7", tool="weather"),))
    assert found is not None and "Hm." in found.written and "Hm." not in found.later


def test_gpt_oss_leaves_out_thoughts_once_there_is_an_answer() -> None:
    chat = chat_of("gptoss")
    assert rewriting(chat, (Message("tool", "7", tool="trial", tool_call_id="call00000"),)) is None
    found = rewriting(chat, (Message("user", "7"),))
    assert found is not None and found.written.startswith("analysis<|message|>Hm.")


def test_a_run_does_not_start_before_its_template_keeps_thoughts(tmp_path: Path) -> None:
    model, rows = Path(shutil.copytree(MINI / "model", tmp_path / "model")), tmp_path / "rows.jsonl"
    (model / "chat_template.jinja").write_text(trl_template("qwen3_6"))
    prompt, gold = [{"role": "user", "content": "1 + 1?"}], {"style": "rule", "ground_truth": "2"}
    row = {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": gold}
    rows.write_text(f"{json.dumps(row)}\n" * 4)
    overrides = [f"model.path={model}", f"data.train_files=[{rows}]", "algorithm.name=grpo", "rollout.n=2"]
    overrides += ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "env.tool_call_format=toolrl"]
    overrides += ["env.name=tool", "env.tools=[tests.verl.chat.test_native:weather]", "data.max_prompt_length=2048"]
    with pytest.raises(ConfigError, match=r"set model.chat_template_options=\{preserve_thinking: true\}"):
        load_inputs(load_config(overrides))
    assert load_inputs(load_config([*overrides, "model.chat_template_options={preserve_thinking: true}"])).train
