"""Model folders that are damaged: one ConfigError that names the key, the folder and what is wrong."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.tiny import run_words, save_tiny_model
from verl.errors import ConfigError
from verl.rollout.hf_engine import load_hf_engine
from verl.trainer.main_ppo import main
from verl.utils.pretrained import check_weights, read_causal_lm, read_model_config
from verl.workers.model import load_causal_lm

NAME = "model.layers.0.mlp.up_proj.weight"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def emptied(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def removed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def config(text: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(text) and None


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL"],)


def hostile(folder: Path) -> None:
    removed(folder)
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump({NAME: Evil()}, file)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a weight is missing": (weights(lambda w: w.pop(NAME)), f"lacks weights: {NAME}"),
    "all weights are missing": (weights(dict.clear), "lacks weights: .* and 2. more"),
    "a weight of another shape": (
        weights(lambda w: w.update({NAME: torch.ones(3, 5)})),
        r"other shapes .* says: .*up_proj.weight \(3, 5\) instead of \(64, 64\)",
    ),
    "one NaN": (weights(lambda w: w[NAME][3, 4:5].fill_(float("nan"))), f"NaN or infinite: {NAME}"),
    "one infinity": (weights(lambda w: w[NAME][3, 4:5].fill_(float("-inf"))), f"NaN or infinite: {NAME}"),
    "a cut file": (cut, "can be read"),
    "an empty file": (emptied, "can be read"),
    "no weights": (removed, "can be read"),
    "a pickle that runs code": (hostile, "can be read"),
    "no JSON": (config("{"), "can be read"),
    "deep JSON": (config("[" * 100_000), "can be read"),
    "a text for a number": (config('{"model_type": "qwen2", "hidden_size": "x"}'), "can be read"),
    "no size that any machine has": (config('{"model_type": "qwen2", "hidden_size": 1000000000000}'), "can be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_config_error(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, expected = DAMAGES[name]
    evil = folder.parent / "evil"
    monkeypatch.setenv("EVIL", str(evil))
    damage(folder)
    with pytest.raises(ConfigError, match=rf"^critic\.path: .*model.*{expected}") as caught:
        load_causal_lm(str(folder), key="critic.path")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    with pytest.raises(ConfigError, match=rf"^model\.path: .*{expected}"):
        load_hf_engine(str(folder), torch.float32, "cpu", 1)
    assert not evil.exists()


@pytest.mark.parametrize(
    "name", ["a weight is missing", "all weights are missing", "one NaN", "one infinity", "a cut file", "an empty file"]
)
def test_what_an_engine_of_its_own_would_take_is_refused_before_it_starts(name: str, folder: Path) -> None:
    check_weights(str(folder))
    damage, expected = DAMAGES[name]
    damage(folder)
    with pytest.raises(ConfigError, match=expected):
        check_weights(str(folder))


def test_whole_folders_load(whole: Path, folder: Path) -> None:
    tensors = load_file(whole / "model.safetensors")
    removed(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    loaded = read_causal_lm(str(folder), torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert read_model_config(str(whole)).hidden_size == 64


def test_a_training_ends_with_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    DAMAGES["one NaN"][0](folder)
    assert main(run_words(folder, tmp_path / "out", "hf", 1)) == 2
    said = capsys.readouterr().out
    assert f"NaN or infinite: {NAME}" in said and "Traceback" not in said
