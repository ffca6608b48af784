"""Judge a model by benchmarks: python -m verl.trainer.main_eval model=PATH benchmarks=[bfcl,api_bank] [key=value ...]

    compare=PATH  another model under the same handler, and the paired differences
    --help        this text and every key with its default
    --cfg job     print the configuration that the words choose, and stop

`model` is short for model.path. Answers are kept: the same command goes on where it was stopped, and asks nothing that
was answered. docs/evaluation.md tells of benchmarks, handlers and figures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from verl.config.load import load_plain
from verl.config.schema import EvalConfig
from verl.trainer.command import Words, check_model, told

_MODEL = "model="


def main(words: Sequence[str]) -> int:
    """The command; returns its exit code."""

    def run(words: Words, console: Console) -> int:
        config = load_plain([_spelled_out(word) for word in words.settings], EvalConfig)
        if words.only_show(config, console):
            return 0
        check_model(config.model)
        from verl.evaluation.registry import check_names  # needs more than a wrong key takes to be told

        check_names(config.benchmarks)
        import asyncio

        from verl.trainer.evaluate import evaluate

        asyncio.run(evaluate(config, console))
        return 0

    return told(words, __doc__ or "", EvalConfig, run)


def _spelled_out(word: str) -> str:
    return f"model.path={word.removeprefix(_MODEL)}" if word.startswith(_MODEL) else word


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
