"""Model folders that are damaged: one ConfigError that names the key, the folder and what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.conftest import ROOT
from tests.support.every import every
from tests.support.hub import Hub
from tests.support.service import free_port
from tests.support.stateful import STATEFUL
from tests.support.tiny import run_overrides, save_tiny_model
from tests.support.until import until
from tests.verl.workers.test_parity import tiny_config
from verl.build.run import load_chat_template
from verl.config.schema import ModelConfig
from verl.errors import ConfigError
from verl.host import hub
from verl.pretrained import (
    check_hub,
    check_weights,
    has_attention_alone,
    read_causal_lm,
    read_model_config,
    read_tokenizer,
)
from verl.rollout.hf_engine import load_hf_engine
from verl.trainer.main_ppo import main
from verl.weight_files import WeightFiles
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
        r"whose shapes differ .*: .*up_proj.weight \(3, 5\) instead of \(64, 64\)",
    ),
    "a weight too many": (
        weights(lambda w: w.update({"model.norm.bias": torch.ones(64)})),
        "no place for: model.norm.bias",
    ),
    "one NaN": (weights(lambda w: w[NAME][3, 4:5].fill_(float("nan"))), f"NaN or infinite: {NAME}"),
    "one infinity": (weights(lambda w: w[NAME][3, 4:5].fill_(float("-inf"))), f"NaN or infinite: {NAME}"),
    "a cut file": (cut, "can be loaded"),
    "an empty file": (emptied, "can be loaded"),
    "no weights": (removed, "can be loaded"),
    "a pickle that runs code": (hostile, "can be loaded"),
    "no JSON": (config("{"), "can be loaded"),
    "deep JSON": (config("[" * 100_000), "can be loaded"),
    "a text for a number": (config('{"model_type": "qwen2", "hidden_size": "x"}'), "can be loaded"),
    "no size that any machine has": (config('{"model_type": "qwen2", "hidden_size": 1000000000000}'), "can be loaded"),
}


def first_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """What a rank of four holds of it."""
    which = slice(len(tensor) // 4)
    return torch.empty_like(tensor[which], device="cpu"), which


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
    with pytest.raises(ConfigError, match=rf"^critic\.path: .*model.*{expected}"):
        model = load_causal_lm(str(folder), key="critic.path", empty=True)
        WeightFiles(str(folder), model, "critic.path").read(model, first_rows)
    assert not evil.exists()


OWN_CODE = """
import os
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
os.mkdir(os.environ["EVIL"])
class Config(Qwen2Config):
    model_type = "evil"
class Model(Qwen2ForCausalLM):
    config_class = Config
class Tokenizer(Qwen2Tokenizer):
    pass
"""


@pytest.mark.parametrize("kind", ["evil", "qwen2", "vit"])
def test_code_that_comes_with_a_model_by_auto_map_does_not_run(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is on the terminal: transformers asks there, unless it is set. "vit" has no causal model of its own."""
    evil = folder.parent / "evil"
    monkeypatch.setenv("EVIL", str(evil))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "own.py").write_text(OWN_CODE)
    mapped = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": [None, "own.Tokenizer"]}
    for name, more in (
        ("config.json", {"model_type": kind}),
        ("tokenizer_config.json", {"tokenizer_class": "Tokenizer"} if kind == "evil" else {}),
    ):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, **more, "auto_map": mapped}))
    for read in (
        lambda: read_model_config(str(folder)),
        lambda: read_causal_lm(str(folder), torch.float32),
        lambda: check_weights(str(folder)),
        lambda: read_tokenizer(str(folder)),
        lambda: load_chat_template(ModelConfig(path=str(folder))),
    ):
        with suppress(ConfigError):  # "qwen2" loads, with transformers' own code
            read()
        assert not evil.exists()
    if kind == "evil":
        with pytest.raises(ConfigError, match=r"model\.path: .*custom code"):
            read_causal_lm(str(folder), torch.float32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "model_type.*config.json"),
        ("model.safetensors", "no file named model.safetensors"),
        ("tokenizer.json", "has no vocabulary; add its tokenizer.json"),
        ("chat_template.jinja", "has no chat template"),
        ("tokenizer_config.json", None),
        ("generation_config.json", None),
    ],
)
def test_a_model_folder_with_a_missing_file_loads_or_is_an_error(name: str, message: str | None, folder: Path) -> None:
    def load() -> None:
        load_causal_lm(str(folder), key="model.path")
        load_chat_template(ModelConfig(path=str(folder)))

    load()
    (folder / name).unlink()
    if message is None:
        load()
    else:
        with pytest.raises(ConfigError, match=f"{folder}.*{message}") as raised:
            load()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"7", b"[" * 100_000, b"\xff\xfe\x00", b"", b'{"added_tokens": 7}'])
def test_damaged_files_beside_the_weights_are_one_config_error(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)
    if content == b'{"added_tokens": 7}' and name != "tokenizer.json":
        load_chat_template(ModelConfig(path=str(folder)))
        return
    with pytest.raises(ConfigError, match=r"^model\.path: ") as raised:
        load_chat_template(ModelConfig(path=str(folder)))
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["a weight is missing", "all weights are missing", "one NaN", "one infinity", "a cut file", "an empty file"]
)
def test_damaged_weights_are_refused_before_an_engine_starts(name: str, folder: Path) -> None:
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
    assert every(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert read_model_config(str(whole)).hidden_size == 64


@pytest.mark.long
def test_a_training_ends_with_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    DAMAGES["one NaN"][0](folder)
    assert main(run_overrides(folder, tmp_path / "out", "hf", 1)) == 2
    output = capsys.readouterr().out
    assert f"NaN or infinite: {NAME}" in output and "Traceback" not in output


@pytest.mark.parametrize("silent", [True, False])
def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub()
    refusing = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "ENDPOINT", server.address if silent else refusing)
    monkeypatch.setattr(hub, "_HUB_S", 0.4)
    for read in (read_model_config, read_tokenizer):
        with pytest.raises(ConfigError, match=r"critic.path: 'me/model' is no file or folder, and the hub, http://127"):
            read("me/model", "critic.path")
    if silent:
        until(lambda: server.connections > 1)  # the threads that are left to themselves may be slow
    assert server.connections in ((2, 3, 4) if silent else (0,))  # a client may connect twice; the libraries would more
    server.socket.close()


def test_an_answer_of_a_hub_is_not_a_missing_network(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub(
        b"HTTP/1.1 404 Not Found\r\nX-Error-Code: RepoNotFound\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    check_hub("me/model", "model.path")
    assert server.connections == 1
    server.socket.close()


def test_a_folder_and_an_impossible_name_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    for name in (str(tmp_path), "/no/such/folder", "a b"):
        check_hub(name, "model.path")
    assert server.connections == 0
    server.socket.close()


@pytest.mark.parametrize(
    ("kind", "settings", "alone"),
    [
        ("qwen2", {}, True),
        ("gemma3_text", {}, True),
        ("gemma3", {}, True),
        ("llama", {}, True),
        *((kind, settings, False) for kind, settings in STATEFUL.items()),
        ("qwen3_5", {}, False),
    ],
)
def test_layers_with_state_are_known_by_their_kinds(kind: str, settings: dict[str, Any], alone: bool) -> None:
    assert has_attention_alone(tiny_config(kind, **settings) if settings else CONFIG_MAPPING[kind]()) is alone


@pytest.mark.parametrize("name", ["score.weight", "v_head.summary.bias", "mtp.layers.0.norm.weight"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_part_beside_the_model_is_named_and_not_used(
    name: str, empty: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the files of reward models, of TRL's models with a value head, and of models that predict more tokens."""
    save_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(4)}, file, {"format": "pt"})
    model = read_causal_lm(str(tmp_path), torch.float32, "critic.path", empty=empty)
    assert name not in model.state_dict()
    assert caplog.messages == [f"critic.path: weights of {str(tmp_path)!r} that are not used: {name}"]
    if empty:
        WeightFiles(str(tmp_path), model)
