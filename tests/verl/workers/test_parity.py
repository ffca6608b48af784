"""Every architecture that docs/training.md lists computes in packs what transformers computes with eager attention for
single sequences; whatever computes something else is refused by name before training."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.conftest import ROOT
from tests.support.multimodal import MULTIMODAL
from tests.support.stateful import DENSE, EXPERTS_OF_DENSE, WITH_EXPERTS
from tests.verl.batch.test_packing import random_samples
from tests.verl.rollout.test_hf_engine import generate, trainer_logprobs
from tests.verl.workers.test_fused import FORMULAS
from verl.batch.packing import make_units, pack
from verl.batch.samples import Sample, batch_of
from verl.errors import ConfigError
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import HFEngine
from verl.workers import attention
from verl.workers.fused import fuse
from verl.workers.model import PackedPolicy, logit_divisor
from verl.workers.parity import check_packs, packing_gap, random_model, small_copy

VOCABULARY, WINDOW = 97, 5
IN_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
SLIDING: dict[str, dict[str, Any]] = {  # model types whose layers have windows, or some of them
    "qwen2": IN_QWEN,
    "qwen3": IN_QWEN,
    "mistral": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "head_dim": 16},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"sliding_window": WINDOW, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {"sliding_window": WINDOW},
}
FULL: dict[str, dict[str, Any]] = {
    name: {} for name in ("llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "smollm3", "olmo", "olmo2", "glm4")
} | {"mistral": {"sliding_window": None}}
CASES = [*SLIDING.items(), *FULL.items()]
NAMES = [f"{name}-{'window' if number < len(SLIDING) else 'full'}" for number, (name, _) in enumerate(CASES)]


def tiny_config(kind: str, **settings: Any) -> PretrainedConfig:
    config: PretrainedConfig = CONFIG_MAPPING[kind](
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            **settings,
        }
    )
    return config


def own_logprobs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """[trained tokens] by transformers' forward of this sequence alone."""
    ids = torch.from_numpy(sample.token_ids)
    every = (model(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
    places = [t for t, trained in enumerate(sample.action_mask) if trained]
    return torch.stack([every[t - 1, ids[t]] for t in places])


def gradients(model: PreTrainedModel, loss: Tensor) -> Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in grads])


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=NAMES)
def test_logprobs_and_gradients_are_those_of_eager_attention(kind: str, settings: dict[str, Any]) -> None:
    """In float32, on several sequences longer than the window, most of them behind shared prompts."""
    torch.manual_seed(0)
    model = random_model(tiny_config(kind, **settings)).eval()
    samples = random_samples(1)
    batch = batch_of(samples)
    packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    assert len(samples) == 8 and len(packed.token_ids) < sum(len(each.token_ids) for each in samples)
    found_A = PackedPolicy(model)(packed, 0.7, False).logprobs
    loss = (found_A * (1 + packed.sample)).sum()
    model.set_attn_implementation("eager")
    expected = [own_logprobs(model, each) for each in samples]
    for number, each in enumerate(expected):
        torch.testing.assert_close(found_A[packed.sample == number], each, rtol=0, atol=2e-5)
    ours, theirs = (
        gradients(model, loss),
        gradients(model, sum((1 + n) * each.sum() for n, each in enumerate(expected))),
    )  # type: ignore[arg-type]
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=NAMES)
def test_fused_modules_score_and_update_alike(kind: str, settings: dict[str, Any]) -> None:
    """Kernels by their formulas, in float32."""
    torch.manual_seed(0)
    model = random_model(tiny_config(kind, **settings)).eval()
    changed = copy.deepcopy(model)
    fuse(changed, FORMULAS)
    batch = batch_of(random_samples(1))
    packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
    ours, theirs = (PackedPolicy(each)(packed, 0.7, False).logprobs for each in (changed, model))
    with torch.no_grad():
        scored = PackedPolicy(changed)(packed, 0.7, False).logprobs
    for found in (ours, scored):
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
    found, expected = gradients(changed, ours.sum()), gradients(model, theirs.sum())
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("kind", "settings"), SLIDING.items(), ids=list(SLIDING))
def test_a_window_that_is_left_out_would_show(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(kind, **settings)
    assert packing_gap(config) < 1e-4
    by_segments: Callable[..., Tensor] = attention.by_segments
    monkeypatch.setattr(attention, "by_segments", lambda *args: by_segments(*args[:5], None))
    assert packing_gap(config) > 1e-2


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_the_transformers_engine_sees_the_same_windows(kind: str) -> None:
    """Prompts of several lengths in one padded batch, and responses that a window leaves behind."""
    torch.manual_seed(0)
    model = random_model(tiny_config(kind, **SLIDING[kind])).eval()
    prompts = [list(range(5, 5 + length)) for length in (3, 9)]
    model.set_attn_implementation("sdpa")
    completions = generate(HFEngine(model), prompts, Sampling(12), Sampling(12))
    model.set_attn_implementation(attention.PACKED)
    for prompt, each in zip(prompts, completions, strict=True):
        wanted = trainer_logprobs(PackedPolicy(model), prompt, each.token_ids, 1.0)
        assert list(each.logprobs) == pytest.approx(wanted, abs=1e-4)


def test_the_documentation_lists_what_is_verified() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.partition("## Which models")[2].partition("\n\nAny other model")[0].partition("|---|---|")[2]
    assert set(re.findall("`(.+?)`", table)) == {*SLIDING, *FULL, *DENSE, *MULTIMODAL}


def saved(config: PretrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


SCALED: list[tuple[str, dict[str, Any]]] = [
    ("granite", {"logits_scaling": 8.0}),
    ("cohere", {"logit_scale": 0.0625}),
    ("granitemoehybrid", {**DENSE["granitemoehybrid"], "logits_scaling": 3.0}),
    ("falcon_h1", {**DENSE["falcon_h1"], "lm_head_multiplier": 0.04}),
]


@pytest.mark.parametrize(("kind", "settings"), SCALED, ids=[kind for kind, _ in SCALED])
def test_scaled_logits_are_scaled_in_packs(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(kind, **settings)
    assert packing_gap(config) < 1e-4
    monkeypatch.setattr("verl.workers.model.logit_divisor", lambda _: 1.0)
    assert packing_gap(config) > 1e-2


def test_divisors_of_logits_by_hand() -> None:
    assert logit_divisor(tiny_config("granite", logits_scaling=8.0)) == 8.0
    assert logit_divisor(tiny_config("cohere", logit_scale=0.0625)) == 16.0
    assert logit_divisor(tiny_config("falcon_h1", **{**DENSE["falcon_h1"], "lm_head_multiplier": 0.25})) == 4.0
    assert logit_divisor(tiny_config("llama")) == 1.0


AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 128},
    "granitemoehybrid": {"num_local_experts": 0, "num_experts_per_tok": 0, "logits_scaling": 8.0},
    "falcon_h1": {"lm_head_multiplier": 0.0390625},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}


@pytest.mark.parametrize("kind", [*dict.fromkeys([*SLIDING, *FULL, *DENSE])])
def test_listed_architectures_pass_as_they_are_published(kind: str, tmp_path: Path) -> None:
    """transformers' default configuration of a model type is that of its first published model."""
    check_packs(saved(CONFIG_MAPPING[kind](**AS_PUBLISHED.get(kind, {})), tmp_path), 512)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("gemma2", {}, r"Gemma2Attention needs softcap=50\.0"),
        ("gpt_oss", {}, "GptOssAttention needs s_aux"),
        ("llama", {"attention_dropout": 0.1}, r"LlamaAttention needs dropout=0\.1"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "needs is_causal=False"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, r"differ by .* nats .*it has final_logit_softcapping=30\.0"),
        ("phi", {}, "differ by .* nats between a pack and its own forward"),  # its head has a bias
        ("opt", {}, r"it has dropout=0\.1"),
        ("jamba", {"num_experts": 1}, "JambaMambaMixer cannot continue the state of a prompt"),
        ("gpt2", {}, "GPT2Model is not supported"),
        ("mamba", {}, "failed on a pack"),
        ("t5", {}, r"failed on a pack \(ValueError: Unrecognized configuration class [^\n]*\)$"),
    ],
)
def test_unsupported_architectures_are_refused_before_training(
    kind: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = saved(CONFIG_MAPPING[kind](**settings), tmp_path)
    with pytest.raises(ConfigError, match=f"^critic.path: .* cannot be trained.*{reason}"):
        check_packs(path, 512, "critic.path")


@pytest.mark.parametrize(("kind", "settings"), [*WITH_EXPERTS.items(), *EXPERTS_OF_DENSE.items()])
def test_experts_beside_layers_with_state_are_refused_by_name(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Also where one layer of many has experts."""
    config = tiny_config(kind, **settings)
    pattern = (
        rf"^model.path: .* cannot be trained: it has layers with state and experts \(\w+Experts\).*model_type={kind} "
    )
    with pytest.raises(ConfigError, match=pattern):
        check_packs(saved(config, tmp_path), 512)


@pytest.mark.parametrize("kind", [*EXPERTS_OF_DENSE])
def test_dense_models_of_the_same_type_are_accepted(kind: str, tmp_path: Path) -> None:
    check_packs(saved(tiny_config(kind, **DENSE[kind]), tmp_path), 512)


def test_experts_in_a_late_layer_are_found(tmp_path: Path) -> None:
    """A small copy has two layers, and both are dense here."""
    late = {"num_hidden_layers": 6, "layer_types": ["linear_attention", "full_attention"] * 3, "decoder_sparse_step": 6}
    config = tiny_config("qwen3_next", **{**WITH_EXPERTS["qwen3_next"], **late})
    with pytest.raises(ConfigError, match="Qwen3NextExperts"):
        check_packs(saved(config, tmp_path), 512)


LONGROPE = {"rope_type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512, "head_dim": 96}),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 512}),
    ],
    ids=["longrope", "dynamic"],
)
def test_rotary_factors_that_depend_on_the_pack_are_refused(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(CONFIG_MAPPING[kind](**settings), tmp_path)
    check_packs(path, 512)
    rope_type = settings["rope_parameters"]["rope_type"]
    with pytest.raises(ConfigError, match=rf"on sequences of 513 tokens: beyond 512 .*rope_type={rope_type}"):
        check_packs(path, 513)


def test_a_dynamic_rotary_embedding_scales_short_sequences_beside_long_ones() -> None:
    """Why it is refused: their log-probs would depend on what else is in the pack."""
    torch.manual_seed(0)
    model = random_model(tiny_config("llama", rope_parameters=DYNAMIC, max_position_embeddings=16)).eval()
    short, long = ([(3 * t + 5) % VOCABULARY for t in range(length)] for length in (10, 40))
    samples = [
        Sample(
            token_ids=np.array(ids),
            action_mask=np.arange(len(ids)) > 0,
            rollout_logprobs=np.zeros(len(ids) - 1),
            group=0,
            reward=0.0,
        )
        for ids in (short, long)
    ]
    first, all_of_them = batch_of(samples[:1]), batch_of(samples)
    alone = PackedPolicy(model)(pack(make_units(first, False, 1000), first), 1.0, False).logprobs
    both = pack(make_units(all_of_them, False, 1000), all_of_them)
    beside_long = PackedPolicy(model)(both, 1.0, False).logprobs[both.sample == 0]
    assert (alone - beside_long).abs().max() > 1e-2


def test_a_small_copy_has_a_layer_of_each_kind() -> None:
    gemma = small_copy(CONFIG_MAPPING["gemma3_text"](), sliding_window=3, no_such_setting=1)
    assert sorted(gemma.layer_types) == ["full_attention", "sliding_attention"] and gemma.num_hidden_layers == 2
    assert gemma.sliding_window == 3 and not hasattr(gemma, "no_such_setting")
    smollm = small_copy(CONFIG_MAPPING["smollm3"]())
    assert sorted(smollm.no_rope_layers) == [0, 1]
    qwen = small_copy(CONFIG_MAPPING["qwen2"](num_attention_heads=14, num_key_value_heads=2, hidden_size=896))
    assert (qwen.hidden_size, qwen.num_attention_heads, qwen.num_key_value_heads) == (128, 2, 1)
    assert qwen.vocab_size == 151936 and qwen.num_hidden_layers == 2


def test_the_check_draws_no_random_numbers_of_the_run(tmp_path: Path) -> None:
    path = saved(CONFIG_MAPPING["llama"](), tmp_path)
    before = torch.get_rng_state()
    check_packs(path, 512)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_path_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: no causal language model can be loaded"):
        check_packs(str(tmp_path), 512)
    assert isinstance(AutoConfig.from_pretrained(saved(CONFIG_MAPPING["llama"](), tmp_path)), PretrainedConfig)
