"""Explain one sample of a training step: toolrl explain RUN --step N [--sample K [--gradient]]

RUN is the folder of a run, which keeps samples of every step (trainer.samples_kept). From the prompt to the loss:
texts, reward, group, advantage, tokens, share of the loss. Without --sample the samples of the step are listed.
--gradient adds its share of the gradient norm: the step is repeated from its record (trainer.record=true), with the
checkpoints of the run. Nothing that the folder names is run without --user-code.
Exit code 0: the record agrees with the arithmetic. 1: a check fails. 2: there is no such sample or record.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from toolrl.analysis.report.folder import RunFolder, read_run
from verl.errors import VerlError
from verl.host.arguments import Arguments
from verl.host.exits import write_error
from verl.text import printable


def arguments() -> Arguments:
    parser = Arguments("toolrl explain", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--step", type=int, required=True, help="training step, from 1")
    parser.add_argument("--sample", type=int, help="number of the sample in the list of the step")
    parser.add_argument("--gradient", action="store_true", help="its share of the gradient norm, from the record")
    parser.add_argument("--user-code", action="store_true", help="run the code that the settings of the run name")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    options = parser.read(argv)
    if options.gradient and options.sample is None:
        parser.error("--gradient needs --sample")
    console = Console(highlight=False, emoji=False)
    try:
        run = read_run(options.run, options.user_code)
        code = _print_explanation(run, options.step, options.sample, options.gradient, console)
    except VerlError as error:
        return write_error(error)
    for note in run.notes:
        console.print(f"note: {printable(note)}", markup=False, soft_wrap=True)
    return code


def _print_explanation(run: RunFolder, step: int, sample: int | None, gradient: bool, console: Console) -> int:
    from toolrl.analysis.explain.explanation import explain, read_step, summary  # imports torch

    if sample is None:
        for line in summary(read_step(run, step)):
            console.print(line, markup=False, soft_wrap=True)
        return 0
    explanation = explain(run, step, sample, gradient)
    for title, lines in explanation.sections:
        console.print(f"\n{title}", style="bold", markup=False)
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
    if explanation.failed:
        console.print(f"\nchecks that fail: {', '.join(explanation.failed)}", style="bold red", markup=False)
    return 1 if explanation.failed else 0


if __name__ == "__main__":
    sys.exit(main())
