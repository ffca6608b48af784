"""Judge a model by benchmarks: python -m verl.trainer.main_eval model=PATH benchmarks=[bfcl,api_bank] [key=value ...]

    compare=PATH  another model under the same handler, and the paired differences
    probe=true    instead: would training learn from this data? (probe=true --help)
    --help        this text and every key with its default
    --cfg job     print the configuration that the words choose, and stop

`model` is short for model.path. Answers are kept: the same command goes on where it was stopped, and asks nothing that
was answered. docs/evaluation.md tells of benchmarks, handlers and figures.
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

    recipe=NAME   environment, codec, reward, lengths and n of a recipe of training
    --help        this text and every key with its default
    --cfg job     print the configuration that the words choose, and stop

Rolls out `limit` rows `n` times each as training would, and tells format, rewards, groups without a signal, what a
group with one costs, and what to do first. The same command goes on where it was stopped (docs/evaluation.md).
"""
_MODEL = "model="


def main(words: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if _PROBE in words:
        return run_cli([word for word in words if word != _PROBE], _PROBE_HELP, ProbeConfig, _probe)
    return run_cli(words, __doc__ or "", EvalConfig, _evaluate)


def _evaluate(words: CliArgs, console: Console) -> int:
    config = load_plain(_spelled_out(words), EvalConfig)
    if words.shows_config(config, console):
        return 0
    check_model(config.model)
    if config.compare is not None:
        check_model(replace(config.model, path=config.compare), key="compare")
    check_engine("engine", config.engine)
    from verl.daemon import run_async
    from verl.evaluation.registry import check_names  # needs more than a wrong key takes to be told

    check_names(config.benchmarks)
    from verl.trainer.evaluate import evaluate

    run_async(evaluate(config, console))
    return 0


def _probe(words: CliArgs, console: Console) -> int:
    config = load_probe(_spelled_out(words))
    if words.shows_config(config, console):
        return 0
    check_model(config.model)
    check_files("data", [config.data] if config.data else [], needed=True)
    check_engine("engine", config.engine)
    from verl.daemon import run_async
    from verl.trainer.build_env import check_names  # needs more than a wrong key takes to be told

    check_names(config.env, config.prompt_template)
    from verl.trainer.probe import probe

    run_async(probe(config, console))
    return 0


def _spelled_out(words: CliArgs) -> list[str]:
    return [f"model.path={word.removeprefix(_MODEL)}" if word.startswith(_MODEL) else word for word in words.settings]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
