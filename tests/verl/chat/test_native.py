"""The native format: chat templates of many families render, libraries parse, and the tokens of episodes agree."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.tiny import MINI
from tests.toolrl.check.lab.lab import try_reward
from tests.verl.chat.test_chat import TEMPLATES, with_template
from toolrl.benchmarks.runner.handlers import tool_call_format_of
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from verl.build.env import build_episode_runner
from verl.chat.native import BoundNativeFormat, NativeFormat, own_format
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.envs.task_envs import TaskEnvs
from verl.episodes.episode import EpisodeRunner
from verl.errors import ConfigError
from verl.formats.base import Calls, Final, ParseError, build_tool_call_format
from verl.rollout.engine import Sampling
from verl.types import Message, ParsedResponse, Task, ToolCall, ToolSpec, Trajectory
from verl.utils.reward_score.calls import CallsReward

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
    "required": ["city"],
}
WEATHER = ToolSpec("weather", "Reports the weather", PARAMETERS)
CLOCK = ToolSpec("clock", "Reports the time", {"type": "object", "properties": {"zone": {"type": "string"}}})
ROME = ToolCall("weather", {"city": "Rome", "days": 3})
NOON = ToolCall("clock", {"zone": "UTC"})
QUESTION = Message("user", "How warm is it?")
SYSTEM = Message("system", "Be brief.")
MARK = re.compile(
    r"<[|\uff5c][a-zA-Z_\u2581]+[|\uff5c]?>|<[a-z_]+\|>|</?(?:tool_call|think|arg_key|arg_value|tool_response)>|<(?:start|end)_of_turn>"
)
ENDS = {"llama3": "<|eot_id|>", "glm4moe": "<|user|>", "gemma4": "<turn|>", "gptoss": "<|return|>"}
# chat templates in TRL -> the parser, or None where only a response template of the tokenizer is known
FAMILIES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "glm4moe": "glm45",
    "lfm2_2_5": "lfm2",
    "gemma4": "gemma4",
    "nemotron_3_nano": "qwen3_coder",
    "nemotron_3_5_lightning": "qwen3_coder",
}
SINGLE = ("llama3_1", "llama3_2")  # their templates render one call a turn

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed; source scripts/setup_env.sh")


def trl_template(name: str) -> str:
    """The text of a family's chat template, from TRL's package, or a skip."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL, whose package has the chat templates, is not installed: pip install --no-deps trl")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


@cache
def chat_of(name: str) -> ChatTemplate:
    """TRL's template of a family, with a small tokenizer that knows the family's special tokens."""
    text = trl_template(name)
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    marks = {*MARK.findall(text), "<|python_tag|>"}
    special = [mark for mark in marks if "|" in mark]
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special)})
    tokenizer.add_tokens(sorted(marks.difference(special)))
    tokenizer.eos_token = next((end for family, end in ENDS.items() if name.startswith(family)), "<|im_end|>")
    if name.startswith("llama3"):
        tokenizer.bos_token = "<|begin_of_text|>"
    tokenizer.chat_template = text
    ends = marks.intersection(("<|call|>", "<|observation|>", "<|tool_response>"))  # of turns that call
    more = tokenizer.convert_tokens_to_ids(sorted(ends))
    return ChatTemplate(tokenizer, tuple(more))


def weather(city: str) -> str:
    """Reports the weather."""
    return f"21 degrees in {city}"


def episode_tools(runner: EpisodeRunner) -> tuple[ToolSpec, ...]:
    envs = runner.envs
    assert isinstance(envs, TaskEnvs)
    initial = envs.known_initial_observation(Task("t", (QUESTION,), "", "own"))
    assert initial is not None
    return tuple(initial.tools)


@pytest.fixture
def mini() -> ChatTemplate:
    return ChatTemplate(AutoTokenizer.from_pretrained(MINI / "model"))


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
def test_the_handler_of_an_evaluation_reads_the_calls_that_the_template_writes(name: str) -> None:
    """Several families mark calls with <tool_call>, and differ inside it. A model without a record is served alike."""
    chat = chat_of(name)
    template = str(chat.tokenizer.chat_template)
    own = own_format(template)
    if own is None:
        assert FAMILIES[name] in ("glm45", "lfm2", "gemma4")
        with pytest.raises(ConfigError, match="has no known tool format"):
            tool_call_format_of("native", template)
    else:
        assert tool_call_format_of("native", template) == own
        rendered = NativeFormat().bound(chat).render([ROME])
        assert build_tool_call_format(own).parse(rendered, (WEATHER,)) == Calls((ROME,))


SCRAPS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "weather"',
    ', "arguments": {',
    "}",
    "}}",
    "[",
    "3",
    "\n",
)
QWEN_RESPONSES = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}
HOSTED: dict[str | None, BoundNativeFormat] = {}


def _qwen_for(parser: str | None) -> ChatTemplate:
    chat = qwen()
    if parser is None:
        chat.tokenizer.response_template = QWEN_RESPONSES
    return chat


def qwen() -> ChatTemplate:
    return with_template((TEMPLATES / "qwen2.5.jinja").read_text())


def native(chat: ChatTemplate, **options: Any) -> BoundNativeFormat:
    made = build_tool_call_format("native", options)
    assert isinstance(made, NativeFormat)
    return made.bound(chat)


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
def test_the_parser_reads_what_the_chat_template_writes(name: str) -> None:
    chat = chat_of(name)
    style = native(chat)
    assert style.parser == FAMILIES[name]
    typed = ToolCall("weather", {"city": "Rome", "days": 3, "exact": True})
    for calls in [(ROME,), (typed,), (ToolCall("weather", {"city": "über\n<b>"}),)]:
        assert style.parse(style.render(calls), (WEATHER, CLOCK)) == Calls(calls)
    if name not in SINGLE:
        assert style.parse(style.render((ROME, NOON)), (WEATHER, CLOCK)) == Calls((ROME, NOON))
    spoken = "It is warm." if not chat.opens_thought else "I know.\n</think>\n\nIt is warm."
    assert style.parse(spoken, (WEATHER, CLOCK)) == Final()


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
def test_calls_end_with_a_tag_unless_they_are_json_alone(name: str) -> None:
    style = native(chat_of(name))
    end = (
        "" if name in SINGLE else {"lfm2_2_5": "<|tool_call_end|>", "gemma4": "<tool_call|>"}.get(name, "</tool_call>")
    )
    assert style.end_mark == end and style.render((ROME,)).rstrip().endswith(end)


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tools", [(), (WEATHER, CLOCK)])
def test_prompts_are_those_of_apply_chat_template(name: str, tools: tuple[ToolSpec, ...]) -> None:
    chat = chat_of(name)
    schemas = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    messages = [{"role": each.role, "content": each.content} for each in (SYSTEM, QUESTION)]
    expected = chat.tokenizer.apply_chat_template(
        messages, tools=schemas or None, add_generation_prompt=True, return_dict=False
    )
    shown = native(chat).render_prompt((SYSTEM, QUESTION), tools)
    assert not isinstance(shown, str)
    assert list(chat.initial_ids(shown, tools)) == expected


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_an_episode_end_as_the_whole_dialogue(name: str) -> None:
    """The ledger never renders a response again; up to the response, and from its end on, it equals the template's."""
    chat = chat_of(name)
    call = Message("assistant", "", (ROME,), calls_in_content=False)
    results = (Message("tool", "21 degrees", tool="weather"),)
    whole = chat.rendered((QUESTION, call, *results), (WEATHER,))
    prompt, text = chat.rendered((QUESTION,), (WEATHER,)), native(chat).render((ROME,))
    after = str(chat.tokenizer.decode(chat.answer_ids(results, ended=False)))
    spoken = text.rpartition("</think>")[2].strip()  # templates drop or shorten thoughts of earlier turns
    assert whole.endswith((spoken + after, f"{spoken}\n{after}"))
    if not chat.opens_thought and "<think>" not in text:
        assert prompt + text + after == whole


@pytest.mark.long
@needs_vllm
def test_parallel_results_follow_in_order() -> None:
    chat = qwen()
    style = native(chat)
    results = style.observation((Message("tool", "21", tool="weather"), Message("tool", "noon", tool="clock")), "")
    calls = Message("assistant", "", (ROME, NOON), calls_in_content=False)
    whole = chat.rendered((QUESTION, calls, *results))
    text = chat.rendered((QUESTION,)) + style.render((ROME, NOON))
    assert text + str(chat.tokenizer.decode(chat.answer_ids(results, ended=False))) == whole


@pytest.mark.long
@needs_vllm
def test_a_call_that_the_parser_does_not_read_is_malformed() -> None:
    style = native(qwen())
    assert isinstance(style.parse('<tool_call>\n{"name": "weather"\n</tool_call>'), ParseError)
    assert isinstance(style.parse('<tool_call>\n{"name": "weather", "arguments": 3}\n</tool_call>'), ParseError)
    assert style.parse("<think>\n<tool_call>\n{}\n</tool_call>\n</think>\n\nIt is warm.") == Final()
    assert style.parse("<think>\n<tool_call>") == Final()


def test_the_tokenizers_own_response_template_comes_first() -> None:
    chat = qwen()
    chat.tokenizer.response_template = QWEN_RESPONSES
    style = native(chat)
    assert style.parser is None
    assert style.parse(style.render((ROME, NOON)), (WEATHER, CLOCK)) == Calls((ROME, NOON))
    assert style.parse("<think>\n<tool_call>{}</tool_call>\n</think>\n\nIt is warm.") == Final()
    for text in ("{", '{"name": "weather"}', '{"name": "weather", "arguments": "{}"}', "[]", "3"):
        assert isinstance(style.parse(f"<tool_call>\n{text}\n</tool_call>"), ParseError)


@pytest.mark.parametrize("parser", [None, pytest.param("hermes", marks=needs_vllm)])
@settings(deadline=None, max_examples=200)
@given(text=st.text() | st.lists(st.sampled_from(SCRAPS), max_size=20).map("".join))
def test_no_text_raises_and_problems_are_short(parser: str | None, text: str) -> None:
    style = HOSTED[parser] if parser in HOSTED else HOSTED.setdefault(parser, native(_qwen_for(parser), parser=parser))
    found = style.parse(text, (WEATHER, CLOCK))
    assert found == style.parse(text, (WEATHER, CLOCK))
    assert isinstance(found, Calls | Final | ParseError)
    if isinstance(found, ParseError):
        assert 0 < len(found.problem) < 300 and found.problem.endswith(".")


def test_gpt_oss_by_a_response_template() -> None:
    """Its results are rendered only after the call that they answer; its calls end with a token of their own."""
    chat = chat_of("gptoss")
    chat.tokenizer.response_template = {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
            "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
            "tool_calls": {
                "open_pattern": r"to=functions\.(?P<name>\w+)<\|channel\|>commentary json<\|message\|>",
                "close": "<|call|>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    try:
        style = native(chat)
        text, results = style.render((ROME,)), (Message("tool", "21", tool="weather"),)
        assert style.parse(text, (WEATHER,)) == Calls((ROME,))
        call = Message("assistant", "", (ROME,), calls_in_content=False)
        after = str(chat.tokenizer.decode(chat.answer_ids(results, ended=False)))
        assert chat.rendered((QUESTION,)) + text + after == chat.rendered((QUESTION, call, *results))
    finally:
        del chat.tokenizer.response_template


def test_the_embedded_model_has_no_tools_in_its_template(mini: ChatTemplate) -> None:
    config = load_config(["model.path=m", "data.train_files=[t]", "data.val_files=[v]", "env.tool_call_format=native"])
    with pytest.raises(ConfigError, match="does not list tools"):
        build_episode_runner(config, mini)


@needs_vllm
def test_an_episode_is_the_dialogue_that_the_template_renders() -> None:
    """A call, its result, an answer: the ledger's tokens are those of the chat template, and the calls are scored."""
    chat = qwen()
    overrides = ["env.name=tool", f"env.tools=[{__name__}:weather]", "env.tool_call_format=native"]
    runner = build_episode_runner(
        load_config(["model.path=m", "data.train_files=[t]", "data.val_files=[v]", *overrides]), chat
    )
    call = ToolCall("weather", {"city": "Rome"})
    turns = (native(chat).render((call,)), "It has 21 degrees.")
    prompts: list[tuple[int, ...]] = []

    def script(prompt_ids: Sequence[int], number: int) -> Sequence[int]:
        prompts.append(tuple(prompt_ids))
        return (*chat.response_ids(turns[len(prompts) - 1])[0], chat.end_token_id)

    gold = Message("assistant", "", (call,), calls_in_content=False)
    task = Task("t", (QUESTION,), "", "own", gold=gold)
    sampling = Sampling(max_tokens=512, temperature=1.0)
    episode = asyncio.run(runner.run(ScriptedEngine(script), sampling, task, 0, None))
    assert isinstance(episode, Trajectory) and len(episode.turns) == 2
    schema = episode_tools(runner)
    result = Message("tool", "21 degrees in Rome", tool="weather")
    assert prompts[0] == chat.prompt_ids((QUESTION,), schema)
    assert prompts[1] == chat.prompt_ids((QUESTION, gold, result), schema)
    assert episode.turns[0].parsed == ParsedResponse((call,)) and episode.turns[1].parsed == ParsedResponse()
    assert CallsReward().score(episode, task, 0).parts == {"format": 1.0, "correctness": 3.0, "length": 0.0}


@needs_vllm
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "glm4moe", "gemma4"])
def test_the_lab_proves_the_reward_in_the_models_own_format(name: str) -> None:
    city = ToolCall("weather", {"city": "Rome"})
    answer, one = Message("assistant", "It is warm."), Message("assistant", "", (city,), calls_in_content=False)
    both = Message("assistant", "", (ROME, NOON), calls_in_content=False)
    golds = [answer, one] if name in SINGLE else [answer, one, both]
    tasks = [Task(f"t{n}", (QUESTION,), "", "own", tools=(WEATHER, CLOCK), gold=gold) for n, gold in enumerate(golds)]
    report = try_reward(CallsReward(), tasks, tool_call_format=native(chat_of(name)))
    assert report.violations == []
    assert report.stats["gold"].responses == len(golds)
    assert report.stats.keys() >= {"over-calling", "no call", "wrong value", "half a call"}


def test_a_chat_template_without_a_known_parser_is_an_error_that_names_the_option() -> None:
    chat = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "CALL {{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    )
    with pytest.raises(ConfigError, match=r"no known family.*tool_call_format_options=\{parser: NAME\}"):
        native(chat)


@needs_vllm
def test_a_parser_of_another_family_and_an_unknown_one_are_errors() -> None:
    with pytest.raises(ConfigError, match="does not read the calls"):
        native(qwen(), parser="pythonic")
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        native(qwen(), parser="hermess")
    assert native(qwen(), parser="hermes").parser == native(qwen()).parser == "hermes"


def test_without_the_tokenizer_nothing_is_parsed() -> None:
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        build_tool_call_format("native").parse("x")


QUOTING = (
    {"text": "what does <tool_call> mean"},
    {"text": 'a "<tool_call>" and\n<tool_call>'},
    {"texts": ["no", {"inner": "<tool_call>"}]},
    {"<tool_call>": 3, "é": "雨 <tool_call>"},
)


@needs_vllm
@pytest.mark.parametrize("arguments", QUOTING)
@pytest.mark.parametrize("escaped", [False, True])
def test_a_quoted_tag_in_an_argument_is_no_second_call(arguments: dict[str, Any], escaped: bool) -> None:
    style = native(qwen(), parser="hermes")
    call = json.dumps({"name": "note", "arguments": arguments}, ensure_ascii=escaped)
    text = f"<tool_call>\n{call}\n</tool_call>"
    assert style.parse(text) == Calls((ToolCall("note", arguments),))
    twice = style.parse(f"{text}\n{text}")
    assert twice == Calls((ToolCall("note", arguments),) * 2)
    assert isinstance(style.parse(f"{text}\n<tool_call>\n{{"), ParseError)  # a quoted tag hides no broken call
