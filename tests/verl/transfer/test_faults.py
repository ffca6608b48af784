"""Faults of a weight transfer are noticed, of models and adapters, on every transport that needs no GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.support.transfer_faults import FAULTS, Campaign, Received, Weights
from verl.host.daemon import run_in_daemon_thread
from verl.lora import Lora, adapter_tensors, add_adapter
from verl.rollout.hf_engine import HFEngine
from verl.transfer.bucket import NUM_SLOTS, BucketHandle, BucketLayout, BucketSender
from verl.transfer.shared_memory import ByValue, SharedMemory
from verl.transfer.stream import Inlet, Outlet

LORA = Lora(rank=2, alpha=8.0, targets=("all-linear",))
SENDERS = [SharedMemory, ByValue]
Choose = Callable[[nn.Module], Iterable[tuple[str, Tensor]]]


def whole(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return model.named_parameters(remove_duplicate=False)


BUCKET_BYTES: Mapping[Choose, int] = {whole: 2**12, adapter_tensors: 2**10}  # several buckets


def made(with_adapter: bool) -> PreTrainedModel:
    """Norms of 16 numbers beside each other, a tied head, adapters of a few numbers."""
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    if with_adapter:
        add_adapter(model, LORA)
    return model


@cache
def versions(choose: Choose) -> Sequence[Weights]:
    """Three, in which every number is another one but those of one tensor."""
    named = list(choose(made(choose is adapter_tensors)))
    distinct = {id(each): each for _, each in named}
    torch.manual_seed(1)
    drawn = [{key: nn.Parameter(torch.randn_like(each)) for key, each in distinct.items()} for _ in range(3)]
    constant = id(named[2][1])
    return [{name: (each if id(own) != constant else drawn[0])[id(own)] for name, own in named} for each in drawn]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("open_sender", SENDERS)
@pytest.mark.parametrize("choose", [whole, adapter_tensors])
def test_no_fault_of_hundreds_goes_unnoticed(
    choose: Choose, open_sender: Callable[[], BucketSender], dtype: torch.dtype
) -> None:
    outcome = Campaign(open_sender, Received(), versions(choose), dtype, BUCKET_BYTES[choose]).run(170)
    assert not outcome.unnoticed
    assert set(outcome.noticed) == {*FAULTS} - ({"a bucket twice"} if open_sender is ByValue else set())  # the same


@pytest.mark.slow
@pytest.mark.parametrize("open_sender", SENDERS)
@pytest.mark.parametrize("choose", [whole, adapter_tensors])
def test_no_fault_of_ten_thousand_goes_unnoticed(choose: Choose, open_sender: Callable[[], BucketSender]) -> None:
    campaign = Campaign(open_sender, Received(), versions(choose), torch.bfloat16, BUCKET_BYTES[choose], seed=1)
    outcome = campaign.run(10_000)
    assert not outcome.unnoticed and outcome.count == 10_000
    assert outcome.harmless.total() > 100  # padding, equal tensors, zeros for zeros


class InEngine:
    """The transformers engine, whose own parameters are what has arrived."""

    def __init__(self, choose: Choose) -> None:
        self._model, self._choose = made(choose is adapter_tensors), choose
        self._engine, self._version = HFEngine(self._model, 8), 0

    def begin(self, layouts: Sequence[BucketLayout]) -> None:
        self._version = layouts[0].version
        asyncio.run(self._engine.begin_weights(layouts))

    def load(self, layout: BucketLayout, handle: BucketHandle) -> None:
        asyncio.run(self._engine.load_bucket(layout, handle))

    def end(self) -> None:
        asyncio.run(self._engine.end_weights(self._version))

    def tensors(self) -> Weights:
        return {name: each.detach() for name, each in self._choose(self._model)}


@pytest.mark.parametrize("choose", [whole, adapter_tensors])
def test_the_transformers_engine_refuses_every_fault(choose: Choose) -> None:
    outcome = Campaign(SharedMemory, InEngine(choose), versions(choose), torch.float32, BUCKET_BYTES[choose]).run(85)
    assert not outcome.unnoticed and set(outcome.noticed) == set(FAULTS)


class OverAConnection(Received):
    """What a rank's connection brings, faults and all."""

    def load(self, layout: BucketLayout, handle: BucketHandle) -> None:
        asyncio.run(self._load(layout, handle))

    async def _load(self, layout: BucketLayout, handle: BucketHandle) -> None:
        outlet = Outlet("127.0.0.1", NUM_SLOTS)
        inlet = await Inlet.connect([outlet.address])
        sending = asyncio.create_task(run_in_daemon_thread(outlet.send, [inlet.key], [(layout, handle)]))
        try:
            bucket = await inlet.receive()
            assert bucket is not None
            super().load(bucket[0], *bucket[1])
        finally:
            inlet.close()
            await sending


@pytest.mark.parametrize("open_sender", SENDERS)
def test_a_connection_hides_no_fault(open_sender: Callable[[], BucketSender]) -> None:
    outcome = Campaign(open_sender, OverAConnection(), versions(whole), torch.bfloat16, BUCKET_BYTES[whole]).run(51)
    assert not outcome.unnoticed and outcome.count == 51


class Trusting(Received):
    """Takes what comes."""

    def begin(self, layouts: Sequence[BucketLayout]) -> None:
        """Any."""

    def load(self, layout: BucketLayout, handle: BucketHandle) -> None:
        flat = handle.take(layout, self.receiver)
        assert flat is not None
        self._tensors |= {name: view.clone() for name, view in layout.named(flat.view(layout.dtype))}

    def end(self) -> None:
        """Complete or not."""


def test_a_receiver_without_checks_notices_nothing() -> None:
    """So what the others notice is due to their checks."""
    outcome = Campaign(SharedMemory, Trusting(), versions(whole), torch.bfloat16, BUCKET_BYTES[whole]).run(170)
    assert not outcome.noticed and set(outcome.unnoticed) == set(FAULTS)
