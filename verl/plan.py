"""Does a run fit, and how long must a step take at least: python -m verl.plan [recipe=NAME] [key=value ...]

Takes the words of main_ppo, and

    model=PATH   model.path                gpu=NAME     h200, h100, h100-pcie, h100-nvl, a100, a100-40gb or cpu;
    n_gpus=N     trainer.n_gpus_per_node                what this machine has if left out
    files=[...]  data.train_files

    --help       this text and every key with its default
    --cfg job    print the configuration that the words choose, and stop

Reads the model's configuration, not its weights, and tokenises the files; without files lengths are the greatest
allowed. Exit code 0: it fits. 1: it does not, and changes are named. 2: the configuration or the data cannot be used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from verl.config.load import load_config
from verl.config.schema import Config
from verl.trainer.command import CliArgs, check_files, check_model, run_cli

_SHORT = {"model": "model.path", "n_gpus": "trainer.n_gpus_per_node", "files": "data.train_files"}


def main(words: Sequence[str]) -> int:
    """The command; returns its exit code."""

    def run(words: CliArgs, console: Console) -> int:
        settings, gpu = spelled_out(words.settings)
        config = load_config(settings)
        if words.shows_config(config, console):
            return 0
        check_model(config.model, config.critic.path)
        check_files("data.train_files", config.data.train_files)
        return plan(config, gpu, console)

    return run_cli(words, __doc__ or "", Config, run)


def spelled_out(words: Sequence[str]) -> tuple[list[str], str | None]:
    """(words of main_ppo, the GPU's name)."""
    settings, gpu = [], None
    for word in words:
        key, equals, value = word.partition("=")
        if key == "gpu" and equals:
            gpu = value
        else:
            settings.append(f"{_SHORT.get(key, key)}{equals}{value}")
    return settings, gpu


def plan(config: Config, gpu: str | None, console: Console) -> int:
    """Print the plan. Everything heavy is imported here."""
    from verl.daemon import run_async
    from verl.data.tasks import TaskSet
    from verl.trainer.build import episode_runner_of, load_chat_template
    from verl.trainer.build_env import prompt_fn
    from verl.trainer.plan import build_plan, find_hardware, read_lengths
    from verl.trainer.plan_show import show

    place = find_hardware(config, gpu)  # a wrong name is told before anything is read
    tasks = [TaskSet(source, config.data.max_bad_share) for source in config.data.train_files]
    chat = load_chat_template(config.model)
    episode_runner = episode_runner_of(config, chat) if tasks else None
    try:
        lengths = read_lengths(config, chat, tasks, prompt_fn(episode_runner, chat, config.reward.name))
    finally:
        if episode_runner is not None:
            run_async(episode_runner.close())
    made = build_plan(config, lengths, place)
    show(made, console)
    return 1 if made.violations() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
