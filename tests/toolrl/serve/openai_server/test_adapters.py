"""`toolrl serve` of runs with adapters: vLLM's command line, and its answers for each of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.conftest import need_vllm
from tests.support.stateful import save_stateful
from tests.toolrl.serve.openai_server.test_serve import SETTINGS, make_run, serving
from toolrl.serve.openai_server.__main__ import arguments, serving_command
from toolrl.serve.openai_server.adapters import common_base
from toolrl.serve.openai_server.served_model import find_model
from verl.build.base import rounded_base
from verl.checkpoint.contents import contents_of
from verl.config.load import load_config
from verl.embedded import embedded_path
from verl.errors import ConfigError
from verl.lora import Lora, adapter_tensors, add_adapter, name_base, save_adapter
from verl.workers.model import load_causal_lm

PROMPTS = [[5, 6, 7, 8], list(range(40, 80))]
TOKENS = 12


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(embedded_path("embedded:model"), tmp_path_factory.mktemp("models") / "base"))


def make_adapter_run(folder: Path, base: Path, rank: int, seed: int = 0, settings: dict[str, Any] = SETTINGS) -> Path:
    """A run with an adapter that changes the model much. Its merged copy is that of no adapter."""
    checkpoint = make_run(folder, settings) / "checkpoints" / "step-000048"
    state = json.loads((checkpoint / "state.json").read_text())
    contents = contents_of({"model.path": str(base)}, reads_weights=True)
    (checkpoint / "state.json").write_text(json.dumps({**state, "contents": contents}))
    model, lora = load_causal_lm(str(base)), Lora(rank, 16.0, ("all-linear",))
    add_adapter(model, lora)
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapter_tensors(model):
            parameter.normal_(std=0.1)
    save_adapter(lora, dict(adapter_tensors(model)), checkpoint / "adapter", str(base))
    return folder


def command_of(*argv: str, further: Sequence[str] = ("--dtype", "float32")) -> list[str]:
    need_vllm()
    return serving_command(arguments().read([*argv, "--port", "0"]), further)[0]


def value(command: Sequence[str], option: str) -> str:
    return command[command.index(option) + 1]


def listed(command: Sequence[str]) -> list[dict[str, str]]:
    """vLLM's list of adapters."""
    return [json.loads(each) for each in command[command.index("--lora-modules") + 1 :] if each.startswith("{")]


def test_vllm_loads_the_base_and_knows_every_adapter_by_the_name_of_its_run(tmp_path: Path, base: Path) -> None:
    runs = [make_adapter_run(tmp_path / f"r{rank}", base, rank) for rank in (4, 20)]
    command = command_of(*map(str, runs))
    assert value(command, "--model") == str(base) and value(command, "--served-model-name") == "base"
    assert value(command, "--max-loras") == "2" and value(command, "--max-lora-rank") == "32"
    assert value(command, "--tokenizer") == str(runs[0] / "checkpoints" / "step-000048" / "hf")
    assert listed(command) == [
        {"name": run.name, "path": str(run / "checkpoints" / "step-000048" / "adapter"), "base_model_name": "base"}
        for run in runs
    ]
    (alone,) = listed(command_of(str(runs[0]), "--name", "base"))
    assert alone["name"] == "base" and alone["base_model_name"] == "base-base"


def test_the_merged_copy_is_served_by_its_own_folder(tmp_path: Path, base: Path) -> None:
    hf = make_adapter_run(tmp_path / "run", base, 4) / "checkpoints" / "step-000048" / "hf"
    command = command_of(str(hf))
    assert value(command, "--model") == str(hf) and "--enable-lora" not in command


def test_runs_that_cannot_share_a_server_are_one_error(tmp_path: Path, base: Path) -> None:
    other_base = Path(shutil.copytree(base, tmp_path / "other_base"))
    other_format = {**SETTINGS, "env.tool_call_format": "hermes", "data.train_files": []}
    run = make_adapter_run(tmp_path / "run", base, 4)
    cases = {
        "two models have the name run": run,
        "is an adapter of .*other_base, run of .*base; one server has one base": make_adapter_run(
            tmp_path / "second", other_base, 4
        ),
        "third has another tool-call format or prompt than run": make_adapter_run(
            tmp_path / "third", base, 4, settings=other_format
        ),
        "whole.* has no adapter": make_run(tmp_path / "whole"),
    }
    for problem, other in cases.items():
        with pytest.raises(ConfigError, match=problem):
            command_of(str(run), str(other))


def test_rounded_copies_of_one_model_are_one_base(tmp_path: Path, base: Path) -> None:
    config = load_config([f"model.path={base}", "rollout.name=hf", "lora.rank=4", "lora.base_dtype=nf4"])
    copies = [rounded_base(config, tmp_path / name).model.path for name in ("first", "second")]
    runs = [make_adapter_run(tmp_path / name, base, 4) for name in ("first", "second")]
    for run, copy in zip(runs, copies, strict=True):
        name_base(run / "checkpoints" / "step-000048" / "adapter", str(copy))
    assert common_base({run.name: find_model(str(run)) for run in runs}) == copies[0]
    plain = make_adapter_run(tmp_path / "plain", base, 4)
    with pytest.raises(ConfigError, match=r"plain is an adapter of .*; one server has one base"):
        common_base({run.name: find_model(str(run)) for run in (runs[0], plain)})


def test_a_base_that_has_changed_or_gone_is_an_error_that_names_the_merged_copy(tmp_path: Path, base: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    run = make_adapter_run(tmp_path / "run", own, 4)
    (weights,) = own.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"is not what it was at the training; the merged copy is .*hf"):
        command_of(str(run))
    shutil.rmtree(own)
    with pytest.raises(ConfigError, match=r"its base .* is not there; the merged copy is .*hf"):
        command_of(str(run))


def test_an_adapter_with_a_part_that_vllm_cannot_place_names_the_merged_copy(tmp_path: Path, base: Path) -> None:
    run = make_adapter_run(tmp_path / "run", base, 4)
    config = run / "checkpoints" / "step-000048" / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_modules": ["in_proj_z", "q_proj"]}))
    with pytest.raises(ConfigError, match=r"run: vLLM has no adapter of in_proj_z .*; serve the merged copy in hf/"):
        command_of(str(run))


@pytest.mark.parametrize("named", [None, ""])
def test_an_adapter_that_names_no_base_is_not_served(named: str | None, tmp_path: Path, base: Path) -> None:
    run = make_adapter_run(tmp_path / "run", base, 4)
    config = run / "checkpoints" / "step-000048" / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": named}))
    with pytest.raises(ConfigError, match=r"names no base: base_model_name_or_path in adapter_config.json is"):
        command_of(str(run))


def greedy(base: Path, run: Path | None, prompt: Sequence[int]) -> list[int]:
    """By transformers and peft."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if run is not None:
        model = PeftModel.from_pretrained(model, run / "checkpoints" / "step-000048" / "adapter")
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("kind", "argument"),
    [("granitemoehybrid", "--no-enable-prefix-caching"), ("lfm2", '--compilation-config={"custom_ops": ["none"]}')],
)
def test_layers_with_state_are_computed_as_in_training(kind: str, argument: str, tmp_path: Path, base: Path) -> None:
    """On a CPU; by the configuration of what vLLM loads, which is the base of an adapter."""
    model = save_stateful(kind, tmp_path / "model")
    whole = make_run(tmp_path / "whole", model=str(model))
    adapter = make_adapter_run(tmp_path / "adapter", model, 4)
    for run, loaded in ((whole, whole / "checkpoints" / "step-000048" / "hf"), (adapter, model)):
        command = command_of(str(run))
        assert value(command, "--model") == str(loaded) and argument in command
    assert argument not in command_of(str(make_run(tmp_path / "other")))
    name = argument.removeprefix("--no-").removeprefix("--").partition("=")[0]
    for given in (f"--{name}", f"--{name}=x", f"--{name.replace('-', '_')}.y=z", f"--no-{name}"):
        with pytest.raises(ConfigError, match=rf"{re.escape(given)} cannot be given: {kind} needs --"):
            command_of(str(whole), further=[given])
    assert command_of(str(whole), further=[f"--{name}-x"])[-1] == f"--{name}-x"  # another option


def test_a_model_that_vllm_cannot_run_is_not_served(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    CONFIG_MAPPING["qwen3_5_text"]().save_pretrained(run / "checkpoints" / "step-000048" / "hf")
    for further in (["--dtype", "float32"], ["--seed", "1", "--dtype=float32"]):
        with pytest.raises(
            ConfigError, match=r"vLLM cannot run qwen3_5_text in float32 on a CPU.*--dtype of toolrl serve"
        ):
            command_of(str(run), further=further)


@pytest.mark.long
def test_a_model_with_states_and_its_adapter_answer_as_by_peft(tmp_path: Path) -> None:
    """Granite, whose layers vLLM's CPU build computes without a prefix cache alone."""
    import httpx2

    need_vllm()
    model = save_stateful("granitemoehybrid", tmp_path / "model")
    run = make_adapter_run(tmp_path / "run", model, 4)
    with serving(run, tmp_path / "log") as address:
        for name, adapter in (("model", None), ("run", run)):
            asked = {"model": name, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            for prompt in PROMPTS:
                body = {**asked, "prompt": prompt, "return_token_ids": True}
                answer = httpx2.post(f"{address}/completions", json=body, timeout=60)
                assert answer.json()["choices"][0]["token_ids"] == greedy(model, adapter, prompt)


@pytest.mark.long
def test_every_adapter_answers_as_peft_does_and_the_base_as_itself(tmp_path: Path, base: Path) -> None:
    import httpx2

    need_vllm()
    first, second = (make_adapter_run(tmp_path / f"r{rank}", base, rank, seed=rank) for rank in (4, 20))
    answers: dict[str, tuple[int, ...]] = {}
    with serving(first, tmp_path / "log", str(second)) as address:
        for name, run in (("base", None), ("r4", first), ("r20", second)):
            for prompt in PROMPTS:
                asked = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
                answer = httpx2.post(f"{address}/completions", json={**asked, "return_token_ids": True}, timeout=60)
                assert answer.json()["choices"][0]["token_ids"] == greedy(base, run, prompt)
                answers[name] = (*answers.get(name, ()), *answer.json()["choices"][0]["token_ids"])
    assert len(set(answers.values())) == 3  # no two models agree on all prompts
