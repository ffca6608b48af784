"""The trained models over packs: a policy that returns log-probs and a critic that returns values.

Each is one module whose forward does everything, so that FSDP gathers all parameters in use, the output head included.
Shape legend: A trained tokens, C context tokens whose log-probs are in the loss.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.batch.packed import PackedBatch
from verl.errors import ConfigError
from verl.lora import base_tensors
from verl.pretrained import is_multimodal, language_weights, read_causal_lm
from verl.workers import attention
from verl.workers.logprobs import logprobs_of, token_logprobs, top_tokens
from verl.workers.pre_norm import select_in_last_layer, selects_in_last_layer
from verl.workers.state import separate_states


class PolicyOutput(NamedTuple):
    logprobs: Tensor  # [A + C]
    entropy: Tensor | None  # [A + C], if requested
    top: Tensor | None = None  # [A, K] log-probs of the pack's `top_ids`


def load_causal_lm(
    path: str, dtype: torch.dtype = torch.float32, key: str = "model.path", empty: bool = False
) -> PreTrainedModel:
    """A decoder-only model from a folder or a hub name, set up for packs; towers for pictures are frozen.

    As `read_causal_lm`.
    """
    attention.register()
    model = read_causal_lm(path, dtype, key, attention.PACKED, empty)
    trained = {each for _, each in language_weights(model, model.named_parameters())}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)
    return model


def set_up_for_packs(decoder: nn.Module) -> None:
    """Raises ConfigError for a layer that cannot compute packs."""
    separate_states(decoder)
    select_in_last_layer(decoder)


def hidden_states(decoder: nn.Module, packed: PackedBatch) -> Tensor:
    """[A, E] the last hidden states that predict the trained tokens."""
    selects = selects_in_last_layer(decoder)
    output = decoder(
        input_ids=packed.token_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,  # with a cache, transformers would treat the pack as one sequence
        segments=packed.segments,
        **({"source": packed.source} if selects else {}),
    )
    states: Tensor = output.last_hidden_state.squeeze(0)
    return states if selects else states[packed.source]


class PackedPolicy(nn.Module):
    """A causal language model that scores the trained tokens of a pack.

    fused: whether log-probs use Triton kernels where the model is on a GPU
    kept_bytes: then, logits of at most this size are kept for the backward
    """

    def __init__(self, model: PreTrainedModel, fused: bool = True, kept_bytes: int = 0) -> None:
        super().__init__()
        self.model = model
        set_up_for_packs(model.get_decoder())
        self.logit_divisor = logit_divisor(model.config.get_text_config())
        self.fused = fused
        self.kept_bytes = kept_bytes

    def forward(
        self, packed: PackedBatch, temperature: float, with_entropy: bool, top_k: int = 0, num_ids: int | None = None
    ) -> Any:
        """A `PolicyOutput`; with top_k, what `top_tokens` returns."""
        hidden_AE = hidden_states(self.model.get_decoder(), packed)
        head_VE = self.model.get_output_embeddings().weight
        if top_k:
            return top_tokens(hidden_AE, head_VE, top_k, num_ids, temperature * self.logit_divisor)
        fused = self.fused and hidden_AE.device.type != "cpu"
        options = temperature * self.logit_divisor, with_entropy, fused, self.kept_bytes
        logprobs_A, entropy_A = token_logprobs(hidden_AE, head_VE, packed.target, *options)
        if packed.top_ids is None:
            return PolicyOutput(logprobs_A, entropy_A)
        trained = slice(len(packed.top_ids))
        of_trained = hidden_AE[trained], head_VE, packed.target[trained], logprobs_A[trained]
        top_AK = logprobs_of(packed.top_ids, *of_trained, options[0])
        return PolicyOutput(logprobs_A, entropy_A, top_AK)


class PackedCritic(nn.Module):
    """The same decoder with a zero-initialized value head: [A] the value of the state before each trained token."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.decoder = model.get_decoder()
        set_up_for_packs(self.decoder)
        self.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False, dtype=model.dtype)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, packed: PackedBatch) -> Tensor:
        values_A: Tensor = self.value_head(hidden_states(self.decoder, packed)).squeeze(-1)
        return values_A.float()


def decoder_layers(module: PackedPolicy | PackedCritic) -> list[nn.Module]:
    """The layers to shard one by one. Raises ConfigError for a model without `layers`."""
    decoder: Any = module.model.get_decoder() if isinstance(module, PackedPolicy) else module.decoder
    if not hasattr(decoder, "layers"):
        raise ConfigError(f"{type(decoder).__name__} is not supported: a decoder needs an attribute `layers`")
    return list(decoder.layers)


def towers(module: PackedPolicy | PackedCritic) -> list[nn.Module]:
    """Parts of a multimodal model that text does not pass: frozen, and sharded apart so that no pass gathers them."""
    if isinstance(module, PackedCritic) or not is_multimodal(module.model.config):
        return []
    decoder = module.model.get_decoder()
    return [each for each in module.model.base_model.children() if each is not decoder and [*each.parameters()]]


def checkpoint_layers(module: PackedPolicy | PackedCritic, number: int) -> None:
    """Recompute the first layers in the backward instead of keeping their activations."""
    decoder: Any = module.model if isinstance(module, PackedPolicy) else module.decoder
    decoder.gradient_checkpointing_enable({"use_reentrant": False})
    layers: list[Any] = decoder_layers(module)[number:]
    for layer in layers:
        layer.gradient_checkpointing = False


def logit_divisor(config: PretrainedConfig) -> float:
    """What a model divides the logits of its head by, as a temperature does: Granite, Falcon-H1 and Cohere."""
    factor = getattr(config, "lm_head_multiplier", 1.0) * getattr(config, "logit_scale", 1.0)
    return float(getattr(config, "logits_scaling", 1.0) / factor)


def head_size(config: PretrainedConfig) -> int:
    """Width of one attention head; all heads together may be wider or narrower than the hidden states."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def hf_named_parameters(policy: PackedPolicy) -> Iterator[tuple[str, nn.Parameter]]:
    """(name as in transformers and vLLM, parameter) of what text passes, aliases of tied weights included, without an
    adapter.

    Every alias is listed: an engine that does not receive a tied head silently keeps the stale one.
    """
    named = policy.model.named_parameters(remove_duplicate=False)
    yield from base_tensors(policy.model, language_weights(policy.model, named))
