from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from verl.host.free_memory import free_memory


@pytest.mark.parametrize(
    ("limit", "free"),
    [("1000000", 1000000 - 400000 + 50000), ("300000", 0)],  # cached files are given up; the limit may be lowered
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, free: int) -> None:
    for name, text in (("max", limit), ("current", "400000"), ("stat", "anon 350000\ninactive_file 50000")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert free_memory(tmp_path) == free


@pytest.mark.parametrize("limit", [None, "max"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert free_memory(tmp_path) > 0.5 * psutil.virtual_memory().available
