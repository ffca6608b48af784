"""The working folder of these tests is above all that they make: rows may name environments in it alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _working_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
