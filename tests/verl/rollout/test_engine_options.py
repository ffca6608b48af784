"""Further arguments of vLLM's engine: known ones arrive, others are refused before anything starts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from verl.config.load import load_config
from verl.errors import ConfigError
from verl.rollout import engine_options
from verl.rollout.engine_options import SET_ALREADY, check_engine_options, engine_arguments_of_vllm
from verl.rollout.vllm_engine import VLLMSettings, engine_arguments


@pytest.mark.long  # importing vLLM takes 15 s
def test_the_names_are_those_of_vllms_own_class() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert set(engine_arguments_of_vllm()) == {each.name for each in fields(AsyncEngineArgs)}


def test_every_argument_that_is_set_already_has_its_reason() -> None:
    assert SET_ALREADY.keys() | {"enforce_eager"} == engine_arguments(VLLMSettings("x", 8), on_cpu=True).keys()
    assert set(SET_ALREADY) <= set(engine_arguments_of_vllm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atention_backend": "TRITON_ATTN"}, r"atention_backend is no argument .*did you mean 'attention_backend'\?"),
        ({"cudagraph_sizes": [1]}, r"cudagraph_sizes is no argument of the installed vLLM"),
        ({"max-cudagraph-capture-size": 8}, "did you mean 'max_cudagraph_capture_size'"),
        ({"block_size": 64, "gpu_memory_utilization": 0.5}, "refused: set rollout.gpu_memory_utilization"),
        ({"speculative_config": {"method": "ngram"}}, "refused: set rollout.speculation"),
        ({"worker_extension_cls": "mine.Worker"}, "refused: it receives the weights"),
    ],
)
def test_unknown_options_and_those_that_are_set_already_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine_options(options)
    with pytest.raises(ConfigError, match=message):
        VLLMSettings("x", 8, options=options)


def test_without_vllm_only_what_is_set_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_options, "find_spec", lambda _: None)
    check_engine_options({"anything": 1})
    with pytest.raises(ConfigError, match=r"set trainer\.seed"):
        check_engine_options({"seed": 1})


KEYS = ("actor_rollout_ref.rollout.enforce_eager", "rollout.enforce_eager", "rollout.engine_options.enforce_eager")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("given", "expected"), [("true", True), ("False", False), ("null", None)])
def test_compilation_is_set_by_verls_key_or_vllms_argument(key: str, given: str, expected: bool | None) -> None:
    for options in ("rollout.engine_options.block_size=64", "rollout.engine_options={block_size: 64}"):
        for overrides in ([f"{key}={given}", options], [options, f"{key}={given}"]):
            assert load_config(overrides).rollout.engine_options == {"block_size": 64, "enforce_eager": expected}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("given", ["maybe", "2", "[true]"])
def test_compilation_is_on_or_off(key: str, given: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine_options.enforce_eager must be true or false, got"):
        load_config([f"{key}={given}"])


def test_spellings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        load_config([f"{KEYS[0]}=true", f"{KEYS[2]}=false"])
