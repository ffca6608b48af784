"""What a run learns from besides its settings: the contents of the files that they name, and ToolRL's variables.

A file or folder is known by its content, so that it may be moved, and may not be replaced under its path; code also by
the modules of the user that it imports. A model or data set on the hub is known by its commit.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from verl.checkpoint.own_code import own_code
from verl.data.rows import version_of
from verl.host.digests import digests, file_digest, folder_digests
from verl.pretrained import revision_of
from verl.types import Task
from verl.utils.reward_score.rlla import switches

_log = logging.getLogger(__name__)
Contents = dict[str, Any]  # by setting, in its form: a text for each file, {name: text} for a model's folder

_DATA = "data.train_files"
_TEACHER = "teacher.path"
_MODELS = ("model.path", "model.tokenizer_path", "critic.path", _TEACHER, "lora.path")
_PROMPT = "data.prompt_template"
_COMMAND = "env.command"
_CODE = re.compile(r"(?P<file>.+\.(py|pkl)):\w+")
_MODULE = re.compile(r"(?P<module>[\w.]+):\w+")
_WITH_FOLDERS = ("env.", "reward.")  # whose settings name tools and environments of the user's
_MAX_FILES, _MAX_BYTES = 10_000, 2**32  # limits of such a folder
_COMPILED = ("*.pyc",)  # which a run writes
_OWN = __name__.partition(".")[0]
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
_TEXTS = ("*.md", "LICENSE*")


def contents_of(settings: Mapping[str, Any], reads_weights: bool, tasks: Iterable[Task] = ()) -> Contents:
    """{setting: contents} of those that name files, and {variable: "1"} of ToolRL's that are on, if there is a reward.

    reads_weights: the folder `model.path` is read again on a resume, as the reference of a KL penalty or as the frozen
        base of an adapter; that of a teacher always is
    tasks: of the training data, whose rows may name rewards and environments in code of the user's
    """
    found: Contents = dict(switches()) if "reward.name" in settings else {}
    for key, value in settings.items():
        if key in _MODELS:
            content = value and _of_model(value, key == _TEACHER or (reads_weights and key == "model.path"))
        elif key == _DATA:
            content = [*map(_of_data, value), *_of_code_in_rows(tasks)]
        elif key == _COMMAND:
            content = value and [_of_text(word) for word in shlex.split(value)]
        else:
            content = _each_text(value, partial(_of_text, is_path=key == _PROMPT))
        if key.startswith(_WITH_FOLDERS):
            content = _each_text(content, partial(_of_named_folder, key))
        if content != value:
            found[key] = content
    return found


def _of_model(path: str, with_weights: bool) -> Any:
    if path.startswith(("http://", "https://")):
        return path  # a server, whose weights are not known
    if not Path(path).is_dir():
        revision = revision_of(path)
        return path if revision is None else f"{path} at commit {revision}"
    return folder_digests(Path(path), _TEXTS if with_weights else (*_TEXTS, *_WEIGHTS))


def _of_data(source: str) -> str:
    """A hub's name stays part of it: its commit alone does not identify the configuration and the split."""
    version = version_of(source)
    return f"sha256 {version['sha256']}" if "sha256" in version else f"{source} at commit {version['revision']}"


def _of_code_in_rows(tasks: Iterable[Task]) -> list[str]:
    """`NAME is CONTENT` of rewards and environments that are code of the user's."""
    names = sorted({name for task in tasks for name in (task.reward, task.env) if name})
    return [f"{name} is {content}" for name in names if (content := _of_text(name)) != name]


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text in it changed, but for keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_text(each, change) for key, each in value.items()}
    return [_each_text(each, change) for each in value] if isinstance(value, list | tuple) else value


def _of_named_folder(setting: str, text: str) -> str:
    """What identifies the content of a folder that the text names; the text itself if it names none, or a huge one."""
    if "/" not in text or not text.strip("/.") or not _is(Path.is_dir, Path(text)):
        return text
    try:
        return _of_folder(Path(text))
    except (OSError, OverflowError) as error:
        _log.warning("%s: a resume does not notice if files of the folder %r have changed: %s", setting, text, error)
        return text


def _of_folder(folder: Path) -> str:
    """Raises OverflowError for one over the limits."""
    files = list(islice((path for path in folder.rglob("*") if path.is_file()), _MAX_FILES + 1))
    if len(files) > _MAX_FILES or sum(path.stat().st_size for path in files) > _MAX_BYTES:
        raise OverflowError(f"it has more than {_MAX_FILES} files or {_MAX_BYTES >> 30} GiB")
    found = folder_digests(folder, _COMPILED)
    return f"sha256 {_digest_of(found)} of {len(found)} files"


def _of_code(path: Path) -> str:
    """Digest of a Python file and of the modules that it imports."""
    files = own_code(path)
    if len(files) == 1:
        return f"sha256 {file_digest(path)}"
    names = [os.path.relpath(each, files[0].parent) for each in files]
    return f"sha256 {_digest_of(dict(zip(names, digests(files), strict=True)))} of {len(files)} files"


def _digest_of(found: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _of_text(text: str, is_path: bool = False) -> str:
    """What identifies the content of a file or module that the text names; the text itself if it is none.

    is_path: a name without folder and suffix may be that of a file, too
    """
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
    if path is None or not _is(Path.is_file, path):
        return text
    content = _of_code(path) if path.suffix == ".py" else f"sha256 {file_digest(path)}"
    return f"{content}{text.removeprefix(named)}"


def _source_of(module: str) -> Path | None:
    """The file of a module that is not our own; None if there is none."""
    if module.partition(".")[0] == _OWN:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except OSError:  # a long text is no path
        return False
