"""The command `toolrl`: a single entry point for all commands of this package.

`toolrl train ..` is `python -m verl.trainer.main_ppo ..`, and so on: the module is run as by `python -m`, and nothing
else is imported, so that `toolrl --help` is fast and a command needs only its own packages.
"""

import runpy
import sys
from collections.abc import Sequence
from typing import NamedTuple

from verl import __version__
from verl.registry import nearest
from verl.system.packages import missing_package


class Subcommand(NamedTuple):
    """module: for `python -m`; arguments: inserted before the user's"""

    module: str
    summary: str
    arguments: tuple[str, ...] = ()


COMMANDS = {
    "train": Subcommand("verl.trainer.main_ppo", "reinforcement learning: GRPO, PPO and other algorithms"),
    "preflight": Subcommand("verl.trainer.main_ppo", "try all parts of a training on a tiny model", ("--preflight",)),
    "sft": Subcommand("verl.trainer.main_sft", "supervised fine-tuning"),
    "generate": Subcommand("verl.trainer.main_generation", "responses to the prompts of a file, scored"),
    "chat": Subcommand("verl.kit.generation.chat", "talk to a model in the terminal, with tools"),
    "eval": Subcommand("verl.trainer.main_eval", "benchmarks, and the comparison of two models"),
    "probe": Subcommand("verl.trainer.main_eval", "would training learn from this data?", ("--probe",)),
    "plan": Subcommand("verl.kit.plan", "memory and time of a training, before it starts"),
    "report": Subcommand("verl.kit.report", "a run as one HTML file: curves, rollouts, tokens"),
    "explain": Subcommand("verl.kit.explain", "one sample of a step, from its prompt to its share of the loss"),
    "replay": Subcommand("verl.kit.replay", "run a recorded training step again"),
    "lab": Subcommand("verl.kit.lab", "check a reward on the rows of a file"),
    "algorithms": Subcommand("verl.algorithms", "table of all algorithms"),
    "metrics": Subcommand("verl.tracking.names", "table of all metrics"),
    "serve": Subcommand("verl.kit.openai_server", "serve a trained model as an OpenAI server"),
    "export": Subcommand("verl.kit.export", "write a trained model for other programs, with its card"),
    "push": Subcommand("verl.kit.export.push", "upload a trained model to the hub"),
    "env-server": Subcommand("verl.kit.openenv.server", "serve an environment over HTTP"),
    "sandbox-server": Subcommand("verl.kit.sandbox.server", "serve the code sandbox over HTTP"),
    "runtime-server": Subcommand("verl.kit.swe.server", "serve repositories as runtimes over HTTP"),
    "retrieval-server": Subcommand("verl.kit.retrieval.server", "serve a search index over HTTP"),
    "doctor": Subcommand("verl.kit.doctor", "check packages and hardware"),
}
COMMANDS["completion"] = Subcommand(
    "verl.config.completion",
    "completion of commands and keys, for bash and zsh",
    (" ".join([*COMMANDS, "completion"]),),
)


def help_text() -> str:
    rows = "".join(f"  {name:18}{command.summary}\n" for name, command in COMMANDS.items())
    hint = "toolrl COMMAND --help lists the settings of a command. toolrl --version prints the version."
    return f"usage: toolrl COMMAND [key=value ...] [--option ...]\n\n{rows}\n{hint}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command in this process, with its own `sys.argv`. Raises SystemExit with the command's exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(help_text())
        return 0
    if name == "--version":
        sys.stdout.write(f"toolrl {__version__}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"toolrl: unknown command {name!r}; {nearest(name, list(COMMANDS))}\n")
        return 2
    command = COMMANDS[name]
    sys.argv[1:] = [*command.arguments, *rest]
    try:
        runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        problem = missing_package(error)
        if problem is None:
            raise
        sys.stderr.write(f"ConfigError: {problem}\n")
        return 2
    except KeyboardInterrupt:  # while it imports its packages, or in a command without handlers of its own
        sys.stderr.write("interrupted\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
