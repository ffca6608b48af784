"""Measurements for a GPU, on a CPU: what they accept, and what they must not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import exactness, serving
from bench.gpu.measurements import Figures, UnexpectedError
from bench.gpu.place import Place
from verl.rollout.engine import RolloutEngine
from verl.rollout.hf_engine import load_hf_engine

pytestmark = pytest.mark.long
BEFORE = "log-probs of perturbed weights before the sync: nats"
Measure = Callable[..., dict[str, Figures]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def measure(work: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Measurements of an engine of transformers in the place of vLLM's. change: of the engine"""

    def run(*names: str, change: Callable[[RolloutEngine], None] = lambda engine: None) -> dict[str, Figures]:
        async def start(settings: Any) -> RolloutEngine:
            engine = load_hf_engine(settings.model_path, torch.float32, "cpu", 8, None)
            change(engine)
            return engine

        monkeypatch.setattr(serving.VLLMEngine, "start", start)
        session = serving.Serving(Place(work, rehearse=True))

        async def every() -> dict[str, Figures]:
            return {name: await getattr(session, name)() for name in names}

        return asyncio.run(every())

    return run


def test_an_exact_engine_is_accepted(measure: Measure) -> None:
    found = measure("start", "greedy", "sync", "sleep", "decode", "corrupted")
    assert found["greedy"]["greedy tokens that are transformers' own"] == 1
    assert found["sync"]["and after it: nats"] < 1e-5 < 0.1 < found["sync"][BEFORE]
    assert found["decode"]["4 sequences: tokens/s, prefill included"] > 0
    assert found["corrupted"] == {"corrupted bucket": "refused"}


def test_an_engine_that_keeps_its_old_weights_is_found(measure: Measure) -> None:
    def change(engine: Any) -> None:
        async def end_weights(version: int) -> None:
            engine._version = version
            engine._in_use.release()

        async def load_bucket(*_: Any) -> None:
            """Ignore it."""

        engine.load_bucket, engine.end_weights = load_bucket, end_weights

    with pytest.raises(UnexpectedError, match="after the sync of perturbed weights, bound") as raised:
        measure("sync", change=change)
    assert raised.value.figures[BEFORE] == pytest.approx(raised.value.figures["and after it: nats"], rel=0.5)
    with pytest.raises(UnexpectedError, match="a corrupted bucket was loaded"):
        measure("corrupted", change=change)


def test_an_engine_with_other_numbers_is_found(measure: Measure) -> None:
    """One layer is left out."""

    def without_a_layer(engine: Any) -> None:
        del engine._model.model.layers[1]

    with pytest.raises(UnexpectedError, match="nats"):
        measure("greedy", change=without_a_layer)


def test_a_wrong_kernel_is_found(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = exactness.Exactness(Place(work, rehearse=True))
    attend, score = exactness.packed_attention, exactness.token_logprobs

    def attention(*args: Any, **options: Any) -> Any:
        found, weights = attend(*args, **options)
        return 1.01 * found, weights

    def logprobs(*args: Any) -> Any:
        found, entropy = score(*args)
        return found + 0.01, entropy

    monkeypatch.setattr(exactness, "packed_attention", attention)
    with pytest.raises(UnexpectedError, match="attention, float32, head size 64, window none is off by"):
        session.kernels()
    monkeypatch.setattr(exactness, "token_logprobs", logprobs)
    with pytest.raises(UnexpectedError, match="loss with entropy, float32"):
        session.losses()


def test_a_gated_delta_net_that_differs_from_float32_is_found(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = exactness.Exactness(Place(work, rehearse=True))
    assert len(session.delta_nets()) == 4  # an error and milliseconds, each way
    over = exactness._over

    def wrong(layer: Any, segments: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
        return [1.1 * each if hidden.dtype == torch.bfloat16 else each for each in over(layer, segments, hidden)]

    monkeypatch.setattr(exactness, "_over", wrong)
    with pytest.raises(UnexpectedError, match="gated delta net, bfloat16, at once is off by"):
        session.delta_nets()


def test_a_wrong_gradient_is_found(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one weight, by a hook."""
    session = exactness.Exactness(Place(work, rehearse=True))
    assert float(session.gradients()["largest relative L2 of a gradient"]) < 1e-5
    build = exactness.build

    def wrong(*args: Any, **options: Any) -> Any:
        engine = build(*args, **options)
        engine.module.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *all_of: 1.1 * all_of[-1])
        return engine

    monkeypatch.setattr(exactness, "build", wrong)
    with pytest.raises(UnexpectedError, match=r"the gradient of .* is off by"):
        session.gradients()
