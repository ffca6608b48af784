"""The kit: the path works without any of its tools."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = sorted(each.parent.name for each in ROOT.glob("verl/kit/*/__init__.py"))
# Imports the path and resolves a recipe, once per copy of the package: in forks of a process that has imported all that
# the path needs of other packages.
IMPORT_PATH = """
import importlib, os, pkgutil, sys
absent, *copies = sys.argv[1:]  # modules whose packages are not installed, and folders

def import_path(copy):
    sys.path.insert(0, copy)
    import verl
    assert verl.__path__ == [f"{copy}/verl"], verl.__path__
    for module in pkgutil.walk_packages(verl.__path__, "verl."):
        skipped = ".kit" in module.name or "__main__" in module.name
        if not skipped and not any(name and name in module.name for name in absent.split(",")):
            importlib.import_module(module.name)

import_path(copies[0])
sys.path.remove(copies[0])
for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
    del sys.modules[name]

failed = []
for copy in copies:
    pid = os.fork()
    if pid == 0:
        import_path(copy)
        from verl.trainer.main_ppo import main
        code = main(["recipe=mini_grpo", "--cfg", "job"])
        sys.stdout.flush()
        os._exit(code)
    if os.waitpid(pid, 0)[1]:
        failed.append(copy)
sys.exit(f"failed in {failed}" if failed else 0)
"""


def copy_without(tool: str, folder: Path) -> Path:
    """A copy of the package without this tool."""
    shutil.copytree(ROOT / "verl", folder / "verl", symlinks=True)  # with compiled files: each copy is imported
    (folder / "dataset").symlink_to(ROOT / "dataset")
    shutil.rmtree(folder / "verl" / "kit" / tool)
    return folder


def without_checkout() -> dict[str, str]:
    """The environment, in which the package is found in the current folder alone."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.long
def test_the_path_is_imported_and_resolves_a_recipe_without_any_tool(tmp_path: Path) -> None:
    copies = [str(copy_without(tool, tmp_path / tool)) for tool in TOOLS]
    vllm = find_spec("vllm") and find_spec("vllm._C")
    absent = [*(["vllm"] if not vllm else []), *([] if find_spec("triton") else ["_kernels"])]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PATH, ",".join(absent), *copies],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=without_checkout(),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("total_training_steps") == len(TOOLS) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_two_steps_are_trained_without_the_tool(tool: str, tmp_path: Path) -> None:
    copy = copy_without(tool, tmp_path)
    settings = [
        "recipe=mini_grpo",
        "rollout.name=hf",
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=4",
        "rollout.n=2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={tmp_path / 'outputs'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *settings],
        cwd=copy,
        capture_output=True,
        text=True,
        env=without_checkout(),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step 2/2" in done.stdout
