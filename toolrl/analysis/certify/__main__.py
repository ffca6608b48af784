"""Certify a run, or check its certificate: toolrl certify RUN, toolrl certify --check MANIFEST [RUN] [--steps N]

    toolrl certify RUN                          write RUN/manifest.json: inputs, and what came out of every step
    toolrl certify RUN --check MANIFEST         compare the folder with its manifest
    toolrl certify --check MANIFEST --steps 10  train the first 10 steps again, on the transformers engine, and compare

setting=KEY=VALUE names where files lie here: setting=model.path=FOLDER setting=data.train_files=[FILE]. They must be
those of the run. With processor, versions, threads and engine of the run all numbers are equal, bit for bit; elsewhere
mean rewards agree within 4 standard errors.
Exit code 0: equal, or elsewhere within the tolerance. 1: it differs. 2: it cannot be checked.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from verl.errors import ConfigError, VerlError
from verl.host.arguments import Arguments, positive_int
from verl.host.exits import write_error
from verl.text import printable

if TYPE_CHECKING:
    from toolrl.analysis.certify.check import Difference

MANIFEST = "manifest.json"
_SHOWN = 20  # differences
_LONGEST = 40  # characters of a value


def arguments() -> Arguments:
    parser = Arguments("toolrl certify", __doc__)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, help=f"file of the manifest (default: RUN/{MANIFEST})")
    parser.add_argument("--check", type=Path, metavar="MANIFEST", help="compare with this manifest")
    parser.add_argument("--steps", type=positive_int, help="steps to train again")
    parser.add_argument("--setting", action="append", default=[], metavar="KEY=VALUE", help="where a file lies here")
    parser.add_argument("--user-code", action="store_true", help="run the code that the manifest names")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments()
    options = parser.read(argv)
    if options.run is None and options.steps is None:
        parser.error("name the folder of a run; or --check MANIFEST --steps N")
    if options.check is None and (options.run is None or options.steps or options.setting):
        parser.error("--steps and setting= need --check MANIFEST")
    if options.check and options.out:
        parser.error("--check writes no file: leave --out out")
    console = Console(highlight=False, emoji=False)
    try:
        if options.check is None:
            return _certify(options.run, options.out or options.run / MANIFEST, console)
        code = 0 if options.run is None else _check_run(options.check, options.run, console)
        if options.steps is None:
            return code
        return max(code, _check_steps(options.check, options.steps, options.setting, options.user_code, console))
    except VerlError as error:
        return write_error(error)


def _certify(run: Path, out: Path, console: Console) -> int:
    from toolrl.analysis.certify.manifest import manifest_of, write_manifest  # heavy imports, here and below

    manifest = manifest_of(run)
    write_manifest(manifest, out)
    last = max(map(int, manifest["steps"]), default=0)
    console.print(f"{out}: {last} steps, sha256 {manifest['sha256']}", markup=False, soft_wrap=True)
    return 0


def _check_run(file: Path, run: Path, console: Console) -> int:
    from toolrl.analysis.certify.check import compare_run
    from toolrl.analysis.certify.manifest import read_manifest

    manifest = read_manifest(file)
    differences = compare_run(manifest, run)
    _print(differences, console)
    same = f"{run} is what the manifest states: {len(manifest['steps'])} steps and validations"
    console.print(f"{run} differs from the manifest" if differences else same, markup=False, soft_wrap=True)
    return 1 if differences else 0


def _check_steps(file: Path, num: int, placed: Sequence[str], user_code: bool, console: Console) -> int:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from toolrl.analysis.certify.check import check_inputs, compare_steps, compute, elsewhere, settings_here
    from toolrl.analysis.certify.manifest import read_manifest
    from verl.config.load import flattened

    manifest = read_manifest(file)
    try:
        own = flattened(OmegaConf.to_container(OmegaConf.from_dotlist(list(placed)))) if placed else {}
    except OmegaConfBaseException as error:
        raise ConfigError(f"setting={placed}: {str(error).splitlines()[0]}") from error
    settings = settings_here(manifest, own)
    check_inputs(manifest, settings)
    if num > (last := max(map(int, manifest["steps"]), default=0)):
        raise ConfigError(f"--steps {num}: the run has {last}")
    reasons = elsewhere(manifest, settings)
    for reason in reasons:
        console.print(f"the bits may differ: {reason}", markup=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        differences = compare_steps(manifest, compute(manifest, settings, num, Path(folder), user_code), num)
    _print(differences, console)
    outcomes = [each for each in differences if each.what in ("rollouts", "validation", "step")]
    is_near = bool(reasons) and all(each.tolerated for each in outcomes)
    if not differences:
        verdict = "are the same, bit for bit: inputs, rollouts, rewards and all metrics"
    else:
        verdict = "have the same mean rewards within 4 standard errors; the bits differ" if is_near else "differ"
    console.print(f"the first {num} steps {verdict}", soft_wrap=True)
    return 1 if differences and not is_near else 0


def _print(differences: Sequence[Difference], console: Console) -> None:
    if not differences:
        return
    table = Table("step", "what", "manifest", "found", "")
    for each in differences[:_SHOWN]:
        values = (_shown(each.stated), _shown(each.found))
        table.add_row(str(each.step), each.what, *values, "within the tolerance" if each.tolerated else "")
    console.print(table)
    if len(differences) > _SHOWN:
        console.print(f".. and {len(differences) - _SHOWN} more differences")


def _shown(value: object) -> str:
    if isinstance(value, dict) and "reward" in value:
        return f"mean reward {value['reward']:.4f}, sha256 {value['sha256'][:8]}"
    return printable(str(value))[:_LONGEST]


if __name__ == "__main__":
    sys.exit(main())
