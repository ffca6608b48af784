"""The tables of plug-ins, and names that earlier versions had."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl import plugins
from verl.errors import ConfigError
from verl.moved import MOVED, new_name
from verl.plugins import Plugin
from verl.registry import resolve

TABLES = {name: table for name, table in vars(plugins).items() if name.isupper()}


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_names_a_module_of_toolrl(name: str) -> None:
    table: Mapping[str, str] = TABLES[name]
    assert list(table) == sorted(table) or name in ("ENV_ADAPTERS", "LAYOUTS", "REWARD_FORMS")
    for path in table.values():
        module, _, attribute = path.partition(":")
        assert module.startswith("toolrl.") and find_spec(module) is not None and attribute


def test_a_plugin_that_is_not_installed_is_none_or_an_error() -> None:
    missing: Plugin[object] = Plugin("toolrl.nothing.here:anything")
    assert missing.find() is None
    with pytest.raises(ConfigError, match=r"^toolrl\.nothing\.here, or a module that it uses, is not installed$"):
        missing.load()
    assert Plugin(plugins.HOOKS["verdict"]).load() is not None


def test_a_broken_plugin_is_not_taken_for_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        Plugin("of_mine:anything").find()


def test_a_file_that_imports_a_module_that_has_moved_is_an_error_with_the_new_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from verl.utils.reward_score.math import last_box\n")
    with pytest.raises(
        ConfigError, match=r"; verl\.utils\.reward_score\.math has moved to toolrl\.reward_score\.math$"
    ):
        resolve("reward", f"{tmp_path / 'mine.py'}:score", {})


def test_names_that_have_moved_are_errors_with_the_new_name() -> None:
    for old, new in MOVED.items():
        assert find_spec(new) is not None, f"{old} -> {new}"
    assert new_name("verl.kit.swe.tasks") == "toolrl.swe.tasks"
    assert new_name("verl.kit.plan.parity") == "verl.workers.parity"
    assert new_name("verl.systematic") is None and new_name("verl.types") is None
    with pytest.raises(ConfigError, match=r"^map: verl\.kit\.swe\.tasks has moved to toolrl\.swe\.tasks$"):
        resolve("map", "verl.kit.swe.tasks:as_task_row", {})
    with pytest.raises(ImportError, match=r"^verl\.kit has moved: .*verl\.kit\.swe is toolrl\.swe"):
        import verl.kit.swe  # noqa: F401
