"""Tokens of episodes: what follows a turn of the policy is what the chat template writes there."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.conftest import ROOT, smollm2
from tests.support.tiny import MINI
from verl.chat import bounds
from verl.chat.template import ChatTemplate
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.types import Message, ToolCall, ToolSpec

pytestmark = pytest.mark.usefixtures("small_heap")
TEMPLATES = ROOT / "tests" / "verl" / "chat" / "templates"
LLAMA_MARKS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
QUESTION = Message("user", "How warm is it?")
ONE, TWO = Message("tool", "21 degrees", tool="weather"), Message("tool", "sunny", tool="sky")
TOOL = ToolSpec("weather", "Reports the weather", {"type": "object", "properties": {}})


@cache
def format_of(name: str) -> ChatTemplate:
    """A format with the template of that name: of a file in tests/verl/chat/templates, or of a model's folder."""
    if name == "smollm2":
        return ChatTemplate(AutoTokenizer.from_pretrained(smollm2()))
    if name == "mini":
        return ChatTemplate(AutoTokenizer.from_pretrained(MINI / "model"))
    return with_template((TEMPLATES / f"{name}.jinja").read_text(), llama=name == "llama3")


def with_template(template: str, llama: bool = False) -> ChatTemplate:
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    if llama:
        tokenizer.add_special_tokens({"additional_special_tokens": LLAMA_MARKS})
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer)


NAMES = ("mini", "smollm2", "qwen2.5", "qwen3", "llama3")
FOLLOWING = ((ONE,), (ONE, TWO), (Message("user", "And now?"),), (TWO, Message("user", "Go on")))
CHATML_HEAD = "<|im_start|>assistant\n"


def text_of(chat: ChatTemplate, ids: tuple[int, ...]) -> str:
    text: str = chat.tokenizer.decode(ids)
    return text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("following", FOLLOWING)
def test_the_tokens_of_an_episode_are_those_of_the_whole_dialogue(name: str, following: tuple[Message, ...]) -> None:
    chat = format_of(name)
    text = "Let me look: <tool_call> {} </tool_call>"
    response, _ = chat.response_ids(text)
    whole = chat.prompt_ids((QUESTION, Message("assistant", text), *following))
    ended = chat.answer_ids(following, ended=True)
    assert chat.prompt_ids((QUESTION,)) + response + (chat.end_token_id,) + ended == whole
    assert chat.answer_ids(following, ended=False) == (chat.end_token_id, *ended)


def test_a_turn_keeps_the_special_tokens_that_the_policy_wrote() -> None:
    """Rewards read the turn's text: without them a broken response would be a sound one. Its end is no part of it."""
    chat = format_of("mini")
    one, other, end = (
        chat.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("spare_0", "im_start", "im_end")
    )
    paused = (*chat.encoded_ids("Yes"), one)
    ids = (*chat.encoded_ids(" or"), other, *chat.encoded_ids(" no"), end)
    whole = chat.turn_of(chat.prompt_ids((QUESTION,)), (*paused, *ids))
    assert whole == (Message("assistant", "Yes<|spare_0|> or<|im_start|> no"), "")
    assert chat.turn_of((), ids, before=paused)[0].content == " or<|im_start|> no"


@pytest.mark.parametrize(
    ("name", "following", "text"),
    [
        ("mini", (ONE,), f"\n<|im_start|>tool\n21 degrees<|im_end|>\n{CHATML_HEAD}"),
        (
            "qwen2.5",
            (ONE, TWO),
            "\n<|im_start|>user\n<tool_response>\n21 degrees\n</tool_response>"
            f"\n<tool_response>\nsunny\n</tool_response><|im_end|>\n{CHATML_HEAD}",
        ),
        (
            "qwen3",
            (ONE,),
            f"\n<|im_start|>user\n<tool_response>\n21 degrees\n</tool_response><|im_end|>\n{CHATML_HEAD}",
        ),
        ("qwen3", (Message("user", "So?"),), f"\n<|im_start|>user\nSo?<|im_end|>\n{CHATML_HEAD}"),
        (
            "llama3",
            (Message("ipython", "21"), Message("ipython", "sunny")),
            '<|start_header_id|>ipython<|end_header_id|>\n\n"21"<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"sunny"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_answers_as_the_templates_write_them(name: str, following: tuple[Message, ...], text: str) -> None:
    chat = format_of(name)
    assert text_of(chat, chat.answer_ids(following, ended=True)) == text


def test_variables_of_a_template_reach_it() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %} think{% endif %}"
    plain = with_template(template)
    thinking = replace(plain, template_options={"enable_thinking": True})
    messages = (Message("user", "hello"),)
    assert text_of(plain, plain.prompt_ids(messages)) == "hello"
    assert text_of(thinking, thinking.prompt_ids(messages)) == "hello think"


@pytest.mark.parametrize("following", FOLLOWING)
def test_a_template_that_takes_thoughts_out_changes_nothing_of_what_follows(following: tuple[Message, ...]) -> None:
    chat = format_of("qwen3")
    answer = chat.answer_ids(following, ended=True)
    for text in ("<think>\nlong thoughts\n</think>\n\nI look.", "I look.", "<think>\n\n</think>\n\nI look."):
        assert chat.prompt_ids((QUESTION, Message("assistant", text), *following))[-len(answer) :] == answer
    thoughtful = chat.prompt_ids((QUESTION, Message("assistant", "<think>\nso\n</think>\n\nA"), Message("user", "B")))
    assert "so" not in text_of(chat, thoughtful)  # the template does take it out


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(
    content=st.text(st.characters(), max_size=30)
    | st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|eot_id|>", "a", "\n", "<tool_response>"])).map("".join)
)
def test_no_observation_ends_or_begins_a_turn(name: str, content: str) -> None:
    chat = format_of(name)
    special = {token for token, added in chat.tokenizer.added_tokens_decoder.items() if added.special}
    for following in ((Message("tool", content),), (Message("user", content), ONE)):
        plain = tuple(replace(each, content="x") for each in following)
        marks = [token for token in chat.answer_ids(following, ended=True) if token in special]
        assert marks == [token for token in chat.answer_ids(plain, ended=True) if token in special]
    inside = chat.continuation_ids(content)
    assert not special & set(inside)
    if name != "smollm2":  # its vocabulary lacks some bytes
        shown = content.encode(errors="replace").decode()  # half a surrogate pair is no character
        assert normalize("NFC", text_of(chat, inside)) == normalize("NFC", shown)  # Qwen2's tokenizer normalises


def test_an_end_token_that_comes_after_a_space_or_is_one_of_several_is_found() -> None:
    spaced = with_template("{% for m in messages %}{{ m.role + ': ' + m.content + ' <|im_end|>' }}{% endfor %}")
    assert text_of(spaced, spaced.answer_ids((ONE,), ended=True)) == "tool: 21 degrees <|im_end|>"
    other = with_template(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eom_id|>' }}{% endfor %}", llama=True
    )
    eom = other.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    with pytest.raises(ConfigError, match="rather than with a stop token"):
        other.answer_ids((ONE,), ended=False)
    assert replace(other, more_stops=(eom,)).answer_ids((ONE,), ended=False)[0] == eom


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "rather than with a stop token"),
        ("{{ messages[-1].content + '<|im_end|>' }}", "rather than with a stop token"),
        (
            "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}",
            r"rejects messages with the roles user, assistant, user, tool \(no tools here\); choose another "
            "tool-call format",
        ),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}",
            "drops messages with the roles tool; choose another tool-call format",
        ),
    ],
)
def test_templates_that_cannot_continue_a_dialogue_are_refused(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_template(template).answer_ids((Message("user", "So?"), ONE), ended=True)


def test_a_template_that_opens_a_thought_is_known() -> None:
    assert not format_of("qwen3").opens_thought
    opening = (
        (TEMPLATES / "qwen3.jinja")
        .read_text()
        .replace("assistant\\n' }}\n{%- endif", "assistant\\n<think>\\n' }}\n{%- endif")
    )
    assert with_template(opening).opens_thought


def test_the_template_lists_tools_where_there_are_some() -> None:
    for name in ("qwen2.5", "qwen3", "llama3"):
        chat = format_of(name)
        none, some = chat.initial_ids((QUESTION,)), chat.initial_ids((QUESTION,), (TOOL,))
        assert none == chat.initial_ids((QUESTION,), ()) == chat.prompt_ids((QUESTION,)) != some
        assert "ipython" not in text_of(chat, none)
    listed = '{"type": "function", "function": {"name": "weather", "description": "Reports the weather", "parameters"'
    chat = format_of("qwen2.5")
    assert listed in text_of(chat, chat.initial_ids((QUESTION,), (TOOL,)))


def test_a_plain_text_is_an_opening_without_a_template() -> None:
    chat = format_of("mini")
    assert text_of(chat, chat.initial_ids("User: 2+2?\nAssistant:")) == "User: 2+2?\nAssistant:"


def test_an_episode_in_one_turn_reads_as_its_texts_end_to_end() -> None:
    chat, tool_call_format = format_of("mini"), build_tool_call_format("fence")
    opening = tool_call_format.render_prompt((QUESTION,), ())
    written = ["I compute.\n```python\nprint(6 * 7)\n```\n```output", "So \\boxed{42}."]
    seen = tool_call_format.observation((Message("tool", tool_call_format.shown("42\n"), tool="python"),), written[0])
    assert isinstance(opening, str) and isinstance(seen, str)
    responses = [chat.response_ids(text)[0] for text in written]
    ledger = chat.initial_ids(opening) + responses[0] + chat.continuation_ids(seen) + responses[1]
    assert text_of(chat, ledger) == f"{opening}{written[0]}\n42\n```\n{written[1]}"


def test_parsed_calls_are_not_rendered_twice() -> None:
    chat = format_of("llama3")
    message = Message("assistant", "two calls", tool_calls=(ToolCall("f", {}), ToolCall("g", {})))
    assert text_of(chat, chat.prompt_ids((QUESTION, message, ONE))).count("two calls") == 1


def test_a_prompt_that_the_template_refuses_is_a_fault_of_the_data() -> None:
    chat = with_template("{% for m in messages %}{{ raise_exception('no') }}{% endfor %}")
    with pytest.raises(DataError, match="rejects messages with the roles user"):
        chat.initial_ids((QUESTION,), (TOOL,))


ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ range(10**9) | list }}", DataError, "OverflowError"),
        ("{{ 1 / 0 }}", DataError, "ZeroDivisionError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", DataError, "RecursionError"),
        ("{{ 'a' * 10**7 }}", ConfigError, "renders 10000000 characters from [0-9]+; set model.tokenizer_path"),
        (ENDLESS, ConfigError, r"took longer than 2 s"),
    ],
)
def test_a_failing_or_endless_template_is_a_one_line_error(
    template: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds.render_deadline.__wrapped__, "__defaults__", (2.0,))  # type: ignore[attr-defined]
    with pytest.raises(error, match=f"chat template.*{message}"):
        with_template(template).prompt_ids((QUESTION,))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__' of 'str' object is unsafe"),
        ("{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}", "'__class__' of 'dict' object is unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "'__class__' of 'list' object is unsafe"),
        ("{{ (''|attr('__class__')).__mro__ }}", "has no attribute '__class__'|unsafe"),
        ("{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}", "'__globals__' of .* is unsafe"),
        ("{{ lipsum.__globals__['os'].mkdir('MARK') }}", "'__globals__' of .* is unsafe"),
        ("{{ cycler.__init__.__globals__.os.mkdir('MARK') }}", "'__init__' of .* is unsafe"),
        ("{{ self._TemplateReference__context.environment }}", "'_TemplateReference__context' of .* is unsafe"),
        ("{{ __import__('os').mkdir('MARK') }}", "'__import__' is undefined"),
        ("{{ eval('1') }}", "'eval' is undefined"),
        ("{% import 'os' as os %}{{ os.mkdir('MARK') }}", "no loader"),
        ("{% from 'os' import mkdir %}{{ mkdir('MARK') }}", "no loader"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% extends '/etc/passwd' %}", "no loader"),
        ("{{ messages.clear() }}", "'clear' of 'list' object is unsafe"),
        ("{{ messages[0].update({'role': 'system'}) }}", "'update' of 'dict' object is unsafe"),
        ("{{ messages[5].content }}", "list object has no element 5"),
        ("{{ nowhere.content }}", "'nowhere' is undefined"),
    ],
)
def test_a_class_walk_globals_import_and_include_run_no_code(template: str, message: str, tmp_path: Path) -> None:
    chat = with_template(template.replace("MARK", str(tmp_path / "mark")))
    with pytest.raises(DataError, match=message) as raised:
        chat.prompt_ids((QUESTION,))
    assert "\n" not in str(raised.value) and not (tmp_path / "mark").exists()


@pytest.mark.parametrize("template", ["{{ (lambda: open('MARK', 'w'))() }}", "{% if %}", "{{ 'a", "{% unknown %}"])
def test_an_unreadable_template_is_a_one_line_error(template: str) -> None:
    with pytest.raises(ConfigError, match=r"chat template .* cannot be parsed") as raised:
        with_template(template).prompt_ids((QUESTION,))
    assert "\n" not in str(raised.value)


def test_a_prompt_of_many_messages_is_checked_in_linear_time() -> None:
    chat = format_of("mini")
    began = time.process_time()
    chat.check_messages((Message("user", "hi"), Message("assistant", "so")) * 20_000, (), "prompt")
    assert time.process_time() - began < 5


def test_a_long_message_may_make_a_long_prompt() -> None:
    text = "a" * (2 * bounds.FREE_CHARS)
    assert len(format_of("mini").rendered((Message("user", text),))) > len(text)
