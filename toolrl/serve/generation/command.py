"""Generate responses to prompts: toolrl generate model.path=PATH data.val_files=[FILE] ..

    --help     print this text and every key with its default
    --config FILE  settings of a YAML file, such as a run's config.yaml
    --user-code    run the code that this file names; it may be another author's
    --cfg job  print the resulting configuration and exit

Rows have the format of training data (docs/data.md); every response is scored with the reward and written to
`eval.output`. With reward.name=auto, responses to rows without a gold are not scored: their score is null.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from toolrl.commands import GENERATE
from verl.trainer.cli import CliArgs, check_files, check_model, check_names, run_cli


def main(argv: Sequence[str]) -> int:
    return run_cli(argv, __doc__ or "", GENERATE, run)


def run(args: CliArgs, console: Console) -> None:
    config = args.config
    check_model(config.model)
    check_files("data.val_files", config.data.val_files, needed=True)
    check_names(config)
    from toolrl.serve.generation.generation import generate  # slow imports: after the cheap checks
    from verl.host.daemon import run_async

    run_async(generate(config, console))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
