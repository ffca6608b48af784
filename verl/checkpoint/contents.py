"""What a run learns from besides its settings: the contents of the files that they name, and ToolRL's variables.

A file or folder is known by its content, so that it may be moved, and may not be replaced under its path. A model or
data set on the hub is known by its commit.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.data.rows import version_of
from verl.pretrained import revision_of
from verl.system.digests import file_digest, folder_digests
from verl.utils.reward_score.rlla import switches

Contents = dict[str, Any]  # by setting, in its form: a text for each file, {name: text} for a model's folder

_DATA = "data.train_files"
_MODELS = ("model.path", "model.tokenizer_path", "critic.path")
_PROMPT = "data.prompt_template"
_COMMAND = "env.command"
_CODE = re.compile(r"(?P<file>.+\.(py|pkl)):\w+")
_MODULE = re.compile(r"(?P<module>[\w.]+):\w+")
_OWN = __name__.partition(".")[0]
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_TEXTS = ("*.md", "LICENSE*")


def contents_of(settings: Mapping[str, Any], reads_weights: bool) -> Contents:
    """{setting: contents} of those that name files, and {variable: "1"} of ToolRL's that are on, if there is a reward.

    reads_weights: the folder `model.path` is read again on a resume, as the reference of a KL penalty
    """
    found: Contents = dict(switches()) if "reward.name" in settings else {}
    for key, value in settings.items():
        if key in _MODELS:
            content = value and _of_model(value, reads_weights and key == "model.path")
        elif key == _DATA:
            content = [_of_data(source) for source in value]
        elif key == _COMMAND:
            content = value and [_of_text(word) for word in shlex.split(value)]
        else:
            content = _of_value(value, is_path=key == _PROMPT)
        if content != value:
            found[key] = content
    return found


def _of_model(path: str, with_weights: bool) -> Any:
    if not Path(path).is_dir():
        revision = revision_of(path)
        return path if revision is None else f"{path} at commit {revision}"
    return folder_digests(Path(path), _TEXTS if with_weights else (*_TEXTS, *_WEIGHTS))


def _of_data(source: str) -> str:
    """A hub's name stays part of it: its commit alone does not identify the configuration and the split."""
    version = version_of(source)
    return f"sha256 {version['sha256']}" if "sha256" in version else f"{source} at commit {version['revision']}"


def _of_value(value: Any, is_path: bool = False) -> Any:
    """The value with the texts in it that name files replaced by what identifies the content."""
    if isinstance(value, str):
        return _of_text(value, is_path)
    if isinstance(value, Mapping):
        return {key: _of_value(each) for key, each in value.items()}
    return [_of_value(each) for each in value] if isinstance(value, list | tuple) else value


def _of_text(text: str, is_path: bool = False) -> str:
    """is_path: a name without folder and suffix may be that of a file, too"""
    path: Path | None = None
    named = text
    if code := _CODE.fullmatch(text):
        named = code["file"]
        path = Path(named)
    elif module := _MODULE.fullmatch(text):
        named = module["module"]
        path = _source_of(named)
    elif is_path or "/" in text or "." in text:
        path = Path(text)
    return text if path is None or not _is_file(path) else f"sha256 {file_digest(path)}{text.removeprefix(named)}"


def _source_of(module: str) -> Path | None:
    """The file of a module that is not our own; None if there is none."""
    if module.partition(".")[0] == _OWN:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a long text is no path
        return False
