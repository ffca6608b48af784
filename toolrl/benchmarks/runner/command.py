"""Evaluate a model on benchmarks: toolrl eval model.path=PATH eval.benchmarks=[bfcl] ..

    eval.compare=PATH  also evaluate another model under the same handler; prints paired differences
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

from toolrl.commands import EVAL
from verl.trainer.cli import CliArgs, check_engine, check_model, run_cli


def main(argv: Sequence[str]) -> int:
    return run_cli(argv, __doc__ or "", EVAL, run)


def run(args: CliArgs, console: Console) -> list[dict[str, Any]]:
    """The results, one per benchmark and model or comparison."""
    config = args.config
    check_model(config.model)
    if config.eval.compare is not None:
        check_model(replace(config.model, path=config.eval.compare), key="eval.compare")
    check_engine(config.rollout.name)
    from toolrl.benchmarks.runner.evaluate import evaluate  # slow imports: after the cheap checks
    from toolrl.benchmarks.runner.registry import check_benchmarks
    from verl.host.daemon import run_async

    check_benchmarks(config.eval.benchmarks)
    return run_async(evaluate(config, console))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
