"""List the components of every algorithm: toolrl algorithms"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from verl.algorithms import ALGORITHMS
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.filters import name_of
from verl.algorithms.names import KLPlacement, OldLogprobs
from verl.host.arguments import Arguments
from verl.registry import resolve

COLUMNS = ("name", "advantage", "loss", "aggregation", "KL", "extras", "paper")
_FILE_WIDTH = 160  # characters, where the output is not a terminal


def describe(function: Callable[..., object]) -> str:
    """A function's name and the settings bound by the preset: clipped clip_low=0.2 clip_high=0.2."""
    bound = function.keywords if isinstance(function, partial) else {}
    values = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in bound.items()}
    return " ".join([name_of(function), *(f"{name}={value}" for name, value in values.items())])


def describe_extras(algorithm: Algorithm) -> str:
    extras = {
        "critic": algorithm.needs_critic,
        "greedy baseline response": algorithm.greedy_baseline,
        "turn states": algorithm.needs_turns,
        f"entropy bonus {algorithm.entropy_coefficient:g}": algorithm.entropy_coefficient != 0.0,
        f"entropy target {algorithm.entropy_target or 0:g}": algorithm.entropy_target is not None,
        f"cross-entropy on observations {algorithm.observation_coefficient:g}": algorithm.observation_coefficient > 0,
        "engine's old log-probs": algorithm.old_logprobs is OldLogprobs.ROLLOUT,
        "off-policy correction": algorithm.correction is not None,
        f"filter {', '.join(map(describe, algorithm.filters))}": bool(algorithm.filters),
        f"{algorithm.max_resample_rounds} resample rounds": algorithm.max_resample_rounds > 1,
        "overlong penalty": algorithm.overlong is not None,
    }
    if algorithm.selection is not None:
        extras[f"token selection {describe(algorithm.selection)}"] = True
    if algorithm.likelihood is not None:
        extras[f"cross-entropy {describe(algorithm.likelihood)}"] = True
    return ", ".join(text for text, present in extras.items() if present)


def row(algorithm: Algorithm) -> tuple[str, ...]:
    """The algorithm's table cells, in the order of COLUMNS."""
    kl = algorithm.kl
    return (
        algorithm.name,
        describe(algorithm.advantage),
        describe(algorithm.policy_loss),
        algorithm.aggregation.value,
        "none" if kl.placement is KLPlacement.NONE else f"{kl.estimator} in {kl.placement}, {kl.coefficient:g}",
        describe_extras(algorithm),
        algorithm.paper,
    )


def presets() -> list[Algorithm]:
    return [resolve("algorithm", name, ALGORITHMS) for name in ALGORITHMS]


def arguments() -> Arguments:
    return Arguments("toolrl algorithms", __doc__)


def main(argv: Sequence[str]) -> int:
    arguments().read(argv)
    table = Table(title="algorithm.name (docs/algorithms.md)", show_lines=True)
    for name in COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name in ("name", "paper"))
    for each in presets():
        table.add_row(*row(each))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
