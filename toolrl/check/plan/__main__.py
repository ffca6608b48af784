"""Estimate memory and minimum step time of a run: toolrl plan [recipe=NAME] [key=value ...]

Takes the settings of main_ppo.

    gpu=NAME     b200, h200, h20, h100, h100-pcie, h100-nvl, a100, a100-40gb, l40s, l4, a10g, rtx5090, rtx4090, rtx3090,
                 mi300x, a memory size (24GiB; no times), or cpu; default: this machine's
    --help       this text and every key with its default
    --cfg job    print the resolved configuration and exit

Reads the model's configuration, not its weights, and tokenizes the files; without files, maximum lengths are assumed.
Exit code 0: the run fits. 1: it does not fit; changes are suggested. 2: the configuration or the data is unusable.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from toolrl.commands import PLAN
from verl.config.schema import Config
from verl.trainer.cli import CliArgs, check_files, check_model, run_cli


def main(argv: Sequence[str]) -> int:
    def run(args: CliArgs, console: Console) -> int:
        config = args.config
        check_model(config.model, critic=config.critic.path, teacher=config.teacher.local)
        check_files("data.train_files", config.data.train_files)
        gpus = [each.removeprefix("--gpu=") for each in args.options if each.startswith("--gpu=")]
        return print_plan(config, gpus[-1] if gpus else None, console)

    return run_cli(argv, __doc__ or "", PLAN, run, known=("--gpu=",))


def print_plan(config: Config, gpu: str | None, console: Console) -> int:
    """Heavy imports are done here."""
    from toolrl.check.plan.plan import build_plan, find_hardware, read_lengths
    from toolrl.check.plan.show import show
    from verl.build.env import build_episode_runner, prompt_fn, with_tool_call_format
    from verl.build.run import load_chat_template
    from verl.data.row_names import RowNames
    from verl.data.tasks import TaskSet
    from verl.host.daemon import run_async
    from verl.scoring.rewards import build_rewards

    hardware = find_hardware(config, gpu)  # raises for a wrong name before any file is read
    data = config.data
    tasks = [TaskSet(source, data.max_bad_share, data, RowNames.of(config)) for source in data.train_files]
    rewards = build_rewards(config.reward.name, config.reward.options)
    chat = load_chat_template(config.model)
    config = with_tool_call_format(config, chat)
    episode_runner = build_episode_runner(config, chat)
    try:
        lengths = read_lengths(config, chat, tasks, prompt_fn(episode_runner, rewards))
    finally:
        run_async(episode_runner.close())
    estimate = build_plan(config, lengths, hardware)
    show(estimate, console)
    return 1 if estimate.violations() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
