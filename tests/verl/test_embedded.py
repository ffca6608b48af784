"""`embedded:FILE` names the embedded tasks and model from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from toolrl.commands import GENERATE, PROBE
from verl.config.load import load_config
from verl.embedded import embedded_path, with_embedded_paths
from verl.errors import ConfigError

MINI = ROOT / "dataset" / "mini"


def test_a_name_becomes_the_path_in_a_checkout() -> None:
    assert Path(embedded_path("embedded:test.parquet")) == MINI / "test.parquet"
    assert Path(embedded_path("embedded:model")) == MINI / "model"


def test_every_other_value_stays_as_it_is() -> None:
    for value in ("owner/name:train", "embedded", "a embedded:model", 3, None, {"a": "b"}, [1, "x"]):
        assert with_embedded_paths(value) == value
    assert with_embedded_paths(["x", "embedded:model"]) == ["x", str(MINI / "model")]


def test_an_unknown_file_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"there is no 'embedded:tst.parquet'; did you mean 'embedded:test.parquet'\?"
    ):
        embedded_path("embedded:tst.parquet")


def test_a_checkout_without_symbolic_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "mini"  # as git leaves it under core.symlinks=false
    link.write_text("../dataset/mini", encoding="utf-8")
    monkeypatch.setattr("verl.embedded.FOLDER", link)
    with pytest.raises(ConfigError, match=r"embedded:model: .*/mini is not a folder.*core\.symlinks true"):
        embedded_path("embedded:model")


def test_recipes_and_settings_of_every_command_take_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(["recipe=mini_grpo"])
    assert config.model.path == str(MINI / "model")
    files = [*config.data.train_files, *config.data.val_files]
    assert [Path(each) for each in files] == [MINI / f"{name}.parquet" for name in ("train", "test", "test_new_tools")]
    plain = load_config(["model.path=embedded:model", "data.val_files=[embedded:test.parquet]"], GENERATE)
    assert plain.data.val_files == [str(MINI / "test.parquet")]
    composed = load_config(["recipe=composed_grpo"])
    assert composed.data.train_files == [str(MINI / "composed" / "train.parquet")]
    assert load_config(["recipe=mini_grpo"], PROBE).data.train_files == [str(MINI / "train.parquet")]
