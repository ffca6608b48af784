"""Generate responses to prompts: python -m verl.trainer.main_generation model.path=PATH files=[FILE] [key=value ...]

    --chat     chat with the model in this terminal instead; an empty line ends it
    --help     print this text and every key with its default
    --cfg job  print the resulting configuration and exit

Rows have the format of training data (docs/data.md); every response is scored with the reward and written to `output`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from verl.config.load import load_plain
from verl.config.schema import GenerationConfig
from verl.config.unused_keys import IN_A_CHAT
from verl.trainer.cli import CliArgs, check_engine, check_files, check_model, run_cli


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""

    def run(args: CliArgs, console: Console) -> int:
        chatting = "--chat" in args.options
        config = load_plain(args.settings, GenerationConfig, IN_A_CHAT if chatting else ())
        if args.shows_config(config, console):
            return 0
        check_model(config.model)
        check_files("files", config.files, needed=not chatting)
        check_engine("engine", config.engine)
        from verl.system.daemon import run_async
        from verl.trainer.builders.env import check_names  # a slow import: after the cheap checks

        check_names(config.env, config.prompt_template)
        from verl.trainer.generation import chat, generate

        run_async(chat(config, console) if chatting else generate(config, console))
        return 0

    return run_cli(argv, __doc__ or "", GenerationConfig, run, known=("--chat",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
