"""Replay a recorded training step: toolrl replay RUN --step N

RUN is the folder of a run with trainer.record=true; no rollout engine, data or reward is needed. The recorded updates
from the newest checkpoint before the step are replayed, and the step's metrics are compared (docs/replay.md).
--user-code runs the code that the record names, such as an algorithm of your own.
Exit code 0: all metrics are bit-for-bit equal. 1: some differ. 2: the step cannot be replayed.
On a GPU the last digits may differ: attention's backward adds gradients in no fixed order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from verl.config.commands import TRAIN
from verl.errors import ConfigError
from verl.host.arguments import Arguments, positive_int
from verl.trainer.cli import CliArgs, run_cli

if TYPE_CHECKING:
    from toolrl.analysis.replay.replay import Replay

_ON_GPUS = (
    "On a GPU no update repeats bit for bit: attention's backward adds gradients in no fixed order. Differences beyond "
    "rounding have another cause"
)
_SHOWN = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")


def arguments() -> Arguments:
    parser = Arguments("toolrl replay", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=positive_int, required=True, help="training step, from 1")
    parser.add_argument("--user-code", action="store_true", help="run the code that the record names")
    return parser


def main(argv: Sequence[str]) -> int:
    options = arguments().read(argv)

    def run(_: CliArgs, console: Console) -> int:
        if not options.run.is_dir():
            raise ConfigError(f"there is no folder {str(options.run)!r}")
        return print_comparison(options.run.resolve(), options.step, options.user_code, console)

    return run_cli([], "", TRAIN, run)


def print_comparison(folder: Path, step: int, user_code: bool, console: Console) -> int:
    """Replay and print the result. Heavy imports are done here."""
    from toolrl.analysis.replay.replay import replay

    return show(replay(folder, step, user_code), step, console)


def show(result: Replay, step: int, console: Console) -> int:
    """The exit code."""
    differing = result.differing()
    table = Table("metric", "recorded", "replayed", "", title=f"Step {step}")
    for name in dict.fromkeys((*(name for name in _SHOWN if name in result.replayed), *differing)):
        recorded = repr(result.recorded[name]) if name in result.recorded else ""
        same = "differs" if name in differing else "same"
        table.add_row(name, recorded, repr(result.replayed[name]), same)
    console.print(table)
    if differing:
        console.print(f"{len(differing)} of {len(result.replayed)} metrics of the update differ", soft_wrap=True)
        if result.device == "cuda":
            console.print(_ON_GPUS, soft_wrap=True)
        return 1
    console.print(f"all {len(result.replayed)} metrics of the update are the same, bit for bit", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
