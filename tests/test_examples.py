"""The examples work as printed: short scripts, and notebooks in a kernel as a browser starts one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl.kit.api.run import load_run

SCRIPTS = sorted((ROOT / "examples").glob("own_*.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MOST_LINES = 15
SECONDS = 600


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short(script: Path) -> None:
    """Without blank lines and docstrings."""
    tree = ast.parse(script.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
    texts = [body[0] for body in bodies if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)]
    text_lines = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    lines = [line for number, line in enumerate(script.read_text().splitlines(), 1) if number not in text_lines]
    assert len([line for line in lines if line.strip()]) <= MOST_LINES


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_trains(script: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in load_run(tmp_path / "outputs" / "run-1").metrics] == [1, 2]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    for cell in cells:
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel has a running event loop, and no main module."""
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pages = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(pages, timeout=SECONDS, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in pages.cells for output in cell.get("outputs", ())]
    assert "step 2/2" in "".join(each["text"] for each in shown if each["output_type"] == "stream")
    kinds = {kind for each in shown for kind in each.get("data", ())}
    assert "text/html" in kinds or "image/png" in kinds
    assert [row["step"] for row in load_run(next((tmp_path / "outputs").iterdir())).metrics][-2:] == [1, 2]
