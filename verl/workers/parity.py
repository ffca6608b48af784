"""Checks that a model computes the same log-probs in packs as for single sequences.

A model whose attention, layers or output head do more than training implements would silently get wrong log-probs. So
every architecture is checked before training: a small random copy scores one pack with a shared prompt, and the same
sequences one by one through transformers' own forward with eager attention.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.batch.packing import make_units, pack
from verl.batch.samples import Sample, batch_of, sample_from_completion
from verl.errors import ConfigError
from verl.pretrained import class_of, is_multimodal, read_model_config
from verl.text import in_short
from verl.types import Completion, FinishReason
from verl.workers import attention
from verl.workers.model import PackedPolicy, decoder_layers, head_size
from verl.workers.state import experts_beside_state

_PROMPT, _RESPONSES = (3, 4, 5, 6, 7, 8, 9, 10, 11), ((12, 13, 14, 15, 16), (17, 18, 19, 20, 21, 22, 23))
_SIZES = {
    "vocab_size": 32,
    "pad_token_id": 0,  # transformers warns about special tokens beyond the vocabulary
    "bos_token_id": 0,
    "eos_token_id": 0,
    "moe_intermediate_size": 16,
    "sliding_window": 4,  # this and the next: shorter than the prompt and the responses
    "attention_chunk_size": 4,
    "mamba_chunk_size": 4,
    "chunk_size": 4,
}
_EXPERTS = "experts"  # in the names of settings
_DEPTHS = ("depth", "num_hidden_layers")  # of towers
_TOLERANCE = 1e-3  # nats; float32 rounding accounts for 1e-5
# Settings that transformers' models apply outside the attention function, with their neutral values.
_NAMED = {
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "attention_chunk_size": None,
    "dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
}


def check_packs(path: str, longest: int, key: str = "model.path") -> None:
    """Raises ConfigError, with the reason, for a model whose log-probs in packs would be wrong.

    longest: tokens of the longest sequence; key: the configuration key of `path`
    """
    config = read_model_config(path, key)
    refused = f"{key}: {next(iter(config.architectures or [type(config).__name__]))} cannot be trained"
    _check_rope(config.get_text_config(), longest, refused)
    try:
        _check_experts(config)
        gap = packing_gap(small_copy(config, **_SIZES))
    except ConfigError as error:
        raise ConfigError(f"{refused}: {error}") from error
    except Exception as error:  # unsupported architectures fail in many ways
        raise ConfigError(f"{refused}: a small copy of it failed on a pack ({in_short(error)})") from error
    if not gap <= _TOLERANCE:  # NaN included
        text = config.get_text_config()
        named = [each for each, without in _NAMED.items() if getattr(text, each, without) != without]
        raise ConfigError(
            f"{refused}: log-probs of a small copy differ by {gap:.2g} nats between a pack and its own forward"
            f"{''.join(f'; it has {each}={getattr(text, each)}' for each in named)} (docs/training.md)"
        )


def _check_experts(config: PretrainedConfig) -> None:
    """Raises ConfigError for a mixture of experts with layers with state; dense models of its model_type have none."""
    if not any(_EXPERTS in name for name in config.get_text_config().to_dict()):
        return
    for each in (small_copy(config, **_SIZES), config):  # a small copy shows whether there is a state at all
        with torch.device("meta"):
            found = experts_beside_state(class_of(each).from_config(each))
        if found:
            raise ConfigError(
                f"it has layers with state and experts ({found}). vLLM does not load their weights again as "
                "they are: in its CPU build 0.32 identical ones changed log-probs by 1.0 to 1.4 nats in qwen3_5_moe "
                f"and qwen3_next; other families have not run. Models of model_type={config.model_type} without "
                "experts are trained (docs/training.md)"
            )


def _check_rope(config: PretrainedConfig, longest: int, refused: str) -> None:
    """transformers chooses rotary factors per forward pass, by its longest sequence: they depend on the packing."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = each.get("rope_type")
        if kind not in ("longrope", "dynamic"):
            continue
        short = each["original_max_position_embeddings"] if kind == "longrope" else config.max_position_embeddings
        if longest > short:
            raise ConfigError(
                f"{refused} on sequences of {longest} tokens: beyond {short} its rotary embedding (rope_type={kind}) "
                f"depends on the longest sequence of a pack. Limit prompt and response to {short} tokens together"
            )


def packing_gap(config: PretrainedConfig) -> float:
    """Max abs difference, in nats, between the log-probs of a random model in a pack and on single sequences. The pack
    is computed in training mode, so dropout is detected as well."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = random_model(config)
        policy = PackedPolicy(model.train())
        decoder_layers(policy)
        samples = [*(_sample(_PROMPT, each, 0) for each in _RESPONSES), _sample(_PROMPT[:1], _PROMPT[::-1], 1)]
        batch = batch_of(samples)
        packed = pack(make_units(batch, share_prefix=True, max_tokens=1000), batch)
        with torch.no_grad():
            found_A = policy(packed, 1.0, False).logprobs
            model.eval().set_attn_implementation("eager")
            expected = [_own_logprobs(model, sample) for sample in samples]
    gaps = [(found_A[packed.sample == number] - each).abs().max() for number, each in enumerate(expected)]
    return float(torch.stack(gaps).max())


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model for packs, with weights large enough to expose anything left out, biases and sinks included."""
    attention.register()
    model: PreTrainedModel = class_of(config).from_config(config, attn_implementation=attention.PACKED)
    for parameter in model.float().parameters():
        parameter.data += torch.randn_like(parameter) / max(2.0, parameter.shape[-1] ** 0.5)
    return model


def _sample(prompt: tuple[int, ...], response: tuple[int, ...], group: int) -> Sample:
    completion = Completion(response, (0.0,) * len(response), FinishReason.STOP, 0)
    return sample_from_completion(prompt, completion, group)


def _own_logprobs(model: PreTrainedModel, sample: Sample) -> Tensor:
    """[response tokens] log-probs by the model's own forward."""
    ids, trained = torch.from_numpy(sample.token_ids).long(), torch.from_numpy(sample.action_mask)
    logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    of_ids: Tensor = logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1)
    return of_ids[trained[1:]]


def small_copy(config: PretrainedConfig, **changes: Any) -> PretrainedConfig:
    """The same architecture with few heads of the same size, and one layer of each kind in its per-layer settings.

    changes: new values of settings; those that the configuration does not have are ignored
    A multimodal model's is nested; its towers keep one layer.
    """
    if is_multimodal(config):
        nested = {name: each for name, each in config.to_dict().items() if isinstance(each, dict)}
        shallow = {name: {**each, **{size: 1 for size in _DEPTHS if size in each}} for name, each in nested.items()}
        text = {"text_config": small_copy(config.get_text_config(), **changes).to_dict()}
        return type(config).from_dict({**config.to_dict(), **shallow, **text})
    heads = min(2, config.num_attention_heads)
    grouped = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) < config.num_attention_heads
    sizes = {"hidden_size": heads * head_size(config), "intermediate_size": 64, "max_window_layers": 1}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 1 if grouped else heads}
    sizes |= _heads_with_state(config, sizes["hidden_size"])
    before, layers = config.to_dict(), config.num_hidden_layers
    by_layer = {name: each for name, each in before.items() if isinstance(each, list) and len(each) == layers}
    kinds = dict(zip(zip(*by_layer.values(), strict=True), range(layers), strict=False))
    kept = sorted(kinds.values()) if len(kinds) > 1 else list(range(min(2, layers)))
    by_layer = {name: [each[number] for number in kept] for name, each in by_layer.items()}
    wanted = {**sizes, **by_layer, **changes, "num_hidden_layers": len(kept)}
    named = {config.attribute_map.get(name, name): value for name, value in wanted.items()}
    known = {name: value for name, value in named.items() if before.get(name) is not None}
    return type(config).from_dict({**before, **known})


def _heads_with_state(config: PretrainedConfig, hidden: int) -> dict[str, int]:
    """A few heads of the same size in layers with state; Mamba2 has as many as fill its inner width."""
    sizes = {"linear_num_heads": 2, "mamba_num_heads": 2, "n_groups": 1, "mamba_n_groups": 1}
    if keys := getattr(config, "linear_num_key_heads", None):
        sizes |= {"linear_num_key_heads": 1, "linear_num_value_heads": config.linear_num_value_heads // keys}
    if size := getattr(config, "mamba_d_head", None):
        width = 2 * size if getattr(config, "mamba_d_ssm", None) else config.mamba_expand * hidden
        sizes |= {"mamba_d_ssm": width, "mamba_n_heads": width // size}
    return sizes
