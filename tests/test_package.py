"""The source distribution and the wheel hold all that they need, and an installed wheel works in an empty folder.

`-m slow`, and a check of its own in `.ci/run`. Nothing is downloaded: the environment has what building takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.programs import need

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **variables: str) -> str:
    """What a command prints; fails with it where the command does."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    arguments = [str(word) for word in command]
    done = subprocess.run(arguments, cwd=cwd, env=kept | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> set[str]:
    """The files under verl/ that git knows, the embedded ones at the place where the package has them."""
    need("git")
    listed = run("git", "ls-files", "verl", "toolrl", "dataset/mini", cwd=ROOT).splitlines()
    return {name.replace("dataset/mini", "verl/mini") for name in listed} - {"verl/mini"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git knows, as a fresh clone would be."""
    need("git")
    source = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    return source / "dist" / run(sys.executable, "-c", code, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source distribution, as an index or a user would."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", folder, sdist, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel, which sees the packages of this one, but not this checkout."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--ignore-installed", wheel, cwd=folder.parent)
    return python.parent


def test_the_source_distribution_has_every_file_of_the_package(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {each.name.partition("/")[2] for each in archive if each.isfile()}
    assert tracked() - files == set()
    assert {"pyproject.toml", "setup.py", "requirements.txt", "LICENSE", "README.md"} <= files
    assert not [name for name in files if name.startswith("tests/")]


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert tracked() ^ {name for name in files if ".dist-info/" not in name} == set()


def test_an_installed_wheel_works_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    toolrl = installed / "toolrl"
    assert "all packages are installed" in run(toolrl, "doctor", "--quick", cwd=tmp_path)
    place = run(installed / "python", "-c", "import verl.embedded as e; print(e.FOLDER)", cwd=tmp_path).strip()
    assert Path(place).is_relative_to(installed.parent)
    assert f"path: {place}/model" in run(toolrl, "train", "recipe=mini_grpo", "--cfg", "job", cwd=tmp_path)
    tried = run(toolrl, "lab", "data=embedded:test.parquet", "eval.limit=10", cwd=tmp_path)
    assert "10 rows tried, 0 with violations" in tried
    ready = run(toolrl, "preflight", "recipe=mini_grpo", "trainer.device=cpu", cwd=tmp_path)
    assert "one update on a tiny" in ready


def test_every_recipe_and_prompt_of_an_installed_wheel_is_found(installed: Path, tmp_path: Path) -> None:
    code = """
import sys
from verl.config.load import load_config
from verl.formats.prompt import load_template
for word in sys.argv[1:]:
    path = word.split("/")
    load_config([f"recipe={path[-1]}"]) if path[0] == "recipe" else load_template(path[-1], "")
"""
    recipes = [f"recipe/{path.stem}" for path in (ROOT / "verl" / "config" / "recipe").glob("*.yaml")]
    prompts = [f"prompt/{path.stem}" for path in (ROOT / "verl" / "formats" / "prompts").glob("*.txt")]
    assert recipes and prompts
    run(installed / "python", "-c", code, *recipes, *prompts, cwd=tmp_path)
