"""Run a recorded step again: python -m verl.replay RUN --step N

RUN is the folder of a run that was made with trainer.record=true; no rollout engine, data or reward is needed. Weights
come from the newest checkpoint before the step, or from the model as it was given; the recorded updates from there to
the step are run, and what the step told of itself is compared (docs/replay.md).
Exit code 0: all of it is the same, bit for bit. 1: something differs. 2: the step cannot be run again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verl.config.schema import Config
from verl.errors import ConfigError
from verl.trainer.command import CliArgs, run_cli

_SHOWN = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")


def main(words: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if not {"-h", "--help"}.isdisjoint(words):
        Console(highlight=False, emoji=False).print(__doc__, markup=False)
        return 0

    def run(_: CliArgs, console: Console) -> int:
        folder, step = parsed(words)
        return show(folder, step, console)

    return run_cli([], "", Config, run)


def parsed(words: Sequence[str]) -> tuple[Path, int]:
    """(run folder, step). Raises ConfigError for other words, and where there is no such folder."""
    rest = list(words)
    if "--step" in rest[:-1]:
        place = rest.index("--step")
        number = rest[place + 1]
        del rest[place : place + 2]
        if len(rest) == 1 and number.isascii() and number.isdigit() and int(number) > 0:
            folder = Path(rest[0])
            if not folder.is_dir():
                raise ConfigError(f"there is no folder {rest[0]!r}")
            return folder.resolve(), int(number)
    raise ConfigError(f"expected RUN --step N with a whole number from 1 on, got {' '.join(words) or 'nothing'!r}")


def show(folder: Path, step: int, console: Console) -> int:
    """Replay and print. Everything heavy is imported here."""
    from verl.trainer.replay import replay

    result = replay(folder, step)
    differing = result.differing()
    table = Table("metric", "recorded", "replayed", "", title=f"Step {step}")
    for name in dict.fromkeys((*(name for name in _SHOWN if name in result.replayed), *differing)):
        recorded = repr(result.recorded[name]) if name in result.recorded else ""
        same = "differs" if name in differing else "same"
        table.add_row(name, recorded, repr(result.replayed[name]), same)
    console.print(table)
    if differing:
        console.print(f"{len(differing)} of {len(result.replayed)} metrics of the update differ", soft_wrap=True)
        return 1
    console.print(f"all {len(result.replayed)} metrics of the update are the same, bit for bit", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
