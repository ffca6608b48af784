"""The interpreter environment of a repository, for `SweTask.environment`: a virtual environment that runtimes mount.

    python scripts/swe/prepare.py --output environments/toolz --install pytest 'toolz==1.2.0'
    python scripts/swe/prepare.py --output environments/sympy --python python3.9 --requirements sympy.txt
    python scripts/swe/prepare.py --output environments/plain --copy pytest

Runtimes see it as /environment, read-only, and no package of the trainer. --copy takes pure Python packages of this
interpreter, with what they need, and uses no network.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from toolrl.swe.local import ENVIRONMENT
from verl.errors import ConfigError, VerlError
from verl.host.exits import write_error

# Runtimes cannot write into the environment. A file that cannot be compiled is of no interest.
COMPILE = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2)"


def make_environment(
    output: Path, install: Sequence[str] = (), copy: Sequence[str] = (), python: str = sys.executable
) -> Path:
    """Make it in a temporary folder that is renamed at the end. install: arguments of pip. Raises ConfigError."""
    if output.exists():
        raise ConfigError(f"{output} exists: remove it, or choose another --output")
    unfinished = output.with_name(f".{output.name}.unfinished").absolute()
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _run([python, "-m", "venv", *([] if install else ["--without-pip"]), str(unfinished)])
        if install:
            _run([str(unfinished / "bin" / "python"), "-m", "pip", "install", "--quiet", *install])
        packages = next(unfinished.glob("lib/python*/site-packages"))
        for found in _with_needed(copy):
            _copy(found, packages)
        _run([str(unfinished / "bin" / "python"), "-c", COMPILE, str(packages)])
        _relocate(unfinished)
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return output


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"{command[0]} does not start ({error})") from error
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")


def _with_needed(names: Sequence[str]) -> Iterator[Distribution]:
    """Installed packages and what they need."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError as error:
            raise ConfigError(f"--copy {name}: not installed here") from error
        yield found
        needed = [each for each in found.requires or [] if ";" not in each]
        waiting += [re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0] for each in needed]


def _copy(found: Distribution, packages: Path) -> None:
    for file in found.files or []:
        source = Path(str(found.locate_file(file)))
        if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _relocate(folder: Path) -> None:
    """Scripts start the interpreter at its place in a runtime."""
    for script in (folder / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            data = script.read_bytes()
            if str(folder).encode() in data and b"\0" not in data:
                script.write_bytes(data.replace(str(folder).encode(), ENVIRONMENT.encode()))


def main(argv: Sequence[str] | None = None) -> int:
    """Make one environment; returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--output", required=True, type=Path, metavar="FOLDER")
    options.add_argument("--python", default=sys.executable, help="interpreter, which runtimes must be able to read")
    options.add_argument("--requirements", action="append", default=[], metavar="FILE")
    options.add_argument("--install", nargs="+", default=[], metavar="PACKAGE", help="for pip")
    options.add_argument(
        "--copy", nargs="+", default=[], metavar="PACKAGE", help="of this interpreter, without network"
    )
    arguments = options.parse_args(argv)
    install = [*arguments.install, *(part for each in arguments.requirements for part in ("--requirement", each))]
    try:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        made = make_environment(arguments.output, install, arguments.copy, arguments.python)
    except VerlError as error:
        return write_error(error)
    print(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
