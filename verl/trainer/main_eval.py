"""Evaluate a model on benchmarks: python -m verl.trainer.main_eval model=PATH benchmarks=[bfcl] [key=value ...]

    compare=PATH  also evaluate another model under the same handler; prints paired differences
    probe=true    instead: check whether training would learn from a data file (probe=true --help)
    --help        print this text and every key with its default
    --cfg job     print the resulting configuration and exit

`model` is short for model.path. Answers are saved: the same command resumes where it was stopped, without repeating
them. Benchmarks, handlers and scores are described in docs/evaluation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from verl.config.load import load_plain, load_probe
from verl.config.schema import EvalConfig, ProbeConfig
from verl.trainer.command import CliArgs, check_engine, check_files, check_model, run_cli

_PROBE = "probe=true"
_PROBE_HELP = """Would training learn? python -m verl.trainer.main_eval probe=true data=FILE model=PATH [key=value ...]

    recipe=NAME   environment, tool-call format, reward, lengths and n of a training recipe
    --help        print this text and every key with its default
    --cfg job     print the resulting configuration and exit

Rolls out `limit` rows `n` times each as training would, and reports format, rewards, zero-advantage groups, the cost
of a group with nonzero advantages, and advice. The same command resumes where it was stopped (docs/evaluation.md).
"""
_MODEL = "model="


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if _PROBE in argv:
        return run_cli([each for each in argv if each != _PROBE], _PROBE_HELP, ProbeConfig, _probe)
    return run_cli(argv, __doc__ or "", EvalConfig, _evaluate)


def _evaluate(args: CliArgs, console: Console) -> int:
    config = load_plain(_settings(args), EvalConfig)
    if args.shows_config(config, console):
        return 0
    check_model(config.model)
    if config.compare is not None:
        check_model(replace(config.model, path=config.compare), key="compare")
    check_engine("engine", config.engine)
    from verl.daemon import run_async
    from verl.evaluation.registry import check_benchmarks  # a slow import: after the cheap checks

    check_benchmarks(config.benchmarks)
    from verl.trainer.evaluate import evaluate

    run_async(evaluate(config, console))
    return 0


def _probe(args: CliArgs, console: Console) -> int:
    config = load_probe(_settings(args))
    if args.shows_config(config, console):
        return 0
    check_model(config.model)
    check_files("data", [config.data] if config.data else [], needed=True)
    check_engine("engine", config.engine)
    from verl.daemon import run_async
    from verl.trainer.build_env import check_names  # a slow import: after the cheap checks

    check_names(config.env, config.prompt_template)
    from verl.trainer.probe import probe

    run_async(probe(config, console))
    return 0


def _settings(args: CliArgs) -> list[str]:
    return [f"model.path={each.removeprefix(_MODEL)}" if each.startswith(_MODEL) else each for each in args.settings]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
