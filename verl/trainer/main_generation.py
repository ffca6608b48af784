"""Generate responses to prompts: toolrl generate model.path=PATH data.val_files=[FILE] ..

    --chat     chat with the model in this terminal instead; an empty line ends it
    --help     print this text and every key with its default
    --config FILE  settings of a YAML file, such as a run's config.yaml
    --user-code    run the code that this file names; it may be another author's
    --cfg job  print the resulting configuration and exit

Rows have the format of training data (docs/data.md); every response is scored with the reward and written to
`eval.output`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from verl.config.commands import CHAT, GENERATE
from verl.trainer.cli import CliArgs, check_files, check_model, run_cli, run_tool


def main(argv: Sequence[str]) -> int:
    chatting = "--chat" in argv
    command = CHAT if chatting else GENERATE

    def run(args: CliArgs, console: Console) -> None:
        config = args.config
        check_model(config.model)
        check_files("data.val_files", config.data.val_files, needed=not chatting)
        run_tool("chat" if chatting else "generate", config, console)

    return run_cli(argv, __doc__ or "", command, run, known=("--chat",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
