"""The images' descriptions: what they copy exists and reaches the build, and their versions are the pinned ones."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.programs import need

FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
ALLOWED = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, arguments), with continued lines joined and without comments."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(arguments.split())) for name, arguments in found]


def reaches(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in ALLOWED)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_copied_files_exist_and_are_not_ignored(file: Path) -> None:
    copied = [word for name, arguments in instructions(file) if name == "COPY" for word in arguments.split()[:-1]]
    assert copied[-1] == "." and len(copied) > 1
    assert all((ROOT / word).exists() and reaches(word) for word in copied[:-1])
    used = re.findall(r"-r /opt/pins/(\S+)", file.read_text())
    assert set(used) == {Path(word).name for word in copied[:-1]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_its_versions_are_the_pinned_ones(file: Path) -> None:
    kind = file.suffix[1:]
    setup = (ROOT / "scripts" / "setup_env.sh").read_text() + (
        ROOT / "scripts/requirements" / f"{kind}.txt"
    ).read_text()
    named = re.findall(r"([a-z]+)(?:\[\w+\])?==([\d.]+\d)", "\n".join(text for _, text in instructions(file)))
    assert named and all(f"{name}=={version}" in setup for name, version in named)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_ends_as_another_user_after_the_doctor_with_the_command(file: Path) -> None:
    end = instructions(file)[-4:]
    assert end[0] == ("USER", "1000") and end[1] == ("WORKDIR", "/work")
    assert end[2][0] == "RUN" and end[2][1].startswith("toolrl doctor --")
    assert end[3] == ("ENTRYPOINT", '["toolrl"]')


def test_the_build_gets_what_the_package_needs_and_no_more() -> None:
    need("git")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    needed = [name for name in listed if name.startswith(("verl/", "dataset/mini/", "scripts/requirements/"))]
    assert len(needed) > 300 and all(map(reaches, needed))
    assert all(map(reaches, ("pyproject.toml", "requirements.txt", "README.md", "LICENSE", "toolrl/__init__.py")))
    assert not any(map(reaches, (".git", ".venv", "outputs", "models", "tests")))
    assert not any(fnmatch(name, each) for name in needed for each in ("*.pyc", "*/__pycache__/*"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint(file: Path) -> None:
    need("hadolint")
    done = subprocess.run(["hadolint", "--no-color", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
