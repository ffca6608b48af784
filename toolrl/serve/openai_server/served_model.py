"""The model to serve: a run's checkpoint or a model folder, with the format in which it was trained."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from verl.chat.native import own_format
from verl.checkpoint.checkpoint import STATE, read_state
from verl.checkpoint.manifest import read_json
from verl.config.load import named_model
from verl.data.source import source_rows
from verl.embedded import embedded_path
from verl.errors import ConfigError, VerlError
from verl.formats.base import ToolCallFormat, build_tool_call_format
from verl.formats.prompt import TOOLS, PromptTemplate, load_template
from verl.formats.toolrl_text import TOOLS_HEADING
from verl.registry import names_code, option

_ROWS = 16  # rows of the training data whose prompts are read
# The tool list in the system message of a training row, which is text: ToolRL's list, or one JSON schema per line.
_LISTS = {
    "toolrl": re.compile(r"^1\. Name:.*^Parameters:[^\n]*$", re.MULTILINE | re.DOTALL),
    "tool_n1": re.compile(r"(?<=<tools>\n).*(?=\n</tools>)", re.DOTALL),
}
_REWARDS = {"rlla": "toolrl", "tool_n1": "tool_n1"}  # rewards that score one format


@dataclass(frozen=True)
class TrainedModel:
    """folder: in transformers' format; settings: of the training run (empty if unknown); state: of its checkpoint

    adapter: that of a run with one, whose merged copy is in `folder`
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    adapter: Path | None = None


@dataclass(frozen=True)
class TrainedFormat:
    """How prompts were rendered and responses parsed.

    prompt: the system prompt of the training rows, with a place for the tools, if it is not the format's own
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: PromptTemplate | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    separate_turns: bool = False

    def build(self) -> ToolCallFormat:
        """Raises ConfigError."""
        return build_tool_call_format(self.name, self.options)


def find_model(target: str, checkpoint: str = "latest") -> TrainedModel:
    """target: the folder of a run, of a checkpoint or of a model, `embedded` or `smollm2`; checkpoint: latest or best.

    An adapter is found by its run or checkpoint, not by the merged copy in the checkpoint's hf/.
    Raises ConfigError if it is none of these.
    """
    folder, adapter = Path(embedded_path(named_model(target))), None
    if (folder / "checkpoints").is_dir():
        folder = _follow_pointer(folder / "checkpoints", checkpoint)
    if (folder / STATE).is_file() and (folder / "hf").is_dir():
        adapter = folder / "adapter" if (folder / "adapter").is_dir() else None
        folder /= "hf"
    if (folder / "config.json").is_file():
        state = read_state(folder.parent) if (folder.parent / STATE).is_file() else {}
        return TrainedModel(folder, state.get("resume_config", {}), state, adapter)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {target!r}; give the folder of a run or of a model")
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"{target} holds a run without a checkpoint; train until one is saved (trainer.save_freq)")
    raise ConfigError(f"{target} is neither the folder of a run (checkpoints/) nor of a model (config.json)")


def _follow_pointer(checkpoints: Path, name: str) -> Path:
    pointer = checkpoints / f"{name}.json"
    if not pointer.is_file():
        reason = "best needs validation scores" if name == "best" and (checkpoints / "latest.json").is_file() else ""
        raise ConfigError(f"{checkpoints} has no {name} checkpoint{f': {reason}' if reason else ' yet'}")
    folder = checkpoints / Path(str(read_json(pointer).get("folder"))).name
    if not (folder / "hf" / "config.json").is_file():
        raise ConfigError(f"{pointer} names {folder.name}, which has no model in hf/; choose another --checkpoint")
    return folder


def trained_format(
    model: TrainedModel, chat_template: str, prompt: PromptTemplate | None = None, user_code: bool = False
) -> TrainedFormat:
    """The format of the model's run; without env.tool_call_format, that of its demonstrations, rows, reward or chat
    template.

    chat_template: the model's; prompt: that of the training rows, if it cannot be read from them
    user_code: whether the record may name code; it may be another author's
    Raises ConfigError if it is unknown, and for code.
    """
    settings = model.settings
    name = settings.get("env.tool_call_format")
    if not user_code:
        check_recorded(model)
    rows = None if prompt else _prompt_of_rows(settings.get("data.train_files") or ())
    template_options = settings.get("model.chat_template_options") or {}
    if name is not None:
        options = dict(settings.get("env.tool_call_format_options") or {})
        if settings.get("data.prompt_template") is not None:
            options["prompt_template"] = settings["data.prompt_template"]
        own = rows[1] if rows is not None and rows[0] == name else prompt
        return TrainedFormat(
            name, options, own, template_options, settings.get("env.name", "single_turn") != "single_turn"
        )
    if state := model.state.get("tool_call_format"):
        return TrainedFormat(state, prompt=prompt, template_options=template_options)
    if rows is not None:
        return TrainedFormat(rows[0], prompt=rows[1], template_options=template_options)
    name = _REWARDS.get(str(settings.get("reward.name"))) or own_format(chat_template)
    if name is None:
        raise ConfigError(
            f"{model.folder}: the record of this model names no tool-call format, and its chat template lists no "
            "tools, or writes calls that only `native` reads; set --tool-call-format (docs/tool_call_formats.md)"
        )
    return TrainedFormat(name, prompt=prompt, template_options=template_options)


def check_recorded(model: TrainedModel) -> None:
    """Raises ConfigError if the record of a model names code, which would be run."""
    for name in (model.settings.get("env.tool_call_format"), model.state.get("tool_call_format")):
        if names_code(str(name)):
            raise ConfigError(
                f"{model.folder}: the record of this model names code as env.tool_call_format, which is run only if "
                f"you name it: --tool-call-format {name}, in `toolrl chat` env.tool_call_format={name}"
            )


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of commands that take a run or a model."""
    parser.add_argument("model", metavar="RUN", help="output folder of a training, or a model folder")
    parser.add_argument("--checkpoint", choices=("latest", "best"), default="latest", help="of a run")
    parser.add_argument("--tool-call-format", metavar="NAME", help="instead of the one in the record of the run")
    parser.add_argument("--option", type=option, action="append", default=[], metavar="KEY=VALUE", help="of the format")
    parser.add_argument("--prompt-template", metavar="FILE", help="system prompt with {tools}, as in the training rows")


def chosen_format(options: argparse.Namespace, model: TrainedModel, chat_template: str) -> TrainedFormat:
    """The format of the command line, else that of the training. Raises ConfigError."""
    if options.option and not options.tool_call_format:
        raise ConfigError("--option needs --tool-call-format")
    own = options.prompt_template and load_template(options.prompt_template, TOOLS)
    if options.tool_call_format:
        templates = model.settings.get("model.chat_template_options") or {}
        return TrainedFormat(options.tool_call_format, dict(options.option), own or None, templates)
    return trained_format(model, chat_template, own or None)


def _prompt_of_rows(files: list[str] | tuple[str, ...]) -> tuple[str, PromptTemplate] | None:
    """(format, prompt template) of rows that list their tools as text; None without, or if the data is not here.

    Raises ConfigError if the rows have several prompts.
    """
    prompts: dict[tuple[str, str], None] = {}
    for source in files:
        try:
            rows = [row for batch in islice(source_rows(embedded_path(source)), _ROWS) for row in batch]
        except (VerlError, OSError):
            continue  # moved since the training
        for row in rows:
            for system in _system_texts(row) if isinstance(row, Mapping) else ():
                prompts |= dict.fromkeys(_without_list(system))
    if len(prompts) > 1:
        raise ConfigError(
            "the training rows have several system prompts around their tools; choose one with --prompt-template FILE "
            f"(a text with {TOOLS})"
        )
    return next(((name, PromptTemplate(text)) for name, text in prompts), None)


def _system_texts(row: Mapping[str, Any]) -> list[str]:
    """System texts of a task, a conversation, or a demonstration in ToolRL's form."""
    messages = row.get("prompt") or row.get("messages")
    listed = [message for message in messages if isinstance(message, Mapping)] if isinstance(messages, list) else []
    texts = [row.get("instruction"), *(each.get("content") for each in listed if each.get("role") == "system")]
    return [str(text) for text in texts if text]


def _without_list(system: str) -> list[tuple[str, str]]:
    """[(format, the text with {tools} in place of the list)], empty without a list."""
    name = "toolrl" if TOOLS_HEADING in system else "tool_n1"
    text, count = _LISTS[name].subn(TOOLS, system, count=1)
    return [(name, text)] if count else []
