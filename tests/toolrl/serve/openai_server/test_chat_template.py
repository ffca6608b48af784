"""Chat templates for servers: equal to what training renders, for random conversations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME

from tests.test_docs import quickstart_files
from toolrl.envs.agent.ledger import Ledger
from toolrl.serve.openai_server.chat_template import serving_chat_template
from toolrl.serve.openai_server.dropped import refusals
from toolrl.serve.openai_server.served_model import TrainedFormat
from toolrl.serve.openai_server.serving_files import CHAT_TEMPLATE, serving_texts
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.data.messages import read_messages, read_tools
from verl.embedded import embedded_path
from verl.envs.base import Observation
from verl.errors import ConfigError, DataError
from verl.formats.base import TOOL_CALL_FORMATS, ToolCallFormat, build_tool_call_format
from verl.formats.inline import InlineFormat
from verl.formats.prompt import PromptTemplate, function_schema
from verl.types import Message, ToolSpec

TEMPLATES = Path(__file__).parents[3] / "verl" / "chat" / "templates"
TURNS = [name for name in TOOL_CALL_FORMATS if not isinstance(build_tool_call_format(name), InlineFormat)]
INLINE = [name for name in TOOL_CALL_FORMATS if name not in TURNS]
RAIN = ToolSpec("rain", "Reports rain.", {"type": "object", "properties": {"city": {"type": "string"}}})
QWEN_PROMPT = {"prompt_template": "artist_tools"}  # lists the tools itself

texts = st.text(st.sampled_from("ab é😀\n\"\\{}[],:<>/'0"), max_size=12)
names = st.text(st.sampled_from("abcdefü_"), min_size=1, max_size=5)
values: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
parameter = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["string", "integer"]), "description": texts})
tool = st.builds(
    lambda name, description, properties: {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
        },
    },
    names,
    texts,
    st.dictionaries(names, parameter, max_size=2),
)
results = (
    texts | values.map(json.dumps) | st.sampled_from(["12e3", "-0", "01", "1.", "[1, ", '{"a":1,"a":2}', "NaN", " 3 "])
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """System messages, user messages, assistant turns with parallel calls, and their results."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": each} for each in draw(st.lists(texts, max_size=2))]
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        calls = draw(st.lists(st.dictionaries(names, values, max_size=2), max_size=2))
        if calls:
            content = {"role": "assistant", "content": draw(texts)}
            messages.append(
                content | {"tool_calls": [call(f"c{number}{place}", each) for place, each in enumerate(calls)]}
            )
            messages += [
                {"role": "tool", "tool_call_id": f"c{number}{place}", "content": draw(results)}
                for place in range(len(calls))
            ]
        elif number < 2:
            messages.append({"role": "assistant", "content": draw(texts)})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": draw(texts)})
    return messages


def call(identifier: str, arguments: Mapping[str, Any], name: str = "look_up") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


@cache
def chat(template: str = "mini", **options: Any) -> ChatTemplate:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(embedded_path("embedded:model"))
    if template != "mini":
        tokenizer.bos_token = "<|begin_of_text|>"  # which Llama's template writes
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return ChatTemplate(tokenizer, template_options=options)


def trained_ids(
    used: ChatTemplate, tool_call_format: ToolCallFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> list[int]:
    observation = Observation(read_messages(messages, "messages"), tools=read_tools(tools))
    return [*ObservationTokenizer(used, tool_call_format, 512).prompt_ids(observation)]


def served_text(used: ChatTemplate, template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
    """As a server renders: it adds nothing to messages and tools but null for a missing description."""
    return str(
        used.tokenizer.apply_chat_template(
            [dict(each) for each in messages],
            tools=list(tools) or None,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
        )
    )


def ids(used: ChatTemplate, text: str) -> list[int]:
    return list(used.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("name", "options"),
    [("toolrl", {}), ("tool_n1", {}), *((each, QWEN_PROMPT) for each in ("hermes", "xml", "llama3_json"))],
)
@settings(max_examples=60)
@given(messages=conversations(), tools=st.lists(tool, max_size=2, unique_by=lambda each: each["function"]["name"]))
def test_random_conversations_are_rendered_as_in_training(
    name: str, options: Mapping[str, Any], messages: list[dict[str, Any]], tools: list[Any]
) -> None:
    used, tool_call_format = chat(), build_tool_call_format(name, options)
    template = serving_chat_template(tool_call_format, used.tokenizer.chat_template)
    expected = trained_ids(used, tool_call_format, messages, tools)
    assert used.tokenizer.decode(ids(used, served_text(used, template, messages, tools))) == used.tokenizer.decode(
        expected
    )
    assert ids(used, served_text(used, template, messages, tools)) == expected


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "llama3"])
@settings(max_examples=15)
@given(tools=st.lists(tool, min_size=1, max_size=2, unique_by=lambda each: each["function"]["name"]))
def test_a_template_that_lists_tools_itself_stays_as_it_is_except_for_null(template: str, tools: list[Any]) -> None:
    used, tool_call_format = chat(template), build_tool_call_format("hermes")
    served = serving_chat_template(tool_call_format, used.tokenizer.chat_template)
    messages = [{"role": "user", "content": "a"}]
    with_null = [{**each, "function": {**each["function"], "strict": None}} for each in tools]
    expected = used.tokenizer.decode(trained_ids(used, tool_call_format, messages, tools))
    assert served_text(used, served, messages, with_null) == expected
    assert served.endswith(used.tokenizer.chat_template.removesuffix("\n"))


@pytest.mark.parametrize("name", [*INLINE, "tags"])
@settings(max_examples=30)
@given(question=texts, turns=st.lists(st.tuples(texts, texts, results), max_size=2), system=st.none() | texts)
def test_a_tool_result_continues_the_turn_as_in_an_episode(
    name: str, question: str, turns: list[tuple[str, str, str]], system: str | None
) -> None:
    used, inline = chat(), build_tool_call_format(name)
    assert isinstance(inline, InlineFormat)
    messages: list[dict[str, Any]] = [] if system is None or inline.raw else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": question})
    expected = used.tokenizer.decode(trained_ids(used, inline, messages, []))
    for content, argument, result in turns:
        made = call("c0", {inline.argument: argument}, inline.tool)
        written = content + inline.render(
            read_messages([{"role": "assistant", "tool_calls": [made]}], "m")[0].tool_calls
        )
        # an empty argument is no call, and its observation another one
        expected += written + inline.wrap(inline.shown(result), written)
        messages += [
            {"role": "assistant", "content": content, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c0", "content": result},
        ]
    template = serving_chat_template(inline, used.tokenizer.chat_template)
    assert served_text(used, template, messages, []) == expected


def test_later_turns_of_episodes_are_turns_of_their_own() -> None:
    """With separate turns the history of ToolRL's rows holds the opening messages only."""
    used, toolrl = chat(), build_tool_call_format("toolrl")
    tools = [{"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": {}}}]
    opening = [{"role": "user", "content": "Rain?"}]
    made = {"role": "assistant", "content": "<think> I look. </think>", "tool_calls": [call("c0", {"city": "Kala"})]}
    result = {"role": "tool", "tool_call_id": "c0", "content": '{"rain":  true}'}
    template = serving_chat_template(toolrl, used.tokenizer.chat_template, separate_turns=True)
    prompt = trained_ids(used, toolrl, opening, tools)
    written = '<think> I look. </think>\n<tool_call>\n{"name": "look_up", "parameters": {"city": "Kala"}}\n</tool_call>'
    tokenizer = ObservationTokenizer(used, toolrl, 512)
    later = tokenizer.answer_ids([Message("tool", '{"rain":  true}', tool="look_up")], written, False)
    expected = used.tokenizer.decode([*prompt, *ids(used, written), *later])
    assert served_text(used, template, [*opening, made, result], tools) == expected
    assert '<obs> [{"name": "look_up", "results": {"rain": true}}] </obs>' in expected


def test_the_prompt_of_the_rows_replaces_that_of_the_format() -> None:
    used, toolrl = chat(), build_tool_call_format("toolrl")
    template = serving_chat_template(
        toolrl, used.tokenizer.chat_template, prompt=PromptTemplate("Tools:\n{tools}\nGo.")
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"properties": {}}}}]
    text = served_text(used, template, [{"role": "user", "content": "a"}], tools)
    assert "<|im_start|>system\nTools:\n1. Name: f\nDescription: F.\nParameters: {}\nGo.<|im_end|>" in text


def test_variables_of_the_training_are_set() -> None:
    used = chat("qwen3")
    template = serving_chat_template(
        build_tool_call_format("hermes"), used.tokenizer.chat_template, options={"enable_thinking": False}
    )
    messages = [{"role": "user", "content": "a"}]
    expected = chat("qwen3", enable_thinking=False)
    assert served_text(used, template, messages, []) == expected.rendered(read_messages(messages, "messages"))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "one user message"),
        ([{"role": "assistant", "content": "a"}], "no user message"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "one call of the assistant"),
    ],
)
def test_conversations_that_training_has_not_seen_are_refused(messages: list[dict[str, Any]], problem: str) -> None:
    used = chat()
    template = serving_chat_template(build_tool_call_format("fence"), used.tokenizer.chat_template)
    with pytest.raises(Exception, match=problem):
        served_text(used, template, messages, [])


@pytest.mark.parametrize("name", ["toolrl", "tool_n1"])
def test_a_result_of_an_unknown_call_is_refused_as_in_training(name: str) -> None:
    used = chat()
    template = serving_chat_template(build_tool_call_format(name), used.tokenizer.chat_template)
    asked = {"role": "assistant", "content": "", "tool_calls": [call("c0", {})]}
    messages = [{"role": "user", "content": "a"}, asked, {"role": "tool", "tool_call_id": "c1", "content": "7"}]
    with pytest.raises(Exception, match="c1 is the id of no call before it"):
        served_text(used, template, messages, [])


@pytest.mark.parametrize("name", ["toolrl", "tool_n1"])
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_thoughts_in_a_field_are_shown_as_the_gateway_shows_them(name: str, field: str) -> None:
    used, style = chat(), build_tool_call_format(name)
    template = serving_chat_template(style, used.tokenizer.chat_template)
    asked = {"role": "assistant", "content": "\n\nI look.", field: " Hm. ", "tool_calls": [call("c0", {})]}
    history = [{"role": "user", "content": "a"}, asked, {"role": "tool", "tool_call_id": "c0", "content": "7"}]
    tools = read_tools([function_schema(RAIN)])
    ledger = Ledger(ObservationTokenizer(used, style, 512))
    shown = ledger.place(ledger.find(read_messages(history, "messages"), tools)).prompt_ids
    assert ids(used, served_text(used, template, history, [function_schema(RAIN)])) == [*shown]
    assert "<think> Hm. </think>\n\nI look." in used.tokenizer.decode(shown)


class Unknown:
    """A user's format with prompts of its own, without a base class."""

    template_tools = False


def test_a_format_without_a_template_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match="tool-call format Unknown cannot be written as a chat template"):
        serving_chat_template(Unknown(), "")  # type: ignore[arg-type]


def test_a_format_of_ones_own_is_served_with_its_prompt(tmp_path: Path) -> None:
    for name in ("my_format.py", "my_prompt.txt"):
        (tmp_path / name).write_text(quickstart_files()[name])
    style = build_tool_call_format(
        f"{tmp_path / 'my_format.py'}:CallFormat", {"prompt_template": str(tmp_path / "my_prompt.txt")}
    )
    used, schema = chat(), function_schema(RAIN)
    template = serving_chat_template(style, used.tokenizer.chat_template)
    shown = style.render_prompt((Message("user", "Rain?"),), (RAIN,))
    assert served_text(used, template, [{"role": "user", "content": "Rain?"}], [schema]) == used.rendered(shown)
    asked = {"role": "assistant", "content": "", "tool_calls": [call("c0", {})]}
    with pytest.raises(Exception, match="earlier calls cannot be rendered"):
        served_text(used, template, [{"role": "user", "content": "Rain?"}, asked], [schema])


def test_a_base_model_is_served_with_the_end_of_its_chat_template(tmp_path: Path) -> None:
    """Its own files know the end of documents alone, at which no turn ends."""
    model = Path(shutil.copytree(embedded_path("embedded:model"), tmp_path / "model"))
    assert GENERATION_CONFIG_NAME not in serving_texts(model, TrainedFormat("toolrl"))
    for name, key, end in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("generation_config.json", "eos_token_id", 0),
        ("config.json", "eos_token_id", 0),
    ):
        own = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**own, key: end}))
    served = json.loads(serving_texts(model, TrainedFormat("toolrl"))[GENERATION_CONFIG_NAME])
    own = json.loads((model / GENERATION_CONFIG_NAME).read_text())
    assert served == {**own, "eos_token_id": [2, 0]}
    assert GENERATION_CONFIG_NAME not in serving_texts(model, TrainedFormat("fence"))  # without a chat template


@pytest.mark.parametrize("name", ["toolrl", "fence"])
def test_a_role_that_training_refuses_is_refused(name: str) -> None:
    used = chat()
    template = serving_chat_template(build_tool_call_format(name), used.tokenizer.chat_template)
    with pytest.raises(Exception, match="the role developer is not one of"):
        served_text(used, template, [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}], [])


TURN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n"
TEXTS = f"{{% for m in messages %}}{TURN}{{% endfor %}}<|im_start|>assistant\n"
CALLS = TEXTS.replace("<|im_end|>", "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>")
LISTS = "{{ tools | tojson if tools else '' }}"
SYSTEM, HELLO = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}
CALLED = [HELLO, {"role": "assistant", "content": "", "tool_calls": [call("c0", {"city": "Oslo"}, "rain")]}]
ANSWERED = [*CALLED, {"role": "tool", "tool_call_id": "c0", "content": "7"}]
DROPS_SYSTEM = "the model's chat template drops messages with the role system"
DROPS_TOOLS = "the model's chat template does not list tools"


@pytest.mark.parametrize(
    ("template", "style", "refused", "shown", "problem"),
    [
        (TEXTS, "hermes", [HELLO], None, f"{DROPS_TOOLS}, .* serve it with a format that"),
        (TEXTS, "hermes", [SYSTEM, HELLO], None, f"{DROPS_TOOLS}, .* --option prompt_template=FILE"),
        (
            "{% if messages[0].role == 'system' %}" + LISTS + "{% endif %}" + CALLS,
            "hermes",
            [HELLO],
            [SYSTEM, HELLO],
            f"{DROPS_TOOLS} without a system message",
        ),
        (
            "{% if messages[0].role != 'system' %}" + LISTS + "{% endif %}" + CALLS,
            "xml",
            [SYSTEM, HELLO],
            [HELLO],
            f"{DROPS_TOOLS} beside a system message",
        ),
        (
            "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CALLS,
            "llama3_json",
            [HELLO],
            None,
            DROPS_TOOLS,
        ),
        (LISTS + TEXTS, "hermes", CALLED, [HELLO], "drops the calls of earlier turns"),
        (
            LISTS + CALLS.replace("m in messages", "m in messages if m.role != 'tool'"),
            "hermes",
            ANSWERED,
            [HELLO],
            "tool",
        ),
        (
            TEXTS.replace("m in messages", "m in messages if m.role != 'tool'"),
            "tool_n1",
            ANSWERED,
            [HELLO],
            "role tool",
        ),
        (TEXTS.replace("m in messages", "m in messages if m.role != 'system'"), "toolrl", [HELLO], None, DROPS_SYSTEM),
    ],
)
def test_fields_dropped_by_the_chat_template_are_refused_as_in_training(
    template: str, style: str, refused: list[Any], shown: list[Any] | None, problem: str, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(embedded_path("embedded:model"), tmp_path / "model"))
    (model / "chat_template.jinja").write_text(template)
    used = ChatTemplate(PreTrainedTokenizerFast.from_pretrained(model))
    made, tools = serving_texts(model, TrainedFormat(style))[CHAT_TEMPLATE], [function_schema(RAIN)]
    with pytest.raises(Exception, match=problem):
        served_text(used, made, refused, tools)
    with pytest.raises((ConfigError, DataError)):
        trained_ids(used, build_tool_call_format(style), refused, tools)
    if shown is not None:
        expected = trained_ids(used, build_tool_call_format(style), shown, tools)
        assert ids(used, served_text(used, made, shown, tools)) == expected


def test_a_prompt_template_that_a_format_does_not_use_is_refused(tmp_path: Path) -> None:
    trained = TrainedFormat("hermes", prompt=PromptTemplate("Tools: {tools}"))
    with pytest.raises(ConfigError, match="--prompt-template has no effect with the tool-call format hermes"):
        serving_texts(Path(embedded_path("embedded:model")), trained)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3"])
def test_a_chat_template_that_shows_all_refuses_nothing(name: str) -> None:
    assert refusals(chat(name), template_tools=True) == refusals(chat(name), template_tools=False) == ""
