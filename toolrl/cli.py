"""The command `toolrl`: a single entry point for all commands of this package.

`toolrl train ..` is `python -m verl.trainer.main_ppo ..`, and so on: the module is run as by `python -m`, and nothing
else is imported, so that `toolrl --help` is fast and a command needs only its own packages.
"""

import runpy
import sys
from collections.abc import Sequence
from typing import NamedTuple

from verl import __version__
from verl.host.output import checked_streams
from verl.host.packages import missing_package
from verl.registry import nearest


class Subcommand(NamedTuple):
    """module: for `python -m`; arguments: inserted before the user's"""

    module: str
    summary: str
    arguments: tuple[str, ...] = ()


GROUPS = {
    "train": {
        "train": Subcommand("verl.trainer.main_ppo", "reinforcement learning: GRPO, PPO and other algorithms"),
        "sft": Subcommand("verl.trainer.main_sft", "supervised fine-tuning on rows with answers"),
    },
    "before a training": {
        "plan": Subcommand("toolrl.check.plan", "does it fit: memory and time"),
        "probe": Subcommand("toolrl.check.probe.command", "would it learn from this data?"),
        "lab": Subcommand("toolrl.check.lab", "check a reward on the rows of a file"),
        "preflight": Subcommand("verl.trainer.main_ppo", "try all its parts on a tiny model", ("--preflight",)),
    },
    "look at a run": {
        "report": Subcommand("toolrl.analysis.report", "one HTML file: curves, rollouts, tokens"),
        "compare": Subcommand("toolrl.analysis.compare", "settings by what they learn, over rows and seeds"),
        "explain": Subcommand(
            "toolrl.analysis.explain", "one sample of a step, from its prompt to its share of the loss"
        ),
        "replay": Subcommand("toolrl.analysis.replay", "run a recorded step again"),
        "certify": Subcommand("toolrl.analysis.certify", "a manifest by which others can compute a run again"),
    },
    "use and measure a model": {
        "eval": Subcommand("toolrl.benchmarks.runner.command", "benchmarks and your rows, one model or two compared"),
        "generate": Subcommand(
            "toolrl.serve.generation.command", "responses to prompts, scored where rows have a gold"
        ),
        "chat": Subcommand("toolrl.serve.chat", "talk to it in the terminal, with tools"),
        "serve": Subcommand("toolrl.serve.openai_server", "as an OpenAI server"),
        "export": Subcommand("toolrl.serve.export", "write it for other programs, with its card"),
        "push": Subcommand("toolrl.serve.export.push", "upload it to the hub"),
    },
    "servers that a training uses": {
        "env-server": Subcommand("toolrl.envs.openenv.server", "an environment"),
        "sandbox-server": Subcommand("toolrl.sandbox.server", "the code sandbox"),
        "runtime-server": Subcommand("toolrl.swe.server", "repositories, in which a policy works"),
        "retrieval-server": Subcommand("toolrl.tools.retrieval.server", "a search index"),
    },
    "this program": {
        "doctor": Subcommand("toolrl.check.doctor", "check packages and hardware"),
        "algorithms": Subcommand("toolrl.algorithms", "table of all algorithms"),
        "metrics": Subcommand("verl.tracking.names", "table of all metrics"),
    },
}
# What may follow the commands that have options of their own, for the completion.
_OF_MODEL = "checkpoint= tool_call_format= option= prompt_template="
_OF_SERVER = "host= port= token_file= --no-token allow_host= max_body_mib= max_requests="
OPTIONS = {
    "compare": "step= --exact",
    "certify": "out= check= steps= setting= --user-code",
    "doctor": "--quick --dev --no-vllm",
    "env-server": f"env= option= {_OF_SERVER} data= --user-code task_option= idle_s= max_episodes=",
    "explain": "step= sample= --gradient --user-code",
    "export": f"{_OF_MODEL} format= out= base= dtype= results=",
    "push": f"{_OF_MODEL} --private revision= --adapter base= results=",
    "replay": "step= --user-code",
    "report": "out= --serve host= port= token_file= --no-token allow_host= png= --user-code",
    "retrieval-server": f"corpus= {_OF_SERVER} topk=",
    "runtime-server": f"{_OF_SERVER} capacity= queue= lease_s= environments= folder= max_images_gib= "
    "max_memory_mib= max_file_mib= max_timeout_s= --require-cgroup",
    "sandbox-server": f"{_OF_SERVER} workers= isolation= memory_mib= max_timeout_s= max_memory_mib= --require-cgroup",
    "serve": f"{_OF_MODEL} host= port= name= api_key= token_file= --no-token",
}
_NAMES = [*(name for group in GROUPS.values() for name in group), "completion"]
GROUPS["this program"]["completion"] = Subcommand(
    "toolrl.completion",
    "source <(toolrl completion bash), or zsh: Tab completes commands, keys and values",
    tuple(f"{name} {OPTIONS.get(name, '')}" for name in _NAMES),
)
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def help_text() -> str:
    groups = (
        f"{title}:\n" + "".join(f"  {name:18}{command.summary}\n" for name, command in group.items())
        for title, group in GROUPS.items()
    )
    hint = (
        "A first run: toolrl train data=rows.jsonl model=FOLDER; rows are OpenAI messages and tools (docs/data.md).\n"
        "toolrl COMMAND --help explains every setting and option of a command. toolrl --version prints the version."
    )
    listing = "\n".join(groups)
    return f"usage: toolrl COMMAND [key=value ...] [--option ...]\n\n{listing}\n{hint}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command in this process, with its own `sys.argv`. Raises SystemExit with the command's exit code."""
    with checked_streams():
        return _run(*((sys.argv[1:] if argv is None else argv) or ["--help"]))


def _run(name: str, *rest: str) -> int:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
