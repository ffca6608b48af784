"""The files of a model folder with which any vLLM serves it: a chat template and a tool parser."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from toolrl.serve.openai_server.chat_template import serving_chat_template
from toolrl.serve.openai_server.dropped import refusals
from toolrl.serve.openai_server.served_model import TrainedFormat
from toolrl.serve.openai_server.thoughts import thought_places
from verl.chat.native import NativeFormat
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.episodes.start_check import check_turns
from verl.errors import ConfigError
from verl.formats.base import TOOL_CALL_FORMATS
from verl.formats.inline import InlineFormat
from verl.formats.prompt import TurnFormat
from verl.host.files import replacing
from verl.pretrained import end_tokens, read_tokenizer

CHAT_TEMPLATE = "tool_chat_template.jinja"
TOOL_PARSER = "tool_parser.py"
_PARSER_TEXT = '''"""vLLM's tool parser for this model. It needs our wheel: pip install --no-deps toolrl-*.whl"""

import json

from toolrl.serve.openai_server.tool_parser import register_tool_parser

register_tool_parser({name}, json.loads({options}), json.loads({template_options}))
'''
_LITERAL = r"""(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""  # string literal
_OURS = re.compile(
    re.escape(_PARSER_TEXT)
    .replace(r"\{name\}", r'"(\w+)"')
    .replace(r"\{options\}", _LITERAL)
    .replace(r"\{template_options\}", _LITERAL)
)


def is_our_parser(path: Path) -> bool:
    """Whether a tool parser is one that we write, of a known format. vLLM imports the file; this reads it."""
    match = _OURS.fullmatch(path.read_text(encoding="utf-8", errors="replace"))
    return match is not None and match[1] in TOOL_CALL_FORMATS


def serving_texts(folder: Path, trained: TrainedFormat) -> Mapping[str, str]:
    """The content of each file, with a generation config if the model's lacks the end token of its chat template.

    folder: of the model. Raises ConfigError if the format or model cannot be served."""
    tokenizer = read_tokenizer(str(folder), "model")
    tool_call_format = trained.build()
    raw = isinstance(tool_call_format, InlineFormat) and tool_call_format.raw
    if trained.prompt is not None and tool_call_format.template_tools:
        raise ConfigError(
            f"--prompt-template has no effect with the tool-call format {trained.name}, whose tools the model's chat "
            "template lists; set --option prompt_template=FILE, a text with {question} and {tools}"
        )
    chat = ChatTemplate(tokenizer, end_tokens(str(folder)), template_options=trained.template_options)
    template = serving_chat_template(
        tool_call_format,
        "" if raw else base_template(tokenizer, tool_call_format.template_tools),
        prompt=trained.prompt,
        options=trained.template_options,
        separate_turns=trained.separate_turns,
        bos_token=_bos(tokenizer) if raw else "",
        refusals="" if raw else refusals(chat, tool_call_format.template_tools),
        thoughts=thought_places(chat) if tool_call_format.template_tools else "",
    )
    if isinstance(tool_call_format, NativeFormat):
        tool_call_format = tool_call_format.bound(chat)  # an error here, not in the server
    if isinstance(tool_call_format, TurnFormat) and chat.opens_thought:  # as in training
        trained = replace(trained, options={**trained.options, "in_thought": True})
        tool_call_format = trained.build()
    check_turns(ObservationTokenizer(chat, tool_call_format, 0))
    texts = {CHAT_TEMPLATE: template, TOOL_PARSER: _parser_text(trained)}
    known = (tokenizer.eos_token_id, *chat.more_stops)
    if raw or chat.end_token_id in known:
        return texts
    return {**texts, GENERATION_CONFIG_NAME: _generation_config(folder, chat.stop_token_ids)}


def write_serving_files(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        with replacing(folder / name) as unfinished:
            unfinished.write_text(text, encoding="utf-8")


def base_template(tokenizer: PreTrainedTokenizerBase, with_tools: bool = False) -> str:
    """The model's own chat template. Raises ConfigError if it has none."""
    try:
        return str(tokenizer.get_chat_template(tools=[{}] if with_tools else None))
    except ValueError as error:
        raise ConfigError(f"{tokenizer.name_or_path} has no chat template, so it cannot serve chats") from error


def _generation_config(folder: Path, ends: Sequence[int]) -> str:
    """The model's own with these end tokens, for base models, whose configuration does not know the chat template's."""
    path = folder / GENERATION_CONFIG_NAME
    own = json.loads(path.read_text()) if path.is_file() else {}
    return json.dumps({**own, "eos_token_id": list(ends)}, indent=2) + "\n"


def _bos(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokens that the tokenizer puts before a text. Servers tokenize without it."""
    ids = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    if ids[len(ids) - len(plain) :] != plain:
        raise ConfigError(f"{tokenizer.name_or_path} adds a token at the end of prompts, which servers do not")
    return str(tokenizer.decode(ids[: len(ids) - len(plain)]))


def _parser_text(trained: TrainedFormat) -> str:
    """Without the options of prompts, which name files of this machine and do not matter for responses."""
    options = {key: value for key, value in trained.options.items() if key not in ("prompt_template", "raw")}
    return _PARSER_TEXT.format(
        name=json.dumps(trained.name),
        options=repr(json.dumps(options)),
        template_options=repr(json.dumps(dict(trained.template_options))),
    )
