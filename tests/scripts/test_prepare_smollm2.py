"""scripts/prepare_smollm2.py where what it needs is not there; the download itself takes a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import prepare_smollm2


def test_a_missing_gguf_package_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(sys, "argv", ["prepare_smollm2.py", "--out", str(tmp_path / "model")])
    assert prepare_smollm2.main() == 1
    assert capsys.readouterr() == (
        "",
        "reading the model needs the package gguf; install it with: "
        "pip install -r scripts/requirements/gguf.txt, or pip install 'toolrl[gguf]'\n",
    )
    assert not (tmp_path / "model").exists()
