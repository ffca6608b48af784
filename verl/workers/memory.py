"""Memory of a training rank and of an engine, term by term, in bytes, computed from shapes.

N parameters, T packed tokens, A trained tokens of a pack, E hidden size, V vocabulary, c bytes of the compute dtype.
Every term states its source; `_attention` and `loss_chunk` must be kept in sync with `attention.py` and `logprobs.py`.
Ranks choose by it how many layers they recompute, and `toolrl plan` prints it. Dense decoders with gated MLPs; a test
compares the activations with those that autograd saves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from verl.lora import adapter_tensors
from verl.nf4 import BYTES as NF4_BYTES
from verl.nf4 import num_in_four_bits
from verl.workers.logprobs import LOGITS_AT_ONCE
from verl.workers.model import PackedCritic, PackedPolicy, decoder_layers, head_size
from verl.workers.pre_norm import selects_in_last_layer
from verl.workers.state import CHUNK
from verl.workers.state_cost import Parts, StateCost, state_cost
from verl.workers.state_memory import SavedState, saved_by_state

Terms = dict[str, float]

_HALF = 2  # bytes: bf16
MASTER = 4  # bytes: float32, independent of the compute dtype
_LOGIT_BYTES = 12  # per materialized logit, float32: itself, its exponential, their product
USED_SHARE = 0.9  # assumed, of a GPU: the rest is for its context, fragmentation and workspaces
# Freed blocks below 32 MiB that glibc retains, as a fraction of the activations: measured with and without
# MALLOC_MMAP_THRESHOLD_ (which releases them, at 30 % more CPU time).
_HEAP_SHARE = 0.65


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that determine its memory."""

    parameters: int  # tied weights counted once
    layer_parameters: int  # per layer (the mean), which is sharded as a unit; everything else is the root unit
    largest: int  # parameters of the largest tensor
    layers: int
    hidden: int
    heads: int
    query: int  # width of all query heads
    key: int  # width of all key heads
    intermediate: int
    vocabulary: int
    norms: int  # norms over the hidden size per layer
    head_norms: bool  # whether queries and keys are normalized
    selects: bool = True  # whether the last layer goes on with the trained positions alone (`pre_norm.py`)
    adapter: int = 0  # of the parameters, those of an adapter, trained alone; 0: all are trained
    largest_of_adapter: int = 0  # parameters of its largest tensor
    in_four_bits: int = 0  # of the parameters, those that every rank holds in NF4, not sharded
    states: StateCost | None = None  # of layers with state, if there are some
    output_gates: bool = False  # whether attention's output is multiplied by a gate that its query projection computes
    saved: Mapping[int, SavedState] = field(default_factory=dict)  # by one of them, by bytes of the compute dtype

    @property
    def parts(self) -> tuple[Parts, ...]:
        """Of each layer."""
        return (Parts(),) * self.layers if self.states is None else self.states.parts

    @property
    def attending(self) -> int:
        """Layers with attention, whose keys and values are cached."""
        return self.layers if self.states is None else self.states.attending

    @property
    def with_state(self) -> int:
        """Layers with state. In some models a layer has attention beside it."""
        return sum(each.state for each in self.parts)

    @property
    def trained(self) -> int:
        return self.adapter or self.parameters

    @property
    def head_size(self) -> int:
        return self.query // self.heads

    @property
    def root_parameters(self) -> int:
        """Embeddings, final norm and head, gathered for the whole forward and backward."""
        return self.parameters - self.layers * self.layer_parameters


@dataclass(frozen=True, slots=True)
class PackShape:
    """One pack of groups that share a prompt: n responses of R tokens after a prompt of P."""

    tokens: float
    trained: float
    segments: float = 0  # responses with a shared prefix, each of which reads the prefix's keys and values
    prompt: float = 0
    response: float = 0

    @classmethod
    def of(cls, tokens: float, prompt: float, response: float, responses: float, shared: bool) -> PackShape:
        together = shared and responses > 1
        group = prompt + responses * response if together else responses * (prompt + response)
        segments = responses * tokens / group
        return cls(tokens, segments * response, segments if together else 0, prompt, response)

    @property
    def all_segments(self) -> float:
        """Prompts and responses; whole sequences where no prompt is shared."""
        if self.segments:
            return self.segments + (self.tokens - self.trained) / max(1.0, self.prompt)
        return self.tokens / max(1.0, self.prompt + self.response)

    @property
    def fewest_trained(self) -> float:
        """Trained tokens where responses have one token; 0 if prompts are not shared."""
        if not self.segments:
            return 0.0
        return self.segments * self.tokens / (self.tokens - self.trained + self.segments)

    def with_trained(self, trained: float) -> PackShape:
        """As many tokens with responses of another length. The shorter they are, the more groups and prompts it has."""
        if not self.segments or self.tokens == self.trained:
            return replace(self, trained=trained)
        segments = self.segments * (self.tokens - trained) / (self.tokens - self.trained)
        return replace(self, trained=trained, segments=segments, response=trained / segments)


@dataclass(frozen=True, slots=True)
class RankSettings:
    compute: int  # bytes of the compute dtype
    shards: int  # ranks that each parameter is sharded over
    checkpointed: int = 0  # layers that are recomputed in the backward, at most all of a model's
    on_cpu: bool = False
    fused: bool = False  # model.fused_kernels, with liger-kernel installed
    kept_bytes: int = 0  # fused logits that may be kept for the backward


def shape_of(module: PackedPolicy | PackedCritic, config: Any) -> ModelShape:
    """config: of the decoder, in transformers"""
    layers = decoder_layers(module)
    named = dict(layers[0].named_parameters())
    width = head_size(config)
    decoder = module.model.get_decoder() if isinstance(module, PackedPolicy) else module.decoder
    quantized, adapter = num_in_four_bits(module), [each.numel() for _, each in adapter_tensors(module)]
    in_layers = sum(each.numel() for layer in layers for each in layer.parameters())
    return ModelShape(
        parameters=sum(each.numel() for each in module.parameters()) + quantized,
        layer_parameters=(in_layers + sum(map(num_in_four_bits, layers))) // len(layers),
        largest=max(each.numel() for each in module.parameters()),
        layers=len(layers),
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        query=config.num_attention_heads * width,
        key=(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * width,
        intermediate=_mlp_width(layers) or config.intermediate_size,
        vocabulary=config.vocab_size if isinstance(module, PackedPolicy) else 1,  # a critic returns one value
        norms=sum("norm" in name and each.numel() == config.hidden_size for name, each in named.items()),
        head_norms=any("q_norm" in name for layer in layers for name, _ in layer.named_parameters()),
        selects=selects_in_last_layer(decoder),
        adapter=sum(adapter),
        largest_of_adapter=max(adapter, default=0),
        in_four_bits=quantized,
        states=state_cost(decoder),
        output_gates=_has_output_gates(layers, config.num_attention_heads * width),
        saved=saved_by_state(decoder),
    )


def _mlp_width(layers: Sequence[nn.Module]) -> int | None:
    """Inputs of an MLP's last projection: some models compute them from `intermediate_size`. None without an MLP."""
    modules = (each for layer in layers for each in layer.modules())
    mlp = next((each for each in modules if type(each).__name__.endswith("MLP")), None)
    projections: list[Any] = [each for each in mlp.children() if hasattr(each, "in_features")] if mlp else []
    return projections[-1].in_features if projections else None


def _has_output_gates(layers: Sequence[nn.Module], query: int) -> bool:
    named = (pair for layer in layers for pair in layer.named_modules())
    return any(name.endswith("q_proj") and getattr(each, "out_features", 0) == 2 * query for name, each in named)


def _attention(shape: ModelShape, pack: PackShape, c: int, on_cpu: bool) -> float:
    """Saved by one layer's attention: q, k, v, output, a float32 per query and head.

    `by_varlen` saves the gathered k and v, a prefix per response, and its output is the next linear layer's input.
    `by_segments` (on a CPU, or in float32) keeps k and v beside a copy of them per response with its prefix, on a GPU
    for every query head, and on CPU the mask of the kernel.
    """
    if c == _HALF and not on_cpu:
        gathered = pack.segments * (pack.prompt + pack.response) or pack.tokens
        return pack.tokens * (shape.query * c + 4 * shape.heads) + 2 * gathered * shape.key * c
    seen, width = pack.segments * (pack.prompt + pack.response), shape.key if on_cpu else shape.query
    copies = 2 * seen * width * c
    masks = seen * pack.response * c * on_cpu
    return pack.tokens * (2 * (shape.query + width) * c + 4 * shape.heads) + copies + masks


def _layer(shape: ModelShape, pack: PackShape, settings: RankSettings, parts: Parts, selects: bool = False) -> float:
    """Saved by one layer: norms save a float32 copy and the normalized input (fused: their input), linear layers their
    input, the gated MLP its gate, the gate's activation (not if fused), the other factor and the product.

    selects: whether the second norm and the MLP see the trained positions alone
    """
    c, fused = settings.compute, settings.fused
    norm = c if fused else 4 + c
    saved = pack.tokens * norm * (shape.norms - 1) * shape.hidden
    mlp = (c * shape.hidden + (3 if fused else 4) * shape.intermediate * c) * parts.mlp
    saved += (pack.trained if selects else pack.tokens) * (norm * shape.hidden + mlp)
    if parts.attention:
        head_norms = norm * shape.head_norms * (shape.query + shape.key)
        gates = 2 * shape.query * c * shape.output_gates
        saved += pack.tokens * (head_norms + shape.hidden * c + shape.query * c + gates)
        saved += _attention(shape, pack, c, settings.on_cpu)
    if parts.state:
        saved += shape.saved[c].num_bytes(pack.tokens, pack.all_segments)
    return saved


def _largest_layer(shape: ModelShape, pack: PackShape, settings: RankSettings) -> float:
    return max(_layer(shape, pack, settings, each) for each in {*shape.parts})


def activations(shape: ModelShape, pack: PackShape, settings: RankSettings) -> float:
    """Saved for one backward: layers (with checkpointing their inputs), final norm, loss inputs."""
    c, recomputed = settings.compute, min(settings.checkpointed, shape.layers)
    layers = recomputed * pack.tokens * shape.hidden * c
    kept = Counter(shape.parts[recomputed:])
    layers += sum(number * _layer(shape, pack, settings, each) for each, number in kept.items())
    if shape.selects and recomputed < shape.layers:
        parts = shape.parts[-1]
        layers += _layer(shape, pack, settings, parts, selects=True) - _layer(shape, pack, settings, parts)
    rotary = 2 * pack.tokens * shape.query / shape.heads * c
    read = pack.trained if shape.selects else pack.tokens
    last = read * (c if settings.fused else 4 + c) * shape.hidden
    return layers + rotary + last + pack.trained * shape.hidden * c


def loss_chunk(shape: ModelShape, pack: PackShape, settings: RankSettings) -> float:
    """The materialized logits and the values derived from them (fused: written over the logits, which may be kept)."""
    if (whole := pack.trained * shape.vocabulary * settings.compute) <= settings.kept_bytes:
        return whole
    at_once = min(LOGITS_AT_ONCE["cpu" if settings.on_cpu else "cuda"], pack.trained * shape.vocabulary)
    return at_once * (settings.compute if settings.fused else _LOGIT_BYTES)


def resident(shape: ModelShape, settings: RankSettings) -> Terms:
    """State of a trained model between phases: float32 master weights and AdamW's two moments; frozen weights."""
    frozen = settings.compute * (shape.parameters - shape.trained - shape.in_four_bits)
    return {
        "parameters": (MASTER * shape.trained + frozen) / settings.shards + NF4_BYTES * shape.in_four_bits,
        "optimizer": 2 * MASTER * shape.trained / settings.shards,
    }


def reference_model(shape: ModelShape, settings: RankSettings) -> float:
    return settings.compute * shape.parameters / settings.shards


def gathered(shape: ModelShape, settings: RankSettings) -> float:
    """The parameters of a forward in the compute dtype; also held by the canary of a weight sync."""
    sharded = settings.compute * (_root_gathered(shape, settings) + _layers_gathered(shape, settings))
    return sharded + _dequantized(shape, settings)


def scoring(shape: ModelShape, pack: PackShape, settings: RankSettings) -> Terms:
    """A forward without gradients: gathered parameters, one layer's intermediates, no kept logits."""
    settings = replace(settings, kept_bytes=0)
    return {
        "gathered": gathered(shape, settings),
        "activations": _largest_layer(shape, pack, settings),
        "loss chunk": loss_chunk(shape, pack, settings),
    }


def updating(shape: ModelShape, pack: PackShape, settings: RankSettings) -> Terms:
    """Peak of the backward, at its start in the loss: gradients of earlier packs, all saved activations, the gathered
    root unit with its gradient, and gathered layers.

    If the loss chunk is small, the peak is in a layer's backward: recomputed activations and gradients of its MLP. The
    first layers are recomputed, when the others' activations are gone.
    """
    c = settings.compute
    saved = activations(shape, pack, settings)
    recomputed = _largest_layer(shape, pack, settings) if settings.checkpointed >= shape.layers else 0.0
    in_layer = recomputed + 3 * pack.tokens * shape.intermediate * c
    terms = {
        "gradients": MASTER * shape.trained / settings.shards,
        "gathered": c
        * ((1 if shape.adapter else 2) * _root_gathered(shape, settings) + _layers_gathered(shape, settings))
        + _dequantized(shape, settings),
        "activations": saved,
        "loss chunk": max(loss_chunk(shape, pack, settings), in_layer),
    }
    return {**terms, "allocator": _HEAP_SHARE * (saved + recomputed)} if settings.on_cpu else terms


def layers_to_checkpoint(
    shape: ModelShape, pack: PackShape, settings: RankSettings, device_bytes: float, held_bytes: float
) -> int:
    """The fewest layers to recompute so that an update fits on a GPU, whatever the length of the responses; all of them
    if nothing suffices. With layers with state, also if segments have only `CHUNK` tokens on average.

    held_bytes: of the GPU, by parameters and optimizer states
    """
    room = USED_SHARE * device_bytes - held_bytes
    # Memory is linear in the trained tokens between these: their logits are kept, are no longer kept, or fill a chunk.
    kept = settings.kept_bytes // (shape.vocabulary * settings.compute)
    chunk = LOGITS_AT_ONCE["cuda"] / shape.vocabulary
    fewest, most = pack.fewest_trained, pack.trained
    packs = [pack, *(pack.with_trained(min(max(each, fewest), most)) for each in (fewest, kept, kept + 1, chunk))]
    if shape.states is not None:  # which keep more, the more segments there are
        packs.append(PackShape.of(pack.tokens, CHUNK / 2, CHUNK / 2, 1, shared=False))

    def needed(layers: int) -> float:
        candidate = replace(settings, checkpointed=layers)
        return max(sum(updating(shape, each, candidate).values()) for each in packs)

    return next((layers for layers in range(shape.layers) if needed(layers) <= room), shape.layers)


def _layers_gathered(shape: ModelShape, settings: RankSettings) -> int:
    """Two layers, one of them prefetched; all layers if nothing is sharded or frozen (no resharding), then of what is
    trained alone."""
    if settings.shards == 1:
        return 2 * shape.adapter // shape.layers if shape.adapter else shape.layers * shape.layer_parameters
    return 2 * (shape.layer_parameters - shape.in_four_bits // shape.layers)


def _root_gathered(shape: ModelShape, settings: RankSettings) -> int:
    """A rank that holds frozen weights whole does not gather them."""
    return 0 if settings.shards == 1 and shape.adapter else shape.root_parameters


def _dequantized(shape: ModelShape, settings: RankSettings) -> float:
    """One weight of a layer that is held in four bits, in bfloat16 and in the compute dtype."""
    return (_HALF + settings.compute) * shape.hidden * shape.intermediate * bool(shape.in_four_bits)


def optimizer_step(shape: ModelShape, settings: RankSettings) -> Terms:
    """Fused AdamW: gradients, and no temporaries."""
    return {"gradients": MASTER * shape.trained / settings.shards}


def weight_export(shape: ModelShape, settings: RankSettings, bucket: float = 0.0, sends_adapter: bool = False) -> Terms:
    """The largest full tensor, as they are exported one by one; two buckets.

    A frozen weight that is not sharded is not copied; one with an adapter is merged with it in float32.
    """
    copied = settings.shards > 1
    merged = (settings.compute * (copied or shape.in_four_bits > 0) + 2 * MASTER) * shape.hidden * shape.intermediate
    if not shape.adapter:
        largest = MASTER * shape.largest
    elif sends_adapter:
        largest = MASTER * shape.largest_of_adapter
    else:
        largest = max(settings.compute * shape.largest * copied, merged)
    return {"largest tensor": largest, "buckets": 2 * bucket}


def cache_per_token(shape: ModelShape, dtype: int) -> int:
    """Bytes of one token's keys and values over all layers with attention."""
    return 2 * shape.attending * shape.key * dtype


def cache_per_sequence(shape: ModelShape, dtype: int) -> int:
    """Bytes of a sequence's states, which do not grow with it: vLLM keeps them in the dtype of the model.

    Its blocks are as large as the largest of attention and states; what they leave empty is not counted.
    """
    return 0 if shape.states is None else shape.states.elements * dtype


def pack_tokens(limit: int, group: float, groups: int, ranks: int) -> float:
    """Expected tokens of the largest pack: a rank's share of a mini-batch, at most `limit`."""
    return min(float(limit), group * math.ceil(groups / ranks))
