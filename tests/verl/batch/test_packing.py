"""Packs: nothing lost, nothing padded, balanced; and the model gives the same numbers however samples are packed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from verl.batch.packing import Sharding, Unit, assign, make_units, pack
from verl.batch.samples import Sample, batch_of
from verl.batch.token_batch import TokenBatch
from verl.errors import ConfigError
from verl.workers.attention import PACKED, register
from verl.workers.logprobs import token_logprobs

VOCABULARY = 97


def sample(prompt: list[int], response: list[int], group: int = 0, masked: tuple[int, ...] = ()) -> Sample:
    mask = [False] * len(prompt) + [place not in masked for place in range(len(response))]
    return Sample(
        token_ids=np.array(prompt + response),
        action_mask=np.array(mask),
        rollout_logprobs=np.zeros(sum(mask)),
        group=group,
        reward=0.0,
    )


def placed(samples: list[Sample]) -> TokenBatch:
    """The samples as a batch, with each trained token's place in its sample in the column of advantages."""
    batch = batch_of(samples)
    places = [np.flatnonzero(each.action_mask) for each in samples]
    return replace(batch, advantages=np.concatenate(places).astype(np.float32))


def random_samples(seed: int, group_sizes: tuple[int, ...] = (4, 1, 3)) -> list[Sample]:
    """Groups of uneven responses to prompts of uneven length, with a hole in the mask where a tool would have
    spoken."""
    source = random.Random(seed)
    samples = []
    for group, size in enumerate(group_sizes):
        prompt = [source.randrange(VOCABULARY) for _ in range(15 + 7 * group)]
        for _ in range(size):
            response = [source.randrange(VOCABULARY) for _ in range(source.randint(1, 14))]
            samples.append(sample(prompt, response, group, masked=(4, 5)))
    return samples


def test_two_responses_of_one_prompt_by_hand() -> None:
    samples = [sample([7, 8, 9], [1, 2]), sample([7, 8, 9], [3])]
    batch = replace(batch_of(samples), advantages=np.array([3.0, 4.0, 13.0]), loss_weights=np.array([0.5, 0.25]))
    (unit,) = make_units(batch, share_prefix=True, max_tokens=100)
    packed = pack([unit], batch)
    assert packed.token_ids.tolist() == [7, 8, 9, 1]  # nothing reads the state of a last token
    assert packed.position_ids.tolist() == [0, 1, 2, 3]
    assert [(each.start, each.end, each.prefix) for each in packed.segments] == [(0, 3, None), (3, 4, 0)]
    assert packed.target.tolist() == [1, 2, 3]
    assert packed.source.tolist() == [2, 3, 2]  # both first response tokens are predicted by the prompt's last token
    assert packed.sample.tolist() == [0, 0, 1]
    assert packed.advantages is not None and packed.advantages.tolist() == [3.0, 4.0, 13.0]
    assert packed.loss_weights is not None and packed.loss_weights.tolist() == [0.5, 0.5, 0.25]
    assert packed.old_logprobs is None


def test_every_column_of_a_pack_is_the_batchs_own() -> None:
    batch = batch_of(random_samples(1))
    trained = np.arange(float(batch.num_trained.sum()))
    names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns")
    columns = {name: 1000 * number + trained for number, name in enumerate(names)}
    packed = pack(make_units(batch, True, 1000), replace(batch, **columns, selected=trained % 3 == 0))
    place = packed.advantages
    assert place is not None and sorted(place.tolist()) == trained.tolist()
    for number, name in enumerate(names):
        assert getattr(packed, name).tolist() == (1000 * number + place).tolist()
    assert packed.selected is not None and packed.selected.tolist() == (place % 3 == 0).tolist()


def test_positions_after_the_last_input_are_not_computed() -> None:
    """An observation behind the last trained token; a sample that trains nothing."""
    samples = [sample([7, 8], [1, 2, 3, 4], masked=(2, 3)), sample([5], [6], 1, masked=(0,))]
    batch = batch_of(samples)
    assert batch.num_inputs.tolist() == [3, 0]
    packed = pack(make_units(batch, True, 100), batch)
    assert packed.token_ids.tolist() == [7, 8, 1] and packed.source.tolist() == [1, 2]


def test_a_unit_that_fits_exactly_is_not_split_and_a_split_one_keeps_its_prefix() -> None:
    samples = [sample([1, 2, 3], [4, place]) for place in range(5)]
    batch = batch_of(samples)
    assert make_units(batch, True, 13) == [Unit((0, 1, 2, 3, 4), 3, 13)]  # the prompt, and two tokens of each
    assert make_units(batch, True, 9) == [Unit((0, 1, 2), 3, 9), Unit((3, 4), 3, 7)]
    assert make_units(batch, True, 8) == [Unit((0, 1), 3, 7), Unit((2, 3), 3, 7), Unit((4,), 3, 5)]


def test_packs_are_as_few_as_largest_first_gives() -> None:
    units = [Unit((row,), 0, size) for row, size in enumerate((3, 4, 5, 6))]
    assert assign(units, 9) == [[units[3], units[0]], [units[2], units[1]]]
    assert [len(assign(units, 9, num_ranks)) for num_ranks in (1, 2, 3)] == [2, 2, 3]
    assert assign(units, 18) == [units[::-1]]


def test_the_parts_of_a_shard_are_the_samples_of_its_packs_in_order() -> None:
    batch = batch_of([sample([place], [place] * (2 if place else 8), place) for place in range(4)])
    packs = assign(make_units(batch, True, 9), 9)
    (shard,) = Sharding(batch, packs, 1).shards()
    for units, packed, part in zip(packs, shard, shard.parts(), strict=True):
        assert part.groups.tolist() == [row for unit in units for row in unit.samples]  # one sample in each group
        assert packed.target.tolist() == part.token_ids[part.action_mask].tolist()
    assert [len(units) for units in packs] == [1, 3]


def test_branches_share_up_to_the_first_trained_token() -> None:
    samples = [sample([1, 2, 3], [4, 5]), sample([1, 2, 9], [4, 5])]
    assert make_units(batch_of(samples), True, 100)[0].prefix == 2
    same = [sample([1, 2], [4, 5]), sample([1, 2], [4, 5])]
    assert make_units(batch_of(same), True, 100)[0].prefix == 2  # equal trained tokens are still each their own


def test_a_sample_larger_than_a_pack_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="a sample has 5 tokens, but a pack holds 4"):
        make_units(batch_of([sample([1, 2, 3], [4, 5])]), True, 4)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8).map(tuple),
    st.integers(0, 10**6),
    st.integers(80, 300),
    st.booleans(),
    st.integers(1, 4),
)
def test_every_trained_token_is_in_exactly_one_pack(
    group_sizes: tuple[int, ...], seed: int, max_tokens: int, share: bool, num_ranks: int
) -> None:
    samples = random_samples(seed, group_sizes)
    batch = placed(samples)
    packs = assign(make_units(batch, share, max_tokens), max_tokens, num_ranks)
    assert len(packs) % num_ranks == 0
    seen: Counter[tuple[int, int]] = Counter()
    inputs = [int(np.flatnonzero(each.action_mask)[-1]) for each in samples]

    def computed(unit: Unit) -> int:
        return unit.prefix + sum(inputs[row] - unit.prefix for row in unit.samples)

    for units in packs:
        packed = pack(units, batch)
        assert len(packed.token_ids) == max(1, sum(computed(unit) for unit in units))
        assert len(packed.token_ids) <= max_tokens
        assert all(unit.num_tokens >= computed(unit) for unit in units)
        assert sum(unit.num_tokens for unit in units) <= max_tokens
        assert packed.advantages is not None
        seen.update(zip(packed.sample.tolist(), packed.advantages.long().tolist(), strict=True))
    wanted = {(i, t) for i, each in enumerate(samples) for t, trained in enumerate(each.action_mask) if trained}
    assert seen == Counter(dict.fromkeys(wanted, 1))


def tiny_model(kind: str, tied: bool, dtype: torch.dtype) -> PreTrainedModel:
    register()
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "attn_implementation": PACKED,
    }
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config(**shape)).to(dtype)
    return model


def packed_run(
    model: PreTrainedModel, samples: list[Sample], share: bool, max_tokens: int
) -> tuple[dict[int, list[float]], Tensor]:
    return batch_run(model, placed(samples), share, max_tokens)


def batch_run(
    model: PreTrainedModel, batch: TokenBatch, share: bool, max_tokens: int
) -> tuple[dict[int, list[float]], Tensor]:
    """Log-probs per sample, and the gradient of a loss that weighs every token differently."""
    model.zero_grad()
    logprobs: dict[int, list[float]] = {}
    for units in assign(make_units(batch, share, max_tokens), max_tokens):
        packed = pack(units, batch)
        hidden = model.model(
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            segments=packed.segments,
        ).last_hidden_state[0]
        head = model.get_output_embeddings().weight
        values, entropy = token_logprobs(hidden[packed.source], head, packed.target, 0.7, with_entropy=True)
        assert entropy is not None
        assert packed.advantages is not None
        weight = torch.sin(packed.advantages.double() + packed.sample)
        (values * weight + 0.1 * entropy * weight.cos()).sum().backward()
        for index, value in zip(packed.sample.tolist(), values.tolist(), strict=True):
            logprobs.setdefault(index, []).append(value)
    gradients = [each.grad.flatten() for each in model.parameters() if each.grad is not None]
    return logprobs, torch.cat(gradients)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_packed_equals_unpacked_equals_shared(kind: str, tied: bool, dtype: torch.dtype, bound: float) -> None:
    model, samples = tiny_model(kind, tied, dtype), random_samples(1)
    alone_logprobs, alone = packed_run(model, samples, share=False, max_tokens=45)  # one sample a pack
    for share, max_tokens in ((False, 1000), (True, 1000), (True, 45)):
        logprobs, gradient = packed_run(model, samples, share, max_tokens)
        assert logprobs == {index: pytest.approx(values, abs=bound) for index, values in alone_logprobs.items()}
        assert (gradient - alone).norm() <= bound * alone.norm()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_packed_equals_transformers_own_forward(kind: str) -> None:
    model, samples = tiny_model(kind, True, torch.float64), random_samples(2)
    logprobs, _ = packed_run(model, samples, share=True, max_tokens=1000)
    model.set_attn_implementation("sdpa")
    for index, each in enumerate(samples):
        ids = torch.tensor(each.token_ids)
        all_logprobs = (model(input_ids=ids[None]).logits[0].detach().float() / 0.7).log_softmax(-1)
        wanted = [float(all_logprobs[t - 1, ids[t]]) for t, trained in enumerate(each.action_mask) if trained]
        assert logprobs[index] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_groups_of_every_size_with_checkpointing(kind: str, size: int) -> None:
    model, samples = tiny_model(kind, True, torch.float64).train(), random_samples(4, (size, size))
    alone_logprobs, alone = packed_run(model, samples, share=False, max_tokens=45)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    logprobs, gradient = packed_run(model, samples, share=True, max_tokens=1000)
    assert logprobs == {index: pytest.approx(values, abs=1e-9) for index, values in alone_logprobs.items()}
    assert (gradient - alone).norm() <= 1e-6 * alone.norm()


def test_gradients_with_checkpointing_are_the_same() -> None:
    model, samples = tiny_model("qwen2", True, torch.float64).train(), random_samples(3)
    _, plain = packed_run(model, samples, share=True, max_tokens=1000)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, checkpointed = packed_run(model, samples, share=True, max_tokens=1000)
    torch.testing.assert_close(checkpointed, plain)


def test_samples_of_other_groups_change_nothing() -> None:
    model, samples = tiny_model("llama", True, torch.float64), random_samples(4)
    together, _ = packed_run(model, samples, share=True, max_tokens=1000)
    alone, _ = packed_run(model, [replace(samples[4], group=0)], share=True, max_tokens=1000)
    assert together[4] == pytest.approx(alone[0], abs=1e-12)
