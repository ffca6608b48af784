"""Distribution `toolrl`, import name `verl`. Torch and vLLM are chosen by `scripts/setup_env.sh` for CPU or GPU."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(path: str) -> list[str]:
    """The requirements in a file, without comments and blank lines."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def read_version() -> str:
    """The version in `verl/__init__.py`, read as text because a build must not import the package."""
    match = re.search(r'^__version__ = "(.+)"', (ROOT / "verl/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    return match.group(1)


README = ROOT / "README.md"

setup(
    name="toolrl",
    version=read_version(),
    description="Reinforcement learning (GRPO, PPO) for language models that call tools",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["verl", "verl.*"]),
    package_data={"": ["py.typed", "*.yaml", "*.txt", "*.json", "*.jinja"]},
    install_requires=read_requirements("requirements.txt"),
    extras_require={
        "gpu": read_requirements("scripts/requirements/gpu.txt"),
        "flash": ["flash-attn>=2.8"],  # optional: compiled against the installed torch
        "dev": read_requirements("scripts/requirements/dev.txt"),
    },
)
