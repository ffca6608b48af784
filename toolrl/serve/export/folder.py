"""A complete model folder, made from a run's checkpoint or another model folder."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import CONFIG_NAME

from toolrl.serve.export.model_files import write_model_files
from toolrl.serve.openai_server.served_model import TrainedModel, check_recorded, chosen_format, find_model
from toolrl.serve.openai_server.serving_files import base_template
from verl.errors import ConfigError, DataError
from verl.host import untrusted_files
from verl.host.files import temporary_name, unwritable
from verl.host.watcher import remove_tree
from verl.lora import base_of, name_base
from verl.pretrained import read_tokenizer


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` at the end. Raises DataError if that exists or cannot be written."""
    if path.exists():
        raise DataError("exists already", hint="Choose another --out", file=str(path))
    unfinished = temporary_name(path)
    try:
        unfinished.mkdir()
        yield unfinished
        unfinished.rename(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        remove_tree(unfinished)


def copy_model(options: argparse.Namespace, folder: Path, adapter: bool = False) -> TrainedModel:
    """Copy the chosen model into `folder`, with the files for servers and the card. Raises ConfigError, DataError.

    adapter: instead of its weights those of its adapter, in peft's files, which name `options.base` as their base
    """
    model = find_model(options.model, options.checkpoint)
    own_format = options.tool_call_format or options.prompt_template
    if not options.tool_call_format:
        check_recorded(model)
    merged = {path.name for path in model.folder.glob("*.safetensors*")} | {CONFIG_NAME} if adapter else ()
    untrusted_files.copy_tree(model.folder, folder, untrusted_files.MODEL, followed=True, without=merged)
    base = _copy_adapter(options, model, folder) if adapter else None
    template = base_template(read_tokenizer(str(folder), "model"), with_tools=True) if own_format else ""
    chosen = chosen_format(options, model, template) if own_format else None
    if model.state or own_format or not (folder / "README.md").exists():  # the card of a model that is not ours stays
        write_model_files(folder, model.state, chosen, _tables(options.results), base=base)
    return model


def add_base_argument(parser: argparse.ArgumentParser) -> None:
    help = "of an adapter: where others find its base (default: as in the run)"
    parser.add_argument("--base", metavar="NAME", help=help)


def check_base(options: argparse.Namespace, adapter: bool) -> None:
    """Raises ConfigError for the base of an adapter that is not to be written."""
    if options.base is not None and not adapter:
        what = "is the base of an adapter, which is not to be written: set --format adapter, of `toolrl push` --adapter"
        raise ConfigError(f"--base={options.base} {what}")


def _copy_adapter(options: argparse.Namespace, model: TrainedModel, folder: Path) -> str:
    """Returns the name of its base."""
    if model.adapter is None:
        raise ConfigError(f"{options.model} has no adapter: it was trained without lora.rank")
    untrusted_files.copy_tree(model.adapter, folder, untrusted_files.MODEL, followed=True)
    base = base_of(str(folder)) if options.base is None else str(options.base)
    name_base(folder, base)
    return base


def _tables(files: Sequence[Path]) -> list[str]:
    try:
        return [line for file in files for line in ("", file.read_text(encoding="utf-8").strip())]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--results cannot be read ({error})", "a table of `toolrl eval`, FILE.md") from error
