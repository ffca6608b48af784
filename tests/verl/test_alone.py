"""The trainer works without `toolrl`: it loads plug-ins by their names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Imports all modules and resolves a recipe.
IMPORT_ALL = """
import importlib, pkgutil, sys
import verl
from pathlib import Path
assert Path(verl.__file__).parent == Path.cwd() / "verl", verl.__file__
for module in pkgutil.walk_packages(verl.__path__, "verl."):
    skipped = module.name in ("verl.kit", "verl.trainer.main_eval", "verl.trainer.main_generation")
    if not skipped and not any(name and name in module.name for name in sys.argv[1].split(",")):
        importlib.import_module(module.name)
assert sys.modules["toolrl"] is None and not [name for name in sys.modules if name.startswith("toolrl.")]
from verl.trainer.main_ppo import main
sys.exit(main(["recipe=mini_grpo", "--cfg", "job"]))
"""


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A folder with the package and what it embeds."""
    shutil.copytree(ROOT / "verl", tmp_path / "verl", symlinks=True)
    (tmp_path / "dataset").symlink_to(ROOT / "dataset")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['toolrl'] = None")  # where it is installed
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    """What a Python prints that finds the package in this folder alone."""
    variables = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=variables, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
def test_all_modules_are_imported_and_a_recipe_resolves(alone: Path) -> None:
    vllm = find_spec("vllm") and find_spec("vllm._C")
    absent = [*([] if vllm else ["vllm"]), *([] if find_spec("triton") else ["_kernels"])]
    assert "total_training_steps" in run(alone, "-c", IMPORT_ALL, ",".join(absent))


@pytest.mark.slow
def test_two_steps_are_trained(alone: Path) -> None:
    settings = [
        "recipe=mini_grpo",
        "rollout.name=hf",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={alone / 'outputs'}",
    ]
    assert "step 2/2" in run(alone, "-m", "verl.trainer.main_ppo", *settings)
