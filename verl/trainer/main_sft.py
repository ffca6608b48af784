"""Supervised fine-tuning (SFT) on demonstrations: toolrl sft [key=value ...]

    --help     print this text and every key with its default
    --cfg job  print the resulting configuration and exit

Rows are OpenAI messages, ToolRL's SFT file or its parquet (docs/data.md). Loss on the assistant's own tokens only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from verl.config.commands import SFT
from verl.config.schema import Config
from verl.trainer.cli import CliArgs, check_files, check_model, run_cli


def main(argv: Sequence[str]) -> int:
    return run_cli(argv, __doc__ or "", SFT, run)


def run(args: CliArgs, console: Console) -> None:
    config = args.config
    check_model(config.model)
    check_files("data.train_files", config.data.train_files, needed=True)
    check_files("data.val_files", config.data.val_files)
    train(config, console)


def train(config: Config, console: Console) -> None:
    """Run with exclusive use of the run folder."""
    from verl.checkpoint.crash import crash_reported
    from verl.system.files import check_temporary
    from verl.system.lock import alone_in
    from verl.trainer.builders.run import run_folder

    folder = run_folder(config.trainer)
    check_temporary()
    with alone_in(folder, "choose another trainer.experiment_name"), crash_reported(folder):
        _train(config, console, folder)


def _train(config: Config, console: Console, folder: Path) -> None:
    """Everything heavy is imported here."""
    from verl.config.show import as_yaml
    from verl.system.files import replacing
    from verl.trainer.hooks import needed_tool

    batch, pack = config.data.train_batch_size, config.actor.max_tokens_per_pack
    step = f"a step: {batch} responses, one optimizer step; packs of at most {pack} tokens"
    console.print(step, markup=False)
    with needed_tool("sft")(config, folder, console) as run:
        with replacing(folder / "config.yaml") as unfinished:
            unfinished.write_text(as_yaml(config, SFT), encoding="utf-8")
        last = run.run()
    console.print(f"model       {last / 'hf'}\nmetrics     {folder / 'metrics.jsonl'}", markup=False)
    console.print(f"\ntry it: toolrl chat model.path={last / 'hf'}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
