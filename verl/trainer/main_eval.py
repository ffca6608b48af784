"""Evaluate a model on benchmarks: toolrl eval model.path=PATH eval.benchmarks=[bfcl] ..

    eval.compare=PATH  also evaluate another model under the same handler; prints paired differences
    --probe            instead: check whether training would learn from a data file (--probe --help)
    --help             print this text and every key with its default
    --config FILE      settings of a YAML file, such as a run's config.yaml
    --user-code        run the code that this file names; it may be another author's
    --cfg job          print the resulting configuration and exit

Answers are saved: the same command resumes where it was stopped, without repeating them. Benchmarks, handlers and
scores are described in docs/evaluation.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from verl.config.commands import EVAL, PROBE
from verl.errors import ConfigError
from verl.trainer.cli import CliArgs, check_engine, check_files, check_model, run_cli, run_tool

_PROBE_HELP = """Would training learn? toolrl probe data.train_files=[FILE] model.path=M

    recipe=NAME   environment, tool-call format, reward, lengths and rollout.n of a training recipe
    --help        print this text and every key with its default
    --config FILE settings of a YAML file, such as a run's config.yaml
    --user-code   run the code that this file names; it may be another author's
    --cfg job     print the resulting configuration and exit

Rolls out `eval.limit` rows `rollout.n` times each as training would, and reports format, rewards, zero-advantage
groups, the cost of a group with nonzero advantages, and advice. The same command resumes where it was stopped
(docs/evaluation.md).
"""


def main(argv: Sequence[str]) -> int:
    if "--probe" in argv:
        return run_cli(argv, _PROBE_HELP, PROBE, run_probe, known=("--probe",))
    return run_cli(argv, __doc__ or "", EVAL, run_evaluation, known=("--probe",))


def run_evaluation(args: CliArgs, console: Console) -> list[dict[str, Any]]:
    """The results, one per benchmark and model or comparison."""
    config = args.config
    check_model(config.model)
    if config.eval.compare is not None:
        check_model(replace(config.model, path=config.eval.compare), key="eval.compare")
    check_engine(config.rollout.name)
    from verl.system.daemon import run_async
    from verl.trainer.hooks import needed_tool  # slow imports: after the cheap checks

    needed_tool("check_benchmarks")(config.eval.benchmarks)
    results: list[dict[str, Any]] = run_async(needed_tool("evaluate")(config, console))
    return results


def run_probe(args: CliArgs, console: Console) -> dict[str, Any]:
    """The statistics and the advice."""
    config = args.config
    check_model(config.model)
    files = config.data.train_files
    check_files("data.train_files", files, needed=True)
    if len(files) > 1:
        raise ConfigError(f"data.train_files: a probe reads one file, got {len(files)}")
    found: dict[str, Any] = run_tool("probe", config, console)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
