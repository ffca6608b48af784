"""Train a policy with GRPO, PPO or a related algorithm: toolrl train data=FILE model=NAME [key=value ...]

    --help         print this text and every key with its default
    --config FILE  settings of a YAML file, such as a run's config.yaml
    --user-code    run the code that this file names; it may be another author's
    --cfg job      print the resulting configuration and exit
    --preflight    check everything on a tiny copy of the model and exit

With data=.. and without recipe=NAME the settings are those of recipe=grpo, or recipe=embedded with model=embedded.
Exit code 0: all requested steps were trained. 1: the run failed. 2: the configuration or the data is invalid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from verl.config.commands import TRAIN
from verl.config.schema import Config
from verl.tracking.console import Display, before_after_table
from verl.trainer.cli import (
    CliArgs,
    check_engine,
    check_files,
    check_model,
    check_reward,
    in_run_folder,
    print_verdict,
    run_cli,
)


def main(argv: Sequence[str]) -> int:
    return run_cli(argv, __doc__ or "", TRAIN, run, ("--preflight",), _row_choices)


def _row_choices(config: Config) -> Iterable[str]:
    from verl.trainer.row_choices import row_choices  # reads data: a slow import

    return row_choices(config)


def run(args: CliArgs, console: Console) -> None:
    config = args.config
    check_model(config.model, critic=config.critic.path, teacher=config.teacher.path)
    check_files("data.train_files", config.data.train_files, needed=True)
    check_files("data.val_files", config.data.val_files)
    check_reward(config.reward)
    check_engine(config.rollout.name)
    with closing(Display(None, console, with_rollouts="rollouts" in config.trainer.logger)) as display:
        display.phase("packages")
        from verl.build.env import check_names  # slow imports: after the cheap checks
        from verl.trainer.hooks import CHECK_BENCHMARKS

        check_names(config.env, config.data.prompt_template)
        if config.eval.benchmarks:
            CHECK_BENCHMARKS.load()(config.eval.benchmarks)
        train(config, display, only_preflight="--preflight" in args.options)


def train(config: Config, display: Display, only_preflight: bool) -> None:
    """Run with exclusive use of the run folder."""
    with in_run_folder(config, alone=not only_preflight) as folder:
        _train(config, display, folder, only_preflight)


def _train(config: Config, display: Display, folder: Path, only_preflight: bool) -> None:
    """Everything heavy is imported here."""
    from verl.build.engines import check_engine_layers
    from verl.build.env import with_tool_call_format
    from verl.build.ranks import check_device, sees_gpu, warn_of_slow_dtype
    from verl.build.run import load_chat_template, load_inputs, start_run
    from verl.data.overlap import TRAIN_TASKS
    from verl.host.daemon import run_async
    from verl.trainer.hooks import PLAN, PREFLIGHT
    from verl.trainer.records import write_records
    from verl.trainer.stall import ending_stalls

    console = display.console
    display.phase("data")
    check_device(config.trainer)
    warn_of_slow_dtype(config)
    check_engine_layers(config)
    config = with_tool_call_format(config, load_chat_template(config.model))
    inputs = load_inputs(config)
    for line in (*map(str, inputs.reports), *(inputs.online_eval.files() if inputs.online_eval else ())):
        console.print(line, markup=False, soft_wrap=True)
    console.print(inputs.choices(config.env.tool_call_format), markup=False, soft_wrap=True)
    plan_of_run = PLAN.find()
    plan = plan_of_run(config, inputs) if plan_of_run else None
    if only_preflight or config.trainer.preflight:
        PREFLIGHT.load()(config, inputs, plan, console)
    elif config.trainer.preflight is None and sees_gpu(config.trainer) and (preflight := PREFLIGHT.find()):
        preflight(config, inputs, plan, console)
    if only_preflight:
        return
    console.print(config.batch_arithmetic(), markup=False, soft_wrap=True)
    with start_run(config, inputs, folder, display) as run:
        inputs.train_tasks.write(folder / TRAIN_TASKS)
        write_records(folder, config, TRAIN, run.checkpointing.saved)
        with ending_stalls(run.stalls):
            last = run_async(run.run())
    if run.checkpointing.validated.after:
        console.print(before_after_table(*run.table()))
    print_verdict(console, folder)
    if plan is not None and run.peaks:
        console.print(plan.format_peak(run.peaks), markup=False)
    files = {
        "model": last / "hf",
        "checkpoints": last.parent,
        "metrics": folder / "metrics.jsonl",
        "transcripts": folder / "transcripts",
        "TensorBoard": folder / "tensorboard",
    }
    for name, path in files.items():
        console.print(f"{name:12}{path}", markup=False, soft_wrap=True)
    console.print(f"\nlook at it: toolrl report {folder}", markup=False, soft_wrap=True)
    console.print(f"try it: toolrl chat model.path={last / 'hf'}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
