"""Layers with state in packs: equal to each sequence alone, by transformers' own forward; their engine on
transformers; the layers that are refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.stateful import DENSE, STATEFUL
from tests.verl.batch.test_packing import random_samples, sample
from tests.verl.rollout.test_hf_engine import generate, trainer_logprobs
from tests.verl.workers.test_fused import FORMULAS
from tests.verl.workers.test_parity import VOCABULARY, own_logprobs, tiny_config
from verl.batch.packed import Segment
from verl.batch.packing import make_units, pack
from verl.batch.samples import Sample, batch_of
from verl.errors import ConfigError
from verl.lora import Lora, adapter_tensors, add_adapter, base_alone
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import HFEngine
from verl.workers import attention
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.fused import fuse
from verl.workers.model import PackedCritic, PackedPolicy, checkpoint_layers, decoder_layers
from verl.workers.optim import OptimizerSettings
from verl.workers.parity import check_packs, packing_gap
from verl.workers.policy_worker import sft_loss
from verl.workers.state import BySegments, State, separate_states

BOUND = 1e-5  # nats, and of the largest gradient; rounding accounts for a third of it
LENGTHS = (1, 2, 3, 4, 7, 13, 70)  # tokens: fewer than a convolution sees, and more than a chunk of the delta rule


def model_of(kind: str, seed: int = 0) -> PreTrainedModel:
    """With weights of a usual size: large ones make chunks that begin elsewhere differ by more, as they round."""
    torch.manual_seed(seed)
    attention.register()
    config = tiny_config(kind, **STATEFUL[kind], initializer_range=0.05)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention.PACKED)
    return model


def some_samples(seed: int) -> list[Sample]:
    """Groups of one to four responses, of lengths that differ much, to prompts that do, too."""
    source = random.Random(seed)
    samples = []
    for group in range(3):
        prompt = [source.randrange(VOCABULARY) for _ in range(source.choice(LENGTHS))]
        for _ in range(source.randint(1, 4)):
            response = [source.randrange(VOCABULARY) for _ in range(1 + source.choice(LENGTHS))]
            samples.append(sample(prompt, response, group))
    return samples


def largest_gap(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """Of gradients, relative to the largest one. A parameter without a gradient has none on both sides."""
    assert [each is None for each in ours] == [each is None for each in theirs]
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None]
    largest = max(float(other.abs().max()) for _, other in pairs)
    return max(float((one - other).abs().max()) for one, other in pairs) / largest


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_random_packs_equal_separate_sequences(kind: str, seed: int) -> None:
    """In training, half of the packs with activation checkpointing; and without gradients."""
    model, samples = model_of(kind, seed).train(), some_samples(seed)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    policy, batch = PackedPolicy(model), batch_of(samples)
    packed = pack(make_units(batch, share_prefix=True, max_tokens=10_000), batch)
    if seed % 2:
        checkpoint_layers(policy, 2)
    with torch.no_grad():
        scored_A = policy(packed, 0.7, False).logprobs
    found_A = policy(packed, 0.7, False).logprobs
    expected = [own_logprobs(plain, each) for each in samples]
    for number, each in enumerate(expected):
        torch.testing.assert_close(found_A[packed.sample == number], each, rtol=0, atol=BOUND)
        torch.testing.assert_close(scored_A[packed.sample == number], each, rtol=0, atol=BOUND)
    ours = torch.autograd.grad((found_A * (1 + packed.sample)).sum(), [*model.parameters()], allow_unused=True)
    loss = torch.stack([(1 + number) * each.sum() for number, each in enumerate(expected)]).sum()
    assert largest_gap(ours, torch.autograd.grad(loss, [*plain.parameters()], allow_unused=True)) < BOUND


def test_a_last_layer_with_attention_goes_on_with_trained_positions_alone() -> None:
    """As in Qwen 3.5; equality with all positions is that of the packs above. One with state returns all."""
    batch = batch_of(some_samples(0))
    packed = pack(make_units(batch, share_prefix=True, max_tokens=10_000), batch)
    seen = []
    for kinds in (["linear_attention", "full_attention"], ["full_attention", "linear_attention"]):
        config = tiny_config("qwen3_5_text", **{**STATEFUL["qwen3_5_text"], "layer_types": kinds})
        policy = PackedPolicy(AutoModelForCausalLM.from_config(config, attn_implementation=attention.PACKED))
        last = decoder_layers(policy)[-1].get_submodule("mlp")
        last.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
        policy(packed, 1.0, False)
    assert seen == [len(packed.source), len(packed.token_ids)]


def of_chain(segments: Sequence[Segment], number: int) -> list[Segment]:
    """A segment behind its prefix, behind the prefix of that one, and so on."""
    prefix = segments[number].prefix
    return [*([] if prefix is None else of_chain(segments, prefix)), segments[number]]


def mixers(model: nn.Module) -> list[BySegments]:
    return [each.forward for each in model.modules() if isinstance(each.forward, BySegments)]


CHAINS = [
    # a prompt of one token, a response to it, one to that; another one-token response, which two others continue
    [(1, None), (5, 0), (4, 1), (1, 0), (3, 3), (1, 3), (2, 5)],
    [(70, None), (1, 0), (1, 1), (1, 2), (9, 3), (2, None), (1, 5), (66, 6), (3, 0)],
]


def segments_of(chain: Sequence[tuple[int, int | None]]) -> list[Segment]:
    """(tokens, prefix) of each"""
    segments: list[Segment] = []
    for length, prefix in chain:
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, start + length, prefix))
    return segments


@pytest.mark.parametrize("chain", CHAINS, ids=["short", "long"])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2"])
def test_a_layer_continues_prefixes_of_prefixes(kind: str, chain: list[tuple[int, int | None]]) -> None:
    """Every segment of a tree equals the end of the row from its root; the gradients of its tokens are summed."""
    model = model_of(kind)
    separate_states(model.get_decoder())
    layer = mixers(model)[0]
    segments = segments_of(chain)
    hidden = torch.randn(1, segments[-1].end, model.config.hidden_size, requires_grad=True)
    weight = torch.randn_like(hidden)
    layer.segments = segments
    found = layer(hidden)
    layer.segments = None
    alone = []
    for number, segment in enumerate(segments):
        row = torch.cat([hidden[:, each.start : each.end] for each in of_chain(segments, number)], dim=1)
        alone.append(layer(row)[:, segment.start - segment.end :])
    expected = torch.cat(alone, dim=1)
    torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)
    inputs = [hidden, *layer.module.parameters()]
    ours, theirs = (torch.autograd.grad((each * weight).sum(), inputs) for each in (found, expected))
    assert largest_gap(ours, theirs) < BOUND


def test_a_state_is_continued_without_being_changed_by_hand() -> None:
    """A convolution over three tokens: its tail is two and the newest."""
    prompt = State()
    assert not prompt.has_previous_state()
    assert prompt.update_conv_state(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), 0, conv_kernel_size=3).shape[-1] == 4
    prompt.update_recurrent_state(torch.tensor([5.0]), 0)
    for token in (6.0, 7.0):
        response = State(prompt)
        assert response.layers[9].recurrent_states[0].tolist() == [5.0]
        seen = response.update_conv_state(torch.tensor([[[token]]]), 0, conv_kernel_size=3)
        assert seen.tolist() == [[[2.0, 3.0, 4.0, token]]]
        response.update_recurrent_state(torch.tensor([token]), 0)
        assert response.conv_states[0].tolist() == [[[3.0, 4.0, token]]]
    assert prompt.conv_states[0].tolist() == [[[2.0, 3.0, 4.0]]] and prompt.recurrent_states[0].tolist() == [5.0]


@pytest.mark.parametrize("kind", [*STATEFUL])
def test_a_state_that_goes_on_to_the_next_sequence_would_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check before every training, for every family."""
    config = tiny_config(kind, **STATEFUL[kind])
    assert packing_gap(config) < BOUND
    monkeypatch.setattr("verl.workers.model.separate_states", lambda decoder: None)
    assert packing_gap(config) > 1e-2


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_a_copy_of_a_model_has_layers_of_its_own(kind: str) -> None:
    """And a model that is wrapped twice computes as one that is wrapped once."""
    model = model_of(kind).eval()
    batch = batch_of(random_samples(1))
    packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    with torch.no_grad():
        expected = PackedPolicy(model)(packed, 1.0, False).logprobs
        for each in (copy.deepcopy(model), model):
            assert torch.equal(PackedPolicy(each)(packed, 1.0, False).logprobs, expected)
    copied = copy.deepcopy(model)
    assert mixers(model) and {each.module for each in mixers(copied)} <= {*copied.modules()}


@pytest.mark.parametrize("kind", [*DENSE])
def test_the_transformers_engine_computes_what_the_trainer_does(kind: str) -> None:
    """Prompts of several lengths in one padded batch, two of each. Half of the responses end early, the others are
    longer than a convolution sees."""
    model = model_of(kind).eval()
    prompts = [[*range(5, 5 + length)] for length in (1, 3, 9)] * 2
    samplings = [Sampling(8)] * 3 + [Sampling(3)] * 3
    model.set_attn_implementation("sdpa")
    completions = generate(HFEngine(model), prompts, *samplings)
    model.set_attn_implementation(attention.PACKED)
    for prompt, each in zip(prompts, completions, strict=True):
        wanted = trainer_logprobs(PackedPolicy(model), prompt, each.token_ids, 1.0)
        assert list(each.logprobs) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_a_critic_values_packs_as_sequences(kind: str) -> None:
    critic = PackedCritic(model_of(kind))
    nn.init.normal_(critic.value_head.weight)
    batch = batch_of(random_samples(2))
    together = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    with torch.no_grad():
        found_A = critic(together)
        for number in range(len(batch)):
            one = batch.rows(torch.tensor([number]).numpy(), batch.bounds)
            alone = critic(pack(make_units(one, False, 1000), one))
            torch.testing.assert_close(found_A[together.sample == number], alone, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize("kind", [*DENSE])
def test_every_adapter_is_trained_and_the_base_alone_is_the_reference(kind: str) -> None:
    """An adapter of a layer whose weights are read around it would be without effect."""
    model = model_of(kind)
    batch = batch_of(random_samples(3))
    packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    with torch.no_grad():
        before_A = PackedPolicy(copy.deepcopy(model))(packed, 1.0, False).logprobs
    add_adapter(model, Lora(rank=2, alpha=4.0, targets=("all-linear",)))
    policy = PackedPolicy(model)
    names, factors = zip(*adapter_tensors(model), strict=True)
    with torch.no_grad():
        for each in factors:
            each.copy_(torch.randn_like(each))
    found_A = policy(packed, 1.0, False).logprobs
    grads = torch.autograd.grad(found_A.sum(), factors)
    assert [name for name, each in zip(names, grads, strict=True) if not each.abs().sum() > 0] == []
    assert ("out_proj" in str(names)) is (kind not in ("falcon_h1", "nemotron_h", "olmo_hybrid"))
    with torch.no_grad(), base_alone(model):
        assert torch.equal(policy(packed, 1.0, False).logprobs, before_A)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid", "lfm2"])
def test_a_sharded_model_takes_the_same_step(kind: str, group: None) -> None:
    """FSDP with activation checkpointing, on several packs."""
    model, lr = model_of(kind), 0.1
    batch = batch_of(random_samples(4))
    packed = [pack([unit], batch) for unit in make_units(batch, share_prefix=True, max_tokens=1000)]
    for each in packed:
        object.__setattr__(each, "loss_weights", torch.ones(len(each.target)))
    plain = PackedPolicy(copy.deepcopy(model))
    expected = torch.autograd.grad(
        torch.stack([sft_loss(plain, each)[0] for each in packed]).sum(), [*plain.parameters()], allow_unused=True
    )
    policy = PackedPolicy(model)
    checkpoint_layers(policy, 1)
    engine = FSDPEngine(policy, decoder_layers(policy), init_device_mesh("cpu", (1,)), OptimizerSettings(lr=lr))
    engine.backward(packed, sft_loss)
    found = [None if each.grad is None else each.grad.to_local() for each in policy.parameters()]  # type: ignore[attr-defined]
    assert largest_gap(found, expected) < BOUND


@pytest.mark.parametrize("kind", [*DENSE])
def test_fused_modules_score_and_update_alike(kind: str) -> None:
    """Kernels by their formulas, wherever they replace parts of such a model."""
    model = model_of(kind)
    changed = copy.deepcopy(model)
    fuse(changed, FORMULAS)
    batch = batch_of(random_samples(1))
    packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    ours, theirs = (PackedPolicy(each)(packed, 0.7, False).logprobs for each in (changed, model))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)
    found, expected = (
        torch.autograd.grad(each.sum(), [*own.parameters()], allow_unused=True)
        for each, own in ((ours, changed), (theirs, model))
    )
    assert largest_gap(found, expected) < BOUND


def test_a_layer_that_cannot_continue_a_state_is_refused_by_name(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
    CONFIG_MAPPING["jamba"](**settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be trained: JambaMambaMixer cannot continue the state of a prompt"):
        check_packs(str(tmp_path), 512)
