"""Supervised fine-tuning (SFT) on demonstrations: toolrl sft data=FILE model=NAME [key=value ...]

    --help         print this text and every key with its default
    --config FILE  settings of a YAML file, such as a run's config.yaml
    --user-code    run the code that this file names; it may be another author's
    --cfg job      print the resulting configuration and exit

Rows are OpenAI messages, ToolRL's SFT file or its parquet (docs/data.md). Loss on the assistant's own tokens only.
With sft.loss=dpo they are preference pairs: messages, chosen, rejected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from rich.console import Console

from verl.config.commands import SFT
from verl.config.schema import Config
from verl.tracking.console import Display
from verl.trainer.cli import CliArgs, check_files, check_model, in_run_folder, print_verdict, run_cli


def main(argv: Sequence[str]) -> int:
    return run_cli(argv, __doc__ or "", SFT, run)


def run(args: CliArgs, console: Console) -> None:
    config = args.config
    check_model(config.model)
    check_files("data.train_files", config.data.train_files, needed=True)
    check_files("data.val_files", config.data.val_files)
    with closing(Display(None, console)) as display:
        display.phase("packages")
        train(config, display)


def train(config: Config, display: Display) -> None:
    """Run with exclusive use of the run folder."""
    console = display.console
    with in_run_folder(config) as folder:
        from verl.sft.build import start_sft_run  # slow imports: after the cheap checks
        from verl.trainer.records import write_records

        batch = config.data.train_batch_size
        pack = config.actor.max_tokens_per_pack
        examples = "pairs" if config.sft.loss == "dpo" else "responses"
        step = f"a step: {batch} {examples}, one optimizer step; packs of at most {pack} tokens"
        console.print(step, markup=False)
        with start_sft_run(config, folder, display) as run:
            write_records(folder, config, SFT, run.saved)
            last = run.run()
    print_verdict(console, folder)
    console.print(f"model       {last / 'hf'}\nmetrics     {folder / 'metrics.jsonl'}", markup=False)
    console.print(f"\ntry it: toolrl chat model.path={last / 'hf'}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
