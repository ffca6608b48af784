"""Write a trained model for other programs: toolrl export RUN --format hf|adapter|gguf --out DIR

hf: a folder for transformers and vLLM, with the chat template, the tool parser and the model card. adapter: the same
with the adapter of a run with lora.rank, in peft's files, in place of the model. gguf: one file for llama.cpp and
programs based on it (docs/serving.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from toolrl.serve.export.folder import add_base_argument, check_base, copy_model, new_folder
from toolrl.serve.openai_server.served_model import add_format_arguments, find_model
from verl.errors import ConfigError, VerlError
from verl.host.arguments import Arguments
from verl.host.exits import write_error


def arguments() -> Arguments:
    parser = Arguments("toolrl export", __doc__)
    add_format_arguments(parser)
    parser.add_argument("--format", choices=("hf", "adapter", "gguf"), default="hf")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    add_base_argument(parser)
    parser.add_argument("--dtype", choices=("f16", "q8_0"), help="of the weights in GGUF (default: f16)")
    parser.add_argument("--results", type=Path, action="append", default=[], metavar="FILE", help="table for the card")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().read(argv)
    try:
        check_base(options, options.format == "adapter")
        _check_form(options)
        with new_folder(options.out) as folder:
            if options.format != "gguf":
                copy_model(options, folder, options.format == "adapter")
            else:
                from toolrl.serve.export.gguf_file import write_gguf

                write_gguf(find_model(options.model, options.checkpoint).folder, folder, options.dtype or "f16")
    except VerlError as error:
        return write_error(error)
    for path in sorted(options.out.iterdir()):
        sys.stdout.write(f"{path}\n")
    return 0


def _check_form(options: argparse.Namespace) -> None:
    """Raises ConfigError for an option that the form to write has no place for."""
    is_gguf = options.format == "gguf"
    if options.dtype is not None and not is_gguf:
        raise ConfigError(f"--dtype={options.dtype} is that of GGUF: set --format gguf, or leave it out")
    if options.results and is_gguf:
        raise ConfigError("--results is a table for the card, which --format gguf does not write; leave it out")


if __name__ == "__main__":
    sys.exit(main())
