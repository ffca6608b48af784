"""The files that are added to an exported model: chat template and tool parser of servers, sampling defaults, card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils import GENERATION_CONFIG_NAME

from toolrl.serve.export.card import CARD, model_card
from toolrl.serve.openai_server.served_model import TrainedFormat, TrainedModel, trained_format
from toolrl.serve.openai_server.serving_files import base_template, serving_texts, write_serving_files
from verl.errors import VerlError
from verl.pretrained import read_tokenizer

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "do_sample")


def write_model_files(
    folder: Path,
    state: Mapping[str, Any],
    chosen: TrainedFormat | None = None,
    results: Sequence[str] = (),
    user_code: bool = False,
    base: str | None = None,
) -> None:
    """Add the files to a model's folder.

    state: of its checkpoint; chosen: its tool-call format, instead of that of the record
    results: tables for the card; user_code: whether the record may name code, as that of the running training
    base: of an adapter, which the folder has in place of a model
    A model that cannot be served gets a card with the reason.
    """
    model = TrainedModel(folder, state.get("resume_config", {}), state)
    problem, trained = "", chosen
    try:
        template = base_template(read_tokenizer(str(folder), "model"), with_tools=True)
        trained = trained or trained_format(model, template, user_code=user_code)
        write_serving_files(folder, serving_texts(folder, trained))
    except VerlError as error:
        problem = str(error).removeprefix(f"{folder}: ").replace(str(folder), "its folder")  # which is a temporary one
    if "rollout.temperature" in model.settings:
        _write_generation_config(folder / GENERATION_CONFIG_NAME, model.settings)
    name = trained.name if trained else None
    write_serving_files(folder, {CARD: model_card(folder, state, name, problem, results, base)})


def _write_generation_config(path: Path, settings: Mapping[str, Any]) -> None:
    """Servers and `generate` sample by default as the rollouts did, not as the initial model's authors recommend."""
    kept = json.loads(path.read_text()) if path.is_file() else {}
    kept = {key: value for key, value in kept.items() if key not in _SAMPLING}
    own = {
        "do_sample": True,
        "temperature": settings["rollout.temperature"],
        "top_p": settings["rollout.top_p"],
        "top_k": max(settings["rollout.top_k"], 0),  # 0: all tokens, where we write -1
        "repetition_penalty": settings["rollout.repetition_penalty"],
    }
    write_serving_files(path.parent, {path.name: json.dumps({**kept, **own}, indent=2) + "\n"})
