"""A complete model folder, made from a run's checkpoint or another model folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl.errors import DataError
from verl.kit.export.model_files import write_model_files
from verl.kit.openai_server.served_model import TrainedModel, check_recorded, chosen_format, find_model
from verl.kit.openai_server.serving_files import base_template
from verl.pretrained import read_tokenizer
from verl.system import untrusted_files
from verl.system.files import unwritable
from verl.system.watcher import remove_tree


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` at the end. Raises DataError if that exists or cannot be written."""
    if path.exists():
        raise DataError("exists already", hint="Choose another --out", file=str(path))
    unfinished = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        remove_tree(unfinished)


def copy_model(options: argparse.Namespace, folder: Path) -> TrainedModel:
    """Copy the chosen model into `folder`, with the files for servers and the card. Raises ConfigError, DataError."""
    model = find_model(options.model, options.checkpoint)
    given = options.tool_call_format or options.prompt_template
    if not options.tool_call_format:
        check_recorded(model)
    untrusted_files.copy_tree(model.folder, folder, untrusted_files.MODEL, followed=True)
    template = base_template(read_tokenizer(str(folder), "model"), with_tools=True) if given else ""
    chosen = chosen_format(options, model, template) if given else None
    if model.state or given or not (folder / "README.md").exists():  # the card of a model that is not ours stays
        write_model_files(folder, model.state, chosen, _tables(options.results))
    return model


def _tables(files: Sequence[Path]) -> list[str]:
    try:
        return [line for file in files for line in ("", file.read_text(encoding="utf-8").strip())]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--results cannot be read ({error})", "a table of `toolrl eval`, FILE.md") from error
